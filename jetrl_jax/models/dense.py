"""Linear layers on operands that are not FP8: y = x W^T + b in BF16, FP16 or FP32, and the head of every
flow.

    y = round(sum over k of x[m, k] w[n, k]  + b[n])    products exact, sums FP32, rounded once

With `numerics.exact` the bits of a token do not depend on the tokens beside it.  `dense_implementation`
chooses how:

    CPU                XLA's product, whose sums do not depend on the number of rows from `MIN_ROWS` on
    Hopper             a kernel with one tile and one order of sums for all sizes (`pallas_kernels.dense`)
    any other device   a float64 product rounded to FP32: slow, and independent of shapes except for ties
    vLLM samples       that float64 product on every device, as in vLLM's exact layers, whose order of sums
                       differs

cuBLAS, which computes XLA's product on a GPU, sums in another order for few rows than for thousands.  The
backward is always XLA's product, since a gradient need not be computed again with the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.models.ops import along_last, round_parameter, round_to
from jetrl_jax.precision.numerics import Numerics
from pallas_kernels.dense import dense_matmul
from pallas_kernels.implementations import Choice, resolve

MIN_ROWS = 8  # below three rows XLA's CPU backend uses another (GEMV) kernel with another order of sums


def dense_implementation(numerics: Numerics) -> Choice:
    """The implementation of `dense`'s forward, known to `pallas_kernels.dense`; starts the JAX backend."""
    if not numerics.exact:
        return Choice("xla_fast", "numerics.exact is false: XLA's own product")
    if numerics.compute_dtype == "float32":
        return Choice(
            "xla_fast", "operands are float32, which no kernel takes: XLA's own product, nowhere cut to TF32"
        )
    if numerics.dense == "float64":
        return Choice("xla", "rollout.engine is vllm: float64 on both sides, which no order of sums changes")
    found = resolve("dense", "auto", ("xla", "mosaic_gpu", "auto"))
    if found.name == "xla" and jax.default_backend() == "cpu":
        return Choice(
            "xla_fast",
            f"the platform is 'cpu', whose sums do not depend on the number of rows from {MIN_ROWS} on",
        )
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dense(
    x: jax.Array, weight: jax.Array, out_dtype: Any, numerics: Numerics, bias: jax.Array | None = None
) -> jax.Array:
    """x [M, K] . weight[N, K]^T + bias [N], in FP32 sums with one rounding to `out_dtype`.

    Operands are in `numerics.dtype`.  The gradients of weight and bias are FP32 (their masters' dtype) and
    not rounded in between; that of x has x's dtype.
    """
    implementation = numerics.choices.dense.name
    if implementation == "xla_fast":
        out = _product(x, weight, numerics)
    else:
        kind = out_dtype if bias is None else jnp.float32
        out = dense_matmul(
            _operand(x, numerics),
            round_to(weight, numerics.dtype),
            out_dtype=kind,
            implementation=implementation,
        )
    if bias is not None:
        out = out + along_last(round_parameter(bias, numerics.dtype), out.ndim)
    return out if out.dtype == out_dtype else round_to(out, out_dtype)


def _product(x: jax.Array, weight: jax.Array, numerics: Numerics) -> jax.Array:
    """XLA's own product, float32 [M, N]."""
    rows = x.shape[0]
    if numerics.exact and rows < MIN_ROWS:
        x = jnp.pad(x, ((0, MIN_ROWS - rows), (0, 0)))
    return _dot(_operand(x, numerics), round_to(weight, numerics.dtype), 1, 1)[:rows]


def _dense_forward(
    x: jax.Array, weight: jax.Array, out_dtype: Any, numerics: Numerics, bias: jax.Array | None
) -> Any:
    return dense(x, weight, out_dtype, numerics, bias), (x, weight, bias)


def _dense_backward(out_dtype: Any, numerics: Numerics, saved: Any, dy: jax.Array) -> Any:
    x, weight, bias = saved
    if dy.dtype == jnp.float32:  # the head, whose logits and backward are in FP32
        dx = _dot(dy, round_to(weight, numerics.dtype).astype(jnp.float32), 1, 0)
        dw = _dot(dy, x.astype(jnp.float32), 0, 0)
    else:
        dx, dw = _dot(dy, round_to(weight, numerics.dtype), 1, 0), _dot(dy, _operand(x, numerics), 0, 0)
    db = None if bias is None else dy.astype(jnp.float32).sum(0).astype(bias.dtype)
    return round_to(dx, x.dtype), dw.astype(weight.dtype), db


dense.defvjp(_dense_forward, _dense_backward)


def _operand(x: jax.Array, numerics: Numerics) -> jax.Array:
    """Activations in `numerics.dtype`; their values are already rounded to it (`tensor_parallel.enter`)."""
    return x if x.dtype == numerics.dtype else round_to(x, numerics.dtype)


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Contraction of one axis of each operand, in FP32; FP32 operands are never truncated to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((a_axis,), (b_axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
