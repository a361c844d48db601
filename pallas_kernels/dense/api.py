"""The batch-invariant product x Wᵀ of a linear layer in BF16 or FP16, with FP32 sums.

    out[m, n] = sum over k of x[m, k] w[n, k]        products exact, sums FP32, rounded once to `out_dtype`

cuBLAS uses another algorithm, and another order of sums, for one row than for thousands, so that a token's
logprob would differ in its last bits between decode and training. Here the bits of an element depend only on
its rows of x and W:

    xla               the definition (`reference`): summed in float64, rounded once to FP32. Another order of
                      the float64 sums changes an FP32 result only if it is within some 1e-15 of a tie
    xla_fast          XLA's own product with FP32 sums, whose order may depend on every size
    mosaic_gpu        one kernel with one tile and one order of K for every M, N and K (`mosaic`), on Hopper's
                      tensor cores
    mosaic_interpret  the same kernel on a CPU, with race detection, for tests
    auto              mosaic_gpu if it can run, else xla

The kernel takes every size. K in multiples of 64, M of 8 and N of 16 need no copy; other sizes are padded
with zeros, exactly. The product is not meant to be differentiated; custom differentiation rules call it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dense import reference
from pallas_kernels.implementations import resolve, unknown_name

IMPLEMENTATIONS = ("xla", "xla_fast", "mosaic_gpu", "mosaic_interpret", "auto")
"""Implementations by name."""
OPERAND_DTYPES = (jnp.bfloat16, jnp.float16)
OUT_DTYPES = (jnp.float32, *OPERAND_DTYPES)


def dense_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "N K"],
    *,
    out_dtype: Any = jnp.float32,
    implementation: str = "xla",
) -> Float[Array, "M N"]:
    """x Wᵀ.

    Args:
      x: bfloat16 or float16.
      w: of x's dtype.
      out_dtype: float32, bfloat16 or float16, rounded once from the FP32 sum.
      implementation: one of `IMPLEMENTATIONS`.
    Returns:
      The product, within the roundings of FP32 sums of the float64 one. Except in `xla_fast`, the bits of an
      element do not depend on other rows and columns (tests/kernels/test_dense.py).
    Raises:
      ValueError: shapes, dtypes or names do not fit; the message has both shapes.
      NotImplementedError: a kernel requested by name cannot run here; the message has the reason.
    """
    _check(x, w, out_dtype, implementation)
    problem = "an operand is empty" if 0 in x.shape + w.shape else None
    name = resolve("dense_matmul", implementation, IMPLEMENTATIONS, problem).name
    if name.startswith("mosaic"):
        # not every platform has Pallas for GPUs
        from pallas_kernels.dense import mosaic

        return mosaic.dense_matmul(x, w, jnp.dtype(out_dtype), name == "mosaic_interpret")
    return (reference.matmul_exact if name == "xla" else reference.matmul_fast)(x, w, jnp.dtype(out_dtype))


def _check(x: jax.Array, w: jax.Array, out_dtype: Any, implementation: str) -> None:
    """Raises one ValueError that lists everything wrong with a call."""
    problems = []
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        problems.append(
            f"shapes do not fit: got x.shape={x.shape} and w.shape={w.shape}, expected [M, K] and [N, K]"
        )
    if x.dtype != w.dtype or x.dtype not in OPERAND_DTYPES:
        problems.append(
            f"wrong dtypes: got x.dtype={x.dtype} and w.dtype={w.dtype}, expected bfloat16 or float16, "
            "the same of both"
        )
    if out_dtype not in OUT_DTYPES:
        problems.append(f"wrong dtype: got out_dtype={out_dtype}, expected float32, bfloat16 or float16")
    if implementation not in IMPLEMENTATIONS:
        problems.append(unknown_name(implementation, IMPLEMENTATIONS))
    if problems:
        raise ValueError("dense_matmul: " + "; ".join(problems) + ".")
