"""Rollout correction against loops over its formulas: weights, rejections,
and what neither may read or hide.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jetrl_jax.rl.batching import pack, unpack
from jetrl_jax.rl.correction import correct
from jetrl_jax.rollout.types import Trajectory, Turn
from tests.oracles import rl_oracle
from tests.sections import correction_section

WEIGHTS = ["none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"]
LEVELS = ["token", "sequence_sum", "sequence_mean", "sequence_max"]


def draw(seed=0, scale=0.4):
    """Nine sequences of 1 to 7 tokens; some with ratios of e^100 and e^-100."""
    rng = np.random.default_rng(seed)
    lengths = [1, 3, 7, 2, 5, 4, 1, 6, 3]
    rollout = [-rng.exponential(2.0, n) for n in lengths]
    old = [r + scale * rng.normal(size=len(r)) * rng.choice([0.01, 1.0]) for r in rollout]
    old[4][2] += 100
    old[5][0] -= 100
    return old, rollout


def section(weight="none", reject="none", veto=None, **fields):
    """Fields that begin with reject_ are those of the rejection, the others those of the weight."""
    rejects = {
        name.removeprefix("reject_"): fields.pop(name) for name in list(fields) if name.startswith("reject_")
    }
    return correction_section(weight={"kind": weight} | fields, reject={"kind": reject} | rejects, veto=veto)


def bounded(weight, *, low=0.5, high=2.0, normalize=False, **fields):
    """A section whose weight has the bounds that its kind has."""
    bounds = (
        {}
        if weight == "none"
        else {"high": high, "normalize": normalize} | ({"low": low} if "mask" in weight else {})
    )
    return section(weight, **bounds, **fields)


def against_oracle(settings, old, rollout):
    got = correct(settings, old, rollout, np.ones(len(old), bool))
    weight, reject = settings.weight.model_dump(), settings.reject.model_dump()
    asked = {"low": 0.0, "high": 1.0, "normalize": False} | weight | {"weight": weight["kind"]}
    asked |= {
        "level": "token",
        "reject_low": reject.get("low", 0.0),
        "reject_high": reject.get("high", 1.0),
    } | {"reject": reject["kind"]}
    asked |= {"level": reject.get("level", "token")}
    del asked["kind"]
    weights, keeps = rl_oracle.correction(old, rollout, **asked, veto=settings.veto)
    for mine, theirs, keep, expected in zip(got.weights, weights, got.keep, keeps, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-13)
        np.testing.assert_array_equal(keep, expected)
    return got


@pytest.mark.parametrize(("weight", "normalize"), list(itertools.product(WEIGHTS, [False, True])))
def test_weights_match_oracle(weight, normalize):
    got = against_oracle(bounded(weight, normalize=normalize, high=1.6, low=0.7), *draw())
    flat = np.concatenate(got.weights)
    assert np.isfinite(flat).all()
    if weight != "none":
        assert len(np.unique(flat)) > 2 and got.metrics["correction/bounded_fraction"] > 0
    if normalize and weight.startswith("token"):
        np.testing.assert_allclose(flat.mean(), 1.0)


@pytest.mark.parametrize(
    ("reject", "level", "veto"), list(itertools.product(["k1", "k2", "k3"], LEVELS, [None, 0.5]))
)
def test_rejections_match_oracle(reject, level, veto):
    bounds = {"reject_low": 0.8, "reject_high": 1.3} if reject == "k1" else {"reject_high": 0.05}
    settings = section(
        weight="token_truncate", normalize=True, reject=reject, reject_level=level, veto=veto, **bounds
    )
    got = against_oracle(settings, *draw(1))
    kept = np.concatenate(got.keep)
    assert kept.any() and not kept.all()
    assert got.metrics["correction/rejected_token_fraction"] == pytest.approx(1 - kept.mean())


def test_geometric_criterion_is_the_mean_of_k1():
    rollout = [np.full(4, -1.0)] * 3
    old = [rollout[0] - 0.0005, rollout[1] - 0.002, rollout[2] + np.array([0.5, -0.5, 0.2, -0.2])]
    got = correct(section(reject="k1"), old, rollout, np.ones(3, bool))
    assert [k.all() for k in got.keep] == [True, False, True]


def test_tis_of_one_token_by_hand():
    got = correct(
        section(weight="token_truncate"), [np.log([0.5, 0.1])], [np.log([0.4, 0.02])], np.ones(1, bool)
    )
    np.testing.assert_allclose(got.weights[0], [1.25, 2.0])


def test_no_mismatch_corrects_nothing():
    old, _ = draw()
    settings = section(weight="sequence_mask", normalize=True, reject="k3", veto=1e-4)
    got = correct(settings, old, old, np.ones(len(old), bool))
    assert all((w == 1).all() and k.all() for w, k in zip(got.weights, got.keep, strict=True))
    assert got.metrics["correction/weight_ess"] == 1 and got.metrics["correction/bounded_fraction"] == 0


@pytest.mark.parametrize("weight", WEIGHTS)
def test_untrained_samples_are_not_read(weight):
    old, rollout = draw(2)
    mask = np.array([True, False] * 4 + [True])
    settings = bounded(weight, normalize=True, reject="k2", reject_high=0.1, veto=1e-4)
    expected = correct(settings, [o for o, m in zip(old, mask, strict=True) if m], [r for r, m in zip(rollout, mask, strict=True) if m],
                       np.ones(mask.sum(), bool))  # fmt: skip
    spoiled = [o if m else np.full(0, np.nan) for o, m in zip(old, mask, strict=True)]
    rotten = [
        r if m else np.full(r.shape, [np.nan, np.inf, -np.inf][i % 3])
        for i, (r, m) in enumerate(zip(rollout, mask, strict=True))
    ]
    got = correct(settings, spoiled, rotten, mask)
    assert got.metrics == expected.metrics
    for index, place in enumerate(np.flatnonzero(mask)):
        np.testing.assert_array_equal(got.weights[place], expected.weights[index])
    assert not any(got.keep[i].any() for i in np.flatnonzero(~mask))


def test_trained_nan_is_not_hidden():
    got = correct(
        section(weight="token_truncate", reject="k1"),
        [np.array([np.nan, -1.0])],
        [np.array([-1.0, -1.0])],
        np.ones(1, bool),
    )
    assert np.isnan(got.weights[0][0]) and got.keep[0].all()


def test_batch_without_trained_samples():
    old, rollout = draw()
    got = correct(
        section(weight="token_truncate", normalize=True, veto=1e-4), old, rollout, np.zeros(len(old), bool)
    )
    assert got.metrics == {} and not any(k.any() for k in got.keep)


def test_everything_rejected_leaves_finite_weights():
    settings = section(weight="token_mask", low=5.0, high=6.0, normalize=True, reject="k2", reject_high=1e-9)
    got = correct(settings, [np.array([-1.0])], [np.array([-2.0])], np.ones(1, bool))
    assert not got.keep[0].any() and np.isfinite(got.weights[0]).all()
    assert got.metrics["correction/rejected_sequence_fraction"] == 1


def test_veto_sees_beyond_the_clamp():
    got = correct(
        section(veto=1e-10),
        [np.array([-100.0]), np.array([-20.0])],
        [np.array([-1.0]), np.array([-1.0])],
        np.ones(2, bool),
    )
    assert [k.all() for k in got.keep] == [False, True]


def test_lengths_that_differ_raise():
    with pytest.raises(ValueError, match=r"unequal trajectories \[1\]"):
        correct(section(), [np.zeros(2), np.zeros(3)], [np.zeros(2), np.zeros(2)], np.ones(2, bool))


def test_a_sequence_of_turns_is_summed_over_what_was_sampled():
    """Old 9, 9 against 0, 0 at two observed tokens would make the sum 18; over the sampled tokens it is 0."""
    turns = (
        Turn(0, 1, "prompt"),
        Turn(1, 3, "policy", "stop"),
        Turn(3, 5, "environment"),
        Turn(5, 7, "policy", "stop"),
    )
    sampled = np.array([0, 1, 1, 0, 0, 1, 1], bool)
    logprobs = np.array([0, -0.1, -0.2, 0, 0, -0.3, -0.4], np.float32)
    trajectory = Trajectory(0, np.arange(7, dtype=np.int32), sampled, logprobs, turns, ((1, 7, 0),))
    old = np.array([0, -0.1, -0.2, 9, 9, -0.3, -0.4], np.float32)
    micro = pack([trajectory], [1.0], [True], 8, 8)
    scored = unpack(micro, [np.pad(old, (0, 1))[None]], 1)
    settings = section(
        weight="sequence_truncate",
        high=100.0,
        reject="k1",
        reject_level="sequence_sum",
        reject_low=0.5,
        reject_high=2.0,
        veto=0.5,
    )
    got = correct(settings, scored, [trajectory.sampled_logprobs], np.ones(1, bool))
    assert got.weights[0].tolist() == [1, 1, 1, 1] and got.keep[0].all()
