"""Instructions of the Hopper kernels as the assembler writes them, counted without a GPU.

    python tests/benchmarks/instructions.py [--only PART ...]      kernels whose name holds one of the parts

Products and attention: the instructions of one turn of the innermost loop that holds products of the tensor
cores, and those of them behind the wait for a product.  Quantisers: the instructions that a thread executes,
loops as often as they turn, for each of its values, and the microseconds that they take to issue on an H100
beside those of the bytes.  Needs JAX's CUDA plugin, and the disassembler that Triton brings (the pinned
versions of Python 3.12); the assembler is the one on PATH, else Triton's.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
_triton = importlib.util.find_spec("triton")
TOOLS = None if _triton is None else Path(str(_triton.origin)).parent / "backends/nvidia/bin"
if (
    TOOLS is not None
):  # behind what is there: Mosaic writes for the first assembler on PATH, which is used here
    os.environ["PATH"] += f"{os.pathsep}{TOOLS}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from jetrl_jax.planning.rates import RATES  # noqa: E402
from pallas_kernels.gemm.config import DECODE_64, DECODE_256, SWAP, TRAINING, WGRAD_ROWS  # noqa: E402
from tests.kernels import aot  # noqa: E402

ISSUED_PER_S = 132 * 4 * 32 * 1.755e9  # instructions of threads: schedulers of an H100 SXM at its boost clock
SPIN = 8  # a loop of no more instructions waits for a barrier
TENSOR = ("HGMMA", "QGMMA")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P[\dT]+)\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"\.L_x_\d+")


@dataclass(frozen=True)
class Assembly:
    """A kernel's instructions in order, and its loops: (first, last) instruction, the last jumps back."""

    names: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, text: str) -> Assembly:
        """From what nvdisasm prints.

        A jump back without a condition comes from a place that a barrier's wait was moved to: no loop.
        """
        names: list[str] = []
        labels: dict[str, int] = {}
        jumps: list[tuple[int, str]] = []
        for line in text.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(names)
            elif found := _LINE.match(line):
                target = _TARGET.search(found[3])
                if found[2] == "BRA" and found[1] and target:
                    jumps.append((len(names), target[0]))
                names.append(found[2])
        backward = {(labels[target], place) for place, target in jumps if labels[target] < place - SPIN}
        return cls(tuple(names), tuple(sorted(backward)))

    def counted(self, loop: tuple[int, int]) -> Counter[str]:
        """The instructions of a loop by name, without modifiers."""
        return Counter(name.partition(".")[0] for name in self.names[loop[0] : loop[1] + 1])

    @property
    def product_loop(self) -> tuple[int, int]:
        """The shortest loop with a product of the tensor core."""
        found = [loop for loop in self.loops if any(self.counted(loop)[name] for name in TENSOR)]
        return min(found, key=lambda loop: loop[1] - loop[0])

    @property
    def behind_the_wait(self) -> int:
        """Instructions of the product's loop after its last wait for a product."""
        first, last = self.product_loop
        waits = [at for at in range(first, last + 1) if self.names[at].startswith("WARPGROUP.DEPBAR")]
        return last - waits[-1]

    def executed(self, turns: tuple[int, ...]) -> int:
        """Instructions that a thread executes if the loops, by their first instruction, turn so often."""
        if len(turns) != len(self.loops):
            raise ValueError(
                f"Assembly.executed: loops: got {len(turns)} numbers of turns, expected one for each of "
                f"{self.loops}."
            )
        total = len(self.names)
        for (first, last), turn in zip(self.loops, turns, strict=True):
            total += (turn - 1) * (last - first + 1)
        return total


def problem() -> str | None:
    """Why no kernel can be disassembled here; None if one can."""
    return aot.missing() or (None if TOOLS else "no disassembler: Triton is not installed")


def assembly(ptx: str) -> Assembly:
    """The instructions of a kernel's program text for sm_90a."""
    assert TOOLS is not None  # `problem`
    with tempfile.TemporaryDirectory(prefix="sass_") as directory:
        source, image = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        quiet: dict[str, Any] = {"check": True, "capture_output": True, "text": True}
        subprocess.run(["ptxas", "-arch=sm_90a", "-O3", source, "-o", image], **quiet)
        return Assembly.of(subprocess.run([TOOLS / "nvdisasm", "-c", image], **quiet).stdout)


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _attention(name: str) -> list[Any]:
    from pallas_kernels.attention import mosaic, mosaic_backward

    q, kv = _array(1, 4096, 32, 128), _array(1, 4096, 8, 128)
    blocks, sums = _array(1, 32, dtype=jnp.int32), _array(1, 32, 4096, dtype=jnp.float32)
    cache = _array(64, 8, 2048, 128)
    return {
        "forward": [lambda *arrays: mosaic.causal_attention(*arrays)[0], q, kv, kv, blocks],
        "decode": [
            mosaic.cached_attention, _array(64, 1, 32, 128), cache, cache, _array(64, 1, dtype=jnp.int32)
        ],
        "backward": [mosaic_backward.causal_gradients, q, kv, kv, blocks, q, sums, q],
    }[name]  # fmt: skip


PRODUCTS: dict[str, Callable[[], list[aot.KernelReport]]] = {
    "FProp, DGrad": lambda: [aot.compile_product(TRAINING, "deepgemm", "bfloat16")],
    "FProp, DGrad, order triton": lambda: [aot.compile_product(TRAINING, "triton", "bfloat16")],
    "WGrad, X in blocks": lambda: [aot.compile_product(TRAINING, "deepgemm", "float32")],
    "WGrad by rows": lambda: [aot.compile_product(WGRAD_ROWS, "deepgemm", "float32", aot.ROWS)],
    "decode, 9 to 64 rows": lambda: [aot.compile_product(DECODE_64, "deepgemm", "bfloat16")],
    "decode, up to 256 rows": lambda: [aot.compile_product(DECODE_256, "deepgemm", "bfloat16")],
    "decode, up to 8 rows": lambda: [aot.compile_product(SWAP, "deepgemm", "bfloat16")],
    "attention forward": lambda: aot.compile_for_h100(*_attention("forward")),
    "attention decode": lambda: aot.compile_for_h100(*_attention("decode")),
    "attention backward": lambda: aot.compile_for_h100(*_attention("backward")),
}


@dataclass(frozen=True)
class Quantiser:
    """A quantiser: its program, turns of its loops, values (those that one thread has, all), bytes a value."""

    program: Callable[[], list[Any]]
    turns: tuple[int, ...]
    values: int
    bytes: float
    own: int = 64  # of a tile of 128 x 128 and 256 threads


def _quantise(width: int, inputs: int, *plan: str | None) -> list[Any]:
    from pallas_kernels.quantize import mosaic

    def run(*x: Any) -> Any:
        return mosaic.quantize(x, mosaic.Plan(*plan), "float32", False)

    return [run, *[_array(8192, width)] * inputs]


def _requantise() -> list[Any]:
    from pallas_kernels.quantize import mosaic_requantize

    def run(*arrays: Any) -> Any:
        return mosaic_requantize.requantize(*arrays, "float32", False)

    return [run, _array(8192, 4096, dtype=jnp.float8_e4m3fn), _array(32, 8192, dtype=jnp.float32)]


def _silu_gradients() -> list[Any]:
    from pallas_kernels.quantize import mosaic_silu

    def run(*arrays: Any) -> Any:
        return mosaic_silu.silu_gradients_quantize(*arrays, "float32", False)

    return [run, *[_array(8192, 12288)] * 3]


def _norm() -> list[Any]:
    from pallas_kernels.quantize import mosaic_norm

    def run(weight: Any, x: Any, residual: Any) -> Any:
        return mosaic_norm.rms_norm_quantize(x, weight, residual, 1e-6, "native", "float32", False)

    return [run, _array(4096), _array(8192, 4096), _array(8192, 4096)]


SMALL, LARGE = 8192 * 4096, 8192 * 12288
QUANTISERS = {
    "row": Quantiser(lambda: _quantise(4096, 1, "row", None), (2,), SMALL, 3),
    "row and column": Quantiser(lambda: _quantise(4096, 1, "row", "column"), (2, 2), SMALL, 4),
    "row and block": Quantiser(lambda: _quantise(4096, 1, "row", "block"), (2, 2), SMALL, 4),
    "requantise": Quantiser(_requantise, (2, 2), SMALL, 2),
    "RMSNorm, with residual": Quantiser(_norm, (2, 8, 8, 2, 2), SMALL, 7),
    "SiLU": Quantiser(lambda: _quantise(12288, 2, "row", None), (2, 2), LARGE, 5),
    "SiLU, row and block": Quantiser(lambda: _quantise(12288, 2, "row", "block"), (2, 2, 2), LARGE, 6),
    "SiLU's gradient, both ways": Quantiser(_silu_gradients, (4, 2, 2, 2, 2), LARGE, 10),
}  # bytes of scales left out


@functools.cache
def found(name: str) -> list[tuple[aot.KernelReport, Assembly]]:
    """A kernel's report and instructions; two of attention's backward, dq before dk and dv, which have more
    products.
    """
    reports = PRODUCTS[name]() if name in PRODUCTS else aot.compile_for_h100(*QUANTISERS[name].program())
    made = [(report, assembly(report.ptx)) for report in reports]
    return sorted(made, key=lambda pair: pair[0].ptx.count("wgmma.mma_async"))


def product_rows(name: str) -> list[list[Any]]:
    """The table's lines of a product or of attention."""
    rows = []
    for report, code in found(name):
        first, last = code.product_loop
        of = code.counted(code.product_loop)
        kinds = [
            sum(of[one] for one in names) for names in (TENSOR, ("FFMA",), ("FMUL",), ("LDS",), ("MUFU",))
        ]
        spilled = report.spilled_bytes
        rows.append([name, report.registers, spilled, last - first + 1, code.behind_the_wait, *kinds])
    return rows


def quantiser_row(name: str) -> list[Any]:
    """The table's line of a quantiser."""
    ((report, code),) = found(name)
    one = QUANTISERS[name]
    each = code.executed(one.turns) / one.own
    issue, memory = each * one.values / ISSUED_PER_S, one.bytes * one.values / RATES["memory"][0]
    times = [round(seconds * 1e6) for seconds in (issue, memory)]
    return [name, report.registers, report.spilled_bytes, round(each, 1), *times]


def main() -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n", 1)[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART")
    parts = parser.parse_args().only
    if reason := problem():
        print(f"instructions.py: {reason}", file=sys.stderr)
        return 2
    heads = {
        "kernel | registers | spilled bytes | loop | behind the wait | tensor | FFMA | FMUL | LDS | MUFU": PRODUCTS,
        "quantiser | registers | spilled bytes | a value | issue us | memory us": QUANTISERS,
    }
    for head, kernels in heads.items():
        print(f"| {head} |\n|{'---|' * (head.count('|') + 1)}")
        for name in (name for name in kernels if any(part in name for part in parts)):
            rows = product_rows(name) if name in PRODUCTS else [quantiser_row(name)]
            for row in rows:
                print("| " + " | ".join(map(str, row)) + " |", flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
