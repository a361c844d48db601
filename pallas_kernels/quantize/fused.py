"""A decoder's operations fused with the quantiser that follows: the same bits with one trip to memory.

    silu_multiply_quantize    quantize(bf16(bf16(SiLU(gate)) * up))
    silu_gradients_quantize   the gradients of gate and up, quantised for DGrad and WGrad
    rms_norm_quantize         quantize(RMSNorm(x) or RMSNorm(x + residual))

The rounding points are those of the mirrored engine, by `engine_variant`:

    native   y = bf16(bf16(h * rsqrt(mean(h^2) + eps)) * w)     h = x + residual, not rounded
    cuda     y = bf16(h * rsqrt(mean(h^2) + eps) * w)           h = bf16(x + residual)

Between two roundings everything is computed with so many bits that the rounding does not depend on the order
of a sum: the mean, the root and the product in float64, rounded to FP32 and then to BF16 ("xla", the
definition). In another order, a sum of D float64 squares differs by less than D 2**-53 of itself, at most
2**-40 for D = 8192. That matters only if a result is within 2**-40 of the midpoint of two BF16 numbers, once
in 2**31 values; and squares of BF16 numbers within a factor of 2**12 of each other are added without any
rounding. So the kernel's own order (the 128 values of a block, then the blocks in order) is not part of the
contract. vLLM's CUDA kernel sums in FP32 in its own order, so a few of a million values differ from both.

Attention is not fused. Its result comes from a library kernel (cuDNN, FlashAttention) that cannot be extended
from outside, so it is rounded to BF16 and stored in any case. `quantize` then quantises it as [B T, N H],
which is the layout that attention writes; with a head width of 128 each head is one block.

Only BF16 is supported. Source of the rounding points: vLLM's eager operations on CPU and its CUDA kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn

from pallas_kernels.formats import SCALE_FORMATS, to_float64
from pallas_kernels.implementations import resolve, unknown_name
from pallas_kernels.quantize import reference
from pallas_kernels.quantize.api import COLUMN, IMPLEMENTATIONS, ROW, SQUARE, kernel_problem
from pallas_kernels.quantize.producers import silu_gradients
from pallas_kernels.scaled_array import ScaledArray

ENGINE_VARIANTS = ("native", "cuda")
KERNEL_WIDTHS = (896, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 8192)
"""Widths D of the RMSNorm kernel (`mosaic_norm.tokens_per_half`): those of Qwen3, Qwen2 and Llama 3."""


def silu_multiply_quantize(
    gate: BFloat16[Array, "M F"],
    up: BFloat16[Array, "M F"],
    *,
    token_block_shape: tuple[int, int] | None = None,
    scale_format: str = "float32",
    implementation: str = "xla",
) -> tuple[Float8e4m3fn[ScaledArray, "M F"], Float8e4m3fn[ScaledArray, "M F"] | None]:
    """SiLU(gate) * up, rounded to BF16 after each of the two, then quantised.

    Args:
      gate, up: neither dimension zero.
      token_block_shape: blocks of a second array for WGrad, (128, 1) or (128, 128); None: no second array.
      scale_format: "float32" or "power_of_two".
      implementation: as in `quantize`; the kernel needs F to be a multiple of 128.
    Returns:
      The array in blocks (1, 128), and the second one or None. Bit for bit the two operations in turn, except
      for values below 2**-119 times |up|, which may become zero (tests/kernels/test_fused.py).
    Raises:
      ValueError: shapes, dtypes or names do not fit.
      NotImplementedError: the named implementation cannot run here or cannot take these shapes; the message
        has the reason.
    """
    function = "silu_multiply_quantize"
    problems = _matrix_problems({"gate": gate, "up": up}, scale_format, implementation)
    if token_block_shape not in (None, COLUMN, SQUARE):
        problems.append(
            f"unknown block shape: got token_block_shape={token_block_shape}, expected None, {COLUMN} "
            f"or {SQUARE}"
        )
    _raise(function, problems)
    name = resolve(function, implementation, IMPLEMENTATIONS, kernel_problem(gate, "gate")).name
    if name == "xla":
        product = _silu_multiply(gate, up)
        second = (
            None
            if token_block_shape is None
            else reference.quantize(product, token_block_shape, scale_format)
        )
        return reference.quantize(product, ROW, scale_format), second
    from pallas_kernels.quantize import mosaic  # not on every platform

    transposed = {None: None, COLUMN: "column", SQUARE: "block"}[token_block_shape]
    outputs = mosaic.quantize(
        (gate, up), mosaic.Plan("row", transposed), scale_format, name == "mosaic_interpret"
    )
    rows, second = mosaic.logical_arrays(outputs)
    return rows, None if transposed is None else second


def silu_gradients_quantize(
    gate: BFloat16[Array, "M F"],
    up: BFloat16[Array, "M F"],
    dy: BFloat16[Array, "M F"],
    *,
    scale_format: str = "float32",
    implementation: str = "xla",
) -> tuple[tuple[ScaledArray, ScaledArray], tuple[ScaledArray, ScaledArray]]:
    """The gradients of gate and up in bf16(bf16(SiLU(gate)) * up), quantised both ways; dy is the cotangent.

    Args:
      gate, up, dy: neither dimension zero.
      scale_format, implementation: as in `silu_multiply_quantize`.
    Returns:
      Of gate and of up: the gradient in blocks (1, 128) and in blocks (128, 1), both of one BF16 value, which
      is that of float64 or a neighbour (tests/kernels/test_fused.py), and may differ between implementations.
    Raises:
      ValueError: shapes, dtypes or names do not fit.
      NotImplementedError: as `silu_multiply_quantize`.
    """
    function = "silu_gradients_quantize"
    matrices = {"gate": gate, "up": up, "dy": dy}
    _raise(function, _matrix_problems(matrices, scale_format, implementation))
    name = resolve(function, implementation, IMPLEMENTATIONS, kernel_problem(gate, "gate")).name
    if name == "xla":
        gradients = silu_gradients(*(x.astype(jnp.float32) for x in matrices.values()))
        of_gate, of_up = (
            tuple(reference.quantize(x.astype(jnp.bfloat16), block, scale_format) for block in (ROW, COLUMN))
            for x in gradients
        )
        return of_gate, of_up
    from pallas_kernels.quantize import mosaic_silu  # not on every platform

    return mosaic_silu.silu_gradients_quantize(gate, up, dy, scale_format, name == "mosaic_interpret")


def rms_norm_quantize(
    x: BFloat16[Array, "M D"],
    weight: Float[Array, " D"],
    residual: BFloat16[Array, "M D"] | None = None,
    *,
    eps: float,
    engine_variant: str = "native",
    scale_format: str = "float32",
    implementation: str = "xla",
) -> tuple[Float8e4m3fn[ScaledArray, "M D"], BFloat16[Array, "M D"]]:
    """RMSNorm of x, or of x + residual, rounded where the engine rounds, then quantised.

    Args:
      x: neither dimension zero.
      weight: float32 or bfloat16; rounded to BF16.
      residual: added to x first.
      eps: added to the mean of squares.
      engine_variant: "native" or "cuda", see the module docstring.
      scale_format: "float32" or "power_of_two".
      implementation: as in `quantize`; the kernel needs a D in `KERNEL_WIDTHS`.
    Returns:
      (the array in blocks (1, 128), the new residual: bf16(x + residual), or x itself). Bit for bit the
      operations in turn (tests/kernels/test_fused.py; for the effect of a sum's order see the module
      docstring).
    Raises:
      ValueError: shapes, dtypes or names do not fit.
      NotImplementedError: as `silu_multiply_quantize`.
    """
    function = "rms_norm_quantize"
    matrices = {"x": x} if residual is None else {"x": x, "residual": residual}
    problems = _matrix_problems(matrices, scale_format, implementation)
    if weight.shape != x.shape[1:] or weight.dtype not in (jnp.float32, jnp.bfloat16):
        problems.append(
            f"wrong weight: got weight {weight.dtype}{list(weight.shape)}, expected float32 or bfloat16 "
            f"{list(x.shape[1:])}"
        )
    if engine_variant not in ENGINE_VARIANTS:
        problems.append(
            f"unknown variant: got engine_variant={engine_variant!r}, expected one of {ENGINE_VARIANTS}"
        )
    _raise(function, problems)
    name = resolve(function, implementation, IMPLEMENTATIONS, norm_kernel_problem(x)).name
    weight = _round_to_bfloat16(weight)
    if name == "xla":
        normed, total = _rms_norm(x, weight, residual, eps, engine_variant)
        return reference.quantize(normed, ROW, scale_format), total
    from pallas_kernels.quantize import mosaic_norm  # not on every platform

    return mosaic_norm.rms_norm_quantize(
        x, weight, residual, eps, engine_variant, scale_format, name == "mosaic_interpret"
    )


def norm_kernel_problem(x: Any) -> str | None:
    """Why RMSNorm's kernel cannot take `x` (an array, or its shape and dtype), None if it can; any device."""
    return (
        None
        if x.shape[1] in KERNEL_WIDTHS
        else f"x.shape is {tuple(x.shape)}, expected a width of {KERNEL_WIDTHS}"
    )


@functools.partial(jax.jit, inline=True)
def _silu_multiply(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The definition: SiLU in float64, rounded to FP32, to BF16, multiplied, rounded."""
    with jax.enable_x64(True):
        wide = to_float64(gate)
        decay = jnp.exp(-jnp.abs(wide))
        silu = wide * jnp.where(wide >= 0, jnp.ones_like(decay), decay) / (1 + decay)
        silu = lax.convert_element_type(silu, jnp.float32)
    return _round_to_bfloat16(_round_to_bfloat16(silu).astype(jnp.float32) * up.astype(jnp.float32))


@functools.partial(jax.jit, static_argnums=(3, 4), inline=True)
def _rms_norm(
    x: jax.Array, weight: jax.Array, residual: jax.Array | None, eps: float, variant: str
) -> tuple[jax.Array, jax.Array]:
    """The definition: (RMSNorm, new residual), mean, root and product in float64."""
    h, total = x.astype(jnp.float32), x
    if residual is not None:
        h = h + residual.astype(jnp.float32)
        total = _round_to_bfloat16(h)
        h = total.astype(jnp.float32) if variant == "cuda" else h
    with jax.enable_x64(True):
        wide = to_float64(h)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = lax.convert_element_type(wide * lax.rsqrt(mean + jnp.asarray(eps, jnp.float64)), jnp.float32)
    if variant == "native":
        normed = _round_to_bfloat16(normed).astype(jnp.float32)
    return _round_to_bfloat16(normed * weight.astype(jnp.float32)[None, :]), total


def _round_to_bfloat16(x: jax.Array) -> jax.Array:
    """`x` rounded to BF16 in a way that XLA cannot drop."""
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _matrix_problems(matrices: dict[str, jax.Array], scale_format: str, implementation: str) -> list[str]:
    """The problems of the arguments that the fused operations share."""
    first = next(iter(matrices.values()))
    problems = []
    for name, x in matrices.items():
        if x.ndim != 2 or 0 in x.shape or x.shape != first.shape:
            shapes = {name: tuple(x.shape) for name, x in matrices.items()}
            problems.append(f"wrong shape: got {shapes}, expected two non-zero dimensions, equal for all")
        if x.dtype != jnp.bfloat16:
            problems.append(f"wrong dtype: got {name}.dtype={x.dtype}, expected bfloat16")
    if scale_format not in SCALE_FORMATS:
        problems.append(
            f"unknown scale format: got scale_format={scale_format!r}, expected one of {SCALE_FORMATS}"
        )
    if implementation not in IMPLEMENTATIONS:
        problems.append(unknown_name(implementation, IMPLEMENTATIONS))
    return problems


def _raise(function: str, problems: list[Any]) -> None:
    """Raises one ValueError with all problems, if any."""
    if problems:
        raise ValueError(f"{function}: " + "; ".join(problems) + ".")
