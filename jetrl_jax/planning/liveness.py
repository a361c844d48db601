"""Peak memory of a traced program, computed from its jaxpr by a model of XLA's buffer assignment on a GPU.

A compiled program's memory is arguments + outputs + temporaries.  Arguments and outputs follow from shapes,
temporaries from the values that are live at the same time.  Here a program is flattened (calls inlined,
common subexpressions merged, dead code dropped), and its operations run in the order in which they are
written:

    dots, collectives, gathers, scatters, loops, kernels    have their operands and results in memory
    reductions                                              read through element-wise operations, write one
    element-wise operations, broadcasts, slices             are fused into their readers, unless the result
                                                            is read by an operation of the first kind, or is
                                                            read more than once and is no larger than the
                                                            values from which it would be recomputed
    reshapes, transposes                                    share their operand's memory

A value is live from the operation that makes it to the last one that reads it, directly or through fused
operations.  An element-wise result takes the place of an operand that is read for the last time.  Values of
more than three axes (scores of attention) are an exception, since a dot needs their axes in its own order.
Such a value is written once for each dot if only dots read it.  XLA's own order, its choices of fusion and
its joining of small collectives are not modelled further; `python -m jetrl_jax plan --check-target` prints
the difference (see docs/scaling.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

ALIASES = {"reshape", "squeeze", "expand_dims", "transpose", "stop_gradient", "optimization_barrier"}
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"}
COLLECTIVES = {"all_gather", "reduce_scatter", "psum", "psum_invariant", "all_to_all", "ppermute", "pmax"}
LOOPS = {"scan", "while", "cond"}
IN_PLACE = LOOPS | {"scatter-add", "scatter", "dynamic_update_slice"}
MERGED_AXES = 3  # with more axes, a dot needs them in its own order
IN_MEMORY = COLLECTIVES | IN_PLACE | {"dot_general", "sort", "cumsum", "pallas_call", "ffi_call"}


@dataclass(eq=False)
class Value:
    """A value of the flattened program.

    size: in bytes; maker: the operation that computes it, None for arguments and constants.
    source: the value whose memory it shares, None if it has its own.
    material: whether it is written to memory (else it is fused away).
    """

    size: int
    shape: tuple[int, ...]
    dtype: str
    maker: Operation | None = None
    source: Value | None = None
    material: bool = False

    @property
    def root(self) -> Value:
        """The value that owns this value's memory."""
        value = self
        while value.source is not None:
            value = value.source
        return value


@dataclass(eq=False)
class Operation:
    """An operation of the flattened program.

    name: the primitive; order: its number in the program; axes: mesh axes of a collective.
    times: how often it runs; body, turns: body and length of a scan.
    inner, inner_live: bytes and values that a loop's body holds besides its operands and results.
    """

    name: str
    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)
    inner: int = 0
    inner_live: tuple[Value, ...] = ()
    axes: tuple[str, ...] = ()
    order: int = 0
    times: int = 1
    body: Any = None
    turns: int = 1


@dataclass(frozen=True)
class Peak:
    """The fullest point of a program: bytes of temporaries, and the live values, largest first."""

    temporaries: int
    live: tuple[Value, ...]


def peak(jaxpr: Any, *, body_constants: int | None = None) -> Peak:
    """The fullest point of a closed or open jaxpr; the program's arguments and outputs are not counted.

    Args:
      jaxpr: the program of one device; inside `jax.shard_map` shapes are those of a device.
      body_constants: None, or for a loop's body the number of its first arguments that are the same in every
        turn.  The body's results take the places of its other arguments if they can, else they count.
    """
    program = _Flattened()
    arguments, outputs = program.run(jaxpr)
    live = _without_dead_code(program.operations, outputs)
    reads = _materialise(live, outputs)
    return _sweep(live, reads, arguments[body_constants:] if body_constants is not None else None, outputs)


def collectives(jaxpr: Any) -> list[Operation]:
    """The collectives of a program, in order; those in a `scan` are repeated for each of its turns."""
    program = _Flattened()
    _, outputs = program.run(jaxpr)
    found = []
    for operation in _without_dead_code(program.operations, outputs):
        if operation.name in COLLECTIVES:
            found.append(operation)
        if operation.body is not None:
            for inner in collectives(operation.body):
                inner.times *= operation.turns
                found.append(inner)
    return found


class _Flattened:
    """Builds the list of operations of a jaxpr with calls inlined."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._seen: dict[Any, list[Value]] = {}

    def run(self, jaxpr: Any) -> tuple[list[Value], list[Value]]:
        """Flattens a whole jaxpr; returns (arguments, outputs)."""
        arguments = [_value(variable.aval, material=True) for variable in _open(jaxpr).invars]
        return arguments, self.inline(jaxpr, arguments)

    def inline(self, jaxpr: Any, arguments: Sequence[Value]) -> list[Value]:
        """Adds the operations of `jaxpr`; returns its outputs."""
        jaxpr = _open(jaxpr)
        values: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        values |= {variable: _value(variable.aval, material=True) for variable in jaxpr.constvars}

        def read(atom: Any) -> Value:
            return _value(atom.aval, material=True) if hasattr(atom, "val") else values[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            values.update(zip(equation.outvars, self._equation(equation, inputs), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[Value]) -> list[Value]:
        name = equation.primitive.name
        body = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
        if body is not None and name not in IN_MEMORY:
            # the inside is recomputed and never merged with operations outside
            if name in ("remat2", "checkpoint"):
                inputs = [self._barrier(one) for one in inputs]
            elif name == "shard_map":
                inputs = [_value(variable.aval, material=True) for variable in _open(body).invars]
            return self.inline(body, inputs)
        key = None
        constant = all(hasattr(atom, "val") for atom in equation.invars)  # made again at each reader
        if name not in LOOPS and name != "pallas_call" and not constant:
            literals = tuple(str(atom.val) if hasattr(atom, "val") else "" for atom in equation.invars)
            named = tuple("" if text else id(value) for text, value in zip(literals, inputs, strict=True))
            key = (name, named, literals, str(sorted((k, str(v)) for k, v in equation.params.items())))
            if key in self._seen:
                return self._seen[key]
        operation = Operation(name, inputs, order=len(self.operations))
        operation.outputs = [_value(variable.aval, maker=operation) for variable in equation.outvars]
        if name in COLLECTIVES:
            axes = equation.params.get("axes", equation.params.get("axis_name", ()))
            operation.axes = (axes,) if isinstance(axes, str) else tuple(axes)
        if name in ALIASES:
            for value, source in zip(operation.outputs, inputs, strict=True):
                value.source = source
        if name in LOOPS:
            inner = max(_bodies(equation), key=lambda one: one.temporaries)
            operation.inner = inner.temporaries
            operation.inner_live = inner.live
            if name == "scan":
                operation.body = equation.params["jaxpr"]
                operation.turns = equation.params["length"]
        self.operations.append(operation)
        if key is not None:
            self._seen[key] = operation.outputs
        return operation.outputs

    def _barrier(self, value: Value) -> Value:
        """A value with the same memory, across which nothing is fused."""
        operation = Operation("optimization_barrier", [value], order=len(self.operations))
        operation.outputs = [Value(value.size, value.shape, value.dtype, maker=operation, source=value)]
        self.operations.append(operation)
        return operation.outputs[0]


def _bodies(equation: Any) -> list[Peak]:
    """The fullest points of a loop's body, or of a condition's branches."""
    params = equation.params
    if equation.primitive.name == "scan":
        if "num_consts" in params:  # up to jax 0.11
            constants = params["num_consts"]
        else:
            constants = len(jax.tree.leaves(params["ft_in"][0], is_leaf=lambda leaf: leaf is None))
        return [peak(params["jaxpr"], body_constants=constants)]
    if equation.primitive.name == "while":
        return [peak(params["body_jaxpr"], body_constants=params["body_nconsts"])]
    return [peak(branch) for branch in params["branches"]]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _value(aval: Any, **options: Any) -> Value:
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    return Value(math.prod(shape) * getattr(dtype, "itemsize", 4), shape, str(dtype), **options)


def _without_dead_code(operations: list[Operation], outputs: Sequence[Value]) -> list[Operation]:
    """The operations that an output needs."""
    needed = {id(value) for value in outputs} | {id(value.root) for value in outputs}
    kept = []
    for operation in reversed(operations):
        if any(id(value) in needed for value in operation.outputs):
            kept.append(operation)
            for value in operation.inputs:
                needed.add(id(value))
                while value.source is not None:
                    value = value.source
                    needed.add(id(value))
    return kept[::-1]


def _materialise(operations: list[Operation], outputs: Sequence[Value]) -> dict[int, frozenset[Value]]:
    """Decides which values are in memory; returns operation id -> the values in memory that it reads."""
    forced = {value.root for value in outputs}
    readers: dict[Value, list[Operation]] = defaultdict(list)
    uses: dict[Value, int] = defaultdict(int)
    for operation in reversed(operations):
        if operation.name in ALIASES:
            if operation.name == "optimization_barrier":
                forced.update(value.root for value in operation.inputs)
            continue
        fused = operation.name not in IN_MEMORY | REDUCTIONS
        for root in {value.root for value in operation.inputs}:
            readers[root].append(operation)
            result = operation.outputs[0]
            uses[root] += uses[result] if fused and result.size > root.size else 1
            if operation.name in IN_MEMORY and not (operation.name == "dot_general" and _widened(root)):
                forced.add(root)
    cones: dict[int, frozenset[Value]] = {}
    # rows of a table and values made only of them are read from the table again each time
    looked_up: set[Value] = set()
    for operation in operations:
        if operation.name in ALIASES:
            continue
        roots = {value.root for value in operation.inputs}
        sources = frozenset().union(*((root,) if root.material else cones[id(root.maker)] for root in roots))
        cones[id(operation)] = sources
        again = sum(source.size for source in sources)
        for value in operation.outputs:
            if (
                operation.name == "dot_general"
                and value not in forced
                and _has_epilogue(operation, readers[value])
            ):
                continue
            always = operation.name in IN_MEMORY | REDUCTIONS or value in forced
            if not always and (
                operation.name == "gather"
                or (roots & looked_up and all(_given(root) for root in roots - looked_up))
            ):
                looked_up.add(value)
                continue
            value.material = always or (uses[value] > 1 and value.size <= again)
            dots = [reader for reader in readers[value] if reader.name == "dot_general"]
            if len(value.shape) > MERGED_AXES and len(dots) == len(readers[value]) > 1:
                value.size *= len(dots)
    return cones


def _given(value: Value) -> bool:
    """Whether a value is an argument or made only of constants."""
    return value.maker is None or all(one.root.maker is None for one in value.maker.inputs)


def _widened(value: Value) -> bool:
    """Whether a value is a converted narrower value; a dot converts it while loading."""
    maker = value.maker
    return maker is not None and maker.name == "convert_element_type" and maker.inputs[0].size < value.size


def _has_epilogue(dot: Operation, readers: list[Operation]) -> bool:
    """Whether only one element-wise operation reads a dot's result; it is then done while writing."""
    value = dot.outputs[0]
    if len(value.shape) > MERGED_AXES or len(readers) != 1 or readers[0].name in IN_MEMORY | REDUCTIONS:
        return False
    others = [one for one in readers[0].inputs if one.root is not value]
    return readers[0].outputs[0].shape == value.shape and _there_before(others, dot.order)


def _there_before(values: list[Value], order: int) -> bool:
    """Whether everything in memory that the values are computed from is made before operation `order`."""
    seen: set[int] = set()
    while values:
        maker = values.pop().root.maker
        if maker is None or maker.order < order or maker.order in seen:
            continue
        if maker.name in IN_MEMORY | REDUCTIONS:
            return False
        seen.add(maker.order)
        values += maker.inputs
    return True


def _sweep(
    operations: list[Operation],
    reads: dict[int, frozenset[Value]],
    carried: list[Value] | None,
    outputs: Sequence[Value],
) -> Peak:
    """Runs the operations in order and finds the fullest point.

    carried: a loop's arguments, whose places may be reused.
    """
    made = [operation for operation in operations if any(value.material for value in operation.outputs)]
    last = {value: position for position, operation in enumerate(made) for value in reads[id(operation)]}
    results = {value.root for value in outputs}
    mine = {value for operation in made for value in operation.outputs if value.material}
    counted = mine if carried is not None else mine - results
    given = set(carried or ())
    ending: dict[int, list[Value]] = defaultdict(list)
    for value, position in last.items():
        if (value in counted or value in given) and value not in results:
            ending[position].append(value)
    now = most = 0
    live: dict[Value, None] = {}
    freed: list[Value] = []
    fullest: tuple[Value, ...] = ()
    for position, operation in enumerate(made):
        dying = ending[position]
        reusable = operation.name in IN_PLACE or operation.name not in IN_MEMORY | REDUCTIONS
        for value in operation.outputs:
            if not value.material or value not in counted:
                continue
            free = dying if reusable and len(value.shape) <= MERGED_AXES else ()
            place = next((one for one in free if one.size == value.size), None)
            # a result of a loop's turn may take the place of an argument that is no longer read
            if place is None and value in results:
                place = next((one for one in freed if one.size == value.size), None)
                if place is not None:
                    freed.remove(place)
                    continue
            if place is None:
                now += value.size
                live[value] = None
                continue
            dying.remove(place)
            if place in live:  # otherwise the place belongs to an argument, which is not counted
                del live[place]
                live[value] = None
        if now + operation.inner > most:
            most, fullest = now + operation.inner, (*live, *operation.inner_live)
        for value in (*dying, *(one for one in operation.outputs if one not in last and one not in results)):
            if value in live:
                del live[value]
                now -= value.size
            elif value in given:
                freed.append(value)
    return Peak(most, tuple(sorted(fullest, key=lambda value: -value.size)))
