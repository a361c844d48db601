"""The schema of the config as data: the type of each field in words, look-up by path, and suggestions.

One description serves the reference page, the error messages and the reading of ``--set``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Discriminator
from pydantic.fields import FieldInfo

from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.types import INT32_MAX, Section, show

Path = tuple[str | int, ...]

# Our fields by the names that other trainers, and older versions of this one, give to them.
_NAMES = {
    "optimizer.learning_rate": "lr",
    "algorithm.kl_coef": "beta",
    "optimizer.b1": "betas",
    "algorithm.clip_low": "epsilon",
    "algorithm.clip_high": "epsilon_high",
    "rollout.group_size": "num_generations rollouts_per_example n",
    "rollout.prompts_per_step": "batch_size",
    "rollout.max_completion_tokens": "max_new_tokens max_tokens max_completion_length",
    "rollout.max_prompt_tokens": "max_prompt_length",
    "run.steps": "max_steps",
    "algorithm.epochs": "num_iterations ppo_epochs",
    "algorithm.loss_aggregation": "loss_type",
    "algorithm.mask_truncated": "mask_truncated_completions",
    "optimizer.grad_clip": "max_grad_norm",
    "optimizer.schedule": "lr_scheduler_type",
    "run.directory": "output_dir",
    "checkpoint.every_steps": "save_steps",
    "eval.every_steps": "eval_steps",
    "model.path": "model_name_or_path",
    "model.num_layers": "num_hidden_layers",
    "model.num_heads": "num_attention_heads",
    "model.num_kv_heads": "num_key_value_heads",
    "task.kind": "dataset",
    "rewards": "reward reward_functions",
    "rollout.engine": "vllm",
    "precision.loss_scale": "loss_scale",
    "correction.reject.level": "reject_level",
    "correction.reject.low": "reject_low",
    "correction.reject.high": "reject_high",
}
SYNONYMS = {name: field for field, names in _NAMES.items() for name in names.split()}


@dataclass(frozen=True)
class FieldType:
    """What a field takes.

    kind: int, float, bool, text, choice, section, list (of sections) or options (free names).
    variants: label -> section, of which a section is one and a list holds any number; tag: the field of the
      section that names the variant, "" where there is one variant or where its fields tell; default: the
      variant where the tag is left out.
    """

    kind: str
    optional: bool = False
    choices: tuple[str, ...] = ()
    variants: tuple[tuple[str, type[Section]], ...] = ()
    tag: str = ""
    default: str = ""
    bounds: tuple[str, ...] = ()
    choose: Callable[[Any], str] | None = None

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """The sections among the variants, each once."""
        return tuple(dict.fromkeys(section for _, section in self.variants))

    def variant(self, value: Any) -> type[Section] | None:
        """The section that `value`, as it was read, is one of; None where its tag names none."""
        label = self.default
        if self.choose is not None:
            label = self.choose(value)
        elif self.tag and isinstance(value, str | dict):
            label = value if isinstance(value, str) else value.get(self.tag, label)
        return dict(self.variants).get(label) if isinstance(label, str) else None

    def candidates(self, value: Any) -> list[type[Section]]:
        """All sections that may stand here, the one that `value` is first."""
        return sorted(self.sections, key=lambda section: section is not self.variant(value))

    def named(self, sections: Iterable[type[Section]]) -> str:
        """Variants as a phrase: "kind jsonl, parquet"."""
        labels = ", ".join(label for label, section in self.variants if section in tuple(sections))
        return f"{self.tag} {labels}".strip()

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
        kept = [arg for arg in args if arg is not type(None)]
        if origin is Annotated:
            annotation = args[0]
            metadata += [
                part
                for extra in args[1:]
                for part in (extra.metadata if isinstance(extra, FieldInfo) else [extra])
            ]
        elif origin in (Union, UnionType) and len(kept) == 1:
            annotation, optional = kept[0], True
        else:
            break
    if origin is Literal:
        return FieldType("choice", optional, args)
    if origin is tuple:
        return FieldType("list", optional, variants=(("", args[0]),), bounds=_bounds(metadata))
    if origin is dict:
        return FieldType("options", optional)
    if origin in (Union, UnionType):
        return _variants(args, info)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return FieldType("section", optional, variants=(("", annotation),))
    kind = {int: "int", float: "float", bool: "bool", str: "text"}[annotation]  # type: ignore[index]
    return FieldType(kind, optional, bounds=_bounds(metadata, kind == "int"))


def _variants(args: Sequence[Any], info: FieldInfo) -> FieldType:
    """The type of a section that is one of several."""
    if isinstance(info.discriminator, str):
        tag = info.discriminator
        labels = [
            (label, section) for section in args for label in get_args(section.model_fields[tag].annotation)
        ]
        return FieldType("section", variants=tuple(labels), tag=tag, default=getattr(info.default, tag))
    tagged = [(part.tag, get_args(arg)[0]) for arg in args for part in get_args(arg)[1:]]
    (choose,) = [part.discriminator for part in info.metadata if isinstance(part, Discriminator)]
    return FieldType("section", variants=tuple(tagged), choose=choose)  # type: ignore[arg-type]


def _bounds(metadata: Sequence[Any], whole: bool = False) -> tuple[str, ...]:
    names = ("gt", "ge", "lt", "le", "min_length")
    found = {
        name: getattr(part, name)
        for part in metadata
        for name in names
        if getattr(part, name, None) is not None
    }
    if whole and "gt" in found:
        found["ge"] = found.pop("gt") + 1
    if found.get("le") == INT32_MAX:  # said only where it is broken
        del found["le"]
    if "ge" in found and "le" in found:
        return (f"from {show(found['ge'])} to {show(found['le'])}",)
    words = {
        "gt": "greater than {}",
        "ge": "at least {}",
        "lt": "less than {}",
        "le": "at most {}",
        "min_length": "not empty",
    }
    return tuple(words[name].format(show(found[name])) for name in names if name in found)


def dotted(path: Path) -> str:
    """The path as it is written in messages and after ``--set``."""
    return ".".join(str(part) for part in path)


def split(path: str) -> Path:
    """The inverse of `dotted`: list indices as numbers."""
    return (
        tuple(int(part) if part.isdecimal() and part.isascii() else part for part in path.split("."))
        if path
        else ()
    )


@dataclass(frozen=True)
class Found:
    """A field: its type, the section that it stands in and its own name there."""

    takes: FieldType
    owner: type[Section]
    name: str

    @property
    def info(self) -> FieldInfo:
        """Its declaration."""
        return self.owner.model_fields[self.name]

    @property
    def meaning(self) -> str:
        """The sentence of the field: its description, or that of the section that it is;
        a default's own sentence is its base's.
        """
        for owner in self.owner.__mro__:
            info = owner.model_fields.get(self.name) if issubclass(owner, Section) else None
            if info is not None and info.description:
                return info.description
        return (self.takes.sections[0].__doc__ or "").splitlines()[0] if self.takes.sections else ""


def look_up(path: Path, data: Any = None) -> Found | None:
    """The field at `path`; None where the schema has none (free options included).

    data: values of the config as they were read, which say which of several sections stands on the way.
    """
    owners: Sequence[type[Section]] = (RunConfig,)
    within: FieldType | None = None
    found: Found | None = None
    for part in path:
        if isinstance(part, int):
            if found is None or found.takes.kind != "list":
                return None
            data = data[part] if isinstance(data, list | tuple) and part < len(data) else None
            within = FieldType("section", variants=found.takes.variants)
            found = Found(within, found.owner, found.name)
        else:
            owner = next((owner for owner in owners if part in owner.model_fields), None)
            if owner is None:
                return None
            of = type_of(owner, part)
            if within is not None and part == within.tag:
                of = FieldType("choice", choices=tuple(label for label, _ in within.variants))
            data = data.get(part) if isinstance(data, dict) else None
            within, found = of, Found(of, owner, part)
        owners = within.candidates(data) if within.kind == "section" else ()
    return found


def in_options(path: Path) -> bool:
    """Whether `path` lies inside a field of free names, such as task.options."""
    found = [look_up(path[:end]) for end in range(1, len(path))]
    return any(entry is not None and entry.takes.kind == "options" for entry in found)


def all_fields(
    owner: type[Section] = RunConfig, prefix: str = "", within: FieldType | None = None
) -> Iterator[tuple[str, list[Found]]]:
    """Every field under `owner` that takes a value: dotted path (list items as rewards.N.name),
    and it in each variant that has it.
    """
    owners = within.sections if within is not None else (owner,)
    for name in dict.fromkeys(name for section in owners for name in section.model_fields):
        holders = [section for section in owners if name in section.model_fields]
        kind = type_of(holders[0], name)
        if kind.variants:
            yield from all_fields(
                kind.sections[0], prefix + name + (".N." if kind.kind == "list" else "."), kind
            )
            continue
        if within is not None and name == within.tag:
            choice = FieldType("choice", choices=tuple(label for label, _ in within.variants))
            default = next(section for section in owners if section is within.variant(None))
            yield prefix + name, [Found(choice, default, name)]
            continue
        yield prefix + name, [Found(type_of(section, name), section, name) for section in holders]


def about(path: Path, data: Any) -> str:
    """The sentence of the field at `path`, with its default."""
    found = look_up(path, data)
    if found is None or isinstance(path[-1], int):
        return ""
    default = (
        "" if found.takes.variants or found.info.is_required() else f" Default: {default_of(found.info)}."
    )
    return f"{found.meaning}{default}"


def default_of(info: FieldInfo) -> str:
    """The default of a field as YAML text; "required" where it has none."""
    if info.is_required():
        return "required"
    return (
        info.default if isinstance(info.default, str) and info.default.isidentifier() else show(info.default)
    )


def belongs(path: Path, data: Any) -> tuple[str, str] | None:
    """Where a key that is unknown here belongs: (the other variants of its section that have it,
    the one that stands here).
    """
    parent = look_up(path[:-1], data)
    if parent is None or parent.takes.kind != "section":
        return None
    having = [section for section in parent.takes.sections if path[-1] in section.model_fields]
    value = value_in(data, path[:-1])
    present = parent.takes.variant(value)
    if not having or present is None:
        return None
    label = (
        value.get(parent.takes.tag, parent.takes.default)
        if parent.takes.tag
        else parent.takes.named([present])
    )
    return parent.takes.named(having), f"{parent.takes.tag} {label}".strip()


def value_in(data: Any, path: Path) -> Any:
    """What was read at `path`; None where nothing was."""
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        else:
            data = (
                data[part]
                if isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
                else None
            )
    return data


def suggest(path: Path, data: Any) -> str:
    """A hint for an unknown key: the likeliest field, else the fields that exist where it stands."""
    likely = likely_fields(path, data)
    if likely == [path[-1]] and "." in str(path[-1]):
        section, name = likely[0].split(".", 1)
        return f"write {name} under {section}:, indented; dots are for --set"
    if likely:
        return f"did you mean {' or '.join(likely)}?"
    owner = _section_at(path[:-1], data)
    if owner is None:
        return ""
    return f"{dotted(path[:-1]) or 'the config'} has: {', '.join(owner.model_fields)}"


def likely_fields(path: Path, data: Any = None) -> list[str]:
    """Up to three dotted paths of existing fields that an unknown key may have meant, likeliest first."""
    parent, name = path[:-1], str(path[-1])
    section = _section_at(parent, data)
    siblings = {dotted((*parent, sibling)): sibling for sibling in (section.model_fields if section else ())}
    everywhere = {name: name for name in RunConfig.model_fields} | {
        field: field.rsplit(".", 1)[-1] for field, _ in all_fields()
    }
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


def _section_at(path: Path, data: Any) -> type[Section] | None:
    found = look_up(path, data) if path else None
    kind = (
        FieldType("section", variants=(("", RunConfig),))
        if not path
        else found.takes
        if found
        else FieldType("text")
    )
    return kind.candidates(value_in(data, path))[0] if kind.kind == "section" else None


def _close(word: str, fields: dict[str, str], cutoff: float) -> list[str]:
    names = difflib.get_close_matches(word, sorted(set(fields.values())), n=1, cutoff=cutoff)
    return [field for field, last in fields.items() if last in names]
