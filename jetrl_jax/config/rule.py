"""What a broken rule of the config is, and what it is told as."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Rule:
    """What a field demands of itself and of those that it involves;
    `field` is blamed where it does not hold.
    """

    holds: bool
    field: str
    what: str
    expected: str
    hint: str = ""
    involves: tuple[str, ...] = ()
