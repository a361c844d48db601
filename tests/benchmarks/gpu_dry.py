"""One stage of ``make gpu`` as far as a CPU can take it: ``python -m tests.benchmarks.gpu_dry -m
pallas_kernels.bench layer ...``.

    pytest           collects the tests, which loads every file
    bench            the whole command on the shapes of its arrays; every program that it would time is
                     compiled for an H100 that is not there, by JAX's CUDA plugin; figures are NaN; rivals
                     that need torch are read only
    check_engine     with vLLM the whole command; without it everything up to vLLM, then the trainer's half of
                     the contract
    vllm_gap         with vLLM the whole command; without it the policies of both sides, and no engine
    train_flows      the config with all its overrides, then the same runs narrow and short (`Stage.dry`)

Ends with status 0 only where all of this was done: an unknown option, a config that does not load, a file
that is missing, an import or a kernel that fails end it otherwise.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jetrl_jax.commands.entry import run_entry_point
from jetrl_jax.errors import UserError
from tests.benchmarks.gpu_stages import THEN

Command = Callable[[list[str]], int]


def collect(arguments: list[str]) -> int:
    """`pytest`: 0 where tests were found and every file could be loaded."""
    import pytest

    return int(pytest.main([*arguments, "--collect-only", "-n", "0"]))


def bench(arguments: list[str]) -> int:
    """`pallas_kernels.bench`: everything that it would time is compiled."""
    import jax
    from jax._src.cudnn import fused_attention_stablehlo

    from jetrl_jax.models import flash_attention
    from pallas_kernels import bench as benchmark
    from pallas_kernels import implementations, measure
    from pallas_kernels.attention import bench as attentions
    from pallas_kernels.quantize import bench as quantizers
    from tests.kernels import aot

    benchmark.parse(arguments)
    if missing := aot.missing():
        raise UserError(f"gpu_dry: cannot compile for a GPU: {missing}.")
    whole = jax.sharding.NamedSharding(aot.h100_mesh(), jax.sharding.PartitionSpec())
    programs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def contender(function: Callable[..., Any], *operands: Any) -> measure.Contender:
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), operands
        )
        programs.append((function, shapes))
        return lambda calls: math.nan

    def cold_kernels(function: Callable[..., Any], left: Any, rights: Sequence[Any]) -> measure.Timing:
        contender(lambda left, rights: [function(left, right) for right in rights], left, list(rights))
        return measure.Timing((math.nan,))

    def steady_state(contenders: Mapping[str, measure.Contender]) -> dict[str, measure.Timing]:
        return {name: measure.Timing((run(1),)) for name, run in contenders.items()}

    # What only a GPU could answer: its capability, and the version of its cuDNN.
    implementations._hopper_problem = lambda: None
    fused_attention_stablehlo.check_cudnn_version = lambda: 91000
    flash_attention._device_problem = lambda dtype, head_dim: flash_attention._version_problem()
    for module in (measure, benchmark, quantizers, attentions):  # each has its own name of them
        module.jax_contender = contender
        module.steady_state = steady_state
    benchmark.cold_kernels = cold_kernels
    benchmark.load_rivals = lambda path, what, load=benchmark.load_rivals: rivals(path, what, load)
    # arrays of the full size, of which only shapes are there
    jax.eval_shape(lambda: benchmark.main(arguments))
    for function, shapes in programs:
        jax.jit(function, compiler_options=measure.COMPILER_OPTIONS).lower(*shapes).compile()
    print(f"{len(programs)} programs compiled for an H100")
    return 0


def rivals(path: Path, what: str, load: Callable[[Path, str], ModuleType]) -> ModuleType | None:
    """The file of rivals where it can be loaded; of one that needs torch with a GPU only that it is Python
    and has `what`.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    if not any(isinstance(node, ast.Import) and node.names[0].name == "torch" for node in tree.body):
        return load(path, what)
    if what not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
        raise UserError(f"gpu_dry: no rivals in {what}: got {path} without a function {what}.")
    print(f"{path} needs torch with CUDA: read, not run")
    return None


def check_engine(arguments: list[str]) -> int:
    """`jetrl_jax check-engine`."""
    from jetrl_jax.commands import check_engine as command

    if importlib.util.find_spec("vllm") is not None:
        return command.main(arguments)
    try:
        command.main(arguments)
    except UserError as error:
        if "vLLM is not installed" not in str(error):
            raise
    from jetrl_jax.diagnostics import trainer_operators

    rows = command.trainer_rows(contract := command.load_contract(), "float32", "deepgemm")
    rows += command.operator_rows(contract, command.TRAINER, trainer_operators.run, "native")
    print(command.table(rows))
    return int(any(row.required and row.different for row in rows))


def vllm_gap(arguments: list[str]) -> int:
    """`vllm_gap.py`."""
    from tests.benchmarks import vllm_gap as command

    if importlib.util.find_spec("vllm") is None:
        command.gaps = lambda policy, trainers, what, how: {}
        command.processor = platform.machine
        print("vLLM is not installed: no engine is started")
    sys.argv[1:] = arguments
    command.main()
    return 0


def train_flows(arguments: list[str]) -> int:
    """`train_flows.py`: the configs as they are; the runs with the words behind `THEN`, too."""
    from tests.benchmarks import train_flows as command

    split = arguments.index(THEN) if THEN in arguments else len(arguments)
    command.options(arguments[:split])
    return command.main(arguments[:split] + arguments[split + 1 :])


COMMANDS: dict[str, Command] = {
    "pytest": collect,
    "pallas_kernels.bench": bench,
    "jetrl_jax check-engine": check_engine,
    "tests/benchmarks/vllm_gap.py": vllm_gap,
    "tests/benchmarks/train_flows.py": train_flows,
}
"""{module or script: its dry form}."""


def named(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command of a stage, as `COMMANDS` names it, and its arguments."""
    command, *arguments = words[1:] if words[0] == "-m" else words
    return (f"jetrl_jax {arguments[0]}", arguments[1:]) if command == "jetrl_jax" else (command, arguments)


def main(words: list[str]) -> int:
    """The words of a stage behind `python`. Raises UserError for a command without a dry form."""
    command, arguments = named(words)
    if command not in COMMANDS:
        raise UserError(f"gpu_dry: no dry form: got {command}, expected one of {', '.join(COMMANDS)}.")
    return COMMANDS[command](arguments)


if __name__ == "__main__":
    run_entry_point(main)
