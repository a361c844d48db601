"""Parameters split over a mesh, inside `jax.shard_map`: how they are gathered, and their gradients reduced.

    axis "data"     copies of the policy; the rows of a batch are split
    axis "fsdp"     the rows are split, and so is every matrix: masters, moments, published codes with their
                    scale grids
    axis "tensor"   the layers are split (`tensor_parallel`): a device has, and gathers, only its output
                    features

A matrix is gathered where it is multiplied: an FP8 weight as codes and scales (one byte a value), another one
rounded to the dtype in which it is multiplied.  Rounding and quantising before the gather gives the same bits
as after it, since no shard boundary cuts a 128x128 block.  Gradients are summed in FP32, over "fsdp" directly
into the shards (reduce-scatter), then over "data".  With rematerialised layers the backward gathers again, so
that no whole weight lives longer than its layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jetrl_jax.models.ops import round_to
from jetrl_jax.precision.trainable_weight import FrozenFp8Weight, TrainableFp8Weight, TrainableMatrix
from pallas_kernels import ScaledArray

DATA, FSDP, TENSOR = MESH_AXES = ("data", "fsdp", "tensor")
ROW_AXES = (DATA, FSDP)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedParameter:
    """One device's part of a parameter.

    value: the shard: an array, or a `ScaledArray`, `TrainableFp8Weight` or `FrozenFp8Weight` of shards.
    axis: the axis split over "fsdp"; None if every device of "fsdp" holds the same values.
    of_heads: whether the parameter is whole on every device of "tensor" but used only on its own heads, so
      that each device has a share of the gradient.
    """

    value: Any
    axis: int | None = field(metadata={"static": True})
    of_heads: bool = field(default=False, metadata={"static": True})


def gathered(parameter: nnx.Param, dtype: Any) -> Any:
    """The value that a layer multiplies; a `ShardedParameter` is gathered over "fsdp".

    dtype: the dtype to which the layer rounds an array anyway.  The result keeps the array's own dtype, which
    is that of its gradient.
    """
    value = parameter.get_value()
    if not isinstance(value, ShardedParameter):
        return value
    shard, axis = value.value, value.axis
    sums = MESH_AXES if value.of_heads else ROW_AXES
    if isinstance(shard, TrainableFp8Weight):
        return TrainableFp8Weight(
            _receiver(shard.master, axis), gather_codes(shard.quantized, FSDP, axis), shard.fp8_backward
        )
    if isinstance(shard, FrozenFp8Weight):
        return FrozenFp8Weight(gather_codes(shard.quantized, FSDP, axis), shard.fp8_backward)
    if isinstance(shard, ScaledArray):
        return gather_codes(shard, FSDP, axis)
    if isinstance(shard, TrainableMatrix):
        shard = shard.whole()
    return _gather(shard, axis, sums, jnp.dtype(dtype))


def local(parameter: nnx.Param) -> Any:
    """The parameter's value or this device's shard of it, to inspect its type without gathering."""
    value = parameter.get_value()
    return value.value if isinstance(value, ShardedParameter) else value


def gather_codes(codes: ScaledArray, mesh_axis: str, axis: int | None) -> ScaledArray:
    """Codes and scales of all devices of a mesh axis, joined along `axis`; None: they are already whole."""
    if axis is None:
        return codes
    qvalue, scale = (
        jax.lax.all_gather(part, mesh_axis, axis=axis, tiled=True) for part in (codes.qvalue, codes.scale)
    )
    return ScaledArray(qvalue, scale, codes.block_shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(shard: jax.Array, axis: int | None, sums: tuple[str, ...], dtype: Any) -> jax.Array:
    if axis is None:
        return shard
    return jax.lax.all_gather(round_to(shard, dtype), FSDP, axis=axis, tiled=True).astype(shard.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _receiver(shard: jax.Array, axis: int | None) -> jax.Array:
    """A stand-in for the whole master; it is never read and only receives the gradient."""
    shape = list(shard.shape)
    if axis is not None:
        shape[axis] *= jax.lax.axis_size(FSDP)
    return jnp.zeros(shape, shard.dtype)


def _to_shard(axis: int | None, sums: tuple[str, ...], grad: jax.Array) -> tuple[jax.Array]:
    """A device's gradient of the gathered parameter, summed over the devices and cut to its shard."""
    if axis is None:
        return (jax.lax.psum(grad, sums),)
    return (jax.lax.psum(jax.lax.psum_scatter(grad, FSDP, scatter_dimension=axis, tiled=True), DATA),)


_gather.defvjp(
    lambda shard, axis, sums, dtype: (_gather(shard, axis, sums, dtype), None),
    lambda axis, sums, dtype, _, grad: _to_shard(axis, sums, grad),
)
_receiver.defvjp(
    lambda shard, axis: (_receiver(shard, axis), None), lambda axis, _, grad: _to_shard(axis, ROW_AXES, grad)
)
