"""What a mesh of devices and several processes demand of the other fields: a part of `jetrl_jax.config.rules.tables`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from jetrl_jax.config.rules.types import NoEffect, Rule
from jetrl_jax.models.anatomy import MATRICES, Matrix, fitting_degrees, fitting_tensor_degrees, shard_axis
from jetrl_jax.precision.formats import FORMATS, PRESETS

if TYPE_CHECKING:
    from jetrl_jax.config.run_config import RunConfig


def _matrices() -> dict[str, Matrix]:
    """Name -> one of each kind of linear layer of a new model: those of one shape and unit share a line of a message."""
    kinds: dict[tuple[str, str], list[Matrix]] = {}
    for matrix in MATRICES:
        kinds.setdefault((matrix.outputs, matrix.inputs), []).append(matrix)
    return {" and ".join(matrix.name for matrix in kind): kind[0] for kind in kinds.values()}


def any_fp8(config: RunConfig) -> bool:
    """Whether any layer of the config has block scales."""
    section = config.precision
    return PRESETS[section.preset].quantized or any(FORMATS[item.format].quantized for item in section.overrides)


def _tensor_degrees(config: RunConfig) -> dict[str, tuple[int, list[int]]]:
    """Name -> (output features, degrees that fit) of each kind of matrix of a new model; the vocabulary is the tokenizer's."""
    found = {}
    for name, matrix in _matrices().items():
        outputs, unit = matrix.shape(config.model)[0], matrix.unit(config.model.head_dim, blocks=any_fp8(config))
        found[name] = outputs, fitting_tensor_degrees(outputs, unit)
    return found


def _tensor_fits(config: RunConfig) -> bool:
    degree = config.sharding.tensor
    return config.model.path is not None or all(degree in degrees for _, degrees in _tensor_degrees(config).values())


def _tensor_expected(config: RunConfig) -> str:
    degree = config.sharding.tensor
    cut = {name: found for name, found in _tensor_degrees(config).items() if degree not in found[1]}
    return "a degree that fits " + "; ".join(f"{name} ({size} outputs): {', '.join(map(str, fits))}" for name, (size, fits) in cut.items())


def _cut(config: RunConfig) -> dict[str, tuple[int, int]]:
    """The matrices that the degree cannot split."""
    degree, fp8 = config.sharding.fsdp, any_fp8(config)
    if degree == 1 or config.model.path is not None or not _tensor_fits(config):
        return {}
    shapes = {name: matrix.shape(config.model) for name, matrix in _matrices().items()}
    parts = {name: (outputs // config.sharding.tensor, inputs) for name, (outputs, inputs) in shapes.items()}
    return {name: shape for name, shape in parts.items() if shard_axis(shape, degree, fp8) is None}


def _expected(config: RunConfig) -> str:
    fp8 = any_fp8(config)
    fitting = [f"{name} {list(shape)}: {', '.join(map(str, fitting_degrees(shape, fp8)))}" for name, shape in _cut(config).items()]
    return "a degree that fits " + "; ".join(fitting)


SHARDING_RULES: tuple[Rule, ...] = (
    Rule(
        ("sharding.fsdp", "sharding.tensor", "model.hidden_size", "model.intermediate_size", "precision.preset", "model.path"),
        lambda c: not _cut(c),
        "shards would cut a matrix inside a row or a 128x128 block of its scales",
        _expected,
    ),
    Rule(
        ("sharding.tensor", "model.num_kv_heads", "model.head_dim", "model.intermediate_size", "precision.preset", "model.path"),
        _tensor_fits,
        "shards would cut a head or a 128x128 block of a matrix's scales",
        _tensor_expected,
    ),
    Rule(
        ("warm_start.batch_size", "sharding.data", "sharding.fsdp"),
        lambda c: c.warm_start.steps == 0 or c.warm_start.batch_size % c.sharding.row_shards == 0,
        "the examples of a supervised step are not shared evenly among the devices",
        lambda c: f"a multiple of sharding.data * sharding.fsdp = {c.sharding.row_shards}",
    ),
    Rule(
        ("sharding.data", "sharding.fsdp", "sharding.tensor", "rollout.engine"),
        lambda c: c.sharding.devices == 1 or c.rollout.engine == "jax",
        "vLLM samples beside a trainer on one device only",
        lambda c: "1, or rollout.engine: jax",
    ),
)


ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")

DISTRIBUTED_RULES: tuple[Rule, ...] = (
    Rule(
        ("distributed.process_id", "distributed.processes"),
        lambda c: c.distributed.process_id is None or c.distributed.processes is None or c.distributed.process_id < c.distributed.processes,
        "no such process",
        lambda c: f"0 to distributed.processes - 1 = {(c.distributed.processes or 1) - 1}",
    ),
    Rule(
        ("distributed.coordinator",),
        lambda c: c.distributed.coordinator is None or _is_address(c.distributed.coordinator),
        "not an address",
        lambda c: "HOST:PORT of process 0, such as node1:8476",
    ),
    Rule(
        ("distributed.processes", "sharding.data", "sharding.fsdp"),
        lambda c: c.sharding.row_shards % (c.distributed.processes or 1) == 0,
        "the devices of the mesh are not shared evenly among the processes",
        lambda c: f"a divisor of sharding.data * sharding.fsdp = {c.sharding.row_shards}",
        "every process brings the same number of devices, and all that share a layer",
    ),
    Rule(
        ("distributed.processes", "rollout.engine"),
        lambda c: not c.distributed.on or c.rollout.engine == "jax",
        "vLLM samples beside a trainer of one process only",
        lambda c: "1, or rollout.engine: jax",
    ),
)

DISTRIBUTED_NO_EFFECT: tuple[NoEffect, ...] = (
    NoEffect(
        ("distributed.process_id", "distributed.coordinator", "distributed.timeout_s"),
        ("distributed.processes",),
        lambda c: not c.distributed.on,
        "distributed.processes is 1",
    ),
)


def _is_address(text: str) -> bool:
    found = ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[2]) < 65536
