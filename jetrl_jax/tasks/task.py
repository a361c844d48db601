"""What a task is: prompts with answers in two disjoint splits, and a verifier that scores a completion.

``build_task`` turns the ``task`` section of a config into one of

    arithmetic      built-in problem families, no dependency          `jetrl_jax.tasks.arithmetic`
    reasoning_gym   any dataset of the library by name                `jetrl_jax.tasks.reasoning_gym`
    jsonl, parquet, datasets   records with prompt and answer fields  `jetrl_jax.tasks.records`
    gsm8k           the JSONL files of GSM8K                          `jetrl_jax.tasks.gsm8k`
    function        a user's ``module:function``                      this file

No prompt of the held-out split is a training prompt, whatever the seed.  Everything here raises `UserError` for
bad input, and a training split may be generated on access: ``task.train[i]`` is a function of the config, the
seed and ``i`` alone, which is what makes a resumed run see the same data.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jetrl_jax.config import TaskSection
from jetrl_jax.errors import UserError
from jetrl_jax.tasks import verify

_SHOWN = 10  # broken records named in an error


@dataclass(frozen=True)
class Example:
    """One problem: the prompt as the tokenizer receives it, the answer, and the text a perfect policy would write."""

    prompt: str
    answer: Any
    solution: str = ""
    id: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    source: str = field(default="", compare=False)  # where it was read ("file:line"), for messages


@runtime_checkable
class Task(Protocol):
    """Prompts in two disjoint splits and their verifier.

    Optional attributes: ``separate_process`` (True where ``verify`` can hang or uses signals, so that it is run in
    a worker process), ``verifier()`` (a small picklable ``(completion, example) -> float`` for that worker, instead
    of the pickled task) and ``notes`` (sentences for the record of the run).
    """

    @property
    def name(self) -> str:
        """What the record of a run calls it."""
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
        """Score of a completion, usually 0 or 1; None where it cannot be judged.

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


@dataclass(frozen=True)
class ListTask:
    """A task whose examples are at hand, scored by a named verifier of `jetrl_jax.tasks.verify`."""

    name: str
    train: Sequence[Example]
    eval: Sequence[Example]
    verifier_name: str = "exact_match"
    notes: tuple[str, ...] = ()

    @property
    def separate_process(self) -> bool:
        """Whether the verifier needs a worker process."""
        return self.verifier_name in verify.NEEDS_PROCESS

    def verifier(self) -> Callable[[str, Example], float | None]:
        """The verifier alone, picklable."""
        return verify.VERIFIERS[self.verifier_name]

    def verify(self, completion: str, example: Example) -> float | None:
        """Score by the named verifier; None where the answer cannot be judged."""
        return self.verifier()(completion, example)


def build_task(section: TaskSection, seed: int) -> Task:
    """Builds the task of a config.

    ``seed`` moves the training problems of generated tasks; the held-out problems do not depend on it, so that
    runs of several seeds are compared on the same items and none has trained on another's.
    Raises `UserError` naming the field, file and line, option or missing extra.
    """
    return _BUILDERS[section.kind](section, seed)


def format_prompt(template: str, text: str) -> str:
    """The template with ``{prompt}`` replaced; other braces stay as they are."""
    return template.replace("{prompt}", text)


def check_options(where: str, options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raises `UserError` for a key outside ``allowed``, with a suggestion."""
    for key in options:
        if key not in allowed:
            close = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UserError(f"{where}: unknown option: got task.options.{key}, expected one of {', '.join(sorted(allowed))}.{hint}")


def option_int(where: str, options: Mapping[str, Any], key: str, default: int, low: int, high: int) -> int:
    """A whole number among the options, checked."""
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{where}: bad option: got task.options.{key}={value!r}, expected a whole number from {low} to {high}.")
    return value


def missing_extra(where: str, package: str, extra: str) -> UserError:
    """The one error for a package of an extra that is not installed."""
    return UserError(f"{where}: needs the package {package}, which is not installed. Install it with: pip install 'jetrl-jax[{extra}]'")


def raise_broken(name: str, problems: list[str]) -> None:
    """One `UserError` with the first ten sentences and the count of the rest, if there is any."""
    if problems:
        rest = len(problems) - _SHOWN
        lines = problems[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        raise UserError(f"{name}: {len(problems)} broken record{'s' * (len(problems) > 1)}:\n  " + "\n  ".join(lines))


def load_object(where: str, target: str) -> Any:
    """The object named ``module:attribute``; the working directory is importable, as with ``python -m``.

    Raises `UserError` where the name has another form, the module cannot be imported or has no such attribute.
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
            raise UserError(f"{where}: {module_name!r} has no {attribute!r}: got {target!r}, expected module:function.")
        found = getattr(found, part)
    return found


def as_task(dataset: Any, section: TaskSection, name: str = "dataset") -> Task:
    """A task from what a user has made: a `Task`, rows with prompt and answer, or ``{"train": rows, "eval": rows}``.

    Rows are dicts in a list or a `datasets.Dataset`; without ``eval``, ``section.eval_fraction`` of them is held out.  Their
    verifier is ``section.options["verifier"]``, their worked solution the field ``section.options["solution_field"]``; other
    options are those of the task that this one stands for.
    Raises `UserError` for broken rows, an empty split, a prompt in both splits of a task whose examples are lists, and an option
    that is nearly one of the two, or that a `Task` with a verifier of its own has no use for.
    """
    from jetrl_jax.tasks import records

    for key in section.options:
        idle = key in records.ROW_OPTIONS and hasattr(dataset, "verify")
        meant = [] if key in records.ROW_OPTIONS else difflib.get_close_matches(str(key), records.ROW_OPTIONS, n=1)
        if idle or meant:
            why = f"{name} is a Task with a verifier and solutions of its own; remove it" if idle else f"Did you mean {meant[0]!r}?"
            raise UserError(f"as_task: option without an effect: got task.options.{key}, expected none such. {why}")
    if hasattr(dataset, "verify"):
        return _checked(dataset, name)
    if isinstance(dataset, Mapping) and set(dataset) == {"train", "eval"}:
        return records.task_from_rows(name, dataset["train"], dataset["eval"], section)
    if isinstance(dataset, Mapping | str | bytes) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"as_task: {name} is no task: got {type(dataset).__name__}, expected a Task (name, train, eval, verify), "
            'a list of dicts or {"train": [...], "eval": [...]}.'
        )
    return records.task_from_rows(name, dataset, None, section)


def _checked(task: Any, name: str) -> Task:
    missing = [attribute for attribute in ("name", "train", "eval") if not hasattr(task, attribute)]
    if missing:
        raise UserError(
            f"as_task: {name} is no task: got {type(task).__name__} without {', '.join(missing)}, expected name, train, eval, verify."
        )
    sizes = len(task.train), len(task.eval)
    if not all(sizes):
        raise UserError(
            f"as_task: {name} has an empty split: got {sizes[0]} training and {sizes[1]} held-out examples, expected some in each."
        )
    if isinstance(task.train, list | tuple):
        shared = {e.prompt for e in task.train} & {e.prompt for e in task.eval}
        if shared:
            raise UserError(
                f"as_task: {name} has {len(shared)} prompts in both splits, the first {min(shared)!r}; expected disjoint splits."
            )
    checked: Task = task
    return checked


def _function(section: TaskSection, seed: int) -> Task:
    """What a user's function returns, as a task; it is called with task.options and, where it takes one, the seed."""
    if section.name is None:
        raise UserError("build_task: no function given: got task.name=None, expected module:function.")
    where = f"build_task: function {section.name}"
    function = load_object(where, section.name)
    if not callable(function):
        raise UserError(f"{where}: not callable: got {type(function).__name__}, expected a function.")
    kwargs = dict(section.options)
    try:
        if "seed" in inspect.signature(function).parameters:
            kwargs.setdefault("seed", seed)
    except ValueError:
        pass  # a built-in without a signature
    try:
        made = function(**kwargs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where}: called with {', '.join(kwargs) or 'nothing'}, it failed: {type(error).__name__}: {error}") from error
    return as_task(made, section.model_copy(update={"options": {}}), section.name)  # they were the function's arguments


def _arithmetic(section: TaskSection, seed: int) -> Task:
    from jetrl_jax.tasks import arithmetic

    return arithmetic.build(section, seed)


def _reasoning_gym(section: TaskSection, seed: int) -> Task:
    from jetrl_jax.tasks import reasoning_gym

    return reasoning_gym.build(section, seed)


def _records(section: TaskSection, seed: int) -> Task:
    from jetrl_jax.tasks import records

    return records.build(section)


def _gsm8k(section: TaskSection, seed: int) -> Task:
    from jetrl_jax.tasks import gsm8k

    return gsm8k.build(section)


_BUILDERS: dict[str, Callable[[TaskSection, int], Task]] = {
    "arithmetic": _arithmetic,
    "reasoning_gym": _reasoning_gym,
    "jsonl": _records,
    "parquet": _records,
    "datasets": _records,
    "gsm8k": _gsm8k,
    "function": _function,
}
