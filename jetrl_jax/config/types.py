"""The strict base class of the config's sections, their rules, and the types of fields."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from jetrl_jax.errors import UserError

INT32_MAX = 2**31 - 1  # sizes and seeds are int32 in JAX
# At a lower temperature, rounding errors of the FP32 logits decide what is sampled; at 0, they are infinite.
TEMPERATURES = (1e-3, 1e6)
VLLM_TEMPERATURES = (0.01, 2.0)  # vLLM silently raises a lower temperature and rejects a higher one
PositiveInt = Annotated[int, Field(ge=1, le=INT32_MAX)]
NonNegativeInt = Annotated[int, Field(ge=0, le=INT32_MAX)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


def option(default: Any, meaning: str) -> Any:
    """A field with its default, and its description for the reference page and for messages."""
    return Field(default, description=meaning)


def must(holds: Callable[[Any], Any], what: str, expected: str) -> AfterValidator:
    """A validator of one value; `what` and `expected` are the error's text if `holds` is false."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(what, expected)
        return value

    return AfterValidator(check)


def is_plain(value: Any) -> bool:
    """Whether YAML can hold a value: text, finite numbers, true, false, null, lists and mappings of them."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, str):
        return not re.search("[\ud800-\udfff]", value)
    return value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value))


def has_home(path: str) -> bool:
    """Whether a ``~`` or ``~name`` at the beginning of a path is an existing home directory."""
    return not os.path.expanduser(path).startswith("~")


_PLAIN = "text, finite numbers, true, false, null, lists and mappings of them"
_HOME = "~ or the name of a user after it"
Options = Annotated[dict[str, Any], must(is_plain, "cannot be written to a config file", _PLAIN)]
UserPath = Annotated[Text, must(has_home, "there is no such home directory", _HOME)]


@dataclass(frozen=True)
class Rule:
    """A condition on `field` and on the fields named in the texts; a violation is reported at `field`."""

    holds: bool
    field: str
    what: str
    expected: str
    hint: str = ""


@dataclass(frozen=True)
class Problem:
    """One mistake: dotted path, what is wrong, got, expected, how to correct it, file:line or ``--set``."""

    path: str
    what: str
    got: str = ""
    expected: str = ""
    hint: str = ""
    where: str = ""

    @property
    def section(self) -> str:
        """The path of the section that contains the field."""
        return self.path.rpartition(".")[0]

    @property
    def involves(self) -> tuple[str, ...]:
        """The fields that the mistake involves: the one it is reported at, then those named in the texts."""
        return self.path, *re.findall(r"[a-z]\w*(?:\.\w+)+", f"{self.what} {self.expected} {self.hint}")


class Section(BaseModel):
    """A part of the config: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _written_short(cls, data: Any) -> Any:
        """Turns lists into tuples, and expands sections whose kind is left out or written in their place."""
        if not isinstance(data, dict):
            return data
        result = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        for name, info in cls.model_fields.items():
            tag, value = info.discriminator, data.get(name)
            if isinstance(tag, str) and isinstance(value, str | dict):
                default = {tag: getattr(info.default, tag)}
                result[name] = {tag: value} if isinstance(value, str) else default | value
        return result

    def rules(self) -> Iterable[Rule]:
        """The rules between fields of this section; `jetrl_jax.config.rules` has those between sections."""
        return self._rules()

    def _rules(self) -> Iterable[Rule]:
        return ()

    def idle(self, because: str, *names: str, path: str = "") -> Iterator[Rule]:
        """Rules that fields without effect, for the reason `because`, keep their defaults.

        path: prefix of the fields' paths, such as "numerics.".
        """
        for name in names:
            same = getattr(self, name) == type(self).model_fields[name].default
            yield Rule(same, path + name, "has no effect here", "the field left out", f"{because}; remove it")


def value_at(config: Any, path: str) -> Any:
    """The value at a dotted path such as model.path or rewards.0.weight."""
    for part in path.split("."):
        config = config[int(part)] if isinstance(config, tuple) else getattr(config, part)
    return config


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path with ``~`` expanded to the home directory, since the shell does not expand it after ``--out=``.

    Raises `UserError` for ``~name`` if there is no such user.
    """
    if not has_home(str(path)):
        raise UserError(f"no such home directory: got {str(path)!r}, expected {_HOME}.")
    return Path(path).expanduser()


def show(value: Any) -> str:
    """A value in YAML, on one line and cut to about 60 characters."""
    if isinstance(value, float):  # 1e-6, where Python writes 1e-06
        return re.sub(r"e([-+])0*(\d)", r"e\1\2", repr(value)).replace("e+", "e")
    plain = value.model_dump() if isinstance(value, BaseModel) else value
    return cut(json.dumps(plain, ensure_ascii=False, default=str))


def cut(text: str) -> str:
    """The first 60 characters of a text."""
    return text if len(text) <= 60 else text[:57] + "..."
