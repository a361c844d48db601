"""`python -m jetrl_jax mismatch --checkpoint RUN`: where two precision flows diverge on the same tokens.

`--flow-a` and `--flow-b` name a precision preset and a side, the trainer (default) or the rollout: `bf16`,
`fp8_rollout_only:rollout`.  Without them the run's own flow is compared with itself, trainer against rollout.
The tokens are completions of held-out prompts sampled by the policy, or texts of your own.  Prints a table
with one row per operator, and the gap of the log-probabilities.  `--out` draws both as a page, `--json`
writes the numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from jetrl_jax.commands.entry import check_output_files, command_parser
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.runs.policy_config import is_run, policy_config

if TYPE_CHECKING:
    from jetrl_jax.diagnostics.operators import Difference
    from jetrl_jax.models.decoder import Decoder
    from jetrl_jax.rollout.types import Trajectory
    from jetrl_jax.runs.policy import Policy

SIDES = ("trainer", "rollout")
Tokens = tuple[Any, Any, Any]  # token_ids, positions, segment_ids, int32 [R, T]


def main(argv: list[str]) -> int:
    """Parses the command line, compares, prints and writes."""
    parser = command_parser(
        "mismatch",
        "Show where two precision flows diverge on the same tokens, operator by operator.",
        "mismatch --checkpoint runs/tiny_cpu --flow-a bf16 --flow-b fp8_unified",
    )
    parser.add_argument(
        "--checkpoint",
        type=user_path,
        required=True,
        metavar="DIR",
        help="run directory, or Hugging Face directory",
    )
    parser.add_argument(
        "--flow-a", metavar="FLOW", help="preset[:trainer|:rollout]; default: the run's own, trainer"
    )
    parser.add_argument("--flow-b", metavar="FLOW", help="the same; default: flow A's preset, rollout")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="change a field of the config for both",
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        help="a text to score in place of sampled completions; repeatable",
    )
    parser.add_argument("--completions", type=int, default=64, help="completions to sample")
    parser.add_argument("--out", type=user_path, metavar="PAGE", help="HTML page with the charts")
    parser.add_argument("--json", type=user_path, metavar="FILE", help="the numbers")
    arguments = parser.parse_args(argv)
    if arguments.completions < 1:
        raise UserError(
            f"mismatch: nothing to compare: got --completions {arguments.completions}, expected at least 1."
        )
    check_output_files("mismatch", arguments.out, arguments.json)

    policy_config(arguments.checkpoint, arguments.overrides)
    if not arguments.text and not is_run(arguments.checkpoint):
        raise UserError(
            "mismatch: no task to take prompts from: got the Hugging Face directory "
            f"{arguments.checkpoint}, expected --text."
        )

    from jetrl_jax.diagnostics.operators import compare
    from jetrl_jax.runs.policy import load_policy

    policy = load_policy(arguments.checkpoint, arguments.overrides)
    flow_a = arguments.flow_a or f"{policy.config.precision.preset}:trainer"
    flow_b = arguments.flow_b or f"{flow_a.partition(':')[0]}:rollout"
    model_a, model_b = bound_model(policy, flow_a), bound_model(policy, flow_b)
    tokens, mask = (
        _given(policy, arguments.text) if arguments.text else _sampled(policy, arguments.completions)
    )
    differences, logits_a, logits_b = compare(model_a, model_b, *tokens)
    gaps = logprob_gaps(policy, (model_a, logits_a), (model_b, logits_b), tokens, mask)
    print(table(flow_a, flow_b, differences, gaps))
    record = {
        "a": flow_a,
        "b": flow_b,
        "operators": [dataclasses.asdict(d) for d in differences],
        "logprobs": gaps,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(page(flow_a, flow_b, differences, gaps), encoding="utf-8")
    return 0


def bound_model(policy: Policy, flow: str) -> Decoder:
    """The policy's decoder with the weights that the trainer or rollout of a flow multiplies.

    Raises:
      UserError: `flow` is not `preset` or `preset:side`.
    """
    from flax import nnx

    from jetrl_jax.config.load import override_config
    from jetrl_jax.precision.formats import PRESETS
    from jetrl_jax.precision.parameters import jit
    from jetrl_jax.runs.policy import build_policy, published_weights

    preset, _, side = flow.partition(":")
    if preset not in PRESETS or (side or SIDES[0]) not in SIDES:
        raise UserError(
            f"mismatch: unknown flow: got {flow!r}, expected one of {', '.join(PRESETS)}, with :trainer "
            "or :rollout after it."
        )
    config = override_config(policy.config, [f"precision.preset={preset}"])
    flow_policy = build_policy(config, model=policy.model, tokenizer=policy.tokenizer)
    flow_policy = dataclasses.replace(flow_policy, scales=policy.scales)
    weights = published_weights(flow_policy)
    if side != "rollout":
        weights = jit(flow_policy.plan.frozen_weights)(flow_policy.params, weights)
    model: Decoder = nnx.merge(nnx.graphdef(flow_policy.model), weights)
    return model


def held_out_completions(policy: Policy, count: int) -> list[Trajectory]:
    """`count` completions of held-out prompts under the policy's own flow, at its temperature."""
    from jetrl_jax.collect.prompts import derived_seeds, fitting_prompts
    from jetrl_jax.rollout.types import Request, SamplingParams
    from jetrl_jax.runs.engines import sampling_engine
    from jetrl_jax.tasks.registry import build_task

    config = policy.config
    task = build_task(config.task, config.seed)
    prompts = fitting_prompts(
        [task.eval[i] for i in range(len(task.eval))], policy.tokenizer, config.rollout.max_prompt_tokens
    )
    requests = [
        Request(i, prompts[i % len(prompts)].ids, seed)
        for i, seed in enumerate(derived_seeds(count, config.seed, 99))
    ]
    sampling = SamplingParams(
        config.rollout.temperature, config.rollout.turn_tokens, tuple(policy.tokenizer.eos_ids), 0
    )
    with contextlib.closing(sampling_engine(policy)) as engine:
        return engine.generate(requests, sampling)


def logprob_gaps(
    policy: Policy, a: tuple[Decoder, Any], b: tuple[Decoder, Any], tokens: Tokens, mask: np.ndarray
) -> dict[str, Any]:
    """Mismatch metrics of B (as the engine) against A (as the trainer), and mean |Δ| by position.

    `mask` bool [R, T] marks the tokens to score; each is predicted at the position before it.
    """
    from jetrl_jax.models import vocabulary
    from jetrl_jax.precision.parameters import jit
    from jetrl_jax.rl.metrics import mismatch_metrics

    ids, positions, _ = (np.asarray(part) for part in tokens)

    def scored(model: Decoder, logits: Any) -> np.ndarray:
        numerics, flat = model.numerics, logits[:, :-1].reshape(-1, logits.shape[-1])

        def program(flat: Any, targets: Any) -> Any:
            scaled = vocabulary.scale_logits(flat, policy.config.rollout.temperature, exact=numerics.exact)
            return vocabulary.token_logprobs(scaled, targets, exact=numerics.exact)

        values = np.asarray(jit(program)(flat, ids[:, 1:].reshape(-1))).reshape(ids.shape[0], -1)
        return np.pad(values, ((0, 0), (1, 0)))

    one, other = scored(*a), scored(*b)
    rows = np.broadcast_to(np.arange(ids.shape[0])[:, None], ids.shape)
    gap = np.abs(one.astype(np.float64) - other)
    where = positions[mask]
    by_position = {int(p): float(gap[mask][where == p].mean()) for p in np.unique(where)}
    return {
        "tokens": int(mask.sum()),
        "metrics": mismatch_metrics(one, other, mask, rows),
        "by_position": by_position,
    }


def _sampled(policy: Policy, count: int) -> tuple[Tokens, np.ndarray]:
    completions = held_out_completions(policy, count)
    return _rows([(t.prompt_ids.tolist(), t.completion_ids.tolist()) for t in completions])


def _given(policy: Policy, texts: list[str]) -> tuple[Tokens, np.ndarray]:
    ids = [policy.tokenizer.encode(text) for text in texts]
    short = [text for text, one in zip(texts, ids, strict=True) if len(one) < 2]
    if short:
        raise UserError(f"mismatch: a text is too short: got {short[0]!r}, expected at least two tokens.")
    longest, positions = max(len(one) for one in ids), policy.model.config.max_position_embeddings
    if longest > positions:
        raise UserError(
            f"mismatch: a text is too long: got {longest} tokens, expected at most "
            f"max_position_embeddings={positions}."
        )
    return _rows([(one[:1], one[1:]) for one in ids])


def _rows(sequences: list[tuple[list[int], list[int]]]) -> tuple[Tokens, np.ndarray]:
    """One sequence per row, padded on the right; the mask marks the second part of each."""
    width = max(len(first) + len(second) for first, second in sequences)
    ids, segments = np.zeros((len(sequences), width), np.int32), np.zeros((len(sequences), width), np.int32)
    mask = np.zeros(ids.shape, bool)
    for row, (first, second) in enumerate(sequences):
        whole = slice(0, len(first) + len(second))
        ids[row, whole] = first + second
        segments[row, whole] = 1
        mask[row, len(first) : whole.stop] = True
    return (ids, np.tile(np.arange(width, dtype=np.int32), (len(ids), 1)), segments), mask


def first_difference(differences: list[Difference]) -> str:
    """A sentence naming the first operator whose outputs differ."""
    for d in differences:
        if d.unequal > 0:
            return (
                f"they part at {_place(d)} ({100 * d.unequal:.2g} % of its values, by at most "
                f"{d.largest:.1e})"
            )
    return "they never part: every operator's output is the same bits"


def table(flow_a: str, flow_b: str, differences: list[Difference], gaps: dict[str, Any]) -> str:
    """The differences and the log-probability gap as aligned text."""
    lines = [("operator", "accumulated", "own", "unequal", "largest")]
    lines += [
        (_place(d), f"{d.accumulated:.2e}", f"{d.own:.2e}", f"{d.unequal:.1%}", f"{d.largest:.2e}")
        for d in differences
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    rows = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    metrics = gaps["metrics"]
    shown = ", ".join(f"{name.removeprefix('mismatch/')} {metrics[name]:.3g}" for name in _SHOWN)
    return "\n".join(
        [
            f"A {flow_a}, B {flow_b}, {gaps['tokens']} tokens; {first_difference(differences)}",
            *rows,
            f"logprobs: {shown}",
        ]
    )


def page(flow_a: str, flow_b: str, differences: list[Difference], gaps: dict[str, Any]) -> str:
    """Two charts, self-contained HTML: relative error along the forward, logprob gap by position."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    title = f"{flow_a} against {flow_b}: {first_difference(differences)}"
    figure = make_subplots(
        rows=2,
        cols=1,
        subplot_titles=("relative error of each operator's output", "mean |Δ logprob| by position"),
    )
    places = [_place(d) for d in differences]
    for name in ("accumulated", "own"):
        values = [getattr(d, name) or None for d in differences]  # a logarithmic axis has no zero
        figure.add_trace(go.Scatter(x=places, y=values, mode="lines+markers", name=name), row=1, col=1)
    by_position = gaps["by_position"]
    bars = go.Bar(
        x=list(by_position), y=[value or None for value in by_position.values()], name="mean |Δ logprob|"
    )
    figure.add_trace(bars, row=2, col=1)
    figure.update_yaxes(type="log", exponentformat="power")
    figure.update_layout(title=title, height=900, template="plotly_white")
    return str(figure.to_html(include_plotlyjs=True, full_html=True))


_SHOWN = ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "mismatch/k3")


def _place(difference: Difference) -> str:
    return difference.operator if difference.layer < 0 else f"layer {difference.layer} {difference.operator}"
