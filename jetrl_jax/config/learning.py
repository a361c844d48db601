"""The config sections of what is learned and how the weights move; imports no jax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from jetrl_jax.config.types import Decay, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

AlgorithmName = Literal["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
OVERLONG_FRACTION = 5  # DAPO: 4,096 of 20,480 tokens


@dataclass(frozen=True)
class AlgorithmDefaults:
    """What the null fields of an algorithm stand for."""

    aggregation: Aggregation = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dynamic_sampling: bool = False
    overlong: bool = False  # whether a fifth of the longest completion is the overlong buffer


ALGORITHM_DEFAULTS: dict[str, AlgorithmDefaults] = {
    "grpo": AlgorithmDefaults(),
    "dapo": AlgorithmDefaults(clip_high=0.28, dynamic_sampling=True, overlong=True),
    "dr_grpo": AlgorithmDefaults(aggregation="constant"),
    "rloo": AlgorithmDefaults(),
    "reinforce_pp": AlgorithmDefaults(),
    "gspo": AlgorithmDefaults(aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4),
    "cispo": AlgorithmDefaults(clip_low=1.0, clip_high=4.0),
}


class AlgorithmSection(Section):
    """Advantage, loss and the rules around them."""

    name: AlgorithmName = Field("grpo", description="Algorithm; sets the defaults of the null fields below.")
    loss_aggregation: Aggregation | None = Field(
        None, description="How token losses become one number; null: constant for dr_grpo, sequence_mean for gspo, else token_mean."
    )
    clip_low: PositiveFloat | None = Field(
        None, description="Distance below 1 at which the importance ratio is clipped; null: 3e-4 for gspo, 1 (off) for cispo, else 0.2."
    )
    clip_high: PositiveFloat | None = Field(
        None,
        description="Distance above 1 at which the importance ratio is clipped; null: 0.28 for dapo, 4e-4 for gspo, 4 for cispo, else 0.2.",
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Bound c of the loss of negative advantages (3 is common); null: off."
    )
    kl_coef: NonNegativeFloat = Field(0.0, description="Factor of the KL term to the frozen start policy; 0 is off.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of the KL term.")
    epochs: PositiveInt = Field(1, description="Passes over a rollout batch.")
    minibatches: PositiveInt = Field(1, description="Optimiser steps of one pass.")
    mask_truncated: bool = Field(False, description="Whether completions cut at max_completion_tokens get no gradient.")
    dynamic_sampling: bool | None = Field(
        None, description="Whether groups with equal rewards are replaced by new ones; null: true for dapo, else false."
    )
    max_generation_rounds: PositiveInt = Field(10, description="Most rounds of dynamic sampling in a step.")
    overlong_buffer_tokens: NonNegativeInt | None = Field(
        None,
        description="Length of the soft penalty zone before max_completion_tokens, in tokens; null: a fifth of it for dapo, else 0 (off).",
    )

    def resolved(self, field: str, max_completion_tokens: int) -> Any:
        """A field that may be null, or what its null stands for."""
        value = getattr(self, field)
        if value is not None:
            return value
        defaults = ALGORITHM_DEFAULTS[self.name]
        if field == "overlong_buffer_tokens":
            return max_completion_tokens // OVERLONG_FRACTION if defaults.overlong else 0
        return getattr(defaults, "aggregation" if field == "loss_aggregation" else field)


class CorrectionSection(Section):
    """What is done about tokens whose rollout and trainer log-probabilities differ (`jetrl_jax.rl.correction`)."""

    mode: Literal["decoupled", "bypass"] = Field(
        "decoupled",
        description="decoupled: the ratio compares with the trainer's own logprobs, the weight corrects for the engine; "
        "bypass: the ratio compares with the engine's logprobs, nothing is recomputed.",
    )
    weight: Literal["none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"] = Field(
        "none", description="Importance weight of trainer against engine: truncated (TIS) or zeroed outside bounds (MIS, IcePop); none: 1."
    )
    low: PositiveFloat = Field(0.5, description="Ratio below which a mask weight is 0.")
    high: PositiveFloat = Field(2.0, description="Ratio at which a weight is truncated, or above which a mask weight is 0.")
    normalize: bool = Field(False, description="Whether weights are divided by their mean over the batch.")
    reject: Literal["none", "k1", "k2", "k3"] = Field("none", description="Statistic by which tokens or sequences leave the loss.")
    reject_level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = Field(
        "sequence_mean", description="Over what the statistic is taken; a sequence is kept or rejected whole."
    )
    reject_low: PositiveFloat = Field(0.999, description="Smallest inverse ratio that k1 keeps.")
    reject_high: PositiveFloat | None = Field(
        None, description="Largest inverse ratio that k1 keeps, largest value of k2 and k3; null: 1.001 for k1, 0.001 for k2 and k3."
    )
    veto: PositiveFloat | None = Field(
        None, description="A sequence with a token of a smaller ratio leaves the loss whole (1e-4 is common); null: off."
    )

    @property
    def recomputes(self) -> bool:
        """Whether the trainer's log-probabilities at the behaviour version are needed before the loss."""
        return self.weight != "none" or self.reject != "none" or self.veto is not None

    @property
    def resolved_reject_high(self) -> float:
        """`reject_high`, or what its null stands for."""
        return self.reject_high if self.reject_high is not None else 1.001 if self.reject == "k1" else 1e-3

    @property
    def reject_bounds(self) -> tuple[float, float]:
        """Smallest and largest statistic that is kept."""
        if self.reject == "k1":
            return math.log(self.reject_low), math.log(self.resolved_reject_high)
        return -math.inf, self.resolved_reject_high


class OptimizerSection(Section):
    """AdamW of the RL phase; masters and moments are FP32."""

    learning_rate: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the learning rate after warm-up; linear and cosine end at 0."
    )
    warmup_steps: NonNegativeInt = Field(0, description="Optimiser steps of linear warm-up.")
    b1: Decay = Field(0.9, description="Decay of the first moment per optimiser step.")
    b2: Decay = Field(0.999, description="Decay of the second moment per optimiser step.")
    eps: PositiveFloat = Field(1e-8, description="Epsilon added to the root of the second moment.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decoupled weight decay, multiplied by the learning rate.")
    grad_clip: PositiveFloat = Field(1.0, description="Largest global norm of the gradient; a longer one is scaled down.")


class BatchSection(Section):
    """Shapes of the training batch."""

    row_tokens: PositiveInt | None = Field(
        None, description="Length of a packed row, in tokens; null: longest prompt plus longest completion."
    )
    microbatch_tokens: PositiveInt = Field(
        8192,
        description="Size of one forward and backward pass of one device, in tokens (padding included); rounded down to whole rows.",
    )
    remat: Literal["none", "layer"] = Field(
        "none", description="What the backward computes again: nothing; or all within a layer, whose input alone is kept."
    )
    logprob_chunk_tokens: PositiveInt = Field(1024, description="Number of tokens whose logits exist at once.")


class WarmStartSection(Section):
    """Supervised steps on the task's worked solutions, for a model that begins from scratch."""

    steps: NonNegativeInt = Field(0, description="Supervised optimiser steps before RL; 0 is off.")
    batch_size: PositiveInt = Field(256, description="Number of examples of one supervised step.")
    learning_rate: PositiveFloat = Field(2e-3, description="Peak learning rate of the supervised steps, cosine to a tenth of it.")
    noise: Fraction = Field(0.0, description="Chance that a token of the worked solution is replaced by another of the alphabet.")
