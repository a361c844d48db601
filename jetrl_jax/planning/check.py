"""Compares a memory plan with XLA: each program is compiled ahead of time, without weights, and analysed.

On fake CPU devices, arguments, outputs and donated bytes are those of a GPU and must agree with the plan.
Temporaries need not agree.  The CPU backend widens FP8 and BF16 operands and, from JAX 0.11 on, drops the
barriers of rematerialisation, so that it keeps values that a GPU computes again.  With a target (the
description of a GPU for which XLA's CUDA plugin compiles; it needs no GPU) temporaries are those of that GPU,
except in attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jetrl_jax.config.load import override_config
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.errors import UserError
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.planning.abstract_run import AbstractRun, on_one_device
from jetrl_jax.planning.memory import largest_master, shallow_runs, temporaries
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.precision.plan import EMBEDDINGS

PROGRAMS = ("logprobs", "gradient", "check", "step")


@dataclass(frozen=True)
class ProgramBytes:
    """Bytes of one program on one device; alias: bytes of arguments that outputs reuse."""

    arguments: int
    outputs: int
    temporaries: int
    alias: int

    @property
    def total(self) -> int:
        """The bytes that the device needs to run the program."""
        return self.arguments + self.outputs + self.temporaries - self.alias


def predicted(run: AbstractRun, shallow: tuple[AbstractRun, ...], program: str) -> ProgramBytes:
    """The planner's prediction for a program of the trainer."""
    state, batch, params = run.state, run.batch(), on_one_device(run.state.params)
    rows = on_one_device(batch) // run.config.sharding.row_shards
    number = on_one_device(batch.token_ids) // run.config.sharding.row_shards
    if program == "logprobs":
        return ProgramBytes(
            on_one_device(run.frozen) + 3 * number, number, _temporary(run, shallow, program), 0
        )
    if program == "gradient":
        return ProgramBytes(_read(run) + rows, params + number, _temporary(run, shallow, program), 0)
    held = params + on_one_device(state.opt_state)
    if program == "check":
        return ProgramBytes(held + params, 0, largest_master(run), 0)
    held += on_one_device(state.published)
    return ProgramBytes(held + params, held, largest_master(run), held)


def compiled(run: AbstractRun, program: str) -> ProgramBytes:
    """XLA's memory analysis of a program, for the devices that the run is laid out on."""
    analysis = run.trace(program).lower().compile().memory_analysis()
    return ProgramBytes(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.temp_size_in_bytes,
        analysis.alias_size_in_bytes,
    )


def check(
    config: RunConfig,
    sizes: ModelConfig,
    devices: Sequence[jax.Device] | None,
    programs: Sequence[str] = PROGRAMS,
) -> Iterator[tuple[str, ProgramBytes, ProgramBytes]]:
    """Yields (program, the planner's bytes, XLA's bytes); `devices`: None takes this process's.

    Both use XLA's attention, since tracing cuDNN's needs an installed cuDNN, which comes with a GPU.
    """
    config = override_config(config, ["numerics.attention=xla"])
    run, shallow = AbstractRun(config, sizes, devices=devices), shallow_runs(config, sizes)
    for program in programs:
        yield program, predicted(run, shallow, program), compiled(run, program)


def target_devices(description: str | Path, count: int) -> list[Any]:
    """Devices of an absent GPU to compile for: `count` processes with one device each.

    Args:
      description: file with XLA's GpuTargetConfig of the GPU as a text proto.
      count: number of devices.

    Raises:
      UserError: the file does not exist, or this environment lacks JAX's CUDA plugin.
    """
    from jax.experimental import topologies

    if not Path(description).is_file():
        raise UserError(
            f"plan: no such GpuTargetConfig: got {str(description)!r}, expected a "
            "file that holds one as a text proto."
        )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=Path(description).read_text(encoding="utf-8"),
            topology=f"1x{count}x1",
        )
    except (RuntimeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise UserError(
            f"plan: XLA cannot compile for CUDA here: {error}. Expected jax-cuda13-plugin and "
            "jax-cuda13-pjrt of jax "
            f"{jax.__version__} in this environment; they need no GPU."
        ) from error
    return list(topology.devices)


def _temporary(run: AbstractRun, shallow: tuple[AbstractRun, ...], program: str) -> int:
    return sum(temporaries(shallow, run.sizes.num_layers, program).values())


def _read(run: AbstractRun) -> int:
    """Bytes of the weights passed to the gradient's forward: published ones where they are multiplied, else
    masters; of embedding and head both, which `TrainableMatrix` binds.
    """
    masters, published = dict(named_params(run.state.params)), dict(named_params(run.state.published))
    total = sum(on_one_device(value) for path, value in published.items() if path not in masters)
    for path, master in masters.items():
        reads = run.plan.reads_published(path)
        total += on_one_device(published[path]) if reads else 0
        total += on_one_device(master) if not reads or path in EMBEDDINGS else 0
    return total
