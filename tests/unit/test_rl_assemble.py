"""A rollout batch made ready to be learned from: groups of any size, what is scored when, and that nothing is
lost on the way.
"""

from __future__ import annotations

import numpy as np
import pytest

from jetrl_jax.rl import advantages
from jetrl_jax.rl.algorithm import resolve_algorithm
from jetrl_jax.rl.assemble import assemble
from jetrl_jax.rollout.types import Trajectory, Turn
from tests.oracles import rl_oracle
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


TURNS = [
    [[0.5, 0.0], [1.0]],
    [[0.1, 0.1], [0.0, 0.9, 0.0], [0.4]],
    [[0.25, 0.75]],
    [[0.5], [9.0], [0.5], [1, 0.5]],
]


def episode(index, tokens):
    """Turns of so many tokens with an observation of two tokens between them."""
    turns, sampled = [Turn(0, 3, "prompt")], [False] * 3
    for count in tokens:
        if sampled[-1]:
            turns.append(Turn(len(sampled), len(sampled) + 2, "environment"))
            sampled += [False] * 2
        turns.append(Turn(len(sampled), len(sampled) + count, "policy", "stop"))
        sampled += [True] * count
    mask = np.array(sampled)
    ids, logprobs = np.ones(len(mask), np.int32), np.where(mask, -1, 0).astype(np.float32)
    return Trajectory(index, ids, mask, logprobs, tuple(turns), ((3, len(mask), 0),))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_credit_per_turn_is_that_of_process_supervision(name):
    """By loops; each sampled token has its turn's value, and one sample alone has nothing to compare with."""
    rng = np.random.default_rng(2)
    resolved = resolve_algorithm(
        algorithm_section(name=name, credit="turn", overlong_buffer_tokens=2), 8, correction_section()
    )
    tokens = [[rng.integers(1, 4, len(sample)) for sample in group] for group in TURNS]
    given = [[episode(i, sample) for i, sample in enumerate(group)] for group in tokens]
    flat = [np.array(sample, float) for group in TURNS for sample in group]
    rewards = [np.array([sum(sample) for sample in group]) for group in TURNS]
    rewards[3][1] = np.nan
    got = assemble(
        given, rewards, resolved, correction_section(), unwanted,
        row_tokens=24, microbatch_tokens=48, seed=(3, 1), turn_rewards=flat,
    )  # fmt: skip
    shaped = [[list(sample) for sample in group] for group in TURNS]
    for group, counts in zip(shaped, tokens, strict=True):
        for sample, count in zip(group, counts, strict=True):
            sample[-1] += rl_oracle.overlong(sum(count), 8, 2)
    mask = [[not np.isnan(r) for r in group] for group in rewards]
    expected = rl_oracle.turn_credit(name, shaped, mask)
    counts = [count for group in tokens for count in group]
    for ours, values, each in zip(got.advantages, expected, counts, strict=True):
        np.testing.assert_allclose(ours, np.repeat(values, each), rtol=1e-12, atol=1e-12)
    assert not got.advantages[5].any() and not got.advantages[7].any() and got.signal
    (part,) = got.minibatches()
    packed = np.concatenate([b.advantages[b.loss_mask] for b in part.microbatches])
    trained = np.concatenate([ours for ours, one in zip(got.advantages, got.trained, strict=True) if one])
    np.testing.assert_allclose(np.sort(packed), np.sort(trained), rtol=1e-6)
    assert got.metrics["advantage/abs_mean"] == pytest.approx(np.abs(trained).mean())
    with pytest.raises(ValueError, match="rewards do not fit the turns"):
        assemble(
            given, rewards, resolved, correction_section(), unwanted,
            row_tokens=24, microbatch_tokens=48, seed=(3, 1), turn_rewards=flat[1:],
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"do not add up to the sample's: got \[.*\] of sample 0, expected"):
        assemble(
            given, rewards, resolved, correction_section(), unwanted,
            row_tokens=24, microbatch_tokens=48, seed=(3, 1), turn_rewards=[2 * turns for turns in flat],
        )  # fmt: skip


def test_sizes_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="sizes that add up to 5, expected 4"):
        advantages.of_groups(advantages.grpo, np.zeros(4), np.ones(4, bool), [2, 3])
