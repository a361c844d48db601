"""The metrics of an RL step: mismatch between trainer and engine, clip fractions, rewards, lengths.

All are computed on the host in float64.  With lr = clip(old_logprobs − rollout_logprobs, ±20) at the trained
tokens and ρ = e^lr, over tokens sampled by the engine:

    mismatch/k1 = mean(rollout_logprobs − old_logprobs)
    mismatch/k3 = mean(ρ − 1 − lr), as k1 an estimate of KL(engine ‖ trainer)
    mismatch/chi2_token = mean(ρ²) − 1        mismatch/ess = 1 / mean((ρ / mean ρ)²)

``METRICS`` declares every name once.  Metrics do not depend on how sequences are packed, ordered or split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jetrl_jax.rl import LOG_RATIO_LIMIT
from jetrl_jax.rl.advantages import informative_groups


@dataclass(frozen=True)
class Metric:
    """The unit and meaning of a logged number."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "mismatch/k1": Metric("nats/token", "mean of rollout_logprobs − old_logprobs"),
    "mismatch/k3": Metric("nats/token", "mean of ρ − 1 − log ρ; below 1e-3 is good"),
    "mismatch/logprob_abs_mean": Metric("nats", "mean |old_logprobs − rollout_logprobs|"),
    "mismatch/logprob_abs_max": Metric("nats", "largest |old_logprobs − rollout_logprobs|"),
    "mismatch/ppl_ratio": Metric(
        "ratio", "mean over sequences of exp(mean rollout_logprobs − mean old_logprobs)"
    ),
    "mismatch/chi2_token": Metric("ratio", "mean of ρ² − 1 over tokens"),
    "mismatch/chi2_sequence": Metric(
        "ratio", "mean of (product of ρ)² − 1 over sequences, the product's log clamped to ±20"
    ),
    "mismatch/ess": Metric("fraction", "effective sample size of the token weights ρ; 1 is no mismatch"),
    "mismatch/token_mult_prob_error": Metric("ratio", "mean of exp|Δ logprob|; above 1.05 is bad"),
    "clip/positive_fraction": Metric(
        "fraction", "tokens with A > 0 whose ratio is above 1 + clip_high: no gradient (CISPO: a cut weight)"
    ),
    "clip/negative_fraction": Metric(
        "fraction", "tokens with A < 0 whose ratio is below 1 − clip_low: no gradient (CISPO: a cut weight)"
    ),
    "clip/dual_negative_fraction": Metric(
        "fraction", "tokens with A < 0 whose ratio is above dual_clip: no gradient"
    ),
    "clip/outside_low_positive_fraction": Metric(
        "fraction", "tokens with A > 0 whose ratio is below 1 − clip_low"
    ),
    "clip/outside_high_negative_fraction": Metric(
        "fraction", "tokens with A < 0 whose ratio is above 1 + clip_high"
    ),
    "correction/weight_mean": Metric("ratio", "mean correction weight of the trained tokens"),
    "correction/weight_max": Metric("ratio", "largest correction weight of a trained token"),
    "correction/weight_ess": Metric(
        "fraction", "effective sample size of the correction weights; 1 is equal weights"
    ),
    "correction/bounded_fraction": Metric(
        "fraction", "tokens whose weight was truncated or zeroed by a bound"
    ),
    "correction/rejected_token_fraction": Metric(
        "fraction", "tokens that left the loss by rejection or veto"
    ),
    "correction/rejected_sequence_fraction": Metric("fraction", "sequences without any token left"),
    "correction/vetoed_sequence_fraction": Metric(
        "fraction", "sequences with a token below the veto's ratio"
    ),
    "policy/ratio_mean": Metric("ratio", "mean importance ratio of the step"),
    "policy/old_kl": Metric(
        "nats/token", "mean of ratio − 1 − log ratio: how far the step's policy is from the old one"
    ),
    "policy/reference_kl": Metric("nats/token", "mean of the KL estimate to the frozen reference"),
    "policy/entropy": Metric("nats/token", "mean entropy of the next-token distribution at trained tokens"),
    "policy/trained_tokens": Metric(
        "tokens", "completion tokens in the loss, once for each epoch: neither masked nor rejected"
    ),
    "policy/positive_token_fraction": Metric("fraction", "trained tokens with A > 0"),
    "policy/negative_token_fraction": Metric("fraction", "trained tokens with A < 0"),
    "reward/mean": Metric("reward", "mean over counted samples"),
    "reward/std": Metric("reward", "standard deviation (n) over counted samples"),
    "reward/min": Metric("reward", "smallest counted reward"),
    "reward/max": Metric("reward", "largest counted reward"),
    "reward/group_std_mean": Metric(
        "reward", "mean over groups of the standard deviation (n − 1) within the group"
    ),
    "reward/equal_group_fraction": Metric(
        "fraction", "groups without an advantage: equal rewards or fewer than two counted"
    ),
    "reward/masked_fraction": Metric("fraction", "samples whose reward failed"),
    "length/completion_tokens_mean": Metric("tokens", "mean completion length"),
    "length/completion_tokens_min": Metric("tokens", "shortest completion"),
    "length/completion_tokens_max": Metric("tokens", "longest completion"),
    "length/prompt_tokens_mean": Metric("tokens", "mean prompt length"),
    "length/truncated_fraction": Metric("fraction", "completions cut at the longest length"),
}


@np.errstate(invalid="ignore")  # inf − inf is NaN, which is what the caller should see
def mismatch_metrics(
    old_logprobs: ArrayLike, rollout_logprobs: ArrayLike, mask: ArrayLike, sequence_index: ArrayLike
) -> dict[str, float]:
    """The mismatch of trainer and engine on the same tokens under the same weights.

    Args:
        old_logprobs: of the trainer, any shape (rows [R, T], or microbatches stacked).
        rollout_logprobs: of the engine, same shape.
        mask: bool, same shape; values outside are not read.
        sequence_index: integers, same shape: which sequence a token belongs to.

    Returns:
        The nine ``mismatch/`` values; {} where no token is masked in.  A non-finite log-probability makes the
        values it enters non-finite.

    Raises:
        ValueError: shapes that differ.
    """
    arrays = [np.asarray(a) for a in (old_logprobs, rollout_logprobs, mask, sequence_index)]
    if len({a.shape for a in arrays}) > 1:
        raise ValueError(
            f"mismatch_metrics: shapes differ: got {[a.shape for a in arrays]}, expected the same for "
            "all four"
        )
    where = arrays[2].astype(bool)
    if not where.any():
        return {}
    old, rollout = arrays[0][where].astype(np.float64), arrays[1][where].astype(np.float64)
    _, sequence = np.unique(arrays[3][where], return_inverse=True)
    length = np.bincount(sequence)

    difference = old - rollout
    log_ratio = _clamp(difference)
    ratio = np.exp(log_ratio)
    sequence_sum = np.bincount(sequence, weights=difference).astype(np.float64)
    return {
        "mismatch/k1": float(-difference.mean()),
        "mismatch/k3": float((np.expm1(log_ratio) - log_ratio).mean()),
        "mismatch/logprob_abs_mean": float(np.abs(difference).mean()),
        "mismatch/logprob_abs_max": float(np.abs(difference).max()),
        "mismatch/ppl_ratio": float(np.exp(_clamp(-sequence_sum / length)).mean()),
        "mismatch/chi2_token": float(np.expm1(2 * log_ratio).mean()),
        "mismatch/chi2_sequence": float(np.expm1(2 * _clamp(sequence_sum)).mean()),
        "mismatch/ess": float(ratio.mean() ** 2 / (ratio**2).mean()),
        "mismatch/token_mult_prob_error": float(np.exp(np.abs(log_ratio)).mean()),
    }


def loss_metrics(sums: Mapping[str, ArrayLike]) -> dict[str, float]:
    """Fractions and means from the sums of `losses.policy_loss` and `algorithm.policy_objective`.

    Args:
        sums: added over the microbatches (and optimiser steps) that the metrics describe.

    Returns:
        ``clip/`` and ``policy/`` values.  A fraction of no tokens is 0; without trained tokens the means are
        left out.
    """
    s = {name: float(np.asarray(value)) for name, value in sums.items()}
    metrics = {
        "clip/positive_fraction": _fraction(s["clipped_high_positive"], s["positive_tokens"]),
        "clip/negative_fraction": _fraction(s["clipped_low_negative"], s["negative_tokens"]),
        "clip/dual_negative_fraction": _fraction(s["clipped_dual_negative"], s["negative_tokens"]),
        "clip/outside_low_positive_fraction": _fraction(s["outside_low_positive"], s["positive_tokens"]),
        "clip/outside_high_negative_fraction": _fraction(s["outside_high_negative"], s["negative_tokens"]),
        "policy/positive_token_fraction": _fraction(s["positive_tokens"], s["tokens"]),
        "policy/negative_token_fraction": _fraction(s["negative_tokens"], s["tokens"]),
        "policy/trained_tokens": s["tokens"],
    }
    means = {
        "ratio_sum": "ratio_mean",
        "old_kl_sum": "old_kl",
        "kl_sum": "reference_kl",
        "entropy_sum": "entropy",
    }
    if s["tokens"] > 0:
        metrics |= {f"policy/{name}": s[total] / s["tokens"] for total, name in means.items() if total in s}
    return metrics


def reward_metrics(rewards: ArrayLike, mask: ArrayLike) -> dict[str, float]:
    """Statistics of rewards [P, G] over the counted samples of ``mask`` [P, G].

    Returns:
        ``reward/`` values; only the two fractions where no sample counts.

    Raises:
        ValueError: as `advantages.grpo`.
    """
    values, counted = np.asarray(rewards, np.float64), np.asarray(mask, bool)
    metrics = {
        "reward/equal_group_fraction": float(1.0 - informative_groups(values, counted).mean()),
        "reward/masked_fraction": float(1.0 - counted.mean()),
    }
    if counted.any():
        kept = values[counted]
        stds = [group[c].std(ddof=1) for group, c in zip(values, counted, strict=True) if c.sum() >= 2]
        metrics |= {
            "reward/mean": float(kept.mean()),
            "reward/std": float(kept.std()),
            "reward/min": float(kept.min()),
            "reward/max": float(kept.max()),
            "reward/group_std_mean": float(np.mean(stds)) if stds else 0.0,
        }
    return metrics


def reward_part_metrics(parts: Mapping[str, ArrayLike]) -> dict[str, float]:
    """``reward/<name>_mean`` of each reward function over the samples where it did not fail (NaN), if any."""
    finite = {name: np.asarray(values, np.float64) for name, values in parts.items()}
    return {
        f"reward/{name}_mean": float(np.nanmean(v)) for name, v in finite.items() if not np.isnan(v).all()
    }


def length_metrics(
    completion_tokens: ArrayLike, prompt_tokens: ArrayLike, finish_reasons: Sequence[str]
) -> dict[str, float]:
    """Statistics of lengths in tokens [N], and the share of completions cut by length; {} if N is 0."""
    completions, prompts = np.asarray(completion_tokens), np.asarray(prompt_tokens)
    if completions.size == 0:
        return {}
    return {
        "length/completion_tokens_mean": float(completions.mean()),
        "length/completion_tokens_min": float(completions.min()),
        "length/completion_tokens_max": float(completions.max()),
        "length/prompt_tokens_mean": float(prompts.mean()),
        "length/truncated_fraction": float(np.mean([reason == "length" for reason in finish_reasons])),
    }


def _clamp(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(values, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _fraction(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
