"""The public quantisers, which check their arguments and call the named implementation.

    scale[I, J] = compute_scale(max |x| over block (I, J))        code = encode(x, scale)

Source of the formula and of every number: `pallas_kernels.formats`. Every implementation gives the same bits:

    xla                the definition (`reference`); every shape, float32, bfloat16 and float16
    mosaic_gpu         one kernel that reads the matrix once (`mosaic`); bfloat16 and float16, second
                       dimension a multiple of 128
    mosaic_interpret   the same kernel on a CPU, for tests
    auto               mosaic_gpu if it can run, else xla; `choose` tells which, and why

The kernels write the contracted axis last: codes in blocks along tokens (128, 1) are transposed in memory,
and scales of rows are [C / 128, R]. The returned arrays still have logical axes, so that inside `jit` a GEMM
that transposes them back reads the kernel's arrays unchanged.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Int32

from pallas_kernels.formats import BLOCK, SCALE_FORMATS
from pallas_kernels.implementations import Choice, resolve, unknown_name
from pallas_kernels.quantize import reference
from pallas_kernels.scaled_array import BLOCK_SHAPES, ScaledArray

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "mosaic_interpret", "auto")
"""Implementations by name; all of them give the same bits."""

INPUT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
ROW, SQUARE, COLUMN = (1, BLOCK), (BLOCK, BLOCK), (BLOCK, 1)


def quantize(
    x: Float[Array, "R C"],
    block_shape: tuple[int, int],
    *,
    scale_format: str = "float32",
    implementation: str = "xla",
) -> Float8e4m3fn[ScaledArray, "R C"]:
    """Quantises `x` in blocks of `block_shape`; edge blocks may be partial.

    Args:
      x: float32, bfloat16 or float16, neither dimension zero.
      block_shape: (1, 128) activations and output gradients, (128, 128) weights, (128, 1) WGrad operands.
      scale_format: "float32" or "power_of_two".
      implementation: one of `IMPLEMENTATIONS`.
    Returns:
      Codes and scales. A block of zeros has codes 0 and a positive scale. A block with a NaN or an infinity
      has a non-finite scale (counted by `nonfinite_blocks`), which makes every product of it non-finite.
      Bit-exact against tests/oracles/fp8_oracle.py (tests/kernels/test_quantize.py,
      tests/kernels/test_quantize_kernels.py); the sign of a NaN code is not defined.
    Raises:
      ValueError: shape, dtype, block shape, scale format or implementation is not one of the above.
      NotImplementedError: the named implementation cannot run here or cannot take `x`; the message has the
        reason.
    """
    block_shape = (block_shape[0], block_shape[1])
    unknown = (
        [] if block_shape in BLOCK_SHAPES else [_unknown_block("block_shape", block_shape, BLOCK_SHAPES)]
    )
    _check("quantize", x, scale_format, implementation, unknown)
    name = _choose("quantize", x, implementation).name
    if name == "xla":
        return reference.quantize(x, block_shape, scale_format)
    if block_shape == COLUMN:
        return _run_kernel(x, None, "column", scale_format, name)[1]
    return _run_kernel(x, "row" if block_shape == ROW else "block", None, scale_format, name)[0]


def quantize_dual(
    x: Float[Array, "R C"],
    token_block_shape: tuple[int, int] = COLUMN,
    *,
    scale_format: str = "float32",
    implementation: str = "xla",
) -> tuple[Float8e4m3fn[ScaledArray, "R C"], Float8e4m3fn[ScaledArray, "R C"]]:
    """`x` quantised for FProp or DGrad and also for WGrad, from one read.

    Args:
      x: float32, bfloat16 or float16, neither dimension zero.
      token_block_shape: blocks of the second array, (128, 1) along tokens or (128, 128).
      scale_format, implementation: as in `quantize`.
    Returns:
      The bits of quantize(x, (1, 128)) and of quantize(x, token_block_shape).
    Raises:
      ValueError, NotImplementedError: as `quantize`.
    """
    token_block_shape = (token_block_shape[0], token_block_shape[1])
    allowed = (COLUMN, SQUARE)
    unknown = (
        []
        if token_block_shape in allowed
        else [_unknown_block("token_block_shape", token_block_shape, allowed)]
    )
    _check("quantize_dual", x, scale_format, implementation, unknown)
    name = _choose("quantize_dual", x, implementation).name
    if name == "xla":
        return reference.quantize(x, ROW, scale_format), reference.quantize(
            x, token_block_shape, scale_format
        )
    return _run_kernel(x, "row", "column" if token_block_shape == COLUMN else "block", scale_format, name)


def quantize_weight(
    w: Float[Array, "N K"], *, scale_format: str = "float32", implementation: str = "xla"
) -> tuple[Float8e4m3fn[ScaledArray, "N K"], Float8e4m3fn[ScaledArray, "K N"]]:
    """A weight `w` in (128, 128) blocks, and the same codes transposed in memory for DGrad.

    Args:
      w: float32, bfloat16 or float16, neither dimension zero.
      scale_format, implementation: as in `quantize`.
    Returns:
      quantize(w, (128, 128)) and its exact transpose.
    Raises:
      ValueError, NotImplementedError: as `quantize`.
    """
    _check("quantize_weight", w, scale_format, implementation, [], "w")
    name = _choose("quantize_weight", w, implementation, "w").name
    if name == "xla":
        weight = reference.quantize(w, SQUARE, scale_format)
        return weight, weight.transpose()
    weight, transposed = _run_kernel(w, "block", "block", scale_format, name)
    return weight, transposed.transpose()


def requantize(
    array: Float8e4m3fn[ScaledArray, "R C"], *, scale_format: str = "float32", implementation: str = "xla"
) -> Float8e4m3fn[ScaledArray, "R C"]:
    """The values of an `array` in blocks of (1, 128), quantised again in blocks of (128, 1) along tokens.

    Args:
      array: the codes that the forward multiplied and saved.
      scale_format, implementation: as in `quantize`; the kernel (`mosaic_requantize`) does not write the
        dequantised values.
    Returns:
      quantize(array.dequantize(float32), (128, 1)), which rounds to FP8 a second time.
    Raises:
      ValueError: `array` has other blocks; and as `quantize`.
      NotImplementedError: as `quantize`.
    """
    unknown = (
        [] if array.block_shape == ROW else [_unknown_block("array.block_shape", array.block_shape, (ROW,))]
    )
    _check(
        "requantize",
        jax.ShapeDtypeStruct(array.shape, jnp.float32),
        scale_format,
        implementation,
        unknown,
        "array",
    )
    name = resolve("requantize", implementation, IMPLEMENTATIONS, requantize_problem(array)).name
    if name == "xla":
        return reference.quantize(array.dequantize(jnp.float32), COLUMN, scale_format)
    from pallas_kernels.quantize import mosaic_requantize  # not on every platform

    codes, scales = mosaic_requantize.requantize(
        array.qvalue, array.scale.T, scale_format, name == "mosaic_interpret"
    )
    return ScaledArray(codes.T, scales, COLUMN)


def choose(x: jax.Array, implementation: str = "auto") -> Choice:
    """The implementation that a quantiser uses for `x`, with the reason; raises as `quantize`."""
    return _choose("choose", x, implementation)


def nonfinite_blocks(array: ScaledArray) -> Int32[Array, ""]:
    """The number of blocks with a non-finite scale, i.e. that contained a NaN or an infinity."""
    return jnp.sum(~jnp.isfinite(array.scale), dtype=jnp.int32)


def _run_kernel(
    x: jax.Array, straight: str | None, transposed: str | None, scale_format: str, name: str
) -> tuple[ScaledArray, ScaledArray]:
    """The kernel's arrays with logical axes [R, C]; a ScaledArray that is not in the plan holds None."""
    from pallas_kernels.quantize import mosaic  # not on every platform

    plan = mosaic.Plan(straight, transposed)
    return mosaic.logical_arrays(mosaic.quantize((x,), plan, scale_format, name == "mosaic_interpret"))


def kernel_problem(x: Any, argument: str = "x") -> str | None:
    """Why the kernel cannot take `x` (an array, or its shape and dtype) on any device; None if it can."""
    if x.shape[1] % BLOCK:
        return (
            f"{argument}.shape is {tuple(x.shape)}, expected a second dimension that is a multiple of {BLOCK}"
        )
    if x.dtype == jnp.float32:
        return f"{argument}.dtype is {x.dtype}, expected bfloat16 or float16"
    return None


def requantize_problem(array: Any) -> str | None:
    """Why the kernel of `requantize` cannot take `array` on any device; None if it can."""
    columns = array.shape[1]
    return (
        f"array.shape is {tuple(array.shape)}, expected a second dimension that is a multiple of {BLOCK}"
        if columns % BLOCK
        else None
    )


def _choose(function: str, x: jax.Array, implementation: str, argument: str = "x") -> Choice:
    """`resolve`, with the kernel's problem with `x`, if any."""
    return resolve(function, implementation, IMPLEMENTATIONS, kernel_problem(x, argument))


def _unknown_block(argument: str, value: tuple[int, int], allowed: tuple[tuple[int, int], ...]) -> str:
    """The message for an unknown block shape."""
    return f"unknown block shape: got {argument}={value}, expected one of {allowed}"


def _check(
    function: str, x: Any, scale_format: str, implementation: str, problems: list[str], argument: str = "x"
) -> None:
    """Raises one ValueError listing `problems` and those of the arguments that all quantisers share."""
    problems = list(problems)
    if x.ndim != 2 or 0 in x.shape:
        problems.append(
            f"wrong shape: got {argument}.shape={tuple(x.shape)}, expected two non-zero dimensions"
        )
    if x.dtype not in INPUT_DTYPES:
        problems.append(f"wrong dtype: got {argument}.dtype={x.dtype}, expected float32, bfloat16 or float16")
    if scale_format not in SCALE_FORMATS:
        problems.append(
            f"unknown scale format: got scale_format={scale_format!r}, expected one of {SCALE_FORMATS}"
        )
    if implementation not in IMPLEMENTATIONS:
        problems.append(unknown_name(implementation, IMPLEMENTATIONS))
    if problems:
        raise ValueError(f"{function}: " + "; ".join(problems) + ".")
