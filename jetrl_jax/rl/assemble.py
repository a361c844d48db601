"""Turns groups of scored trajectories into the minibatches of a training step.

    rewards -> overlong penalty -> advantages within groups, of samples or of turns -> old and reference
    log-probabilities, if the loss needs them -> rollout correction -> minibatches of whole groups, packed
    into microbatches of one shape

Pure functions, except for the caller's `score`, the trainer's log-probabilities of packed microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jetrl_jax.config.learning import CorrectionSection, DecoupledSection
from jetrl_jax.rl import advantages
from jetrl_jax.rl.algorithm import ResolvedAlgorithm
from jetrl_jax.rl.batching import (
    TrainBatch,
    count_denominators,
    pack,
    sample_masks,
    split_minibatches,
    unpack,
)
from jetrl_jax.rl.correction import correct
from jetrl_jax.rl.losses import Denominators
from jetrl_jax.rollout.types import Trajectory

Arrays = list[NDArray[Any]]
Score = Callable[[list[TrainBatch]], tuple[Arrays | None, Arrays | None]]
"""Microbatches -> log-probabilities float32 [R, T] of each, under the behaviour version and the reference.

Each is None if the loss does not need it.
"""


@dataclass(frozen=True)
class Minibatch:
    """The data of one optimiser step: microbatches that share one gradient, and their total counts."""

    microbatches: list[TrainBatch]
    denominators: Denominators


@dataclass(frozen=True, eq=False)
class Assembly:
    """A batch that is ready for training.

    Attributes:
        advantages: float64 [N]; with credit per turn N arrays, one value per sampled token.
        trained: bool [N].
        signal: whether a trained sample has an advantage that is not 0.
        scored: (microbatch, log-probabilities under the behaviour version) pairs, if the loss needs them;
          else empty.
        metrics: ``correction/``, ``advantage/`` and the number of samples that are not trained.
        minibatches: yields the minibatches of all epochs, in order, each packed on demand.
    """

    advantages: NDArray[np.float64] | list[NDArray[np.float64]]
    trained: NDArray[np.bool_]
    signal: bool
    scored: list[tuple[TrainBatch, NDArray[Any]]]
    metrics: dict[str, float]
    minibatches: Callable[[], Iterator[Minibatch]]


def assemble(
    groups: Sequence[Sequence[Trajectory]],
    rewards: Sequence[NDArray[np.float64]],
    algorithm: ResolvedAlgorithm,
    correction: CorrectionSection,
    score: Score,
    *,
    row_tokens: int,
    microbatch_tokens: int,
    seed: Sequence[int],
    segment_unit: int = 1,
    turn_rewards: Sequence[NDArray[np.float64]] | None = None,
) -> Assembly:
    """Advantages, scores, correction and minibatches of one rollout batch of N trajectories.

    Args:
        groups: trajectories that are compared with each other; at least two in the largest group.
        rewards: for each group float64 [its size], NaN where a reward failed.
        algorithm: the resolved algorithm.
        correction: the config's ``correction``.
        score: called once with the packed trained trajectories, if the loss needs old or reference
          log-probabilities.
        row_tokens, microbatch_tokens, segment_unit: as `pack`.
        seed: seed of the order of groups; the epoch is appended.
        turn_rewards: N arrays with the reward of each of the policy's turns, which add up to the sample's;
          read with credit per turn only.

    Raises:
        ValueError: the rewards do not fit the groups; also as `pack` and the advantages.
    """
    shapes, expected = [np.shape(values) for values in rewards], [(len(group),) for group in groups]
    if shapes != expected or not groups:
        raise ValueError(
            f"assemble: rewards do not fit the groups: got rewards of {shapes[:8]}, expected "
            f"{expected[:8] or 'a group'}."
        )
    trajectories = [trajectory for group in groups for trajectory in group]
    sizes, total = [len(group) for group in groups], np.concatenate(list(rewards))
    counted, trained = sample_masks(
        total, [t.finish_reason for t in trajectories], mask_truncated=algorithm.mask_truncated
    )
    lengths = np.array([t.sampled_tokens for t in trajectories])
    values: Any
    if algorithm.credit == "turn":
        values = _of_turns(algorithm, trajectories, turn_rewards or (), total, lengths, counted, sizes)
    else:
        values = advantages.of_groups(
            algorithm.advantage, algorithm.shape_rewards(total, lengths), counted, sizes
        )
    learned = np.concatenate([np.zeros(0), *(np.atleast_1d(values[i]) for i in np.flatnonzero(trained))])
    packed = trajectories, values, trained
    arrays: dict[str, Any] = {"old_logprobs": None, "ref_logprobs": None}
    scored: list[tuple[TrainBatch, NDArray[Any]]] = []
    metrics = {"advantage/abs_mean": float(np.abs(learned).mean()) if learned.size else 0.0}
    metrics["count/masked_samples"] = int((~trained).sum())
    if algorithm.needs_old or algorithm.needs_reference:
        micro = pack(*packed, row_tokens, microbatch_tokens, segment_unit=segment_unit)
        old, reference = score(micro)
        if old is not None:
            scored = list(zip(micro, old, strict=True))
            arrays["old_logprobs"] = unpack(micro, old, len(trajectories))
        if reference is not None:
            arrays["ref_logprobs"] = unpack(micro, reference, len(trajectories))
    engine = [t.sampled_logprobs for t in trajectories]
    if (
        isinstance(correction, DecoupledSection)
        and algorithm.recompute
        and arrays["old_logprobs"] is not None
    ):
        corrected = correct(correction, arrays["old_logprobs"], engine, trained)
        arrays |= {"correction": corrected.weights, "keep": corrected.keep}
        metrics |= corrected.metrics
    if algorithm.bypass:
        arrays["old_logprobs"] = engine

    def minibatches() -> Iterator[Minibatch]:
        for epoch in range(algorithm.epochs):
            for indices in split_minibatches(sizes, algorithm.minibatches, seed=(*seed, epoch)):
                micro = pack(
                    *packed,
                    row_tokens,
                    microbatch_tokens,
                    indices=indices,
                    segment_unit=segment_unit,
                    **arrays,
                )
                yield Minibatch(micro, count_denominators(micro, algorithm.max_completion_tokens))

    return Assembly(values, trained, bool(learned.any()), scored, metrics, minibatches)


def _of_turns(
    algorithm: ResolvedAlgorithm,
    trajectories: Sequence[Trajectory],
    turn_rewards: Sequence[NDArray[np.float64]],
    total: NDArray[np.float64],
    lengths: NDArray[np.int64],
    counted: NDArray[np.bool_],
    sizes: Sequence[int],
) -> Arrays:
    """The advantage of each sampled token by its turn; the overlong penalty belongs to the last turn."""
    turns = [[turn.stop - turn.start for turn in t.turns if turn.role == "policy"] for t in trajectories]
    given = [len(rewards) for rewards in turn_rewards]
    if given != list(map(len, turns)):
        raise ValueError(
            f"assemble: rewards do not fit the turns: got {given[:8]} rewards, expected "
            f"{list(map(len, turns))[:8]}, one for each of the policy's turns."
        )
    shaped = [np.array(rewards, np.float64) for rewards in turn_rewards]
    for index in np.flatnonzero(counted):
        off = abs(shaped[index].sum() - total[index])
        if not off <= 1e-6 * (np.abs(shaped[index]).sum() + abs(total[index])):
            raise ValueError(
                "assemble: rewards of turns do not add up to the sample's: got "
                f"{shaped[index].tolist()} of sample {index}, expected the sum {total[index]:g}."
            )
    last = algorithm.shape_rewards(np.array([rewards[-1] for rewards in shaped]), lengths)
    for rewards, value in zip(shaped, last, strict=True):
        rewards[-1] = value
    credits = advantages.of_turns(algorithm.advantage, shaped, counted, sizes)
    return [np.repeat(values, tokens) for values, tokens in zip(credits, turns, strict=True)]
