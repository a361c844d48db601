"""Predicted work and traffic of one step on one device, and the seconds they would take at given rates.

The prediction assumes that every sequence fills its row, that every completion has the greatest length, and
that nothing overlaps.  The rates are those of `rates`; XLA's forms of FP8 products, without Pallas kernels,
reach 84 TFLOP/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flax import nnx

from jetrl_jax.config.rollout import JaxEngineSection
from jetrl_jax.models.dense import HEAD_PARTS
from jetrl_jax.models.flash_attention import PLANNED
from jetrl_jax.planning.abstract_run import AbstractRun, on_one_device
from jetrl_jax.planning.liveness import collectives
from jetrl_jax.planning.rates import RATES
from jetrl_jax.precision.parameters import named_params


@dataclass(frozen=True)
class Row:
    """A kind of work: `amount` in `unit` ("FLOP" or "B"), `rate` in units per second, and its source."""

    name: str
    amount: float
    unit: str
    rate: float
    source: str

    @property
    def seconds(self) -> float:
        """Predicted."""
        return self.amount / self.rate


def work(run: AbstractRun) -> list[Row]:
    """Products of a step's training and the bytes that its rollout reads, on one device."""
    sizes, config = run.sizes, run.config
    # a device's share of every product
    tokens = run.microbatches * run.rows * config.row_tokens / config.sharding.tensor
    again = config.batch.remat == "layer"
    forwards = int(run.algorithm.needs_old) + int(run.algorithm.needs_reference)
    linear = {"fp8": 0.0, "other": 0.0}
    shapes = {path: value.shape for path, value in named_params(nnx.state(run.model, nnx.Param))}
    wgrads = int(not run.plan.adapted)  # a frozen base has none
    for path in run.plan.linear:
        linear["fp8" if run.plan.flow(path).fprop.quantized else "other"] += (
            2.0 * math.prod(shapes[path]) * tokens
        )
    head = 2.0 * sizes.vocab_size * sizes.hidden_size * tokens
    # two products
    square = 4.0 * config.row_tokens * sizes.num_heads * sizes.head_dim * sizes.num_layers * tokens
    # half of the square; the backward has five products, as it computes the scores again
    if run.model.numerics.choices.attention.name == PLANNED:
        attention = _row(
            "attention, the causal half", square / 2 * (3.5 + again + forwards), "FLOP", "attention"
        )
    else:
        attention = _row("attention, the whole square", square * (3 + again + forwards), "FLOP", "fp32")
    in_blocks = run.plan.wgrad_operand == "block"
    parts = HEAD_PARTS.get(run.model.numerics.choices.head_backward.name)
    rows = [
        _row("FP8 FProp and DGrad", linear["fp8"] * (2 + again + forwards), "FLOP", "fprop"),
        _row("FP8 WGrad", linear["fp8"] * wgrads, "FLOP", "wgrad_block" if in_blocks else "wgrad"),
        _row("other linear layers", linear["other"] * (2 + wgrads + again + forwards), "FLOP", "bf16"),
        _row("head, forward and recomputed", head * (2 + forwards), "FLOP", "bf16"),
        _row("head, backward", 2 * head * (parts or 1), "FLOP", "bf16" if parts else "fp32"),
        attention,
    ]
    if run.engine is not None:
        rows.append(_row("decode reads", _decode_bytes(run), "B", "memory"))
    return [row for row in rows if row.amount]


def traffic(run: AbstractRun, shallow: tuple[AbstractRun, ...]) -> list[Row]:
    """Bytes that one device sends in a step, by kind, with rings over the axes of the mesh."""
    if run.layout is None:
        return []
    layers, microbatches = run.sizes.num_layers, run.microbatches
    sent = _drawn([_sent(one, "gradient") for one in shallow], shallow, layers)
    rows = {f"gradient: {kind}": amount * microbatches for kind, amount in sent.items()}
    forwards = int(run.algorithm.needs_old) + int(run.algorithm.needs_reference)
    if forwards:
        sent = _drawn([_sent(one, "logprobs") for one in shallow], shallow, layers)
        rows |= {f"scoring: {kind}": amount * microbatches * forwards for kind, amount in sent.items()}
    if run.engine is not None:
        whole = on_one_device(run.engine_weights())
        rows["sync: all_gather"] = whole - on_one_device(run.state.published)
    return [_row(name, amount, "B", "nvlink") for name, amount in rows.items() if amount]


def _row(name: str, amount: float, unit: str, rate: str) -> Row:
    return Row(name, float(amount), unit, *RATES[rate])


def _decode_bytes(run: AbstractRun) -> float:
    """Bytes read by decoding: weights and, on average, half the cache, for every token of the slots."""
    rollout = run.config.rollout
    assert run.engine is not None and isinstance(rollout.engine, JaxEngineSection)
    sequences = rollout.prompts_per_step * rollout.group_size / run.config.sharding.row_shards
    turns = max(sequences / rollout.engine.slots, 1.0)
    weights, cache = on_one_device(run.engine_weights()), on_one_device(run.slots())
    return turns * rollout.max_completion_tokens * (weights + cache / 2)


def verify_cost(run: AbstractRun) -> float:
    """A forward of all positions of the longest draft against one of a single position, in predicted time.

    Each takes the time of its reads (weights and half the cache of full slots) or of its products with the
    weights, whichever is longer.
    """
    assert run.engine is not None
    sizes, masters = run.sizes, dict(named_params(run.state.params))
    products = dict.fromkeys(("fprop", "bf16"), 0.0)
    for path in run.plan.linear:
        rate = "fprop" if run.plan.flow(path).rollout.quantized else "bf16"
        products[rate] += 2.0 * math.prod(masters[path].shape)
    products["bf16"] += 2.0 * sizes.vocab_size * sizes.hidden_size
    slots, wide = run.slots().shape[0], run.engine.shapes.drafted + 1
    position = slots * sum(amount / RATES[rate][0] for rate, amount in products.items())
    position /= run.config.sharding.tensor
    reads = (on_one_device(run.engine_weights()) + on_one_device(run.slots()) / 2) / RATES["memory"][0]
    return max(reads, wide * position) / max(reads, position)


def _sent(run: AbstractRun, program: str) -> dict[str, float]:
    """Kind -> bytes that a device sends in one call of a program."""
    assert run.layout is not None
    sent = {"all_gather": 0.0, "reduce_scatter": 0.0, "psum": 0.0}
    for operation in collectives(run.trace(program).jaxpr):
        degree = math.prod(run.layout.mesh.shape[axis] for axis in operation.axes)
        share = {
            "all_gather": (degree - 1) / degree,
            "reduce_scatter": degree - 1,
            "psum": 2 * (degree - 1) / degree,
        }
        # a maximum takes the same two turns of a ring as a sum
        kind = operation.name if operation.name in share else "psum"
        sent[kind] = sent.get(kind, 0.0) + share[kind] * operation.times * sum(
            value.size for value in operation.outputs
        )
    return sent


def _drawn(found: list[dict[str, float]], runs: tuple[AbstractRun, ...], layers: int) -> dict[str, float]:
    """The amounts of a model of `layers` layers, extrapolated from those at the depths of `runs`."""
    if len(found) == 1:
        return found[0]
    (shallow, deep) = found
    (first, second) = (run.sizes.num_layers for run in runs)
    return {
        kind: deep[kind] + (deep[kind] - shallow[kind]) * (layers - second) / (second - first)
        for kind in deep
    }
