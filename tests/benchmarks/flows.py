"""How far rollout and training are apart in each precision flow, on the same tokens: ``make bench-flows``.

Reads a run (its latest checkpoint and config), samples completions of held-out prompts once with its engine,
and scores exactly these tokens twice in every flow, from the same masters: with the engine's program (cached
decode over published weights, token by token) and with the trainer's (one packed forward).  Prints |Δlogprob|
and k3 of both, with `numerics.exact` on and off.

    python tests/benchmarks/flows.py runs/tiny_cpu
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetrl_jax.commands.mismatch import held_out_completions
from jetrl_jax.config.load import load_config, override_config
from jetrl_jax.models import vocabulary
from jetrl_jax.models.cache import empty_cache
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.kv_cache import KVCalibration
from jetrl_jax.precision.parameters import jit
from jetrl_jax.rl import batching
from jetrl_jax.rl.metrics import mismatch_metrics
from jetrl_jax.rollout.types import Trajectory
from jetrl_jax.runs.policy import Policy, build_policy, kv_scales, load_policy, published_weights
from jetrl_jax.training.optimizer import build_optimizer
from jetrl_jax.training.programs import PolicyPrograms

PRESETS = ("bf16", "fp16", "fp8_unified", "fp8_forward", "fp8_rollout_only")
SHOWN = ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "mismatch/k3")


def engine_logprobs(policy: Policy, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """Logprob of each completion token by cached decode: one token of every sequence at a time."""
    model, temperature = policy.model, policy.config.rollout.temperature
    graphdef = nnx.graphdef(model)
    ids = np.zeros((len(trajectories), policy.config.max_sequence_tokens), np.int32)
    for row, t in enumerate(trajectories):
        whole = np.concatenate([t.prompt_ids, t.completion_ids])
        ids[row, : len(whole)] = whole

    def program(weights: nnx.State, ids: jax.Array) -> jax.Array:
        decoder: Decoder = nnx.merge(graphdef, weights)

        def one(cache, position):
            places = jnp.full((ids.shape[0], 1), position, jnp.int32)
            hidden, cache = decoder.extend(jax.lax.dynamic_index_in_dim(ids, position, 1), places, cache)
            logits = vocabulary.scale_logits(
                decoder.logits(hidden[:, 0]), temperature, exact=decoder.numerics.exact
            )
            following = jax.lax.dynamic_index_in_dim(ids, position + 1, 1, keepdims=False)
            return cache, vocabulary.token_logprobs(logits, following, exact=decoder.numerics.exact)

        cache = empty_cache(decoder.config, decoder.numerics, ids.shape[0], ids.shape[1])
        return jax.lax.scan(one, cache, jnp.arange(ids.shape[1] - 1, dtype=jnp.int32))[1].T

    values = np.asarray(jit(program)(published_weights(policy), ids))
    starts = [len(t.prompt_ids) - 1 for t in trajectories]
    return [
        values[row, start : start + len(t.completion_ids)]
        for row, (t, start) in enumerate(zip(trajectories, starts, strict=True))
    ]


def trainer_logprobs(policy: Policy, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """Logprob of each completion token by the trainer's packed forward."""
    config = policy.config
    programs = PolicyPrograms(
        policy.model,
        policy.plan,
        build_optimizer(config.optimizer, 1),
        temperature=config.rollout.temperature,
        chunk_tokens=config.batch.logprob_chunk_tokens,
    )
    count = len(trajectories)
    batches = batching.pack(
        trajectories, np.zeros(count), np.ones(count, bool), config.row_tokens, config.batch.microbatch_tokens
    )
    scales = kv_scales(policy)
    kv = None if scales is None else KVCalibration.start(scales)
    weights = programs.frozen(programs.init(policy.params, kv))
    return batching.unpack(batches, [programs.logprobs(weights, batch) for batch in batches], count)


def measure(run: Path, completions: int) -> list[dict[str, object]]:
    """One row per flow and exactness."""
    trained = load_policy(run)
    trajectories = held_out_completions(trained, completions)
    base = load_config(run / "config.yaml")
    rows: list[dict[str, object]] = []
    for exact in (True, False):
        for preset in PRESETS:
            config = override_config(
                base, [f"precision.preset={preset}", f"numerics.exact={str(exact).lower()}"]
            )
            policy = build_policy(config, model=trained.model, tokenizer=trained.tokenizer)
            rollout, trainer = engine_logprobs(policy, trajectories), trainer_logprobs(policy, trajectories)
            index = np.repeat(np.arange(len(rollout)), [len(values) for values in rollout])
            metrics = mismatch_metrics(
                np.concatenate(trainer), np.concatenate(rollout), np.ones(len(index), bool), index
            )
            rows.append(
                {"preset": preset, "exact": exact, "tokens": len(index)}
                | {name: metrics[name] for name in SHOWN}
            )
    return rows


def main() -> None:
    """Prints a Markdown table and writes the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--completions", type=int, default=2048)
    parser.add_argument("--json", type=Path, default=None, help="where the rows are written")
    arguments = parser.parse_args()
    rows = measure(arguments.run, arguments.completions)
    print(f"{arguments.run}, {rows[0]['tokens']} tokens, {platform.machine()} CPU, jax {jax.__version__}\n")
    print("| flow | exact | mean abs difference | max abs difference | k3 |\n|---|---|---|---|---|")
    for row in rows:
        numbers = " | ".join("0" if row[name] == 0 else f"{row[name]:.2e}" for name in SHOWN)
        print(f"| {row['preset']} | {'yes' if row['exact'] else 'no'} | {numbers} |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
