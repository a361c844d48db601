"""Calls vLLM's own Triton kernel of the block-scaled product A Bᵀ from JAX, to compare bits and times.

    acc = fma(dot * sa, sb, acc)        the order "triton"; dot: the tensor core's FP32 sum of 128 products

The kernel is the function `_w8a8_triton_block_scaled_mm` of the installed vLLM, read from its file
(`pallas_kernels.vllm_source`), so that vLLM is neither imported nor copied. jax_triton passes outputs last,
while vLLM's signature has them third, so a wrapper of one call reorders them. Sizes and strides are constants
of the program, so that the compiler knows their divisors. Tiles are vLLM's defaults.

Needs a Hopper GPU, triton, jax_triton 0.3 and vLLM (its source was read in 0.32). The kernel is compiled
ahead of time for compute capability 9.0 in tests/kernels/test_gemm_triton.py and interpreted on a CPU in
test_gemm.py; it has not run on a GPU yet.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.formats import BLOCK
from pallas_kernels.scaled_array import ScaledArray
from pallas_kernels.vllm_source import KERNEL, find_kernel, vllm_source

TILE_M, TILE_N, GROUP_M, WARPS, STAGES = 64, 128, 32, 4, 2
"""vLLM's tiles for sizes that are not in its tables."""
_vllm_kernel: Any = None
LARGEST = 2**31 - 1
"""Largest number of elements of an array: the kernel's offsets are int32."""


def call_problem(a: ScaledArray, b: ScaledArray, promotion_order: str) -> str | None:
    """Why the kernel cannot multiply a [M, K] by b [N, K] transposed in this order; None if it can."""
    if promotion_order != "triton":
        return f"promotion_order={promotion_order!r}, expected 'triton', the only order of vLLM's kernel"
    (m, k) = a.shape
    n = b.shape[0]
    if max(m * k, n * k, m * n) > LARGEST:
        return f"M, N, K = {m}, {n}, {k}, expected at most {LARGEST} elements in each matrix"
    return None


def matmul(a: ScaledArray, b: ScaledArray, out_dtype: Any) -> jax.Array:
    """a [M, K] times b [N, K] transposed: [M, N] in `out_dtype`; sizes need not divide anything.

    Args:
      a: block shape (1, 128).
      b: block shape (128, 128) or (1, 128).
      out_dtype: bfloat16, float16 or float32.
    Raises:
      NotImplementedError: the installed vLLM has no such kernel.
    """
    import jax_triton

    (m, k) = a.shape
    n = b.shape[0]
    return jax_triton.triton_call(
        a.qvalue,
        b.qvalue,
        a.scale,
        b.scale,
        kernel=outputs_last(),
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(-(-m // TILE_M) * -(-n // TILE_N),),
        num_warps=WARPS,
        num_stages=STAGES,
        compute_capability=90,
        **constants(m, n, k, b.block_shape[0]),
    )


def constants(m: int, n: int, k: int, group_n: int) -> dict[str, int]:
    """Sizes and tiles of one program of `outputs_last`; `group_n`: rows of B with one scale."""
    tiles = {"tile_m": TILE_M, "tile_n": TILE_N, "block": BLOCK, "group_m": GROUP_M}
    return {"m": m, "n": n, "k": k, "blocks": -(-k // BLOCK), "group_n": group_n, **tiles}


@functools.cache
def outputs_last() -> Any:
    """vLLM's kernel with arguments (a, b, a's scales, b's scales, out) and `constants`; arrays row-major."""
    import triton

    globals()["_vllm_kernel"] = load_kernel(vllm_source())  # Triton looks the name up here
    return triton.jit(_outputs_last)


# Not annotated, as Triton would look the annotations up.
def _outputs_last(a, b, a_scale, b_scale, out, m, n, k, blocks, group_n, tile_m, tile_n, block, group_m):  # type: ignore[no-untyped-def]
    _vllm_kernel(
        a, b, out, a_scale, b_scale, m, n, k, group_n, block,
        k, 1, 1, k, n, 1, blocks, 1, 1, blocks,
        tile_m, tile_n, block, group_m,
    )  # fmt: skip


def load_kernel(path: Path) -> Any:
    """vLLM's kernel as a `triton.JITFunction`, from the text of its file; errors as `find_kernel`."""
    function = find_kernel(path)
    import triton
    import triton.language

    names: dict[str, Any] = {"triton": triton, "tl": triton.language, "__name__": __name__}
    # Line numbers stay those of vLLM's file, where Triton reads the function again.
    exec(compile(ast.Module([function], []), str(path), "exec"), names)
    return names[KERNEL]
