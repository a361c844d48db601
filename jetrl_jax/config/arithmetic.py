"""Builds the precision plan and the numerics of a config; the only module of config/ that imports jax."""

from __future__ import annotations

from collections.abc import Iterable

from jetrl_jax.config.learning import LoraSection
from jetrl_jax.config.precision import NumericsSection, PrecisionSection, fp8_choices
from jetrl_jax.models.lora import Adapters
from jetrl_jax.precision.formats import PRESETS
from jetrl_jax.precision.numerics import Numerics, kv_kinds
from jetrl_jax.precision.plan import PrecisionPlan


def build_plan(paths: Iterable[str], section: PrecisionSection) -> PrecisionPlan:
    """The precision plan of a model with these parameter paths."""
    fp8 = fp8_choices(section)
    overrides = [(override.pattern, override.format) for override in fp8.overrides]
    return PrecisionPlan(
        paths,
        section.preset,
        overrides,
        wgrad_operand=fp8.wgrad_operand,
        scale_format=fp8.scale_format,
        kinds=kv_kinds(section.kv_cache, section.kv_query),
    )


def build_numerics(precision: PrecisionSection, numerics: NumericsSection, vllm: bool) -> Numerics:
    """The numerics of a model; `vllm`: whether vLLM samples it."""
    fp8 = fp8_choices(precision)
    float64 = numerics.exact and vllm  # as an exact vLLM computes
    return Numerics(
        compute_dtype=PRESETS[precision.preset].value.dtype,
        engine_variant=numerics.engine_variant,
        exact=numerics.exact,
        promotion_order=fp8.promotion_order,
        wgrad_operand=fp8.wgrad_operand,
        scale_format=fp8.scale_format,
        kernels=numerics.kernels,
        attention="xla" if float64 and numerics.attention == "auto" else numerics.attention,
        dense="float64" if float64 else "auto",
        head_gradient=numerics.head_gradient,
        kv_cache=precision.kv_cache,
        kv_query=precision.kv_query,
    )


def build_adapters(section: LoraSection | None) -> Adapters | None:
    """The adapters of a config's section; None if all weights are trained."""
    return None if section is None else Adapters(section.rank, section.scale, section.targets)
