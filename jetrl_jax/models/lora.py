"""Low-rank adapters (LoRA) of linear layers, beside a frozen base.

    y = round(base(x) + round(t . (s B)^T)),   t = round(x . A^T)       s = alpha / r, or alpha / sqrt(r)

x is the layer's input before quantisation, A [r, in] and B [out, r] are rounded like every other parameter,
and `round` is to the dtype between operations.  vLLM rounds at the same places, and its version 0.32
multiplies B by s as it loads an adapter, for every device.  An exact run need not rely on this: it accepts
only a power of two, for which s may stand at t or at B.  With `numerics.exact` both products are in float64
and rounded once, so that their bits do not depend on shapes.

    dt = dy (s B)     dB = s dy^T t     dA = dt^T x     dx = dt A

dt is rounded; dA and dB are FP32.  dx is FP32 and is added to the base's before one rounding.

B starts at 0, so that a policy starts as its base.  A starts uniform in +-1/sqrt(in), as in PEFT.  Under
tensor parallelism A is whole on every device and B is split by output features, like its layer.

Source: Hu et al., LoRA, arXiv 2106.09685; Kalajdzievski, rsLoRA, arXiv 2312.03732.
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jetrl_jax.models import tensor_parallel
from jetrl_jax.models.ops import round_to
from jetrl_jax.models.sharded import TENSOR
from jetrl_jax.precision.formats import is_adapter
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import map_params, select
from pallas_kernels.dense import dense_matmul


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model: their rank, s, and the last names of the layers that have one."""

    rank: int
    scale: float
    targets: tuple[str, ...]


class AdapterMatrix(nnx.Module):
    """A or B: weight [rows, columns], zeros until `start`."""

    def __init__(self, rows: int, columns: int) -> None:
        self.weight = nnx.Param(jnp.zeros((rows, columns), jnp.float32))


def start(model: nnx.Module, seed: int) -> nnx.State:
    """The FP32 masters of a model's adapters as a run begins; a function of the seed and each path."""

    def one(path: str, value: jax.Array) -> jax.Array:
        if ".lora_B." in path:
            return jnp.zeros(value.shape, jnp.float32)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
        bound = 1 / math.sqrt(value.shape[1])
        return jax.random.uniform(key, value.shape, jnp.float32, -bound, bound)

    return map_params(one, select(nnx.state(model, nnx.Param), is_adapter))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def delta(
    x: Float[Array, "M K"], a: Float[Array, "R K"], b: Float[Array, "N R"], scale: float, numerics: Numerics
) -> Float[Array, "M N"]:
    """What an adapter adds to its layer's output, in `numerics.dtype`; x is that of the layer, widened.

    The gradients of a and b are FP32, and that of x has its dtype.
    """
    return _forward(x, a, b, scale, numerics)[0]


def _forward(x: jax.Array, a: jax.Array, b: jax.Array, scale: float, numerics: Numerics) -> Any:
    x, a = x.astype(numerics.dtype), a.astype(numerics.dtype)  # their values, a cast at most
    t = _product(x, a, numerics)
    scaled = round_to(b.astype(jnp.float32) * jnp.float32(scale), numerics.dtype)
    return _product(t, scaled, numerics), (x, a, scaled, t)


def _delta_forward(x: jax.Array, a: jax.Array, b: jax.Array, scale: float, numerics: Numerics) -> Any:
    out, saved = _forward(x, a, b, scale, numerics)
    return out, (*saved, jnp.zeros((), x.dtype))


def _delta_backward(scale: float, numerics: Numerics, saved: Any, dy: jax.Array) -> Any:
    x, a, scaled, t, of_x = saved
    dt = _sum(dy, scaled, 1, 0)
    shared = tensor_parallel.degree() > 1
    if shared:  # each device has only its output features' share
        dt = jax.lax.psum(dt, TENSOR)
    dt = round_to(dt, numerics.dtype)
    dx = _sum(dt, a, 1, 0)
    if shared:  # the devices' cotangents of x are added, and this one is whole
        dx = jnp.where(jax.lax.axis_index(TENSOR) == 0, dx, 0.0)
    return round_to(dx, of_x.dtype), _sum(dt, x, 0, 0), _sum(dy, t, 0, 0) * jnp.float32(scale)


delta.defvjp(_delta_forward, _delta_backward)


def _product(x: jax.Array, w: jax.Array, numerics: Numerics) -> jax.Array:
    """x w^T, rounded once to the dtype between operations."""
    if numerics.exact and numerics.dtype != jnp.float32:
        return dense_matmul(x, w, out_dtype=numerics.dtype, implementation="xla")
    return round_to(_sum(x, w, 1, 1), numerics.dtype)


def _sum(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
