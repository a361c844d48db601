"""THE definition of the block-scaled product A Bᵀ, in plain XLA, and a quicker form.

The exact form goes block by block, with K ascending (dot: exact sum of 128 products, rounded once to FP32;
f32, f64: roundings):

    "deepgemm"   acc = f32(f64(acc) + f64(dot) * f64(f32(sa * sb)))
    "triton"     acc = f32(f64(acc) + f64(f32(dot * sa)) * f64(sb))

The product of two codes is a multiple of 2**-18 and a sum of 128 of them stays below 2**25, so a float64 dot
is exact in any order, tiling and number of threads. Therefore a row of the result does not depend on other
rows. The product of two FP32 numbers is also exact in float64, so a step is a fused multiply-add up to a rare
double rounding.

The dots of all blocks are computed first and promoted in one fused pass. If they are many or large, a loop
computes one block at a time instead. The bits are the same in every form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import BLOCK, code_bits, round_output, round_to_float32, to_float64, widen_bits
from pallas_kernels.scaled_array import ScaledArray

# Measured on 2 CPU cores; the choice changes the speed and the size of the program, never the bits of
# `matmul_exact`.
UNROLLED_BLOCKS = 8
"""Up to this many blocks of K have one dot each; more are one batched dot, which compiles faster."""
FUSED_BLOCKS = 64
"""With more blocks of K than this a loop runs, so that the program stays small."""
FUSED_BYTES = 32 << 20
"""With larger dots than this (all blocks together) a loop runs, so that memory does not grow with K."""

_CONTRACT_LAST = (((1,), (1,)), ((), ()))
_CONTRACT_LAST_BATCHED = (((2,), (2,)), ((0,), (0,)))

# Compiled if the caller does not compile, and traced once for layers of the same shape. Inlined, because in a
# called function XLA's CPU backend (jaxlib 0.10.2) leaves the BF16 dots of WGrad in a form that it cannot run
# (UNIMPLEMENTED: BF16 x BF16 = F32).
_jit = functools.partial(jax.jit, static_argnums=(2, 3), inline=True)

_Dot = Callable[[jax.Array, jax.Array, Any], jax.Array]
_Promote = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


@_jit
def matmul_exact(a: ScaledArray, b: ScaledArray, out_dtype: Any, promotion_order: str) -> jax.Array:
    """a [M, K] times b [N, K] transposed, blocks (1 or 128, 128) both: [M, N], row-invariant."""

    def dot(a_codes: jax.Array, b_codes: jax.Array, dimensions: Any) -> jax.Array:
        a_values, b_values = (to_float64(widen_bits(codes)) for codes in (a_codes, b_codes))
        return lax.dot_general(a_values, b_values, dimensions)

    def promote(accumulator: jax.Array, product: jax.Array, sa: jax.Array, sb: jax.Array) -> jax.Array:
        product = round_to_float32(product)
        left, right = (product, sa * sb) if promotion_order == "deepgemm" else (product * sa, sb)
        total = to_float64(accumulator) + to_float64(left) * to_float64(right)
        # A plain convert, which XLA keeps (tests check it); a chain of pinned ones ending in BF16 takes jax
        # 0.12 minutes to compile.
        return lax.convert_element_type(total, jnp.float32)

    with jax.enable_x64(True):
        return _matmul(dot, promote, a, b, out_dtype)


@_jit
def matmul_fast(a: ScaledArray, b: ScaledArray, out_dtype: Any, promotion_order: str) -> jax.Array:
    """As `matmul_exact` with an FP32 dot of BF16 (or FP32) operands and FP32 promotion: [M, N], not
    row-invariant.
    """

    def dot(a_codes: jax.Array, b_codes: jax.Array, dimensions: Any) -> jax.Array:
        # FP32 where XLA's CPU backend widened BF16 by itself in a gradient of E4M3 arrays: the same sums.
        wide = dimensions == _CONTRACT_LAST_BATCHED or a.shape[1] <= BLOCK
        dtype = jnp.float32 if wide else jnp.bfloat16  # both exact: 4 of 8 bits
        a_values, b_values = (widen_bits(codes, dtype) for codes in (a_codes, b_codes))
        return lax.dot_general(a_values, b_values, dimensions, preferred_element_type=jnp.float32)

    def promote(accumulator: jax.Array, product: jax.Array, sa: jax.Array, sb: jax.Array) -> jax.Array:
        return accumulator + (product * (sa * sb) if promotion_order == "deepgemm" else product * sa * sb)

    return _matmul(dot, promote, a, b, out_dtype)


def _matmul(dot: _Dot, promote: _Promote, a: ScaledArray, b: ScaledArray, out_dtype: Any) -> jax.Array:
    """Computes the dots of the blocks of K, promotes them in order, rounds the accumulator to `out_dtype`.

    The codes go as bytes (`code_bits`).
    """
    a_codes, b_codes = code_bits(a.qvalue), code_bits(b.qvalue)
    a_scale, b_scale = _per_row(a), _per_row(b)
    blocks = a_scale.shape[1]
    accumulator = jnp.zeros((a.shape[0], b.shape[0]), jnp.float32)
    if blocks > FUSED_BLOCKS or (blocks > 1 and 8 * blocks * accumulator.size > FUSED_BYTES):
        accumulator = _loop(dot, promote, accumulator, a_codes, b_codes, a_scale, b_scale)
    else:
        for block, product in enumerate(_block_dots(dot, a_codes, b_codes, blocks)):
            accumulator = promote(accumulator, product, a_scale[:, block, None], b_scale[None, :, block])
    return round_output(accumulator, out_dtype)


def _block_dots(dot: _Dot, a_codes: jax.Array, b_codes: jax.Array, blocks: int) -> Sequence[jax.Array]:
    """The dot [M, N] of each block of K."""
    if blocks <= UNROLLED_BLOCKS:
        # the last one may be partial
        slices = [slice(block * BLOCK, (block + 1) * BLOCK) for block in range(blocks)]
        return [dot(a_codes[:, k], b_codes[:, k], _CONTRACT_LAST) for k in slices]
    a_blocks, b_blocks = (
        _pad_depth(codes, blocks).reshape(-1, blocks, BLOCK) for codes in (a_codes, b_codes)
    )
    products = dot(a_blocks.transpose(1, 0, 2), b_blocks.transpose(1, 0, 2), _CONTRACT_LAST_BATCHED)
    return [products[block] for block in range(blocks)]


def _loop(
    dot: _Dot,
    promote: _Promote,
    accumulator: jax.Array,
    a_codes: jax.Array,
    b_codes: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
) -> jax.Array:
    """The accumulator [M, N] after the last block, with one block of K per turn of a loop."""
    blocks = a_scale.shape[1]
    a_codes, b_codes = _pad_depth(a_codes, blocks), _pad_depth(b_codes, blocks)

    def body(block: jax.Array, accumulator: jax.Array) -> jax.Array:
        a_block, b_block = (
            lax.dynamic_slice_in_dim(codes, block * BLOCK, BLOCK, 1) for codes in (a_codes, b_codes)
        )
        sa, sb = (lax.dynamic_index_in_dim(scale, block, 1, keepdims=False) for scale in (a_scale, b_scale))
        return promote(accumulator, dot(a_block, b_block, _CONTRACT_LAST), sa[:, None], sb[None, :])

    return lax.fori_loop(0, blocks, body, accumulator)


def _pad_depth(codes: jax.Array, blocks: int) -> jax.Array:
    """Codes with K padded to whole blocks by zeros, which add nothing."""
    missing = blocks * BLOCK - codes.shape[1]
    return jnp.pad(codes, ((0, 0), (0, missing))) if missing else codes


def _per_row(array: ScaledArray) -> jax.Array:
    """Scales [ceil(R / r), Kb] as one per row [R, Kb]."""
    edge = array.block_shape[0]
    # a weakly typed scale would be multiplied in float64
    scale = lax.convert_element_type(array.scale, jnp.float32)
    return jnp.repeat(scale, edge, axis=0)[: array.shape[0]] if edge > 1 else scale
