"""The block-scaled product A Bᵀ by Pallas kernels: prepares operands for TMA and chooses a kernel by shape.

wgmma reads FP8 operands only along K, so both sides must have K last. For FProp they already do. DGrad
multiplies Wᵀ, and WGrad dYᵀ and Xᵀ; XLA makes these transposed copies before the kernel
(`ScaledArray.transpose()`; one read and one write of the codes). A quantiser that writes both layouts from
one read makes the same copies more cheaply; its output can be given to `matmul`.

TMA addresses arrays in tiles of 8 rows and 128 codes. If M, N or K do not fit, the operands are padded with
zero codes, which add nothing, and the result is cut. That is exact, at the price of a copy. No copy is made
for K and N in multiples of 128 and M in multiples of 8. A's scales are always stored as [K / 128, M], because
TMA reads them along M.
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
"""Rows of a tile of codes, or of the result, for TMA; 16 bytes hold half as many FP32 scales."""


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
      config: tiles; None takes the table's choice for this shape.
      accumulator: float32 [M, N] to add to, or None. The kernel adds it; the swapped kernel, and K of one
        block, add it afterwards.
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
    # a kernel could fuse the only block's product and this addition into one multiply-add
    if accumulator is not None and sizes["blocks"] == 1:
        product = TiledGemm(**common, per_column=per_column)(*operands, None, interpret=interpret)[:m, :n]
        return add_finished(accumulator, product)
    if accumulator is not None:
        accumulator = jnp.pad(accumulator, ((0, sizes["m"] - m), (0, sizes["n"] - n)))
    return TiledGemm(**common, per_column=per_column)(*operands, accumulator, interpret=interpret)[:m, :n]


def _fill(codes: jax.Array, rows: int) -> jax.Array:
    """Codes [R, K] padded with zeros to a multiple of `rows` and whole blocks of K; no copy if they fit."""
    missing = (-codes.shape[0] % rows, -codes.shape[1] % BLOCK)
    return jnp.pad(codes, ((0, missing[0]), (0, missing[1]))) if any(missing) else codes


def _turn(scale: jax.Array, rows: int) -> jax.Array:
    """Scales [R, K / 128] transposed to [K / 128, rows], with zeros after the last."""
    return jnp.pad(scale.T, ((0, 0), (0, rows - scale.shape[0])))
