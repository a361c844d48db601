"""The schema of the config as data: the type of each field in words, look-up by path, and suggestions.

One description serves the reference page, the error messages and the reading of ``--set``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.types import INT32_MAX, Section, show

Path = tuple[str | int, ...]

# Names that other trainers give to our fields.
SYNONYMS = {
    "lr": "optimizer.learning_rate",
    "beta": "algorithm.kl_coef",
    "betas": "optimizer.b1",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "num_generations": "rollout.group_size",
    "rollouts_per_example": "rollout.group_size",
    "n": "rollout.group_size",
    "batch_size": "rollout.prompts_per_step",
    "max_new_tokens": "rollout.max_completion_tokens",
    "max_tokens": "rollout.max_completion_tokens",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_steps": "run.steps",
    "num_iterations": "algorithm.epochs",
    "ppo_epochs": "algorithm.epochs",
    "loss_type": "algorithm.loss_aggregation",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "max_grad_norm": "optimizer.grad_clip",
    "lr_scheduler_type": "optimizer.schedule",
    "output_dir": "run.directory",
    "save_steps": "checkpoint.every_steps",
    "eval_steps": "eval.every_steps",
    "model_name_or_path": "model.path",
    "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "dataset": "task.kind",
    "reward": "rewards",
    "reward_functions": "rewards",
}


@dataclass(frozen=True)
class FieldType:
    """What a field takes.

    kind: int, float, bool, text, choice, section, list (of sections) or options (free names).
    """

    kind: str
    optional: bool = False
    choices: tuple[str, ...] = ()
    section: type[Section] | None = None
    bounds: tuple[str, ...] = ()

    def in_words(self) -> str:
        """The type as a phrase, such as "a whole number, at least 2"."""
        words = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "text": "text",
            "section": "a section of fields",
            "list": "a list of sections",
            "options": "a section of free names and values",
            "choice": f"one of {', '.join(self.choices)}",
        }[self.kind]
        limits = " and ".join(self.bounds)
        return words + (f", {limits}" if limits else "") + (", or null" if self.optional else "")


@cache
def type_of(owner: type[Section], name: str) -> FieldType:
    """The type of the field `name` of a section."""
    info = owner.model_fields[name]
    annotation, metadata, optional = info.annotation, list(info.metadata), False
    while True:
        origin, args = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            annotation = args[0]
            metadata += [part for extra in args[1:] for part in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        elif origin in (Union, UnionType):
            optional = True
            (annotation,) = [arg for arg in args if arg is not type(None)]
        else:
            break
    if origin is Literal:
        return FieldType("choice", optional, args)
    if origin is tuple:
        return FieldType("list", optional, (), args[0], _bounds(metadata))
    if origin is dict:
        return FieldType("options", optional)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return FieldType("section", optional, (), annotation)
    kind = {int: "int", float: "float", bool: "bool", str: "text"}[annotation]  # type: ignore[index]
    return FieldType(kind, optional, (), None, _bounds(metadata, kind == "int"))


def _bounds(metadata: Sequence[Any], whole: bool = False) -> tuple[str, ...]:
    names = ("gt", "ge", "lt", "le", "min_length")
    found = {name: getattr(part, name) for part in metadata for name in names if getattr(part, name, None) is not None}
    if whole and "gt" in found:
        found["ge"] = found.pop("gt") + 1
    if found.get("le") == INT32_MAX:  # said only where it is broken
        del found["le"]
    if "ge" in found and "le" in found:
        return (f"from {show(found['ge'])} to {show(found['le'])}",)
    words = {"gt": "greater than {}", "ge": "at least {}", "lt": "less than {}", "le": "at most {}", "min_length": "not empty"}
    return tuple(words[name].format(show(found[name])) for name in names if name in found)


def dotted(path: Path) -> str:
    """The path as it is written in messages and after ``--set``."""
    return ".".join(str(part) for part in path)


def split(path: str) -> Path:
    """The inverse of `dotted`: list indices as numbers."""
    return tuple(int(part) if part.isdecimal() and part.isascii() else part for part in path.split(".")) if path else ()


def look_up(path: Path) -> tuple[FieldType, FieldInfo] | None:
    """Type and declaration of the field at `path`; None where the schema has none (free options included)."""
    owner: type[Section] | None = RunConfig
    found = None
    for part in path:
        if isinstance(part, int):
            if found is None or found[0].kind != "list":
                return None
            found = (FieldType("section", section=found[0].section), found[1])
        elif owner is not None and part in owner.model_fields:
            found = (type_of(owner, part), owner.model_fields[part])
        else:
            return None
        owner = found[0].section if found[0].kind == "section" else None
    return found


def in_options(path: Path) -> bool:
    """Whether `path` lies inside a field of free names, such as task.options."""
    found = [look_up(path[:end]) for end in range(1, len(path))]
    return any(entry is not None and entry[0].kind == "options" for entry in found)


def all_fields(owner: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldType, FieldInfo]]:
    """Every field under `owner` that takes a value: dotted path (list items as rewards.N.name), type, declaration."""
    for name, info in owner.model_fields.items():
        kind = type_of(owner, name)
        if kind.section is not None:
            yield from all_fields(kind.section, prefix + name + (".N." if kind.kind == "list" else "."))
        else:
            yield prefix + name, kind, info


def about(path: Path) -> str:
    """The sentence of the field at `path`, with its default."""
    found = look_up(path)
    if found is None or isinstance(path[-1], int):
        return ""
    kind, info = found
    default = "" if kind.section is not None or info.is_required() else f" Default: {default_of(info)}."
    return f"{info.description}{default}"


def default_of(info: FieldInfo) -> str:
    """The default of a field as YAML text; "required" where it has none."""
    if info.is_required():
        return "required"
    return info.default if isinstance(info.default, str) and info.default.isidentifier() else show(info.default)


def suggest(path: Path) -> str:
    """A hint for an unknown key: the likeliest field, else the fields that exist where it stands."""
    likely = likely_fields(path)
    if likely == [path[-1]] and "." in str(path[-1]):
        section, name = likely[0].split(".", 1)
        return f"write {name} under {section}:, indented; dots are for --set"
    if likely:
        return f"did you mean {' or '.join(likely)}?"
    parent = look_up(path[:-1])
    owner = RunConfig if len(path) == 1 else parent[0].section if parent else None
    if owner is None:
        return ""
    return f"{dotted(path[:-1]) or 'the config'} has: {', '.join(owner.model_fields)}"


def likely_fields(path: Path) -> list[str]:
    """Up to three dotted paths of existing fields that an unknown key may have meant, likeliest first."""
    parent, name = path[:-1], str(path[-1])
    section = RunConfig if not parent else _section_at(parent)
    siblings = {dotted((*parent, sibling)): sibling for sibling in (section.model_fields if section else ())}
    everywhere = {name: name for name in RunConfig.model_fields} | {field: field.rsplit(".", 1)[-1] for field, _, _ in all_fields()}
    word = name.replace("-", "_").lower()
    leaf = word.rsplit(".", 1)[-1]
    attempts = (
        [field for field in everywhere if field == word],
        [field for field, last in everywhere.items() if last == leaf],
        [SYNONYMS[leaf]] if leaf in SYNONYMS else [],
        _close(word, siblings, 0.6),
        _close(leaf, everywhere, 0.75),
    )
    return next((found[:3] for found in attempts if found), [])


def _section_at(path: Path) -> type[Section] | None:
    found = look_up(path)
    return found[0].section if found and found[0].kind == "section" else None


def _close(word: str, fields: dict[str, str], cutoff: float) -> list[str]:
    names = difflib.get_close_matches(word, sorted(set(fields.values())), n=1, cutoff=cutoff)
    return [field for field, last in fields.items() if last in names]
