"""The quantisers as one Pallas Mosaic GPU kernel: a tile of 128 x 128 values is read once and written as FP8.

A plan says what is written, from the one read:

    straight     codes [M, K] with scales along rows (1, 128), or one scale a block (128, 128)
    transposed   codes of the transposed matrix [K, M], M contiguous, with scales along tokens, or the block's

One program quantises one tile: TMA brings it into shared memory, each of two warpgroups takes 64 rows (straight) and 64
columns (transposed, read through the transposing load of shared memory), and TMA writes codes and scales. The largest
magnitudes of a 128 x 128 block meet in shared memory. The arithmetic is `rounding`: the bits of `reference`.

Scales of rows are written as [K / 128, M] and of columns as [M / 128, K], the contiguous axis last: what the GEMM's TMA
reads. M may be any size: TMA reads zeros past the edge, which raise no maximum, and writes nothing there. Where M is no
multiple of 16, arrays that have M last are padded to one, since TMA wants rows of 16 bytes, and cut afterwards.

Takes BF16 and FP16 [M, K] with K a multiple of 128. Speeds: `docs/benchmarks.md`, measured by `python -m
pallas_kernels.bench quantize`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import BLOCK, E4M3
from pallas_kernels.mosaic_common import SWIZZLE_BYTES, launch, tile
from pallas_kernels.quantize.rounding import Divisor, encode, magnitude_bits, magnitude_of_bits, scale_of

HALF = BLOCK // 2
"""Rows or columns of a tile that one warpgroup takes."""
ALIGNMENT = 16
"""Rows of codes must be a multiple of this many bytes for TMA."""
INPUT_DTYPES = (jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one read of a matrix [M, K] is turned into.

    straight: None, "row" or "block": scales of the codes [M, K].
    transposed: None, "column" or "block": scales of the transposed codes [K, M]. At least one of the two is not None.
    """

    straight: str | None
    transposed: str | None

    @property
    def has_blocks(self) -> bool:
        """Whether a (128, 128) scale is needed."""
        return "block" in (self.straight, self.transposed)


def shape_problem(x: jax.Array) -> str | None:
    """Why the kernel cannot take `x`, None where it can."""
    if x.ndim != 2 or 0 in x.shape:
        return f"x.shape is {tuple(x.shape)}, expected two non-zero dimensions"
    if x.shape[1] % BLOCK:
        return f"x.shape is {tuple(x.shape)}, expected a second dimension that is a multiple of {BLOCK} (TMA and whole blocks)"
    if x.dtype not in INPUT_DTYPES:
        return f"x.dtype is {x.dtype}, expected bfloat16 or float16"
    return None


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def quantize(x: jax.Array, plan: Plan, scale_format: str, interpret: bool) -> dict[str, jax.Array]:
    """Codes and scales of `x` [M, K]; arguments are checked by the caller (`shape_problem`).

    Returns:
      What the plan asks for, by name: "straight" float8_e4m3fn [M, K], "row" float32 [K / 128, M], "transposed"
      float8_e4m3fn [K, M], "column" float32 [ceil(M / 128), K], "block" float32 [ceil(M / 128), K / 128].
    """
    rows, columns = x.shape
    padded = -(-rows // ALIGNMENT) * ALIGNMENT
    row_blocks, column_blocks = -(-rows // BLOCK), columns // BLOCK
    shapes = {
        "straight": ((rows, columns), E4M3),
        "row": ((column_blocks, padded), jnp.float32),
        "transposed": ((columns, padded), E4M3),
        "column": ((row_blocks, columns), jnp.float32),
        "block": ((row_blocks, column_blocks), jnp.float32),
    }
    names = _outputs(plan)
    kernel = launch(
        functools.partial(_body, plan=plan, names=names, scale_format=scale_format),
        interpret=interpret,
        out_type=tuple(jax.ShapeDtypeStruct(*shapes[name]) for name in names),
        grid=(row_blocks, column_blocks),
        grid_names=("row", "column"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=_scratch(plan, x.dtype),
    )
    outputs = dict(zip(names, kernel(x), strict=True))
    return {name: value[:, :rows] if value.shape[1] == padded != rows else value for name, value in outputs.items()}


def _outputs(plan: Plan) -> tuple[str, ...]:
    """Names of the arrays that a plan writes, in order."""
    wanted = {
        "straight": plan.straight is not None,
        "row": plan.straight == "row",
        "transposed": plan.transposed is not None,
        "column": plan.transposed == "column",
        "block": plan.has_blocks,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def _scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one program."""
    scratch: dict[str, Any] = {"x_smem": wide_tile(BLOCK, dtype), "loaded": plgpu.Barrier()}
    if plan.straight:
        scratch["straight_smem"] = tile(BLOCK, BLOCK, E4M3)
    if plan.transposed:
        scratch["transposed_smem"] = tile(BLOCK, BLOCK, E4M3)
    for name in ("row", "column", "block"):
        if name in _outputs(plan):
            scratch[f"{name}_smem"] = plgpu.SMEM((BLOCK,), jnp.float32)
    if plan.has_blocks:
        scratch["exchanged"] = plgpu.Barrier(num_arrivals=2)
    return scratch


def wide_tile(rows: int, dtype: Any) -> Any:
    """A shared memory buffer [rows, 128] of `dtype`, which may be wider than the 128 bytes of a swizzled row."""
    transforms = (plgpu.TilingTransform((8, SWIZZLE_BYTES // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(SWIZZLE_BYTES))
    return plgpu.SMEM((rows, BLOCK), dtype, transforms=transforms)


def _body(x_gmem: Any, *outputs: Any, plan: Plan, names: tuple[str, ...], scale_format: str, x_smem: Any, loaded: Any, **scratch: Any) -> None:
    """One tile: load, quantise 64 rows and 64 columns in each warpgroup, store."""
    gmem = dict(zip(names, outputs, strict=True))
    warpgroup = lax.axis_index("warpgroup")
    row, column = lax.axis_index("row"), lax.axis_index("column")
    half = pl.ds(warpgroup * HALF, HALF)
    tile_rows, tile_columns = pl.ds(row * BLOCK, BLOCK), pl.ds(column * BLOCK, BLOCK)
    half_rows, half_columns = (pl.ds(i * BLOCK + warpgroup * HALF, HALF) for i in (row, column))

    @pl.when(warpgroup == 0)
    def _load() -> None:
        plgpu.copy_gmem_to_smem(x_gmem.at[tile_rows, tile_columns], x_smem, loaded)

    plgpu.barrier_wait(loaded)
    stores = []
    block_scale = None
    if plan.has_blocks:
        block_scale = _block_scale(x_smem, half, scale_format, scratch["block_smem"], scratch["exchanged"])
    if plan.straight:
        x = plgpu.load(x_smem.at[half], layout=plgpu.Layout.WGMMA)
        scale = quantize_rows(x, block_scale if plan.straight == "block" else None, scale_format, scratch["straight_smem"].at[half])
        stores.append((scratch["straight_smem"].at[half], gmem["straight"].at[half_rows, tile_columns]))
        if plan.straight == "row":
            scratch["row_smem"][half] = scale
            stores.append((scratch["row_smem"].at[half], gmem["row"].at[column, half_rows]))
    if plan.transposed:
        x = plgpu.load(x_smem.at[:, half].transpose((1, 0)), layout=plgpu.Layout.WGMMA)
        scale = quantize_rows(x, block_scale if plan.transposed == "block" else None, scale_format, scratch["transposed_smem"].at[half])
        stores.append((scratch["transposed_smem"].at[half], gmem["transposed"].at[half_columns, tile_rows]))
        if plan.transposed == "column":
            scratch["column_smem"][half] = scale
            stores.append((scratch["column_smem"].at[half], gmem["column"].at[row, half_columns]))
    plgpu.commit_smem()
    for source, destination in stores:
        plgpu.copy_smem_to_gmem(source, destination)
    if block_scale is not None:

        @pl.when(warpgroup == 0)
        def _store_block_scale() -> None:
            gmem["block"][row, column] = jnp.max(block_scale)

    plgpu.wait_smem_to_gmem(0)


def quantize_rows(x: jax.Array, scale: jax.Array | None, scale_format: str, codes_smem: Any) -> jax.Array:
    """Writes the codes of `x` [64, 128] to `codes_smem`; returns the scales of its rows [64], computed where not given."""
    if scale is None:
        scale = scale_of(magnitude_of_bits(jnp.max(magnitude_bits(x), axis=1), x.dtype), scale_format)
    codes_smem[...] = encode(x.astype(jnp.float32), Divisor.of(scale).along(0, x.shape))
    return scale


def _block_scale(x_smem: Any, half: Any, scale_format: str, maxima_smem: Any, exchanged: Any) -> jax.Array:
    """The scale of the whole tile, once per row of a half [64]: every warpgroup sees the maxima of all rows."""
    x = plgpu.load(x_smem.at[half], layout=plgpu.Layout.WGMMA)
    maxima_smem[half] = magnitude_of_bits(jnp.max(magnitude_bits(x), axis=1), x.dtype)
    plgpu.barrier_arrive(exchanged)
    plgpu.barrier_wait(exchanged)
    maxima = plgpu.load(maxima_smem, layout=plgpu.Layout.WG_STRIDED((BLOCK,), 1))
    largest = jnp.max(lax.bitcast_convert_type(maxima, jnp.int32))
    return scale_of(lax.bitcast_convert_type(jnp.broadcast_to(largest, (HALF,)), jnp.float32), scale_format)
