"""How far rollout and training are apart on a real model, in each precision flow: ``make bench-real``.

SmolLM2-135M-Instruct (``make real-model``) completes GSM8K's held-out questions through its chat template, at
temperature 1.

    embedded   completions of the `fp8_unified` flow, scored in every flow by cached decode and by the packed
               forward from the same masters, as `tests/benchmarks/flows.py` does it for a run
    vllm       completions and log-probabilities of the real vLLM, scored again by the trainer's packed
               forward

vLLM fuses q, k, v into one FP8 weight, in whose grid of 128 rows k would begin within a block (576 rows of
q): it is refused. Beside BF16 everywhere, the rows of vLLM have attention in BF16 and the MLP in FP8
(`precision.overrides`).

    python tests/benchmarks/real_model/mismatch.py --engine vllm --prompts 16 --tokens 64
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import jax
import numpy as np

from jetrl_jax.commands.mismatch import held_out_completions
from jetrl_jax.config.load import config_from_dict
from jetrl_jax.rl.metrics import mismatch_metrics
from jetrl_jax.rollout.types import Trajectory
from jetrl_jax.runs.policy import Policy, build_policy
from tests.benchmarks.flows import PRESETS, SHOWN, engine_logprobs, trainer_logprobs
from tests.benchmarks.real_model.make import DIRECTORY, is_made

ATTENTION_IN_BF16 = {"pattern": "*.self_attn.?_proj.weight", "format": "bf16"}
# Of vLLM: (name of the row, preset that vLLM samples, preset that the trainer scores)
VLLM_PAIRS = (
    ("bf16", "bf16", "bf16"),
    ("fp8_unified, attention in BF16", "fp8_unified", "fp8_unified"),
    ("fp8_rollout_only, attention in BF16", "fp8_unified", "bf16"),
)
Row = dict[str, Any]


def config_of(preset: str, options: argparse.Namespace, *, exact: bool = True, engine: str = "jax") -> Any:
    """The config of a policy on GSM8K."""
    precision: dict[str, Any] = {"preset": preset, "kv_cache": options.kv_cache}
    if engine == "vllm" and preset.startswith("fp8"):
        precision["overrides"] = [ATTENTION_IN_BF16]
    limits: dict[str, Any] = {"slots": options.prompts, "prefill_rows": 4}
    if engine == "vllm":
        limits = {"max_num_seqs": options.prompts, "kv_cache_memory_mb": 512, "on_mismatch": "warn"}
    rollout = {
        "engine": {"kind": engine} | limits,
        "max_prompt_tokens": options.longest,
        "max_completion_tokens": options.tokens,
        "group_size": 2,
    }
    fields: dict[str, Any] = {
        "model": {"path": str(DIRECTORY)},
        "tokenizer": {"kind": "huggingface", "chat_template": True},
        "precision": precision,
        "numerics": {"exact": exact},
        "task": {"kind": "gsm8k"} | ({} if options.gsm8k is None else {"path": str(options.gsm8k)}),
        "rollout": rollout,
        "batch": {"microbatch_tokens": 4 * (options.longest + options.tokens), "logprob_chunk_tokens": 256},
    }
    return config_from_dict(fields)


def figures(trainer: list[np.ndarray], rollout: list[np.ndarray]) -> Row:
    """Mismatch of two sides of the same completions."""
    index = np.repeat(np.arange(len(rollout)), [len(values) for values in rollout])
    a, b = np.concatenate(trainer), np.concatenate(rollout)
    metrics = mismatch_metrics(a, b, np.ones(len(index), bool), index)
    return {"tokens": len(index), "equal": float((np.abs(a.astype(np.float64) - b) <= 1e-5).mean())} | {
        name: metrics[name] for name in SHOWN
    }


def embedded(options: argparse.Namespace) -> Iterator[Row]:
    """One row per flow and exactness."""
    first = build_policy(config_of("fp8_unified", options))
    trajectories = held_out_completions(first, options.prompts)
    for exact in options.exact:
        for preset in options.flows:
            policy = build_policy(
                config_of(preset, options, exact=exact), model=first.model, tokenizer=first.tokenizer
            )
            row = figures(trainer_logprobs(policy, trajectories), engine_logprobs(policy, trajectories))
            yield {"flow": preset, "exact": exact} | row
            del policy
            gc.collect()


def with_vllm(options: argparse.Namespace) -> Iterator[Row]:
    """One row per pair of flows and exactness."""
    model, tokenizer = None, None
    for exact in options.exact:
        sampled: dict[str, list[Trajectory]] = {}
        for name, sampling, scoring in VLLM_PAIRS:
            policies: dict[str, Policy] = {}
            for preset in dict.fromkeys((sampling, scoring)):
                config = config_of(preset, options, exact=exact, engine="vllm")
                policies[preset] = build_policy(config, model=model, tokenizer=tokenizer)
                model, tokenizer = policies[preset].model, policies[preset].tokenizer
            if sampling not in sampled:
                sampled[sampling] = held_out_completions(policies[sampling], options.prompts)
            trajectories = sampled[sampling]
            row = figures(
                trainer_logprobs(policies[scoring], trajectories), [t.sampled_logprobs for t in trajectories]
            )
            yield {"flow": name, "exact": exact} | row
            del policies
            gc.collect()


def main() -> None:
    """Prints a Markdown table, row by row, and writes the rows as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--flows", nargs="+", default=PRESETS, choices=PRESETS, help="of the embedded engine")
    parser.add_argument(
        "--exact",
        nargs="+",
        type=json.loads,
        default=[True, False],
        metavar="true|false",
        help="numerics.exact",
    )
    parser.add_argument(
        "--kv-cache", choices=("bf16", "fp8"), default="bf16", help="precision.kv_cache of every flow"
    )
    parser.add_argument("--gsm8k", type=Path, help="directory of GSM8K's files; default: as task.path")
    parser.add_argument("--prompts", type=int, default=16, help="questions, one completion of each")
    parser.add_argument("--tokens", type=int, default=64, help="longest completion")
    parser.add_argument(
        "--longest", type=int, default=160, help="longest prompt in tokens; longer ones are left out"
    )
    parser.add_argument("--json", type=Path, help="where the rows are written")
    options = parser.parse_args()
    if not is_made():
        sys.exit(f"mismatch: no model in {DIRECTORY}: run `make real-model` first.")
    print(f"{options.engine}, {options.prompts} questions, {platform.machine()} CPU, jax {jax.__version__}\n")
    print(
        "| flow | exact | tokens | within 1e-5 | mean abs difference | max abs difference | k3 "
        "|\n|---|---|---|---|---|---|---|"
    )
    rows = []
    for row in embedded(options) if options.engine == "embedded" else with_vllm(options):
        numbers = " | ".join("0" if row[name] == 0 else f"{row[name]:.2e}" for name in SHOWN)
        print(
            f"| {row['flow']} | {'yes' if row['exact'] else 'no'} | {row['tokens']} | "
            f"{row['equal']:.1%} | {numbers} |",
            flush=True,
        )
        rows.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
