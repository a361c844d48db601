"""Layers split over the mesh axis "tensor": each device's products, and the communication between them.

Every matrix is split by its output features, never by the features that it sums over.  So no device holds a
partial sum in the forward, and the bits of a token are those of one device:

    x (whole)          -> q, k, v, gate, up: this device's heads or channels, nothing sent
    attention, SiLU    -> on this device's heads or channels
    o, down            <- the input of all devices (FP8 flow: its codes and scales, one byte a value), this
                       device's outputs
    x (whole)          <- the outputs of all devices, in the dtype between operations
    embedding, head    -> this device's part of the vocabulary; a row of the embedding is a sum with one term

Compared with the usual pair (column- then row-parallel, one FP32 or BF16 all-reduce of the output) this sends
fewer bytes in FP8 and rounds nothing twice.  Only the backward has partial sums, of dX over output features.
They are computed and summed over the devices in FP32 and rounded once (`enter`; reduce-scatter for split
inputs).  Whole activations carry whole cotangents, the same on every device of the axis.

Outside `jax.shard_map` the degree is 1 and every function here is the identity.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.models.ops import round_to
from jetrl_jax.models.sharded import TENSOR, gather_codes
from pallas_kernels import ScaledArray


def degree() -> int:
    """The number of devices over which layers are split, where this is traced."""
    try:
        return int(jax.lax.axis_size(TENSOR))
    except NameError:  # not inside a map over the mesh
        return 1


def enter(x: jax.Array) -> jax.Array:
    """Whole activations for matrices split by output features, as float32 with x's values.

    The cotangents of these products are each device's partial sums.  They are added in FP32 and rounded once
    to x's dtype.
    """
    return x if degree() == 1 else _enter(x, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _enter(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(jnp.float32)


_enter.defvjp(
    lambda x, dtype: (_enter(x, dtype), None),
    lambda dtype, _, dx: (round_to(jax.lax.psum(dx, TENSOR), dtype),),
)


def gather(x: jax.Array) -> jax.Array:
    """The parts [..., D / degree] of all devices as [..., D]; a device's cotangent is its own part."""
    return x if degree() == 1 else _gather(x)


@jax.custom_vjp
def _gather(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, TENSOR, axis=x.ndim - 1, tiled=True)


def _own_part(_: None, dx: jax.Array) -> tuple[jax.Array]:
    size = dx.shape[-1] // degree()
    return (jax.lax.dynamic_slice_in_dim(dx, jax.lax.axis_index(TENSOR) * size, size, axis=dx.ndim - 1),)


_gather.defvjp(lambda x: (_gather(x), None), _own_part)


def gather_input(x: jax.Array) -> jax.Array:
    """As `gather`, for a matrix split by output features: float32, with partial cotangents as in `enter`."""
    return x if degree() == 1 else _gather_input(x, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_input(x: jax.Array, dtype: Any) -> jax.Array:
    return _gather(x).astype(jnp.float32)


_gather_input.defvjp(
    lambda x, dtype: (_gather_input(x, dtype), None), lambda dtype, _, dx: (scatter_sum(dx, dtype),)
)


def gather_input_codes(codes: ScaledArray) -> ScaledArray:
    """The codes and scales of all devices' features (axis 1)."""
    return codes if degree() == 1 else gather_codes(codes, TENSOR, 1)


def scatter_sum(dx: jax.Array, dtype: Any) -> jax.Array:
    """This device's part [..., D / degree], in `dtype`, of the sum of all devices' float32 [..., D]."""
    return round_to(jax.lax.psum_scatter(dx, TENSOR, scatter_dimension=dx.ndim - 1, tiled=True), dtype)


def input_cotangent_dtype(dtype: Any) -> Any:
    """The dtype of a product's dX before it is summed over devices."""
    return jnp.dtype(dtype if degree() == 1 else jnp.float32)


def total(x: jax.Array) -> jax.Array:
    """The sum of the devices' shares; every share gets the sum's cotangent."""
    return x if degree() == 1 else _total(x)


@jax.custom_vjp
def _total(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, TENSOR)


_total.defvjp(lambda x: (_total(x), None), lambda _, dx: (dx,))


def maximum(x: jax.Array) -> jax.Array:
    """The largest of the devices' values; no gradient."""
    return x if degree() == 1 else jax.lax.pmax(jax.lax.stop_gradient(x), TENSOR)


def local_ids(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Ids of the whole vocabulary as (ids within this device's `size` rows, whether they are its own)."""
    local = ids - jax.lax.axis_index(TENSOR).astype(ids.dtype) * size
    mine = (local >= 0) & (local < size)
    return jnp.where(mine, local, 0), mine
