"""Timing on a GPU, which heats up, throttles and caches: protocols, and the data reported with a figure.

Steady state (protocol S): dense products run at the card's power cap, so a time depends on the work of the
100 ms before. Each contender first runs untimed until the card has settled; then a few bursts are timed. The
order of contenders is shuffled in each cycle, and the median of all bursts counts. Differences below 8 % are
noise between cards and days.

Cold: the time of a product of few rows is that of reading its weights. A program of many calls with different
weights, which together exceed the second-level cache, is timed kernel by kernel through CUPTI.

A contender is a function that makes a given number of calls back to back, and returns the seconds they took.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.implementations import gpu_problem

Contender = Callable[[int], float]

LOAD_S = 0.22
"""Seconds of untimed running before the first burst of a contender."""
BURST_S = 0.06
"""Seconds of a timed burst."""
COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
"""Compiler options of every timed program. By default XLA also compiles and times Triton forms of a BF16
product, 20 s a shape; cuBLASLt's own algorithms are still tried."""
BURSTS, CYCLES = 3, 2
"""The number of bursts of a contender in each cycle, and of cycles."""
L2_BYTES = 50 << 20
"""Bytes of the second-level cache of an H100 and an H200."""
_QUERY = "name,driver_version,power.limit,power.draw,clocks.sm,clocks.mem,temperature.gpu"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call of one contender, one value per burst or repetition."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance from the fastest to the slowest, as a fraction of the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.median


def steady_state(contenders: Mapping[str, Contender], seed: int = 0) -> dict[str, Timing]:
    """The timings by name, measured by protocol S (see the module docstring)."""
    order, shuffle = list(contenders), random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for run in contenders.values():
        run(1)  # compile
    for _ in range(CYCLES):
        shuffle.shuffle(order)
        for name in order:
            run, calls = contenders[name], 1
            elapsed = run(calls)
            while elapsed < LOAD_S / 4:
                calls = max(2 * calls, int(calls * LOAD_S / 4 / max(elapsed, 1e-9)))
                elapsed = run(calls)
            run(max(1, int(calls * LOAD_S / elapsed)))
            burst = max(1, int(calls * BURST_S / elapsed))
            seconds[name] += [run(burst) / burst for _ in range(BURSTS)]
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def jax_contender(function: Callable[..., Any], *arguments: Any) -> Contender:
    """Back-to-back calls of `jit(function)`, by the host's clock; JAX queues them, the last is awaited."""
    program = jax.jit(function, compiler_options=COMPILER_OPTIONS)

    def run(calls: int) -> float:
        jax.block_until_ready(program(*arguments))
        start = time.perf_counter()
        out = None
        for _ in range(calls):
            out = program(*arguments)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    return run


def copies_beyond_cache(nbytes: int) -> int:
    """The number of copies of `nbytes` that the second-level cache cannot keep between two rounds."""
    return max(2, -(-2 * L2_BYTES // nbytes) + 1)


def cold_kernels(
    function: Callable[[Any, Any], jax.Array], left: Any, rights: Sequence[Any], repetitions: int = 7
) -> Timing:
    """Seconds on the device per call of `function(left, right)`, over all its kernels, by right operand.

    Raises RuntimeError if CUPTI reports nothing.
    """
    from jax.experimental.mosaic.gpu import profiler  # here, as not every platform has it

    program = jax.jit(
        lambda left, rights: [function(left, right) for right in rights], compiler_options=COMPILER_OPTIONS
    )
    jax.block_until_ready(program(left, rights))
    seconds = []
    for _ in range(repetitions):
        _, milliseconds = profiler.measure(program)(left, rights)
        if milliseconds is None:
            raise RuntimeError(
                "cold_kernels: CUPTI saw no kernel: expected a CUDA device and a CUPTI library."
            )
        seconds.append(milliseconds / 1000 / len(rights))
    return Timing(tuple(seconds))


def require_gpu(command: str) -> None:
    """Ends the process with status 2 and one message if the kernels cannot run."""
    if problem := gpu_problem():
        print(f"{command}: needs a GPU that the Pallas kernels run on: {problem}.", file=sys.stderr)
        raise SystemExit(2)


def environment() -> dict[str, Any]:
    """Card, clocks and versions, for a report."""
    found: dict[str, Any] = {
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "device": jax.devices()[0].device_kind,
    }
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", "-i", "0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found |= dict(
            zip(_QUERY.split(","), (field.strip() for field in done.stdout.split(",")), strict=False)
        )
    return found


def write_json(
    path: Path, command: str, machine: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Writes a report: the command, the machine (`environment`), and a row per figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"command": command, "environment": dict(machine), "rows": list(rows)}
    beside = path.with_name(f"{path.name}.new")  # so that a kill leaves the old or the new report
    beside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def markdown(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], column: str, value: str) -> str:
    """A table with a line per combination of `keys`, and a column per value of `column`; gaps are dashes."""
    columns = list(dict.fromkeys(row[column] for row in rows))
    cells: dict[tuple[Any, ...], dict[Any, str]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in keys), {})[row[column]] = str(row[value])
    lines = ["| " + " | ".join([*keys, *columns]) + " |", "|" + "---|" * (len(keys) + len(columns))]
    lines += [
        "| " + " | ".join([*map(str, line), *(found.get(name, "-") for name in columns)]) + " |"
        for line, found in cells.items()
    ]
    return "\n".join(lines)
