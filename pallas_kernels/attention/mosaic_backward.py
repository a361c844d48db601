"""The gradient of causal attention on Hopper's tensor cores: two kernels, no atomic additions.

    p = exp2(s c - log_sum),  delta = o . do,  ds = p * (do v^T - delta)
    dq = ds k / sqrt(H)       one program for each query head and tile of 128 tokens, over the visible keys
    dk = ds^T q / sqrt(H),    one program for each key/value head and tile of 128 tokens, over the tokens that
    dv = p^T do               see the tile, for every query head of the group

Weights and their gradients are rounded to the operands' dtype before the second products, since tensor cores
take no FP32 operands.  Each sum is computed by one program in a fixed order, so every call gives the same
bits.  Tiles, segments and rings are those of `mosaic`.  The two consumers hold 64 rows each and process the
other side in blocks of 64, since registers suffice for no more.
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

from pallas_kernels.attention.mosaic import (
    COMPILER,
    PER_ROW,
    STAGES,
    WARPGROUPS,
    Ring,
    fill,
    part,
    produce,
    set_registers,
)
from pallas_kernels.attention.reference import score_factor
from pallas_kernels.hopper import WGMMA_ROWS
from pallas_kernels.mosaic_common import launch, ring_slot, tile

PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
SQUARE = (WGMMA_ROWS, WGMMA_ROWS)


@functools.partial(jax.jit, static_argnums=(7,), inline=True)
def causal_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first_blocks: jax.Array,
    out: jax.Array,
    log_sums: jax.Array,
    cotangent: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq [B, T, N, H], dk and dv [B, T, K, H] in the operands' dtype.

    Args:
      q, k, v, first_blocks, interpret: as `mosaic.causal_attention`.
      out, log_sums: results of `mosaic.causal_attention`.
      cotangent: shape and dtype of `out`; 0 at padding.
    """
    length = q.shape[1]
    # not as a product of matrices, for which XLA would store both in FP32
    delta = jnp.moveaxis((out.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(-1), 1, 2)
    q, k, v, cotangent = (fill(x, 1) for x in (q, k, v, cotangent))
    log_sums, delta = (fill(x, 2) for x in (log_sums, delta))
    B, _, N, H = q.shape
    K, tiles = k.shape[2], first_blocks.shape[1]
    kernel = _Gradient(N // K, H, q.dtype, interpret)
    common: dict[str, Any] = {
        "interpret": interpret,
        "num_threads": WARPGROUPS + 1,
        "thread_name": "warpgroup",
        "compiler_params": COMPILER,
        "grid_names": ("head", "tile", "row"),
    }
    dq = launch(
        kernel.of_queries,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(N, tiles, B),
        scratch_types=kernel.scratch(own_vectors=True),
        **common,
    )(q, k, v, cotangent, log_sums, delta, first_blocks)
    dk, dv = launch(
        kernel.of_keys,
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype),) * 2,
        grid=(K, tiles, B),
        scratch_types=kernel.scratch(own_vectors=False),
        **common,
    )(q, k, v, cotangent, log_sums, delta, _ends(first_blocks))
    return dq[:, :length], dk[:, :length], dv[:, :length]


def _ends(first_blocks: jax.Array) -> jax.Array:
    """The end (exclusive) of each block's segment, in blocks; its own index if its tokens see nothing."""
    own = jnp.arange(first_blocks.shape[1], dtype=jnp.int32)[None]
    same = first_blocks[:, :, None] == first_blocks[:, None, :]
    return jnp.where(first_blocks <= own, jnp.where(same, own[:, None] + 1, 0).max(-1), own)


class _Refs(NamedTuple):
    """Buffers and barriers of one program: two tiles of rows of each consumer, and two rings of slots."""

    own_smem: tuple[Any, Any]
    ring_smem: tuple[Any, Any]
    log_smem: Any
    delta_smem: Any
    own_barrier: Any
    full_barrier: Any
    empty_barrier: Any
    left_smem: Any = None

    def load_own(self, *sources: tuple[Any, Any]) -> None:
        """Starts the copies, given as pairs (source, place of each consumer), and waits for them."""
        warpgroup = lax.axis_index("warpgroup")
        for source, places in sources:
            plgpu.copy_gmem_to_smem(source, places.at[warpgroup], self.own_barrier.at[warpgroup])
        plgpu.barrier_wait(self.own_barrier.at[warpgroup])


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """Both kernels: `group` query heads for each key/value head, heads of `width` values of `dtype`."""

    group: int
    width: int
    dtype: Any
    interpret: bool

    def scratch(self, *, own_vectors: bool) -> dict[str, Any]:
        """Scratch shapes for `plgpu.kernel`, by the names of `_Refs`.

        own_vectors: logarithms and deltas belong to the tile and are loaded once, instead of at every step.
        """
        own = tile(WGMMA_ROWS, self.width, self.dtype, (WARPGROUPS,))
        slots = tile(WGMMA_ROWS, self.width, self.dtype, (STAGES,))
        vectors = plgpu.SMEM((WARPGROUPS if own_vectors else STAGES, WGMMA_ROWS), jnp.float32)
        scratch: dict[str, Any] = {
            "own_smem": (own, own),
            "ring_smem": (slots, slots),
            "log_smem": vectors,
            "delta_smem": vectors,
            "own_barrier": plgpu.Barrier(num_arrivals=4 if own_vectors else 2, num_barriers=WARPGROUPS),
            "full_barrier": plgpu.Barrier(num_arrivals=2 if own_vectors else 4, num_barriers=STAGES),
            "empty_barrier": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        }
        if self.interpret:  # as in `mosaic`
            scratch["left_smem"] = tile(WGMMA_ROWS, WGMMA_ROWS, self.dtype, (WARPGROUPS, 2))
        return scratch

    def of_queries(
        self,
        q_gmem: Any,
        k_gmem: Any,
        v_gmem: Any,
        do_gmem: Any,
        log_gmem: Any,
        delta_gmem: Any,
        first_gmem: Any,
        dq_gmem: Any,
        **scratch: Any,
    ) -> None:
        """dq of a tile of 128 tokens under one query head."""
        refs = _Refs(**scratch)
        row, head, warpgroup = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("warpgroup")
        index = lax.axis_size("tile") - 1 - lax.axis_index("tile")  # the longest first
        first = first_gmem[row, index]
        steps = 2 * jnp.maximum(index + 1 - first, 0)

        def copies(step: jax.Array) -> tuple[tuple[Any, Any], ...]:
            place = row, part(2 * first + step, WGMMA_ROWS), head // self.group
            return (k_gmem.at[place], refs.ring_smem[0]), (v_gmem.at[place], refs.ring_smem[1])

        @pl.when(warpgroup == WARPGROUPS)
        def _produce() -> None:
            set_registers(producer=True)
            produce(steps, Ring(refs.full_barrier, refs.empty_barrier, copies))

        @pl.when(warpgroup < WARPGROUPS)
        def _consume() -> None:
            set_registers(producer=False)
            tokens = part(2 * index + warpgroup, WGMMA_ROWS)
            q_smem, do_smem = refs.own_smem
            refs.load_own(
                (q_gmem.at[row, tokens, head], q_smem),
                (do_gmem.at[row, tokens, head], do_smem),
                (log_gmem.at[row, head, tokens], refs.log_smem),
                (delta_gmem.at[row, head, tokens], refs.delta_smem),
            )
            log_sum, delta = (
                lax.broadcast_in_dim(plgpu.load(x.at[warpgroup], layout=PER_ROW), SQUARE, [0])
                for x in (refs.log_smem, refs.delta_smem)
            )

            def add_block(step: jax.Array, dq: jax.Array) -> jax.Array:
                slot = ring_slot(step, STAGES)
                plgpu.barrier_wait(refs.full_barrier.at[slot])
                k_smem, v_smem = (x.at[slot] for x in refs.ring_smem)
                pairs = (q_smem.at[warpgroup], k_smem), (do_smem.at[warpgroup], v_smem)
                scores, towards = self._products(*pairs)
                block = step - steps + 2  # of the tile's own two blocks of keys, which come last
                scores = _hide(scores, block >= 0, lambda: (_places(1, block), _places(0, warpgroup)))
                weights = jnp.exp2(scores * score_factor(self.width) - log_sum)
                (dq,) = self._accumulate(refs, (dq,), (weights * (towards - delta),), (k_smem,))
                plgpu.barrier_arrive(refs.empty_barrier.at[slot])
                return dq

            dq = lax.fori_loop(0, steps, add_block, self._zeros())
            self._store(dq * self._scale, q_smem.at[warpgroup], dq_gmem.at[row, tokens, head])
            plgpu.wait_smem_to_gmem(0)

    def of_keys(
        self,
        q_gmem: Any,
        k_gmem: Any,
        v_gmem: Any,
        do_gmem: Any,
        log_gmem: Any,
        delta_gmem: Any,
        end_gmem: Any,
        dk_gmem: Any,
        dv_gmem: Any,
        **scratch: Any,
    ) -> None:
        """dk and dv of a tile of 128 tokens under one key/value head."""
        refs = _Refs(**scratch)
        row, head, index = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("tile")
        warpgroup = lax.axis_index("warpgroup")
        seen = 2 * (end_gmem[row, index] - index)  # blocks of 64 tokens that see some of the keys

        def copies(step: jax.Array) -> tuple[tuple[Any, Any], ...]:
            query_head, tokens = (
                head * self.group + step // seen,
                part(2 * index + lax.rem(step, seen), WGMMA_ROWS),
            )
            return (
                *(
                    (x.at[row, tokens, query_head], y)
                    for x, y in zip((q_gmem, do_gmem), refs.ring_smem, strict=True)
                ),
                (log_gmem.at[row, query_head, tokens], refs.log_smem),
                (delta_gmem.at[row, query_head, tokens], refs.delta_smem),
            )

        @pl.when(warpgroup == WARPGROUPS)
        def _produce() -> None:
            set_registers(producer=True)
            produce(self.group * seen, Ring(refs.full_barrier, refs.empty_barrier, copies))

        @pl.when(warpgroup < WARPGROUPS)
        def _consume() -> None:
            set_registers(producer=False)
            keys = row, part(2 * index + warpgroup, WGMMA_ROWS), head
            k_smem, v_smem = refs.own_smem
            refs.load_own((k_gmem.at[keys], k_smem), (v_gmem.at[keys], v_smem))

            def add_block(step: jax.Array, carry: Any) -> Any:
                block, sums = carry
                slot = ring_slot(step, STAGES)
                plgpu.barrier_wait(refs.full_barrier.at[slot])
                q_smem, do_smem = (x.at[slot] for x in refs.ring_smem)
                pairs = (k_smem.at[warpgroup], q_smem), (v_smem.at[warpgroup], do_smem)
                scores, towards = self._products(*pairs)
                scores = _hide(scores, block < 2, lambda: (_places(0, warpgroup), _places(1, block)))
                log_sum = self._per_column(refs.log_smem.at[slot])
                weights = jnp.exp2(scores * score_factor(self.width) - log_sum)
                back = weights * (towards - self._per_column(refs.delta_smem.at[slot]))
                sums = self._accumulate(refs, sums, (back, weights), (q_smem, do_smem))
                plgpu.barrier_arrive(refs.empty_barrier.at[slot])
                return jnp.where(block + 1 < seen, block + 1, 0), sums

            start = jnp.int32(0), (self._zeros(), self._zeros())
            _, (dk, dv) = lax.fori_loop(0, self.group * seen, add_block, start)
            self._store(dk * self._scale, k_smem.at[warpgroup], dk_gmem.at[keys])
            self._store(dv, v_smem.at[warpgroup], dv_gmem.at[keys])
            plgpu.wait_smem_to_gmem(0)

    @property
    def _scale(self) -> np.float32:
        return np.float32(self.width**-0.5)

    def _per_column(self, vector: Any) -> jax.Array:
        """A vector [64] of shared memory as every row of [64, 64]."""
        return lax.broadcast_in_dim(plgpu.load(vector, layout=PER_COLUMN), SQUARE, [1])

    def _zeros(self) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, self.width), jnp.float32), plgpu.Layout.WGMMA)

    def _products(self, *pairs: tuple[Any, Any]) -> tuple[jax.Array, ...]:
        """a b^T [64, 64] for each pair of tiles (a, b)."""

        def multiply(*sums: Any) -> tuple[jax.Array, ...]:
            for (a, b), total in zip(pairs, sums, strict=True):
                plgpu.wgmma(total, a, b.transpose((1, 0)))
            return tuple(total[...] for total in sums)

        return pl.run_scoped(multiply, *(plgpu.ACC(SQUARE, jnp.float32) for _ in pairs))

    def _accumulate(
        self, refs: _Refs, sums: tuple[jax.Array, ...], lefts: tuple[jax.Array, ...], rights: tuple[Any, ...]
    ) -> tuple[jax.Array, ...]:
        """sums + lefts @ rights, with lefts [64, 64] in the operands' dtype."""
        rounded: list[Any] = [left.astype(self.dtype) for left in lefts]
        if not self.interpret:

            def multiply(totals: Any) -> None:
                for total, left, right in zip(totals, rounded, rights, strict=True):
                    plgpu.wgmma(total, left, right)

            return pl.run_state(multiply)(tuple(plgpu.ACC.init(total) for total in sums))
        places = [refs.left_smem.at[lax.axis_index("warpgroup"), i] for i in range(len(lefts))]
        for place, left in zip(places, rounded, strict=True):
            place[...] = left
        plgpu.commit_smem()

        def multiply_from_zero(*totals: Any) -> tuple[jax.Array, ...]:
            for total, left, right in zip(totals, places, rights, strict=True):
                plgpu.wgmma(total, left, right)
            return tuple(total[...] for total in totals)

        shapes = (plgpu.ACC((WGMMA_ROWS, self.width), jnp.float32) for _ in sums)
        return tuple(a + b for a, b in zip(sums, pl.run_scoped(multiply_from_zero, *shapes), strict=True))

    def _store(self, values: jax.Array, smem: Any, gmem: Any) -> None:
        """Rounds once and starts the copy of a consumer's rows, via its operand's memory."""
        smem[...] = values.astype(self.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, gmem)


def _hide(
    scores: jax.Array, somewhere: jax.Array, keys_and_tokens: Callable[[], tuple[jax.Array, jax.Array]]
) -> jax.Array:
    """Hides the scores of keys after their token, if `somewhere` says that there are any.

    The indices are computed within the branch; otherwise they would occupy registers, of which none are free.
    """

    def hidden(scores: jax.Array) -> jax.Array:
        keys, tokens = keys_and_tokens()
        return jnp.where(keys > tokens, -np.inf, scores)

    return lax.cond(somewhere, hidden, lambda scores: scores, scores)


def _places(axis: int, block: jax.Array) -> jax.Array:
    """Index within the tile of each row (axis 0) or column (axis 1) of a block of 64, int32 [64, 64]."""
    return plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=plgpu.Layout.WGMMA) + block * WGMMA_ROWS
