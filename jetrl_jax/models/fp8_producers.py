"""The operations that make the inputs of FP8 layers, and the quantised codes of their results.

    RMSNorm                 -> q, k, v and gate, up
    SiLU(gate) * up         -> down

An operation and its quantiser are one kernel (`pallas_kernels.rms_norm_quantize`, `silu_multiply_quantize`)
if the products run on Pallas kernels, every reader is FP8, and the kernel supports the shape.  The value is
then not read by any product and only carries the gradient, and XLA drops its computation in the forward.
Otherwise the operation of `models.ops` runs, and its result is quantised once for all readers.  RMSNorm is
fused only if its value is quantised only along rows, since a copy for WGrad (`wgrad_operand` dual or block,
in training) needs the value.

With `numerics.exact` both ways give the same bits (tests/parity/test_fp8_producers.py), except for SiLU's
values below 2**-119 times |up|, which the kernel may set to zero.  Without it the kernels still sum and round
as `exact` does, while `models.ops` sums in FP32, so that single roundings may differ.

Gradients are those of `models.ops`, but for SiLU's in FP8 training on the kernels: there it is one kernel
with the quantisers of the gradients of gate and up (`gated`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jetrl_jax.models import linear, ops
from jetrl_jax.models.linear import Activation, Codes, Weight, activation, has_fp8_wgrad, is_fp8, wgrad_block
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.trainable_weight import TrainableFp8Weight
from pallas_kernels import rms_norm_quantize, silu_multiply_quantize
from pallas_kernels.quantize.api import kernel_problem
from pallas_kernels.quantize.fused import norm_kernel_problem


def rms_norm(
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    eps: float,
    readers: Sequence[Weight],
    numerics: Numerics,
) -> tuple[Activation, jax.Array]:
    """RMSNorm of x, or of x + residual, both [..., D], for the layers with the weights `readers`.

    Returns:
      (normed [..., D], new residual [..., D]: x + residual, or x itself).
    """
    if residual is None:
        normed, total = ops.rms_norm(x, weight, eps, numerics), x
    else:
        normed, total = ops.add_rms_norm(x, residual, weight, eps, numerics)
    choices = numerics.choices
    implementation = (choices.norm_in_training if has_fp8_wgrad(readers) else choices.norm).name
    if implementation == "xla" or not readers or not all(map(is_fp8, readers)):
        return activation(normed, readers, numerics), total
    rows, made = rms_norm_quantize(
        _matrix(x),
        jax.lax.stop_gradient(weight),
        None if residual is None else _matrix(residual),
        eps=eps,
        engine_variant=numerics.engine_variant,
        scale_format=numerics.scale_format,
        implementation=implementation,
    )
    return Activation(normed, Codes(rows, None)), _same(total, made.reshape(total.shape))


def silu_multiply(
    gate: jax.Array, up: jax.Array, reader: Weight, numerics: Numerics, product: jax.Array | None = None
) -> Activation:
    """SiLU(gate) * up, both [..., F], for the layer with the weight `reader`: [..., F].

    product: the value, if it is made already; else it is made here, with the gradient of `models.ops`.
    """
    if product is None:
        product = ops.silu_multiply(gate, up, numerics)
    implementation = numerics.choices.silu.name
    if implementation == "xla" or not is_fp8(reader):
        return activation(product, (reader,), numerics)
    codes = silu_multiply_quantize(
        _matrix(gate),
        _matrix(up),
        token_block_shape=wgrad_block((reader,), numerics),
        scale_format=numerics.scale_format,
        implementation=implementation,
    )
    return Activation(product, Codes(*codes))


def fuses_silu_gradient(readers: Sequence[Weight], numerics: Numerics) -> bool:
    """Whether the gradient of SiLU(gate) * up is one kernel with the quantisers of the products before it,
    those of the weights `readers` (`gated`).
    """
    return numerics.choices.silu.name != "xla" and all(
        isinstance(weight, TrainableFp8Weight) and weight.fp8_backward for weight in readers
    )


def gated(
    x: Activation, gate: TrainableFp8Weight, up: TrainableFp8Weight, reader: Weight, numerics: Numerics
) -> Activation:
    """`silu_multiply` of x [..., D] times the two weights, [..., F], where `fuses_silu_gradient`."""
    product, made_gate, made_up = linear.gated(x, gate, up, numerics)
    return silu_multiply(made_gate, made_up, reader, numerics, product.reshape(*x.value.shape[:-1], -1))


def norm_problem(width: int, numerics: Numerics) -> str | None:
    """Why RMSNorm over `width` features cannot be fused with its quantiser; None if it can."""
    return _dtype_problem(numerics) or norm_kernel_problem(jax.ShapeDtypeStruct((1, width), numerics.dtype))


def silu_problem(width: int, numerics: Numerics) -> str | None:
    """Why SiLU(gate) * up of `width` channels cannot be fused with its quantiser; None if it can."""
    return _dtype_problem(numerics) or kernel_problem(
        jax.ShapeDtypeStruct((1, width), numerics.dtype), "gate"
    )


def _dtype_problem(numerics: Numerics) -> str | None:
    return None if numerics.dtype == jnp.bfloat16 else f"activations are {numerics.dtype}, expected bfloat16"


def _matrix(x: jax.Array) -> jax.Array:
    """x [..., C] as [rows, C], without its gradient."""
    return jax.lax.stop_gradient(x).reshape(-1, x.shape[-1])


@jax.custom_vjp
def _same(value: jax.Array, made: jax.Array) -> jax.Array:
    """`made`, which has the bits of `value`; the gradient goes to `value`."""
    return made


_same.defvjp(lambda value, made: (made, None), lambda _, cotangent: (cotangent, None))
