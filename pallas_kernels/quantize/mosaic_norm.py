"""RMSNorm and the quantiser behind it as one Pallas Mosaic GPU kernel: each value is read once and written as FP8.

A matrix [M, D] is the matrix [M D / 128, 128] of its blocks, row after row. A program takes 128 of these rows, that is
16384 / D tokens, one warpgroup 64 of them. It goes over its rows twice, in shared memory:

    1. h = x (+ residual); the float64 sum of h^2 of each row, then of the D / 128 rows of each token, in order
    2. the new residual over the old one, the normalised value over x; then scales and codes as in `mosaic`

The float64 sums of rows pass through shared memory as pairs of FP32 numbers (48 bits). The scales come out as [M, D / 128].
Arithmetic and rounding points are those of `fused`.
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
from pallas_kernels.quantize.mosaic import CHUNK, HALF, quantize_half, store_half, wide_tile
from pallas_kernels.quantize.producers import round_to_bfloat16
from pallas_kernels.scaled_array import ScaledArray

_PER_ROW = plgpu.Layout.WGMMA.reduce(1)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6), inline=True)
def rms_norm_quantize(
    x: jax.Array, weight: jax.Array, residual: jax.Array | None, eps: float, variant: str, scale_format: str, interpret: bool
) -> tuple[ScaledArray, jax.Array]:
    """(quantised RMSNorm, new residual) of bfloat16 x, residual [M, D] and weight [D]; D of `fused.KERNEL_WIDTHS`."""
    tokens, width = x.shape
    blocks = width // BLOCK
    rows = tokens * blocks
    inputs = [x.reshape(rows, BLOCK), weight.reshape(blocks, BLOCK)]
    out_type = [jax.ShapeDtypeStruct((rows, BLOCK), E4M3), jax.ShapeDtypeStruct((rows,), jnp.float32)]
    scratch = {
        "x_smem": wide_tile(BLOCK, jnp.bfloat16),
        "weight_smem": wide_tile(HALF, jnp.bfloat16),
        "codes_smem": tile(BLOCK, CHUNK, E4M3, leading=(BLOCK // CHUNK,)),
        "scale_smem": plgpu.SMEM((BLOCK,), jnp.float32),
        "sums_smem": plgpu.SMEM((2, BLOCK), jnp.float32),
    }
    if residual is not None:
        inputs.append(residual.reshape(rows, BLOCK))
        out_type.append(jax.ShapeDtypeStruct((rows, BLOCK), jnp.bfloat16))
        scratch["residual_smem"] = wide_tile(BLOCK, jnp.bfloat16)
    scratch["loaded"] = plgpu.Barrier(num_arrivals=len(inputs) - 1 + HALF // blocks)
    kernel = launch(
        functools.partial(_body, blocks=blocks, eps=eps, variant=variant, scale_format=scale_format),
        interpret=interpret,
        out_type=tuple(out_type),
        grid=(-(-rows // BLOCK),),
        grid_names=("tile",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
    )
    codes, scale, *total = kernel(*inputs)
    quantized = ScaledArray(codes.reshape(tokens, width), scale.reshape(tokens, blocks), (1, BLOCK))
    return quantized, total[0].reshape(tokens, width) if total else x


def _body(*refs: Any, blocks: int, eps: float, variant: str, scale_format: str, **scratch: Any) -> None:
    """128 rows of blocks: load, sum squares, normalise, quantise, store."""
    has_residual = "residual_smem" in scratch
    x_gmem, weight_gmem, *rest = refs
    residual_gmem: Any = rest.pop(0) if has_residual else None
    codes_gmem, scale_gmem, *total_gmem = rest
    loaded, weight_smem = scratch["loaded"], scratch["weight_smem"]
    warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("tile")
    half = pl.ds(warpgroup * HALF, HALF)
    half_rows = pl.ds(program * BLOCK + warpgroup * HALF, HALF)
    x_smem = scratch["x_smem"].at[half]
    residual_smem = scratch["residual_smem"].at[half] if has_residual else None

    @pl.when(warpgroup == 0)
    def _load() -> None:
        rows = pl.ds(program * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(x_gmem.at[rows], scratch["x_smem"], loaded)
        if has_residual:
            plgpu.copy_gmem_to_smem(residual_gmem.at[rows], scratch["residual_smem"], loaded)
        for token in range(HALF // blocks):
            plgpu.copy_gmem_to_smem(weight_gmem, weight_smem.at[pl.ds(token * blocks, blocks)], loaded)

    plgpu.barrier_wait(loaded)
    sums = _sums_of_squares(x_smem, residual_smem, variant)
    factors = _token_factors(sums, scratch["sums_smem"], warpgroup, blocks, eps)
    _normalize(x_smem, residual_smem, weight_smem, factors, variant)
    scratch["scale_smem"][half] = quantize_half(lambda columns: x_smem.at[:, columns], scratch["codes_smem"].at[:, half], scale_format)
    plgpu.commit_smem()
    store_half(scratch["codes_smem"], codes_gmem, warpgroup, program, jnp.int32(0))
    plgpu.copy_smem_to_gmem(scratch["scale_smem"].at[half], scale_gmem.at[half_rows])
    if has_residual:
        plgpu.copy_smem_to_gmem(residual_smem, total_gmem[0].at[half_rows])
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


def _token_factors(sums: jax.Array, sums_smem: Any, warpgroup: jax.Array, blocks: int, eps: float) -> jax.Array:
    """rsqrt(mean(h^2) + eps) of the token that each row belongs to: float64 [64]."""
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
        return lax.fori_loop(jnp.int32(0), jnp.int32(HALF // blocks), token_factor, zeros)


def _write_sums(sums: jax.Array, sums_smem: Any, rows: Any) -> None:
    """Writes non-negative float64 sums [64] as pairs of FP32; those beyond FP32's range scaled down and negative."""
    scaled = jnp.where(sums > jnp.float64(2.0**100), sums * jnp.float64(-(2.0**-160)), sums)
    upper = lax.convert_element_type(scaled, jnp.float32)
    lower = lax.convert_element_type(scaled - lax.convert_element_type(upper, jnp.float64), jnp.float32)
    sums_smem[0, rows] = upper
    sums_smem[1, rows] = jnp.where(sums < jnp.float64(jnp.inf), lower, jnp.zeros_like(lower))


def _read_sum(sums_smem: Any, row: jax.Array) -> jax.Array:
    """One sum that `_write_sums` wrote: float64 scalar, 48 bits."""
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
