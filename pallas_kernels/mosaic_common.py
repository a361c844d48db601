"""What every Pallas Mosaic GPU kernel here shares: how it is launched or interpreted, and the tiles of shared memory.

A kernel is one body for the device and for the interpreter. The interpreter runs it on a CPU with a thread per
warpgroup, every barrier and every asynchronous copy simulated. Where two threads race it raises (JAX 0.12) or prints
(JAX 0.11); it raises where memory is read out of bounds, and fills memory that nobody wrote with NaN.

Imported only where a kernel is wanted: `jax.experimental.pallas.mosaic_gpu` is not there on every platform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.implementations import interpreter_problem

H100_SMS = 132
"""Streaming multiprocessors of an H100 SXM and of an H200; a persistent kernel launches one program on each."""
SMEM_BYTES = 227 * 1024
"""Shared memory of one program on Hopper."""
SWIZZLE_BYTES = 128
"""Width of a row of shared memory that TMA and wgmma permute together."""


def launch(body: Callable[..., None], *, interpret: bool, **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel`, compiled for the GPU or interpreted on the CPU.

    Args:
      body: the kernel.
      interpret: interpret with race detection.
      options: of `plgpu.kernel`, whose names are the same from JAX 0.11 on.
    Returns:
      A function of arrays. Under `jit` as well as outside.
    Raises:
      NotImplementedError: `interpret` where there is no interpreter.
    """
    if not interpret:
        return plgpu.kernel(body, **options)
    if problem := interpreter_problem():
        raise NotImplementedError(f"launch: cannot interpret: {problem}.")
    newer: Any = plgpu  # JAX 0.10 has no InterpretGPUParams
    return plgpu.kernel(body, interpret=newer.InterpretGPUParams(detect_races=True), **options)


def tile(rows: int, columns: int, dtype: Any, leading: tuple[int, ...] = ()) -> Any:
    """A shared memory buffer [*leading, rows, columns] in the layout that TMA and wgmma share.

    `columns` of `dtype` must fill 32, 64 or 128 bytes; `rows` must be a multiple of 8.
    """
    width = columns * jnp.dtype(dtype).itemsize
    if width not in (32, 64, SWIZZLE_BYTES) or rows % 8:
        raise ValueError(f"tile: wrong size: got rows={rows}, {width} bytes a row, expected a multiple of 8 and 32, 64 or 128.")
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(width))
    return plgpu.SMEM((*leading, rows, columns), dtype, transforms=transforms)
