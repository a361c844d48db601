"""The mesh of a run, and its layout: which axis of each parameter is split over which devices.

"tensor" splits a matrix and its bias by output features, into whole heads, blocks or rows of the vocabulary.
Embedding and head are whole on every device of "tensor" if its degree does not divide the vocabulary.

"fsdp" splits each such part once more, along the first axis whose shards cut no 128x128 block of the codes
(for a matrix that is not multiplied in FP8: the first axis whose size is divisible).  So each device
quantises its own masters and gets exactly its slice of the whole codes.

Norm weights are on every device.  An adapter's B is split like the outputs of its layer, and its A only over
"fsdp" (`jetrl_jax.models.lora`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jetrl_jax.config.devices import ShardingSection
from jetrl_jax.devices import processes
from jetrl_jax.errors import UserError
from jetrl_jax.models import anatomy
from jetrl_jax.models.anatomy import (
    Matrix,
    Norm,
    fitting_degrees,
    fitting_tensor_degrees,
    part_of,
    read_by,
    shard_axis,
)
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.sharded import FSDP, MESH_AXES, ROW_AXES, TENSOR, ShardedParameter
from jetrl_jax.precision.formats import is_adapter, is_kv_scale
from jetrl_jax.precision.parameters import map_params, named_params
from jetrl_jax.precision.plan import PrecisionPlan

WHOLE = PartitionSpec()
ROWS = PartitionSpec(ROW_AXES)  # rows of a batch
VOCABULARY = (f"{anatomy.EMBEDDING}.weight", f"{anatomy.HEAD}.weight")
NORM = f"{anatomy.FINAL_NORM}.weight"


class Layout:
    """The mesh and the split axes of every parameter.

    Args:
      section: degrees of the mesh axes; their product is the number of devices taken.
      plan: says which matrices have block scales.
      model: gives paths, shapes and head width; may be abstract.
      devices: devices to choose from, neighbours on "tensor" first; None: JAX's, equally many per process.

    Attributes:
      mesh: devices [data, fsdp, tensor].
      axes: path -> axis split over "fsdp", or None if every device of that axis holds the same values.

    Raises:
      UserError: too few devices, or matrices that these degrees do not divide; all are listed.
    """

    def __init__(
        self,
        section: ShardingSection,
        plan: PrecisionPlan,
        model: Decoder,
        devices: Sequence[Any] | None = None,
    ) -> None:
        count = section.devices
        devices = processes.mesh_devices(count, section.tensor) if devices is None else list(devices)
        if len(devices) < count:
            hint = (
                " On a CPU, JAX_NUM_CPU_DEVICES in the environment makes more."
                if devices[0].platform == "cpu"
                else ""
            )
            raise UserError(
                f"sharding: not enough devices: got {len(devices)} ({devices[0].device_kind}), expected "
                "sharding.data * sharding.fsdp * "
                f"sharding.tensor = {section.data} * {section.fsdp} * {section.tensor} = {count}.{hint}"
            )
        self.section = section
        self.plan = plan
        self.model = model
        self.mesh = Mesh(
            np.array(devices[:count]).reshape(section.data, section.fsdp, section.tensor), MESH_AXES
        )
        fp8 = {path for path in plan.paths if plan.flow(path).quantized}
        shapes = {path: tuple(value.shape) for path, value in named_params(nnx.state(model, nnx.Param))}
        matrices = [path for path, shape in shapes.items() if len(shape) == 2]
        self._unsplit = {path for path in shapes if path == NORM or isinstance(part_of(path), Norm)}
        self._unsplit |= {
            path for path in matrices if path in VOCABULARY and shapes[path][0] % section.tensor
        }
        self._unsplit |= {path for path in matrices if path.endswith(".lora_A.weight")}
        blocks = {path for path in matrices if path in fp8 or not fp8.isdisjoint(read_by(path))}
        units = {
            path: _tensor_unit(path, path in blocks, model.config.head_dim)
            for path in matrices
            if path not in self._unsplit and not is_adapter(path)  # B follows its layer
        }
        _refuse(
            "tensor: shards would cut a head, a 128x128 block or a row",
            section.tensor,
            {
                path: (shapes[path], fitting_tensor_degrees(shapes[path][0], unit))
                for path, unit in units.items()
            },
        )
        parts = {
            path: shape if path in self._unsplit else (shape[0] // section.tensor, *shape[1:])
            for path, shape in shapes.items()
        }
        self.axes: Mapping[str, int | None] = {
            path: shard_axis(parts[path], section.fsdp, path in fp8) for path in shapes
        }
        _refuse(
            "fsdp: shards would cut a 128x128 block or a row",
            section.fsdp,
            {
                path: (shapes[path], fitting_degrees(parts[path], path in fp8))
                for path in matrices
                if not is_adapter(path)  # whole where it does not fit
            },
        )

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
        return NamedSharding(self.mesh, WHOLE)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.mesh.size

    def record(self) -> dict[str, Any]:
        """The layout as a dictionary, for the run's record."""
        return {
            "mesh": dict(self.mesh.shape),
            "fsdp_axes": dict(self.axes),
            "not_split_over_tensor": sorted(self._unsplit),
        }

    def specs(self, state: nnx.State) -> nnx.State:
        """The partition spec of every parameter, in a state of the same paths; also for published weights."""
        return map_params(lambda path, _: self._spec(path), state)

    def shardings(self, state: nnx.State) -> nnx.State:
        """The sharding of every parameter: `specs` on the mesh."""
        return map_params(lambda path, _: NamedSharding(self.mesh, self._spec(path)), state)

    def optimizer_shardings(self, optimizer: optax.GradientTransformation, params: nnx.State) -> Any:
        """The shardings of an optimiser's state; moments are sharded like their masters."""
        return optax.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(optimizer.init, params),
            self.shardings(params),
            transform_non_params=lambda _: self.replicated,
        )

    def shards(self, state: nnx.State) -> nnx.State:
        """Inside `map`: the shards in `state` as `ShardedParameter`s, which a model gathers."""

        def shard(path: str, value: Any) -> Any:
            return value if is_kv_scale(path) else ShardedParameter(value, self.axes[path], _of_heads(path))

        return map_params(shard, state)

    def map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`jax.shard_map` of `function` over the mesh; `function` does its own collectives and gradients."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def copies(self) -> list[Layout]:
        """The layouts (over "tensor" only) of the whole copies of the policy on this process's devices."""
        section, groups = (
            ShardingSection(tensor=self.section.tensor),
            self.mesh.devices.reshape(-1, self.section.tensor),
        )
        return [
            Layout(section, self.plan, self.model, list(row))
            for row in groups
            if row[0].process_index == processes.index()
        ]

    def replicate(self, state: nnx.State) -> list[nnx.State]:
        """A copy of every parameter on the devices of each of `copies`, moved from device to device."""
        shardings = map_params(lambda path, _: NamedSharding(self.mesh, self._tensor_spec(path)), state)
        leaves, structure = jax.tree.flatten(processes.settle(jax.device_put(state, shardings)))
        found = []
        for copy in self.copies():
            devices = list(copy.mesh.devices.flat)
            arrays = []
            for leaf in leaves:
                by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
                sharding = NamedSharding(copy.mesh, leaf.sharding.spec)
                parts = [by_device[device] for device in devices]
                arrays.append(jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts))
            found.append(jax.tree.unflatten(structure, arrays))
        return found

    def _tensor_spec(self, path: str) -> PartitionSpec:
        return WHOLE if path in self._unsplit or is_kv_scale(path) else PartitionSpec(TENSOR)

    def _spec(self, path: str) -> PartitionSpec:
        axis = None if is_kv_scale(path) else self.axes[path]
        if axis is None:
            return self._tensor_spec(path)
        tensor = None if path in self._unsplit else TENSOR
        return PartitionSpec((tensor, FSDP) if tensor else FSDP) if axis == 0 else PartitionSpec(tensor, FSDP)


def placed(shardings: Any, tree: Any) -> Any:
    """Abstract arrays with shardings; one sharding may serve a subtree, such as codes with their scales."""

    def place(sharding: Any, part: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part
        )

    return jax.tree.map(place, shardings, tree)


def _tensor_unit(path: str, blocks: bool, head_dim: int) -> int:
    """The number of output features of a matrix that must stay on one device."""
    part = part_of(path)
    return part.unit(head_dim, blocks=blocks) if isinstance(part, Matrix) else 1


def _of_heads(path: str) -> bool:
    part = part_of(path)
    return isinstance(part, Norm) and part.of_heads


def _refuse(what: str, degree: int, fitting: Mapping[str, tuple[tuple[int, ...], list[int]]]) -> None:
    """Raises UserError that lists all matrices which `degree` does not fit."""
    cut = [
        f"  {path} {shape}: {', '.join(map(str, fits))}"
        for path, (shape, fits) in fitting.items()
        if degree not in fits
    ]
    if cut:
        raise UserError("\n".join([f"sharding.{what}: got {degree}, expected a degree that fits", *cut]))
