"""The precision plan and the numerics that a config asks for: the only module of config/ that imports jax."""

from __future__ import annotations

from collections.abc import Iterable

from jetrl_jax.config.precision import NumericsSection, PrecisionSection
from jetrl_jax.precision.formats import PRESETS
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.plan import PrecisionPlan


def build_plan(paths: Iterable[str], section: PrecisionSection) -> PrecisionPlan:
    """The plan of a model with these parameter paths."""
    overrides = [(override.pattern, override.format) for override in section.overrides]
    return PrecisionPlan(paths, section.preset, overrides, wgrad_operand=section.wgrad_operand, scale_format=section.scale_format)


def build_numerics(precision: PrecisionSection, numerics: NumericsSection, engine: str) -> Numerics:
    """The numerics of a model; `engine` is `rollout.engine`."""
    return Numerics(
        compute_dtype=PRESETS[precision.preset].value.dtype,
        engine_variant=numerics.engine_variant,
        exact=numerics.exact,
        promotion_order=precision.promotion_order,
        wgrad_operand=precision.wgrad_operand,
        scale_format=precision.scale_format,
        kernels=numerics.kernels,
        attention=numerics.attention,
        dense="float64" if numerics.exact and engine == "vllm" else "auto",
    )
