"""RMSNorm followed by the quantiser, as one Pallas Mosaic GPU kernel that reads each value once.

A matrix [M, D] is treated as the matrix [M D / 128, 128] of its blocks, row after row. A warpgroup takes up
to 64 of these rows: as many whole tokens as fit and make a multiple of eight rows. These are all 64 if
D / 128 is a power of two, 40 for D = 2560 and 5120, and 56 for 3584. The rows after them are computed too,
but not written. A program has two warpgroups. It goes over its rows twice, in shared memory:

    1. h = x (+ residual); the float64 sum of h^2 of each row, then of the D / 128 rows of each token, in
      order
    2. the new residual over the old one, the normalised value over x; then scales and codes as in `mosaic`

The float64 sums of rows pass through shared memory as pairs of FP32 numbers (48 bits). The scales are written
as [M, D / 128]. Arithmetic and rounding points are those of `fused`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import BLOCK, E4M3
from pallas_kernels.mosaic_common import launch, tile
from pallas_kernels.quantize.mosaic import CHUNK, HALF, quantize_half, wide_tile
from pallas_kernels.quantize.producers import round_to_bfloat16
from pallas_kernels.scaled_array import ScaledArray

_PER_ROW = plgpu.Layout.WGMMA.reduce(1)
_ALIGNED = 8
"""The number of rows that TMA and the layout of shared memory need together."""


def tokens_per_half(blocks: int) -> int:
    """The most tokens, of `blocks` rows each, with a multiple of eight rows that fits into 64 rows.

    Raises ValueError if no number of tokens fits.
    """
    fitting = [tokens for tokens in range(1, HALF // blocks + 1) if tokens * blocks % _ALIGNED == 0]
    if not fitting:
        raise ValueError(
            f"tokens_per_half: no tile: got {blocks} blocks a token, expected some of them to make 8, "
            f"16, ... or {HALF}."
        )
    return fitting[-1]


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6), inline=True)
def rms_norm_quantize(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None,
    eps: float,
    variant: str,
    scale_format: str,
    interpret: bool,
) -> tuple[ScaledArray, jax.Array]:
    """(quantised RMSNorm, new residual) of bfloat16 x, residual [M, D], weight [D]; D in `KERNEL_WIDTHS`."""
    tokens, width = x.shape
    blocks = width // BLOCK
    # added tokens that make the number of rows a multiple of eight
    missing = -tokens % (_ALIGNED // math.gcd(blocks, _ALIGNED))
    used = tokens_per_half(blocks) * blocks
    rows = (tokens + missing) * blocks
    weight = weight.reshape(blocks, BLOCK)
    inputs = [_rows(x, missing), weight if blocks % _ALIGNED == 0 else jnp.tile(weight, (used // blocks, 1))]
    out_type = [jax.ShapeDtypeStruct((rows, BLOCK), E4M3), jax.ShapeDtypeStruct((rows,), jnp.float32)]
    scratch = {
        "x_smem": wide_tile(BLOCK, jnp.bfloat16),
        "weight_smem": wide_tile(HALF, jnp.bfloat16),
        "codes_smem": tile(BLOCK, CHUNK, E4M3, leading=(BLOCK // CHUNK,)),
        "scale_smem": plgpu.SMEM((BLOCK,), jnp.float32),
        "sums_smem": plgpu.SMEM((2, BLOCK), jnp.float32),
    }
    if residual is not None:
        inputs.append(_rows(residual, missing))
        out_type.append(jax.ShapeDtypeStruct((rows, BLOCK), jnp.bfloat16))
        scratch["residual_smem"] = wide_tile(BLOCK, jnp.bfloat16)
    scratch["loaded"] = plgpu.Barrier(num_arrivals=2 * (len(inputs) - 1) + used // inputs[1].shape[0])
    kernel = launch(
        functools.partial(
            _body, blocks=blocks, used=used, eps=eps, variant=variant, scale_format=scale_format
        ),
        interpret=interpret,
        out_type=tuple(out_type),
        grid=(-(-rows // (2 * used)),),
        grid_names=("tile",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
    )
    codes, scale, *total = (out.reshape(tokens + missing, -1)[:tokens] for out in kernel(*inputs))
    return ScaledArray(codes, scale, (1, BLOCK)), total[0] if total else x


def _rows(x: jax.Array, missing: int) -> jax.Array:
    """[M, D] as its blocks [(M + missing) D / 128, 128]; a copy only if tokens of zeros are added."""
    return (jnp.pad(x, ((0, missing), (0, 0))) if missing else x).reshape(-1, BLOCK)


def _body(
    *refs: Any, blocks: int, used: int, eps: float, variant: str, scale_format: str, **scratch: Any
) -> None:
    """The kernel, with `used` rows per warpgroup: load, sum squares, normalise, quantise, store."""
    has_residual = "residual_smem" in scratch
    x_gmem, weight_gmem, *rest = refs
    residual_gmem: Any = rest.pop(0) if has_residual else None
    codes_gmem, scale_gmem, *total_gmem = rest
    loaded, weight_smem, codes_smem = scratch["loaded"], scratch["weight_smem"], scratch["codes_smem"]
    warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("tile")
    half, used_half = pl.ds(warpgroup * HALF, HALF), pl.ds(warpgroup * HALF, used)
    rows = pl.ds((program * 2 + warpgroup) * used, used)
    x_smem = scratch["x_smem"].at[half]
    residual_smem = scratch["residual_smem"].at[half] if has_residual else None

    @pl.when(warpgroup == 0)
    def _load() -> None:
        for part in range(2):
            theirs, here = pl.ds((program * 2 + part) * used, used), pl.ds(part * HALF, used)
            plgpu.copy_gmem_to_smem(x_gmem.at[theirs], scratch["x_smem"].at[here], loaded)
            if has_residual:
                plgpu.copy_gmem_to_smem(residual_gmem.at[theirs], scratch["residual_smem"].at[here], loaded)
        for start in range(0, used, weight_gmem.shape[0]):
            plgpu.copy_gmem_to_smem(weight_gmem, weight_smem.at[pl.ds(start, weight_gmem.shape[0])], loaded)

    plgpu.barrier_wait(loaded)
    sums = _sums_of_squares(x_smem, residual_smem, variant)
    factors = _token_factors(sums, scratch["sums_smem"], warpgroup, blocks, used // blocks, eps)
    _normalize(x_smem, residual_smem, weight_smem, factors, variant)
    scratch["scale_smem"][half] = quantize_half(
        lambda columns: x_smem.at[:, columns], codes_smem.at[:, half], scale_format
    )
    plgpu.commit_smem()
    for chunk in range(BLOCK // CHUNK):
        plgpu.copy_smem_to_gmem(
            codes_smem.at[chunk, used_half], codes_gmem.at[rows, pl.ds(chunk * CHUNK, CHUNK)]
        )
    plgpu.copy_smem_to_gmem(scratch["scale_smem"].at[used_half], scale_gmem.at[rows])
    if has_residual:
        plgpu.copy_smem_to_gmem(scratch["residual_smem"].at[used_half], total_gmem[0].at[rows])
    plgpu.wait_smem_to_gmem(0)


def _read(x_smem: Any, residual_smem: Any, columns: Any, variant: str) -> tuple[jax.Array, jax.Array]:
    """(h, bf16(h)) as float32 [64, 64] of a chunk; h is rounded in the variant "cuda"."""
    h = plgpu.load(x_smem.at[:, columns], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    if residual_smem is None:
        return h, h
    h = h + plgpu.load(residual_smem.at[:, columns], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    total = round_to_bfloat16(h)
    return (total if variant == "cuda" else h), total


def _sums_of_squares(x_smem: Any, residual_smem: Any, variant: str) -> jax.Array:
    """Sum of h^2 over each of 64 rows of 128: float64 [64]."""

    def step(chunk: jax.Array, sums: jax.Array) -> jax.Array:
        h, _ = _read(x_smem, residual_smem, pl.ds(chunk * CHUNK, CHUNK), variant)
        with jax.enable_x64(True):
            wide = lax.convert_element_type(h, jnp.float64)
            return sums + jnp.sum(wide * wide, axis=1)

    with jax.enable_x64(True):
        zeros = plgpu.layout_cast(jnp.zeros((HALF,), jnp.float64), _PER_ROW)
        return lax.fori_loop(jnp.int32(0), jnp.int32(BLOCK // CHUNK), step, zeros)


def _token_factors(
    sums: jax.Array, sums_smem: Any, warpgroup: jax.Array, blocks: int, tokens: int, eps: float
) -> jax.Array:
    """rsqrt(mean(h^2) + eps) of each row's token, float64 [64]; unused rows get that of the last token."""
    with jax.enable_x64(True):
        _write_sums(sums, sums_smem, pl.ds(warpgroup * HALF, HALF))
        row = plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=_PER_ROW)

        def token_factor(token: jax.Array, factors: jax.Array) -> jax.Array:
            def add(block: jax.Array, total: jax.Array) -> jax.Array:
                return total + _read_sum(sums_smem, warpgroup * HALF + token * blocks + block)

            total = lax.fori_loop(jnp.int32(0), jnp.int32(blocks), add, jnp.float64(0))
            factor = lax.rsqrt(total / jnp.float64(blocks * BLOCK) + jnp.float64(eps))
            return jnp.where(row >= token * blocks, jnp.broadcast_to(factor, (HALF,)), factors)

        zeros = plgpu.layout_cast(jnp.zeros((HALF,), jnp.float64), _PER_ROW)
        return lax.fori_loop(jnp.int32(0), jnp.int32(tokens), token_factor, zeros)


def _write_sums(sums: jax.Array, sums_smem: Any, rows: Any) -> None:
    """Writes non-negative float64 sums [64] as FP32 pairs; beyond FP32's range scaled down and negative."""
    scaled = jnp.where(sums > jnp.float64(2.0**100), sums * jnp.float64(-(2.0**-160)), sums)
    upper = lax.convert_element_type(scaled, jnp.float32)
    lower = lax.convert_element_type(scaled - lax.convert_element_type(upper, jnp.float64), jnp.float32)
    sums_smem[0, rows] = upper
    sums_smem[1, rows] = jnp.where(sums < jnp.float64(jnp.inf), lower, jnp.zeros_like(lower))


def _read_sum(sums_smem: Any, row: jax.Array) -> jax.Array:
    """Reads one sum written by `_write_sums`: a float64 scalar of 48 bits."""
    upper, lower = (lax.convert_element_type(sums_smem[part, row], jnp.float64) for part in range(2))
    scaled = upper + lower
    return jnp.where(scaled < jnp.float64(0), scaled * jnp.float64(-(2.0**160)), scaled)


def _normalize(x_smem: Any, residual_smem: Any, weight_smem: Any, factors: jax.Array, variant: str) -> None:
    """Overwrites x with the normalised, weighted value and the residual with bf16(x + residual)."""

    def step(chunk: jax.Array, _: None) -> None:
        columns = pl.ds(chunk * CHUNK, CHUNK)
        h, total = _read(x_smem, residual_smem, columns, variant)
        with jax.enable_x64(True):
            wide = lax.convert_element_type(h, jnp.float64) * lax.broadcast_in_dim(factors, h.shape, (0,))
            normed = lax.convert_element_type(wide, jnp.float32)
        if variant == "native":
            normed = round_to_bfloat16(normed)
        weight = plgpu.load(weight_smem.at[:, columns], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        x_smem[:, columns] = (normed * weight).astype(jnp.bfloat16)
        if residual_smem is not None:
            residual_smem[:, columns] = total.astype(jnp.bfloat16)

    lax.fori_loop(0, BLOCK // CHUNK, step, None)
