"""The linear layer of every precision flow: y = x W^T + b, with three named GEMMs.

The kind of the weight decides what runs; no layer looks at a preset:

    ScaledArray          FProp on FP8 codes, no gradient                (rollout, generation)
    TrainableFp8Weight   FProp on the same codes; DGrad and WGrad in FP8, or in BF16 on dequantised operands
    array                BF16 or FP32 matrix multiplication, ordinary gradients

FP8 flow (Jet-RL): X is quantised in 1x128 groups, once for all layers that read it, and only these codes are saved.

    FProp  Y  = Xq(1,128)   . Wq(128,128)^T
    DGrad  dX = dYq(1,128)  . Wq(128,128)          the same codes and scale grid, transposed
    WGrad  dW = dYq(128,1)^T . Xq'                  Xq' by `wgrad_operand`:
        requantize  the saved codes dequantised and quantised again along tokens (the paper's; +27 % error)
        dual        X quantised along tokens from BF16 in the forward, and that copy saved
        block       X quantised in 128x128 blocks from BF16 in the forward, and that copy saved

Gradients between operations are BF16, the weight's gradient is FP32.  The quantisers are straight-through.
With `numerics.exact` FProp uses a GEMM whose bits do not depend on the number of rows: Hopper's kernel, or the
reference where there is none; the backward needs no such property (`product_implementation`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.errors import UserError
from jetrl_jax.models import tensor_parallel
from jetrl_jax.models.dense import dense
from jetrl_jax.models.ops import round_parameter, round_to
from jetrl_jax.precision.formats import FP8_BLOCKS
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.weights import TrainableFp8Weight
from pallas_kernels import ScaledArray, dgrad, fprop, quantize, quantize_dual, requantize, wgrad
from pallas_kernels.implementations import IMPLEMENTATIONS, Choice, gpu_problem, resolve
from pallas_kernels.quantize.api import kernel_problem, requantize_problem

Weight = jax.Array | ScaledArray | TrainableFp8Weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InputCodes:
    """What FP8 layers multiply of an input x [..., K], M rows in all: quantised once, for every layer that reads x.

    rows: [M, K] in (1, 128) blocks, for FProp.
    wgrad: [M, K] in the blocks of `wgrad_block`; None where that is.
    """

    rows: ScaledArray
    wgrad: ScaledArray | None


def is_fp8(weight: Weight) -> bool:
    """Whether FProp multiplies codes of this weight."""
    return isinstance(weight, ScaledArray | TrainableFp8Weight)


def linear(
    x: jax.Array,
    weight: Weight,
    bias: jax.Array | None,
    numerics: Numerics,
    *,
    codes: InputCodes | None = None,
    split_input: bool = False,
) -> jax.Array:
    """x [..., K] through `weight` (logical shape [N, K]); returns [..., N] in `numerics.dtype`.

    An FP8 weight reads `codes`, those of x's values, and never x, which takes the gradient; None: quantised here.
    The bias [N] is added to the FP32 sums, which are rounded once; in FP8, to the rounded product, and the sum is rounded
    again.  Both as vLLM's layers do.
    Under tensor parallelism N counts this device's output features; x is whole, as `tensor_parallel.enter` gives it, or
    with `split_input` this device's K / degree features, whose codes (not in FP8: values) are gathered here.
    """
    flat = x.reshape(-1, x.shape[-1])
    if is_fp8(weight) and codes is None:
        codes = quantize_input(flat, (weight,), numerics)
    if isinstance(weight, TrainableFp8Weight):
        out = _trainable(flat, codes, weight.master, weight.quantized, weight.fp8_backward, split_input, numerics)
    elif isinstance(weight, ScaledArray):
        assert codes is not None
        out = _fprop(_whole_input(codes.rows, split_input), weight, numerics)
    else:
        out, bias = dense(tensor_parallel.gather_input(flat) if split_input else flat, weight, numerics.dtype, numerics, bias), None
    if bias is not None:
        total = out.astype(jnp.float32) + round_parameter(bias, numerics.dtype)[None]
        out = round_to(total, numerics.dtype)
    return out.reshape(*x.shape[:-1], -1)


def quantize_input(x: jax.Array, readers: Iterable[Weight], numerics: Numerics) -> InputCodes | None:
    """The codes of x [..., K] for the weights that will read it; None where none of them is FP8.  No gradient."""
    readers = tuple(readers)
    if not any(map(is_fp8, readers)):
        return None
    flat = jax.lax.stop_gradient(x).reshape(-1, x.shape[-1])
    block = wgrad_block(readers, numerics)
    if block is None:
        return InputCodes(_quantize(flat, FP8_BLOCKS.activation, numerics), None)
    return InputCodes(*_quantize_dual(flat, block, numerics))


def wgrad_block(readers: Iterable[Weight], numerics: Numerics) -> tuple[int, int] | None:
    """Blocks of the copy that WGrad of one of these weights reads; None: it reads the rows' codes, or there is no FP8 WGrad."""
    if not any(isinstance(weight, TrainableFp8Weight) and weight.fp8_backward for weight in readers):
        return None
    return {"requantize": None, "dual": FP8_BLOCKS.token, "block": FP8_BLOCKS.weight}[numerics.wgrad_operand]


def product_implementation(numerics: Numerics, *, forward: bool) -> Choice:
    """What forms the products of the forward, or of the backward: a name that `pallas_kernels` knows, and why.

    "auto": Hopper's kernels where they can run; else "xla" for the forward of an exact run, else "xla_fast".

    Raises:
      UserError: an implementation that was asked for by name cannot run here.
    """
    if numerics.kernels == "auto":
        problem = gpu_problem()
        if problem is None:
            return Choice("mosaic_gpu", "auto: a GPU that the kernels are written for")
        return Choice("xla" if forward and numerics.exact else "xla_fast", f"auto: mosaic_gpu cannot run: {problem}")
    try:
        return resolve("numerics.kernels", numerics.kernels, IMPLEMENTATIONS)
    except NotImplementedError as error:
        raise UserError(str(error)) from error


def quantizer_implementation(problem: str | None, numerics: Numerics) -> Choice:
    """What a quantiser, alone or fused, runs on: the Pallas kernel where the products do and nothing stands against it.

    problem: why the kernel cannot take its operands, None where it can.  Raises as `product_implementation`.
    """
    products = product_implementation(numerics, forward=True)
    if not products.name.startswith("mosaic"):
        return Choice("xla", f"like the products: {products.reason}")
    return products if problem is None else Choice("xla", f"{products.name} cannot take it: {problem}")


def _quantize(x: jax.Array, block: tuple[int, int], numerics: Numerics) -> ScaledArray:
    implementation = quantizer_implementation(kernel_problem(x), numerics).name
    return quantize(x, block, scale_format=numerics.scale_format, implementation=implementation)


def _quantize_dual(x: jax.Array, block: tuple[int, int], numerics: Numerics) -> tuple[ScaledArray, ScaledArray]:
    """In (1, 128) blocks and in `block`; where the kernel runs, from one read."""
    implementation = quantizer_implementation(kernel_problem(x), numerics).name
    return quantize_dual(x, block, scale_format=numerics.scale_format, implementation=implementation)


def _fprop(x: ScaledArray, weight: ScaledArray, numerics: Numerics) -> jax.Array:
    return fprop(
        x,
        weight,
        out_dtype=numerics.dtype,
        promotion_order=numerics.promotion_order,
        implementation=product_implementation(numerics, forward=True).name,
    )


def _whole_input(codes: ScaledArray, split_input: bool) -> ScaledArray:
    return tensor_parallel.gather_input_codes(codes) if split_input else codes


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _trainable(
    x: jax.Array,
    codes: InputCodes,
    master: jax.Array,
    weight: ScaledArray,
    fp8_backward: bool,
    split_input: bool,
    numerics: Numerics,
) -> jax.Array:
    return _fprop(_whole_input(codes.rows, split_input), weight, numerics)


def _forward(
    x: jax.Array,
    codes: InputCodes,
    master: jax.Array,
    weight: ScaledArray,
    fp8_backward: bool,
    split_input: bool,
    numerics: Numerics,
) -> Any:
    saved = codes.rows  # of a split input this device's features: the backward gathers again
    if fp8_backward and numerics.wgrad_operand != "requantize":
        assert codes.wgrad is not None
        saved = codes.wgrad
    return _fprop(_whole_input(codes.rows, split_input), weight, numerics), (saved, weight)  # not `_trainable`: the master is not read


def _backward(fp8_backward: bool, split_input: bool, numerics: Numerics, residuals: Any, dy: jax.Array) -> Any:
    saved, weight = residuals
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
        fast: dict[str, Any] = {
            "promotion_order": numerics.promotion_order,
            "implementation": product_implementation(numerics, forward=False).name,
        }
        rows, tokens = _quantize_dual(dy, FP8_BLOCKS.token, numerics)
        dx = dgrad(rows, weight, out_dtype=dx_dtype, **fast)
        operand = saved
        if numerics.wgrad_operand == "requantize":
            chosen = quantizer_implementation(requantize_problem(saved), numerics).name
            operand = requantize(saved, scale_format=numerics.scale_format, implementation=chosen)
        dw = wgrad(tokens, operand, **fast)
    if split_input and tensor_parallel.degree() > 1:
        dx = tensor_parallel.scatter_sum(dx, dy.dtype)
    return dx, None, dw, None


_trainable.defvjp(_forward, _backward)
