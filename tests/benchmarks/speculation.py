r"""Rollouts with and without speculation: the time of each, the accepted tokens, and that the tokens are equal.

    python tests/benchmarks/speculation.py runs/tiny_spec_cpu --batch 1 8 64 256
    python tests/benchmarks/speculation.py .cache/real_model/SmolLM2-135M-Instruct \
      --config configs/smollm2_135m_cpu.yaml --batch 1 8

Reads a run or a Hugging Face directory, and samples the held-out prompts of its task, one completion of each
prompt up to `--requests` or the batch, whichever is more, then a second one.  Each batch has as many slots.  One row for no speculation, one for
each length by itself, and one for the length that is chosen by the clock.  Programs are compiled, and each
rollout is sampled once, before a time is taken; the time is the shortest of `--repeat` rollouts, each with
other noise, and no completion of an earlier rollout is a draft.  A speed above 1 is a gain.  Guesses are those
of the run's draft head, if it has one, else of lookup.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jetrl_jax.collect.prompts import fitting_prompts
from jetrl_jax.rollout.embedded.head_draft import HeadDraft
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.embedded.speculation import Completions, Draft, Lookup
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from jetrl_jax.runs.policy import Policy, load_policy, published_weights
from jetrl_jax.tasks.registry import build_task


def measured(
    policy: Policy,
    weights: Any,
    draft: Draft | HeadDraft | None,
    batch: int,
    count: int,
    tokens: int,
    repeat: int,
) -> tuple[dict[str, float], list[Trajectory]]:
    """(seconds of the fastest rollout, accepted tokens and steps of all), and the trajectories of the first."""
    rollout, config = policy.config.rollout, policy.config
    task = build_task(config.task, config.seed)
    chosen = [task.eval[i] for i in range(min(count, len(task.eval)))]
    prompts = fitting_prompts(chosen, policy.tokenizer, rollout.max_prompt_tokens)
    engine = JaxEngine(
        policy.model,
        policy.plan,
        slots=batch,
        prefill_rows=min(batch, 32),
        decode_chunk_tokens=8,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_completion_tokens=tokens,
        pad_id=policy.tokenizer.pad_id,
        draft=draft,
    )
    engine.load(weights, 0)
    if isinstance(draft, HeadDraft):
        engine.load_draft(policy.head)
    engine.warmup()
    requests = [Request(i, prompts[i % len(prompts)].ids, i) for i in range(count)]
    seconds, first, accepted, steps, sampled = [], [], 0, 0, 0
    for seed in range(repeat + 1):
        engine._completions = Completions()
        stops = tuple(policy.tokenizer.eos_ids)
        start = time.perf_counter()
        done = engine.generate(requests, SamplingParams(rollout.temperature, tokens, stops, seed))
        seconds.append(time.perf_counter() - start)
        first = first or done
        accepted += engine.statistics.accepted
        steps += engine.statistics.active_slot_steps
        sampled += sum(one.sampled_tokens for one in done)
    engine.close()
    row = {"seconds": min(seconds[1:]), "accepted_per_step": accepted / max(steps, 1), "tokens": sampled}
    return row, first


def main() -> None:
    """Prints a table, and writes it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy", type=Path, help="a run, or a Hugging Face directory")
    parser.add_argument("--config", type=Path, help="for a Hugging Face directory")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--requests", type=int, default=32, help="of a rollout; at least the batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[3])
    parser.add_argument("--tokens", type=int, help="longest completion; by default the config's")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    policy = load_policy(given.policy, given.set, given.config)
    weights = published_weights(policy)
    tokens = given.tokens or policy.config.rollout.max_completion_tokens
    head = policy.head
    make = Lookup if head is None else functools.partial(HeadDraft.of, head)
    drafts: dict[str, Draft | HeadDraft | None] = {"none": None}
    drafts |= {f"{k}": make(lengths=(k,)) for k in given.lengths}
    drafts["chosen"] = make(lengths=(0, *given.lengths))
    table = []
    print(f"{platform.processor() or platform.machine()}, {jax.default_backend()}, JAX {jax.__version__}")
    print(f"{'batch':>6} {'drafted':>8} {'seconds':>9} {'speed':>7} {'accepted/step':>14} {'equal':>6}")
    for batch in given.batch:
        sizes = batch, max(batch, given.requests), tokens, given.repeat
        alone, expected = measured(policy, weights, None, *sizes)
        for name, draft in drafts.items():
            row, ours = alone, expected
            if draft is not None:
                row, ours = measured(policy, weights, draft, *sizes)
            equal = all(
                np.array_equal(a.token_ids, b.token_ids) and a.logprobs.tobytes() == b.logprobs.tobytes()
                for a, b in zip(ours, expected, strict=True)
            )
            table.append({"batch": batch, "drafted": name, **row, "equal": equal})
            speed = alone["seconds"] / row["seconds"]
            accepted = row["accepted_per_step"]
            print(
                f"{batch:>6} {name:>8} {row['seconds']:>9.3f} {speed:>7.2f} {accepted:>14.2f} {equal!s:>6}",
                flush=True,
            )
    if given.json:
        numerics = dataclasses.asdict(policy.model.numerics)
        given.json.write_text(json.dumps({"numerics": str(numerics), "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
