"""From rewards [P, G] to advantages [P, G]: P prompts, G completions of each, on the host in float64.

    GRPO      A_i = (r_i − mean) / (std + 1e-6),  std with n − 1     (DeepSeekMath; also DAPO)
    Dr.GRPO   A_i = r_i − mean                                       (Understanding R1-Zero-Like Training)
    RLOO      A_i = r_i − mean of the others                         (Back to Basics, REINFORCE leave-one-out)
    REINFORCE++  A_i = (r_i − batch mean) / (batch std + 1e-6),  std with n − 1   (REINFORCE++)

Credit per turn (process supervision, DeepSeekMath 4.1.3) has a reward for each turn of a sample.  The rule
normalises the rewards of all turns of a group, and a turn's advantage is the sum from it on (`of_turns`):

    A_k = Σ_(j ≥ k) (r_j − mean) / (std + 1e-6)

A sample outside ``mask`` (its reward failed or timed out) is left out of mean and std, and has advantage 0.
A group with fewer than two samples left, or with equal rewards, has advantage exactly 0, as it does not show
which of its completions is better.  G = 1 is an error rather than NaN or 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Shaped
from numpy.typing import ArrayLike, NDArray

STD_EPSILON = 1e-6
AdvantageFunction = Callable[[Any, Any], NDArray[np.float64]]


def grpo(rewards: ArrayLike, mask: ArrayLike | None = None) -> Float64[np.ndarray, "P G"]:
    """(r − mean) / (std + 1e-6) within each group, std with n − 1.

    Args:
        rewards: [P, G], finite wherever ``mask`` is true; masked values may be anything, NaN included.
        mask: bool [P, G], true for samples that count; None counts all.

    Returns:
        Adding a constant to a group's rewards changes nothing; scaling them only through the epsilon.

    Raises:
        ValueError: not two-dimensional, fewer than two samples in a group, shapes that differ, a non-finite
          counted reward.
    """
    values, counted = _checked("grpo", rewards, mask)
    centred = _centred(values, counted)
    degrees = np.maximum(counted.sum(axis=1, keepdims=True) - 1, 1)
    std = np.sqrt((centred**2).sum(axis=1, keepdims=True) / degrees)
    return _only_informative(centred / (std + STD_EPSILON), values, counted)


def dr_grpo(rewards: ArrayLike, mask: ArrayLike | None = None) -> Float64[np.ndarray, "P G"]:
    """r − mean within each group, without division by std, so that easy and hard groups keep their weight.

    Arguments, result and errors as in `grpo`.
    """
    values, counted = _checked("dr_grpo", rewards, mask)
    return _only_informative(_centred(values, counted), values, counted)


def rloo(rewards: ArrayLike, mask: ArrayLike | None = None) -> Float64[np.ndarray, "P G"]:
    """r_i − mean of the other counted rewards of its group, which is n/(n − 1) times `dr_grpo`.

    Arguments, result and errors as in `grpo`.
    """
    values, counted = _checked("rloo", rewards, mask)
    others = np.maximum(counted.sum(axis=1, keepdims=True) - 1, 1)
    baseline = (values.sum(axis=1, keepdims=True) - values) / others
    return _only_informative(np.where(counted, values - baseline, 0.0), values, counted)


def reinforce_pp(rewards: ArrayLike, mask: ArrayLike | None = None) -> Float64[np.ndarray, "P G"]:
    """(r − mean) / (std + 1e-6) over all counted samples of the batch, std with n − 1; groups do not matter.

    A batch with equal counted rewards has advantage 0.  The only counted sample of a group keeps its
    advantage.  Departure from the paper: samples are normalised, not tokens (the reward has no KL term here).

    Arguments, result and errors as in `grpo`.
    """
    values, counted = _checked("reinforce_pp", rewards, mask)
    return grpo(values.reshape(1, -1), counted.reshape(1, -1)).reshape(values.shape)


def in_rows(values: ArrayLike, sizes: Sequence[int], fill: float) -> Shaped[np.ndarray, "P G"]:
    """Values [N] of groups, one after the other, as [P, G]; shorter groups are padded with `fill`.

    Raises:
        ValueError: the sizes do not add up to N.
    """
    flat = np.asarray(values)
    if sum(sizes) != len(flat):
        raise ValueError(
            f"in_rows: sizes do not fit: got sizes that add up to {sum(sizes)}, expected {len(flat)}, "
            "the number of values"
        )
    rows = np.full((len(sizes), max(sizes)), fill, flat.dtype)
    rows[np.arange(max(sizes)) < np.asarray(sizes)[:, None]] = flat
    return rows


def of_groups(
    advantage: AdvantageFunction, rewards: ArrayLike, counted: ArrayLike, sizes: Sequence[int]
) -> Float64[np.ndarray, " N"]:
    """Applies one of the functions above to groups of any sizes.

    Args:
        advantage: (rewards [P, G], mask [P, G]) -> advantages [P, G].
        rewards: [N], groups one after the other.
        counted: bool [N].
        sizes: completions of each group, at least two in the largest.
    """
    given = in_rows(np.ones(np.shape(rewards), bool), sizes, False)
    return advantage(in_rows(rewards, sizes, 0.0), in_rows(np.asarray(counted, bool), sizes, False))[given]


def of_turns(
    advantage: AdvantageFunction, rewards: Sequence[ArrayLike], counted: ArrayLike, sizes: Sequence[int]
) -> list[Float64[np.ndarray, " K"]]:
    """Credit per turn: for each turn the sum of the advantages of its own reward and of those after it.

    A turn without a reward has the value of a reward of 0, so that among turns of unequal number the longer
    sample sums more of them, as published.

    Args:
        advantage: (rewards [P, turns of a group], mask) -> advantages; not `rloo`, whose baseline leaves out
          a sample.
        rewards: N arrays [K], of each sample one reward a turn, groups one after the other.
        counted: bool [N]; a group with fewer than two of them has advantage 0.
        sizes: samples of each group.
    """
    given = np.asarray(counted, bool)
    compared = np.repeat([part.sum() >= 2 for part in np.split(given, np.cumsum(sizes)[:-1])], sizes)
    turns = [np.size(values) for values in rewards]
    first = np.cumsum([0, *sizes])
    of_group = [sum(turns[start:stop]) for start, stop in itertools.pairwise(first)]
    flat = np.concatenate([np.asarray(values, np.float64) for values in rewards])
    normalised = of_groups(advantage, flat, np.repeat(given & compared, turns), of_group)
    return [part[::-1].cumsum()[::-1] for part in np.split(normalised, np.cumsum(turns)[:-1])]


def informative_groups(rewards: ArrayLike, mask: ArrayLike | None = None) -> Bool[np.ndarray, " P"]:
    """The groups that dynamic sampling keeps: those with two or more counted samples and unequal rewards.

    DAPO compares the task's rewards, before the overlong penalty is added.

    Args:
        rewards: [P, G], finite wherever ``mask`` is true.
        mask: bool [P, G]; None counts all.
    """
    values, counted = _checked("informative_groups", rewards, mask)
    return _informative(values, counted)


def overlong_penalty(
    completion_tokens: ArrayLike, max_tokens: int, buffer_tokens: int
) -> Float64[np.ndarray, ...]:
    """DAPO's soft penalty for long completions: min(−(len − (L − buf)) / buf, 0), but at least −1.

    It is added to the reward.

    Args:
        completion_tokens: integers of any shape, lengths in tokens (not characters), stop token included.
        max_tokens: L, the longest completion.
        buffer_tokens: buf, the length of the zone before L in which the penalty grows from 0 to −1; 0
          switches it off.

    Returns:
        Of the same shape, in [−1, 0].

    Raises:
        ValueError: the buffer is negative or longer than ``max_tokens``.
    """
    lengths = np.asarray(completion_tokens, np.float64)
    if not 0 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"overlong_penalty: buffer does not fit: got buffer_tokens={buffer_tokens}, expected 0 to "
            f"max_tokens={max_tokens}"
        )
    if buffer_tokens == 0:
        return np.zeros(lengths.shape)
    excess = lengths - (max_tokens - buffer_tokens)
    return -np.clip(excess / buffer_tokens, 0.0, 1.0)


def _checked(
    function: str, rewards: ArrayLike, mask: ArrayLike | None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Rewards with masked values set to 0, and the mask as bool."""
    values = np.asarray(rewards, np.float64)
    if values.ndim != 2 or values.shape[1] < 2:
        raise ValueError(
            f"{function}: no group to compare within: got rewards.shape={values.shape}, expected [P, G] "
            "with G >= 2. "
            "A single completion of a prompt has no advantage."
        )
    counted = np.ones(values.shape, bool) if mask is None else as_mask(function, "mask", mask)
    if counted.shape != values.shape:
        raise ValueError(
            f"{function}: shapes differ: got mask.shape={counted.shape}, expected "
            f"rewards.shape={values.shape}"
        )
    bad = np.argwhere(counted & ~np.isfinite(values))
    if len(bad):
        p, g = bad[0]
        raise ValueError(
            f"{function}: {len(bad)} rewards are not finite: got rewards[{p}, {g}]={values[p, g]}, "
            "expected finite numbers. "
            "Leave failed samples out through mask."
        )
    return np.where(counted, values, 0.0), counted


def as_mask(function: str, name: str, mask: ArrayLike) -> Bool[np.ndarray, ...]:
    """A mask as bool; raises ValueError for other values, such as NaN, which numpy would take as true."""
    given = np.asarray(mask)
    if given.dtype.kind not in "biuf" or not np.isin(given, (0, 1)).all():
        raise ValueError(
            f"{function}: no mask: got {name} {given.dtype} with {given.reshape(-1)[:4]}, expected true "
            "or false, or 0 and 1."
        )
    return given.astype(bool)


def _centred(values: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    mean = values.sum(axis=1, keepdims=True) / np.maximum(counted.sum(axis=1, keepdims=True), 1)
    return np.where(counted, values - mean, 0.0)


def _informative(values: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    highest = np.where(counted, values, -np.inf).max(axis=1)
    lowest = np.where(counted, values, np.inf).min(axis=1)
    return (counted.sum(axis=1) >= 2) & (highest > lowest)


def _only_informative(
    advantages: NDArray[np.float64], values: NDArray[np.float64], counted: NDArray[np.bool_]
) -> NDArray[np.float64]:
    # Explicit zeros, as the roundoff of a mean of equal rewards, divided by 1e-6, would not be zero.
    return np.where(_informative(values, counted)[:, None], advantages, 0.0)
