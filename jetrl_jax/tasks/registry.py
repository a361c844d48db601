"""Builds the task that a config names, or that a user passes.

``build_task`` turns the ``task`` section of a config into one of

    arithmetic      built-in problem families, no dependency          `jetrl_jax.tasks.arithmetic`
    reasoning_gym   any dataset of the library by name                `jetrl_jax.tasks.reasoning_gym`
    jsonl, parquet, datasets   records with prompt and answer fields  `jetrl_jax.tasks.records`
    gsm8k           the JSONL files of GSM8K                          `jetrl_jax.tasks.gsm8k`
    function        a user's ``module:function``                      this file
    environment     episodes of several turns                         `jetrl_jax.tasks.environment`

The held-out split and the training split have no prompt in common, for any seed.  Everything here raises
`UserError` for bad input.  A training split may be generated on access.  Then ``task.train[i]`` depends only
on the config, the seed and ``i``, so that a resumed run sees the same data.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from jetrl_jax.config.task import (
    ArithmeticSection,
    EnvironmentSection,
    FunctionSection,
    Gsm8kSection,
    ReasoningGymSection,
    RowsSection,
    TaskSection,
)
from jetrl_jax.errors import UserError
from jetrl_jax.tasks.base import Task, load_object


def build_task(section: TaskSection, seed: int) -> Task:
    """Builds the task of a config.

    ``seed`` changes the training problems of generated tasks.  It does not change the held-out problems, so
    that runs with several seeds are compared on the same items, and no run trains on them.
    Raises `UserError` naming the field, the file and line, the option or the missing extra.
    """
    if isinstance(section, FunctionSection):
        return _function(section, seed)
    if isinstance(section, EnvironmentSection):
        from jetrl_jax.tasks.environment import EnvironmentTask

        return EnvironmentTask(section, seed)
    from jetrl_jax.tasks import arithmetic, gsm8k, reasoning_gym, records

    if isinstance(section, ArithmeticSection):
        return arithmetic.build(section, seed)
    if isinstance(section, ReasoningGymSection):
        return reasoning_gym.build(section, seed)
    return gsm8k.build(section) if isinstance(section, Gsm8kSection) else records.build(section)


def as_task(dataset: Any, section: TaskSection, name: str = "dataset") -> Task:
    """A task from a user's object: a `Task`, rows, or ``{"train": rows, "eval": rows}``.

    Rows are dicts with prompt and answer, in a list or a `datasets.Dataset`.  Without ``eval``, the share
    ``section.eval_fraction`` of them is held out.  ``section.options["verifier"]`` names their verifier and
    ``section.options["solution_field"]`` the field of the worked solution.  Other options belong to the task
    that this one replaces, and are ignored.

    Raises `UserError` for broken rows, an empty split, a prompt in both splits (if the examples are lists),
    an option that is a near miss of these two, or one of them beside a `Task`, which has its own verifier.
    """
    from jetrl_jax.tasks import records

    for key in section.options:
        idle = key in records.ROW_OPTIONS and hasattr(dataset, "verify")
        meant = (
            []
            if key in records.ROW_OPTIONS
            else difflib.get_close_matches(str(key), records.ROW_OPTIONS, n=1)
        )
        if idle or meant:
            why = (
                f"{name} is a Task with a verifier and solutions of its own; remove it"
                if idle
                else f"Did you mean {meant[0]!r}?"
            )
            raise UserError(
                f"as_task: option without an effect: got task.options.{key}, expected none such. {why}"
            )
    if hasattr(dataset, "verify"):
        return _checked(dataset, name)
    rows = section if isinstance(section, RowsSection) else _rows(section)
    if isinstance(dataset, Mapping) and set(dataset) == {"train", "eval"}:
        return records.task_from_rows(name, dataset["train"], dataset["eval"], rows)
    if isinstance(dataset, Mapping | str | bytes) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise UserError(
            f"as_task: {name} is no task: got {type(dataset).__name__}, expected a Task (name, train, "
            "eval, verify), "
            'a list of dicts or {"train": [...], "eval": [...]}.'
        )
    return records.task_from_rows(name, dataset, None, rows)


def _rows(section: TaskSection) -> RowsSection:
    """How to read rows that replace another kind of task: by its fields, and defaults for those it lacks."""
    shared = {
        field: getattr(section, field)
        for field in RowsSection.model_fields
        if field in type(section).model_fields
    }
    return RowsSection.model_validate(shared | {"kind": "function"})


def _checked(task: Any, name: str) -> Task:
    missing = [attribute for attribute in ("name", "train", "eval") if not hasattr(task, attribute)]
    if missing:
        raise UserError(
            f"as_task: {name} is no task: got {type(task).__name__} without {', '.join(missing)}, "
            "expected name, train, eval, verify."
        )
    sizes = len(task.train), len(task.eval)
    if not all(sizes):
        raise UserError(
            f"as_task: {name} has an empty split: got {sizes[0]} training and {sizes[1]} held-out "
            "examples, expected some in each."
        )
    if isinstance(task.train, list | tuple):
        shared = {e.prompt for e in task.train} & {e.prompt for e in task.eval}
        if shared:
            raise UserError(
                f"as_task: {name} has {len(shared)} prompts in both splits, the first {min(shared)!r}; "
                "expected disjoint splits."
            )
    checked: Task = task
    return checked


def _function(section: FunctionSection, seed: int) -> Task:
    """The task returned by a user's function, called with task.options and, if it takes one, the seed."""
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
        raise UserError(
            f"{where}: called with {', '.join(kwargs) or 'nothing'}, it failed: {type(error).__name__}: "
            f"{error}"
        ) from error
    # the options were the function's arguments
    return as_task(made, section.model_copy(update={"options": {}}), section.name)
