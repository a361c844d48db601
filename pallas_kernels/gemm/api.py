"""The three GEMMs of a linear layer on block-scaled FP8 operands: y = x Wᵀ, dx = dy W, dW = dyᵀ x.

    out[m, n] = sum over blocks kb of 128, ascending:  (sum_{k in kb} A[m, k] B[n, k]) * sa[m, kb] * sb[n, kb]

with an FP32 accumulator. `promotion_order` selects one of the two common orders of the scale products:
  "deepgemm": acc = fma(dot, sa * sb, acc)      (DeepGEMM and cuBLASLt blockwise on Hopper)
  "triton":   acc = fma(dot * sa, sb, acc)      (vLLM's Triton kernel)
`implementation` selects how and where the inner dot of 128 is computed:
  "xla":               exactly (float64), rounded once to FP32: the definition; a row of the result does not
                       depend on other rows
  "xla_fast":          an FP32 dot of BF16 operands, plain FP32 promotion: quicker on CPU, may differ in the
                       last bits and between batch sizes
  "mosaic_gpu":        Hopper's FP8 tensor cores (`mosaic`): FP32 sums of the hardware's precision,
                       row-invariant
  "mosaic_interpret":  the same kernel interpreted on a CPU, with race detection
  "triton":            vLLM's own kernel through jax_triton (`vllm_triton`), only in its order and only by
                       name, for comparison
  "auto":              "mosaic_gpu" if it can run, else "xla"; `implementations.resolve` tells which

The Pallas kernels take every size. K and N in multiples of 128 and M in multiples of 8 need no copy; other
sizes are padded with zeros and cut, exactly. The kernels read both operands along the contraction. FProp's
operands have that layout. XLA transposes DGrad's W and both operands of WGrad on every call (a read and a
write of the codes). Callers with transposed copies (of weights for many microbatches, or from a quantiser
that writes both layouts) can call `matmul` instead. Weights keep the [out, in] layout; the (128, 128) block
transposes exactly, so DGrad needs no second quantisation.

With `accumulator` the finished product is added to it by one FP32 addition (like DeepGEMM's +=). The Pallas
kernels add when they store, in the accumulator's buffer if XLA may reuse it. These functions are not meant to
be differentiated; custom differentiation rules call them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32

from pallas_kernels.formats import BLOCK, add_finished
from pallas_kernels.gemm import reference, vllm_triton
from pallas_kernels.implementations import IMPLEMENTATIONS, resolve, unknown_name
from pallas_kernels.scaled_array import ScaledArray

PROMOTION_ORDERS = ("deepgemm", "triton")
OUT_DTYPES = (jnp.bfloat16, jnp.float32, jnp.float16)


def matmul(
    a: Float8e4m3fn[ScaledArray, "M K"],
    b: Float8e4m3fn[ScaledArray, "N K"],
    *,
    out_dtype: Any = jnp.bfloat16,
    promotion_order: str = "deepgemm",
    implementation: str = "xla",
    accumulator: Float32[Array, "M N"] | None = None,
) -> Float[Array, "M N"]:
    """A Bᵀ, on which the other three products build; both operands have the contraction last.

    Args:
      a: block shape (1, 128).
      b: block shape (128, 128) or (1, 128).
      out_dtype: bfloat16, float16 or float32, rounded once from the FP32 accumulator.
      promotion_order: "deepgemm" or "triton".
      implementation: one of `IMPLEMENTATIONS`.
      accumulator: the product is added to it; requires `out_dtype` float32.
    Returns:
      In `out_dtype`. "xla" is bit-exact against tests/oracles/fp8_oracle.py (tests/kernels/test_gemm.py).
    Raises:
      ValueError: shapes, dtypes, block shapes or names do not fit; the message has both shapes.
      NotImplementedError: a kernel requested by name cannot run here; the message has the reason.
    """
    _check(
        "matmul",
        ("a", a, ((1, BLOCK),)),
        ("b", b, ((BLOCK, BLOCK), (1, BLOCK))),
        1,
        1,
        out_dtype,
        promotion_order,
        implementation,
    )
    return _run("matmul", a, b, out_dtype, promotion_order, implementation, accumulator)


def fprop(
    x: Float8e4m3fn[ScaledArray, "M K"],
    w: Float8e4m3fn[ScaledArray, "N K"],
    *,
    out_dtype: Any = jnp.bfloat16,
    promotion_order: str = "deepgemm",
    implementation: str = "xla",
) -> Float[Array, "M N"]:
    """y = x Wᵀ.

    Args:
      x: block shape (1, 128).
      w: block shape (128, 128).
      out_dtype: bfloat16, float16 or float32, rounded once from the FP32 accumulator.
      promotion_order: "deepgemm" or "triton".
      implementation: one of `IMPLEMENTATIONS`.
    Raises:
      ValueError, NotImplementedError: as `matmul`.
    """
    _check(
        "fprop",
        ("x", x, ((1, BLOCK),)),
        ("w", w, ((BLOCK, BLOCK),)),
        1,
        1,
        out_dtype,
        promotion_order,
        implementation,
    )
    return _run("fprop", x, w, out_dtype, promotion_order, implementation)


def dgrad(
    dy: Float8e4m3fn[ScaledArray, "M N"],
    w: Float8e4m3fn[ScaledArray, "N K"],
    *,
    out_dtype: Any = jnp.bfloat16,
    promotion_order: str = "deepgemm",
    implementation: str = "xla",
) -> Float[Array, "M K"]:
    """dx = dy W, with the transposed codes of `fprop`.

    Args:
      dy: block shape (1, 128).
      w: block shape (128, 128).
      out_dtype, promotion_order, implementation: as in `fprop`.
    Raises:
      ValueError, NotImplementedError: as `matmul`.
    """
    _check(
        "dgrad",
        ("dy", dy, ((1, BLOCK),)),
        ("w", w, ((BLOCK, BLOCK),)),
        1,
        0,
        out_dtype,
        promotion_order,
        implementation,
    )
    return _run("dgrad", dy, w.transpose(), out_dtype, promotion_order, implementation)


def wgrad(
    dy: Float8e4m3fn[ScaledArray, "M N"],
    x: Float8e4m3fn[ScaledArray, "M K"],
    *,
    out_dtype: Any = jnp.float32,
    promotion_order: str = "deepgemm",
    implementation: str = "xla",
    accumulator: Float32[Array, "N K"] | None = None,
) -> Float[Array, "N K"]:
    """dW = dyᵀ x, contracted over tokens in blocks of 128 (the last one may be partial).

    Args:
      dy: block shape (128, 1).
      x: block shape (128, 1) or (128, 128).
      out_dtype, promotion_order, implementation: as in `fprop`; gradients of masters are float32.
      accumulator: as in `matmul`.
    Raises:
      ValueError, NotImplementedError: as `matmul`.
    """
    blocks = ((BLOCK, 1), (BLOCK, BLOCK))
    _check(
        "wgrad", ("dy", dy, blocks[:1]), ("x", x, blocks), 0, 0, out_dtype, promotion_order, implementation
    )
    return _run(
        "wgrad", dy.transpose(), x.transpose(), out_dtype, promotion_order, implementation, accumulator
    )


def _run(
    function: str,
    a: ScaledArray,
    b: ScaledArray,
    out_dtype: Any,
    promotion_order: str,
    implementation: str,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """A Bᵀ, added to the accumulator if given, by the named implementation; raises if it cannot run."""
    problem = "an operand is empty" if 0 in a.shape + b.shape else None
    if implementation == "triton":
        problem = problem or vllm_triton.call_problem(a, b, promotion_order)
    name = resolve(function, implementation, IMPLEMENTATIONS, problem).name
    dtype = jnp.dtype(out_dtype)
    if accumulator is not None:
        _check_accumulator(function, accumulator, (a.shape[0], b.shape[0]), dtype)
    if name.startswith("mosaic"):
        from pallas_kernels.gemm import mosaic  # not every platform has Pallas for GPUs

        return mosaic.matmul(
            a, b, dtype, promotion_order, name == "mosaic_interpret", accumulator=accumulator
        )
    if name == "triton":
        product = vllm_triton.matmul(a, b, dtype)
    else:
        product = (reference.matmul_exact if name == "xla" else reference.matmul_fast)(
            a, b, dtype, promotion_order
        )
    return product if accumulator is None else add_finished(accumulator, product)


def _check_accumulator(function: str, accumulator: jax.Array, shape: tuple[int, int], out_dtype: Any) -> None:
    """Raises ValueError unless the accumulator and the result are both FP32, of this shape."""
    if (accumulator.shape, accumulator.dtype, out_dtype) != (shape, jnp.float32, jnp.float32):
        got = f"got accumulator {accumulator.dtype}{list(accumulator.shape)} and out_dtype={out_dtype}"
        raise ValueError(
            f"{function}: wrong accumulator: {got}, expected float32 {list(shape)} and out_dtype=float32."
        )


_Operand = tuple[str, ScaledArray, tuple[tuple[int, int], ...]]


def _check(
    function: str,
    left: _Operand,
    right: _Operand,
    left_axis: int,
    right_axis: int,
    out_dtype: Any,
    promotion_order: str,
    implementation: str,
) -> None:
    """Raises one ValueError that lists everything wrong with a call."""
    problems = []
    for name, array, block_shapes in (left, right):
        if not isinstance(array, ScaledArray):
            raise ValueError(
                f"{function}: wrong type: got {name}={type(array).__name__}, expected ScaledArray."
            )
        array.check()
        if array.block_shape not in block_shapes:
            problems.append(
                f"wrong block shape: got {name}.block_shape={array.block_shape}, expected one of "
                f"{block_shapes}"
            )
    if left[1].shape[left_axis] != right[1].shape[right_axis]:
        problems.append(
            f"contracted sizes differ: got {left[0]}.shape={left[1].shape} and "
            f"{right[0]}.shape={right[1].shape}, "
            f"expected {left[0]}.shape[{left_axis}] == {right[0]}.shape[{right_axis}]"
        )
    if out_dtype not in OUT_DTYPES:
        problems.append(f"wrong dtype: got out_dtype={out_dtype}, expected bfloat16, float16 or float32")
    if promotion_order not in PROMOTION_ORDERS:
        problems.append(
            f"unknown order: got promotion_order={promotion_order!r}, expected one of {PROMOTION_ORDERS}"
        )
    if implementation not in IMPLEMENTATIONS:
        problems.append(unknown_name(implementation, IMPLEMENTATIONS))
    if problems:
        raise ValueError(f"{function}: " + "; ".join(problems) + ".")
