"""The product x Wᵀ of BF16 or FP16 matrices on Hopper's tensor cores, with one tile and one order of K.

A program is a producer warpgroup, whose TMA loads tiles of x and W into a ring of slots, and two consumers,
which multiply 64 rows each by wgmma into FP32 registers. Programs form clusters of two along N, which share
their tiles of x by multicast. They are persistent: each goes over several tiles of the result, and its
producer runs ahead into the next one. K is not split, and the tile is the same for all sizes, so an element
is always the sum of its K products in steps of 16, ascending, in one accumulator. A tile of 128 x 128 serves
training and decode alike. One of 128 x 256 would load less for each product in training, but leave half of
the multiprocessors idle in decode.

TMA needs M in multiples of 8, N of 8 (FP32 results) or 16, and K of 64. An operand of another size is copied
and padded with zeros, which add nothing, and the result is cut. Rows and columns past an array's end within a
tile are read as zeros and not written.

JAX's own `pallas.ops.gpu.hopper_matmul_mgpu` takes W as [K, N] and sizes in multiples of its tiles, and
returns the operands' dtype. For a head's FP32 logits it would need a transposed copy of W and padded copies
of everything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import H100_SMS, REGISTERS, SWIZZLE_BYTES, WGMMA_ROWS
from pallas_kernels.mosaic_common import fill_ring, launch, ring_slot, tile

WARPGROUPS, STAGES = 2, 6
"""Consumers, and tiles of K in shared memory: 192 KiB, and 8 KiB per consumer for the result."""
TILE_M, TILE_N, TILE_K = WARPGROUPS * WGMMA_ROWS, 128, 64
"""Rows and columns of the result per program; length of a row of K that TMA and wgmma permute together."""
SNAKE_WIDTH = 8
"""Pairs of tiles along N processed together, so that they share the second-level cache."""
_ROWS, _NARROWEST_BYTES = 8, 32
"""Rows of a tile for TMA, and its narrowest row."""


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def dense_matmul(x: jax.Array, w: jax.Array, out_dtype: Any, interpret: bool = False) -> jax.Array:
    """x [M, K] times w [N, K] transposed, BF16 or FP16 both: [M, N] in `out_dtype`, rounded once from the
    FP32 sum.

    Args:
      interpret: run on the CPU with race detection instead of on a GPU.
    Raises:
      NotImplementedError: `interpret` without an interpreter.
    """
    (m, _) = x.shape
    n = w.shape[0]
    x, w = _fill(x, _ROWS), _fill(w, _NARROWEST_BYTES // jnp.dtype(out_dtype).itemsize)
    kernel = _Product(x.shape[0], w.shape[0], x.shape[1] // TILE_K, x.dtype, jnp.dtype(out_dtype))
    return kernel(x, w, interpret)[:m, :n]


def _fill(x: jax.Array, rows: int) -> jax.Array:
    """[R, K] padded with zeros to multiples of `rows` and 64; no copy if it fits."""
    missing = (-x.shape[0] % rows, -x.shape[1] % TILE_K)
    return jnp.pad(x, ((0, missing[0]), (0, missing[1]))) if any(missing) else x


@dataclasses.dataclass(frozen=True)
class _Product:
    """One kernel: x [m, 64 steps] and w [n, 64 steps] of `dtype`, the result in `out_dtype`."""

    m: int
    n: int
    steps: int
    dtype: Any
    out_dtype: Any

    @property
    def _grid(self) -> tuple[int, int]:
        """Tiles along M, pairs of tiles along N."""
        return pl.cdiv(self.m, TILE_M), pl.cdiv(self.n, 2 * TILE_N)

    @property
    def _out_columns(self) -> int:
        """Columns stored together: they divide N and, if N allows, fill a row of shared memory."""
        return math.gcd(self.n, SWIZZLE_BYTES // self.out_dtype.itemsize)

    def __call__(self, x: jax.Array, w: jax.Array, interpret: bool) -> jax.Array:
        out_columns = self._out_columns
        return launch(
            self._body,
            interpret=interpret,
            out_type=jax.ShapeDtypeStruct((self.m, self.n), self.out_dtype),
            grid=(min(math.prod(self._grid), H100_SMS // 2),),
            grid_names=("program",),
            cluster=(2,),
            cluster_names=("pair",),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
            scratch_types={
                "x_smem": tile(TILE_M, TILE_K, self.dtype, (STAGES,)),
                "w_smem": tile(TILE_N, TILE_K, self.dtype, (STAGES,)),
                "out_smem": tile(WGMMA_ROWS, out_columns, self.out_dtype, (WARPGROUPS,)),
                "full_barrier": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
                "empty_barrier": plgpu.ClusterBarrier(
                    collective_axes=("pair",), num_arrivals=WARPGROUPS, num_barriers=STAGES
                ),
            },
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        )(x, w)

    def _body(
        self,
        x_gmem: Any,
        w_gmem: Any,
        out_gmem: Any,
        *,
        x_smem: Any,
        w_smem: Any,
        out_smem: Any,
        full_barrier: Any,
        empty_barrier: Any,
    ) -> None:
        warpgroup = lax.axis_index("warpgroup")
        registers = REGISTERS[WARPGROUPS]
        assert registers is not None  # set for two consumers
        tiles = math.prod(self._grid)

        def origin(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            """First row and column of a tile."""
            row, column = plgpu.planar_snake(index, self._grid, 1, SNAKE_WIDTH)
            return row * TILE_M, (column * 2 + lax.axis_index("pair")) * TILE_N

        def copies(index: jax.Array) -> Callable[[jax.Array, jax.Array], None]:
            row, column = origin(index)

            def copy(slot: jax.Array, step: jax.Array) -> None:
                rows, columns, depth = pl.ds(row, TILE_M), pl.ds(column, TILE_N), pl.ds(step * TILE_K, TILE_K)
                full = full_barrier.at[slot]
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[rows, depth], x_smem.at[slot], full, collective_axes=("pair",)
                )
                plgpu.copy_gmem_to_smem(w_gmem.at[columns, depth], w_smem.at[slot], full)

            return copy

        @pl.when(warpgroup == WARPGROUPS)
        def _produce() -> None:
            plgpu.set_max_registers(registers[1], action="decrease")
            fill_ring(tiles, self.steps, STAGES, empty_barrier, copies)

        @pl.when(warpgroup < WARPGROUPS)
        def _consume() -> None:
            plgpu.set_max_registers(registers[0], action="increase")

            @plgpu.nd_loop((tiles,), collective_axes="program")
            def _tile(loop: Any) -> None:
                row, column = origin(loop.index[0])
                first = loop.local_index * self.steps

                def multiply(sums: Any) -> jax.Array:
                    @pl.loop(0, self.steps)
                    def _step(step: jax.Array) -> None:
                        slot = ring_slot(first + step, STAGES)
                        plgpu.barrier_wait(full_barrier.at[slot])
                        rows = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)
                        plgpu.wgmma(sums, x_smem.at[slot, rows], w_smem.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(1)  # the previous product is done

                        @pl.when(step > 0)
                        def _release() -> None:
                            plgpu.barrier_arrive(empty_barrier.at[ring_slot(first + step - 1, STAGES)])

                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty_barrier.at[ring_slot(first + self.steps - 1, STAGES)])
                    return sums[...]

                sums = pl.run_scoped(multiply, plgpu.ACC((WGMMA_ROWS, TILE_N), jnp.float32))
                self._store(out_gmem, out_smem.at[warpgroup], sums, row + warpgroup * WGMMA_ROWS, column)

            plgpu.wait_smem_to_gmem(0)

    def _store(
        self, out_gmem: Any, out_smem: Any, sums: jax.Array, row: jax.Array, column: jax.Array
    ) -> None:
        """Rounds once and writes a warpgroup's rows, some columns at a time, through shared memory."""
        width = self._out_columns
        for start in range(0, TILE_N, width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[...] = sums[:, start : start + width].astype(self.out_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out_smem, out_gmem.at[pl.ds(row, WGMMA_ROWS), pl.ds(column + start, width)]
            )
