"""The config sections of what is learned and how the weights move; imports no jax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from jetrl_jax.config.types import (
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Section,
    UserPath,
    must,
    option,
    show,
)

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
Credit = Literal["episode", "turn"]
AboveOne = Annotated[float, Field(gt=1)]
OVERLONG_FRACTION = 5  # DAPO: 4,096 of 20,480 tokens


class _Algorithm(Section):
    name: str
    loss_aggregation: Aggregation = option("token_mean", "How token losses become one number.")
    clip_low: PositiveFloat = option(0.2, "Distance below 1 where the importance ratio is clipped; 1: never.")
    clip_high: PositiveFloat = option(0.2, "Distance above 1 where the importance ratio is clipped.")
    kl_coef: NonNegativeFloat = option(0.0, "Factor of the KL term to the frozen start policy; 0 is off.")
    kl_estimator: Literal["k1", "k2", "k3"] = option("k3", "Estimator of the KL term.")
    epochs: PositiveInt = option(1, "Passes over a rollout batch.")
    minibatches: PositiveInt = option(1, "Optimiser steps of one pass.")
    mask_truncated: bool = option(False, "Whether completions cut at their longest get no gradient.")
    dynamic_sampling: bool = option(False, "Whether groups with equal rewards are replaced by new ones.")
    max_generation_rounds: PositiveInt = option(10, "Most rounds of dynamic sampling in a step.")
    overlong_buffer_tokens: NonNegativeInt | None = option(
        0, "Soft penalty zone before max_completion_tokens, in tokens; 0 is off, null a fifth of it."
    )
    credit: Credit = option(
        "episode",
        "Advantage of an episode's tokens: episode: of the sum of its rewards; turn: the sum of the "
        "normalised rewards of the token's turn and of those after it.",
    )

    def overlong_tokens(self, max_completion_tokens: int) -> int:
        """`overlong_buffer_tokens`, with null replaced by a fifth of `max_completion_tokens`."""
        given = self.overlong_buffer_tokens
        return max_completion_tokens // OVERLONG_FRACTION if given is None else given

    def _rules(self) -> Iterator[Rule]:
        if not self.dynamic_sampling:
            yield from self.idle("algorithm.dynamic_sampling is false", "max_generation_rounds")


class ClippedSection(_Algorithm):
    """A loss whose ratio is clipped."""

    dual_clip: AboveOne | None = option(None, "Bound of losses of negative advantages, such as 3; null: off.")


class GrpoSection(ClippedSection):
    """Advantages within a group (rloo: against the mean of its others), or over the batch (reinforce_pp)."""

    name: Literal["grpo", "rloo", "reinforce_pp"] = option("grpo", "Advantage and loss, with their defaults.")


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
    GrpoSection | DapoSection | DrGrpoSection | GspoSection | CispoSection, Field(discriminator="name")
]


class NoWeightSection(Section):
    """No token is weighted."""

    kind: Literal["none"] = option(
        "none",
        "Weight of trainer against engine: truncated (TIS), zeroed outside bounds (MIS, IcePop); none: 1.",
    )


class BoundedWeightSection(Section):
    """A weight with an upper bound."""

    kind: str
    high: PositiveFloat = option(
        2.0, "Ratio at which a weight is truncated, or above which a mask weight is 0."
    )
    normalize: bool = option(False, "Whether weights are divided by their mean over the batch.")


class TruncatedWeightSection(BoundedWeightSection):
    """A weight that is truncated."""

    kind: Literal["token_truncate", "sequence_truncate"] = "token_truncate"


class MaskWeightSection(BoundedWeightSection):
    """A weight that is 0 outside its bounds."""

    kind: Literal["token_mask", "sequence_mask"] = "token_mask"
    low: PositiveFloat = option(0.5, "Ratio below which a mask weight is 0.")

    def _rules(self) -> Iterator[Rule]:
        holds, expected = self.low <= self.high, f"at most correction.weight.high = {show(self.high)}"
        yield Rule(holds, "low", "no ratio lies between the bounds of the mask", expected)


WeightSection = Annotated[
    NoWeightSection | TruncatedWeightSection | MaskWeightSection, Field(discriminator="kind")
]


class NoRejectSection(Section):
    """Nothing leaves the loss."""

    kind: Literal["none"] = option("none", "Statistic by which tokens or sequences leave the loss.")


class StatisticSection(Section):
    """A statistic with an upper bound."""

    kind: str
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = option(
        "sequence_mean", "Over what the statistic is taken; a sequence is kept or rejected whole."
    )
    high: PositiveFloat = option(1e-3, "Largest value that is kept; of k1 the largest inverse ratio.")

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest statistic that is kept."""
        return -math.inf, self.high


class RatioStatisticSection(StatisticSection):
    """The logarithm of the inverse ratio, kept between bounds."""

    kind: Literal["k1"] = "k1"
    high: PositiveFloat = 1.001
    low: PositiveFloat = option(0.999, "Smallest inverse ratio that k1 keeps.")

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest statistic that is kept."""
        return math.log(self.low), math.log(self.high)

    def _rules(self) -> Iterator[Rule]:
        holds, expected = self.low <= self.high, f"at most correction.reject.high = {show(self.high)}"
        yield Rule(holds, "low", "no ratio lies between the bounds of the rejection", expected)


class DistanceStatisticSection(StatisticSection):
    """A distance of the two log-probabilities."""

    kind: Literal["k2", "k3"] = "k2"


RejectSection = Annotated[
    NoRejectSection | RatioStatisticSection | DistanceStatisticSection, Field(discriminator="kind")
]


class DecoupledSection(Section):
    """The trainer's own log-probabilities in the ratio (`jetrl_jax.rl.correction`)."""

    mode: Literal["decoupled"] = option(
        "decoupled",
        "decoupled: the ratio compares with the trainer's own logprobs, the weight corrects for the engine; "
        "bypass: the ratio compares with the engine's logprobs, nothing is recomputed.",
    )
    weight: WeightSection = option(NoWeightSection(), "Importance weight of trainer against engine.")
    reject: RejectSection = option(NoRejectSection(), "What leaves the loss.")
    veto: PositiveFloat | None = option(None, "Least ratio of a token in a kept sequence (1e-4); null: off.")

    @property
    def acts(self) -> bool:
        """Whether any correction is on; the loss then needs the trainer's own log-probabilities."""
        return (self.weight.kind, self.reject.kind, self.veto) != ("none", "none", None)


class BypassSection(Section):
    """The engine's log-probabilities in the ratio."""

    mode: Literal["bypass"] = "bypass"


CorrectionSection = Annotated[DecoupledSection | BypassSection, Field(discriminator="mode")]


class OptimizerSection(Section):
    """AdamW of the RL phase; masters and moments are FP32."""

    learning_rate: PositiveFloat = option(1e-6, "Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", "Course of the learning rate after warm-up; linear and cosine end at 0."
    )
    warmup_steps: NonNegativeInt = option(0, "Optimiser steps of linear warm-up.")
    b1: Decay = option(0.9, "Decay of the first moment per optimiser step.")
    b2: Decay = option(0.999, "Decay of the second moment per optimiser step.")
    eps: PositiveFloat = option(1e-8, "Epsilon added to the root of the second moment.")
    weight_decay: NonNegativeFloat = option(0.1, "Decoupled weight decay, times the learning rate.")
    grad_clip: PositiveFloat = option(1.0, "Largest global norm of the gradient, which is scaled down to it.")


Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Targets = Annotated[
    tuple[Target, ...],
    Field(min_length=1),
    must(lambda names: len(names) == len({*names}), "a layer stands twice", "each once"),
]


class LoraSection(Section):
    """Low-rank adapters, the only parameters that are then trained (`jetrl_jax.models.lora`)."""

    rank: PositiveInt = option(32, "Rank r of the adapters.")
    alpha: PositiveFloat = option(
        32.0, "An adapter's product is multiplied by alpha / r; an exact run needs a power of two."
    )
    rslora: bool = option(False, "Whether alpha is divided by the root of r instead.")
    targets: Targets = option(get_args(Target), "Last names of the linear layers that have an adapter.")
    path: UserPath | None = option(None, "PEFT directory of adapters to start from; null: new ones.")

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class BatchSection(Section):
    """Shapes of the training batch."""

    row_tokens: PositiveInt | None = option(None, "Tokens of a packed row; null: the longest sequence.")
    microbatch_tokens: PositiveInt = option(
        8192, "Size of one forward and backward pass of one device, in tokens (with padding), in whole rows."
    )
    remat: Literal["none", "layer"] = option(
        "none", "What the backward computes again: nothing; or all within a layer, but its input."
    )
    logprob_chunk_tokens: PositiveInt = option(1024, "Number of tokens whose logits exist at once.")


class WarmStartSection(Section):
    """Supervised steps on the task's worked solutions, for a model that begins from scratch."""

    steps: PositiveInt = Field(description="Supervised optimiser steps before RL.")
    batch_size: PositiveInt = option(256, "Number of examples of one supervised step.")
    learning_rate: PositiveFloat = option(2e-3, "Peak learning rate, which a cosine takes to a tenth of it.")
    noise: Fraction = option(0.0, "Chance that a token of the solution is replaced by another one.")
