"""Packs trajectories of unequal length into rows of one fixed shape, from host data (numpy) to the device.

    p prompt, c sampled by the policy, e written by an environment, . padding

    row:  p p p c c c | p p c c e c c | . .
    segment_ids       1 1 1 1 1 1   2 2 2 2 2 2 2   0 0
    positions         0 1 2 3 4 5   0 1 2 3 4 5 6   0 0
    loss_mask         . . . x x x   . . x x . x x   . .

Everything is aligned with targets: index t belongs to token t, whose log-probability comes from the hidden
state at t − 1 of the same segment.  A prompt has at least one token, so the first position of a segment is
never trained.  Arrays of one trajectory hold a value for each sampled token; the other tokens are context,
which the loss does not read.

Every microbatch has the same shape [rows, row_tokens], with rows = microbatch_tokens // row_tokens, so that a
training step compiles once; the last one is filled with empty rows.  Packing is first-fit decreasing, with
ties in the given order.  It depends only on the lengths, so a repeated or resumed run packs alike.
Trajectories that are not trained are not packed.

Nothing is truncated; a sequence longer than a row is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool
from numpy.typing import ArrayLike, NDArray

from jetrl_jax.rl.advantages import as_mask
from jetrl_jax.rl.losses import Denominators
from jetrl_jax.rollout.types import Trajectory

PADDING_TOKEN = 0  # any valid id; padding has segment 0, which no token sees


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainBatch:
    """One microbatch of packed rows: arrays [R, T], numpy when built, as a pytree that ``jit`` accepts.

    Attributes:
        token_ids: int32.
        positions: int32, from 0 in each segment.
        segment_ids: int32, from 1 in each row; 0 is padding.
        loss_mask: bool, true at trained tokens.
        rollout_logprobs: float32, as the engine reported them; 0 outside ``loss_mask``.
        advantages: float32; 0 outside ``loss_mask``.
        sequence_index: int32, index into the trajectories given to `pack`, for all their tokens; −1 at
          padding.
        inverse_length: float32, 1 / number of the trajectory's trained tokens; 0 outside ``loss_mask``.
        old_logprobs: float32, those of the trainer at the behaviour version; None if on-policy.
        ref_logprobs: float32, those of the frozen reference; None without a KL term.
        correction: float32, weight of each token's policy loss (`jetrl_jax.rl.correction`); None is 1.
        exposure: float32, how often the trajectory counts in the loss and its denominators; None is once.
    """

    token_ids: Any
    positions: Any
    segment_ids: Any
    loss_mask: Any
    rollout_logprobs: Any
    advantages: Any
    sequence_index: Any
    inverse_length: Any
    old_logprobs: Any = None
    ref_logprobs: Any = None
    correction: Any = None
    exposure: Any = None

    def replace(self, **changes: Any) -> TrainBatch:
        """A copy with other values for some fields, such as ``old_logprobs``."""
        return dataclasses.replace(self, **changes)


def sample_masks(
    rewards: ArrayLike, finish_reasons: Sequence[str], *, mask_truncated: bool
) -> tuple[Bool[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """The samples that count in their group, and those that are trained.

    Args:
        rewards: [N], NaN where a reward failed.
        finish_reasons: N of "stop" or "length".
        mask_truncated: whether completions that end by "length" are left out of the loss.

    Returns:
        (counted, trained).  A sample with a NaN reward is in neither; a truncated completion always counts in
        its group's mean and std.
    """
    counted = ~np.isnan(np.asarray(rewards, np.float64))
    truncated = np.asarray([reason == "length" for reason in finish_reasons], bool)
    return counted, counted & ~(truncated & mask_truncated)


def split_minibatches(
    sizes: Sequence[int], minibatches: int, *, seed: int | Sequence[int]
) -> list[NDArray[np.int64]]:
    """Divides the whole groups of a rollout batch among the optimiser steps of one pass.

    Args:
        sizes: number of trajectories of each of P groups, which follow one after the other.
        minibatches: number of parts, whose sizes differ by at most one group; with fewer groups, each is a
          part.
        seed: seed of the shuffle; a tuple such as (run seed, step, epoch) shuffles every pass differently.

    Returns:
        min(minibatches, P) disjoint, ascending index arrays that cover all trajectories.  The order within a
        part is not shuffled, so a single part is the same for every seed.

    Raises:
        ValueError: no groups, a group without trajectories, or less than one part.
    """
    if len(sizes) == 0 or min(sizes) < 1 or minibatches < 1:
        found = f"{len(sizes)} groups, minibatches={minibatches}, sizes={list(sizes)[:8]}"
        raise ValueError(f"split_minibatches: nothing to split: got {found}, expected >= 1 of each")
    order = np.random.default_rng(seed).permutation(len(sizes))
    members = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return [
        np.concatenate([members[group] for group in np.sort(part)])
        for part in np.array_split(order, min(minibatches, len(sizes)))
    ]


def pack(
    trajectories: Sequence[Trajectory],
    advantages: ArrayLike | Sequence[ArrayLike],
    mask: ArrayLike,
    row_tokens: int,
    microbatch_tokens: int,
    *,
    indices: ArrayLike | None = None,
    old_logprobs: Sequence[ArrayLike] | None = None,
    ref_logprobs: Sequence[ArrayLike] | None = None,
    correction: Sequence[ArrayLike] | None = None,
    keep: Sequence[ArrayLike] | None = None,
    exposure: ArrayLike | None = None,
    segment_unit: int = 1,
) -> list[TrainBatch]:
    """Packs the trained trajectories into microbatches of one shape.

    Args:
        trajectories: N trajectories.
        advantages: [N], or N arrays with one value per sampled token.
        mask: bool [N], true for trajectories that are trained (`sample_masks`); the others are not packed.
        row_tokens: length of a row; at least the longest packed sequence.
        microbatch_tokens: tokens of a microbatch, padding included; rounded down to whole rows.
        indices: those of the N to pack, each once (a part of `split_minibatches`); None packs all.
        old_logprobs: N arrays, one value per sampled token; None leaves the field None.
        ref_logprobs: likewise.
        correction: likewise, weights of the policy loss.
        keep: N bool arrays, false at sampled tokens that are not trained; None trains all.  A trajectory
            without any trained token is not packed.
        exposure: [N] whole numbers, how often each trajectory counts; 0 is not packed; None is once each.
        segment_unit: a segment begins at a multiple of so many tokens, with padding before it where the one
            before ends elsewhere (`jetrl_jax.models.attention.segment_unit`).

    Returns:
        At least one microbatch, each [microbatch_tokens // row_tokens, row_tokens].  If nothing is trained,
        it is all padding, with loss and gradient 0.

    Raises:
        ValueError: sizes or lengths do not fit; all are in one message.
    """
    chosen = np.arange(len(trajectories)) if indices is None else np.asarray(indices)
    packed, weights = (
        as_mask("pack", "mask", mask),
        np.ones(len(trajectories)) if exposure is None else np.asarray(exposure, np.float64),
    )
    values: Any = advantages
    extra = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "correction": correction}
    per_token = {"rollout_logprobs": [t.sampled_logprobs for t in trajectories]}
    per_token |= {
        name: [np.asarray(array) for array in arrays] for name, arrays in extra.items() if arrays is not None
    }
    checked = per_token if keep is None else per_token | {"keep": [as_mask("pack", "keep", k) for k in keep]}
    _check_sizes(
        len(trajectories),
        {"advantages": values, "mask": packed, "exposure": weights},
        row_tokens,
        microbatch_tokens,
        checked,
    )
    _check_indices(chosen, weights)
    chosen = chosen[packed[chosen]]
    _check_sequences(trajectories, chosen, row_tokens, values, checked)
    seen = weights > 0 if keep is None else (weights > 0) & np.array([np.any(k) for k in keep], bool)
    chosen = chosen[seen[chosen]]

    lengths = np.asarray([len(trajectories[int(i)].token_ids) for i in chosen], np.int64)
    row, start, num_rows = _first_fit_decreasing(lengths, row_tokens, segment_unit)
    rows_each = microbatch_tokens // row_tokens
    total_rows = max(-(-num_rows // rows_each), 1) * rows_each
    arrays = _empty_rows(total_rows, row_tokens, [*per_token, *([] if exposure is None else ["exposure"])])
    segments = np.zeros(total_rows, np.int32)
    for place in np.lexsort((start, row)):
        index = int(chosen[place])
        trajectory, r = trajectories[index], row[place]
        segments[r] += 1
        whole = slice(start[place], start[place] + lengths[place])
        kept = np.ones(trajectory.sampled_tokens, bool) if keep is None else checked["keep"][index]
        trained = whole.start + np.flatnonzero(trajectory.sampled)[kept]
        arrays["token_ids"][r, whole] = trajectory.token_ids
        arrays["positions"][r, whole] = np.arange(lengths[place])
        arrays["segment_ids"][r, whole] = segments[r]
        arrays["sequence_index"][r, whole] = index
        arrays["loss_mask"][r, trained] = True
        arrays["advantages"][r, trained] = (
            values[index] if np.ndim(values[index]) == 0 else np.asarray(values[index])[kept]
        )
        arrays["inverse_length"][r, trained] = 1.0 / len(trained)
        if exposure is not None:
            arrays["exposure"][r, trained] = weights[index]
        for name, token_values in per_token.items():
            arrays[name][r, trained] = np.asarray(token_values[index])[kept]
    return [
        TrainBatch(**{name: array[first : first + rows_each] for name, array in arrays.items()})
        for first in range(0, total_rows, rows_each)
    ]


def padded_rows(
    sequences: Sequence[Sequence[int]], rows: int, row_tokens: int
) -> list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]]:
    """(token ids, positions, segment ids), int32 [rows, row_tokens] each, with one sequence in each row."""
    batches = []
    for first in range(0, len(sequences), rows):
        ids, segments = (np.zeros((rows, row_tokens), np.int32) for _ in range(2))
        for row, sequence in enumerate(sequences[first : first + rows]):
            ids[row, : len(sequence)] = sequence
            segments[row, : len(sequence)] = 1
        positions = np.tile(np.arange(row_tokens, dtype=np.int32), (rows, 1))
        batches.append((ids, positions, segments))
    return batches


def count_denominators(batches: Sequence[TrainBatch], max_completion_tokens: int) -> Denominators:
    """Counts over all microbatches of one optimiser step, as float32 scalars, weighted by exposure.

    Args:
        batches: the microbatches that share one gradient.
        max_completion_tokens: longest completion, in tokens.

    Raises:
        ValueError: no microbatch, or max_completion_tokens below 1.
    """
    if not batches or max_completion_tokens < 1:
        found = f"{len(batches)} microbatches and max_completion_tokens={max_completion_tokens}"
        raise ValueError(f"count_denominators: nothing to count: got {found}, expected at least 1 of each.")
    masks = [np.asarray(b.loss_mask) for b in batches]
    index = np.concatenate(
        [np.asarray(b.sequence_index)[mask] for b, mask in zip(batches, masks, strict=True)]
    )
    counts = [
        np.ones(mask.sum()) if b.exposure is None else np.asarray(b.exposure)[mask]
        for b, mask in zip(batches, masks, strict=True)
    ]
    each = np.concatenate(counts)
    sequences = each[np.unique(index, return_index=True)[1]].sum()
    return Denominators(
        np.float32(each.sum()), np.float32(sequences), np.float32(sequences * max_completion_tokens)
    )


def unpack(
    batches: Sequence[TrainBatch], values: Sequence[ArrayLike], num_trajectories: int
) -> list[NDArray[Any]]:
    """Per-token results by trajectory, so that they can be packed again in another order.

    Args:
        batches: microbatches of `pack`.
        values: for each of them an array [R, T], such as log-probabilities.
        num_trajectories: N given to `pack`.

    Returns:
        N arrays, with one value per trained token (per sampled token if `pack` had no ``keep``); empty for
        trajectories that were not packed.

    Raises:
        ValueError: values have other shapes, or there are more than N trajectories.
    """
    masks = [np.asarray(b.loss_mask) for b in batches]
    shapes, most = (
        [np.shape(v) for v in values],
        max((int(np.max(b.sequence_index)) for b in batches), default=-1),
    )
    if not masks or shapes != [m.shape for m in masks] or most >= num_trajectories:
        expected = f"{[m.shape for m in masks]} and more than {most} trajectories"
        raise ValueError(
            f"unpack: values do not fit: got values {shapes} and num_trajectories={num_trajectories}, "
            f"expected {expected}."
        )
    index = np.concatenate([np.asarray(b.sequence_index)[m] for b, m in zip(batches, masks, strict=True)])
    flat = np.concatenate([np.asarray(v)[m] for v, m in zip(values, masks, strict=True)])
    order = np.argsort(index, kind="stable")  # a trajectory is in one row, in order
    counts = np.bincount(index, minlength=num_trajectories)
    return np.split(flat[order], np.cumsum(counts)[:-1])


def _first_fit_decreasing(
    lengths: NDArray[np.int64], row_tokens: int, unit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Row and first position (a multiple of `unit`) of each sequence, and the number of rows.

    With a unit of 1 the rows are at most 11/9 of the optimum + 1.
    """
    row, start = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    free = np.full(len(lengths), row_tokens, np.int64)  # an unopened row is free
    for i in np.argsort(-lengths, kind="stable"):
        r = int(np.argmax(free >= lengths[i]))
        row[i] = r
        start[i] = row_tokens - free[r]
        free[r] -= -(-lengths[i] // unit) * unit
    return row, start, int((free < row_tokens).sum())


def _empty_rows(rows: int, row_tokens: int, per_token: Sequence[str]) -> dict[str, NDArray[Any]]:
    shape = (rows, row_tokens)
    arrays: dict[str, NDArray[Any]] = {"token_ids": np.full(shape, PADDING_TOKEN, np.int32)}
    arrays |= {name: np.zeros(shape, np.int32) for name in ("positions", "segment_ids")}
    arrays |= {"sequence_index": np.full(shape, -1, np.int32), "loss_mask": np.zeros(shape, bool)}
    return arrays | {
        name: np.zeros(shape, np.float32) for name in ("advantages", "inverse_length", *per_token)
    }


def _check_sizes(
    count: int,
    per_sequence: dict[str, Any],
    row_tokens: int,
    microbatch_tokens: int,
    per_token: dict[str, list[Any]],
) -> None:
    problems = []
    if not 1 <= row_tokens <= microbatch_tokens:
        problems.append(f"row_tokens={row_tokens}, expected 1 to microbatch_tokens={microbatch_tokens}")
    for name, values in per_sequence.items():
        ragged = name == "advantages" and len(values) == count and any(np.ndim(value) for value in values)
        if not ragged and np.shape(values) != (count,):
            problems.append(f"{name}.shape={np.shape(values)}, expected ({count},), one value per trajectory")
    for name, arrays in per_token.items():
        if len(arrays) != count:
            problems.append(f"{len(arrays)} arrays in {name}, expected {count}, one per trajectory")
    if problems:
        raise ValueError("pack: sizes do not fit: got " + "; ".join(problems))


def _check_indices(chosen: NDArray[Any], exposure: NDArray[np.float64]) -> None:
    problems, count = [], len(exposure)
    whole = chosen.ndim == 1 and (chosen.dtype.kind in "iu" or not chosen.size)
    if not whole or len(np.unique(chosen)) != len(chosen) or not ((chosen >= 0) & (chosen < count)).all():
        problems.append(
            f"indices {chosen.dtype} {chosen[:8]}, expected whole numbers from 0 to {count - 1}, each once"
        )
    bad = np.flatnonzero(~np.isfinite(exposure) | (exposure < 0) | (exposure != np.round(exposure)))
    problems += [f"exposure[{i}]={exposure[i]}, expected a whole number from 0 on" for i in bad[:5]]
    if problems:
        raise ValueError("pack: trajectories cannot be chosen: got " + "; ".join(problems))


def _check_sequences(
    trajectories: Sequence[Trajectory],
    chosen: NDArray[np.int64],
    row_tokens: int,
    advantages: Any,
    per_token: dict[str, list[Any]],
) -> None:
    """Raises ValueError with the first few problems of the trajectories to be packed, in one message."""
    problems = []
    for i in (int(c) for c in chosen):
        total, sampled, prompt = (
            len(trajectories[i].token_ids),
            trajectories[i].sampled_tokens,
            len(trajectories[i].prompt_ids),
        )
        if prompt == 0 or sampled == 0:
            problems.append(
                f"trajectory {i} with {prompt} prompt and {sampled} sampled tokens, expected at least "
                "one of each"
            )
        if total > row_tokens:
            problems.append(f"trajectory {i} with {total} tokens, expected at most row_tokens={row_tokens}")
        if not (np.abs(np.asarray(advantages[i], np.float64)) <= np.finfo(np.float32).max).all():
            problems.append(f"advantages[{i}]={advantages[i]}, expected finite numbers of float32")
        if np.ndim(advantages[i]) and np.shape(advantages[i]) != (sampled,):
            problems.append(
                f"{np.shape(advantages[i])} advantages of trajectory {i}, expected ({sampled},), one "
                "per sampled token"
            )
        for name, arrays in per_token.items():
            if np.shape(arrays[i]) != (sampled,):
                problems.append(
                    f"{np.shape(arrays[i])} {name} of trajectory {i}, expected ({sampled},), one per "
                    "sampled token"
                )
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ValueError("pack: trajectories do not fit: got " + "; ".join(problems[:5]) + more)
