"""Rollout correction: weights and rejections for tokens sampled from another distribution than the trainer's.

With lr_t = clip(old_logprobs_t − rollout_logprobs_t, ±20) of a token, and L = clip(Σ_t (old − rollout), ±20)
of a sequence:

    weight             w                                                         known as
    none               1
    token_truncate     min(e^lr, high)                                           TIS, token level
    sequence_truncate  min(e^L, high)                                            TIS, sequence level
    token_mask         e^lr where low <= e^lr <= high, else 0                    MIS; IcePop with 0.5 to 5
    sequence_mask      e^L where low <= e^L <= high, else 0                      MIS, sequence level

A weight is a constant that multiplies the token's policy loss.  With ``normalize`` the weights are then
divided by their mean (over kept tokens or, for the two sequence weights, over kept sequences).  A token of
weight 0 still counts in the denominators; a rejected token does not:

    reject k1 = −lr, k2 = lr²/2, k3 = e^lr − 1 − lr   of a token, or its sum, mean or maximum over a sequence
        k1 is kept between log reject_low and log reject_high (bounds of the inverse ratio; sequence_mean is
        the geometric criterion), k2 and k3 up to reject_high
    veto: a sequence with any e^(old_logprobs − rollout_logprobs) < veto is rejected whole (compared as logs)

Everything runs on the host in float64, once for the whole batch, so that means do not depend on the
microbatches.  Arrays hold one value per sampled token; tokens of a prompt or an environment are in no sum.
Samples that are not trained are not read.

Sources: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS, MIS); IcePop;
geometric criterion and veto: veRL's rollout correction.  Departure: e^lr is clamped before truncation at both
levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jetrl_jax.config.learning import DecoupledSection, MaskWeightSection, NoWeightSection, StatisticSection
from jetrl_jax.rl import LOG_RATIO_LIMIT

Arrays = list[NDArray[np.float64]]


@dataclass(frozen=True)
class Correction:
    """The correction of each sampled token.

    Attributes:
        weights: N float64 arrays [sampled tokens]; 1 where nothing is corrected.
        keep: N bool arrays [sampled tokens]; false if the token leaves the loss and its denominators.
        metrics: the ``correction/`` values.
    """

    weights: Arrays
    keep: list[NDArray[np.bool_]]
    metrics: dict[str, float]


def correct(
    section: DecoupledSection,
    old_logprobs: Sequence[ArrayLike],
    rollout_logprobs: Sequence[ArrayLike],
    mask: ArrayLike,
) -> Correction:
    """The weights and rejections of a batch.

    Args:
        section: the config's ``correction``.
        old_logprobs: N arrays [sampled tokens] of the trainer at the behaviour version.
        rollout_logprobs: N arrays of the engine, same lengths; both are read only where ``mask`` is true.
        mask: bool [N], true for trained trajectories.

    Returns:
        The `Correction`, with weights of 1 and keeps of false where ``mask`` is false.  A trained
        log-probability that is NaN makes its weight NaN, so it is not hidden; an infinite one is clamped.

    Raises:
        ValueError: lengths differ.
    """
    trained = np.asarray(mask, bool)
    old, rollout = (
        [np.asarray(a, np.float64) for a in arrays] for arrays in (old_logprobs, rollout_logprobs)
    )
    fits = len(old) == len(rollout) == len(trained)
    wrong = [int(i) for i in np.flatnonzero(trained) if old[i].shape != rollout[i].shape] if fits else []
    if wrong or not fits:
        raise ValueError(
            f"correct: lengths differ: got {len(old)} old_logprobs, {len(rollout)} rollout_logprobs, "
            f"{len(trained)} masks, "
            f"unequal trajectories {wrong[:5]}, expected one value per sampled token in both"
        )
    difference = [o - r if t else np.zeros(r.shape) for o, r, t in zip(old, rollout, trained, strict=True)]
    log_ratio = [np.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) for d in difference]
    keep, vetoed = _kept(section, difference, log_ratio, trained)
    weights, cut = _weights(section, difference, log_ratio)
    if not isinstance(section.weight, NoWeightSection) and section.weight.normalize:
        mean = _mean_weight(section, weights, keep)
        weights = [w / mean if mean > 0 else w for w in weights]
    weights = [w if t else np.ones_like(w) for w, t in zip(weights, trained, strict=True)]
    return Correction(weights, keep, _metrics(weights, cut, keep, vetoed, trained))


def _kept(
    section: DecoupledSection, difference: Arrays, log_ratio: Arrays, trained: NDArray[np.bool_]
) -> tuple[list[NDArray[np.bool_]], NDArray[np.bool_]]:
    """(the tokens that are kept, the sequences that are vetoed)."""
    keep = [np.full(lr.shape, t, bool) for lr, t in zip(log_ratio, trained, strict=True)]
    if isinstance(section.reject, StatisticSection):
        low, high = section.reject.bounds
        for index in np.flatnonzero(trained):
            value = _statistic(section.reject.kind, log_ratio[index])
            if section.reject.level != "token":
                # the sequence's sum, mean or max
                value = getattr(value, section.reject.level.removeprefix("sequence_"))()
            # a NaN is kept, so that it reaches the loss and is reported there
            keep[index] &= ~((value < low) | (value > high))
    vetoed = np.zeros(len(keep), bool)
    if section.veto is not None:
        vetoed = np.array(
            [t and bool((d < np.log(section.veto)).any()) for d, t in zip(difference, trained, strict=True)],
            bool,
        )
        keep = [k & ~v for k, v in zip(keep, vetoed, strict=True)]
    return keep, vetoed


def _statistic(name: str, log_ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    if name == "k1":
        return -log_ratio
    return 0.5 * log_ratio**2 if name == "k2" else np.expm1(log_ratio) - log_ratio


def _weights(
    section: DecoupledSection, difference: Arrays, log_ratio: Arrays
) -> tuple[Arrays, list[NDArray[np.bool_]]]:
    """(weights, places where a bound acted)."""
    weight = section.weight
    if isinstance(weight, NoWeightSection):
        return [np.ones(lr.shape) for lr in log_ratio], [np.zeros(lr.shape, bool) for lr in log_ratio]
    level = weight.kind.split("_")[0]
    if level == "sequence":
        log_ratio = [
            np.full(d.shape, np.clip(d.sum(), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) for d in difference
        ]
    ratios = [np.exp(lr) for lr in log_ratio]
    if not isinstance(weight, MaskWeightSection):
        return [np.minimum(r, weight.high) for r in ratios], [r > weight.high for r in ratios]
    cut = [(r < weight.low) | (r > weight.high) for r in ratios]
    return [np.where(c, 0.0, r) for r, c in zip(ratios, cut, strict=True)], cut


def _mean_weight(section: DecoupledSection, weights: Arrays, keep: list[NDArray[np.bool_]]) -> float:
    if section.weight.kind.startswith("sequence"):
        kept = [w[:1] for w, k in zip(weights, keep, strict=True) if k.any()]
    else:
        kept = [w[k] for w, k in zip(weights, keep, strict=True)]
    values = np.concatenate([*kept, np.zeros(0)])
    return float(values.mean()) if values.size else 1.0


def _metrics(
    weights: Arrays,
    cut: list[NDArray[np.bool_]],
    keep: list[NDArray[np.bool_]],
    vetoed: NDArray[np.bool_],
    trained: NDArray[np.bool_],
) -> dict[str, float]:
    if not trained.any():
        return {}
    which = np.flatnonzero(trained)
    kept, bounded = np.concatenate([keep[i] for i in which]), np.concatenate([cut[i] for i in which])
    values = np.concatenate([weights[i] for i in which])[kept]
    metrics = {
        "correction/bounded_fraction": float(bounded.mean()),
        "correction/rejected_token_fraction": float(1.0 - kept.mean()),
        "correction/rejected_sequence_fraction": float(np.mean([not keep[i].any() for i in which])),
        "correction/vetoed_sequence_fraction": float(vetoed[which].mean()),
    }
    if values.size:
        metrics |= {
            "correction/weight_mean": float(values.mean()),
            "correction/weight_max": float(values.max()),
        }
        square = float((values**2).mean())
        # NaN stays NaN
        metrics["correction/weight_ess"] = float(values.mean() ** 2 / square) if square != 0 else 0.0
    return metrics
