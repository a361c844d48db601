"""The gradient of SiLU(gate) * up, quantised for DGrad and WGrad, as one Pallas Mosaic GPU kernel.

    ds = bf16(dy up)      dgate = bf16(ds SiLU'(gate))      dup = bf16(dy bf16(SiLU(gate)))

Each of dgate and dup [M, F] is written as codes in blocks (1, 128), and transposed in blocks (128, 1), as
`mosaic` writes them.  Three matrices are read and four codes a channel written; the gradients themselves do
not leave shared memory, where they take the places of gate and up.

One program takes one tile of 128 x 128.  All four codes leave through one buffer, one after the other, so
that two programs (114,704 bytes of shared memory each) fit on a multiprocessor and one computes while the
other waits for its copies.

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
from pallas_kernels.quantize.mosaic import (
    CHUNK,
    HALF,
    ROW_ALIGNMENT,
    quantize_half,
    store_half,
    wait_for_both,
)
from pallas_kernels.quantize.producers import silu_gradients
from pallas_kernels.scaled_array import ScaledArray

COLUMNS = 32
"""Columns of a tile whose gradients are computed in one turn of a loop; 64 take 164 registers a thread."""
Gradient = tuple[ScaledArray, ScaledArray]
"""One gradient in blocks (1, 128) and (128, 1)."""


@functools.partial(jax.jit, static_argnums=(3, 4), inline=True)
def silu_gradients_quantize(
    gate: jax.Array, up: jax.Array, dy: jax.Array, scale_format: str, interpret: bool
) -> tuple[Gradient, Gradient]:
    """The gradients of gate and up, bfloat16 [M, F] with F a multiple of 128; the caller checks that."""
    rows, columns = gate.shape
    padded, wide = (-(-rows // edge) * edge for edge in (ROW_ALIGNMENT, CHUNK))
    inputs = [jnp.pad(x, ((0, padded - rows), (0, 0))) for x in (gate, up, dy)]
    row_blocks, column_blocks = -(-rows // BLOCK), columns // BLOCK
    narrow = plgpu.SMEM(
        (BLOCK, BLOCK),
        gate.dtype,
        transforms=(plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(2 * COLUMNS)),
    )
    shapes = [
        ((padded, columns), E4M3),
        ((column_blocks, row_blocks * BLOCK), jnp.float32),  # whole tiles: no TMA cuts these off
        ((columns, wide), E4M3),
        ((row_blocks, columns), jnp.float32),
    ]
    kernel = launch(
        functools.partial(_body, scale_format=scale_format),
        interpret=interpret,
        out_type=tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes * 2),
        grid=(row_blocks, column_blocks),
        grid_names=("row", "column"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),  # maxima of rows need none
        scratch_types={
            "gate_smem": narrow,
            "up_smem": narrow,
            "dy_smem": narrow,
            "codes_smem": tile(BLOCK, CHUNK, E4M3, leading=(BLOCK // CHUNK,)),
            "loaded": plgpu.Barrier(num_arrivals=3),
            "computed": plgpu.Barrier(num_arrivals=2),
        },
    )
    outputs = kernel(*inputs)

    def logical(codes: jax.Array, scales: jax.Array, turned: jax.Array, turned_scales: jax.Array) -> Gradient:
        return (
            ScaledArray(codes[:rows], scales[:, :rows].T, (1, BLOCK)),
            ScaledArray(turned[:, :rows].T, turned_scales, (BLOCK, 1)),
        )

    return logical(*outputs[:4]), logical(*outputs[4:])


def _body(
    *refs: Any,
    scale_format: str,
    gate_smem: Any,
    up_smem: Any,
    dy_smem: Any,
    codes_smem: Any,
    loaded: Any,
    computed: Any,
) -> None:
    """One tile: load, compute 64 rows in each warpgroup, then store each gradient's rows and columns."""
    inputs, outputs = refs[:3], refs[3:]
    warpgroup = lax.axis_index("warpgroup")
    row, column = lax.axis_index("row"), lax.axis_index("column")
    half = pl.ds(warpgroup * HALF, HALF)

    @pl.when(warpgroup == 0)
    def _load() -> None:
        for gmem, smem in zip(inputs, (gate_smem, up_smem, dy_smem), strict=True):
            place = pl.ds(row * BLOCK, BLOCK), pl.ds(column * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(gmem.at[place], smem, loaded)

    plgpu.barrier_wait(loaded)
    _gradients(*(smem.at[half] for smem in (gate_smem, up_smem, dy_smem)))
    wait_for_both(computed)  # the columns of a half are written by both warpgroups

    def store(read: Any, codes_gmem: Any, scales_gmem: Any, row_block: Any, column_block: Any) -> None:
        place = pl.ds(row_block * BLOCK + warpgroup * HALF, HALF)
        scales_gmem[column_block, place] = quantize_half(read, codes_smem.at[:, half], scale_format)
        plgpu.commit_smem()
        store_half(codes_smem, codes_gmem, warpgroup, row_block, column_block)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # before the next one is written there

    for smem, (codes, scales, turned, turned_scales) in (
        (gate_smem, outputs[:4]),
        (up_smem, outputs[4:]),
    ):
        store(lambda columns, smem=smem: smem.at[half, columns], codes, scales, row, column)
        store(
            lambda tokens, smem=smem: smem.at[tokens, half].transpose((1, 0)),
            turned,
            turned_scales,
            column,
            row,
        )
    plgpu.wait_smem_to_gmem(0)


def _gradients(gate_smem: Any, up_smem: Any, dy_smem: Any) -> None:
    """Overwrites gate and up [64, 128] with their gradients."""

    def step(chunk: jax.Array, _: None) -> None:
        columns = pl.ds(chunk * COLUMNS, COLUMNS)
        gate, up, dy = (
            plgpu.load(smem.at[:, columns], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            for smem in (gate_smem, up_smem, dy_smem)
        )
        dgate, dup = silu_gradients(gate, up, dy)
        gate_smem[:, columns] = dgate.astype(gate_smem.dtype)
        up_smem[:, columns] = dup.astype(up_smem.dtype)

    lax.fori_loop(0, BLOCK // COLUMNS, step, None)
