"""Parameters split over a mesh, inside `jax.shard_map`: how a layer gets a whole weight, and where its gradient goes.

    axis "data"   copies of the policy; the rows of a batch are split
    axis "fsdp"   the rows are split, and so is every matrix: masters, moments, published codes with their scale grids

A matrix is gathered where it is multiplied: FP8 weights as codes and scales (one byte a value), the others rounded to the
dtype they are multiplied in.  Rounding and quantising before the gather give the bits of doing it after, since no shard
boundary cuts a 128x128 block.  Gradients are summed in FP32: over "fsdp" straight into the shards (reduce-scatter), then
over "data".  With rematerialised layers the backward gathers again, so no whole weight lives longer than its layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jetrl_jax.models.ops import round_to
from jetrl_jax.precision import TrainableFp8Weight
from pallas_kernels import ScaledArray

DATA, FSDP = MESH_AXES = ("data", "fsdp")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedParameter:
    """One device's part of a parameter.

    value: the shard: an array, a `ScaledArray` or a `TrainableFp8Weight` of shards.
    axis: the axis that is split over "fsdp"; None where every device holds the whole.
    """

    value: Any
    axis: int | None = field(metadata={"static": True})


def whole(parameter: nnx.Param, dtype: Any) -> Any:
    """The value that a layer multiplies; of a `ShardedParameter` the whole one, gathered now.

    `dtype` is what the layer rounds an array to anyway; the result keeps the array's own dtype, which is its gradient's.
    """
    value = parameter.get_value()
    if not isinstance(value, ShardedParameter):
        return value
    shard, axis = value.value, value.axis
    if isinstance(shard, TrainableFp8Weight):
        return TrainableFp8Weight(_receiver(shard.master, axis), _gather_codes(shard.quantized, axis), shard.fp8_backward)
    if isinstance(shard, ScaledArray):
        return _gather_codes(shard, axis)
    return _gather(shard, axis, jnp.dtype(dtype))


def _all_gather(value: jax.Array, axis: int | None) -> jax.Array:
    return value if axis is None else jax.lax.all_gather(value, FSDP, axis=axis, tiled=True)


def _gather_codes(codes: ScaledArray, axis: int | None) -> ScaledArray:
    return ScaledArray(_all_gather(codes.qvalue, axis), _all_gather(codes.scale, axis), codes.block_shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(shard: jax.Array, axis: int | None, dtype: Any) -> jax.Array:
    if axis is None:
        return shard
    return _all_gather(round_to(shard, dtype), axis).astype(shard.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _receiver(shard: jax.Array, axis: int | None) -> jax.Array:
    """A stand-in for the whole master, which is never read: it takes the gradient."""
    shape = list(shard.shape)
    if axis is not None:
        shape[axis] *= jax.lax.axis_size(FSDP)
    return jnp.zeros(shape, shard.dtype)


def _to_shard(axis: int | None, grad: jax.Array) -> tuple[jax.Array]:
    """A device's gradient of the whole parameter, summed over the devices, as the shard that it holds."""
    if axis is None:
        return (jax.lax.psum(grad, MESH_AXES),)
    return (jax.lax.psum(jax.lax.psum_scatter(grad, FSDP, scatter_dimension=axis, tiled=True), DATA),)


_gather.defvjp(lambda shard, axis, dtype: (_gather(shard, axis, dtype), None), lambda axis, dtype, _, grad: _to_shard(axis, grad))
_receiver.defvjp(lambda shard, axis: (_receiver(shard, axis), None), lambda axis, _, grad: _to_shard(axis, grad))
