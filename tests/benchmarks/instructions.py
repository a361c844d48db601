"""Instructions of the Hopper kernels as the assembler writes them, counted without a GPU.

    python tests/benchmarks/instructions.py [--only NAME ...]

Products and attention: the instructions of one turn of the loop that holds the tensor core's products, and of
these the ones behind the wait for a product, up to the end of the loop.  Quantisers: the instructions that a
thread executes, for each of its values; every loop counts as often as it turns.  Needs JAX's CUDA plugin and
the assembler and disassembler that Triton brings (Python 3.12, `make test-py312`).  `tests/kernels/
test_aot_instructions.py` holds some of these counts.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _triton := importlib.util.find_spec("triton"):
    TOOLS = Path(str(_triton.origin)).parent / "backends/nvidia/bin"
    os.environ["PATH"] += f"{os.pathsep}{TOOLS}"  # Mosaic and this file use one assembler: PATH's first


_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P[\dT]+)\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"\.L_x_\d+")
TENSOR = ("HGMMA", "QGMMA")


@dataclass(frozen=True)
class Loop:
    """Indices of the first and the last instruction of a loop; the last one jumps back."""

    first: int
    last: int


@dataclass(frozen=True)
class Assembly:
    """A kernel's instructions in order, by name without modifiers, and its loops by their first instruction."""

    names: tuple[str, ...]
    loops: tuple[Loop, ...]

    @classmethod
    def of(cls, text: str) -> Assembly:
        """From what nvdisasm prints."""
        names: list[str] = []
        labels: dict[str, int] = {}
        jumps: list[tuple[int, str]] = []
        for line in text.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(names)
            elif found := _LINE.match(line):
                if found[2] == "BRA" and (target := _TARGET.search(found[3])):
                    jumps.append((len(names), target[0]))
                names.append(found[2])
        backward = ((labels[target], place) for place, target in jumps if labels[target] < place)
        return cls(tuple(names), tuple(Loop(*ends) for ends in sorted(backward)))

    def counted(self, loop: Loop) -> Counter[str]:
        """The instructions of a loop by name, without modifiers."""
        return Counter(name.partition(".")[0] for name in self.names[loop.first : loop.last + 1])

    @property
    def product_loops(self) -> tuple[Loop, ...]:
        """The innermost loops with products of the tensor core."""
        found = [loop for loop in self.loops if any(self.counted(loop)[name] for name in TENSOR)]
        return tuple(
            loop for loop in found if not any(other != loop and _inside(other, loop) for other in found)
        )

    def behind_the_wait(self, loop: Loop) -> int:
        """Instructions of a loop after its last wait for a product."""
        waits = [
            place
            for place in range(loop.first, loop.last + 1)
            if self.names[place].startswith("WARPGROUP.DEPBAR")
        ]
        return loop.last - waits[-1]

    def executed(self, turns: tuple[int, ...]) -> int:
        """Instructions that a thread executes if the loops, in order, turn so often; branches are taken as
        not taken.
        """
        if len(turns) != len(self.loops):
            raise ValueError(
                f"Assembly.executed: loops: got {len(turns)} numbers of turns, expected {len(self.loops)}."
            )
        total = 0
        for place in range(len(self.names)):
            times = 1
            for loop, turn in zip(self.loops, turns, strict=True):
                times *= turn if loop.first <= place <= loop.last else 1
            total += times
        return total


def _inside(inner: Loop, outer: Loop) -> bool:
    return outer.first <= inner.first and inner.last <= outer.last


def tools() -> Path | None:
    """The folder with Triton's `ptxas` and `nvdisasm`, None without Triton."""
    found = importlib.util.find_spec("triton")
    folder = Path(str(found.origin)).parent / "backends/nvidia/bin" if found else None
    return folder if folder is not None and (folder / "nvdisasm").is_file() else None


def assembly(ptx: str) -> Assembly:
    """The instructions of a kernel's program text for sm_90a."""
    folder = tools()
    if folder is None:
        raise RuntimeError("assembly: no disassembler: expected Triton's (Python 3.12's pinned versions).")
    with tempfile.TemporaryDirectory(prefix="sass_") as directory:
        source, image = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        subprocess.run(["ptxas", "-arch=sm_90a", "-O3", source, "-o", image], check=True)
        listed = subprocess.run(
            [folder / "nvdisasm", "-c", image], check=True, capture_output=True, text=True
        )
    return Assembly.of(listed.stdout)
