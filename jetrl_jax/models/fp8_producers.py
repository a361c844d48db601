"""The operations that make the inputs of FP8 layers, and the codes of what they make.

    RMSNorm                 -> q, k, v and gate, up
    SiLU(gate) * up         -> down

Where the products run on Pallas kernels, every reader is FP8 and a kernel takes the shape, operation and quantiser are one
kernel (`pallas_kernels.rms_norm_quantize`, `silu_multiply_quantize`): the value is then read by no product, carries the
gradient alone, and XLA drops what would compute it in the forward.  Everywhere else the operation of `models.ops` runs and
its result is quantised once for all readers.  RMSNorm is fused only where its value is quantised along rows alone: a copy
for WGrad (`wgrad_operand` dual or block, in training) takes the value.

With `numerics.exact` both ways give the same bits (tests/parity/test_fp8_producers.py), but for SiLU's values below 2**-119
times |up|, which the kernel may make zero.  Without it the kernels still sum and round as `exact` does, and `models.ops` in
FP32: a rounding may then fall otherwise here or there.

Gradients are always those of `models.ops`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.models import ops
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.linear import InputCodes, Weight, is_fp8, quantize_input, quantizer_implementation, wgrad_block
from jetrl_jax.precision.numerics import Numerics
from pallas_kernels import rms_norm_quantize, silu_multiply_quantize
from pallas_kernels.implementations import Choice
from pallas_kernels.quantize.api import kernel_problem
from pallas_kernels.quantize.fused import norm_kernel_problem

Normed = tuple[jax.Array, jax.Array, InputCodes | None]


def rms_norm(
    x: jax.Array, residual: jax.Array | None, weight: jax.Array, eps: float, readers: tuple[Weight, ...], numerics: Numerics
) -> Normed:
    """RMSNorm of x, or of x + residual, both [..., D], for the layers with the weights `readers`.

    Returns:
      (normed [..., D], new residual [..., D]: x + residual, or x itself; normed's codes, None where no reader is FP8).
    """
    if residual is None:
        normed, total = ops.rms_norm(x, weight, eps, numerics), x
    else:
        normed, total = ops.add_rms_norm(x, residual, weight, eps, numerics)
    choice = quantizer_implementation(norm_problem(x, numerics), numerics)
    if choice.name == "xla" or not all(map(is_fp8, readers)) or wgrad_block(readers, numerics) is not None:
        return normed, total, quantize_input(normed, readers, numerics)
    rows, made = rms_norm_quantize(
        _matrix(x),
        jax.lax.stop_gradient(weight),
        None if residual is None else _matrix(residual),
        eps=eps,
        engine_variant=numerics.engine_variant,
        scale_format=numerics.scale_format,
        implementation=choice.name,
    )
    return normed, _same(total, made.reshape(total.shape)), InputCodes(rows, None)


def silu_multiply(gate: jax.Array, up: jax.Array, reader: Weight, numerics: Numerics) -> tuple[jax.Array, InputCodes | None]:
    """SiLU(gate) * up, both [..., F], for the layer with the weight `reader`: (the product [..., F], its codes)."""
    product = ops.silu_multiply(gate, up, numerics)
    choice = quantizer_implementation(silu_problem(gate, numerics), numerics)
    if choice.name == "xla" or not is_fp8(reader):
        return product, quantize_input(product, (reader,), numerics)
    codes = silu_multiply_quantize(
        _matrix(gate),
        _matrix(up),
        token_block_shape=wgrad_block((reader,), numerics),
        scale_format=numerics.scale_format,
        implementation=choice.name,
    )
    return product, InputCodes(*codes)


def input_implementations(config: ModelConfig, numerics: Numerics) -> dict[str, Choice]:
    """What makes the codes of inputs on one device, and why, where all readers are FP8; for the run's record."""

    def features(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, count), numerics.dtype)

    attended, channels = features(config.num_heads * config.head_dim), features(config.intermediate_size)
    norm = norm_problem(features(config.hidden_size), numerics)
    copied = "in training numerics.wgrad_operand takes the value" if numerics.wgrad_operand != "requantize" else None
    return {
        "norm": quantizer_implementation(norm, numerics),
        "norm_in_training": quantizer_implementation(norm or copied, numerics),
        "attention": quantizer_implementation(kernel_problem(attended), numerics),
        "silu": quantizer_implementation(silu_problem(channels, numerics), numerics),
    }


def norm_problem(x: Any, numerics: Numerics) -> str | None:
    """Why RMSNorm of x [..., D] cannot be fused with its quantiser, None where it can."""
    return _dtype_problem(numerics) or norm_kernel_problem(jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype))


def silu_problem(gate: Any, numerics: Numerics) -> str | None:
    """Why SiLU(gate) * up, gate [..., F], cannot be fused with its quantiser, None where it can."""
    return _dtype_problem(numerics) or kernel_problem(jax.ShapeDtypeStruct((1, gate.shape[-1]), gate.dtype), "gate")


def _dtype_problem(numerics: Numerics) -> str | None:
    return None if numerics.dtype == jnp.bfloat16 else f"activations are {numerics.dtype}, expected bfloat16"


def _matrix(x: jax.Array) -> jax.Array:
    """x [..., C] as [rows, C], without its gradient."""
    return jax.lax.stop_gradient(x).reshape(-1, x.shape[-1])


@jax.custom_vjp
def _same(value: jax.Array, made: jax.Array) -> jax.Array:
    """`made`, which has the bits of `value` and costs nothing more; the gradient goes to `value`."""
    return made


_same.defvjp(lambda value, made: (made, None), lambda _, cotangent: (cotangent, None))
