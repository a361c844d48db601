"""Entries of the tables in `jetrl_jax.config.rules.tables`, and what a broken one is reported as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jetrl_jax.config.run_config import RunConfig


@dataclass(frozen=True)
class Problem:
    """One mistake: where in the config (dotted path), what is wrong, what was got and expected, what to do.

    involves: other paths whose values made this a mistake; where: file:line or the ``--set`` that says it.
    """

    path: str
    what: str
    got: str = ""
    expected: str = ""
    hint: str = ""
    involves: tuple[str, ...] = ()
    where: str = ""
    no_effect: bool = False


@dataclass(frozen=True)
class Rule:
    """Fields that must fit together; the first one is blamed."""

    fields: tuple[str, ...]
    holds: Callable[[RunConfig], bool]
    what: str
    expected: Callable[[RunConfig], str]
    hint: str = ""


@dataclass(frozen=True)
class NoEffect:
    """Fields that do nothing while `idle` is true, as decided by `switches`."""

    fields: tuple[str, ...]
    switches: tuple[str, ...]
    idle: Callable[[RunConfig], bool]
    because: str
