"""Sizes of a Hopper GPU for the Pallas kernels; imports nothing, so that tiles can be chosen anywhere."""

from __future__ import annotations

H100_SMS = 132
"""Streaming multiprocessors of an H100 SXM and an H200; a persistent kernel launches one program on each."""
SMEM_BYTES = 227 * 1024
"""Shared memory of one program."""
SWIZZLE_BYTES = 128
"""Width of a row of shared memory that TMA and wgmma permute together."""
WGMMA_ROWS = 64
"""Rows of one wgmma instruction."""
REGISTERS = {1: None, 2: (240, 24), 3: (152, 40)}
"""Per thread of (consumer, producer), by consumer warpgroups; the sum over warpgroups must stay below 504
(512 with three consumers), or the kernel hangs. One consumer needs no redistribution."""
