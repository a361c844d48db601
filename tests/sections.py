"""Sections of a config from the fields that a file would have, without the rules between fields."""

from __future__ import annotations

from typing import Any

from bridge.vllm.settings import EngineSettings
from jetrl_jax.config.precision import Fp8UnifiedSection, NumericsSection
from jetrl_jax.config.run_config import RunConfig


def _section(section: str, fields: dict[str, Any]) -> Any:
    return getattr(RunConfig.model_validate({section: fields}), section)


def task_section(**fields: Any) -> Any:
    """`task` of a config."""
    return _section("task", fields)


def tokenizer_section(**fields: Any) -> Any:
    """`tokenizer` of a config."""
    return _section("tokenizer", fields)


def precision_section(**fields: Any) -> Any:
    """`precision` of a config."""
    return _section("precision", fields)


def algorithm_section(**fields: Any) -> Any:
    """`algorithm` of a config."""
    return _section("algorithm", fields)


def correction_section(**fields: Any) -> Any:
    """`correction` of a config."""
    return _section("correction", fields)


def engine_settings(kind: str = "vllm", *, url: str | None = None, **fields: Any) -> EngineSettings:
    """The settings of a vLLM engine of this kind for 8 tokens of a prompt and 8 of a completion; fields as
    `changed`.
    """
    engine = {"kind": kind} | ({} if url is None else {"url": url})
    rollout = _section("rollout", {"engine": engine, "max_prompt_tokens": 8, "max_completion_tokens": 8})
    return changed(EngineSettings(rollout, Fp8UnifiedSection(), NumericsSection(), sleep=False), **fields)


def changed(settings: EngineSettings, **fields: Any) -> EngineSettings:
    """Settings with other fields of `rollout`, `rollout.engine`, `precision` and `numerics`, or another
    `sleep` or `lora` of their own.
    """
    sleep, lora = (fields.pop(name, getattr(settings, name)) for name in ("sleep", "lora"))
    sections = settings.rollout.engine, settings.rollout, settings.fp8, settings.numerics
    parts = [
        {name: fields.pop(name) for name in type(section).model_fields if name in fields}
        for section in sections
    ]
    assert not fields, fields
    engine, rollout, fp8, numerics = (
        section.model_copy(update=part) for section, part in zip(sections, parts, strict=True)
    )
    return EngineSettings(rollout.model_copy(update={"engine": engine}), fp8, numerics, sleep, lora)
