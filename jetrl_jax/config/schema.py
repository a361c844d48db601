"""Questions to the config's schema: which values a path takes, and which field an unknown key may mean.

The answers come from pydantic's JSON schema.  The reference page, the error messages and the parser of
``--set`` use them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any

from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.types import INT32_MAX, show

Path = tuple[str | int, ...]
Node = dict[str, Any]  # a part of the JSON schema

# Names in other trainers and in older versions of this one -> fields here.
_NAMES = """
    lr=optimizer.learning_rate beta=algorithm.kl_coef betas=optimizer.b1 epsilon=algorithm.clip_low
    epsilon_high=algorithm.clip_high num_generations=rollout.group_size
    rollouts_per_example=rollout.group_size n=rollout.group_size batch_size=rollout.prompts_per_step
    max_new_tokens=rollout.max_completion_tokens max_tokens=rollout.max_completion_tokens
    max_completion_length=rollout.max_completion_tokens max_prompt_length=rollout.max_prompt_tokens
    max_steps=run.steps num_iterations=algorithm.epochs loss_type=algorithm.loss_aggregation
    max_grad_norm=optimizer.grad_clip lr_scheduler_type=optimizer.schedule output_dir=run.directory
    save_steps=checkpoint.every_steps eval_steps=eval.every_steps model_name_or_path=model.path
    num_hidden_layers=model.num_layers num_attention_heads=model.num_heads
    num_key_value_heads=model.num_kv_heads dataset=task.kind reward=rewards vllm=rollout.engine
    loss_scale=precision.loss_scale
"""
SYNONYMS: dict[str, str] = dict(pair.split("=") for pair in _NAMES.split())
_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "section": "a section of fields",
    "array": "a list of sections",
    "integers": "a list of whole numbers",
    "texts": "a list of texts",
    "object": "a section of free names and values",
    "free": "a value",
}
_ITEMS = {"integer": "integers", "string": "texts"}  # else sections
LISTS = ("array", *_ITEMS.values())
_LIMITS = {
    "exclusiveMinimum": "greater than",
    "minimum": "at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
    "multipleOf": "a multiple of",
}


@cache
def _sections() -> dict[str, Node]:
    schema = RunConfig.model_json_schema()
    return {"RunConfig": schema, **schema["$defs"]}


class Place:
    """What a path of the config accepts.

    type: a key of `_WORDS`, or "choice" for one of `choices`; optional: whether null is accepted too.
    kinds: name -> section, for a path that takes one of several sections; tag: the field that selects one of
      them, "" if there is none.
    words: the accepted values in words, such as "a whole number, at least 2".
    default: as YAML text, or "required".
    meaning: the description of the field, or else of the section.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        given = [part for part in node.get("anyOf", [node]) if part.get("type") != "null"]
        self.takes: Node = given[0]
        self.optional = self.takes is not node
        self.choices: list[str] = self.takes.get("enum", [])
        self.tag: str = node.get("discriminator", {}).get("propertyName", "")
        self.kinds: dict[str, Node] = {}
        for part in self.takes.get("oneOf", [self.takes]):
            if "$ref" in part:
                section = _sections()[part["$ref"].rpartition("/")[2]]
                tag = section["properties"].get(self.tag, {"const": section["title"]})
                self.kinds |= dict.fromkeys(tag.get("enum") or [tag["const"]], section)
        self.type = "section" if self.kinds else "choice" if self.choices else self.takes["type"]
        if self.type == "array":
            self.type = _ITEMS.get(self.takes["items"].get("type", ""), "array")
        takes = {name: limit for name, limit in self.takes.items() if limit != INT32_MAX}  # only in errors
        limits = [f"{word} {show(takes[name])}" for name, word in _LIMITS.items() if name in takes]
        limits += ["not empty"] if takes.get("minLength") or takes.get("minItems") else []
        words = f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.type]
        self.words = ", ".join(
            filter(None, [words, " and ".join(limits), "or null" if self.optional else ""])
        )
        value = node.get("default", "required")
        self.default = value if isinstance(value, str) and value.isidentifier() else show(value)
        told = [node.get("description", ""), *(part.get("description", "") for part in self.kinds.values())]
        self.meaning = " ".join(next(filter(None, told), "").split())

    def kind_of(self, value: Any) -> str:
        """The name of the kind of section that was read as `value`."""
        if self.tag:
            said = value.get(self.tag) if isinstance(value, dict) else value
            return str(said or self.node["default"][self.tag])
        keys = {*value} if isinstance(value, dict) else set()
        fits = [name for name, section in self.kinds.items() if keys >= {*section.get("required", ())}]
        return fits[-1] if fits else next(iter(self.kinds), "")

    def having(self, name: str | int) -> list[str]:
        """The kinds of section that have a field of this name."""
        return [kind for kind, section in self.kinds.items() if name in section["properties"]]

    def field(self, name: str, kind: str) -> Place:
        """A field of one of the kinds; a kind that only changes the default takes the meaning of another."""
        having = [self.kinds[other]["properties"][name] for other in (kind, *self.having(name))]
        told = [node["description"] for node in having if "description" in node]
        node = having[0] | {"description": told[0] if told else ""}
        if name == self.tag:
            node |= {"enum": [*self.kinds], "default": self.node["default"][name]}
        return Place(node)


ROOT: Node = {"$ref": "#/$defs/RunConfig"}


def look_up(path: Path, data: Any = None) -> Place:
    """The place at `path`; one that accepts anything if the schema has none, as under free options.

    data: the values of the config that were read; they select among sections of several kinds on the path.
    """
    place = Place(ROOT)
    for part in path:
        if (having := place.having(part)) and isinstance(part, str):
            kind = place.kind_of(data)
            place = place.field(part, kind if kind in having else having[0])
        elif place.type in LISTS and isinstance(part, int):
            place = Place(place.takes["items"])
        else:
            return Place({"type": "free"})
        data = value_in(data, (part,))
    return place


def all_fields(prefix: Path = (), only: str = "") -> Iterator[tuple[str, str, dict[str, Place]]]:
    """Every field that takes a value, as (dotted path, kinds, places).

    The path of an entry of a list is like rewards.N.name.  "Of kind ..." tells which kinds have the field, if
    not all do.  `places` has the field's place for each of those kinds.
    """
    place = look_up(prefix)
    for name in dict.fromkeys(name for section in place.kinds.values() for name in section["properties"]):
        found = {kind: place.field(name, kind) for kind in place.having(name)}
        every = len(found) == len(place.kinds)
        told = only if every else f"{only}Of {place.tag} {', '.join(found)}. ".replace("Of  ", "Of ")
        field = found[next(iter(found))]
        if field.type not in ("section", "array"):
            yield dotted((*prefix, name)).replace(".0.", ".N."), told, found
        else:
            yield from all_fields((*prefix, name, 0) if field.type == "array" else (*prefix, name), told)


def dotted(path: Path) -> str:
    """The path in the form used in messages and after ``--set``."""
    return ".".join(str(part) for part in path)


def split(path: str) -> Path:
    """The inverse of `dotted`; list indices become numbers."""
    return tuple(int(part) if part.isdecimal() and part.isascii() else part for part in path.split("."))


def value_in(data: Any, path: Path) -> Any:
    """The value that was read at `path`, or None."""
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        else:
            has = isinstance(data, list) and isinstance(part, int) and part < len(data)
            data = data[part] if has else None
    return data


def suggest(path: Path, data: Any) -> str:
    """A hint for an unknown key: the fields with similar names, or else all fields of its section."""
    parent, word = look_up(path[:-1], data), str(path[-1]).replace("-", "_").lower()
    section = parent.kinds.get(parent.kind_of(value_in(data, path[:-1])), {})
    siblings = {dotted((*path[:-1], name)): name for name in section.get("properties", {})}
    fields = [*RunConfig.model_fields, *(field for field, _, _ in all_fields())]
    everywhere = {field: field.rpartition(".")[2] for field in fields}
    leaf = word.rpartition(".")[2]
    if word == path[-1] and word in everywhere and "." in word:
        return f"write {leaf} under {word.removesuffix(f'.{leaf}')}:, indented; dots are for --set"
    attempts = (
        [field for field, last in everywhere.items() if leaf == last or word == field],
        [SYNONYMS[leaf]] if leaf in SYNONYMS else [],
        _close(word, siblings, 0.6),
        _close(leaf, everywhere, 0.75),
    )
    likely = next(filter(None, attempts), None)
    if likely is not None:
        return f"did you mean {' or '.join(likely[:3])}?"
    return f"{dotted(path[:-1]) or 'the config'} has: {', '.join(siblings.values())}"


def _close(word: str, fields: dict[str, str], cutoff: float) -> list[str]:
    names = difflib.get_close_matches(word, sorted({*fields.values()}), n=1, cutoff=cutoff)
    return [field for field, last in fields.items() if last in names]
