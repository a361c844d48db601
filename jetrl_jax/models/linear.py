"""The linear layer of every precision flow: y = x W^T + b, with three named GEMMs.

The type of the weight decides which products run; layers do not look at the preset:

    ScaledArray          FProp on FP8 codes, no gradient                (rollout, generation)
    TrainableFp8Weight   FProp on the same codes; DGrad and WGrad in FP8, or in BF16 on dequantised operands
    FrozenFp8Weight      FProp and DGrad likewise, no WGrad             (the base of adapters, in training)
    array                BF16 or FP32 matrix multiplication, ordinary gradients

In the FP8 flow (Jet-RL), X is quantised in 1x128 groups, once for all layers that read it, and only these
codes are saved.

    FProp  Y  = Xq(1,128)   . Wq(128,128)^T
    DGrad  dX = dYq(1,128)  . Wq(128,128)          the same codes and scale grid, transposed
    WGrad  dW = dYq(128,1)^T . Xq'                  Xq' by `wgrad_operand`:
        requantize  the saved codes dequantised and quantised again along tokens (the paper's; +27 % error)
        dual        X quantised along tokens from BF16 in the forward, and that copy saved
        block       X quantised in 128x128 blocks from BF16 in the forward, and that copy saved

Gradients between operations are BF16, and the weight's gradient is FP32.  The quantisers are
straight-through.  With `numerics.exact` FProp uses a GEMM whose bits do not depend on the number of rows
(Hopper's kernel, elsewhere the reference); the backward does not need that (`product_implementation`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.errors import UserError
from jetrl_jax.models import lora, tensor_parallel
from jetrl_jax.models.dense import dense
from jetrl_jax.models.ops import round_parameter, round_to, silu_multiply
from jetrl_jax.precision.formats import FP8_BLOCKS
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.trainable_weight import FrozenFp8Weight, TrainableFp8Weight
from pallas_kernels import (
    ScaledArray,
    dgrad,
    fprop,
    quantize,
    quantize_dual,
    requantize,
    silu_gradients_quantize,
    wgrad,
)
from pallas_kernels.implementations import IMPLEMENTATIONS, Choice, gpu_problem, resolve

Weight = jax.Array | ScaledArray | TrainableFp8Weight | FrozenFp8Weight
Adapter = tuple[jax.Array, jax.Array, float]  # A [r, K], B [N, r] and the scale s, see `models.lora`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Codes:
    """The codes of an activation [..., K] of M rows, as FP8 layers multiply it.

    rows: [M, K] in (1, 128) blocks, for FProp.
    wgrad: [M, K] in the blocks of `wgrad_block`; None if that is None.
    """

    rows: ScaledArray
    wgrad: ScaledArray | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Activation:
    """The input of linear layers, quantised once for all its readers.

    value: [..., K]; an FP8 layer does not read it, but the gradient goes to it.
    codes: the codes of `value`; None if no reader is FP8.
    """

    value: jax.Array
    codes: Codes | None

    def entered(self) -> Activation:
        """This activation on its way into layers that devices share (`tensor_parallel.enter`)."""
        return Activation(tensor_parallel.enter(self.value), self.codes)


def is_fp8(weight: Weight) -> bool:
    """Whether FProp multiplies codes of this weight."""
    return isinstance(weight, ScaledArray | TrainableFp8Weight | FrozenFp8Weight)


def linear(
    x: Activation,
    weight: Weight,
    bias: jax.Array | None,
    numerics: Numerics,
    *,
    split_input: bool = False,
    adapter: Adapter | None = None,
) -> jax.Array:
    """x [..., K] through `weight` (logical shape [N, K]); returns [..., N] in `numerics.dtype`.

    The bias [N] is added to the FP32 sums, which are rounded once.  In FP8 it is added to the rounded
    product, and the sum is rounded again.  vLLM's layers do the same.  The adapter's part is added last.

    Under tensor parallelism N is the number of this device's output features.  x is whole
    (`Activation.entered`) or, with `split_input`, this device's K / degree features, whose codes (in FP8) or
    values are gathered here.

    Raises:
      ValueError: the weight is FP8, but x has no codes.
    """
    flat, codes = x.value.reshape(-1, x.value.shape[-1]), x.codes
    if adapter is not None:
        flat = flat.astype(jnp.float32)  # the gradients of base and adapter are added in FP32
    if is_fp8(weight) and codes is None:
        raise ValueError(
            "linear: an FP8 weight multiplies codes: got codes=None, expected those of "
            "activation(value, [weight], numerics)."
        )
    if isinstance(weight, TrainableFp8Weight):
        out = _trainable(
            flat,
            codes,
            weight.master,
            weight.quantized,
            weight.total,
            weight.fp8_backward,
            split_input,
            numerics,
        )
    else:
        if split_input and (adapter is not None or not isinstance(weight, ScaledArray)):
            flat = tensor_parallel.gather_input(flat)
        if isinstance(weight, ScaledArray):
            assert codes is not None
            out = _fprop(_whole_input(codes.rows, split_input), weight, numerics)
        elif isinstance(weight, FrozenFp8Weight):
            assert codes is not None
            rows = _whole_input(codes.rows, split_input)
            out = _frozen(flat, rows, weight.quantized, weight.fp8_backward, numerics)
        else:
            out, bias = dense(flat, weight, numerics.dtype, numerics, bias), None
    if bias is not None:
        total = out.astype(jnp.float32) + round_parameter(bias, numerics.dtype)[None]
        out = round_to(total, numerics.dtype)
    if adapter is not None:
        added = lora.delta(flat, *adapter, numerics)
        out = round_to(out.astype(jnp.float32) + added.astype(jnp.float32), numerics.dtype)
    return out.reshape(*x.value.shape[:-1], -1)


def activation(value: jax.Array, readers: Sequence[Weight], numerics: Numerics) -> Activation:
    """A value [..., K] with its codes for the weights `readers`; the codes carry no gradient."""
    if not any(map(is_fp8, readers)):
        return Activation(value, None)
    flat = jax.lax.stop_gradient(value).reshape(-1, value.shape[-1])
    block = wgrad_block(readers, numerics)
    if block is None:
        return Activation(value, Codes(_quantize(flat, FP8_BLOCKS.activation, numerics), None))
    return Activation(value, Codes(*_quantize_dual(flat, block, numerics)))


def has_fp8_wgrad(readers: Sequence[Weight]) -> bool:
    """Whether the backward of one of these weights multiplies the input's codes."""
    return any(isinstance(weight, TrainableFp8Weight) and weight.fp8_backward for weight in readers)


def wgrad_block(readers: Sequence[Weight], numerics: Numerics) -> tuple[int, int] | None:
    """The blocks of a separate copy for WGrad; None if WGrad reads the rows' codes or is not FP8."""
    if not has_fp8_wgrad(readers):
        return None
    return {"requantize": None, "dual": FP8_BLOCKS.token, "block": FP8_BLOCKS.weight}[numerics.wgrad_operand]


def product_implementation(numerics: Numerics, *, forward: bool) -> Choice:
    """The implementation of FP8 products in the forward or the backward, with the reason.

    "auto" takes Hopper's kernels if they can run, else "xla" in the forward of an exact run, else "xla_fast".

    Raises:
      UserError: the implementation named in the config cannot run here.
    """
    if numerics.kernels == "auto":
        problem = gpu_problem()
        if problem is None:
            return Choice("mosaic_gpu", "auto: a GPU that the kernels are written for")
        return Choice(
            "xla" if forward and numerics.exact else "xla_fast", f"auto: mosaic_gpu cannot run: {problem}"
        )
    try:
        return resolve("numerics.kernels", numerics.kernels, IMPLEMENTATIONS)
    except NotImplementedError as error:
        raise UserError(str(error)) from error


def quantizer_implementation(products: Choice, problem: str | None) -> Choice:
    """The implementation of a quantiser, separate or fused: the products' kernel if it has no problem.

    products: the choice for the forward.
    problem: why the kernel cannot take the operands; None if it can.
    """
    if not products.name.startswith("mosaic"):
        return Choice("xla", f"like the products: {products.reason}")
    return products if problem is None else Choice("xla", f"{products.name} cannot take it: {problem}")


def _quantize(x: jax.Array, block: tuple[int, int], numerics: Numerics) -> ScaledArray:
    implementation = numerics.choices.quantizer(x.shape[1]).name
    return quantize(x, block, scale_format=numerics.scale_format, implementation=implementation)


def _quantize_dual(
    x: jax.Array, block: tuple[int, int], numerics: Numerics
) -> tuple[ScaledArray, ScaledArray]:
    """x quantised in (1, 128) blocks and in `block`; the kernel reads x only once."""
    implementation = numerics.choices.quantizer(x.shape[1]).name
    return quantize_dual(x, block, scale_format=numerics.scale_format, implementation=implementation)


def _fprop(x: ScaledArray, weight: ScaledArray, numerics: Numerics) -> jax.Array:
    return fprop(
        x,
        weight,
        out_dtype=numerics.dtype,
        promotion_order=numerics.promotion_order,
        implementation=numerics.choices.forward.name,
    )


def _whole_input(codes: ScaledArray, split_input: bool) -> ScaledArray:
    return tensor_parallel.gather_input_codes(codes) if split_input else codes


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _trainable(
    x: jax.Array,
    codes: Codes,
    master: jax.Array,
    weight: ScaledArray,
    total: jax.Array | None,
    fp8_backward: bool,
    split_input: bool,
    numerics: Numerics,
) -> jax.Array:
    return _fprop(_whole_input(codes.rows, split_input), weight, numerics)


def _forward(
    x: jax.Array,
    codes: Codes,
    master: jax.Array,
    weight: ScaledArray,
    total: jax.Array | None,
    fp8_backward: bool,
    split_input: bool,
    numerics: Numerics,
) -> Any:
    saved = _for_wgrad(codes, fp8_backward, numerics)
    # not `_trainable`, since the master is not read
    return _fprop(_whole_input(codes.rows, split_input), weight, numerics), (saved, weight, total)


def _for_wgrad(codes: Codes, fp8_backward: bool, numerics: Numerics) -> ScaledArray:
    """The codes that the backward keeps; of a split input only this device's features."""
    if not fp8_backward or numerics.wgrad_operand == "requantize":
        return codes.rows
    assert codes.wgrad is not None
    return codes.wgrad


def _fp8_gradients(
    dy: tuple[ScaledArray, ScaledArray],
    saved: ScaledArray,
    weight: ScaledArray,
    total: jax.Array | None,
    dx_dtype: Any,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array]:
    """(dX, dW) by DGrad and WGrad, from the output gradient's codes in blocks (1, 128) and (128, 1)."""
    fast: dict[str, Any] = {
        "promotion_order": numerics.promotion_order,
        "implementation": numerics.choices.backward.name,
    }
    rows, tokens = dy
    dx = dgrad(rows, weight, out_dtype=dx_dtype, **fast)
    operand = saved
    if numerics.wgrad_operand == "requantize":
        chosen = numerics.choices.quantizer(saved.shape[1]).name
        operand = requantize(saved, scale_format=numerics.scale_format, implementation=chosen)
    return dx, wgrad(tokens, operand, accumulator=total, **fast)


def _backward(
    fp8_backward: bool, split_input: bool, numerics: Numerics, residuals: Any, dy: jax.Array
) -> Any:
    saved, weight, total = residuals
    saved = _whole_input(saved, split_input)
    dx_dtype = tensor_parallel.input_cotangent_dtype(dy.dtype)
    if not fp8_backward:
        _, pullback = jax.vjp(
            lambda x, w: dense(x, w, numerics.dtype, numerics),
            saved.dequantize(numerics.dtype).astype(dx_dtype),
            weight.dequantize(numerics.dtype).astype(jnp.float32),
        )
        dx, dw = pullback(dy)
    else:
        codes = _quantize_dual(dy, FP8_BLOCKS.token, numerics)
        dx, dw = _fp8_gradients(codes, saved, weight, total, dx_dtype, numerics)
    if split_input and tensor_parallel.degree() > 1:
        dx = tensor_parallel.scatter_sum(dx, dy.dtype)
    return dx, None, dw, None, None


_trainable.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _frozen(
    x: jax.Array, codes: ScaledArray, weight: ScaledArray, fp8_backward: bool, numerics: Numerics
) -> jax.Array:
    """FProp on the codes of whole x, which only receives the gradient, in its own dtype."""
    return _fprop(codes, weight, numerics)


def _frozen_backward(fp8_backward: bool, numerics: Numerics, saved: Any, dy: jax.Array) -> Any:
    weight, of_x = saved
    if fp8_backward:
        rows = _quantize(dy, FP8_BLOCKS.activation, numerics)
        dx = dgrad(
            rows,
            weight,
            out_dtype=of_x.dtype,
            promotion_order=numerics.promotion_order,
            implementation=numerics.choices.backward.name,
        )
    else:
        x = jnp.zeros((dy.shape[0], weight.shape[1]), of_x.dtype)
        values = weight.dequantize(numerics.dtype)
        (dx,) = jax.vjp(lambda x: dense(x, values, numerics.dtype, numerics), x)[1](dy)
    return dx, None, None


_frozen.defvjp(
    lambda x, codes, weight, fp8_backward, numerics: (
        _fprop(codes, weight, numerics),
        (weight, jnp.zeros((), x.dtype)),
    ),
    _frozen_backward,
)


def gated(
    x: Activation, gate: TrainableFp8Weight, up: TrainableFp8Weight, numerics: Numerics
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """SiLU(x Wgate^T) * x Wup^T, and the two products without a gradient, [M, F] each; x whole, with codes.

    The gradient of SiLU is one kernel with the quantisers of both products' gradients, which never go to
    memory as BF16.
    """
    weights = gate, up
    return _gated(
        x.value.reshape(-1, x.value.shape[-1]),
        x.codes,
        tuple(weight.master for weight in weights),
        tuple(weight.quantized for weight in weights),
        tuple(weight.total for weight in weights),
        numerics,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _gated(
    x: jax.Array,
    codes: Codes,
    masters: Any,
    weights: tuple[ScaledArray, ...],
    totals: Any,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    gate, up = (_fprop(codes.rows, weight, numerics) for weight in weights)
    return silu_multiply(gate, up, numerics), gate, up


def _gated_forward(
    x: jax.Array,
    codes: Codes,
    masters: Any,
    weights: tuple[ScaledArray, ...],
    totals: Any,
    numerics: Numerics,
) -> Any:
    product, gate, up = _gated(x, codes, masters, weights, totals, numerics)
    return (product, gate, up), (gate, up, _for_wgrad(codes, True, numerics), weights, totals)


def _gated_backward(numerics: Numerics, residuals: Any, cotangents: Any) -> Any:
    gate, up, saved, weights, totals = residuals
    dy = cotangents[0]
    both = silu_gradients_quantize(
        gate, up, dy, scale_format=numerics.scale_format, implementation=numerics.choices.silu.name
    )
    dx_dtype = tensor_parallel.input_cotangent_dtype(dy.dtype)
    (dx_gate, dw_gate), (dx_up, dw_up) = (
        _fp8_gradients(codes, saved, weight, total, dx_dtype, numerics)
        for codes, weight, total in zip(both, weights, totals, strict=True)
    )
    return dx_gate + dx_up, None, (dw_gate, dw_up), None, None


_gated.defvjp(_gated_forward, _gated_backward)
