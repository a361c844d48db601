"""The config sections of what is learned and how the weights move; imports no jax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jetrl_jax.config.rule import Rule
from jetrl_jax.config.types import (
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    show,
)

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
OVERLONG_FRACTION = 5  # DAPO: 4,096 of 20,480 tokens


class _Algorithm(Section):
    name: str = Field(description="Algorithm: advantage and loss, with its own defaults.")
    loss_aggregation: Aggregation = Field("token_mean", description="How token losses become one number.")
    clip_low: PositiveFloat = Field(
        0.2, description="Distance below 1 at which the importance ratio is clipped; from 1 on it never is."
    )
    clip_high: PositiveFloat = Field(
        0.2, description="Distance above 1 at which the importance ratio is clipped."
    )
    kl_coef: NonNegativeFloat = Field(
        0.0, description="Factor of the KL term to the frozen start policy; 0 is off."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of the KL term.")
    epochs: PositiveInt = Field(1, description="Passes over a rollout batch.")
    minibatches: PositiveInt = Field(1, description="Optimiser steps of one pass.")
    mask_truncated: bool = Field(
        False, description="Whether completions cut at max_completion_tokens get no gradient."
    )
    dynamic_sampling: bool = Field(
        False, description="Whether groups with equal rewards are replaced by new ones."
    )
    max_generation_rounds: PositiveInt = Field(10, description="Most rounds of dynamic sampling in a step.")
    overlong_buffer_tokens: NonNegativeInt | None = Field(
        0,
        description="Length of the soft penalty zone before max_completion_tokens, in tokens; 0 is "
        "off, null a fifth of it.",
    )

    def overlong_tokens(self, max_completion_tokens: int) -> int:
        """`overlong_buffer_tokens`, or what its null stands for."""
        given = self.overlong_buffer_tokens
        return max_completion_tokens // OVERLONG_FRACTION if given is None else given

    def _rules(self) -> Iterator[Rule]:
        if not self.dynamic_sampling:
            yield from self.idle("dynamic sampling is off", "max_generation_rounds")


class ClippedSection(_Algorithm):
    """A loss whose ratio is clipped."""

    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Bound c of the loss of negative advantages (3 is common); null: off."
    )


class GrpoSection(ClippedSection):
    """Group-relative advantages, divided by the group's standard deviation."""

    name: Literal["grpo"] = "grpo"


class DapoSection(ClippedSection):
    """GRPO with clip-higher, dynamic sampling and a soft penalty of long completions."""

    name: Literal["dapo"] = "dapo"
    clip_high: PositiveFloat = 0.28
    dynamic_sampling: bool = True
    overlong_buffer_tokens: NonNegativeInt | None = None


class DrGrpoSection(ClippedSection):
    """GRPO without the two divisions that bias it."""

    name: Literal["dr_grpo"] = "dr_grpo"
    loss_aggregation: Aggregation = "constant"


class RlooSection(ClippedSection):
    """Advantages against the mean of the others of a group."""

    name: Literal["rloo"] = "rloo"


class ReinforceSection(ClippedSection):
    """Advantages normalised over the batch."""

    name: Literal["reinforce_pp"] = "reinforce_pp"


class GspoSection(ClippedSection):
    """GRPO with the ratio of a whole sequence."""

    name: Literal["gspo"] = "gspo"
    loss_aggregation: Aggregation = "sequence_mean"
    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4


class CispoSection(_Algorithm):
    """The clipped ratio as a constant weight, so that every token keeps a gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: PositiveFloat = 1.0
    clip_high: PositiveFloat = 4.0


AlgorithmSection = Annotated[
    GrpoSection | DapoSection | DrGrpoSection | RlooSection | ReinforceSection | GspoSection | CispoSection,
    Field(discriminator="name"),
]


class _Weight(Section):
    kind: str = Field(
        description="Importance weight of trainer against engine: truncated (TIS) or zeroed outside "
        "bounds (MIS, IcePop); none: 1."
    )


class NoWeightSection(_Weight):
    """No token is weighted."""

    kind: Literal["none"] = "none"


class BoundedWeightSection(_Weight):
    """A weight with an upper bound."""

    high: PositiveFloat = Field(
        2.0, description="Ratio at which a weight is truncated, or above which a mask weight is 0."
    )
    normalize: bool = Field(False, description="Whether weights are divided by their mean over the batch.")


class TruncatedWeightSection(BoundedWeightSection):
    """A weight that is truncated."""

    kind: Literal["token_truncate", "sequence_truncate"] = "token_truncate"


class MaskWeightSection(BoundedWeightSection):
    """A weight that is 0 outside its bounds."""

    kind: Literal["token_mask", "sequence_mask"] = "token_mask"
    low: PositiveFloat = Field(0.5, description="Ratio below which a mask weight is 0.")

    def _rules(self) -> Iterator[Rule]:
        expected = f"at most correction.weight.high = {show(self.high)}"
        yield Rule(
            self.low <= self.high,
            "low",
            "no ratio lies between the bounds of the mask",
            expected,
            involves=("high",),
        )


WeightSection = Annotated[
    NoWeightSection | TruncatedWeightSection | MaskWeightSection, Field(discriminator="kind")
]


class _Reject(Section):
    kind: str = Field(
        description="Statistic by which tokens or sequences leave the loss; none: they all stay."
    )


class NoRejectSection(_Reject):
    """Nothing leaves the loss."""

    kind: Literal["none"] = "none"


class StatisticSection(_Reject):
    """A statistic with an upper bound."""

    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = Field(
        "sequence_mean", description="Over what the statistic is taken; a sequence is kept or rejected whole."
    )
    high: PositiveFloat = Field(
        1e-3, description="Largest value that is kept, of k1 the largest inverse ratio."
    )

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest statistic that is kept."""
        return -math.inf, self.high


class RatioStatisticSection(StatisticSection):
    """The logarithm of the inverse ratio, kept between bounds."""

    kind: Literal["k1"] = "k1"
    high: PositiveFloat = 1.001
    low: PositiveFloat = Field(0.999, description="Smallest inverse ratio that k1 keeps.")

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest statistic that is kept."""
        return math.log(self.low), math.log(self.high)

    def _rules(self) -> Iterator[Rule]:
        expected = f"at most correction.reject.high = {show(self.high)}"
        yield Rule(
            self.low <= self.high,
            "low",
            "no ratio lies between the bounds of the rejection",
            expected,
            involves=("high",),
        )


class DistanceStatisticSection(StatisticSection):
    """A distance of the two log-probabilities."""

    kind: Literal["k2", "k3"] = "k2"


RejectSection = Annotated[
    NoRejectSection | RatioStatisticSection | DistanceStatisticSection, Field(discriminator="kind")
]


class _Correction(Section):
    mode: str = Field(
        description="decoupled: the ratio compares with the trainer's own logprobs, the weight "
        "corrects for the engine; "
        "bypass: the ratio compares with the engine's logprobs, nothing is recomputed.",
    )


class DecoupledSection(_Correction):
    """The trainer's own log-probabilities in the ratio (`jetrl_jax.rl.correction`)."""

    mode: Literal["decoupled"] = "decoupled"
    weight: WeightSection = Field(
        NoWeightSection(), description="Importance weight of trainer against engine."
    )
    reject: RejectSection = Field(NoRejectSection(), description="What leaves the loss.")
    veto: PositiveFloat | None = Field(
        None,
        description="A sequence with a token of a smaller ratio leaves the loss whole (1e-4 is "
        "common); null: off.",
    )

    @property
    def acts(self) -> bool:
        """Whether it does anything: the trainer's log-probabilities at the behaviour version are then
        needed before the loss.
        """
        return (
            not isinstance(self.weight, NoWeightSection)
            or not isinstance(self.reject, NoRejectSection)
            or self.veto is not None
        )


class BypassSection(_Correction):
    """The engine's log-probabilities in the ratio."""

    mode: Literal["bypass"] = "bypass"


CorrectionSection = Annotated[DecoupledSection | BypassSection, Field(discriminator="mode")]


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
    weight_decay: NonNegativeFloat = Field(
        0.1, description="Decoupled weight decay, multiplied by the learning rate."
    )
    grad_clip: PositiveFloat = Field(
        1.0, description="Largest global norm of the gradient; a longer one is scaled down."
    )


class BatchSection(Section):
    """Shapes of the training batch."""

    row_tokens: PositiveInt | None = Field(
        None, description="Length of a packed row, in tokens; null: longest prompt plus longest completion."
    )
    microbatch_tokens: PositiveInt = Field(
        8192,
        description="Size of one forward and backward pass of one device, in tokens (padding "
        "included); rounded down to whole rows.",
    )
    remat: Literal["none", "layer"] = Field(
        "none",
        description="What the backward computes again: nothing; or all within a layer, of which only "
        "the input is kept.",
    )
    logprob_chunk_tokens: PositiveInt = Field(
        1024, description="Number of tokens whose logits exist at once."
    )


class WarmStartSection(Section):
    """Supervised steps on the task's worked solutions, for a model that begins from scratch."""

    steps: PositiveInt = Field(description="Supervised optimiser steps before RL.")
    batch_size: PositiveInt = Field(256, description="Number of examples of one supervised step.")
    learning_rate: PositiveFloat = Field(
        2e-3, description="Peak learning rate of the supervised steps, cosine to a tenth of it."
    )
    noise: Fraction = Field(
        0.0, description="Chance that a token of the worked solution is replaced by another of the alphabet."
    )
