"""Mistakes in a config, in the user's words: what is wrong, where, got, expected,
hint and what the field means.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jetrl_jax.config.rule import Problem
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.schema import (
    FieldType,
    Path,
    about,
    belongs,
    dotted,
    look_up,
    split,
    suggest,
    type_of,
    value_in,
)
from jetrl_jax.config.types import INT32_MAX, show
from jetrl_jax.config.yaml_text import Mark, Source, labelled
from jetrl_jax.errors import UserError

_RANGE_ERRORS = (
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "too_short",
    "string_too_short",
    "too_long",
)
_NUMBER = re.compile(r"[-+]?(\d[\d_, ]*)?\.?\d+([eE][-+]?\d+)?")


def field_problem(error: Mapping[str, Any], source: Source) -> Problem:
    """One entry of ``ValidationError.errors()`` as a `Problem`."""
    path, kind = without_tags(tuple(error["loc"])), error["type"]
    mark = source.mark(path)
    where = mark.where if mark else ""
    if path[-1:] == ("[key]",) or kind == "invalid_key":
        return Problem(
            dotted(path[:-1] if len(path) == 1 else path[:-2]),
            "a key that is not text",
            show(error["input"]),
            "a name",
            where=where,
        )
    if kind == "extra_forbidden":
        return unknown_key(path, source, where, error["input"])
    found = look_up(path, source.data)
    expected = found.takes.in_words() if found else ""
    if kind == "missing":  # a --set of the section's kind asks for it
        where = next(
            (mark.where for place, mark in source.marks.items() if place[:-1] == path[:-1] and mark.from_set),
            where,
        )
        return Problem(dotted(path), "missing", "nothing", expected, where=where)
    exact = source.marks.get(path)
    if found is not None and kind == "union_tag_invalid":
        return _unknown_variant(path, found.takes, source, where)
    got = (exact.got() if exact else None) or show(error["input"])
    if kind == "config_value":
        return Problem(dotted(path), error["ctx"]["what"], got, error["ctx"]["expected"], where=where)
    what = (
        "not one of the choices"
        if kind == "literal_error"
        else "out of range"
        if kind in _RANGE_ERRORS
        else "wrong type"
    )
    if kind == "less_than_equal" and error["ctx"]["le"] == INT32_MAX:
        expected += f", at most {error['ctx']['le']}"
    if what == "wrong type":
        got += f" ({_name_of(error['input'], exact)})"
    return Problem(
        dotted(path),
        what,
        got,
        expected,
        _hint(error["input"], exact, found.takes if found else None),
        where=where,
    )


def without_tags(loc: Path) -> Path:
    """A place as pydantic has it, without the names of variants that it puts after a section that is one
    of several.
    """
    path: Path = ()
    within: FieldType | None = None
    for part in loc:
        if within is not None and len(within.sections) > 1:
            within = FieldType("section", variants=tuple(item for item in within.variants if item[0] == part))
            continue
        path = (*path, part)
        section = (
            RunConfig
            if within is None and len(path) == 1
            else within.sections[0]
            if within and within.sections
            else None
        )
        if isinstance(part, int):
            within = FieldType("section", variants=within.variants) if within else None
        else:
            within = (
                type_of(section, part)
                if section is not None and part in section.model_fields
                else FieldType("text")
            )
    return path


def unknown_key(path: Path, source: Source, where: str, value: Any) -> Problem:
    """A key that its section does not have: of another variant, or of none."""
    home = belongs(path, source.data)
    if home is None:
        return Problem(dotted(path), "unknown key", where=where, hint=suggest(path, source.data))
    exact = source.marks.get(path)
    what = f"{path[-1]} belongs to {home[0]}; this is {home[1]}"
    return Problem(
        dotted(path),
        what,
        (exact.got() if exact else None) or show(value),
        f"the field left out, or {home[0]}",
        where=where,
    )


def _unknown_variant(path: Path, kind: FieldType, source: Source, where: str) -> Problem:
    """A tag that names no variant of a section."""
    field = (*path, kind.tag)
    mark, value = source.marks.get(field) or source.marks.get(path), value_in(source.data, path)
    value = value.get(kind.tag) if isinstance(value, dict) else value
    choice = FieldType("choice", choices=tuple(label for label, _ in kind.variants))
    got = (mark.got() if mark else None) or show(value)
    return Problem(
        dotted(field),
        "not one of the choices",
        got,
        choice.in_words(),
        _hint(value, mark, choice),
        where=mark.where if mark else where,
    )


def _name_of(value: Any, mark: Mark | None) -> str:
    if isinstance(value, str):
        return "text, because it stands in quotes" if mark and mark.quoted else "text"
    if isinstance(value, dict):
        return "a section" if value else "an empty section"
    names = {
        bool: "a boolean",
        int: "a whole number",
        float: "a number",
        list: "a list",
        tuple: "a list",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def _hint(value: Any, mark: Mark | None, kind: FieldType | None) -> str:
    """What most likely went wrong, "" if there is nothing to say beyond got and expected."""
    if kind is None:
        return ""
    quoted = mark is not None and mark.quoted
    if kind.kind == "choice":
        if isinstance(value, str) and re.match(r"\w+:\S", value):
            return "a space is missing after the colon"
        close = difflib.get_close_matches(str(value).replace("-", "_"), kind.choices, n=1, cutoff=0.5)
        return f"did you mean {close[0]}?" if close else ""
    if isinstance(value, str):
        return _hint_for_text(value, quoted, kind)
    if value is None:
        return (
            "remove the line for the default"
            if not kind.variants
            else "remove the line, or put fields under it"
        )
    if kind.kind == "text":
        if isinstance(value, dict | list | tuple):
            return "text that begins with { or [ needs quotes"
        return f'put it in quotes: "{mark.raw}"' if mark and mark.raw else "put it in quotes"
    if kind.kind == "int" and isinstance(value, float) and value == int(value):
        return f"write {int(value)}" if abs(value) < 1e15 else ""
    if kind.kind == "list" and isinstance(value, dict):
        return 'each entry of a list begins with "- "'
    return ""


def _hint_for_text(value: str, quoted: bool, kind: FieldType) -> str:
    if kind.variants or kind.kind == "options":
        return "a space is missing after the colon" if re.match(r"\w+:\S", value) else ""
    if kind.kind == "bool":
        if value.lower() in ("true", "false"):
            return "remove the quotes" if quoted else f"write {value.lower()}"
        meant = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}.get(
            value.lower()
        )
        return f"write {meant}: yes, no, on and off are text in YAML 1.2" if meant else ""
    if kind.kind in ("int", "float") and _NUMBER.fullmatch(value.strip()):
        is_decimal_comma = re.fullmatch(r"[-+]?\d+,\d+", value) and not re.fullmatch(
            r"[-+]?\d{1,3},\d{3}", value
        )
        plain = value.replace(",", ".") if is_decimal_comma else re.sub(r"[_, ]", "", value)
        return f"remove the quotes: {plain}" if quoted else f"write {plain}"
    return ""


def raise_all(problems: Iterable[Problem], source: Source, name: str) -> None:
    """Raise one `UserError` that tells every problem, in the order of the file and then of the command
    line.
    """
    placed = [
        problem if problem.where else dataclasses.replace(problem, where=_place(problem, source))
        for problem in problems
    ]
    unique = list(dict.fromkeys(placed))
    if not unique:
        return
    unique.sort(key=lambda problem: _reading_order(problem, source))
    count = f"{len(unique)} problems" if len(unique) > 1 else "a problem"
    body = "\n\n".join(_paragraph(problem, name, source) for problem in unique)
    raise UserError(
        f"{count} in the config\n\n{body}\n\nNothing was started. All fields: python -m jetrl_jax config"
    )


def _place(problem: Problem, source: Source) -> str:
    """Where the blamed field, else one that made it wrong, was written."""
    for path in (problem.path, *problem.involves):
        mark = source.marks.get(split(path))
        if mark is None:  # a section that was named by its kind only
            outer = source.marks.get(split(path)[:-1])
            mark = outer if outer is not None and outer.raw else None
        if mark is not None:
            return mark.where
    return ""


def _reading_order(problem: Problem, source: Source) -> tuple[int, int]:
    if problem.where in source.overrides:
        return 1, source.overrides.index(problem.where)
    line = re.search(r":(\d+)$", problem.where)
    return (0, int(line.group(1))) if line else (2, 0)


def _paragraph(problem: Problem, name: str, source: Source) -> str:
    head = (
        f"{problem.where or name}: {problem.path}: {problem.what}"
        if problem.path
        else f"{problem.where or name}: {problem.what}"
    )
    lines = [("got", problem.got), ("expected", problem.expected), ("hint", problem.hint)]
    if problem.what != "unknown key":
        lines.append(("meaning", about(split(problem.path), source.data) if problem.path else ""))
    return "\n".join([head, *(labelled(label, text) for label, text in lines if text)])
