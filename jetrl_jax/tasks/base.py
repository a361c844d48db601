"""The interface of a task (examples in two disjoint splits, and a verifier), and helpers shared by tasks."""

from __future__ import annotations

import difflib
import importlib
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jetrl_jax.errors import UserError

_SHOWN = 10  # broken records named in an error


@dataclass(frozen=True)
class Example:
    """One problem: the prompt given to the tokenizer, the answer, and the text of a perfect solution."""

    prompt: str
    answer: Any
    solution: str = ""
    id: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    source: str = field(default="", compare=False)  # its place ("file:line"), for messages


@runtime_checkable
class Task(Protocol):
    """Prompts in two disjoint splits and their verifier.

    Optional attributes: ``separate_process`` (True if ``verify`` can hang or uses signals, so that it must
    run in a worker process), ``verifier()`` (a small picklable ``(completion, example) -> float`` for that
    worker, used instead of the pickled task) and ``notes`` (sentences for the record of the run).
    """

    @property
    def name(self) -> str:
        """The task's name in the record of a run."""
        ...

    @property
    def train(self) -> Sequence[Example]:
        """Examples to train on."""
        ...

    @property
    def eval(self) -> Sequence[Example]:
        """Held-out examples."""
        ...

    def verify(self, completion: str, example: Example) -> float | None:
        """Score of a completion, usually 0 or 1; None if it cannot be judged.

        A completion whose prompt ends inside a thought comes with ``<think>`` before it.
        """
        ...


class LazyExamples(Sequence[Example]):
    """``size`` examples made on access by ``make(index)``, a pure function of the index."""

    def __init__(self, size: int, make: Callable[[int], Example]):
        self._size = size
        self._make = make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._size))]
        position = operator.index(index)
        if not -self._size <= position < self._size:
            raise IndexError(f"LazyExamples: index {position} out of range for {self._size} examples")
        return self._make(position % self._size)

    def __iter__(self) -> Iterator[Example]:
        return (self._make(i) for i in range(self._size))


def format_prompt(template: str, text: str) -> str:
    """The template with ``{prompt}`` replaced; other braces stay as they are."""
    return template.replace("{prompt}", text)


def check_options(where: str, options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raises `UserError` for a key outside ``allowed``, with a suggestion."""
    for key in options:
        if key not in allowed:
            close = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UserError(
                f"{where}: unknown option: got task.options.{key}, expected one of "
                f"{', '.join(sorted(allowed))}.{hint}"
            )


def option_int(where: str, options: Mapping[str, Any], key: str, default: int, low: int, high: int) -> int:
    """A whole number from the options, checked against its range."""
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(
            f"{where}: bad option: got task.options.{key}={value!r}, expected a whole number from {low} "
            f"to {high}."
        )
    return value


def raise_broken(name: str, problems: list[str]) -> None:
    """Raises one `UserError` with the first ten problems and the number of the rest; none if no problems."""
    if problems:
        rest = len(problems) - _SHOWN
        lines = problems[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        raise UserError(
            f"{name}: {len(problems)} broken record{'s' * (len(problems) > 1)}:\n  " + "\n  ".join(lines)
        )


def load_object(where: str, target: str) -> Any:
    """The object named ``module:attribute``; the working directory is importable, as with ``python -m``.

    Raises `UserError` if the name has another form, the module cannot be imported, or lacks the attribute.
    """
    module_name, separator, attribute = target.partition(":")
    if not (separator and module_name and attribute):
        raise UserError(f"{where}: bad name: got {target!r}, expected module:function.")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(f"{where}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(
                f"{where}: {module_name!r} has no {attribute!r}: got {target!r}, expected module:function."
            )
        found = getattr(found, part)
    return found
