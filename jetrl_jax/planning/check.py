"""The plan against XLA: each program compiled ahead of time, without weights, its memory analysis beside the
prediction.

On fake CPU devices, arguments, outputs and what is donated are those of a GPU, and must agree; temporaries
are not: the CPU backend widens FP8 and BF16 operands, drops the barriers of rematerialisation and so keeps
what a GPU computes again.  With a target (a description of a GPU that XLA's CUDA plugin compiles for; no GPU
is needed) they are those of that GPU, attention apart.
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

PROGRAMS = ("logprobs", "gradient", "check", "step")


@dataclass(frozen=True)
class ProgramBytes:
    """Bytes of one program on one device; alias: of arguments that are given back as outputs."""

    arguments: int
    outputs: int
    temporaries: int
    alias: int

    @property
    def total(self) -> int:
        """What the device needs to run it."""
        return self.arguments + self.outputs + self.temporaries - self.alias


def predicted(run: AbstractRun, shallow: tuple[AbstractRun, ...], program: str) -> ProgramBytes:
    """What the planner says of a program of the trainer."""
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
    """What XLA says of it, for the devices that the run is laid out on."""
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
    """(program, the planner's bytes, XLA's) one after the other; `devices` None are this process's.

    Both with XLA's attention: JAX asks cuDNN for its version when it traces a call, and cuDNN comes with a
    GPU.
    """
    config = override_config(config, ["numerics.attention=xla"])
    run, shallow = AbstractRun(config, sizes, devices=devices), shallow_runs(config, sizes)
    for program in programs:
        yield program, predicted(run, shallow, program), compiled(run, program)


def target_devices(description: str | Path, count: int) -> list[Any]:
    """Devices of a GPU that is not there, to compile for: `count` processes with one each.

    Args:
      description: file with XLA's GpuTargetConfig of the GPU as a text proto.
      count: number of devices.

    Raises:
      UserError: no such file, or no CUDA plugin of JAX in this environment.
    """
    from jax.experimental import topologies

    if not Path(description).is_file():
        raise UserError(
            f"--check-target: no such file: got {str(description)!r}, expected a GpuTargetConfig as a "
            "text proto."
        )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=Path(description).read_text(encoding="utf-8"),
            topology=f"1x{count}x1",
        )
    except (RuntimeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise UserError(
            f"--check-target: XLA cannot compile for CUDA here: {error}. Expected jax-cuda13-plugin and "
            "jax-cuda13-pjrt of jax "
            f"{jax.__version__} in this environment; they need no GPU."
        ) from error
    return list(topology.devices)


def _temporary(run: AbstractRun, shallow: tuple[AbstractRun, ...], program: str) -> int:
    return sum(temporaries(shallow, run.sizes.num_layers, program).values())


def _read(run: AbstractRun) -> int:
    """Bytes of what the gradient's forward multiplies: codes where it is FP8, else masters;
    the rest is not passed to it.
    """
    codes = {path for path in run.plan.paths if run.plan.flow(path).fprop.quantized}
    masters, published = dict(named_params(run.state.params)), dict(named_params(run.state.published))
    return sum(on_one_device(published[path] if path in codes else masters[path]) for path in masters)
