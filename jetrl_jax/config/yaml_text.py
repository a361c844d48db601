"""Reads YAML text into plain values with their line numbers, and writes plain values as YAML.

A config is read by the core schema of YAML 1.2: only true and false are booleans, 1e-6 is a number, and
2024-01-01 and yes are text.  Duplicate keys, keys that are not text, anchors and aliases, tags and a second
document are rejected with their line.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from jetrl_jax.config.schema import Path, dotted
from jetrl_jax.config.types import Problem, cut, is_plain, show
from jetrl_jax.errors import UserError

WIDTH = 110  # of a message
_PREFIX = "tag:yaml.org,2002:"
_FIRST = "-+.0123456789"
# Tag, pattern and first characters; the digits are those that Python turns into a number and back.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?\d{1,3000}|0o[0-7]{1,3000}|0x[\da-fA-F]{1,3000}", _FIRST),
    ("float", r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", _FIRST),
)
# Text that needs no quotes, for readers of YAML 1.1 too.
_WORD = re.compile(r"(?!(true|false|null|yes|no|on|off|y|n)\Z)[a-z][\w./-]*", re.ASCII | re.IGNORECASE)
SYNTAX_HINT = (
    "fields of one section are indented by the same number of spaces, a colon is followed by a space, and "
    'text needs quotes that holds ": " or begins with one of * & ! % @ ` { ['
)


class _Loader(yaml.SafeLoader):
    """Composes nodes by the core schema of YAML 1.2; rejects anchors, aliases and tags."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own protocol

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if event.anchor is not None or getattr(event, "tag", None) is not None:
            refused = "tags (!)" if event.anchor is None else "anchors and aliases (& and *)"
            problem = f"{refused} have no place in a config"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


for _name, _pattern, _first in _SCALARS:
    _compiled = re.compile(rf"(?:{_pattern})\Z", re.ASCII)
    _Loader.add_implicit_resolver(_PREFIX + _name, _compiled, [*_first, ""])


@dataclass(frozen=True)
class Mark:
    """Where a value was written ("file:line", or the ``--set`` itself), and a scalar's text."""

    where: str
    raw: str | None = None
    quoted: bool = False

    def got(self) -> str:
        """The scalar's text; "" for a section or list."""
        if self.raw is None:
            return ""
        return cut(json.dumps(self.raw, ensure_ascii=False) if self.quoted else self.raw or "nothing")


@dataclass
class Source:
    """Plain values, the marks of their paths, the problems found so far, and the overrides in order."""

    data: Any = None
    marks: dict[Path, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)

    def mark(self, path: Path) -> Mark:
        """The mark of `path`, or else of the innermost section around it that has one."""
        around = (self.marks.get(path[:end]) for end in range(len(path), -1, -1))
        return next((mark for mark in around if mark is not None), Mark(""))

    def forget(self, path: Path) -> None:
        """Removes the marks of `path` and of everything below it."""
        self.marks = {place: mark for place, mark in self.marks.items() if place[: len(path)] != path}

    def is_set(self, path: Path) -> bool:
        """Whether the value at `path` comes from the command line."""
        return self.mark(path).where in self.overrides

    def report(self, path: Path, what: str, where: str, got: str, expected: str, hint: str = "") -> None:
        """Adds a problem at `path`."""
        self.problems.append(Problem(dotted(path), what, got, expected, hint, where=where))

    def read(self, text: str, name: str, at: Path = (), where: str = "") -> Any:
        """The value of the YAML document `name`, None if it is empty; also records its marks.

        at: path of the document in the config; where: the place for all marks (default: name:line).  Raises
        `UserError` if the text is not YAML.  Duplicate keys and keys that are not text become problems.
        """
        try:
            node = yaml.compose(text, _Loader)
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
            raise UserError(_syntax_message(error, text, name)) from None
        if node is None:
            return None
        return self._value(node, at, lambda mark: where or f"{name}:{mark.line + 1}")

    def _value(self, node: yaml.Node, path: Path, place: Callable[[yaml.Mark], str]) -> Any:
        if isinstance(node, yaml.ScalarNode):
            self.marks[path] = Mark(place(node.start_mark), node.value, quoted=node.style is not None)
            return _scalar(node.tag.removeprefix(_PREFIX), node.value)
        self.marks.setdefault(path, Mark(place(node.start_mark)))
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, i), place) for i, item in enumerate(node.value)]
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, where, inner = key_node.value, place(key_node.start_mark), (*path, key_node.value)
            if key_node.tag != _PREFIX + "str" or not is_plain(key):
                got = key or "nothing" if isinstance(key_node, yaml.ScalarNode) else "a list or section"
                self.report(path, "a key that is not text", where, got, "a name, in quotes if it is one")
            elif key in result:
                got = f"a second {key}; the first: {self.marks[inner].where}"
                self.report(inner, "stands twice", where, got, "each key once", "keep one of them")
            else:
                if not isinstance(value_node, yaml.ScalarNode):
                    self.marks[inner] = Mark(where)  # a section is where its key is
                result[key] = self._value(value_node, inner, place)
        return result


def write_yaml(data: Mapping[str, Any], notes: Mapping[str, Any], path: str = "", indent: str = "") -> str:
    """Nested plain values as YAML that `Source.read`, and readers of YAML 1.1, read back as equal values.

    notes: dotted path -> a value to write as a comment after the one at that path.
    """
    text = ""
    for name, value in data.items():
        place, start = f"{path}{name}", f"{indent}{_in_line(name)}:"
        if isinstance(value, dict) and value:
            text += f"{start}\n{write_yaml(value, notes, place + '.', indent + '  ')}"
        elif isinstance(value, list | tuple) and value:
            text += f"{start}\n" + "".join(f"{indent}- {_in_line(item)}\n" for item in value)
        else:
            text += f"{start} {_in_line(value)}{f'  # {notes[place]}' if place in notes else ''}\n"
    return text


def _in_line(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_in_line(key)}: {_in_line(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_in_line, value))}]"
    if isinstance(value, float):
        return re.sub(r"^([^.]+)e", r"\1.0e", show(value))  # 1.0e-6 is a number in YAML 1.1 too
    if isinstance(value, str) and _WORD.fullmatch(value):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def _scalar(tag: str, text: str) -> Any:
    if tag == "int":
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if tag == "float":
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    return {"null": None, "bool": text.lower() == "true"}.get(tag, text)


def _syntax_message(error: Exception, text: str, name: str) -> str:
    """PyYAML's error with line and column, the line's text and a caret."""
    if not isinstance(error, yaml.MarkedYAMLError):  # a control character, or one escaped that does not exist
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        return f"{name}:{line}: not YAML: {str(error).splitlines()[0]}"
    marks = [mark for mark in (error.problem_mark, error.context_mark) if mark is not None]
    shown = {mark: mark.get_snippet() or "" for mark in marks}
    mark = next((mark for mark in marks if shown[mark].strip(" ^\n")), marks[-1])  # at the end: its beginning
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    place = f"{name}:{mark.line + 1}:{mark.column + 1}"
    return f"{place}: YAML syntax: {problem}\n\n{shown[mark]}\n\n{labelled('hint', SYNTAX_HINT)}"


def labelled(label: str, text: str) -> str:
    """One line of a message, "  label     text", wrapped."""
    lines = textwrap.wrap(text, WIDTH - 12, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines), " " * 12).replace(" " * 12, f"  {label:<10}", 1)
