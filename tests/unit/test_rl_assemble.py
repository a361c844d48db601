"""A rollout batch made ready to be learned from: groups of any size, what is scored when, and that nothing is
lost on the way.
"""

from __future__ import annotations

import numpy as np
import pytest

from jetrl_jax.rl import advantages
from jetrl_jax.rl.algorithm import resolve_algorithm
from jetrl_jax.rl.assemble import assemble
from jetrl_jax.rollout.types import Trajectory
from tests.sections import algorithm_section, correction_section

SIZES = [2, 3, 1, 4]
REWARDS = [[1.0, 0.0], [0.2, 0.9, 0.4], [1.0], [0.5, np.nan, 0.5, 1.5]]


def groups():
    rng = np.random.default_rng(0)

    def one(index):
        n = int(rng.integers(1, 6))
        reason = "length" if index == 1 else "stop"
        return Trajectory.of_completion(
            index, rng.integers(1, 9, 3), rng.integers(1, 9, n), -rng.exponential(1.0, n), reason, 0
        )

    return [[one(index) for index in range(size)] for size in SIZES]


def ready(score=None, correction=None, **algorithm):
    section = correction_section(**(correction or {}))
    resolved = resolve_algorithm(algorithm_section(**algorithm), 8, section)
    rewards = [np.array(values) for values in REWARDS]
    given = groups()
    return given, assemble(
        given, rewards, resolved, section, score or unwanted, row_tokens=12, microbatch_tokens=24, seed=(3, 1)
    )


def unwanted(micro):
    raise AssertionError("nothing is read of what would be scored")


def test_advantages_of_groups_of_any_size():
    """By the formula, group by group, over the samples that have a reward."""
    _, got = ready()
    expected = []
    for group in REWARDS:
        values = np.array(group)
        kept = values[~np.isnan(values)]
        std = kept.std(ddof=1) if len(kept) > 1 else 1.0
        expected += [
            0.0 if np.isnan(r) or len(kept) < 2 else (r - kept.mean()) / (std + 1e-6) for r in values
        ]
    np.testing.assert_allclose(got.advantages, expected, rtol=1e-12, atol=1e-12)
    assert (
        got.trained.tolist() == [True] * 7 + [False] + [True] * 2 and got.metrics["count/masked_samples"] == 1
    )
    assert got.metrics["advantage/abs_mean"] == pytest.approx(np.abs(got.advantages[got.trained]).mean())


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (2, 1), (4, 2)])
def test_every_trained_token_is_in_one_minibatch_of_each_epoch(minibatches, epochs):
    def score(micro):
        return [np.where(b.loss_mask, b.rollout_logprobs, np.nan) for b in micro], None

    given, got = ready(score, minibatches=minibatches, epochs=epochs)
    flat = [t for group in given for t in group]
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    seen = np.zeros(len(flat), int)
    parts = list(got.minibatches())
    assert len(parts) == minibatches * epochs
    for part in parts:
        inside = np.unique(np.concatenate([b.sequence_index[b.loss_mask] for b in part.microbatches]))
        for group in np.unique(owner[inside]):  # whole groups, but for what is not trained
            assert set(np.flatnonzero((owner == group) & got.trained)) <= set(inside.tolist())
        for b in part.microbatches:
            index, counts = np.unique(b.sequence_index[b.loss_mask], return_counts=True)
            seen[index] += counts
            if b.old_logprobs is not None:
                np.testing.assert_array_equal(b.old_logprobs[b.loss_mask], b.rollout_logprobs[b.loss_mask])
        assert part.denominators.tokens == sum(b.loss_mask.sum() for b in part.microbatches)
    assert seen.tolist() == [
        epochs * t.sampled_tokens * trained for t, trained in zip(flat, got.trained, strict=True)
    ]
    assert (got.scored == []) == (minibatches * epochs == 1)


def test_the_reference_and_a_correction_are_scored_once():
    calls = []

    def score(micro):
        calls.append(len(micro))
        return [b.rollout_logprobs + np.float32(0.5) * b.loss_mask for b in micro], [
            b.rollout_logprobs - 1 for b in micro
        ]

    _, got = ready(score, {"weight": {"kind": "token_truncate", "high": 1.25}}, kl_coef=0.1)
    (part,) = got.minibatches()
    assert len(calls) == 1 and len(got.scored) == calls[0]
    assert got.metrics["correction/weight_mean"] == 1.25 and got.metrics["correction/bounded_fraction"] == 1
    for b in part.microbatches:
        np.testing.assert_array_equal(b.correction[b.loss_mask], np.float32(1.25))
        np.testing.assert_allclose(
            b.ref_logprobs[b.loss_mask], b.rollout_logprobs[b.loss_mask] - 1, rtol=1e-6
        )


def test_sizes_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="sizes that add up to 5, expected 4"):
        advantages.of_groups(advantages.grpo, np.zeros(4), np.ones(4, bool), [2, 3])
