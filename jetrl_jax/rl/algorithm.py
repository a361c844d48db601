"""Resolves an algorithm's name to its formulas, and computes their loss.

| name         | advantage    | loss                | aggregation   | clip        | sampling, buffer |
|--------------|--------------|---------------------|---------------|-------------|------------------|
| grpo         | GRPO         | clipped ratio       | token_mean    | 0.2 / 0.2   | off              |
| dapo         | GRPO         | clipped ratio       | token_mean    | 0.2 / 0.28  | dynamic, a fifth |
| dr_grpo      | Dr.GRPO      | clipped ratio       | constant      | 0.2 / 0.2   | off              |
| rloo         | RLOO         | clipped ratio       | token_mean    | 0.2 / 0.2   | off              |
| reinforce_pp | of the batch | clipped ratio       | token_mean    | 0.2 / 0.2   | off              |
| gspo         | GRPO         | ratio of a sequence | sequence_mean | 3e-4 / 4e-4 | off              |
| cispo        | GRPO         | CISPO               | token_mean    | off / 4     | off              |

The classes of `jetrl_jax.config.learning` define the defaults.  Everything downstream reads only the resolved
values.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Float64, Int64

from jetrl_jax.config.learning import (
    Aggregation,
    AlgorithmSection,
    BypassSection,
    ClippedSection,
    CorrectionSection,
    Credit,
    DecoupledSection,
)
from jetrl_jax.errors import UserError
from jetrl_jax.rl import advantages, losses
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.rl.losses import Denominators, KLEstimator


@dataclass(frozen=True)
class ResolvedAlgorithm:
    """An algorithm without nulls; hashable, so usable as a static argument of ``jit``.

    Attributes:
        name: a name in the table.
        advantage: (rewards [P, G], mask [P, G]) -> advantages [P, G].
        aggregation: how token losses become one number.
        clip_low, clip_high: distances of the clip bounds from 1.
        dual_clip: c, or None for off.
        bypass: whether the ratio compares with the engine's log-probabilities.
        recompute: whether the correction needs the trainer's log-probabilities before the loss.
        kl_coef, kl_estimator: the KL term; a coefficient of 0 is off.
        epochs, minibatches: passes over a rollout batch and optimiser steps of one pass.
        mask_truncated: whether completions cut by length are left out of training (their rewards stay in the
          group's mean and std).
        dynamic_sampling, max_generation_rounds: replacement of groups with equal rewards.
        overlong_buffer_tokens: the zone of the overlong penalty; 0 is off.
        max_completion_tokens: L of the overlong penalty and of the ``constant`` aggregation.
        credit: whether the turns of an episode share its advantage, or have their own.
        notes: sentences about settings that a user may not want; for the run's log.
    """

    name: str
    advantage: advantages.AdvantageFunction
    aggregation: Aggregation
    clip_low: float
    clip_high: float
    dual_clip: float | None
    bypass: bool
    recompute: bool
    kl_coef: float
    kl_estimator: KLEstimator
    epochs: int
    minibatches: int
    mask_truncated: bool
    dynamic_sampling: bool
    max_generation_rounds: int
    overlong_buffer_tokens: int
    max_completion_tokens: int
    credit: Credit = "episode"
    notes: tuple[str, ...] = ()

    @property
    def on_policy(self) -> bool:
        """Whether every optimiser step has the policy that sampled, so that the ratio to it is 1."""
        return self.epochs == 1 and self.minibatches == 1

    @property
    def needs_old(self) -> bool:
        """Whether the trainer's log-probabilities at the behaviour version are computed before the loss."""
        return self.recompute or not (self.on_policy or self.bypass)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads ref_logprobs."""
        return self.kl_coef > 0

    def shape_rewards(
        self, rewards: Float64[np.ndarray, "*S"], completion_tokens: Int64[np.ndarray, "*S"]
    ) -> Float64[np.ndarray, "*S"]:
        """Rewards with the overlong penalty added; a masked (NaN) reward stays NaN."""
        return rewards + advantages.overlong_penalty(
            completion_tokens, self.max_completion_tokens, self.overlong_buffer_tokens
        )

    def record(self) -> dict[str, Any]:
        """The resolved values as plain data for the run's record."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["advantage"] = getattr(self.advantage, "__name__", repr(self.advantage))
        values["notes"] = list(self.notes)
        return values


def resolve_algorithm(
    section: AlgorithmSection, max_completion_tokens: int, correction: CorrectionSection | None = None
) -> ResolvedAlgorithm:
    """The formulas named by a section of the config, with its numbers (see the table above).

    Args:
        section: the config's ``algorithm``.
        max_completion_tokens: longest completion, in tokens.
        correction: the config's ``correction``; None is its defaults.

    Returns:
        The resolved algorithm.

    Raises:
        UserError: the overlong buffer is longer than the longest completion.
    """
    buffer = section.overlong_tokens(max_completion_tokens)
    if buffer > max_completion_tokens:
        raise UserError(
            "resolve_algorithm: the penalty zone does not fit: got "
            f"algorithm.overlong_buffer_tokens={buffer}, "
            f"expected at most rollout.max_completion_tokens={max_completion_tokens}"
        )
    return ResolvedAlgorithm(
        name=section.name,
        advantage=_ADVANTAGES.get(section.name, advantages.grpo),
        aggregation=section.loss_aggregation,
        clip_low=section.clip_low,
        clip_high=section.clip_high,
        dual_clip=section.dual_clip if isinstance(section, ClippedSection) else None,
        bypass=isinstance(correction, BypassSection),
        recompute=isinstance(correction, DecoupledSection) and correction.acts,
        kl_coef=section.kl_coef,
        kl_estimator=section.kl_estimator,
        epochs=section.epochs,
        minibatches=section.minibatches,
        mask_truncated=section.mask_truncated,
        dynamic_sampling=section.dynamic_sampling,
        max_generation_rounds=section.max_generation_rounds,
        overlong_buffer_tokens=buffer,
        max_completion_tokens=max_completion_tokens,
        credit=section.credit,
        notes=_notes(section),
    )


def policy_objective(
    logprobs: Float[Array, "R T"],
    batch: TrainBatch,
    denominators: Denominators,
    algorithm: ResolvedAlgorithm,
    *,
    entropy: Float[Array, "R T"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """One microbatch's share of the loss: aggregate(correction · policy_loss + kl_coef · kl_penalty).

    Args:
        logprobs: of the batch's tokens under the policy now, aligned with targets.
        batch: its ``old_logprobs`` of None means on-policy.
        denominators: counts of the whole batch of this optimiser step (`batching.count_denominators`).
        algorithm: resolved; static under ``jit``.
        entropy: aligned with targets, for the statistics only.

    Returns:
        The share, and the sums of `losses.policy_loss` with ``kl_sum`` (Σ of the KL estimate to the
        reference, if there is one) and ``entropy_sum`` (if given).  Loss, gradient and statistics of
        microbatches add up.

    Raises:
        ValueError: a KL term needs ``batch.ref_logprobs``, which is None.
    """
    arrays, clips = (
        (logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask),
        (algorithm.clip_low, algorithm.clip_high),
    )
    if algorithm.name == "cispo":
        token_loss, stats = losses.cispo_loss(*arrays, clip_low=clips[0], clip_high=clips[1])
    else:
        sequences = (
            losses.Sequences(batch.segment_ids, batch.inverse_length) if algorithm.name == "gspo" else None
        )
        token_loss, stats = losses.policy_loss(
            *arrays, clip_low=clips[0], clip_high=clips[1], dual_clip=algorithm.dual_clip, sequences=sequences
        )
    if batch.correction is not None:
        token_loss = token_loss * jax.lax.stop_gradient(losses.masked(batch.correction, batch.loss_mask))
    if algorithm.needs_reference:
        if batch.ref_logprobs is None:
            raise ValueError(
                "policy_objective: no reference: got ref_logprobs=None, expected [R, T] for "
                f"kl_coef={algorithm.kl_coef}"
            )
        kl = losses.kl_penalty(
            logprobs, batch.ref_logprobs, batch.loss_mask, estimator=algorithm.kl_estimator
        )
        token_loss = token_loss + algorithm.kl_coef * kl
        stats["kl_sum"] = jax.lax.stop_gradient(losses.masked_sum(kl, batch.loss_mask))
    if entropy is not None:
        stats["entropy_sum"] = jax.lax.stop_gradient(losses.masked_sum(entropy, batch.loss_mask))
    loss = losses.aggregate(
        token_loss,
        batch.loss_mask,
        batch.inverse_length,
        aggregation=algorithm.aggregation,
        denominators=denominators,
        exposure=batch.exposure,
    )
    return loss, stats


_ADVANTAGES: dict[str, advantages.AdvantageFunction] = {  # the others use GRPO's
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "reinforce_pp": advantages.reinforce_pp,
}


def _notes(section: AlgorithmSection) -> tuple[str, ...]:
    notes = []
    if section.kl_coef > 0 and section.kl_estimator == "k1":
        notes.append(
            "algorithm.kl_estimator k1 has zero expected gradient as a loss term; k2 has that of the "
            "reverse KL"
        )
    if section.clip_low >= 1 and section.clip_low != type(section).model_fields["clip_low"].default:
        notes.append(f"algorithm.clip_low = {section.clip_low} never clips: a ratio is positive")
    return tuple(notes)
