"""The config sections of the policy's arithmetic; imports no jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jetrl_jax.config.types import PositiveInt, Rule, Section, Text, option

StartScale = Annotated[float, Field(ge=1, le=2**24)]


class PrecisionOverride(Section):
    """One exception to the preset."""

    pattern: Text = Field(
        description="Glob over parameter paths, such as *.down_proj.weight; it must match one."
    )
    format: Literal["bf16", "fp8"] = Field(description="bf16 takes the layers out of FP8; fp8 puts them in.")


class _WithCache(Section):
    """The fields of every preset."""

    preset: str
    kv_cache: Literal["bf16", "fp8"] = option(
        "bf16",
        "Keys and values in attention, in the trainer and in the engine's cache: fp8 rounds them to E4M3 "
        "codes with one power of two for each layer, which halves the cache; bf16 keeps them as they are.",
    )
    kv_query: Literal["bf16", "fp8"] = option(
        "bf16", "Queries likewise, for a vLLM on a GPU whose own attention quantises them (exact: false)."
    )

    def _rules(self) -> Iterator[Rule]:
        holds = self.kv_query == "bf16" or self.kv_cache == "fp8"
        what = "no engine quantises queries beside a BF16 cache"
        yield Rule(holds, "kv_query", what, "bf16, or precision.kv_cache: fp8")


class UnquantizedSection(_WithCache):
    """One format for every product."""

    preset: Literal["fp32", "bf16"] = option(
        "bf16",
        "Precision flow: fp8_unified is FP8 in rollout, forward and backward; fp8_forward has a BF16 "
        "backward; fp8_rollout_only trains in BF16; bf16 has no FP8; fp16 has none and scales its loss.",
    )

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        what = "an FP32 policy rounds nothing between operations"
        holds = self.kv_cache == "bf16" or self.preset != "fp32"
        yield Rule(holds, "kv_cache", what, "bf16, or another precision.preset")


class LossScaleSection(Section):
    """Dynamic loss scaling."""

    initial: StartScale = option(32768.0, "Factor of the loss at the first update.")
    growth_interval: PositiveInt = option(400, "Finite updates until the scale doubles; overflow halves it.")


class Fp16Section(_WithCache):
    """FP16, with a scaled loss."""

    preset: Literal["fp16"] = "fp16"
    loss_scale: LossScaleSection = LossScaleSection()


class Fp8Section(_WithCache):
    """FP8 with block scales."""

    overrides: tuple[PrecisionOverride, ...] = option((), "Exceptions to the preset; the last match wins.")
    scale_format: Literal["float32", "power_of_two"] = option("float32", "Values of a block's scale.")
    promotion_order: Literal["deepgemm", "triton"] = option(
        "deepgemm", "Order of the two scale products when a 128-block enters the FP32 accumulator."
    )


class Fp8WithoutWgradSection(Fp8Section):
    """FP8 where WGrad has none."""

    preset: Literal["fp8_forward", "fp8_rollout_only"] = "fp8_forward"


class Fp8UnifiedSection(Fp8Section):
    """FP8 in every product of the linear layers."""

    preset: Literal["fp8_unified"] = "fp8_unified"
    wgrad_operand: Literal["requantize", "dual", "block"] = option(
        "requantize",
        "How the saved activation reaches WGrad: from its FP8 codes (requantize, the paper's), quantised "
        "again from BF16 (dual) or in 128x128 blocks (block).",
    )


PrecisionSection = Annotated[
    UnquantizedSection | Fp16Section | Fp8UnifiedSection | Fp8WithoutWgradSection,
    Field(discriminator="preset"),
]


def fp8_choices(section: PrecisionSection) -> Fp8UnifiedSection:
    """The FP8 fields of a preset, with defaults for those that it does not have."""
    said = {name: value for name, value in section if name in Fp8UnifiedSection.model_fields}
    return Fp8UnifiedSection.model_validate(said | {"preset": "fp8_unified"})


class NumericsSection(Section):
    """Rounding points and exactness of the forward pass."""

    exact: bool = option(
        True,
        "Whether rollout and training logprobs are the same bits; false is faster. Sums are in float64, on a "
        "Hopper GPU in kernels with one order of sums. A GPU on which these cannot run is slow, with a "
        "warning.",
    )
    engine_variant: Literal["native", "cuda"] = option(
        "native", "Those operations of vLLM whose rounding the model mirrors."
    )
    kernels: Literal["auto", "xla", "xla_fast", "mosaic_gpu", "mosaic_interpret"] = option(
        "auto",
        "What forms the FP8 products and their codes: Pallas kernels on a Hopper GPU (mosaic_gpu; "
        "mosaic_interpret on a CPU, slowly), XLA exactly or with FP32 sums. auto: kernels where they run, "
        "else xla for the forward of an exact run and xla_fast elsewhere.",
    )
    attention: Literal["auto", "xla", "cudnn", "mosaic_gpu", "mosaic_interpret"] = option(
        "auto",
        "What computes attention, in training and in the embedded engine: Pallas kernels on a Hopper GPU, "
        "which are exact (mosaic_gpu; mosaic_interpret on a CPU, slowly), cuDNN's, which are not, or XLA. "
        "auto, on a GPU and not in fp32: mosaic_gpu for an exact run, cudnn for another, if they can run; "
        "else xla.",
    )

    head_gradient: Literal["auto", "fp32", "bf16x3", "bf16x2", "bf16"] = option(
        "auto",
        "How the head multiplies the FP32 gradient of its logits: in FP32, or in three, two or one BF16 "
        "parts on tensor cores, which are all of it, or miss at most 2^-15 or 2^-8 of a value. auto: bf16x3 "
        "on a GPU in flows whose values are BF16, else fp32.",
    )

    def _rules(self) -> Iterator[Rule]:
        other = "another one, or numerics.exact: false"
        holds = not self.exact or self.kernels != "xla_fast"
        yield Rule(holds, "kernels", "bits of xla_fast depend on the number of rows", other)
        holds = not self.exact or self.attention != "cudnn"
        yield Rule(holds, "attention", "bits of cuDNN's attention depend on shapes", other)
