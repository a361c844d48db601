"""`python -m bridge.parity --model DIR`: the same tokens scored by the trainer and by vLLM.

Three pairs on one set of tokens, sampled by the engine from the policy's own flow:

    policy       the policy's flow on both sides: what a run's importance ratios see
    bf16_floor   BF16 on both sides: what two implementations of one model differ by
    bf16_fp8     BF16 training against the policy's rollout: the gap of a mixed flow

of each: mean and largest |logprob(trainer) - logprob(engine)| in nats, k3 = E[exp(d) - 1 - d] with d = trainer - engine,
the share of tokens within 1e-5, and mean |d| by position.  Prints a table; `--json` writes the numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jetrl_jax.cli import check_output_files, run_entry_point
from jetrl_jax.errors import UserError
from jetrl_jax.rl.metrics import mismatch_metrics

if TYPE_CHECKING:
    from jetrl_jax.policy import Policy

FIGURES = ("logprob_abs_mean", "logprob_abs_max", "k3")
EQUAL = 1e-5
BUCKETS = 4
Logprobs = Sequence[np.ndarray]  # one float32 [length] per sequence, entry 0 meaningless


def gap(trainer: Logprobs, engine: Logprobs) -> dict[str, Any]:
    """The figures of one pair; positions in `BUCKETS` equal ranges of the longest sequence, [first, last, mean |d|, tokens]."""
    differences = [np.asarray(ours[1:], np.float64) - theirs[1:] for ours, theirs in zip(trainer, engine, strict=True)]
    flat = np.concatenate(differences)
    metrics = mismatch_metrics(flat, np.zeros_like(flat), np.ones(flat.shape, bool), np.zeros(flat.shape, int))
    where = np.concatenate([np.arange(1, len(d) + 1) for d in differences])
    size = np.abs(flat)
    edges = np.linspace(1, where.max() + 1, min(BUCKETS, int(where.max())) + 1).astype(int)
    ranges = [(int(low), int(high) - 1, (where >= low) & (where < high)) for low, high in itertools.pairwise(edges)]
    return {
        "tokens": int(flat.size),
        **{name: metrics[f"mismatch/{name}"] for name in FIGURES},
        "equal_share": float((size <= EQUAL).mean()),
        "by_position": [[low, high, float(size[inside].mean()), int(inside.sum())] for low, high, inside in ranges if inside.any()],
    }


def measure(policy: Policy, sequences: int, seed: int = 0) -> dict[str, dict[str, Any]]:
    """{pair: figures} of a policy; starts vLLM once per flow, in this process or as `vllm.mode` says.

    Raises:
      UserError: vLLM is missing, or cannot hold the model.
    """
    from bridge.engine.factory import build_vllm_engine
    from jetrl_jax.config_io import override_config
    from jetrl_jax.policy import build_policy
    from jetrl_jax.rollout.engine import Request, SamplingParams

    rollout = policy.config.rollout
    rng = np.random.default_rng(seed)
    vocab = policy.model.config.vocab_size
    prompts = [rng.integers(0, vocab, int(rng.integers(1, rollout.max_prompt_tokens + 1))).tolist() for _ in range(sequences)]
    requests = [Request(i, ids, seed + i) for i, ids in enumerate(prompts)]
    sampling = SamplingParams(1.0, rollout.max_completion_tokens, tuple(policy.tokenizer.eos_ids), seed)
    bf16 = build_policy(override_config(policy.config, ["precision.preset=bf16"]), model=policy.model, tokenizer=policy.tokenizer)
    flows = {"policy": policy, "bf16": bf16}

    tokens: list[list[int]] = []
    engine_side, trainer_side = {}, {}
    for name, flow in flows.items():
        published = _published(flow)
        engine = build_vllm_engine(flow.model, flow.plan, flow.config)
        try:
            engine.load_weights(published, 0)
            if not tokens:
                answers = engine.generate(requests, sampling)
                tokens = [[*answer.prompt_ids.tolist(), *answer.completion_ids.tolist()] for answer in answers]
            engine_side[name] = engine.score(tokens)
        finally:
            engine.close()
        trainer_side[name] = _trainer_scores(flow, published, tokens)
    return {
        "policy": gap(trainer_side["policy"], engine_side["policy"]),
        "bf16_floor": gap(trainer_side["bf16"], engine_side["bf16"]),
        "bf16_fp8": gap(trainer_side["bf16"], engine_side["policy"]),
    }


def table(pairs: dict[str, dict[str, Any]]) -> str:
    """The figures as aligned text."""
    lines = [f"{'pair':<12}{'tokens':>8}{'mean |d|':>11}{'max |d|':>11}{'k3':>11}{'equal':>8}   mean |d| by position"]
    for name, row in pairs.items():
        positions = "  ".join(f"{low}-{high}: {mean:.1e}" for low, high, mean, _ in row["by_position"])
        figures = "".join(f"{row[key]:>11.2e}" for key in FIGURES)
        lines.append(f"{name:<12}{row['tokens']:>8}{figures}{row['equal_share']:>8.1%}   {positions}")
    return "\n".join(lines)


def _published(policy: Policy) -> Any:
    from jetrl_jax.policy import published_weights

    return published_weights(policy)


def _trainer_scores(policy: Policy, published: Any, tokens: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The trainer's log-probabilities with the weights its forward multiplies; padded to one length, compiled once."""
    from bridge.engine.factory import trainer_scorer
    from jetrl_jax.precision import jit

    weights = jit(policy.plan.frozen_weights)(policy.params, published)
    score, longest = trainer_scorer(policy.model), max(len(ids) for ids in tokens)
    return [score(weights, [*ids, *[0] * (longest - len(ids))])[: len(ids)] for ids in tokens]


def main(argv: list[str]) -> int:
    """Parses the command line, measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m bridge.parity", description="Score the same tokens on trainer and vLLM.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="DIR", help="run directory (its latest checkpoint, its flow)")
    source.add_argument("--model", metavar="DIR", help="Hugging Face directory; in BF16 unless --set precision.preset says otherwise")
    parser.add_argument("--sequences", type=int, default=32, help="sequences that are sampled and scored")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="change a field of the config")
    arguments = parser.parse_args(argv)
    if arguments.sequences < 1:
        raise UserError(f"parity: nothing to score: got --sequences {arguments.sequences}, expected at least 1.")
    check_output_files("parity", arguments.json)

    from bridge.engine.factory import require_vllm
    from jetrl_jax.policy import load_policy

    require_vllm()
    # vLLM samples, whatever engine the run had; a gap is what this command measures, not a reason to stop
    overrides = ["rollout.engine=vllm", "vllm.on_mismatch=warn", *arguments.overrides]
    pairs = measure(load_policy(arguments.run or arguments.model, overrides), arguments.sequences)
    print(table(pairs))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(pairs, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_entry_point(main)
