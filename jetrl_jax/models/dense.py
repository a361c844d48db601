"""Linear layers without FP8: y = x W^T + b in BF16, FP16 or FP32, and the head in every precision flow.

    y = round(sum over k of x[m, k] w[n, k]  + b[n])    products exact, sums FP32, rounded once

With `numerics.exact` the bits of a token do not depend on other tokens.  `dense_implementation` chooses the
implementation:

    CPU                XLA's product, whose sums do not depend on the number of rows from `MIN_ROWS` on
    Hopper             a kernel with one tile and one order of sums for all sizes (`pallas_kernels.dense`)
    any other device   a float64 product rounded to FP32: slow, and independent of shapes except for ties
    vLLM samples       that float64 product on every device, as in vLLM's exact layers, whose order of sums
                       differs

XLA's product on a GPU is cuBLAS, whose order of sums depends on the number of rows.  It is used without
`exact`, and then rounds its sums itself (`xla_direct`).

The backward always uses XLA's product, since a gradient is computed only once.  The head's logits and their
gradient dy are FP32.  On a GPU, FP32 products run on the CUDA cores, about fourteen times slower than BF16
products on the tensor cores, so dy is split there (`head_backward_implementation`):

    dy = p1 + p2 + p3: its first 8 significant bits, the next 8 and the last 8, each a BF16 number
    dx = p1 W + p2 W + p3 W,   dW = p1^T x + p2^T x + p3^T x,   W and x in BF16: products exact, sums FP32
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.errors import UserError
from jetrl_jax.models.ops import along_last, round_parameter, round_to
from jetrl_jax.precision.numerics import Numerics
from pallas_kernels.dense import dense_matmul
from pallas_kernels.implementations import Choice, on_gpu, resolve

HEAD_PARTS = {"bf16": 1, "bf16x2": 2, "bf16x3": 3}
KEPT_BITS = (0xFFFF0000, 0xFFFFFF00)  # masks of an FP32 number's first 8 and 16 significant bits
MIN_ROWS = 8  # below three rows XLA's CPU backend uses a GEMV kernel with another order of sums


def dense_implementation(numerics: Numerics, *, elsewhere: bool = False) -> Choice:
    """The implementation of `dense`'s forward, with the reason; starts the JAX backend.

    The name is one of `pallas_kernels.dense`, or a variant of XLA's product.

    elsewhere: choose for a GPU that this machine does not have, if `numerics.exact` is false.
    """
    if not numerics.exact:
        return _product_of_xla(numerics, "numerics.exact is false", elsewhere=elsewhere)
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


def dense_backward_implementation(numerics: Numerics, *, elsewhere: bool = False) -> Choice:
    """The implementation of `dense`'s backward, except the head's, with the reason.

    elsewhere: choose for a GPU that this machine does not have.
    """
    return _product_of_xla(numerics, "a gradient is computed once", elsewhere=elsewhere)


def head_backward_implementation(numerics: Numerics, *, elsewhere: bool = False) -> Choice:
    """The number of BF16 parts that the gradient of FP32 logits is split into, with the reason; "fp32": none.

    "auto" means three on a GPU, which lose nothing.  The relative error of two parts, the last one rounded,
    is at most 2**-15; that of one part, which is common, 2**-8 (tests/parity/test_dense_products.py).

    Raises:
      UserError: parts of operands that are not BF16.
    """
    asked, narrow = numerics.head_gradient, numerics.compute_dtype == "bfloat16"
    if asked != "auto":
        if asked in HEAD_PARTS and not narrow:
            raise UserError(
                f"numerics.head_gradient: cannot run: got {asked!r} with operands in "
                f"{numerics.compute_dtype}, expected auto or fp32: parts are BF16, and so must they be."
            )
        return Choice(asked, "asked for by name")
    if not narrow:
        return Choice("fp32", f"auto: operands are {numerics.compute_dtype}, not bfloat16")
    if elsewhere or on_gpu():
        return Choice("bf16x3", "auto: a GPU, whose tensor cores take BF16, and three parts are all of FP32")
    return Choice("fp32", "auto: not a GPU")


def _product_of_xla(numerics: Numerics, reason: str, *, elsewhere: bool = False) -> Choice:
    """XLA's own product; on a GPU it rounds its result itself."""
    if numerics.compute_dtype != "float32" and (elsewhere or on_gpu()):
        return Choice("xla_direct", f"{reason}: XLA's own product, whose sums a GPU rounds itself")
    return Choice("xla_fast", f"{reason}: XLA's own product")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dense(
    x: jax.Array, weight: jax.Array, out_dtype: Any, numerics: Numerics, bias: jax.Array | None = None
) -> jax.Array:
    """x [M, K] . weight[N, K]^T + bias [N], in FP32 sums with one rounding to `out_dtype`.

    Operands are in `numerics.dtype`.  The gradients of weight and bias are FP32 (their masters' dtype) and
    not rounded in between; that of x has x's dtype.
    """
    implementation = numerics.choices.dense.name
    kind = out_dtype if bias is None else jnp.float32
    if implementation == "xla_fast":
        out = _product(x, weight, numerics)
    elif implementation == "xla_direct":
        out = _dot(_operand(x, numerics), _operand(weight, numerics), 1, 1, kind)
    else:
        operands = _operand(x, numerics), _operand(weight, numerics)
        out = dense_matmul(*operands, out_dtype=kind, implementation=implementation)
    if bias is not None:
        out = out + along_last(round_parameter(bias, numerics.dtype), out.ndim)
    return out if out.dtype == out_dtype else round_to(out, out_dtype)


def _product(x: jax.Array, weight: jax.Array, numerics: Numerics) -> jax.Array:
    """XLA's own product, float32 [M, N]."""
    rows = x.shape[0]
    if numerics.exact and rows < MIN_ROWS:
        x = jnp.pad(x, ((0, MIN_ROWS - rows), (0, 0)))
    return _dot(_operand(x, numerics), _operand(weight, numerics), 1, 1)[:rows]


def _dense_forward(
    x: jax.Array, weight: jax.Array, out_dtype: Any, numerics: Numerics, bias: jax.Array | None
) -> Any:
    return dense(x, weight, out_dtype, numerics, bias), (x, weight, bias)


def _dense_backward(out_dtype: Any, numerics: Numerics, saved: Any, dy: jax.Array) -> Any:
    dx, dw, db = _gradients(numerics, saved, dy)
    return dx, dw.astype(saved[1].dtype), db


def _gradients(
    numerics: Numerics, saved: Any, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The gradients of x, of the weight in FP32, and of the bias."""
    x, weight, bias = saved
    parts = HEAD_PARTS.get(numerics.choices.head_backward.name)
    if dy.dtype == jnp.float32 and parts:
        dx, dw = _head_gradients(dy, _operand(x, numerics), _operand(weight, numerics), parts)
    elif dy.dtype == jnp.float32:  # the head: its logits are FP32 and so is its backward
        dx = _dot(dy, round_to(weight, numerics.dtype).astype(jnp.float32), 1, 0)
        dw = _dot(dy, x.astype(jnp.float32), 0, 0)
    elif numerics.choices.dense_backward.name == "xla_direct":
        dx = _dot(dy, _operand(weight, numerics), 1, 0, x.dtype)
        dw = _dot(dy, _operand(x, numerics), 0, 0)
    else:
        dx = _dot(dy, round_to(weight, numerics.dtype), 1, 0)
        dw = _dot(dy, _operand(x, numerics), 0, 0)
    db = None if bias is None else dy.astype(jnp.float32).sum(0).astype(bias.dtype)
    return round_to(dx, x.dtype), dw, db


dense.defvjp(_dense_forward, _dense_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def trainable_dense(
    x: jax.Array, master: jax.Array, value: jax.Array, out_dtype: Any, numerics: Numerics
) -> jax.Array:
    """`dense` of x and `value`; the weight's gradient goes, in FP32, to the master that it is published of.

    So that `value` itself enters the loop over chunks of logits: XLA would move a cast of it out of the loop.
    """
    return dense(x, value, out_dtype, numerics)


trainable_dense.defvjp(
    lambda x, master, value, out_dtype, numerics: (dense(x, value, out_dtype, numerics), (x, value)),
    lambda out_dtype, numerics, saved, dy: (*_gradients(numerics, (*saved, None), dy)[:2], None),
)


def _head_gradients(
    dy: jax.Array, x: jax.Array, weight: jax.Array, parts: int
) -> tuple[jax.Array, jax.Array]:
    """(dy W, dy^T x) in FP32, with dy float32 [M, N] split into BF16 parts; one product each for all parts.

    The parts of a row lie side by side, each a function of dy and its number: XLA makes them in one pass.
    """
    last = jnp.asarray((*KEPT_BITS[: parts - 1], 0xFFFFFFFF), jnp.uint32)
    before = jnp.asarray((0, *KEPT_BITS[: parts - 1]), jnp.uint32)
    bits = jax.lax.bitcast_convert_type(dy, jnp.uint32)[:, None]
    upper, lower = (
        jax.lax.bitcast_convert_type(bits & kept[None, :, None], jnp.float32) for kept in (last, before)
    )
    rows = round_to(upper - lower, jnp.bfloat16).reshape(-1, dy.shape[1])
    dx = _dot(rows, weight, 1, 0).reshape(-1, parts, x.shape[1]).sum(1)
    return dx, _dot(rows, jnp.repeat(x, parts, axis=0), 0, 0)


def _operand(x: jax.Array, numerics: Numerics) -> jax.Array:
    """x in `numerics.dtype`, as a cast that XLA drops where x came from that dtype: a published weight, or an
    activation that `tensor_parallel.enter` widened.
    """
    return x.astype(numerics.dtype)


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, out_dtype: Any = jnp.float32) -> jax.Array:
    """Contraction of one axis of each operand, summed in FP32; FP32 operands are never cut to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((a_axis,), (b_axis,)), ((), ())), precision=precision, preferred_element_type=out_dtype
    )
