"""The quantisers as one Pallas Mosaic GPU kernel: a tile of 128 x 128 values is read once and written as FP8.

A plan selects the outputs that are written from the one read:

    straight     codes [M, K] with scales along rows (1, 128), or one scale a block (128, 128)
    transposed   codes of the transposed matrix [K, M], M contiguous, with scales along tokens, or the block's

One program quantises one tile: TMA brings it into shared memory, each of two warpgroups takes 64 rows
(straight) and 64 columns (transposed, read through the transposing load of shared memory), and TMA writes
codes and scales. The largest magnitudes of a 128 x 128 block are combined in shared memory. The arithmetic is
that of `rounding`, with the bits of `reference`.

Scales of rows are written as [K / 128, M] and of columns as [M / 128, K], with the contiguous axis last, as
the GEMM's TMA reads them. M may have any size: past the edge of the last tile TMA reads zeros, which raise no
maximum, and writes nothing. Tiles of shared memory have 8 rows and 64 columns, and TMA needs whole ones. If M
is not a multiple of 8 the matrix is padded with zeros, and if it is not a multiple of 64 the transposed codes
are written wider; the results are cut.

With two matrices, gate and up, the values are SiLU(gate) * up, which replaces gate in shared memory.

Takes BF16 and FP16 [M, K] with K a multiple of 128. The speed on a GPU is not measured yet; `python -m
pallas_kernels.bench quantize` measures it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import BLOCK, E4M3
from pallas_kernels.hopper import SWIZZLE_BYTES
from pallas_kernels.mosaic_common import launch, tile
from pallas_kernels.quantize.producers import silu_multiply
from pallas_kernels.quantize.rounding import Divisor, encode, magnitude_bits, magnitude_of_bits, scale_of
from pallas_kernels.scaled_array import ScaledArray

HALF = BLOCK // 2
"""Rows or columns of a tile that one warpgroup takes."""
CHUNK = 64
"""Values of a row encoded in one turn of a loop. With the loop a thread needs about 70 registers instead of
190, so that three programs fit on a multiprocessor and hide each other's loads."""
ROW_ALIGNMENT = 8
"""Tokens of the matrix are padded to a multiple of this."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The outputs made from one read of a matrix [M, K].

    straight: scales of the codes [M, K]: None, "row" or "block".
    transposed: scales of the transposed codes [K, M]: None, "column" or "block". At least one of the two is
      not None.
    """

    straight: str | None
    transposed: str | None

    @property
    def has_blocks(self) -> bool:
        """Whether a (128, 128) scale is needed."""
        return "block" in (self.straight, self.transposed)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def quantize(
    inputs: tuple[jax.Array, ...], plan: Plan, scale_format: str, interpret: bool
) -> dict[str, jax.Array]:
    """Codes and scales of x [M, K], or of SiLU(gate) * up; arguments are checked by the caller.

    Args:
      inputs: (x,), or (gate, up) in bfloat16.
      plan, scale_format: the outputs to write.
      interpret: run on a CPU.
    Returns:
      The plan's outputs by name: "straight" float8_e4m3fn [M, K], "row" float32 [K / 128, M], "transposed"
      float8_e4m3fn [K, M], "column" float32 [ceil(M / 128), K], "block" float32 [ceil(M / 128), K / 128].
    """
    rows, columns = inputs[0].shape
    padded, wide = (-(-rows // edge) * edge for edge in (ROW_ALIGNMENT, CHUNK))
    if padded != rows:
        inputs = tuple(jnp.pad(x, ((0, padded - rows), (0, 0))) for x in inputs)
    row_blocks, column_blocks = -(-rows // BLOCK), columns // BLOCK
    shapes = {
        "straight": ((padded, columns), E4M3),
        "row": ((column_blocks, padded), jnp.float32),
        "transposed": ((columns, wide), E4M3),
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
        scratch_types=_scratch(plan, len(inputs), inputs[0].dtype),
    )
    outputs = dict(zip(names, kernel(*inputs), strict=True))
    token_axes = {"straight": 0, "row": 1, "transposed": 1}
    return {
        name: lax.slice_in_dim(value, 0, rows, axis=token_axes[name]) if name in token_axes else value
        for name, value in outputs.items()
    }


def logical_arrays(outputs: dict[str, jax.Array]) -> tuple[ScaledArray, ScaledArray]:
    """The straight and transposed arrays of `quantize` with logical axes [M, K]; None if not in the plan."""
    row, column, block = outputs.get("row"), outputs.get("column"), outputs.get("block")
    codes, square = outputs.get("transposed"), (BLOCK, BLOCK)
    return (
        ScaledArray(outputs.get("straight"), *((block, square) if row is None else (row.T, (1, BLOCK)))),
        ScaledArray(
            None if codes is None else codes.T, *((block, square) if column is None else (column, (BLOCK, 1)))
        ),
    )


def _outputs(plan: Plan) -> tuple[str, ...]:
    """The names of the arrays that a plan writes, in order."""
    wanted = {
        "straight": plan.straight is not None,
        "row": plan.straight == "row",
        "transposed": plan.transposed is not None,
        "column": plan.transposed == "column",
        "block": plan.has_blocks,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def _scratch(plan: Plan, inputs: int, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one program."""
    scratch: dict[str, Any] = {
        "x_smem": wide_tile(BLOCK, dtype),
        "loaded": plgpu.Barrier(num_arrivals=inputs),
    }
    if inputs == 2:
        scratch |= {"up_smem": wide_tile(BLOCK, dtype), "multiplied": plgpu.Barrier(num_arrivals=2)}
    if plan.straight:
        scratch["straight_smem"] = tile(BLOCK, CHUNK, E4M3, leading=(BLOCK // CHUNK,))
    if plan.transposed:
        scratch["transposed_smem"] = tile(BLOCK, CHUNK, E4M3, leading=(BLOCK // CHUNK,))
    for name in ("row", "column", "block"):
        if name in _outputs(plan):
            scratch[f"{name}_smem"] = plgpu.SMEM((BLOCK,), jnp.float32)
    if plan.has_blocks:
        scratch["exchanged"] = plgpu.Barrier(num_arrivals=2)
    return scratch


def wide_tile(rows: int, dtype: Any) -> Any:
    """A shared-memory buffer [rows, 128] of `dtype`, which may exceed the 128 bytes of a swizzled row."""
    transforms = (
        plgpu.TilingTransform((8, SWIZZLE_BYTES // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(SWIZZLE_BYTES),
    )
    return plgpu.SMEM((rows, BLOCK), dtype, transforms=transforms)


def _body(
    *refs: Any,
    plan: Plan,
    names: tuple[str, ...],
    scale_format: str,
    x_smem: Any,
    loaded: Any,
    **scratch: Any,
) -> None:
    """One tile: load, quantise 64 rows and 64 columns in each warpgroup, store."""
    inputs, gmem = refs[: -len(names)], dict(zip(names, refs[-len(names) :], strict=True))
    warpgroup = lax.axis_index("warpgroup")
    row, column = lax.axis_index("row"), lax.axis_index("column")
    half = pl.ds(warpgroup * HALF, HALF)

    @pl.when(warpgroup == 0)
    def _load() -> None:
        for x_gmem, smem in zip(inputs, (x_smem, scratch.get("up_smem")), strict=False):
            plgpu.copy_gmem_to_smem(
                x_gmem.at[pl.ds(row * BLOCK, BLOCK), pl.ds(column * BLOCK, BLOCK)], smem, loaded
            )

    plgpu.barrier_wait(loaded)
    if "up_smem" in scratch:
        _multiply_half(x_smem.at[half], scratch["up_smem"].at[half])
        if plan.transposed:  # the columns of a half are written by both warpgroups
            wait_for_both(scratch["multiplied"])
    block_scale = None
    if plan.has_blocks:
        block_scale = _block_scale(
            x_smem.at[half], half, scale_format, scratch["block_smem"], scratch["exchanged"]
        )
    if plan.straight:
        scale = quantize_half(
            lambda columns: x_smem.at[half, columns],
            scratch["straight_smem"].at[:, half],
            scale_format,
            block_scale if plan.straight == "block" else None,
        )
        if plan.straight == "row":
            scratch["row_smem"][half] = scale
    if plan.transposed:
        scale = quantize_half(
            lambda tokens: x_smem.at[tokens, half].transpose((1, 0)),
            scratch["transposed_smem"].at[:, half],
            scale_format,
            block_scale if plan.transposed == "block" else None,
        )
        if plan.transposed == "column":
            scratch["column_smem"][half] = scale
    plgpu.commit_smem()
    if plan.straight:
        store_half(scratch["straight_smem"], gmem["straight"], warpgroup, row, column)
    if plan.transposed:
        store_half(scratch["transposed_smem"], gmem["transposed"], warpgroup, column, row)
    for name, scale_row, block in (("row", column, row), ("column", row, column)):
        if name in gmem:
            plgpu.copy_smem_to_gmem(
                scratch[f"{name}_smem"].at[half],
                gmem[name].at[scale_row, pl.ds(block * BLOCK + warpgroup * HALF, HALF)],
            )
    if block_scale is not None:

        @pl.when(warpgroup == 0)
        def _store_block_scale() -> None:
            gmem["block"][row, column] = jnp.max(block_scale)

    plgpu.wait_smem_to_gmem(0)


def quantize_half(
    read: Callable[[Any], Any], codes_smem: Any, scale_format: str, scale: jax.Array | None = None
) -> jax.Array:
    """Quantises 64 rows of 128 values that one warpgroup holds in shared memory.

    Args:
      read: returns the part of the rows [64, .] in a slice of the 128 columns.
      codes_smem: [2, 64, 64], receives the codes by chunk.
      scale_format: as in `quantize`.
      scale: the scale of each row [64]; None computes it from the rows.
    Returns:
      The scales [64].
    """
    if scale is None:
        scale = scale_of(_row_maxima(read(pl.ds(0, BLOCK))), scale_format)
    divisor = Divisor.of(scale).along(0, (HALF, CHUNK))

    def step(chunk: jax.Array, _: None) -> None:
        x = plgpu.load(read(pl.ds(chunk * CHUNK, CHUNK)), layout=plgpu.Layout.WGMMA)
        codes_smem[chunk] = encode(x.astype(jnp.float32), divisor)

    lax.fori_loop(0, BLOCK // CHUNK, step, None)
    return scale


def _multiply_half(gate_smem: Any, up_smem: Any) -> None:
    """Overwrites `gate_smem` [64, 128] with SiLU(gate) * up."""

    def step(chunk: jax.Array, _: None) -> None:
        columns = pl.ds(chunk * CHUNK, CHUNK)
        gate, up = (
            plgpu.load(smem.at[:, columns], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            for smem in (gate_smem, up_smem)
        )
        gate_smem[:, columns] = silu_multiply(gate, up).astype(gate_smem.dtype)

    lax.fori_loop(0, BLOCK // CHUNK, step, None)


def store_half(
    codes_smem: Any, codes_gmem: Any, warpgroup: jax.Array, row_block: jax.Array, column_block: jax.Array
) -> None:
    """Starts the copies of a warpgroup's codes [2, 64, 64] of a block to their place in [R, C]."""
    half = pl.ds(warpgroup * HALF, HALF)
    rows = pl.ds(row_block * BLOCK + warpgroup * HALF, HALF)
    for chunk in range(BLOCK // CHUNK):
        columns = pl.ds(column_block * BLOCK + chunk * CHUNK, CHUNK)
        plgpu.copy_smem_to_gmem(codes_smem.at[chunk, half], codes_gmem.at[rows, columns])


def wait_for_both(barrier: Any) -> None:
    """Waits until both warpgroups have arrived and see each other's writes to shared memory."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _row_maxima(x_smem: Any) -> jax.Array:
    """Largest magnitudes of the rows of a tile [64, 128] in shared memory: float32 [64]."""
    x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)
    return magnitude_of_bits(jnp.max(magnitude_bits(x), axis=1), x.dtype)


def _block_scale(x_smem: Any, half: Any, scale_format: str, maxima_smem: Any, exchanged: Any) -> jax.Array:
    """The scale of the whole tile, from the maxima of all rows of both warpgroups, for each row of a half."""
    maxima_smem[half] = _row_maxima(x_smem)
    wait_for_both(exchanged)
    maxima = plgpu.load(maxima_smem, layout=plgpu.Layout.WG_STRIDED((BLOCK,), 1))
    largest = jnp.max(lax.bitcast_convert_type(maxima, jnp.int32))
    return scale_of(lax.bitcast_convert_type(jnp.broadcast_to(largest, (HALF,)), jnp.float32), scale_format)
