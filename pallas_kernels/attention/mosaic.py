"""Batch-invariant causal attention on Hopper's tensor cores: one body for whole sequences and for a cache.

A program has one producer warpgroup, which loads blocks of 128 keys and values by TMA into a ring of slots,
and one or two consumer warpgroups.  A consumer keeps the running maximum, sum and output of 64 rows in
registers (`_add_block`, with the equations of `reference`).  Two grids use the same body:

    whole sequences    one program for each query head and tile of 128 tokens, 64 for each of two consumers.
                       A tile belongs to one segment, whose first block is read from an array
    a cache            one program for each sequence and key/value head; the query heads are the rows of one
                       consumer, so that keys and values are read once.  A cache of E4M3 codes is loaded as it
                       is, one byte a value; the consumer widens each block to code * scale in the queries'
                       dtype, which is exact if the scale is a power of two (`_widen`)

Segments and caches begin at the start of a block, so in both grids only the last block of a row needs a mask.
Programs are independent of each other and use no atomic additions, so every call gives the same bits.

Two consumers alternate on the tensor cores (`turn_barrier`): one multiplies while the other computes
exponentials.  The product of weights and values is accumulated from zero and then added to the output.  This
keeps the multiply-add out of the tensor core's own rounding, and takes as many instructions as scaling the
accumulator in place.

Rows beyond the end of an array are read as zeros and not written.  TMA requires the number of rows to be a
multiple of 8.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.reference import score_factor
from pallas_kernels.formats import BLOCK, E4M3
from pallas_kernels.hopper import REGISTERS, WGMMA_ROWS
from pallas_kernels.mosaic_common import launch, ring_slot, tile

WARPGROUPS, STAGES = 2, 2
"""Consumers of a tile of tokens, and number of blocks of keys in shared memory."""
CHUNK = 64
"""Columns of codes that are loaded and widened together."""
TMA_ROWS = 8
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
COMPILER = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)


@functools.partial(jax.jit, static_argnums=(4,), inline=True)
def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, first_blocks: jax.Array, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, H], base-2 logarithms of the sums, float32 [B, N, T]).

    Args:
      q, k, v, first_blocks: as `api.causal_attention`.
      interpret: run on the CPU with race detection instead of on a GPU.
    Raises:
      NotImplementedError: `interpret` without an interpreter.
    """
    length = q.shape[1]
    q, k, v = (fill(x, 1) for x in (q, k, v))
    B, T, N, H = q.shape
    kernel = _Attention(N // k.shape[2], H, q.dtype, WARPGROUPS, interpret)
    out, log_sums = launch(
        kernel.whole_sequences,
        interpret=interpret,
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)),
        grid=(N, pl.cdiv(T, BLOCK), B),
        grid_names=("head", "tile", "row"),
        scratch_types=kernel.scratch | {"log_smem": plgpu.SMEM((WARPGROUPS, WGMMA_ROWS), jnp.float32)},
        **kernel.threads,
    )(q, k, v, first_blocks)
    return out[:, :length], log_sums[:, :, :length]


@functools.partial(jax.jit, static_argnums=(4,), inline=True)
def cached_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    interpret: bool = False,
    scales: jax.Array | None = None,
) -> jax.Array:
    """As `api.cached_attention`; `interpret` as `causal_attention`."""
    B, t, N, H = q.shape
    K, group = keys.shape[1], N // keys.shape[1]
    rows = fill(q.reshape(B, t, K, group, H), 3)  # this copies a few heads' queries, but not the cache
    keys, values = (fill(x, 2) for x in (keys, values))
    kernel = _Attention(group, H, q.dtype, 1, interpret, codes=scales is not None)
    out = launch(
        kernel.against_codes if kernel.codes else kernel.against_cache,
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct(rows.shape, q.dtype),
        grid=(K, t, B),
        grid_names=("head", "token", "row"),
        scratch_types=kernel.scratch,
        **kernel.threads,
    )(rows, keys, values, positions, *(() if scales is None else (scales,)))
    return out[:, :, :, :group].reshape(q.shape)


def fill(x: jax.Array, axis: int) -> jax.Array:
    """`x` padded with zeros to a multiple of 8 along an axis; unchanged if it is one."""
    missing = -x.shape[axis] % TMA_ROWS
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x


class _Refs(NamedTuple):
    """Buffers and barriers of one program."""

    q_smem: Any
    k_smem: Any
    v_smem: Any
    q_barrier: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    turn_barrier: Any = None
    weights_smem: Any = None
    log_smem: Any = None
    k_wide: Any = None
    v_wide: Any = None
    scales_gmem: Any = None

    def code_rings(self, k_gmem: Any, v_gmem: Any, row: Any, head: Any) -> tuple[Ring, Ring]:
        """The rings of codes, which are loaded in parts of `CHUNK` columns."""

        def ring(gmem: Any, smem: Any, full: Any, empty: Any) -> Ring:
            def copies(block: jax.Array) -> tuple[tuple[Any, Any], ...]:
                return tuple(
                    (
                        gmem.at[row, head, part(block, BLOCK), pl.ds(chunk * CHUNK, CHUNK)],
                        smem.at[chunk],
                    )
                    for chunk in range(gmem.shape[-1] // CHUNK)
                )

            return Ring(full, empty, copies)

        return (
            ring(k_gmem, self.k_smem, self.k_full, self.k_empty),
            ring(v_gmem, self.v_smem, self.v_full, self.v_empty),
        )

    def rings(self, k_gmem: Any, v_gmem: Any, place: Callable[[jax.Array], Any]) -> tuple[Ring, Ring]:
        """The rings of keys and of values; a block is at `place(block)` in global memory."""
        return (
            Ring(self.k_full, self.k_empty, lambda block: ((k_gmem.at[place(block)], self.k_smem),)),
            Ring(self.v_full, self.v_empty, lambda block: ((v_gmem.at[place(block)], self.v_smem),)),
        )


class _Rows(NamedTuple):
    """State of a consumer between blocks: maxima and sums [64], outputs [64, H], in FP32."""

    top: jax.Array
    total: jax.Array
    out: jax.Array


@dataclasses.dataclass(frozen=True)
class _Attention:
    """The kernel: `group` query heads for each key/value head, heads of `width` values of `dtype`.

    codes: whether keys and values are E4M3 codes.
    """

    group: int
    width: int
    dtype: Any
    warpgroups: int
    interpret: bool
    codes: bool = False

    @property
    def threads(self) -> dict[str, Any]:
        """Of `plgpu.kernel`."""
        return {"num_threads": self.warpgroups + 1, "thread_name": "warpgroup", "compiler_params": COMPILER}

    @property
    def scratch(self) -> dict[str, Any]:
        """Scratch shapes for `plgpu.kernel`, by the names of `_Refs`."""
        consumed = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=STAGES)
        scratch: dict[str, Any] = {
            "q_smem": tile(WGMMA_ROWS, self.width, self.dtype, (self.warpgroups,)),
            "k_smem": tile(BLOCK, self.width, self.dtype, (STAGES,)),
            "v_smem": tile(BLOCK, self.width, self.dtype, (STAGES,)),
            "q_barrier": plgpu.Barrier(num_barriers=self.warpgroups),
            "k_full": plgpu.Barrier(num_barriers=STAGES),
            "v_full": plgpu.Barrier(num_barriers=STAGES),
            "k_empty": consumed,
            "v_empty": consumed,
        }
        if self.codes:
            parts = self.width // CHUNK
            full = plgpu.Barrier(num_arrivals=parts, num_barriers=STAGES)
            ring = tile(BLOCK, CHUNK, E4M3, (parts, STAGES))
            wide = tile(BLOCK, self.width, self.dtype)
            scratch |= {"k_smem": ring, "v_smem": ring, "k_full": full, "v_full": full}
            scratch |= {"k_wide": wide, "v_wide": wide}
        if self.warpgroups > 1:
            scratch["turn_barrier"] = plgpu.Barrier(num_arrivals=self.warpgroups)
        if self.interpret:  # the interpreter has no wgmma with its left operand in registers
            scratch["weights_smem"] = tile(WGMMA_ROWS, BLOCK, self.dtype, (self.warpgroups,))
        return scratch

    # ------------------------------------------------------------ grids

    def whole_sequences(
        self,
        q_gmem: Any,
        k_gmem: Any,
        v_gmem: Any,
        first_gmem: Any,
        out_gmem: Any,
        log_gmem: Any,
        **scratch: Any,
    ) -> None:
        """A tile of 128 tokens under one query head."""
        refs = _Refs(**scratch)
        row, head, warpgroup = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("warpgroup")
        index = lax.axis_size("tile") - 1 - lax.axis_index("tile")  # the longest first
        first = first_gmem[row, index]
        blocks = jnp.maximum(index + 1 - first, 0)

        @pl.when(warpgroup == self.warpgroups)
        def _produce() -> None:
            set_registers(producer=True)
            kv_head = head // self.group
            rings = refs.rings(k_gmem, v_gmem, lambda block: (row, part(first + block, BLOCK), kv_head))
            produce(blocks, *rings)

        @pl.when(warpgroup < self.warpgroups)
        def _consume() -> None:
            set_registers(producer=False)
            tokens = pl.ds(index * BLOCK + warpgroup * WGMMA_ROWS, WGMMA_ROWS)
            token = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS, BLOCK), 0, layout=plgpu.Layout.WGMMA)
            rows = self._attend(refs, q_gmem.at[row, tokens, head], blocks, token + warpgroup * WGMMA_ROWS)
            refs.log_smem[warpgroup] = rows.top + jnp.log2(rows.total)
            self._store(refs, rows, out_gmem.at[row, tokens, head])
            plgpu.copy_smem_to_gmem(refs.log_smem.at[warpgroup], log_gmem.at[row, head, tokens])
            plgpu.wait_smem_to_gmem(0)

    def against_cache(
        self, q_gmem: Any, k_gmem: Any, v_gmem: Any, position_gmem: Any, out_gmem: Any, **scratch: Any
    ) -> None:
        """The query heads of one key/value head of one token."""
        self._one_token(q_gmem, k_gmem, v_gmem, position_gmem, out_gmem, _Refs(**scratch))

    def against_codes(
        self,
        q_gmem: Any,
        k_gmem: Any,
        v_gmem: Any,
        position_gmem: Any,
        scales_gmem: Any,
        out_gmem: Any,
        **scratch: Any,
    ) -> None:
        """As `against_cache`, for codes with the scales of keys and of values."""
        refs = _Refs(**scratch, scales_gmem=scales_gmem)
        self._one_token(q_gmem, k_gmem, v_gmem, position_gmem, out_gmem, refs)

    def _one_token(
        self, q_gmem: Any, k_gmem: Any, v_gmem: Any, position_gmem: Any, out_gmem: Any, refs: _Refs
    ) -> None:
        row, token, head = lax.axis_index("row"), lax.axis_index("token"), lax.axis_index("head")
        position = position_gmem[row, token]
        blocks = position // BLOCK + 1

        @pl.when(lax.axis_index("warpgroup") == self.warpgroups)
        def _produce() -> None:
            if self.codes:
                produce(blocks, *refs.code_rings(k_gmem, v_gmem, row, head))
            else:
                produce(blocks, *refs.rings(k_gmem, v_gmem, lambda block: (row, head, part(block, BLOCK))))

        @pl.when(lax.axis_index("warpgroup") < self.warpgroups)
        def _consume() -> None:
            rows = self._attend(
                refs, q_gmem.at[row, token, head], blocks, lax.rem(position, jnp.int32(BLOCK))
            )
            self._store(refs, rows, out_gmem.at[row, token, head])
            plgpu.wait_smem_to_gmem(0)

    # ------------------------------------------------------------ body

    def _attend(self, refs: _Refs, q: Any, blocks: jax.Array, last: jax.Array) -> _Rows:
        """Attention of a consumer's rows `q` over `blocks`; `last`: last visible key of the last block."""
        warpgroup = lax.axis_index("warpgroup")
        rows_smem = refs.q_smem.at[warpgroup, pl.ds(0, q.shape[0])]  # the rest is computed but not stored
        plgpu.copy_gmem_to_smem(q, rows_smem, refs.q_barrier.at[warpgroup])
        plgpu.barrier_wait(refs.q_barrier.at[warpgroup])
        rows = _Rows(
            plgpu.layout_cast(jnp.full((WGMMA_ROWS,), -np.inf, jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS,), jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, self.width), jnp.float32), plgpu.Layout.WGMMA),
        )
        whole = jnp.maximum(blocks - 1, 0)
        if refs.turn_barrier is not None:
            pl.when(warpgroup == 1)(lambda: self._change_turns(refs))
        rows = lax.fori_loop(0, whole, lambda block, rows: self._add_block(refs, block, rows, None), rows)
        rows = lax.fori_loop(
            whole, blocks, lambda block, rows: self._add_block(refs, block, rows, last), rows
        )
        if refs.turn_barrier is not None:
            pl.when(warpgroup == 0)(lambda: self._change_turns(refs))
        return rows

    def _add_block(self, refs: _Refs, block: jax.Array, rows: _Rows, last: jax.Array | None) -> _Rows:
        """The state after one more block; `last`: its last visible key, None if all are visible."""
        warpgroup, slot, shape = lax.axis_index("warpgroup"), ring_slot(block, STAGES), (WGMMA_ROWS, BLOCK)
        plgpu.barrier_wait(refs.k_full.at[slot])
        keys = self._widen(refs, 0, slot) if self.codes else refs.k_smem.at[slot]

        def multiply_keys(sums: Any) -> jax.Array:
            plgpu.wgmma(sums, refs.q_smem.at[warpgroup], keys.transpose((1, 0)))
            self._change_turns(refs)
            return sums[...]

        scores = pl.run_scoped(multiply_keys, plgpu.ACC(shape, jnp.float32))
        plgpu.barrier_arrive(refs.k_empty.at[slot])
        if last is not None:
            key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            scores = jnp.where(key <= last, scores, -np.inf)
        factor = score_factor(self.width)
        top = jnp.maximum(rows.top, jnp.max(scores, axis=1) * factor)
        shrink = jnp.exp2(rows.top - top)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(top, shape, [0]))
        total = rows.total * shrink + jnp.sum(weights, axis=1)
        rounded = weights.astype(self.dtype)
        if refs.turn_barrier is not None:
            plgpu.barrier_arrive(refs.turn_barrier)
        plgpu.barrier_wait(refs.v_full.at[slot])
        if refs.turn_barrier is not None:
            plgpu.barrier_wait(refs.turn_barrier)
        values = self._widen(refs, 1, slot) if self.codes else refs.v_smem.at[slot]
        left: Any = rounded
        if refs.weights_smem is not None:
            left = refs.weights_smem.at[warpgroup]
            left[...] = rounded
            plgpu.commit_smem()

        def multiply_values(sums: Any) -> jax.Array:
            plgpu.wgmma(sums, left, values)
            return sums[...]

        product = pl.run_scoped(multiply_values, plgpu.ACC((WGMMA_ROWS, self.width), jnp.float32))
        plgpu.barrier_arrive(refs.v_empty.at[slot])
        return _Rows(top, total, rows.out * lax.broadcast_in_dim(shrink, rows.out.shape, [0]) + product)

    def _widen(self, refs: _Refs, kind: int, slot: jax.Array) -> Any:
        """Writes a slot's codes times their scale, keys (0) or values (1), as `dtype`; returns the tile."""
        codes, wide = ((refs.k_smem, refs.k_wide), (refs.v_smem, refs.v_wide))[kind]
        scale = refs.scales_gmem[kind]
        for rows in (pl.ds(start, WGMMA_ROWS) for start in range(0, BLOCK, WGMMA_ROWS)):
            for chunk in range(self.width // CHUNK):
                narrow = plgpu.load(codes.at[chunk, slot, rows], layout=plgpu.Layout.WGMMA)
                exact = narrow.astype(jnp.float16).astype(jnp.float32) * scale
                wide[rows, pl.ds(chunk * CHUNK, CHUNK)] = exact.astype(self.dtype)
        plgpu.commit_smem()
        return wide

    def _change_turns(self, refs: _Refs) -> None:
        """Synchronises the two consumers, which then exchange turns on the tensor cores."""
        if refs.turn_barrier is not None:
            plgpu.barrier_arrive(refs.turn_barrier)
            plgpu.barrier_wait(refs.turn_barrier)

    def _store(self, refs: _Refs, rows: _Rows, out: Any) -> None:
        """Divides by the sums, rounds once and starts copying a consumer's rows, via its queries' memory."""
        warpgroup = lax.axis_index("warpgroup")
        quotient = rows.out / lax.broadcast_in_dim(rows.total, rows.out.shape, [0])
        refs.q_smem[warpgroup] = quotient.astype(self.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.q_smem.at[warpgroup, pl.ds(0, out.shape[0])], out)


class Ring(NamedTuple):
    """Slots that are filled together; `copies(step)` gives pairs (source, slots in shared memory)."""

    full_barrier: Any
    empty_barrier: Any
    copies: Callable[[jax.Array], tuple[tuple[Any, Any], ...]]


def produce(steps: jax.Array, *rings: Ring) -> None:
    """The producer: fills the rings of `STAGES` slots, step after step, then waits until all are empty."""

    @pl.loop(0, steps)
    def _step(step: jax.Array) -> None:
        slot = ring_slot(step, STAGES)
        for ring in rings:

            @pl.when(step >= STAGES)
            def _(ring: Ring = ring) -> None:
                plgpu.barrier_wait(ring.empty_barrier.at[slot])
                plgpu.commit_smem()  # orders the consumers' plain loads before TMA's next write

            for source, slots in ring.copies(step):
                plgpu.copy_gmem_to_smem(source, slots.at[slot], ring.full_barrier.at[slot])

    @pl.loop(0, jnp.minimum(steps, STAGES))
    def _drain(slot: jax.Array) -> None:
        for ring in rings:
            plgpu.barrier_wait(ring.empty_barrier.at[slot])


def set_registers(*, producer: bool) -> None:
    """Sets the number of registers of a warpgroup, in a program with two consumers."""
    registers = REGISTERS[WARPGROUPS]
    assert registers is not None  # defined for two consumers
    plgpu.set_max_registers(registers[producer], action="decrease" if producer else "increase")


def part(index: jax.Array, size: int) -> Any:
    """The `index`-th slice of `size`."""
    return pl.ds(index * size, size)
