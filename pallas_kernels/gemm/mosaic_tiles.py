"""The block-scaled product A Bᵀ on Hopper's tensor cores: warpgroups that load and warpgroups that multiply.

    dot[m, n] = sum over one block of 128 of A[m, k] B[n, k]    wgmma, in FP32 registers from zero
    "deepgemm":  sum = fma(dot, sa * sb, sum)                       promotion, once per block, K ascending
    "triton":    sum = fma(dot * sa, sb, sum)

A program is one producer warpgroup, whose TMA loads blocks of A, B and their scales into a ring of `stages`
slots, and one to three consumer warpgroups, which take 64 or 128 rows of the tile each. The barrier
`full[slot]` signals that the copies have arrived, and `empty[slot]` that every consumer has read them. A
persistent program goes over several tiles of the result, and its producer runs ahead into the next tile. In a
cluster two programs share their blocks of A or of B by multicast.

With `accumulator` the product is added to it in place, each element once and after its last block (`_store`).

Rows and columns past the end of an array are read as zeros and not written, so tiles need not divide M and N.
TMA needs M in multiples of 8, N and K of 128 (`mosaic` ensures that).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import BLOCK, E4M3
from pallas_kernels.gemm.config import TuningConfig
from pallas_kernels.hopper import H100_SMS, REGISTERS, SWIZZLE_BYTES, WGMMA_ROWS
from pallas_kernels.mosaic_common import fill_ring, launch, ring_slot, tile

_ROW_SCALES = plgpu.Layout.WGMMA.reduce(1)
_COLUMN_SCALES = plgpu.Layout.WGMMA.reduce(0)

_Sums = tuple[tuple[jax.Array, ...], ...]
"""A warpgroup's FP32 sums: for each 64 rows, for each group of columns with one scale."""


class _Refs(NamedTuple):
    """Arrays, ring buffers and barriers of one program."""

    a_gmem: Any
    b_gmem: Any
    a_scale_gmem: Any
    b_scale_gmem: Any
    out_gmem: Any
    a_smem: Any
    b_smem: Any
    a_scale_smem: Any
    out_smem: Any
    full_barrier: Any
    empty_barrier: Any
    b_scale_smem: Any = None
    accumulator_barrier: Any = None


@dataclasses.dataclass(frozen=True)
class TiledGemm:
    """One kernel: A [m, k] in rows of scales, B [n, k] with a scale per 128 rows or per row.

    Attributes:
      m, n, blocks: sizes; `blocks` of 128 along K.
      per_column: B has one scale per row, which is a column of the result.
      promotion_order: "deepgemm" or "triton".
      out_dtype: bfloat16, float16 or float32.
      config: tiles.
    """

    m: int
    n: int
    blocks: int
    per_column: bool
    promotion_order: str
    out_dtype: Any
    config: TuningConfig

    def __call__(
        self,
        a: jax.Array,
        b: jax.Array,
        a_scale: jax.Array,
        b_scale: jax.Array,
        accumulator: jax.Array | None = None,
        *,
        interpret: bool = False,
    ) -> jax.Array:
        """[m, n] in `out_dtype`.

        Args:
          a, b: codes [m, k] and [n, k].
          a_scale: float32 [blocks, m].
          b_scale: float32 [ceil(n / 128), blocks], or [blocks, n] where `per_column`.
          accumulator: float32 [m, n], whose buffer becomes the result's if XLA may reuse it, or None; only
            with float32 `out_dtype`.
          interpret: run on the CPU, slowly, with race detection.
        """
        config, pair_axes = self.config, {"cluster": (2,), "cluster_names": ("pair",)}
        programs = self._grid[0] * self._grid[1]
        if config.persistent:
            programs = min(programs, H100_SMS // (2 if config.cluster else 1))
        kernel = launch(
            self._body,
            interpret=interpret,
            out_type=jax.ShapeDtypeStruct((self.m, self.n), self.out_dtype) if accumulator is None else (),
            grid=(programs,),
            grid_names=("program",),
            num_threads=config.warpgroups + 1,
            thread_name="warpgroup",
            scratch_types=self._scratch(accumulator is not None),
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
            **(pair_axes if config.cluster else {}),
        )
        if accumulator is None:
            return kernel(a, b, a_scale, b_scale)
        total = jax.new_ref(accumulator)
        kernel(a, b, a_scale, b_scale, total)
        return jax.freeze(total)

    # ------------------------------------------------------------------------------------------------ sizes

    @property
    def _grid(self) -> tuple[int, int]:
        """Tiles along M and N; in a cluster, pairs of tiles along its axis."""
        config = self.config
        return (
            pl.cdiv(self.m, config.tile_m * (2 if config.cluster == "m" else 1)),
            pl.cdiv(self.n, config.tile_n * (2 if config.cluster == "n" else 1)),
        )

    @property
    def _group(self) -> int:
        """The number of columns promoted together."""
        return self.config.columns_per_scale(self.per_column)

    @property
    def _groups(self) -> int:
        return self.config.tile_n // self._group

    @property
    def _out_columns(self) -> int:
        """The number of columns stored together: one swizzled row of shared memory."""
        return min(SWIZZLE_BYTES // jnp.dtype(self.out_dtype).itemsize, self._group)

    def _scratch(self, accumulate: bool) -> dict[str, Any]:
        config = self.config
        empty: Any = plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.stages)
        if config.cluster:
            empty = plgpu.ClusterBarrier(
                collective_axes=("pair",), num_arrivals=config.warpgroups, num_barriers=config.stages
            )
        scratch = {
            "a_smem": tile(config.tile_m, BLOCK, E4M3, (config.stages,)),
            "b_smem": tile(config.tile_n, BLOCK, E4M3, (config.stages,)),
            "a_scale_smem": plgpu.SMEM((config.stages, config.tile_m), jnp.float32),
            "out_smem": tile(WGMMA_ROWS, self._out_columns, self.out_dtype, (config.warpgroups,)),
            "full_barrier": plgpu.Barrier(
                num_arrivals=4 if self.per_column else 3, num_barriers=config.stages
            ),
            "empty_barrier": empty,
        }
        if self.per_column:
            scratch["b_scale_smem"] = plgpu.SMEM((config.stages, config.tile_n), jnp.float32)
        if accumulate:
            scratch["accumulator_barrier"] = plgpu.Barrier(num_barriers=config.warpgroups)
        return scratch

    # ----------------------------------------------------------------------------------------------- kernel

    def _body(self, *arrays: Any, **scratch: Any) -> None:
        refs = _Refs(**dict(zip(_Refs._fields, arrays, strict=False)), **scratch)
        warpgroup = lax.axis_index("warpgroup")
        registers = REGISTERS[self.config.warpgroups]

        @pl.when(warpgroup == self.config.warpgroups)
        def _() -> None:
            if registers:
                plgpu.set_max_registers(registers[1], action="decrease")
            tiles = self._grid[0] * self._grid[1]
            fill_ring(
                tiles,
                self.blocks,
                self.config.stages,
                refs.empty_barrier,
                lambda index: self._copies(refs, index),
            )

        @pl.when(warpgroup < self.config.warpgroups)
        def _() -> None:
            if registers:
                plgpu.set_max_registers(registers[0], action="increase")
            self._consume(refs, warpgroup)

    def _tile_origin(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First row and column of this program's `index`-th tile."""
        config = self.config
        row, column = plgpu.planar_snake(index, self._grid, 1, config.snake_width)
        if config.cluster == "m":
            row = row * 2 + lax.axis_index("pair")
        if config.cluster == "n":
            column = column * 2 + lax.axis_index("pair")
        return row * config.tile_m, column * config.tile_n

    def _copies(self, refs: _Refs, index: jax.Array) -> Callable[[jax.Array, jax.Array], None]:
        """The function that starts the copies of a block of the `index`-th tile into a slot."""
        config, origin = self.config, self._tile_origin(index)
        rows, columns = pl.ds(origin[0], config.tile_m), pl.ds(origin[1], config.tile_n)
        share_a = ("pair",) if config.cluster == "n" else None
        share_b = ("pair",) if config.cluster == "m" else None

        def copy(slot: jax.Array, block: jax.Array) -> None:
            full, depth = refs.full_barrier.at[slot], pl.ds(block * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(
                refs.a_gmem.at[rows, depth], refs.a_smem.at[slot], full, collective_axes=share_a
            )
            plgpu.copy_gmem_to_smem(
                refs.b_gmem.at[columns, depth], refs.b_smem.at[slot], full, collective_axes=share_b
            )
            plgpu.copy_gmem_to_smem(refs.a_scale_gmem.at[block, rows], refs.a_scale_smem.at[slot], full)
            if self.per_column:
                plgpu.copy_gmem_to_smem(
                    refs.b_scale_gmem.at[block, columns], refs.b_scale_smem.at[slot], full
                )

        return copy

    def _consume(self, refs: _Refs, warpgroup: jax.Array) -> None:
        """Multiplies this warpgroup's rows of every tile and stores them."""

        @plgpu.nd_loop((self._grid[0] * self._grid[1],), collective_axes="program")
        def _tile(loop: Any) -> None:
            row, column = self._tile_origin(loop.index[0])
            sums = self._sum_blocks(refs, warpgroup, loop.local_index * self.blocks, column)
            self._store(refs, warpgroup, sums, row, column)

        plgpu.wait_smem_to_gmem(0)

    def _sum_blocks(
        self, refs: _Refs, warpgroup: jax.Array, first_step: jax.Array, column: jax.Array
    ) -> _Sums:
        """The sums over all blocks of K."""

        def scales(block: Any) -> tuple[jax.Array, ...]:
            return self._block_scales(refs, column, block)

        def one(block: jax.Array, carry: Any) -> Any:
            sums, scale = carry
            ahead = scales(block + 1)  # read a block ahead, to hide the latency
            return self._add_block(refs, warpgroup, first_step + block, sums, scale), ahead

        def two(index: jax.Array, carry: Any) -> Any:
            sums, scale = carry
            ahead = (scales(2 * index + 2), scales(2 * index + 3))
            return self._add_two_blocks(refs, warpgroup, first_step + 2 * index, sums, scale), ahead

        zero = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, self._group), jnp.float32), plgpu.Layout.WGMMA)
        sums: _Sums = ((zero,) * self._groups,) * self.config.subtiles
        if not self.config.pair:
            return lax.fori_loop(0, self.blocks, one, (sums, scales(0)))[0]
        sums, ahead = lax.fori_loop(0, self.blocks // 2, two, (sums, (scales(0), scales(1))))
        if self.blocks % 2:
            sums = self._add_block(refs, warpgroup, first_step + self.blocks - 1, sums, ahead[0])
        return sums

    def _block_scales(self, refs: _Refs, column: jax.Array, block: Any) -> tuple[jax.Array, ...]:
        """B's scale for each group of columns, from global memory; per-column scales come with the codes."""
        if self.per_column:
            return ()
        block = jnp.minimum(jnp.int32(block), self.blocks - 1)
        last = pl.cdiv(self.n, BLOCK) - 1
        return tuple(
            refs.b_scale_gmem[jnp.minimum((column + g * self._group) // BLOCK, last), block]
            for g in range(self._groups)
        )

    def _rows(self, warpgroup: jax.Array, subtile: int) -> Any:
        return pl.ds((warpgroup * self.config.subtiles + subtile) * WGMMA_ROWS, WGMMA_ROWS)

    def _add_block(
        self, refs: _Refs, warpgroup: jax.Array, step: jax.Array, sums: _Sums, scale: tuple[jax.Array, ...]
    ) -> _Sums:
        """The sums after one more block."""
        slot = ring_slot(step, self.config.stages)
        plgpu.barrier_wait(refs.full_barrier.at[slot])
        new_sums = []
        for subtile in range(self.config.subtiles):
            rows = self._rows(warpgroup, subtile)
            row_scale = plgpu.load(refs.a_scale_smem.at[slot, rows], layout=_ROW_SCALES)

            def multiply(accumulator: Any, rows: Any = rows) -> jax.Array:
                plgpu.wgmma(accumulator, refs.a_smem.at[slot, rows], refs.b_smem.at[slot].transpose((1, 0)))
                return accumulator[...]

            dot = pl.run_scoped(multiply, plgpu.ACC((WGMMA_ROWS, self.config.tile_n), jnp.float32))
            last = subtile == self.config.subtiles - 1
            new_sums.append(self._promote(refs, slot, sums[subtile], dot, row_scale, scale, release=last))
        return tuple(new_sums)

    def _add_two_blocks(
        self,
        refs: _Refs,
        warpgroup: jax.Array,
        step: jax.Array,
        sums: _Sums,
        scales: tuple[tuple[jax.Array, ...], ...],
    ) -> _Sums:
        """The sums after two more blocks; the second is multiplied while the first is promoted."""
        rows = self._rows(warpgroup, 0)
        slots = (ring_slot(step, self.config.stages), ring_slot(step + 1, self.config.stages))
        accumulator_type = plgpu.ACC((WGMMA_ROWS, self.config.tile_n), jnp.float32)

        def start(accumulator: Any, slot: jax.Array) -> None:
            plgpu.wgmma(accumulator, refs.a_smem.at[slot, rows], refs.b_smem.at[slot].transpose((1, 0)))

        def finish(accumulator: Any, index: int, total: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            row_scale = plgpu.load(refs.a_scale_smem.at[slots[index], rows], layout=_ROW_SCALES)
            dot = plgpu.wgmma_accumulator_load(accumulator, wait_n=1 - index)
            return self._promote(refs, slots[index], total, dot, row_scale, scales[index], release=True)

        def first(accumulator: Any) -> tuple[jax.Array, ...]:
            start(accumulator, slots[0])
            plgpu.barrier_wait(refs.full_barrier.at[slots[1]])
            return pl.run_scoped(lambda other: second(accumulator, other), accumulator_type)

        def second(accumulator: Any, other: Any) -> tuple[jax.Array, ...]:
            start(other, slots[1])
            return finish(other, 1, finish(accumulator, 0, sums[0]))

        plgpu.barrier_wait(refs.full_barrier.at[slots[0]])
        return (pl.run_scoped(first, accumulator_type),)

    def _promote(
        self,
        refs: _Refs,
        slot: jax.Array,
        sums: tuple[jax.Array, ...],
        dot: jax.Array,
        row_scale: jax.Array,
        scale: tuple[jax.Array, ...],
        *,
        release: bool,
    ) -> tuple[jax.Array, ...]:
        """The sums of 64 rows after their dots of one block: THE definition of this kernel's two orders."""
        if release and not self.per_column:
            plgpu.barrier_arrive(refs.empty_barrier.at[slot])
        shape = (WGMMA_ROWS, self._group)
        new_sums = []
        for group, total in enumerate(sums):
            columns = slice(group * self._group, (group + 1) * self._group)
            part = dot if self._groups == 1 else dot[:, columns]
            if self.per_column:
                b_scale = plgpu.load(
                    refs.b_scale_smem.at[slot, pl.ds(columns.start, self._group)], layout=_COLUMN_SCALES
                )
                right = lax.broadcast_in_dim(b_scale, shape, [1])
            else:
                right = scale[group]
            left = lax.broadcast_in_dim(row_scale, shape, [0])
            if self.promotion_order == "triton":
                new_sums.append(total + (part * left) * right)
            elif self.per_column:
                new_sums.append(total + part * (left * right))
            else:
                new_sums.append(total + part * lax.broadcast_in_dim(row_scale * right, shape, [0]))
        if release and self.per_column:
            plgpu.barrier_arrive(refs.empty_barrier.at[slot])
        return tuple(new_sums)

    def _store(
        self, refs: _Refs, warpgroup: jax.Array, sums: _Sums, row: jax.Array, column: jax.Array
    ) -> None:
        """Adds the accumulator, rounds once, and writes this warpgroup's rows through shared memory."""
        width = self._out_columns
        for subtile, groups in enumerate(sums):
            first_row = row + (warpgroup * self.config.subtiles + subtile) * WGMMA_ROWS
            for start in range(0, self.config.tile_n, width):
                total, offset = groups[start // self._group], start % self._group
                part = total if width == self._group else total[:, offset : offset + width]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out = refs.out_gmem.at[pl.ds(first_row, WGMMA_ROWS), pl.ds(column + start, width)]
                if refs.accumulator_barrier is not None:
                    barrier = refs.accumulator_barrier.at[warpgroup]
                    plgpu.copy_gmem_to_smem(out, refs.out_smem.at[warpgroup], barrier)
                    plgpu.barrier_wait(barrier)
                    part = plgpu.load(refs.out_smem.at[warpgroup], layout=plgpu.Layout.WGMMA) + part
                refs.out_smem[warpgroup] = part.astype(self.out_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(refs.out_smem.at[warpgroup], out)
