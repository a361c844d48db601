"""Code shared by all Pallas Mosaic GPU kernels: launching or interpreting a kernel, and shared-memory tiles.

A kernel is one body for the device and for the interpreter. The interpreter runs it on a CPU with a thread
per warpgroup, and simulates every barrier and every asynchronous copy. If two threads race, it raises (JAX
0.12) or prints (JAX 0.11). It raises if memory is read out of bounds, and fills unwritten memory with NaN.
Its products are made here, one multiply-add of a column and a row after the other: numpy's matmul leaves the
order of a sum to a library whose order depends on the CPU and on where in the tile an element lies.

Imported only where a kernel is needed, as not every platform has `jax.experimental.pallas.mosaic_gpu`.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.hopper import SWIZZLE_BYTES
from pallas_kernels.implementations import interpreter_problem


def launch(body: Callable[..., None], *, interpret: bool, **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel`, compiled for the GPU or interpreted on the CPU.

    Args:
      body: the kernel.
      interpret: interpret with race detection.
      options: of `plgpu.kernel`, whose names are the same from JAX 0.11 on.
    Returns:
      A function of arrays. Under `jit` as well as outside.
    Raises:
      NotImplementedError: `interpret` without an interpreter.
    """
    if not interpret:
        return plgpu.kernel(body, **options)
    if problem := interpreter_problem():
        raise NotImplementedError(f"launch: cannot interpret: {problem}.")
    callbacks = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    # For every interpreted kernel of the process; the interpreter has no option for its product.
    setattr(callbacks, "np", _NUMPY)  # noqa: B010
    newer: Any = plgpu  # JAX 0.10 has no InterpretGPUParams
    return plgpu.kernel(body, interpret=newer.InterpretGPUParams(detect_races=True), **options)


def ordered_matmul(a: np.ndarray, b: np.ndarray, *, dtype: Any) -> np.ndarray:
    """numpy's matmul of a [M, K] and b [K, N], summed in `dtype` from the first of K to the last: [M, N].

    An element's bits depend on its row and its column alone, as those of wgmma, whose order is another.
    """
    a, b = a.astype(dtype), b.astype(dtype)
    total = np.zeros((a.shape[0], b.shape[1]), dtype)
    with np.errstate(all="ignore"):  # infinities and NaN pass, as through wgmma
        for column, row in zip(a.T, b, strict=True):
            total += column[:, None] * row
    return total


_NUMPY = types.SimpleNamespace(**{**vars(np), "matmul": ordered_matmul})
"""numpy as the interpreter sees it."""


def tile(rows: int, columns: int, dtype: Any, leading: tuple[int, ...] = ()) -> Any:
    """A shared memory buffer [*leading, rows, columns] in the layout that TMA and wgmma share.

    `columns` of `dtype` must fill 32 or 64 bytes or a multiple of 128; `rows` must be a multiple of 8.
    """
    size = jnp.dtype(dtype).itemsize
    width = min(columns * size, SWIZZLE_BYTES)
    if width not in (32, 64, SWIZZLE_BYTES) or columns * size % width or rows % 8:
        raise ValueError(
            f"tile: wrong size: got rows={rows}, {columns * size} bytes a row, expected a multiple of 8 "
            "and 32, 64 or a multiple of 128."
        )
    transforms = (plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width))
    return plgpu.SMEM((*leading, rows, columns), dtype, transforms=transforms)


def ring_slot(step: jax.Array, stages: int) -> jax.Array:
    """Slot of a ring of `stages` that a program's `step`-th copy goes to."""
    return lax.rem(step, jnp.int32(stages))


def fill_ring(
    tiles: int,
    blocks: int,
    stages: int,
    empty_barrier: Any,
    copies: Callable[[jax.Array], Callable[[jax.Array, jax.Array], None]],
) -> None:
    """A producer: keeps a ring of slots full with every block of every tile, in the order in which consumers
    take them.

    Args:
      tiles: of the result, dealt out over the grid's axis "program".
      blocks: of the contraction.
      stages: slots; `empty_barrier[slot]` says that every consumer is done with what it held.
      copies: gives, for a tile's number, the function (slot, block) that starts the copies of a block.
    """

    @plgpu.nd_loop((tiles,), collective_axes="program")
    def _tile(loop: Any) -> None:
        copy = copies(loop.index[0])

        @pl.loop(0, blocks)
        def _block(block: jax.Array) -> None:
            step = loop.local_index * blocks + block
            slot = ring_slot(step, stages)

            @pl.when(step >= stages)
            def _() -> None:
                plgpu.barrier_wait(empty_barrier.at[slot])
                plgpu.commit_smem()  # what consumers read by plain loads comes before what TMA writes next

            copy(slot, block)

        # Every arrival is waited for: a program of a cluster must not end while its peer can still arrive
        # here.
        @pl.when(loop.local_index == loop.num_local_steps - 1)
        def _drain() -> None:
            @pl.loop(0, stages)
            def _(slot: jax.Array) -> None:
                @pl.when(slot < loop.num_local_steps * blocks)
                def _() -> None:
                    plgpu.barrier_wait(empty_barrier.at[slot])
