"""Reading and writing a run's config.

    load_config("configs/tiny_cpu.yaml", ["run.steps=200", "rewards.0.weight=2"]) -> RunConfig
    dump_config(config) -> YAML that `load_config` reads back as an equal config

``--set KEY=VALUE`` is applied after the file, in order.  KEY is a dotted path; list entries have numbers.
VALUE is YAML (``[1, 2]``, ``{path: runs/a/hf}``, ``null``), except for text fields, which take it as it
stands.  Where a ``--set`` makes a section another kind, what the file says of fields that this kind does not
have is dropped; otherwise such a field is an error.  A text in place of a section is its kind: ``algorithm:
dapo`` stands for ``algorithm: {name: dapo}``.

Everything a user can get wrong in a file and its overrides ends in one `UserError` that lists all of it.

``python -m jetrl_jax config`` prints the reference of all fields (docs/config.md).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel, ValidationError

from jetrl_jax.config.messages import field_problem, raise_all, without_tags
from jetrl_jax.config.rule import Problem
from jetrl_jax.config.rules import find_problems
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.schema import (
    FieldType,
    Found,
    Path,
    dotted,
    in_options,
    likely_fields,
    look_up,
    split,
    suggest,
    type_of,
    value_in,
)
from jetrl_jax.config.types import Section, show, user_path
from jetrl_jax.config.yaml_text import Mark, Source, encodable, read_yaml, write_yaml
from jetrl_jax.errors import UserError

MAX_BYTES = 1 << 20
_NOWHERE = object()


def load_config(path: str | FilePath | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a YAML file (None: the defaults) with ``key=value`` overrides applied.

    Raises:
      UserError: the file cannot be read, is not YAML, or holds values that are unknown, of the wrong type,
        out of range, without an effect or that do not fit together; all problems in one message.
    """
    if path is None:
        return _build(Source(data={}), overrides, "the config")
    name = str(path) if str(path).isprintable() and str(path) else ascii(str(path))
    if not str(path):
        raise UserError("no config file: got an empty path, expected the path of a YAML file")
    source = read_yaml(_read_text(user_path(path), name), name)
    if source.data is None:
        raise UserError(
            f"{name}: no fields: got an empty file, expected a YAML mapping such as\n\n    seed: 1\n    "
            "run:\n      steps: 100"
        )
    if not isinstance(source.data, dict):
        mark = source.marks[()]
        kind = "a list" if isinstance(source.data, list) else f"the value {mark.got()}"
        raise UserError(
            f"{mark.where}: not a mapping: got {kind} at the top level, expected sections such as\n\n   "
            " run:\n      steps: 100"
        )
    return _build(source, overrides, name)


def config_from_dict(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A config from nested dictionaries, under the same rules and with the same errors as a file."""
    return _build(Source(data=_copy(data)), overrides, "the config")


def override_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """`config` with ``key=value`` overrides applied as ``--set`` does."""
    return _build(read_yaml(dump_config(config), "the config"), overrides, "the config")


def dump_config(config: RunConfig) -> str:
    """The config as YAML, section by section: `load_config` reads it back as an equal config.

    Every field is written, so that the text can be read alone; a null that stands for a value is followed by
    that value in a comment.
    """
    parts, nulls = [], config.resolved_nulls()
    for name in type(config).model_fields:
        text = write_yaml({name: _written(getattr(config, name))})
        for path, resolved in nulls.items():
            if path.startswith(f"{name}."):
                line = f"  {path.split('.')[1]}: null\n"
                text = text.replace(line, f"{line[:-1]}  # {show(resolved).strip(chr(34))}\n")
        parts.append(text)
    return "".join(parts)


def _written(value: Any) -> Any:
    """Sections as dictionaries and tuples as lists."""
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    if not isinstance(value, Section):
        return value
    return {name: _written(getattr(value, name)) for name in type(value).model_fields}


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, BaseModel):
        return _copy(value.model_dump(exclude_unset=True))
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------------------------------------- the file


def _read_text(path: FilePath, name: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{name}: no such file.{_similar_files(path)}") from None
    except IsADirectoryError:
        raise UserError(
            f"{name}: got a directory, expected a YAML file.{_similar_files(path / 'config.yaml')}"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"{name}: got more than {MAX_BYTES} bytes, expected a YAML config of a few kilobytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{name}:{line}: not text: got the byte 0x{raw[error.start]:02x}, expected a YAML file in UTF-8"
        ) from None


def _similar_files(path: FilePath) -> str:
    try:
        there = sorted(item.name for item in path.parent.iterdir() if item.suffix in (".yaml", ".yml"))
    except FileNotFoundError:
        return f" There is no directory {path.parent} either."
    except (OSError, ValueError):
        return ""
    close = difflib.get_close_matches(path.name, there, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {path.parent / close[0]}?"
    return f" {path.parent} has: {', '.join(there[:8])}" if there else ""


# -------------------------------------------------------------------------------------------- overrides


def _apply_override(source: Source, text: str) -> None:
    """Set one ``key=value`` in `source.data`; problems are noted, not raised."""
    where = (
        "--set "
        + json.dumps(text if len(text) <= 60 else text[:57] + "...", ensure_ascii=not encodable(text))[1:-1]
    )
    source.overrides.append(where)
    key, equals, raw = text.partition("=")
    path: Path = tuple(
        int(part) if part.isdecimal() and part.isascii() else part for part in key.strip().split(".")
    )
    if not equals or "" in path:
        source.problems.append(
            Problem(
                "", "not an override", f'"{text}"', "KEY=VALUE, such as rollout.group_size=8", where=where
            )
        )
        return
    found = look_up(path, source.data)
    if found is None and not in_options(path):
        _report_unknown(source, path, where)
        return
    # a section's kind by itself
    if found is not None and found.takes.tag and raw.strip().isidentifier() and raw.strip() != "null":
        path = (*path, found.takes.tag)
        found = look_up(path, source.data)
    value = _override_value(source, path, raw, found.takes if found else None, where)
    if value is _NOWHERE:
        return
    before = {path[:end]: _variant(source, path[:end]) for end in range(1, len(path) + 1)}
    _put(source, path, value, where)
    for place, variant in before.items():
        if variant is not None and _variant(source, place) is not variant:
            _leave_out_others(source, place)


def _variant(source: Source, path: Path) -> type[Section] | None:
    """Which of several sections stands at `path`."""
    found = look_up(path, source.data)
    several = found is not None and found.takes.kind == "section" and len(found.takes.sections) > 1
    return found.takes.variant(value_in(source.data, path)) if found is not None and several else None


def _leave_out_others(source: Source, path: Path) -> None:
    """After a ``--set`` of another kind of section: drop what the file says of fields that this kind does
    not have.
    """
    found, section, holder = look_up(path, source.data), _variant(source, path), value_in(source.data, path)
    if found is None or section is None or not isinstance(holder, dict):
        return
    elsewhere = {name for other in found.takes.sections for name in other.model_fields} - set(
        section.model_fields
    )
    for name in elsewhere & set(holder):
        mark = source.marks.get((*path, name))
        if mark is None or not mark.from_set:
            del holder[name]
            _forget(source, (*path, name))


def _report_unknown(source: Source, path: Path, where: str) -> None:
    """Blame the first part of the path that does not exist."""
    end = next(end for end in range(1, len(path) + 1) if look_up(path[:end], source.data) is None)
    parent = look_up(path[: end - 1], source.data)
    if parent is not None and parent.takes.kind == "list":
        hint = f"entries of {dotted(path[: end - 1])} have numbers, from 0"
    elif parent is not None and not parent.takes.variants:
        hint = f"{dotted(path[: end - 1])} takes {parent.takes.in_words()}"
    else:
        hint = suggest(path[:end], source.data)
        if end < len(path) and len(likely := likely_fields(path[:end])) == 1:
            hint = f"did you mean {dotted((likely[0], *path[end:]))}?"
    source.report(path[:end], "unknown key", where, hint=hint)


def _override_value(source: Source, path: Path, raw: str, kind: FieldType | None, where: str) -> Any:
    """The value of an override, or _NOWHERE after noting what is wrong with it."""
    _forget(source, path)
    problems = len(source.problems)
    if (
        kind is not None
        and kind.kind == "text"
        and not (kind.optional and raw.strip() in ("null", "~"))
        and raw.strip()[:1] not in ("'", '"')
    ):
        source.marks[path] = Mark(where, raw, True, True)
        if not encodable(raw):
            source.report(path, "not text in UTF-8", where, got=show(raw.encode("utf-8", "replace").decode()))
        return raw if len(source.problems) == problems else _NOWHERE
    if not raw.strip():
        expected = kind.in_words() if kind else "a value"
        source.report(
            path,
            "no value",
            where,
            got="nothing after =",
            expected=expected,
            hint='null and "" are written out',
        )
        return _NOWHERE
    try:
        inner = read_yaml(
            raw, where, source=Source(marks=source.marks, problems=source.problems), at=path, where=where
        )
    except UserError as error:
        source.report(
            path,
            "not a YAML value",
            where,
            got=raw,
            hint=str(error).splitlines()[0].removeprefix(where).lstrip(":0123456789 "),
        )
        return _NOWHERE
    return inner.data if len(source.problems) == problems else _NOWHERE


def _forget(source: Source, path: Path) -> None:
    for inner in [mark for mark in source.marks if mark[: len(path)] == path]:
        del source.marks[inner]


def _put(source: Source, path: Path, value: Any, where: str) -> None:
    """Store `value` at `path`, creating the sections on the way and copying default lists."""
    holder = source.data
    for end, part in enumerate(path, start=1):
        if isinstance(holder, list):
            if not isinstance(part, int) or part >= len(holder):
                name, count = dotted(path[: end - 1]), len(holder)
                has = (
                    f"{count} entries, 0 to {count - 1}"
                    if count > 1
                    else "one entry, 0"
                    if count
                    else "no entry"
                )
                source.report(
                    path,
                    "no such entry",
                    where,
                    expected=f"{name} has {has}",
                    hint=f"--set '{name}=[...]' writes the whole list",
                )
                return
            if end == len(path):
                holder[part] = value
            else:
                holder = holder[part]
            continue
        if not isinstance(holder, dict) or (isinstance(part, int) and not in_options(path)):
            return  # the file has something else than a section or list here, and that is reported
        if end == len(path):
            holder[str(part)] = value
            return
        inner, found = holder.get(str(part)), look_up(path[:end], source.data)
        if inner is None:
            inner = holder[str(part)] = _default_holder(found)
        elif isinstance(inner, str) and found is not None and found.takes.tag:
            inner = holder[str(part)] = {found.takes.tag: inner}
        holder = inner


def _default_holder(found: Found | None) -> Any:
    if found is None or found.takes.kind in ("section", "options"):
        return {}
    default = found.info.default
    return (
        [item.model_dump(exclude_unset=True) for item in default] if isinstance(default, tuple) else default
    )


# ------------------------------------------------------------------------------------------- validation


def _build(source: Source, overrides: Sequence[str], name: str) -> RunConfig:
    """Apply the overrides and validate; raises all problems at once."""
    for text in overrides:
        _apply_override(source, text)
    config = _validate(source)
    raise_all(source.problems, source, name)
    if config is None:
        raise AssertionError(f"{name}: refused without a problem to tell")
    return config


def _validate(source: Source) -> RunConfig | None:
    """The config, or None after noting its problems in the source.

    Values with a problem of their own are taken out and the rest is validated again, so that the rules
    between fields are checked in the same pass; a rule that involves a value taken out is left for the next
    run.
    """
    refused = {problem.path for problem in source.problems}
    suspects = refused | {field for problem in source.problems for field in _meant(problem)}
    first_round = True
    while True:
        try:
            config = RunConfig.model_validate(shaped(source.data, RunConfig))
            break
        except ValidationError as error:
            errors = error.errors(include_url=False)
        found = [field_problem(item, source) for item in errors]
        suspects |= {path for problem in found for path in (problem.path, *_meant(problem))}
        if first_round:  # later rounds only see what taking values out has caused
            meant = tuple(f"{path}." for problem in found for path in _meant(problem))
            of_others = [
                problem
                for problem in found
                if " belongs to " in problem.what and problem.path.startswith(meant)
            ]
            source.problems += [
                problem for problem in found if problem.path not in refused and problem not in of_others
            ]
        first_round = False
        removed = [_remove(source, _outermost(without_tags(tuple(item["loc"])))) for item in errors]
        if not any(removed):
            return None
    source.problems += [problem for problem in find_problems(config) if not _involves(problem, suspects)]
    return config


def _meant(problem: Problem) -> list[str]:
    """What an unknown key may have meant, so that it is not blamed for its default: fields,
    and a section whose kind they decide.
    """
    if problem.what != "unknown key":
        return []
    path, likely = split(problem.path), likely_fields(split(problem.path))
    parent = look_up(path[:-1])
    kinds = (
        parent is not None
        and len(parent.takes.sections) > 1
        and any(split(field)[:-1] == path[:-1] for field in likely)
    )
    return [*likely, dotted(path[:-1])] if kinds else likely


def _involves(problem: Problem, suspects: set[str]) -> bool:
    paths = (problem.path, *problem.involves)
    return any(
        path == other or path.startswith(other + ".") or other.startswith(path + ".")
        for path in paths
        for other in suspects
    )


def _remove(source: Source, path: tuple[Any, ...]) -> bool:
    """Take a value out, so that its default stands in; whether it was there."""
    holder = source.data
    for part in path[:-1]:
        is_there = (
            part in holder if isinstance(holder, dict) else isinstance(holder, list) and part < len(holder)
        )
        holder = holder[part] if is_there else None
    _forget(source, path)
    return isinstance(holder, dict) and holder.pop(path[-1], _NOWHERE) is not _NOWHERE


def _outermost(path: Path) -> Path:
    """The path, cut at the first list or field of free names: what is taken out with a bad value."""
    ends = [
        end
        for end in range(1, len(path))
        if (found := look_up(path[:end])) and found.takes.kind in ("list", "options")
    ]
    return path[: ends[0]] if ends else path


def shaped(value: Any, owner: type[Section] | None) -> Any:
    """`value` as the schema has it: a tuple for a list,
    a section with its kind for one that is left out or stands alone.
    """
    if not isinstance(value, dict) or owner is None:
        return value
    result = dict(value)
    for name, item in value.items():
        kind = type_of(owner, name) if name in owner.model_fields else None
        if kind is not None and kind.kind == "section":
            if kind.tag:
                item = (
                    {kind.tag: item}
                    if isinstance(item, str)
                    else {kind.tag: kind.default} | item
                    if isinstance(item, dict)
                    else item
                )
            result[name] = shaped(item, kind.variant(item))
        elif kind is not None and kind.kind == "list" and isinstance(item, list):
            result[name] = tuple(shaped(entry, kind.sections[0]) for entry in item)
    return result
