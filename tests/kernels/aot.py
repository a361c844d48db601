"""Compiling kernels for an H100 that is not there, and reading what ptxas said about them.

The CUDA plugin of JAX compiles for a described GPU without a driver: `jetrl_jax/planning/h100.txtpb` is the
description. Mosaic GPU writes the assembler's report of each kernel into the directory that
`MOSAIC_GPU_DUMP_TO` names.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels.gemm.config import TuningConfig
from pallas_kernels.scaled_array import ScaledArray, grid_shape

DESCRIPTION = Path(__file__).parents[2] / "jetrl_jax/planning/h100.txtpb"
ROWS, SQUARE = (1, 128), (128, 128)
"""Blocks of a quantised matrix that share a scale."""


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What ptxas said about one kernel.

    registers: per thread. spilled_bytes: stores and loads together. stack_bytes: local arrays and spills.
    serialized: wgmma instructions wait for each other (warning C7514 and its relatives). text: the whole
      report.
    ptx: the assembler's input.
    """

    registers: int
    spilled_bytes: int
    stack_bytes: int
    serialized: bool
    text: str
    ptx: str = ""

    @property
    def clean(self) -> bool:
        """Nothing spilled, nothing on the stack, nothing serialised."""
        return not (self.spilled_bytes or self.stack_bytes or self.serialized)

    def float_operations(self) -> dict[str, int]:
        """How often FP32 is multiplied, added and both at once ("fma") in the program text; the blocks of K
        are a loop.
        """
        return float_operations(self.ptx)


def float_operations(ptx: str) -> dict[str, int]:
    """`KernelReport.float_operations` of a program text."""
    return {name: len(re.findall(rf"\b{name}(?:\.rn)?\.f32\b", ptx)) for name in ("mul", "add", "fma")}


def missing() -> str | None:
    """Why nothing can be compiled for a GPU here, None where it can."""
    if (
        importlib.util.find_spec("jax_plugins") is None
        or importlib.util.find_spec("jax_plugins.xla_cuda13") is None
    ):
        return "no CUDA plugin of JAX: install the extra 'aot' (jax-cuda13-plugin, jax-cuda13-pjrt)"
    if jax.__version_info__[:2] < (0, 11):
        return f"compiling for a described GPU is tested from JAX 0.11 on, this is {jax.__version__}"
    return None


def compile_for_h100(function: Callable[..., Any], *arguments: Any) -> list[KernelReport]:
    """Compiles `jit(function)` of these `jax.ShapeDtypeStruct`s, or trees of them; the reports of its Mosaic
    GPU kernels, in no order.

    Raises whatever JAX, Mosaic or ptxas raise, and RuntimeError where no kernel reported: Mosaic compiles a
    kernel once in a process, so ask for each once (`functools.cache`).
    """
    return program_and_reports(function, *arguments)[1]


def compile_product(
    tuning: TuningConfig | None,
    order: str,
    out_dtype: str,
    b_block: tuple[int, int] = SQUARE,
    sizes: tuple[int, int, int] = (1024, 4096, 4096),
) -> KernelReport:
    """The one kernel of a product of these sizes M, N, K."""
    if tuning and b_block == SQUARE:
        # not read there: the same kernel whatever it is
        tuning = dataclasses.replace(tuning, scale_columns=32)
    return _compile_product(tuning, order, out_dtype, b_block, sizes)


@functools.cache
def _compile_product(
    tuning: TuningConfig | None,
    order: str,
    out_dtype: str,
    b_block: tuple[int, int],
    sizes: tuple[int, int, int],
) -> KernelReport:
    from pallas_kernels.gemm import mosaic

    m, n, k = sizes
    (report,) = compile_for_h100(
        lambda a, b: mosaic.matmul(a, b, jnp.dtype(out_dtype), order, False, tuning),
        scaled(m, k, ROWS),
        scaled(n, k, b_block),
    )
    return report


def program_and_reports(function: Callable[..., Any], *arguments: Any) -> tuple[str, list[KernelReport]]:
    """The optimised HLO of `jit(function)` and what `compile_for_h100` gives."""
    with _dump() as directory:
        program = str(_compile(function, arguments).as_text())
        paths = sorted(directory.glob("*.ptxas"))
        reports = [
            parse(path.read_text(encoding="utf-8"), path.with_suffix(".ptx").read_text(encoding="utf-8"))
            for path in paths
        ]
    if not reports:
        raise RuntimeError(
            "compile_for_h100: no kernel reported: expected a Mosaic GPU kernel that this process has "
            "not compiled before."
        )
    return program, reports


def program_for_h100(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The optimised HLO of `jit(function, **options)` of these `jax.ShapeDtypeStruct`s, or trees of them."""
    with _dump():
        return str(_compile(function, arguments, **options).as_text())


def h100_mesh(devices: int = 1) -> jax.sharding.Mesh:
    """A mesh of described devices, one axis "device"."""
    text = DESCRIPTION.read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology=f"1x{devices}x1")
    return topologies.make_mesh(topo=topology, mesh_shape=(devices,), axis_names=("device",))


def _compile(function: Callable[..., Any], arguments: tuple[Any, ...], **options: Any) -> Any:
    """The executable for the described device."""
    sharding = jax.sharding.NamedSharding(_one_h100(), jax.sharding.PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )
    return jax.jit(function, **options).lower(*shapes).compile()


def parse(text: str, ptx: str = "") -> KernelReport:
    """The report of one kernel from what ptxas read and wrote. Raises ValueError where the assembler's words
    are not those known.
    """
    registers = re.search(r"Used (\d+) registers", text)
    memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if registers is None or memory is None:
        raise ValueError(
            f"parse: unknown report: got {text!r}, expected ptxas' lines on registers and spills."
        )
    stack, stores, loads = map(int, memory.groups())
    # C7519 is none: wgmma in a loop, before which ptxas writes the `warpgroup.arrive` that the first one
    # alone got.
    serialized = re.search(r"C75(?!19)\d\d|wgmma[^\n]*seriali[sz]", text) is not None
    return KernelReport(int(registers.group(1)), stores + loads, stack, serialized, text, ptx)


def scaled(rows: int, k: int, block: tuple[int, int]) -> ScaledArray:
    """The shapes of a quantised matrix."""
    scale = jax.ShapeDtypeStruct(grid_shape((rows, k), block), jnp.float32)
    return ScaledArray(jax.ShapeDtypeStruct((rows, k), jnp.float8_e4m3fn), scale, block)


@functools.cache
def _one_h100() -> jax.sharding.Mesh:
    return h100_mesh()


@contextmanager
def _dump() -> Iterator[Path]:
    """A directory into which kernels are reported that are compiled, and not taken from a cache,
    meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="aot_") as directory:
        wanted = {"MOSAIC_GPU_DUMP_TO": directory, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        before = {name: os.environ.get(name) for name in wanted}
        cache = jax.config.jax_compilation_cache_dir
        os.environ.update(wanted)
        _set_cache(None)
        try:
            yield Path(directory)
        finally:
            _set_cache(cache)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _set_cache(directory: str | None) -> None:
    """Where compiled programs are kept from now on; nowhere, if None. JAX looks at its setting once unless
    told again.
    """
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()
