"""What every section of the config is made of: a strict base class, types of numbers and texts,
how a value is found and shown.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from jetrl_jax.config.rule import Rule
from jetrl_jax.errors import UserError

INT32_MAX = 2**31 - 1  # sizes and seeds meet int32 in JAX
# Below the first, the roundoff of FP32 logits divided by it decides what is sampled (near 0 they are
# infinite, or NaN).
TEMPERATURES = (1e-3, 1e6)
VLLM_TEMPERATURES = (0.01, 2.0)  # vLLM raises a lower one in silence and refuses a higher one
PositiveInt = Annotated[int, Field(gt=0, le=INT32_MAX)]
NonNegativeInt = Annotated[int, Field(ge=0, le=INT32_MAX)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


def _plain(value: Any, where: str = "") -> Any:
    """`value` with tuples as lists, if YAML can hold it: text, finite numbers, true, false, null, lists,
    mappings.
    """
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}.{i}") for i, item in enumerate(value)]
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    what = f"{where.lstrip('.') or 'the value'} cannot be written to a config file"
    raise PydanticCustomError(
        "config_value",
        "{what}",
        {"what": what, "expected": "text, finite numbers, true, false, null, lists and mappings"},
    )


Options = Annotated[dict[str, Any], AfterValidator(_plain)]


def _known_home(value: str) -> str:
    """A path whose ``~name`` is somebody's home, or that has none."""
    if os.path.expanduser(value).startswith("~"):
        expected = {"what": "there is no such home directory", "expected": "~ or the name of a user after it"}
        raise PydanticCustomError("config_value", "{what}", expected)
    return value


UserPath = Annotated[Text, AfterValidator(_known_home)]


class Section(BaseModel):
    """A part of the config: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def rules(self) -> Iterable[Rule]:
        """What its fields demand of each other; `jetrl_jax.config.rules` has what they demand of other
        sections.
        """
        return self._rules()

    def _rules(self) -> Iterable[Rule]:
        return ()

    def idle(self, because: str, *names: str) -> Iterator[Rule]:
        """That fields which do nothing, for a reason, are left at their defaults."""
        for name in names:
            same = getattr(self, name) == type(self).model_fields[name].default
            yield Rule(same, name, "has no effect here", "the field left out", f"{because}; remove it")


def value_at(config: Any, path: str) -> Any:
    """The value of a dotted path such as model.path or rewards.0.weight."""
    for part in path.split("."):
        config = config[int(part)] if isinstance(config, tuple) else getattr(config, part)
    return config


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path as a user writes it: ``~`` is the home directory, in configs and after ``--out=`` too, where no
    shell sees it.

    Raises `UserError` on ``~name`` where there is no such user.
    """
    expanded = os.path.expanduser(path)
    if str(expanded).startswith("~"):
        raise UserError(
            f"no such home directory: got {str(path)!r}, expected ~ or the name of a user after it."
        )
    return Path(expanded)


def show(value: Any) -> str:
    """A value as it would be written in YAML, on one line, at most about 60 characters long."""
    if isinstance(value, float):
        text = re.sub(r"e([-+])0*(\d)", r"e\1\2", repr(value)).replace("e+", "e")
    else:
        text = json.dumps(
            value,
            ensure_ascii=False,
            default=lambda part: part.model_dump() if hasattr(part, "model_dump") else str(part),
        )
    return text if len(text) <= 60 else text[:57] + "..."
