"""Reads the text of a compiled program: which kernels it launches, and how many bytes each of them moves.

XLA prints an optimised program as computations, each a list of instructions.  An instruction of the entry
computation, or of a loop's body, is a launch: a fusion, a copy, a product, or the custom call of a kernel.
Parameters, tuples and bitcasts only name memory and are not launches.  A launch reads each operand and writes
each result once, with two exceptions: of an operand that a fusion only slices or gathers, only those parts
are read; of an operand that is updated in place (`dynamic-update-slice`, `scatter`), only the update is
written.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"}
FREE |= {"partition-id", "replica-id", "add-dependency", "domain"}
NAMES = {
    "bitcast",
    "reshape",
    "get-tuple-element",
    "copy",
}  # inside a fusion, these have the values of their operand and move no bytes of their own
PARTS = {"slice", "dynamic-slice", "gather"}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # operation -> index of the operand with the update

_HEAD = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|body|to_apply|branch_computations)=\{?%([\w.\-]+)")
_TURNS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Shape:
    """An array's dtype, as XLA names it, and its axes."""

    dtype: str
    axes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.axes)

    @property
    def bytes(self) -> int:
        """Size in memory; 0 for a token."""
        bits = re.search(r"\d+", self.dtype)
        width = {"pred": 8, "token": 0}.get(self.dtype) if bits is None else int(bits.group())
        assert width is not None, self.dtype
        return self.size * width // 8


@dataclass(frozen=True)
class Instruction:
    """One line of the text: results, operation, names of the operands, and the rest of the line."""

    name: str
    results: tuple[Shape, ...]
    operation: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def called(self) -> str | None:
        """Name of the computation that the instruction runs, if any."""
        found = _CALLED.search(self.rest)
        return found[1] if found else None

    @property
    def target(self) -> str | None:
        """Name of the kernel that a custom call runs; None for other instructions."""
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found[1] if found else None

    @property
    def source(self) -> str:
        """The functions of the traced program that the instruction comes from, as a path."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1] if found else ""

    @property
    def bytes(self) -> int:
        """Size of the results."""
        return sum(shape.bytes for shape in self.results)

    def axes(self, name: str) -> tuple[int, ...]:
        """The attribute `name` as a list of axes, such as `lhs_contracting_dims`."""
        found = re.search(rf"{name}=\{{([\d,]*)\}}", self.rest)
        return tuple(map(int, found[1].split(","))) if found and found[1] else ()


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel: the instruction, how often it runs, and the bytes that one run moves.

    operands: shapes of the operands.
    dots: (dtype of the operands, FLOPs) of each product that XLA computes in the kernel.
    """

    instruction: Instruction
    times: int
    bytes: int
    operands: tuple[Shape, ...]
    dots: tuple[tuple[str, float], ...]


class Program:
    """An optimised program, parsed.

    Args:
      text: the result of `jax.stages.Compiled.as_text()`.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        entry = ""
        inside: Computation = {}
        for line in text.splitlines():
            if head := _HEAD.match(line):
                inside = self.computations.setdefault(head[1], {})
                entry = head[1] if line.startswith("ENTRY ") else entry
            elif found := _LINE.match(line):
                inside[found[2]] = _instruction(found[2], found[3], root=found[1] is not None)
        if not entry:
            raise ValueError("Program: no entry computation: expected the text of a compiled program.")
        self.entry = self.computations[entry]

    def launches(self) -> Iterator[Launch]:
        """All launches of the program; a loop of unknown length is counted as one iteration."""
        yield from self._launches(self.entry, 1)

    def _launches(self, computation: Computation, times: int) -> Iterator[Launch]:
        for instruction in computation.values():
            operation, called = instruction.operation, instruction.called
            if operation in FREE or operation.endswith(("-done", "-update")):
                continue
            if operation in ("while", "call", "conditional", "async-start"):
                assert called is not None, instruction
                turns = _TURNS.search(instruction.rest)
                yield from self._launches(
                    self.computations[called], times * int(turns[1]) if turns else times
                )
                continue
            inner = self.computations[called] if called and operation.startswith("fusion") else {}
            operands = _shapes(instruction, computation)
            moved = sum(shape.bytes for shape in operands) + _written(instruction, computation)
            if inner:
                moved = _moved(inner, operands)
            kernel = next((one for one in inner.values() if one.operation == "custom-call"), None)
            if kernel is not None:  # one that is given a slice of an array
                instruction, operands = kernel, _shapes(kernel, inner)
            yield Launch(instruction, times, moved, operands, tuple(_dots(inner, instruction, computation)))


def _shapes(instruction: Instruction, computation: Computation) -> tuple[Shape, ...]:
    """Of the operands."""
    return tuple(shape for name in instruction.operands for shape in computation[name].results)


def _instruction(name: str, text: str, *, root: bool) -> Instruction:
    """Parses the part of a line after the equals sign."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opening = text.index("(", end)
    closing = _closing(text, opening)
    results = tuple(Shape(dtype, _numbers(axes)) for dtype, axes in _SHAPE.findall(text[:end]))
    operation = text[end:opening].strip()
    operands = tuple(_NAME.findall(text[opening:closing]))
    inside = text[opening:closing] if operation == "parameter" else ""
    return Instruction(name, results, operation, operands, inside + text[closing + 1 :], root)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"Program: a parenthesis does not close: got {text!r}.")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _moved(fusion: Computation, operands: tuple[Shape, ...]) -> int:
    """Bytes that a fusion reads and writes."""
    users: dict[str, list[Instruction]] = defaultdict(list)
    for instruction in fusion.values():
        for name in set(instruction.operands):
            users[name].append(instruction)

    def read(name: str) -> int:
        """Bytes that the users of a value read of it, at most its size."""
        total = 0
        for user in users[name]:
            first = user.operands[0] == name
            if user.operation in NAMES:
                total += read(user.name)
            elif user.operation in PARTS and first:
                total += user.bytes
            elif not (user.operation in UPDATES and first):
                total += fusion[name].bytes
        return min(total, fusion[name].bytes)

    given = [one for one in fusion.values() if one.operation == "parameter"]
    (root,) = (one for one in fusion.values() if one.root)
    results = [fusion[name] for name in root.operands] if root.operation == "tuple" else [root]
    return sum(read(one.name) for one in given) + sum(_written(one, fusion) for one in results)


def _written(instruction: Instruction, computation: Computation) -> int:
    """Bytes that are written for a value: its size, or that of the update if it is updated in place."""
    while instruction.operation in NAMES and computation[instruction.operands[0]].operation in UPDATES:
        instruction = computation[instruction.operands[0]]
    place = UPDATES.get(instruction.operation)
    return instruction.bytes if place is None else computation[instruction.operands[place]].bytes


def _dots(fusion: Computation, alone: Instruction, computation: Computation) -> Iterator[tuple[str, float]]:
    """(dtype of the operands, FLOPs) of every product in a fusion, or of an instruction outside fusions."""
    found = [(one, fusion) for one in fusion.values()] or [(alone, computation)]
    for one, scope in found:
        if one.operation == "dot":
            left = scope[one.operands[0]].results[0]
            depth = math.prod(left.axes[axis] for axis in one.axes("lhs_contracting_dims"))
            yield left.dtype, 2.0 * one.results[0].size * depth
