"""Error messages for mistakes in a config: what is wrong, where, got, expected, hint and meaning."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

from jetrl_jax.config.schema import LISTS, Path, Place, dotted, look_up, split, suggest, value_in
from jetrl_jax.config.types import INT32_MAX, Problem, show
from jetrl_jax.config.yaml_text import Mark, Source, labelled
from jetrl_jax.errors import UserError

_WHAT = {
    "literal_error": "not one of the choices",
    "union_tag_invalid": "not one of the choices",
    "finite_number": "not a finite number",
    "string_unicode": "half a character (a lone surrogate)",
}
_RANGE = re.compile("(greater|less)_than(_equal)?|multiple_of|(string_)?too_short")
_TYPES = {bool: "a boolean", int: "a whole number", float: "a number", type(None): "null"}
_TYPES |= {str: "text", dict: "a section", list: "a list", tuple: "a list"}
_MEANT = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
_NUMBER = re.compile(r"[-+]?(\d[\d_, ]*)?\.?\d+([eE][-+]?\d+)?")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+\D?.*")


def field_problem(error: Mapping[str, Any], source: Source) -> Problem:
    """One entry of ``ValidationError.errors()`` as a `Problem`."""
    path, kind, value = without_kinds(error["loc"]), error["type"], error["input"]
    where, exact = source.mark(path).where, source.marks.get(path, Mark(""))
    if kind == "invalid_key" or path[-1:] == ("[key]",):
        section = path[:-2] if path[-1] == "[key]" else path[:-1]
        return Problem(dotted(section), "a key that is not text", show(value), "a name", where=where)
    place = look_up(path, source.data)
    if kind == "union_tag_invalid":  # whose kind stands in its place, or in its field
        path, value = (*path, place.tag), value[place.tag]
        place, exact = look_up(path, source.data), source.marks.get(path, exact)
        where = exact.where or where
    got = exact.got() or show(value)
    if kind == "extra_forbidden":
        return _unknown_key(path, got, source)
    what = _WHAT.get(kind, "out of range" if _RANGE.fullmatch(kind) else "wrong type")
    expected = place.words
    hint = _hint(value, exact, place)
    if kind == "value_error":
        what, expected = error["ctx"]["error"].args
    elif kind == "missing":  # blamed on a --set of the section's kind
        of_section = [inner for inner in source.marks if inner[:-1] == path[:-1] and source.is_set(inner)]
        where = source.mark(of_section[0]).where if of_section else where
        what, got, hint = "missing", "nothing", ""
    elif kind == "less_than_equal" and error["ctx"]["le"] == INT32_MAX:
        expected += f", at most {INT32_MAX}"
    elif what == "wrong type":
        because = ", because it stands in quotes" if exact.quoted else ""
        got += f" ({_TYPES.get(type(value), type(value).__name__)}{because})"
    return Problem(dotted(path), what, got, expected, hint, where)


def without_kinds(loc: Path) -> Path:
    """A location of pydantic's without the names of kinds that it adds after a section of several kinds."""
    path: Path = ()
    named = False
    for part in loc:
        if not named:
            path = (*path, part)
            place = look_up(path)
        named = not named and len(place.kinds) > 1
    return path


def is_of_replaced_kind(path: Path, source: Source) -> bool:
    """Whether a field comes from the file and belongs to a kind that a ``--set`` has replaced."""
    parent = look_up(path[:-1], source.data)
    if not parent.having(path[-1]) or source.is_set(path):
        return False
    kind = parent.kinds[parent.kind_of(value_in(source.data, path[:-1]))]
    named_by = [parent.tag] if parent.tag else kind.get("required", [])
    return any(source.is_set((*path[:-1], name)) for name in named_by)


def _unknown_key(path: Path, got: str, source: Source) -> Problem:
    """The problem of a key that its section does not have; it may belong to another kind of the section."""
    where, parent = source.mark(path).where, look_up(path[:-1], source.data)
    having = parent.having(path[-1])
    if not having:
        return Problem(dotted(path), "unknown key", hint=suggest(path, source.data), where=where)
    home = f"{parent.tag} {', '.join(having)}".strip()
    kind = f"{parent.tag} {parent.kind_of(value_in(source.data, path[:-1]))}".strip()
    what = f"{path[-1]} belongs to {home}; this is {kind}"
    return Problem(dotted(path), what, got, f"the field left out, or {home}", where=where)


def _hint(value: Any, mark: Mark, place: Place) -> str:
    """How to correct the likely mistake; "" if got and expected say enough."""
    text = value if isinstance(value, str) else ""
    if place.type in ("choice", "section", "object", *LISTS) and re.match(r"\w+:\S", text):
        return "a space is missing after the colon"
    if place.choices:
        close = difflib.get_close_matches(str(value).replace("-", "_"), place.choices, n=1, cutoff=0.5)
        return f"did you mean {close[0]}?" if close else ""
    if value is None:
        return "remove the line" + (", or put fields under it" if place.kinds else " for the default")
    if place.type == "boolean":
        if text.lower() in ("true", "false"):
            return "remove the quotes" if mark.quoted else f"write {text.lower()}"
        meant = _MEANT.get(text.lower())
        return f"write {meant}: yes, no, on and off are text in YAML 1.2" if meant else ""
    if place.type in ("integer", "number") and _NUMBER.fullmatch(text.strip()):
        plain = re.sub("[_ ]", "", text).replace(",", "" if _THOUSANDS.fullmatch(text) else ".")
        return f"remove the quotes: {plain}" if mark.quoted else f"write {plain}"
    if place.type == "integer" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}" if abs(value) < 1e15 else ""
    if place.type == "string" and not text:
        if isinstance(value, dict | tuple | list):
            return "text that begins with { or [ needs quotes"
        return f'put it in quotes: "{mark.raw}"' if mark.raw else ""
    if place.type in LISTS and isinstance(value, dict):
        return 'each entry of a list begins with "- "'
    return ""


def raise_all(source: Source, name: str) -> None:
    """Raises one `UserError` with all problems, in the order of the file and then of the command line."""
    placed = [dataclasses.replace(problem, where=_place(problem, source)) for problem in source.problems]
    problems = sorted(dict.fromkeys(placed), key=lambda problem: _reading_order(problem.where, source))
    if problems:
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        told = [_paragraph(problem, name, source) for problem in problems]
        end = "Nothing was started. All fields: python -m jetrl_jax config"
        message = "\n\n".join([f"{count} in the config", *told, end])
        raise UserError(message.encode("utf-8", "backslashreplace").decode())


def _place(problem: Problem, source: Source) -> str:
    """Where the problem was found, or else where one of the fields that it involves was written."""
    for path in map(split, () if problem.where else problem.involves):
        mark = source.marks.get(path)
        around = source.marks.get(path[:-1], Mark(""))
        if mark is not None or around.raw is not None:  # a kind by itself
            return (mark or around).where
    return problem.where


def _reading_order(where: str, source: Source) -> tuple[int, int]:
    if where in source.overrides:
        return 1, source.overrides.index(where)
    line = re.search(r":(\d+)$", where)
    return (0, int(line.group(1))) if line else (2, 0)


def _paragraph(problem: Problem, name: str, source: Source) -> str:
    place = look_up(split(problem.path), source.data)
    has_default = place.type not in ("section", "array") and "default" in place.node
    default = f" Default: {place.default}." if has_default else ""
    lines = {"got": problem.got, "expected": problem.expected, "hint": problem.hint}
    if problem.path and problem.what != "unknown key":
        lines["meaning"] = place.meaning + default
    told = [labelled(label, text) for label, text in lines.items() if text]
    return "\n".join([": ".join(filter(None, (problem.where or name, problem.path, problem.what))), *told])
