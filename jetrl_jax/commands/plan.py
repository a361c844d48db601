"""`python -m jetrl_jax plan --config C --devices 8xH100`: predicts a run's memory, work and traffic.

Needs no GPU and allocates nothing.  Prints the memory that each phase of a step needs on a device, the
largest microbatch and the longest completion that fit, and the work and traffic of a step.

    --check           compiles the run's programs for fake CPU devices and prints XLA's memory analysis
                      beside the plan
    --check-target F  the same for the GPU that F describes
    --count           compiles the programs for one H100, counts launches, bytes and FLOPs, and prints the
                      predicted times beside those of the preset bf16

Exit status: 0 if the run fits, 2 for bad input, 3 if it does not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jetrl_jax.commands.entry import add_config_arguments, command_parser, config_from_arguments
from jetrl_jax.config.load import override_config
from jetrl_jax.config.model import NewModelSection
from jetrl_jax.config.rollout import RESERVE
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.types import user_path
from jetrl_jax.devices.gpu_memory import variables
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.planning.devices import GIB, Devices, parse_devices

if TYPE_CHECKING:
    from jetrl_jax.models.config import ModelConfig

WIDTH = 132


def main(argv: list[str]) -> int:
    """Parses the command line and prints the plan; returns the exit status."""
    arguments = _parser().parse_args(argv)
    config, devices = config_from_arguments(arguments), parse_devices(arguments.devices)
    if arguments.model is not None:  # so that no rule of the config uses the sizes of a new model
        config = override_config(config, [f"model={{path: {json.dumps(str(arguments.model))}}}"])
    if not 0 <= arguments.reserve < 1:
        raise UserError(
            f"--reserve: not a share: got {arguments.reserve}, expected 0 up to, not including, 1."
        )
    if devices.count != config.sharding.devices:
        raise UserError(
            f"--devices: not the config's mesh: got {devices.count} devices, expected the product of "
            "the degrees in sharding, "
            f"{config.sharding.devices}."
        )
    _use_fake_devices(devices.count)
    sizes = planned_model(config, arguments.model)
    if arguments.layers is not None:
        sizes = dataclasses.replace(sizes, num_layers=arguments.layers)
    console = Console(width=WIDTH, highlight=False)
    if arguments.count:
        _print_count(console, config, sizes, devices)
        return 0
    if arguments.check or arguments.check_target:
        _print_check(console, config, sizes, devices, arguments.check_target)
        return 0
    return _print_plan(console, config, sizes, devices, arguments.reserve, search=not arguments.no_search)


def planned_model(config: RunConfig, model: str | Path | None = None) -> ModelConfig:
    """The sizes of a config's model, from the config itself or from the `config.json` of a directory.

    Args:
      config: the run's config.
      model: a directory with a `config.json`, used instead of `model.path`.

    Raises:
      UserError: the directory has no `config.json`, or the run's sequences are longer than the model allows.
    """
    from bridge.hf.read import read_config
    from jetrl_jax.runs.policy import new_model_config
    from jetrl_jax.text.tokenizer import build_tokenizer

    path = model or config.model_path
    if path is None:
        assert isinstance(config.model, NewModelSection)
        return new_model_config(config.model, build_tokenizer(config.tokenizer))
    path = user_path(path)
    if not (path / "config.json").is_file():
        raise UserError(
            f"plan: no config.json: got {str(path)!r}, expected a Hugging Face directory. Weights are "
            "not needed: --model DIR gives "
            f"a directory that holds config.json alone, such as configs/models/qwen3_8b."
        )
    sizes = read_config(path)
    if config.max_sequence_tokens > sizes.max_position_embeddings:
        raise UserError(
            "plan: sequences do not fit the model: got rollout.max_prompt_tokens + "
            "rollout.max_completion_tokens = "
            f"{config.max_sequence_tokens}, expected at most "
            f"max_position_embeddings={sizes.max_position_embeddings}."
        )
    return sizes


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "plan",
        "Plan a run's memory, work and traffic without a device.",
        "plan --config configs/qwen3_8b_8xh100.yaml --model configs/models/qwen3_8b --devices 8xH100",
    )
    add_config_arguments(parser)
    parser.add_argument("--devices", required=True, metavar="NxKIND", help="such as 8xH100 or 8x80GiB")
    parser.add_argument(
        "--model",
        type=user_path,
        metavar="DIR",
        help="directory with a config.json, in place of model.path; weights are not read",
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=RESERVE,
        metavar="SHARE",
        help=f"of a device's memory, left to the driver, NCCL and fragmentation (default {RESERVE})",
    )
    parser.add_argument(
        "--no-search", action="store_true", help="leave out the largest microbatch and the longest completion"
    )
    parser.add_argument(
        "--check", action="store_true", help="compile the programs for fake CPU devices and compare (minutes)"
    )
    parser.add_argument(
        "--check-target",
        type=user_path,
        metavar="FILE",
        help="the same for the GPU that an XLA GpuTargetConfig describes; needs JAX's CUDA plugin",
    )
    parser.add_argument(
        "--count",
        action="store_true",
        help="compile the programs for one H100, count their launches and predict their times, beside those "
        "of the preset bf16 (minutes; needs JAX's CUDA plugin but no GPU)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="L",
        help="plan the model as if it had L layers, such as for a quick check",
    )
    return parser


def _use_fake_devices(count: int) -> None:
    """Makes JAX use `count` CPU devices, even on a machine with GPUs."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_platforms", "cpu")
    if jax.config.values["jax_num_cpu_devices"] < count:
        jax.config.update("jax_num_cpu_devices", count)


def _print_plan(
    console: Console, config: RunConfig, sizes: ModelConfig, devices: Devices, reserve: float, *, search: bool
) -> int:
    from jetrl_jax.planning.memory import MemoryPlan
    from jetrl_jax.planning.traffic import traffic, verify_cost, work

    budget = int(devices.memory_bytes * (1 - reserve))
    plan = MemoryPlan(config, sizes, devices.memory_bytes)
    items = list(dict.fromkeys(item for phase in plan.phases for item in phase.bytes))
    table = Table(title=f"GiB on one of {devices.count} {devices.name}, mesh {config.sharding.model_dump()}")
    table.add_column("")
    for phase in plan.phases:
        table.add_column(phase.name, justify="right")
    for item in items:
        table.add_row(
            item, *(f"{phase.bytes[item] / GIB:.2f}" if item in phase.bytes else "" for phase in plan.phases)
        )
    table.add_section()
    table.add_row("total", *(f"{phase.total / GIB:.2f}" for phase in plan.phases))
    table.add_row("left", *(f"{(budget - phase.total) / GIB:.2f}" for phase in plan.phases))
    console.print(table)
    console.print(
        f"memory of a device {devices.memory_bytes / GIB:.2f} GiB, {reserve:.0%} of it in reserve: "
        f"{budget / GIB:.2f} GiB"
    )
    console.print(f"attention: {plan.run.attention.name} ({plan.run.attention.reason})")
    if plan.run.engine is not None and plan.run.engine.shapes.drafted:
        cost, drafted = verify_cost(plan.run), plan.run.engine.shapes.drafted
        slots = plan.run.slots().shape[0]
        console.print(
            f"speculation: up to {drafted} guesses of each of {slots} sequences; by the rates of one H100 a "
            f"forward of {drafted + 1} positions takes {cost:.2f} times as long as one of a single "
            f"position, and gains where more than {cost - 1:.2f} guesses of it are kept"
        )
    if config.shared_vllm is not None:
        console.print(
            "JAX beside vLLM on one GPU: "
            + " ".join(f"{name}={value}" for name, value in variables(config.shared_vllm).items())
        )
    for remat in ("none", "layer"):
        console.print(
            f"gradient's temporaries with batch.remat: {remat}: "
            f"{plan.gradient_temporaries(remat) / GIB:.2f} GiB"
        )
    if search:
        _print_largest(console, plan, budget)
    _print_step(
        console,
        work(plan.run),
        "work of a step on one device, at the rates of one H100: predictions, not times of runs",
    )
    _print_step(
        console, traffic(plan.run, plan.shallow), "what one device sends in a step, over NVLink: predictions"
    )
    full = plan.fullest
    if full.total > budget:
        raise RunStopped(
            f"plan: it does not fit: {full.name} needs {full.total / GIB:.2f} GiB of {budget / GIB:.2f} GiB."
        )
    return 0


def _print_largest(console: Console, plan: Any, budget: int) -> None:
    tokens, length = plan.largest_microbatch(budget), plan.longest_completion(budget)
    console.print(f"largest batch.microbatch_tokens that fits: {tokens or 'none, not even one row'}")
    console.print(
        "longest rollout.max_completion_tokens that fits, with one row a device in a microbatch: "
        f"{length or 'none'}"
    )
    if plan.run.engine is not None:
        console.print(
            f"key/value cache: {plan.run.engine.programs.numerics.choices.cache.name}, "
            f"{plan.run.cache_token_bytes} bytes a token on a device; "
            f"largest rollout.engine.slots that fits: {plan.most_slots(budget) or 'none'}"
        )


def _print_step(console: Console, rows: list[Any], title: str) -> None:
    table = Table("", "amount", "rate", "seconds", "rate's source", title=title)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.amount:.3g} {row.unit}",
            f"{row.rate:.3g} {row.unit}/s",
            f"{row.seconds:.3f}",
            row.source,
        )
    table.add_section()
    table.add_row("all, one after the other", "", "", f"{sum(row.seconds for row in rows):.3f}", "")
    console.print(table)


def _print_check(
    console: Console, config: RunConfig, sizes: ModelConfig, devices: Devices, target: Path | None
) -> None:
    from jetrl_jax.planning.check import check, target_devices

    where = (
        "fake CPU devices, whose temporaries are not a GPU's"
        if target is None
        else f"GPUs as {target} describes them"
    )
    console.print(
        f"XLA's memory analysis for {devices.count} {where}; GiB on one device: plan / XLA, error of "
        "the total"
    )
    table = Table("program", "arguments", "outputs", "temporaries", "given back", "total", "error")
    layout_devices = None if target is None else target_devices(target, devices.count)
    for program, plan, xla in check(config, sizes, layout_devices):
        pairs = [
            (plan.arguments, xla.arguments),
            (plan.outputs, xla.outputs),
            (plan.temporaries, xla.temporaries),
        ]
        pairs += [(plan.alias, xla.alias), (plan.total, xla.total)]
        table.add_row(
            program,
            *(f"{a / GIB:.3f} / {b / GIB:.3f}" for a, b in pairs),
            f"{plan.total / xla.total - 1:+.1%}",
        )
    console.print(table)


def _print_count(console: Console, config: RunConfig, sizes: ModelConfig, devices: Devices) -> None:
    from jetrl_jax.planning.count import PAPER, StepCount

    if devices.name != "H100":
        raise UserError(
            f"--count: not counted for: got --devices {devices.count}x{devices.name}, expected 1xH100."
        )
    rival = override_config(config, ["precision={preset: bf16}"])
    counts: dict[str, StepCount] = {one.precision.preset: StepCount(one, sizes) for one in (config, rival)}
    first = counts[config.precision.preset]
    gradients = {preset: count.program("gradient") for preset, count in counts.items()}
    tokens = config.microbatch_tokens // config.row_tokens * config.row_tokens
    again = ", forward once more" if config.batch.remat == "layer" else ""
    parts = {
        f"a layer, forward and backward{again}, of {tokens} tokens in rows of {config.row_tokens}": {
            preset: one.layer for preset, one in gradients.items()
        },
        "the gradient's program without its layers": {preset: one.rest for preset, one in gradients.items()},
        f"a training step of these: {sizes.num_layers} layers, the rest, the gradient added to a sum": {
            preset: count.training_step for preset, count in counts.items()
        },
    }
    if first.slots:
        decodes = {preset: count.program("decode") for preset, count in counts.items()}
        where = f"{first.slots} sequences that see {first.context_tokens:.0f} tokens each"
        parts[f"a layer in decode, {where}"] = {preset: one.layer for preset, one in decodes.items()}
        parts[f"decoding a token in all {sizes.num_layers} layers"] = {
            preset: one.whole for preset, one in decodes.items()
        }
    console.print("Predictions by counting compiled programs, at the rates of jetrl_jax/planning/rates.py.")
    for title, found in parts.items():
        _print_kinds(console, title, found)
    table = Table(
        "phase of a step", *(f"{preset} s" for preset in counts), "ratio", "in the paper", title="predictions"
    )
    phases = {preset: count.phases() for preset, count in counts.items()}
    for name in first.phases():
        seconds = [found[name] for found in phases.values()]
        table.add_row(
            name, *(f"{one:.2f}" for one in seconds), f"{seconds[-1] / seconds[0]:.2f}", f"{PAPER[name]}"
        )
    console.print(table)


def _print_kinds(console: Console, title: str, counts: dict[str, Any]) -> None:
    """Prints launches, bytes, FLOPs and predicted milliseconds of each kind, the presets side by side."""
    from jetrl_jax.planning.count import Amount, total

    table = Table(title=title)
    table.add_column("")
    for preset in counts:
        for what in ("launches", "GB", "TFLOP", "ms"):
            table.add_column(f"{preset}\n{what}", justify="right")

    def row(name: str, amounts: list[Amount]) -> None:
        cells = [(one.launches, one.bytes / 1e9, one.flops / 1e12, one.seconds * 1e3) for one in amounts]
        table.add_row(
            name, *(text for a, b, c, d in cells for text in (f"{a:.0f}", f"{b:.2f}", f"{c:.2f}", f"{d:.3f}"))
        )

    for kind in sorted({kind for count in counts.values() for kind in count}):
        amounts = [count.get(kind, Amount()) for count in counts.values()]
        if any(round(one.launches) or one.seconds > 0 for one in amounts):
            row(kind, amounts)
    table.add_section()
    totals = [total(count) for count in counts.values()]
    row("all", totals)
    console.print(table)
    console.print(f"{' against '.join(reversed(counts))}: {totals[-1].seconds / totals[0].seconds:.2f}")
