"""YAML text into plain values that remember where they stand.

The YAML of a config is the core of YAML 1.2 that JSON users expect: only true and false are booleans, 1e-6 is
a number, 2024-01-01 and yes are text.  What makes a config unreadable or ambiguous is refused with its line:
duplicate keys, keys that are not text, anchors and aliases, tags, more than one document, nan and infinity.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

import yaml

from jetrl_jax.config.rule import Problem
from jetrl_jax.config.schema import Path, dotted
from jetrl_jax.errors import UserError

WIDTH = 110
MAX_DEPTH = 40
MAX_DIGITS = 300
_SKIP = object()
_PREFIX = "tag:yaml.org,2002:"
_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)
SYNTAX_HINT = (
    "fields of one section are indented by the same number of spaces, a colon is followed by a space, "
    "and text needs quotes that "
    'holds ": " or begins with one of * & ! % @ ` { ['
)


class _Loader(yaml.SafeLoader):
    """Composes nodes under the core schema of YAML 1.2, without anchors, aliases and tags."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own protocol
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases (& and *) have no place in a config",
                problem_mark=event.start_mark,
            )
        if event.tag is not None:
            raise yaml.MarkedYAMLError(
                problem="tags (!) have no place in a config", problem_mark=event.start_mark
            )
        if self.depth >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"values are nested more than {MAX_DEPTH} deep", problem_mark=event.start_mark
            )
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _name, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(
        _PREFIX + _name, re.compile(rf"(?:{_pattern})\Z"), [*_first, *([""] if _name == "null" else [])]
    )


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes wherever YAML 1.2 or YAML 1.1 would read something else than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _SCALARS:
    _Dumper.add_implicit_resolver(_PREFIX + _name, re.compile(rf"(?:{_pattern})\Z"), list(_first))


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    # 1e-06 -> 1e-6, then 1.0e-6, which YAML 1.1 reads too
    text = re.sub(r"e([-+])0*(\d)", r"e\1\2", repr(value))
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar(_PREFIX + "float", text)


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # Line breaks and odd spaces survive all readers as escapes only.
    plain = value.isprintable() and value == value.strip()
    return dumper.represent_scalar(_PREFIX + "str", value, style=None if plain else '"')


_Dumper.add_representer(float, _represent_float)
_Dumper.add_representer(str, _represent_text)


def write_yaml(data: Any) -> str:
    """Plain values as YAML that `read_yaml`, and readers of YAML 1.1, read back equal; one line per value."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)


@dataclass(frozen=True)
class Mark:
    """Where a value was written: "file:line" or the ``--set`` itself, and how, for scalars.

    raw: the text of a scalar, None for a section or list; quoted: whether it stood in quotes.
    from_set: whether it came from the command line.
    """

    where: str
    raw: str | None = None
    quoted: bool = False
    from_set: bool = False

    def got(self) -> str | None:
        """The scalar as it was written."""
        if self.raw is None:
            return None
        text = (
            json.dumps(self.raw, ensure_ascii=not encodable(self.raw))
            if self.quoted
            else self.raw or "nothing"
        )
        return text if len(text) <= 60 else text[:57] + "..."


@dataclass
class Source:
    """Plain values, the marks of their paths, the problems met while reading and the overrides in order."""

    data: Any = None
    marks: dict[Path, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)

    def mark(self, path: Path) -> Mark | None:
        """The mark of `path`, or of the closest thing around it that was written."""
        return next(
            (self.marks[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.marks), None
        )

    def report(
        self, path: Path, what: str, where: str, *, got: str = "", expected: str = "", hint: str = ""
    ) -> None:
        """Note a problem at `path`."""
        self.problems.append(Problem(dotted(path), what, got, expected, hint, where=where))


def read_yaml(
    text: str, name: str, *, source: Source | None = None, at: Path = (), where: str | None = None
) -> Source:
    """Read one YAML document.

    Args:
      text: the document; name: what to call it in messages.
      source: receives marks and problems (default: a new one); at: path of the document's root in the config.
      where: the place that all marks name (default: name:line of each value).

    Returns: the source, with the value in `data` (None for an empty document).

    Raises:
      UserError: the text is not YAML, or uses what the module docstring refuses.  Duplicate and odd keys do
        not
        raise: they are noted in the source.
    """
    source = Source() if source is None else source
    loader: Any = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise UserError(_syntax_message(error, text, name)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        raise UserError(
            f"{name}:{line}:{column}: not text: got the character U+{int(error.character):04X}, "
            "expected printable text in UTF-8"
        ) from None
    except (ValueError, OverflowError):  # a \U escape beyond Unicode, a directive of a thousand digits
        raise UserError(
            f"{name}:{loader.line + 1}:{loader.column + 1}: YAML syntax: an escape or directive that "
            "stands for no character"
        ) from None
    finally:
        if loader is not None:
            loader.dispose()
    source.data = None
    if node is not None:
        value = _Reader(source, name, where).value(node, at)
        source.data = None if value is _SKIP else value
    return source


class _Reader:
    """Turns nodes into plain values, marking each path."""

    def __init__(self, source: Source, name: str, where: str | None) -> None:
        self.source = source
        self.name = name
        self.fixed = where

    def where(self, node: yaml.Node) -> str:
        return self.fixed or f"{self.name}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, path: Path) -> Any:
        if isinstance(node, yaml.ScalarNode):
            self.source.marks[path] = Mark(
                self.where(node), node.value, node.style in ("'", '"', "|", ">"), self.fixed is not None
            )
            return self.scalar(node, path)
        self.source.marks[path] = Mark(self.where(node), None, False, self.fixed is not None)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        items = [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        return [None if item is _SKIP else item for item in items]

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, str] = {}
        for key_node, value_node in node.value:
            where = self.where(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _PREFIX + "str":
                shown = (
                    key_node.value or "nothing"
                    if isinstance(key_node, yaml.ScalarNode)
                    else "a list or section"
                )
                self.source.report(
                    path,
                    "a key that is not text",
                    where,
                    got=shown,
                    expected="a name",
                    hint="put it in quotes if it is one",
                )
                continue
            key = key_node.value
            if key in first:
                again = (
                    "merge the two sections"
                    if isinstance(value_node, yaml.MappingNode)
                    else "keep one of them"
                )
                self.source.report(
                    (*path, key),
                    "stands twice",
                    where,
                    got=f"a second {key}; the first: {first[key]}",
                    expected="each key once",
                    hint=again,
                )
                continue
            if not encodable(key):
                self.source.report(
                    path, "a key with half a character (a lone surrogate)", where, expected="text in UTF-8"
                )
                continue
            first[key] = where
            value = self.value(value_node, (*path, key))
            if not isinstance(value_node, yaml.ScalarNode):  # a section is where its key is
                self.source.marks[(*path, key)] = Mark(where, from_set=self.fixed is not None)
            if value is not _SKIP:
                result[key] = value
        return result

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text, tag = node.value, node.tag.removeprefix(_PREFIX)
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() == "true"
        if tag == "str":
            if encodable(text):
                return text
            return self.refuse(node, path, "half a character (a lone surrogate)", "text in UTF-8")
        if len(text) > MAX_DIGITS:
            return self.refuse(node, path, "a number of too many digits", f"at most {MAX_DIGITS}")
        if tag == "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if text.lower().lstrip("+-") in (".inf", ".nan") or not math.isfinite(float(text)):
            return self.refuse(node, path, "not a finite number", "a finite number")
        return float(text)

    def refuse(self, node: yaml.Node, path: Path, what: str, expected: str) -> Any:
        mark = self.source.marks[path]
        self.source.report(path, what, mark.where, got=mark.got() or "", expected=expected)
        return _SKIP


def encodable(text: str) -> bool:
    """Whether the text can be written as UTF-8 (it has no lone surrogates)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _syntax_message(error: yaml.MarkedYAMLError, text: str, name: str) -> str:
    """PyYAML's complaint with its line and column, the line itself and a caret."""
    lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
    marks = [mark for mark in (error.problem_mark, error.context_mark) if mark is not None]
    # of an end: its beginning
    mark = next((mark for mark in marks if mark.line < len(lines) and lines[mark.line].strip()), marks[-1])
    shown = lines[mark.line].replace("\t", "\N{RIGHTWARDS ARROW}") if mark.line < len(lines) else ""
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    message = f"{name}:{mark.line + 1}:{mark.column + 1}: YAML syntax: {problem}"
    if len(shown) <= 160 and shown.isprintable():
        message += f"\n\n    {shown}\n    {' ' * mark.column}^"
    return f"{message}\n\n{labelled('hint', SYNTAX_HINT)}"


def labelled(label: str, text: str) -> str:
    """One line of a message, "  label     text", wrapped."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"  {label:<10}",
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )
