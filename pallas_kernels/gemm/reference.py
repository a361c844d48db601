"""THE definition of the block-scaled product A Bᵀ, in plain XLA, and a quicker relative of it.

Exact form, block by block, K ascending (dot: exact sum of products, rounded once to FP32; f32, f64: roundings):

    "deepgemm"   acc = f32(f64(acc) + f64(dot) * f64(f32(sa * sb)))
    "triton"     acc = f32(f64(acc) + f64(f32(dot * sa)) * f64(sb))

The products of two codes are multiples of 2**-18 and a sum of 128 of them stays below 2**25, so a float64 dot is exact
in any order and on any number of threads. The scaled product of two FP32 numbers is exact in float64 too: a step is a
fused multiply-add, up to a rare double rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import BLOCK, round_to_float32, to_float64
from pallas_kernels.scaled_array import ScaledArray

UNROLLED_BLOCKS = 16
"""More blocks of K than this run as a loop, so that the program stays small."""

_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def matmul_exact(a: ScaledArray, b: ScaledArray, out_dtype: Any, promotion_order: str) -> jax.Array:
    """a [M, K] times b [N, K] transposed, blocks (1 or 128, 128) both: [M, N], row-invariant."""

    def step(accumulator: jax.Array, a_codes: jax.Array, b_codes: jax.Array, sa: jax.Array, sb: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            dot = lax.dot_general(to_float64(a_codes), to_float64(b_codes), _CONTRACT_LAST)
            dot = round_to_float32(dot)
            left, right = (dot, sa * sb) if promotion_order == "deepgemm" else (dot * sa, sb)
            return round_to_float32(to_float64(accumulator) + to_float64(left) * to_float64(right))

    return _over_blocks(step, a, b, out_dtype)


def matmul_fast(a: ScaledArray, b: ScaledArray, out_dtype: Any, promotion_order: str) -> jax.Array:
    """As `matmul_exact` with an FP32 dot of BF16 operands and FP32 promotion: [M, N], not row-invariant."""

    def step(accumulator: jax.Array, a_codes: jax.Array, b_codes: jax.Array, sa: jax.Array, sb: jax.Array) -> jax.Array:
        a_values, b_values = a_codes.astype(jnp.bfloat16), b_codes.astype(jnp.bfloat16)  # exact
        dot = lax.dot_general(a_values, b_values, _CONTRACT_LAST, preferred_element_type=jnp.float32)
        return accumulator + (dot * (sa * sb) if promotion_order == "deepgemm" else dot * sa * sb)

    return _over_blocks(step, a, b, out_dtype)


def _over_blocks(step: Callable[..., jax.Array], a: ScaledArray, b: ScaledArray, out_dtype: Any) -> jax.Array:
    """Runs `step` over the blocks of K, unrolled when few, and rounds the accumulator to `out_dtype`."""
    rows, depth = a.shape
    columns = b.shape[0]
    a_scale = _per_row(a.scale, a.block_shape[0], rows)[:, None, :]  # [M, 1, Kb]
    b_scale = _per_row(b.scale, b.block_shape[0], columns)[None, :, :]  # [1, N, Kb]
    accumulator = jnp.zeros((rows, columns), jnp.float32)
    blocks = a_scale.shape[-1]
    if blocks <= UNROLLED_BLOCKS:
        for block in range(blocks):
            k = slice(block * BLOCK, min((block + 1) * BLOCK, depth))
            accumulator = step(accumulator, a.qvalue[:, k], b.qvalue[:, k], a_scale[..., block], b_scale[..., block])
        return _round_output(accumulator, out_dtype)

    padding = ((0, 0), (0, blocks * BLOCK - depth))
    a_codes, b_codes = jnp.pad(a.qvalue, padding), jnp.pad(b.qvalue, padding)  # zero codes add nothing

    def body(block: jax.Array, accumulator: jax.Array) -> jax.Array:
        codes = (lax.dynamic_slice_in_dim(codes, block * BLOCK, BLOCK, 1) for codes in (a_codes, b_codes))
        scales = (lax.dynamic_index_in_dim(scale, block, 2, keepdims=False) for scale in (a_scale, b_scale))
        return step(accumulator, *codes, *scales)

    return _round_output(lax.fori_loop(0, blocks, body, accumulator), out_dtype)


def _per_row(scale: jax.Array, edge: int, rows: int) -> jax.Array:
    """Scales [ceil(rows / edge), Kb] as one per row [rows, Kb]."""
    return jnp.repeat(scale, edge, axis=0)[:rows] if edge > 1 else scale


def _round_output(accumulator: jax.Array, out_dtype: Any) -> jax.Array:
    """FP32 to `out_dtype`; reduce_precision keeps XLA from dropping the rounding when the consumer widens again."""
    if out_dtype == jnp.float32:
        return accumulator
    info = jnp.finfo(out_dtype)
    return lax.reduce_precision(accumulator, info.nexp, info.nmant).astype(out_dtype)
