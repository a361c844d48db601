"""The block-scaled product A Bᵀ by Pallas kernels: operands as TMA wants them, and the kernel for their
shape.

wgmma reads FP8 operands along K only, so both sides come with K last. For FProp they lie so already. DGrad
multiplies
Wᵀ and WGrad dYᵀ and Xᵀ: those are transposed copies, which XLA makes before the kernel
(`ScaledArray.transpose()`; one read and one write of the codes). A quantiser that writes both ways from one
read makes the same copies for less; give `matmul` its output then.

TMA addresses arrays in tiles of 8 rows and 128 codes. Where M, N or K do not fit, zero codes fill the
operands up, which
add nothing, and the result is cut: exact, at the price of a copy. No copy is made for K and N in multiples of
128 and M in multiples of 8. A's scales always go to [K / 128, M], because TMA reads them along M.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import BLOCK, add_finished
from pallas_kernels.gemm.config import LARGEST_SWAP_K, TuningConfig, choose
from pallas_kernels.gemm.mosaic_swap import SwappedGemm
from pallas_kernels.gemm.mosaic_tiles import TiledGemm
from pallas_kernels.scaled_array import ScaledArray

_ROWS = 8
"""Rows of a tile of codes, or of the result, as TMA sees them; 16 bytes of FP32 scales are half as many."""


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5), inline=True)
def matmul(
    a: ScaledArray,
    b: ScaledArray,
    out_dtype: Any,
    promotion_order: str,
    interpret: bool = False,
    config: TuningConfig | None = None,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """a [M, K] times b [N, K] transposed: [M, N] in `out_dtype`; row-invariant by construction.

    Args:
      a: block shape (1, 128).
      b: block shape (128, 128) or (1, 128).
      out_dtype: bfloat16, float16 or float32; rounded once from the FP32 sum.
      promotion_order: "deepgemm" or "triton".
      interpret: run on the CPU with race detection instead of on a GPU.
      config: tiles; the table's choice for this shape where None.
      accumulator: float32 [M, N] to add to, or None; in the kernel, but behind it where that is the swapped
        one or K is one block.
    Raises:
      NotImplementedError: `interpret` without an interpreter. ValueError: `config` does not fit the operands.
    """
    (m, k) = a.shape
    n = b.shape[0]
    per_column = b.block_shape[0] == 1
    config = choose(m, n, k, per_column) if config is None else config
    if config.swap and (per_column or k > LARGEST_SWAP_K):
        got = f"got swap=True, b.block_shape={b.block_shape}, K={k}"
        raise ValueError(
            f"matmul: wrong tiles: {got}, expected (128, 128) and K of at most {LARGEST_SWAP_K} with "
            "swap=True."
        )
    a_codes, b_codes = _fill(a.qvalue, _ROWS), _fill(b.qvalue, BLOCK)
    a_scale = _turn(a.scale, a_codes.shape[0])
    b_scale = _turn(b.scale, b_codes.shape[0]) if per_column else b.scale
    sizes = {"m": a_codes.shape[0], "n": b_codes.shape[0], "blocks": a.scale.shape[1]}
    common: dict[str, Any] = {
        **sizes,
        "promotion_order": promotion_order,
        "out_dtype": jnp.dtype(out_dtype),
        "config": config,
    }
    operands = (a_codes, b_codes, a_scale, b_scale)
    if config.swap:
        product = SwappedGemm(**common)(*operands, interpret=interpret)[:m, :n]
        return product if accumulator is None else add_finished(accumulator, product)
    # a kernel would make one multiply-add of the only block and the addition
    if accumulator is not None and sizes["blocks"] == 1:
        product = TiledGemm(**common, per_column=per_column)(*operands, None, interpret=interpret)[:m, :n]
        return add_finished(accumulator, product)
    if accumulator is not None:
        accumulator = jnp.pad(accumulator, ((0, sizes["m"] - m), (0, sizes["n"] - n)))
    return TiledGemm(**common, per_column=per_column)(*operands, accumulator, interpret=interpret)[:m, :n]


def _fill(codes: jax.Array, rows: int) -> jax.Array:
    """Codes [R, K] filled up with zeros to a multiple of `rows` and to whole blocks of K;
    the same array where it is.
    """
    missing = (-codes.shape[0] % rows, -codes.shape[1] % BLOCK)
    return jnp.pad(codes, ((0, missing[0]), (0, missing[1]))) if any(missing) else codes


def _turn(scale: jax.Array, rows: int) -> jax.Array:
    """Scales [R, K / 128] as [K / 128, rows], zeros behind the last."""
    return jnp.pad(scale.T, ((0, 0), (0, rows - scale.shape[0])))
