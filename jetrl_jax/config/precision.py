"""The config sections of the policy's arithmetic; imports no jax."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jetrl_jax.config.types import PositiveInt, Section, Text


class PrecisionOverride(Section):
    """One exception to the preset."""

    pattern: Text = Field(
        description="Glob over parameter paths, such as layers.0.* or *.down_proj.weight; one that matches nothing is an error."
    )
    format: Literal["bf16", "fp8"] = Field(description="bf16 takes the matched linear layers out of FP8; fp8 puts them in.")


class PrecisionSection(Section):
    """Which matrix multiplication runs in which format."""

    preset: Literal["fp32", "bf16", "fp16", "fp8_unified", "fp8_forward", "fp8_rollout_only"] = Field(
        "fp8_unified",
        description="Precision flow: fp8_unified is FP8 in rollout, forward and backward; fp8_forward has a BF16 backward; "
        "fp8_rollout_only trains in BF16; bf16 has no FP8; fp16 has none either and scales its loss.",
    )
    overrides: tuple[PrecisionOverride, ...] = Field((), description="Exceptions to the preset; the last match wins.")
    wgrad_operand: Literal["requantize", "dual", "block"] = Field(
        "requantize",
        description="How the saved activation reaches WGrad: from its FP8 codes (requantize, the paper's), quantised a second time "
        "from BF16 (dual) or in 128x128 blocks (block).",
    )
    scale_format: Literal["float32", "power_of_two"] = Field("float32", description="Values that a block's scale may take.")
    promotion_order: Literal["deepgemm", "triton"] = Field(
        "deepgemm", description="Order of the two scale products when a 128-block enters the FP32 accumulator."
    )


class LossScaleSection(Section):
    """Dynamic loss scaling of the FP16 flow."""

    initial: Annotated[float, Field(ge=1, le=2**24)] = Field(32768.0, description="Factor of the loss at the first update.")
    growth_interval: PositiveInt = Field(400, description="Finite updates in a row after which the factor doubles; an overflow halves it.")


class NumericsSection(Section):
    """Rounding points and exactness of the forward pass."""

    exact: bool = Field(
        True, description="Shape-independent reductions, so that rollout and training logprobs are the same bits; false is faster."
    )
    engine_variant: Literal["native", "cuda"] = Field(
        "native", description="Whose rounding points the model mirrors: those of vLLM's native operations or of its CUDA kernels."
    )
    kernels: Literal["auto", "xla", "xla_fast", "mosaic_gpu", "mosaic_interpret"] = Field(
        "auto",
        description="What forms the FP8 products, and the codes that they multiply: Pallas kernels on a Hopper GPU (mosaic_gpu; "
        "mosaic_interpret on a CPU, slowly), XLA exactly or with FP32 sums. auto: the kernels where they run, else xla for the "
        "forward of an exact run and xla_fast elsewhere.",
    )
    attention: Literal["auto", "xla", "cudnn"] = Field(
        "auto",
        description="What computes attention, in training and in the embedded engine: cuDNN's flash kernels, which keep no scores and "
        "are not exact, or XLA. auto: cudnn where it can run (a GPU, exact: false, not fp32), else xla.",
    )
