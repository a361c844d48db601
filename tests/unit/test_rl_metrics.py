"""Mismatch, clip, reward and length metrics against loops; packing, masking and declarations."""

from __future__ import annotations

import numpy as np
import pytest

from jetrl_jax.rl import metrics
from jetrl_jax.rl.correction import correct
from tests.oracles import rl_oracle
from tests.sections import correction_section


def draw(seed=0, scale=0.3, count=9):
    """Old and rollout log-probabilities of ``count`` sequences of 1 to 11 tokens."""
    rng = np.random.default_rng(seed)
    rollout = [-rng.exponential(2.0, rng.integers(1, 12)) for _ in range(count)]
    return [r + scale * rng.normal(size=len(r)) for r in rollout], rollout


def flat(old, rollout):
    """One row of tokens: old, rollout, mask, sequence index."""
    index = np.repeat(np.arange(len(old)), [len(s) for s in old])
    return np.concatenate(old), np.concatenate(rollout), np.ones(len(index), bool), index


@pytest.mark.parametrize("scale", [1e-6, 0.1, 0.7, 30.0])
def test_mismatch_metrics_match_oracle(scale):
    old, rollout = draw(scale=scale)
    # the oracle's k3 in its plain form
    rollout = [np.clip(r, o - 19, None) for o, r in zip(old, rollout, strict=True)]
    expected = rl_oracle.mismatch(old, rollout) if scale < 30 else None
    got = metrics.mismatch_metrics(*flat(old, rollout))
    if expected is None:  # ratios up to e^20: finite, and bad
        assert (
            all(np.isfinite(value) for value in got.values()) and got["mismatch/token_mult_prob_error"] > 1.05
        )
    else:
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_mismatch_of_equal_logprobs_is_zero():
    _, rollout = draw()
    got = metrics.mismatch_metrics(*flat(rollout, rollout))
    ones = {"mismatch/ppl_ratio", "mismatch/ess", "mismatch/token_mult_prob_error"}
    assert got == {name: float(name in ones) for name in got} and len(got) == 9


def test_mismatch_of_one_token_by_hand():
    # the trainer finds the token twice as likely as the engine did
    got = metrics.mismatch_metrics([np.log(0.5)], [np.log(0.25)], [True], [0])
    log2 = np.log(2)
    expected = [-log2, 1 - log2, log2, log2, 0.5, 3.0, 3.0, 1.0, 2.0]
    assert list(got.values()) == pytest.approx(expected, rel=1e-12)


def test_mismatch_metrics_do_not_see_packing_order_or_masked_tokens():
    arrays = flat(*draw())
    expected = metrics.mismatch_metrics(*arrays)
    rng = np.random.default_rng(1)
    order = rng.permutation(len(arrays[0]))  # also splits every sequence
    size = 2 * 3 * -(-len(order) // 3)
    packed = [
        np.full(size, fill, a.dtype) for fill, a in zip((np.nan, -np.inf, False, -1), arrays, strict=True)
    ]
    places = np.sort(rng.permutation(size)[: len(order)])
    for p, a in zip(packed, arrays, strict=True):
        p[places] = a[order]
    assert metrics.mismatch_metrics(*[p.reshape(2, 3, -1) for p in packed]) == pytest.approx(
        expected, rel=1e-12
    )


def test_mismatch_of_no_tokens_is_empty():
    assert metrics.mismatch_metrics([1.0], [1.0], [False], [0]) == {}


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_mismatch_shows_a_nonfinite_logprob(bad):
    old, rollout, mask, index = flat(*draw())
    old[3] = bad
    got = metrics.mismatch_metrics(old, rollout, mask, index)
    assert not np.isfinite(got["mismatch/k1"]) and not np.isfinite(got["mismatch/logprob_abs_max"])


def test_mismatch_raises_on_other_shapes():
    with pytest.raises(ValueError, match=r"\(2,\), \(1,\)"):
        metrics.mismatch_metrics([1.0, 2.0], [1.0], [True], [0])


SUMS = {
    "tokens": 40, "positive_tokens": 10, "negative_tokens": 20, "clipped_high_positive": 1, "clipped_low_negative": 4,
    "clipped_dual_negative": 2, "outside_low_positive": 3, "outside_high_negative": 5, "ratio_sum": 42, "old_kl_sum": 0.4,
}  # fmt: skip


def test_loss_metrics_divide_by_the_tokens_of_their_sign():
    got = metrics.loss_metrics(SUMS | {"kl_sum": 2.0, "entropy_sum": np.float32(30)})
    assert got == pytest.approx({
        "clip/positive_fraction": 0.1, "clip/negative_fraction": 0.2, "clip/dual_negative_fraction": 0.1,
        "clip/outside_low_positive_fraction": 0.3, "clip/outside_high_negative_fraction": 0.25,
        "policy/positive_token_fraction": 0.25, "policy/negative_token_fraction": 0.5, "policy/trained_tokens": 40,
        "policy/ratio_mean": 1.05, "policy/old_kl": 0.01, "policy/reference_kl": 0.05, "policy/entropy": 0.75,
    })  # fmt: skip


def test_loss_metrics_of_no_tokens_have_no_means():
    got = metrics.loss_metrics(dict.fromkeys(SUMS, 0))
    assert "policy/ratio_mean" not in got and set(got.values()) == {0.0}


def test_reward_metrics_by_hand():
    rewards = [[0, 1, 0, 1], [1, 1, 1, np.nan], [5, np.nan, np.nan, np.nan]]
    got = metrics.reward_metrics(rewards, ~np.isnan(rewards))
    kept = np.array([0, 1, 0, 1, 1, 1, 1, 5.0])
    assert got == pytest.approx({
        "reward/equal_group_fraction": 2 / 3, "reward/masked_fraction": 1 / 3, "reward/mean": kept.mean(), "reward/std": kept.std(),
        "reward/min": 0, "reward/max": 5, "reward/group_std_mean": np.std([0, 1, 0, 1], ddof=1) / 2,
    })  # fmt: skip


def test_reward_metrics_of_all_failed():
    got = metrics.reward_metrics(np.full((2, 2), np.nan), np.zeros((2, 2)))
    assert got == {"reward/equal_group_fraction": 1, "reward/masked_fraction": 1}


def test_reward_part_metrics_skip_failures():
    assert metrics.reward_part_metrics({"a": [1, np.nan, 3], "b": [np.nan] * 3}) == {"reward/a_mean": 2.0}


def test_length_metrics_by_hand():
    got = metrics.length_metrics([3, 5, 10], [2, 2, 5], ["stop", "stop", "length"])
    assert got == pytest.approx({
        "length/completion_tokens_mean": 6, "length/completion_tokens_min": 3, "length/completion_tokens_max": 10,
        "length/prompt_tokens_mean": 3, "length/truncated_fraction": 1 / 3,
    })  # fmt: skip
    assert metrics.length_metrics([], [], []) == {}


def test_every_metric_is_declared():
    emitted = set(metrics.mismatch_metrics(*flat(*draw())))
    emitted |= set(metrics.loss_metrics(SUMS | {"kl_sum": 2.0, "entropy_sum": 3.0}))
    emitted |= set(metrics.reward_metrics([[0, 1]], [[1, 1]])) | set(
        metrics.length_metrics([1], [1], ["stop"])
    )
    lr = [np.log([0.5, 0.3])], [np.log([0.4, 0.3])]
    emitted |= set(correct(correction_section(weight="token_truncate"), *lr, np.ones(1, bool)).metrics)
    assert emitted == set(metrics.METRICS)
    assert all(m.unit and m.meaning for m in metrics.METRICS.values())
