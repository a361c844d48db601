"""How sure a policy can be of each token beside a frozen final norm and head, whatever its adapters do.

    logits = H (w * x),   |x| <= sqrt(D)       x: the hidden state after the norm's division, w: its weights

log p(token) is concave in x, so that its tangent at any x bounds it over the ball from above; the x is found
by projected gradients.  A task's accuracy at temperature 1 is at most the mean over its held-out answers of
the product of their tokens' bounds.

    python tests/benchmarks/frozen_head.py runs/tiny_lora_cpu
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from bridge.hf.read import load_checkpoint
from jetrl_jax.config.load import load_config
from jetrl_jax.tasks.registry import build_task
from jetrl_jax.text.tokenizer import build_tokenizer


def largest_logprobs(head: np.ndarray, norm: np.ndarray, iterations: int = 3000) -> np.ndarray:
    """[V]: an upper bound of each token's log-probability; head [V, D] and norm [D], float64."""
    rows, radius = head * norm, np.sqrt(len(norm))
    x, step = np.zeros_like(rows), 1 / np.linalg.norm(rows, 2) ** 2
    for _ in range(iterations):
        gradient, value = _slope(rows, x)
        x = x + step * gradient
        x *= np.minimum(1, radius / np.linalg.norm(x, axis=1, keepdims=True))
    gradient, value = _slope(rows, x)
    tangent = value + radius * np.linalg.norm(gradient, axis=1) - np.sum(gradient * x, axis=1)
    return np.asarray(np.minimum(tangent, 0.0))


def _slope(rows: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradient [V, D] and value [V] of log p(token v) at x[v]."""
    logits = x @ rows.T
    logits -= logits.max(1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return rows - np.exp(logprobs) @ rows, np.diagonal(logprobs)


def main() -> None:
    """Prints the bounds of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory with adapters; without, its last head is taken")
    run = parser.parse_args().run
    config = load_config(run / "config.yaml")
    trained = run / "export"  # of all weights, whose head is not frozen
    sizes, arrays = load_checkpoint(trained if trained.is_dir() else run / "base")
    head = "embed_tokens.weight" if sizes.tie_word_embeddings else "lm_head.weight"
    bounds = largest_logprobs(*(np.asarray(arrays[name], np.float64) for name in (head, "norm.weight")))
    tokenizer, task = build_tokenizer(config.tokenizer, None), build_task(config.task, config.seed)
    tokens = [[*tokenizer.encode(str(example.answer)), tokenizer.eos_ids[0]] for example in task.eval]
    used = sorted({token for answer in tokens for token in answer})
    print(
        f"probability of a token: at most {np.exp(bounds[used].min()):.3f} to {np.exp(bounds[used].max()):.3f}"
    )
    accuracy = np.mean([np.exp(bounds[answer].sum()) for answer in tokens])
    print(f"accuracy at temperature 1, {len(tokens)} held-out answers: at most {accuracy:.3f}")


if __name__ == "__main__":
    main()
