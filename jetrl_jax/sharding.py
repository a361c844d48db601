"""The mesh of a run, and where every array of it lies: which axis of which parameter is split over which devices.

Vectors (norms, biases) are on every device.  A matrix is split over "fsdp" along its first axis whose shards cut no
128x128 block of its codes (for one that is not multiplied in FP8: whose size divides), so that each device quantises its
own masters and gets the slice of the whole codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jetrl_jax.config_sharding import ShardingSection, fitting_degrees, shard_axis
from jetrl_jax.errors import UserError
from jetrl_jax.models.sharded import FSDP, MESH_AXES, ShardedParameter
from jetrl_jax.precision import PrecisionPlan, map_params, named_params

WHOLE = PartitionSpec()
ROWS = PartitionSpec(MESH_AXES)  # of a batch: over all devices


class Layout:
    """The mesh and the split axis of every parameter.

    Args:
      section: degrees of the two mesh axes; their product is the number of devices taken.
      plan: says which matrices have block scales.
      params: gives paths and shapes; may be abstract.
      devices: to take them from, such as those of a topology that programs are compiled for; None: this process's.

    Attributes:
      mesh: devices [data, fsdp].
      axes: path -> split axis, or None where every device holds the whole.

    Raises:
      UserError: fewer devices than asked for, or matrices that cannot be split so, all listed.
    """

    def __init__(
        self, section: ShardingSection, plan: PrecisionPlan, params: nnx.State, devices: Sequence[jax.Device] | None = None
    ) -> None:
        count, devices = section.devices, jax.devices() if devices is None else devices
        if len(devices) < count:
            hint = " On a CPU, JAX_NUM_CPU_DEVICES in the environment makes more." if devices[0].platform == "cpu" else ""
            raise UserError(
                f"sharding: not enough devices: got {len(devices)} ({devices[0].device_kind}), expected "
                f"sharding.data * sharding.fsdp = {section.data} * {section.fsdp} = {count}.{hint}"
            )
        self.mesh = Mesh(np.array(devices[:count]).reshape(section.data, section.fsdp), MESH_AXES)
        shapes = {path: tuple(value.shape) for path, value in named_params(params)}
        fp8 = {path for path, flow in plan.formats.items() if "fp8" in flow}
        self.axes: Mapping[str, int | None] = {path: shard_axis(shape, section.fsdp, path in fp8) for path, shape in shapes.items()}
        cut = [path for path, axis in self.axes.items() if axis is None and len(shapes[path]) == 2 and section.fsdp > 1]
        if cut:
            lines = [f"  {path} {shapes[path]}: {', '.join(map(str, fitting_degrees(shapes[path], path in fp8)))}" for path in cut]
            what = f"sharding.fsdp: shards would cut a 128x128 block or a row: got {section.fsdp}"
            raise UserError("\n".join([f"{what}, expected a degree that fits", *lines]))

    @property
    def replicated(self) -> NamedSharding:
        """Of what every device holds whole."""
        return NamedSharding(self.mesh, WHOLE)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.mesh.size

    def record(self) -> dict[str, Any]:
        """What the run's record says of it."""
        return {"mesh": dict(self.mesh.shape), "split_axes": dict(self.axes)}

    def specs(self, state: nnx.State) -> nnx.State:
        """The partition spec of every parameter, in a state of the same paths (also that of published weights)."""
        return map_params(lambda path, _: self._spec(path), state)

    def shardings(self, state: nnx.State) -> nnx.State:
        """As `specs`, with the mesh."""
        return map_params(lambda path, _: NamedSharding(self.mesh, self._spec(path)), state)

    def optimizer_shardings(self, optimizer: optax.GradientTransformation, params: nnx.State) -> Any:
        """The shardings of an optimiser's state: moments lie where their masters do."""
        return optax.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(optimizer.init, params),
            self.shardings(params),
            transform_non_params=lambda _: self.replicated,
        )

    def shards(self, state: nnx.State) -> nnx.State:
        """Inside `map`: the arguments' values as `ShardedParameter`s, for a model to make whole."""
        return map_params(lambda path, value: ShardedParameter(value, self.axes[path]), state)

    def map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`jax.shard_map` of `function` over the mesh; collectives and gradients are written out by hand in it."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def replicate(self, tree: Any) -> list[Any]:
        """A whole copy of every array on every device, moved from device to device; one tree per device of the mesh."""
        copies = jax.device_put(tree, self.replicated)
        leaves, structure = jax.tree.flatten(copies)
        by_device = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
        return [jax.tree.unflatten(structure, [shards[device] for shards in by_device]) for device in self.mesh.devices.flat]

    def _spec(self, path: str) -> PartitionSpec:
        axis = self.axes[path]
        return WHOLE if axis is None else PartitionSpec(*[None] * axis, FSDP)
