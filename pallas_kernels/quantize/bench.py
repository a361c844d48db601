"""Times the quantisers and fused producers on this GPU, as a part of `python -m pallas_kernels.bench`.

Figures are GB/s of the bytes that must at least move: inputs and outputs once, codes one byte a value, scales
left out (1 to 3 % more). `copy` is a negation of BF16 by XLA, the upper limit. "xla" is the definition of the
same operation. For fused operations, "unfused" is the operation by XLA followed by the quantiser's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.measure import jax_contender, steady_state
from pallas_kernels.quantize.api import (
    COLUMN,
    ROW,
    SQUARE,
    quantize,
    quantize_dual,
    quantize_weight,
    requantize,
)
from pallas_kernels.quantize.fused import (
    KERNEL_WIDTHS,
    rms_norm_quantize,
    silu_gradients_quantize,
    silu_multiply_quantize,
)

KERNEL = "mosaic_gpu"
EPS = 1e-6

Operation = Callable[..., Any]
"""A function of arrays, to be timed."""
Call = tuple[Operation, tuple[Any, ...]]
"""An operation and its arguments."""


def quantiser_cases(implementation: str) -> dict[str, tuple[int, Operation]]:
    """{name: (bytes per value, function of a BF16 matrix)} of the plain quantisers."""
    return {
        "row 1x128": (3, lambda x: quantize(x, ROW, implementation=implementation)),
        "column 128x1": (3, lambda x: _stored(quantize(x, COLUMN, implementation=implementation))),
        "row + column": (4, lambda x: _stored(*quantize_dual(x, COLUMN, implementation=implementation))),
        "row + column 128x128": (
            4,
            lambda x: _stored(*quantize_dual(x, SQUARE, implementation=implementation)),
        ),
        "weight 128x128 + transpose": (4, lambda x: quantize_weight(x, implementation=implementation)),
    }


def fused_cases(implementation: str) -> dict[str, tuple[int, Operation]]:
    """{name: (bytes per value, function of two BF16 matrices and a weight)} of the fused producers."""
    return {
        "SiLU * up": (
            5,
            lambda gate, up, _: silu_multiply_quantize(gate, up, implementation=implementation)[0],
        ),
        "SiLU's gradient, both ways": (
            10,
            lambda gate, up, _: _both(
                *silu_gradients_quantize(gate, up, gate, implementation=implementation)
            ),
        ),
        "RMSNorm(x + residual)": (
            7,
            lambda x, residual, w: rms_norm_quantize(x, w, residual, eps=EPS, implementation=implementation),
        ),
        "RMSNorm(x)": (3, lambda x, _, w: rms_norm_quantize(x, w, eps=EPS, implementation=implementation)[0]),
    }


def unfused_cases() -> dict[str, Operation]:
    """The fused producers as XLA programs in FP32 and the quantiser's kernel."""

    def norm(h: jax.Array, weight: jax.Array) -> jax.Array:
        wide = h.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(EPS))
        return (normed * weight[None, :].astype(jnp.float32)).astype(jnp.bfloat16)

    def residual_norm(x: jax.Array, residual: jax.Array, weight: jax.Array) -> Any:
        total = x + residual
        return quantize(norm(total, weight), ROW, implementation=KERNEL), total

    def silu_gradients(gate: jax.Array, up: jax.Array, _: jax.Array) -> Any:
        pullback = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)[1]
        return _both(*(quantize_dual(x, COLUMN, implementation=KERNEL) for x in pullback(gate)))

    return {
        "SiLU's gradient, both ways": silu_gradients,
        "SiLU * up": lambda gate, up, _: quantize(jax.nn.silu(gate) * up, ROW, implementation=KERNEL),
        "RMSNorm(x + residual)": residual_norm,
        "RMSNorm(x)": lambda x, _, weight: quantize(norm(x, weight), ROW, implementation=KERNEL),
    }


def bench_quantize(widths: Mapping[str, int], rows: list[int]) -> Iterator[dict[str, Any]]:
    """One row per operation, matrix [M, width] and contender: GB/s, microseconds, spread."""
    for layer, width in widths.items():
        for m in rows:
            x, other = (jax.random.normal(jax.random.key(seed), (m, width), jnp.bfloat16) for seed in (0, 1))
            weight = jnp.ones((width,), jnp.bfloat16)
            yield from _rows("copy", layer, m, m * width * 4, {"copy": (jnp.negative, (x,))})
            for name, (size, kernel) in quantiser_cases(KERNEL).items():
                contenders: dict[str, Call] = {
                    "mosaic": (kernel, (x,)),
                    "xla": (quantiser_cases("xla")[name][1], (x,)),
                }
                yield from _rows(name, layer, m, m * width * size, contenders)
            saved, again = quantize(x, ROW, implementation=KERNEL), "codes of rows -> column"
            contenders = {
                name: (_requantized(implementation), (saved,))
                for name, implementation in (("mosaic", KERNEL), ("xla", "xla"))
            }
            yield from _rows(again, layer, m, m * width * 2, contenders)
            for name, (size, kernel) in fused_cases(KERNEL).items():
                if name.startswith("RMSNorm") and width not in KERNEL_WIDTHS:
                    continue
                arrays = (x, other, weight)
                contenders = {
                    "mosaic": (kernel, arrays),
                    "unfused": (unfused_cases()[name], arrays),
                    "xla": (fused_cases("xla")[name][1], arrays),
                }
                yield from _rows(name, layer, m, m * width * size, contenders)


def _requantized(implementation: str) -> Operation:
    return lambda saved: _stored(requantize(saved, implementation=implementation))


def _stored(*arrays: Any) -> Any:
    """ScaledArrays as the kernels store them (along tokens: transposed), so that returning costs nothing."""
    return tuple(array if array.block_shape == ROW else array.transpose() for array in arrays)


def _both(of_gate: tuple[Any, Any], of_up: tuple[Any, Any]) -> Any:
    return _stored(*of_gate, *of_up)


def _rows(
    name: str, layer: str, m: int, nbytes: int, contenders: Mapping[str, Call]
) -> Iterator[dict[str, Any]]:
    """The figures of one operation."""
    timings = steady_state(
        {contender: jax_contender(function, *arrays) for contender, (function, arrays) in contenders.items()}
    )
    for contender, timing in timings.items():
        rate = nbytes / timing.median / 1e9
        row = {"site": name, "layer": layer, "M": m, "contender": contender, "figure": f"{rate:.0f}"}
        yield row | {
            "gbs": round(rate, 1),
            "us": round(timing.median * 1e6, 2),
            "spread": round(timing.spread, 4),
        }
