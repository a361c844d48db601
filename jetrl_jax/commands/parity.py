"""`python -m jetrl_jax parity --model DIR`: the same tokens scored by the trainer and by vLLM.

Compares three pairs on one set of tokens, sampled by the engine from the policy's own flow:

    policy       the policy's flow on both sides: the gap in a run's importance ratios
    bf16_floor   BF16 on both sides: the gap between two implementations of one model
    bf16_fp8     BF16 training against the policy's rollout: the gap of a mixed flow

For each pair it reports mean and largest |logprob(trainer) - logprob(engine)| in nats, k3 =
E[exp(d) - 1 - d] with d = trainer - engine, the share of tokens within 1e-5, and mean |d| by position.  If
vLLM runs in this process, it also reports the first operator whose output differs between the two sides, on
the first sequences and up to the final norm (the log-probabilities cover the head).  Prints a table; `--json`
writes the numbers.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jetrl_jax.commands.entry import check_output_files, command_parser
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.runs.policy_config import policy_config

if TYPE_CHECKING:
    from bridge.vllm.engine import VllmEngine
    from jetrl_jax.diagnostics.operators import Difference
    from jetrl_jax.models.decoder import Decoder
    from jetrl_jax.runs.policy import Policy

FIGURES = ("logprob_abs_mean", "logprob_abs_max", "k3")
EQUAL = 1e-5
BUCKETS = 4
ORDER = "q k v gate up normed residual"  # order of the parts in vLLM's fused outputs
RESIDUALS = ("input_norm", "norm")
TRACED = 4  # number of sequences whose operators are compared
Logprobs = Sequence[np.ndarray]  # one float32 [length] per sequence; entry 0 is meaningless


def gap(trainer: Logprobs, engine: Logprobs) -> dict[str, Any]:
    """The figures of one pair; `by_position` lists [first, last, mean |d|, tokens] of equal ranges."""
    from jetrl_jax.rl.metrics import mismatch_metrics

    differences = [
        np.asarray(ours[1:], np.float64) - theirs[1:] for ours, theirs in zip(trainer, engine, strict=True)
    ]
    flat = np.concatenate(differences)
    metrics = mismatch_metrics(
        flat, np.zeros_like(flat), np.ones(flat.shape, bool), np.zeros(flat.shape, int)
    )
    where = np.concatenate([np.arange(1, len(d) + 1) for d in differences])
    size = np.abs(flat)
    edges = np.linspace(1, where.max() + 1, min(BUCKETS, int(where.max())) + 1).astype(int)
    ranges = [
        (int(low), int(high) - 1, (where >= low) & (where < high)) for low, high in itertools.pairwise(edges)
    ]
    return {
        "tokens": int(flat.size),
        **{name: metrics[f"mismatch/{name}"] for name in FIGURES},
        "equal_share": float((size <= EQUAL).mean()),
        "by_position": [
            [low, high, float(size[inside].mean()), int(inside.sum())]
            for low, high, inside in ranges
            if inside.any()
        ],
    }


def measure(policy: Policy, sequences: int, seed: int = 0) -> dict[str, dict[str, Any]]:
    """{pair: figures} of a policy; starts vLLM once per flow, where `rollout.engine` says.

    Raises:
      UserError: vLLM is not installed, or cannot load the model.
    """
    from flax import nnx

    from jetrl_jax.config.load import override_config
    from jetrl_jax.precision.parameters import jit
    from jetrl_jax.rollout.embedded.score import Scorer
    from jetrl_jax.rollout.types import Request, SamplingParams
    from jetrl_jax.runs.engines import build_vllm_engine
    from jetrl_jax.runs.policy import build_policy, published_weights

    rollout = policy.config.rollout
    rng = np.random.default_rng(seed)
    vocab = policy.model.config.vocab_size
    prompts = [
        rng.integers(0, vocab, int(rng.integers(1, rollout.max_prompt_tokens + 1))).tolist()
        for _ in range(sequences)
    ]
    requests = [Request(i, ids, seed + i) for i, ids in enumerate(prompts)]
    sampling = SamplingParams(1.0, rollout.turn_tokens, tuple(policy.tokenizer.eos_ids), seed)
    bf16 = build_policy(
        override_config(policy.config, ["precision.preset=bf16"]),
        model=policy.model,
        tokenizer=policy.tokenizer,
    )
    flows = {"policy": policy, "bf16": dataclasses.replace(bf16, scales=policy.scales)}

    tokens: list[list[int]] = []
    engine_side, trainer_side, operators = {}, {}, {}
    for name, flow in flows.items():
        published = published_weights(flow)
        weights = jit(flow.plan.frozen_weights)(flow.params, published)
        engine = build_vllm_engine(flow)
        try:
            engine.load(published, 0)
            if not tokens:
                tokens = [answer.token_ids.tolist() for answer in engine.generate(requests, sampling)]
            engine_side[name] = engine.score(tokens)
            operators[name] = where_they_part(
                nnx.merge(nnx.graphdef(flow.model), weights), engine, tokens[:TRACED]
            )
        finally:
            engine.close()
        score, longest = Scorer(flow.model), max(len(ids) for ids in tokens)  # one length: compiled once
        trainer_side[name] = [score(weights, ids, longest) for ids in tokens]
        del engine
        gc.collect()  # frees its GPU memory for the next engine
    return {
        "policy": gap(trainer_side["policy"], engine_side["policy"]) | operators["policy"],
        "bf16_floor": gap(trainer_side["bf16"], engine_side["bf16"]) | operators["bf16"],
        "bf16_fp8": gap(trainer_side["bf16"], engine_side["policy"]),
    }


def where_they_part(model: Decoder, engine: VllmEngine, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The first difference in words; if vLLM runs eagerly in this process, also those of every operator."""
    from jetrl_jax.commands.mismatch import first_difference

    if engine.describe()["mode"] != "in_process":
        return {
            "first_difference": "not known: vLLM's operators can be read only in this process; --set "
            "rollout.engine=vllm"
        }
    if not engine.settings.started.enforce_eager:
        return {
            "first_difference": "not known: a compiled vLLM does not run single operators; --set "
            "rollout.engine.enforce_eager=true"
        }
    differences = operator_differences(model, engine, tokens)
    return {
        "first_difference": first_difference(differences),
        "operators": [dataclasses.asdict(d) for d in differences],
    }


def operator_differences(model: Decoder, engine: Any, tokens: Sequence[Sequence[int]]) -> list[Difference]:
    """Every operator of the trainer's decoder (A) against vLLM's in this process (B), up to the final norm.

    Raises:
      RuntimeError: the outputs of an operator differ in size between the two sides.
    """
    from jetrl_jax.diagnostics.operators import difference, outputs

    theirs = [engine.operators(ids) for ids in tokens]
    ids, segments = (np.zeros((len(tokens), max(map(len, tokens))), np.int32) for _ in range(2))
    for row, sequence in enumerate(tokens):
        ids[row, : len(sequence)] = sequence
        segments[row, : len(sequence)] = 1
    positions = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    found = []
    for layer, name, values in outputs(model, ids, positions, segments):
        if name == "lm_head":  # vLLM computes only some positions, and sums in FP32 in another order
            continue
        a = np.concatenate([values[part] for part in sorted(values, key=ORDER.find)], axis=-1)
        b = np.concatenate([one[layer, name] for one in theirs])
        if name in RESIDUALS:  # one side also returns the residual
            a, b = a[:, : b.shape[1]], b[:, : a.shape[1]]
        if a.shape != b.shape:
            raise RuntimeError(
                f"parity: operator {name} of layer {layer}: got {b.shape} from vLLM, expected {a.shape}."
            )
        found.append(difference(layer, name, a.astype(np.float64), b.astype(np.float64)))
    return found


def table(pairs: dict[str, dict[str, Any]]) -> str:
    """The figures as aligned text."""
    lines = [
        f"{'pair':<12}{'tokens':>8}{'mean |d|':>11}{'max |d|':>11}{'k3':>11}{'equal':>8}   mean |d| by "
        "position"
    ]
    for name, row in pairs.items():
        positions = "  ".join(f"{low}-{high}: {mean:.1e}" for low, high, mean, _ in row["by_position"])
        figures = "".join(f"{row[key]:>11.2e}" for key in FIGURES)
        lines.append(f"{name:<12}{row['tokens']:>8}{figures}{row['equal_share']:>8.1%}   {positions}")
    lines += [
        f"{name}, operators: {row['first_difference']}"
        for name, row in pairs.items()
        if "first_difference" in row
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Parses the command line, measures, prints and writes."""
    parser = command_parser(
        "parity", "Score the same tokens on trainer and vLLM.", "parity --run runs/tiny_vllm_cpu"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--run", type=user_path, metavar="DIR", help="run directory (its latest checkpoint, its flow)"
    )
    source.add_argument(
        "--model",
        type=user_path,
        metavar="DIR",
        help="Hugging Face directory; in BF16 unless --set precision.preset says otherwise",
    )
    parser.add_argument("--sequences", type=int, default=32, help="sequences that are sampled and scored")
    parser.add_argument("--json", type=user_path, metavar="FILE", help="write the numbers")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="change a field of the config",
    )
    arguments = parser.parse_args(argv)
    if arguments.sequences < 1:
        raise UserError(
            f"parity: nothing to score: got --sequences {arguments.sequences}, expected at least 1."
        )
    check_output_files("parity", arguments.json)

    # vLLM samples whatever the run's engine was, and a gap is measured here rather than stopping the command
    engine = (
        [] if policy_config(arguments.run or arguments.model).samples_by_vllm else ["rollout.engine=vllm"]
    )
    overrides = [*engine, "rollout.engine.on_mismatch=warn", *arguments.overrides]
    policy_config(arguments.run or arguments.model, overrides)

    from jetrl_jax.runs.engines import require_vllm
    from jetrl_jax.runs.policy import load_policy

    require_vllm()
    pairs = measure(load_policy(arguments.run or arguments.model, overrides), arguments.sequences)
    print(table(pairs))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(pairs, indent=1) + "\n", encoding="utf-8")
    return 0
