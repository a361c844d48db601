"""Reading and writing a run's config.

    load_config("configs/tiny_cpu.yaml", ["run.steps=200", "rewards.0.weight=2"]) -> RunConfig
    dump_config(config) -> YAML that `load_config` reads back as an equal config

``--set KEY=VALUE`` is applied after the file, in order.  KEY is a dotted path; list entries have numbers.
VALUE is YAML (``[1, 2]``, ``{path: runs/a/hf}``, ``null``), except for text fields, which take it literally.
If a ``--set`` changes a section's kind, the file's fields that the new kind does not have are dropped;
otherwise such a field is an error.  All mistakes of a file and its overrides are reported in one `UserError`.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from jetrl_jax.config.messages import field_problem, is_of_replaced_kind, raise_all, without_kinds
from jetrl_jax.config.rules import find_problems
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.schema import Path, dotted, look_up, value_in
from jetrl_jax.config.types import cut, is_plain, user_path
from jetrl_jax.config.yaml_text import Mark, Source, write_yaml
from jetrl_jax.errors import UserError

MAX_BYTES = 1 << 20


def load_config(path: str | FilePath | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a YAML file (None: the defaults) with ``key=value`` overrides applied.

    Raises `UserError` if the file cannot be read or is not YAML, or if values are unknown, of the wrong type,
    out of range, without effect or incompatible with each other; one message has all problems.
    """
    if path is None:
        return config_from_dict({}, overrides)
    name = str(path) if str(path).isprintable() and str(path) else ascii(str(path))
    source = Source()
    source.data = source.read(_read_text(user_path(path), name), name)
    if not isinstance(source.data, dict):
        mark, is_list = source.mark(()), isinstance(source.data, list)
        got = "a list" if is_list else f"the value {mark.got()}" if mark.raw else "no field"
        expected = "sections such as\n\n    run:\n      steps: 100"
        raise UserError(f"{mark.where or name}: not a mapping: got {got}, expected {expected}")
    return _build(source, overrides, name)


def config_from_dict(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A config from nested dictionaries, under the same rules and with the same errors as a file."""
    return _build(Source(data=copy.deepcopy(dict(data))), overrides, "the config")


def override_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """`config` with ``key=value`` overrides applied as ``--set`` does."""
    source = Source()
    source.data = source.read(dump_config(config), "the config")
    return _build(source, overrides, "the config")


def dump_config(config: RunConfig) -> str:
    """The config as YAML that `load_config` reads back as an equal one; comments tell what a null means."""
    return write_yaml(config.model_dump(), config.resolved_nulls())


def _read_text(path: FilePath, name: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{name}: cannot be read: {why}.{_similar_file(path)}") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"{name}: got more than {MAX_BYTES} bytes, expected a YAML config of a few kilobytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, got = raw.count(b"\n", 0, error.start) + 1, f"the byte 0x{raw[error.start]:02x}"
        raise UserError(f"{name}:{line}: not text: got {got}, expected YAML in UTF-8") from None


def _similar_file(path: FilePath) -> str:
    close = difflib.get_close_matches(path.name, [item.name for item in path.parent.glob("*.y*ml")], n=1)
    return f" Did you mean {path.parent / close[0]}?" if close else ""


def _apply_override(source: Source, text: str) -> None:
    """Sets one ``key=value`` in `source.data`; raises YAML errors only, adds other problems to `source`."""
    where = "--set " + json.dumps(cut(text), ensure_ascii=False)[1:-1]
    source.overrides.append(where)
    key, _, raw = text.partition("=")
    parts, said = key.strip().split("."), raw.strip()
    if not said or "" in parts or not is_plain(key):
        expected = 'KEY=VALUE, such as rollout.group_size=8; null and "" are written out'
        return source.report((), "not an override", where, f'"{text}"', expected)
    holder, path = _open(source, parts, where)
    if isinstance(holder, list) and not isinstance(path[-1], int):
        name = dotted(path[:-1])
        expected = f"one of the {len(holder)} entries of {name}, from 0 on; {name}=[...] is the whole list"
        return source.report(path, "no such entry", where, "", expected)
    place = look_up(path, source.data)
    if place.tag and said.isidentifier() and isinstance(holder.get(path[-1]), dict):
        holder, path = holder[path[-1]], (*path, place.tag)  # the section's kind by itself
        place = look_up(path, source.data)
    source.forget(path)
    is_yaml = said[0] in "\"'" or (place.optional and said in ("null", "~"))
    if place.type == "string" and not is_yaml:
        source.marks[path] = Mark(where, raw, quoted=True)
        holder[path[-1]] = raw
    else:
        holder[path[-1]] = source.read(raw, where, path, where)
    return None


def _open(source: Source, parts: Sequence[str], where: str) -> tuple[Any, Path]:
    """The section or list that contains the field `parts`, and the field's path; missing sections are added.

    If the path ends in text although its holder is a list, there is no such entry.
    """
    holder: Any = source.data
    path: Path = ()
    for part in parts:
        if path:
            inner, place = value_in(holder, path[-1:]), look_up(path, source.data)
            if inner is None and place.type == "array":
                inner = copy.deepcopy(place.node["default"])
            elif place.tag and isinstance(inner, str):
                source.marks[(*path, place.tag)] = source.mark(path)
                inner = {place.tag: inner}
            if inner is not value_in(holder, path[-1:]) or not isinstance(inner, dict | list):
                source.marks[path] = Mark(where)
            holder[path[-1]] = inner if isinstance(inner, dict | list) else {}
            holder = holder[path[-1]]
        is_entry = isinstance(holder, list) and part.isdecimal() and int(part) < len(holder)
        path = (*path, int(part) if is_entry else part)
        if isinstance(holder, list) and not is_entry:
            break
    return holder, path


def _build(source: Source, overrides: Sequence[str], name: str) -> RunConfig:
    """Applies the overrides and validates; raises one error with all problems."""
    for text in overrides:
        _apply_override(source, text)
    config = _validated(source)
    raise_all(source, name)
    return config


def _validated(source: Source) -> RunConfig:
    """The config; problems are added to `source`.

    A section with a mistake is replaced by its defaults, and rules that involve it are not checked.
    """
    for error in _errors(source.data):
        path = without_kinds(error["loc"])
        if error["type"] == "extra_forbidden" and is_of_replaced_kind(path, source):
            del value_in(source.data, path[:-1])[path[-1]]
    found = [field_problem(error, source) for error in _errors(source.data)]
    noted = {problem.path for problem in source.problems}
    unclear = {problem.section for problem in found if problem.what == "unknown key"}  # of which kind?
    for problem in found:
        is_caused = " belongs to " in problem.what and problem.section in unclear
        has_inner = any(other.path.startswith(f"{problem.path}.") for other in found)  # lacks its bad entry
        if problem.path not in noted and not is_caused and not has_inner:
            source.problems.append(problem)
    wrong = {path.partition(".")[0] for problem in source.problems for path in problem.involves}
    right = {name: source.data[name] for name in RunConfig.model_fields if name in {*source.data} - wrong}
    config = RunConfig.model_validate(right)
    source.problems += [
        problem
        for problem in find_problems(config)
        if wrong.isdisjoint(path.partition(".")[0] for path in problem.involves)
    ]
    return config


def _errors(data: dict[str, Any]) -> list[Any]:
    try:
        RunConfig.model_validate(data)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []
