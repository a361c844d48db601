"""Requantises the forward's saved codes along tokens, for WGrad, as one Pallas Mosaic GPU kernel.

    X^ = code * scale, rounded to FP32          from codes [M, K] with scales along rows (1, 128)
    codes, scales of X^ in blocks (128, 1)      written transposed [K, M], M contiguous, as `mosaic` writes
                                                them

One program transposes one tile of 128 x 128 codes. Shared memory can transpose 16-bit values while reading,
but not 8-bit ones, so the codes pass through it as FP16, which represents each of them exactly. Afterwards
they are multiplied in FP32 by the scale of their token, which is now along the columns. The kernel reads and
writes one byte a value, while XLA's form also writes and reads X^ in FP32. The largest magnitude of a feature
over 128 tokens is that of |code| * scale, the values that are encoded.

The speed on a GPU is not measured yet; `python -m pallas_kernels.bench quantize` measures it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import BLOCK, E4M3
from pallas_kernels.mosaic_common import launch, tile
from pallas_kernels.quantize.mosaic import CHUNK, HALF, ROW_ALIGNMENT, store_half, wait_for_both, wide_tile
from pallas_kernels.quantize.rounding import (
    Divisor,
    encode,
    float_bits,
    float_of_bits,
    magnitude_bits,
    magnitude_of_bits,
    scale_of,
)

_PER_TOKEN, _PER_FEATURE = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def requantize(
    codes: jax.Array, scales: jax.Array, scale_format: str, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """(codes float8_e4m3fn [K, M], scales float32 [ceil(M / 128), K]) along tokens.

    Args (checked by the caller):
      codes: float8_e4m3fn [M, K]; scales: float32 [K / 128, M].
      scale_format: of the result; interpret: run on a CPU.
    """
    rows, columns = codes.shape
    padded, wide = (-(-rows // edge) * edge for edge in (ROW_ALIGNMENT, CHUNK))
    if padded != rows:
        codes, scales = (
            jnp.pad(codes, ((0, padded - rows), (0, 0))),
            jnp.pad(scales, ((0, 0), (0, padded - rows))),
        )
    row_blocks = -(-rows // BLOCK)
    kernel = launch(
        functools.partial(_body, scale_format=scale_format),
        interpret=interpret,
        out_type=(
            jax.ShapeDtypeStruct((columns, wide), E4M3),
            jax.ShapeDtypeStruct((row_blocks, columns), jnp.float32),
        ),
        grid=(row_blocks, columns // BLOCK),
        grid_names=("row", "column"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types={
            "codes_smem": tile(BLOCK, CHUNK, E4M3, leading=(BLOCK // CHUNK,)),
            "scales_smem": plgpu.SMEM((BLOCK,), jnp.float32),
            "wide_smem": wide_tile(BLOCK, jnp.float16),
            "out_smem": tile(BLOCK, CHUNK, E4M3, leading=(BLOCK // CHUNK,)),
            "out_scales_smem": plgpu.SMEM((BLOCK,), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=1 + BLOCK // CHUNK),
            "widened": plgpu.Barrier(num_arrivals=2),
        },
    )
    out, out_scales = kernel(codes, scales)
    return lax.slice_in_dim(out, 0, rows, axis=1), out_scales


def _body(
    codes_gmem: Any,
    scales_gmem: Any,
    out_gmem: Any,
    out_scales_gmem: Any,
    *,
    scale_format: str,
    codes_smem: Any,
    scales_smem: Any,
    wide_smem: Any,
    out_smem: Any,
    out_scales_smem: Any,
    loaded: Any,
    widened: Any,
) -> None:
    """One tile: load, widen 64 tokens and encode 64 features in each warpgroup, store."""
    warpgroup = lax.axis_index("warpgroup")
    row, column = lax.axis_index("row"), lax.axis_index("column")
    half, tokens = pl.ds(warpgroup * HALF, HALF), pl.ds(row * BLOCK, BLOCK)

    @pl.when(warpgroup == 0)
    def _load() -> None:
        for chunk in range(BLOCK // CHUNK):
            features = pl.ds(column * BLOCK + chunk * CHUNK, CHUNK)
            plgpu.copy_gmem_to_smem(codes_gmem.at[tokens, features], codes_smem.at[chunk], loaded)
        plgpu.copy_gmem_to_smem(scales_gmem.at[column, tokens], scales_smem, loaded)

    plgpu.barrier_wait(loaded)
    _widen_half(codes_smem.at[:, half], wide_smem.at[half])
    wait_for_both(widened)
    scale = _encode_half(
        wide_smem.at[:, half].transpose((1, 0)), scales_smem, out_smem.at[:, half], scale_format
    )
    out_scales_smem[half] = scale
    plgpu.commit_smem()
    store_half(out_smem, out_gmem, warpgroup, column, row)
    features = pl.ds(column * BLOCK + warpgroup * HALF, HALF)
    plgpu.copy_smem_to_gmem(out_scales_smem.at[half], out_scales_gmem.at[row, features])
    plgpu.wait_smem_to_gmem(0)


def _widen_half(codes_smem: Any, wide_smem: Any) -> None:
    """Writes codes [2, 64, 64], by chunk of the features, as FP16 [64, 128]."""

    def step(chunk: jax.Array, _: None) -> None:
        codes = plgpu.load(codes_smem.at[chunk], layout=plgpu.Layout.WGMMA)
        wide_smem[:, pl.ds(chunk * CHUNK, CHUNK)] = codes.astype(jnp.float16)

    lax.fori_loop(0, BLOCK // CHUNK, step, None)


def _encode_half(turned: Any, scales_smem: Any, out_smem: Any, scale_format: str) -> jax.Array:
    """Encodes 64 features [64, 128 tokens], FP16 codes times token scales; returns the new scales [64]."""

    def values(chunk: Any) -> jax.Array:
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        codes = plgpu.load(turned.at[:, tokens], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        scales = lax.broadcast_in_dim(
            plgpu.load(scales_smem.at[tokens], layout=_PER_TOKEN), (HALF, CHUNK), (1,)
        )
        return _pinned(codes * scales, scales)

    def largest(chunk: jax.Array, bits: jax.Array) -> jax.Array:
        return jnp.maximum(bits, jnp.max(magnitude_bits(values(chunk)), axis=1))

    bits = lax.fori_loop(
        0, BLOCK // CHUNK, largest, plgpu.layout_cast(jnp.zeros((HALF,), jnp.int32), _PER_FEATURE)
    )
    scale = scale_of(magnitude_of_bits(bits, jnp.float32), scale_format)
    divisor = Divisor.of(scale).along(0, (HALF, CHUNK))

    def step(chunk: jax.Array, _: None) -> None:
        out_smem[chunk] = encode(values(chunk), divisor)

    lax.fori_loop(0, BLOCK // CHUNK, step, None)
    return scale


def _pinned(product: jax.Array, scale: jax.Array) -> jax.Array:
    """The product rounded to FP32; `encode` subtracts from it, and a fused multiply-add would not round it.

    A scale's sign, which is zero, is added to the bits, an integer operation that no compiler can remove.
    """
    return float_of_bits(float_bits(product) | lax.shift_right_logical(float_bits(scale), jnp.int32(31)))
