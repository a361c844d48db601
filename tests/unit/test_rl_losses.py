"""Policy loss, KL terms and aggregation against float64 loops: values, gradients and statistics."""

from __future__ import annotations

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.rl import losses
from jetrl_jax.rl.losses import Denominators
from tests.oracles import rl_oracle

CLIPS = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "dual": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
}
MAX_TOKENS = 9


def draw(seed=0, rows=4, tokens=12):
    """Log-probabilities, old ones with ratios from 1e-9 to 1e9, advantages, a mask, and sequences of 3, 4 and
    5 tokens.
    """
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(2.0, (rows, tokens))
    delta = rng.choice(
        [0.0, 0.1, 0.4, 1.5, 21.0], (rows, tokens), p=[0.1, 0.3, 0.3, 0.25, 0.05]
    ) * rng.choice([-1, 1], (rows, tokens))
    old = logprobs - delta - 0.01 * rng.normal(size=(rows, tokens))
    lengths = np.tile([3, 4, 5], rows)
    sequence = np.repeat(np.arange(len(lengths)), lengths).reshape(rows, tokens)
    advantages = rng.choice([-1.3, 0.0, 0.4, 2.0], len(lengths))[sequence]
    mask = rng.random((rows, tokens)) < 0.8
    mask[1, :3] = False  # a whole sequence
    counts = np.bincount(sequence[mask], minlength=len(lengths))
    inverse = np.where(mask, 1.0 / np.maximum(counts, 1)[sequence], 0.0)
    sequences = int((counts > 0).sum())
    return {
        "logprobs": logprobs,
        "old": old,
        "advantages": advantages,
        "mask": mask,
        "sequence": sequence,
        "inverse": inverse,
        "ref": logprobs + 0.3 * rng.normal(size=(rows, tokens)),
        "denominators": Denominators(float(mask.sum()), float(sequences), float(sequences * MAX_TOKENS)),
    }


def whole_loss(
    logprobs,
    old,
    advantages,
    mask,
    inverse,
    denominators,
    ref,
    *,
    clip="dual",
    aggregation="token_mean",
    kl_coef=0.0,
    estimator="k3",
):
    value, stats = losses.policy_loss(logprobs, old, advantages, mask, **CLIPS[clip])
    if kl_coef:
        value = value + kl_coef * losses.kl_penalty(logprobs, ref, mask, estimator=estimator)
    return losses.aggregate(value, mask, inverse, aggregation=aggregation, denominators=denominators), stats


@functools.partial(jax.jit, static_argnames=("clip", "aggregation", "kl_coef", "estimator"))
def value_and_gradient(*arrays, **settings):
    return jax.value_and_grad(whole_loss, has_aux=True)(*arrays, **settings)


@functools.partial(jax.jit, static_argnames="clip")
def tokens_and_gradient(logprobs, old, advantages, mask, clip="dual"):
    """Token losses with their statistics, and the gradient of the token losses' plain sum."""

    def total(x):
        token_loss, stats = losses.policy_loss(x, old, advantages, mask, **CLIPS[clip])
        return token_loss.sum(), (token_loss, stats)

    (_, aux), gradient = jax.value_and_grad(total, has_aux=True)(logprobs)
    return *aux, gradient


def arguments(case):
    return [
        case[name] for name in ("logprobs", "old", "advantages", "mask", "inverse", "denominators", "ref")
    ]


@pytest.mark.parametrize("clip", CLIPS)
def test_policy_loss_matches_oracle_in_value_and_gradient(clip):
    case = draw()
    with jax.enable_x64(True):
        token_loss, _, gradient = tokens_and_gradient(
            *[case[n] for n in ("logprobs", "old", "advantages", "mask")], clip=clip
        )
    expected, slope = np.zeros((2, *case["mask"].shape))
    for place in zip(*np.nonzero(case["mask"]), strict=True):
        point = (case["logprobs"][place], case["old"][place], case["advantages"][place])
        expected[place] = rl_oracle.token_loss(*point, **CLIPS[clip])
        slope[place] = rl_oracle.token_gradient(*point, **CLIPS[clip])
    np.testing.assert_allclose(token_loss, expected, rtol=1e-12)
    np.testing.assert_allclose(gradient, slope, rtol=1e-12)
    assert (slope == 0)[case["mask"]].any() and (slope != 0).any()


@pytest.mark.parametrize(
    ("clip", "kl_coef", "estimator", "aggregation"),
    [
        ("dapo", 0.0, "k3", "token_mean"),
        ("dual", 0.05, "k2", "sequence_mean"),
        ("ppo", 0.1, "k3", "constant"),
        ("dual", 0.1, "k1", "token_mean"),
    ],
)
def test_whole_loss_matches_oracle_and_its_central_differences(clip, kl_coef, estimator, aggregation):
    case = draw(1, rows=2)
    case["old"] = np.maximum(case["old"], case["logprobs"] - 3)  # a ratio of 1e9 would drown the differences
    settings = {"clip": clip, "kl_coef": kl_coef, "estimator": estimator, "aggregation": aggregation}

    def oracle(logprobs):
        return rl_oracle.objective(
            logprobs, case["old"], case["advantages"], case["mask"], case["sequence"], **CLIPS[clip],
            kl_coef=kl_coef, ref=case["ref"], estimator=estimator, aggregation=aggregation, max_tokens=MAX_TOKENS,
        )  # fmt: skip

    with jax.enable_x64(True):
        (value, _), gradient = value_and_gradient(*arguments(case), **settings)
    np.testing.assert_allclose(value, oracle(case["logprobs"]), rtol=1e-12)
    numeric = rl_oracle.central_difference(oracle, case["logprobs"])
    np.testing.assert_allclose(gradient, numeric, rtol=1e-7, atol=1e-8 * np.abs(numeric).max())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gspo_matches_its_objective_over_sequences(seed):
    case = draw(seed)
    case["old"] = np.clip(case["old"], case["logprobs"] - 0.4, case["logprobs"] + 0.4)
    segments = (case["sequence"] - case["sequence"].min(axis=1, keepdims=True) + 1).astype(np.int32)
    clip = {"clip_low": 0.05, "clip_high": 0.08}

    def oracle(logprobs):
        return rl_oracle.gspo(
            logprobs, case["old"], case["advantages"], case["mask"], case["sequence"], **clip
        )

    def ours(logprobs):
        sequences = losses.Sequences(segments, case["inverse"])
        value, stats = losses.policy_loss(
            logprobs, case["old"], case["advantages"], case["mask"], **clip, sequences=sequences
        )
        settings = {"aggregation": "sequence_mean", "denominators": case["denominators"]}
        return losses.aggregate(value, case["mask"], case["inverse"], **settings), stats

    spoiled = np.where(case["mask"], case["logprobs"], np.nan)
    with jax.enable_x64(True):
        (value, stats), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(spoiled)
    np.testing.assert_allclose(value, oracle(case["logprobs"]), rtol=1e-12)
    numeric = rl_oracle.central_difference(oracle, case["logprobs"])
    np.testing.assert_allclose(gradient, numeric, rtol=1e-7, atol=1e-8 * np.abs(numeric).max())
    assert (numeric == 0)[case["mask"]].any() and np.abs(numeric).max() > 0
    assert float(stats["clipped_high_positive"] + stats["clipped_low_negative"]) > 0


@pytest.mark.parametrize("clip", [{"clip_low": 1.0, "clip_high": 4.0}, {"clip_low": 0.2, "clip_high": 0.28}])
def test_cispo_weighs_every_token_by_its_clipped_ratio(clip):
    case = draw(4)
    case["logprobs"] = np.where(case["mask"], case["logprobs"], -np.inf)

    def total(x):
        value, stats = losses.cispo_loss(x, case["old"], case["advantages"], case["mask"], **clip)
        return value.sum(), (value, stats)

    with jax.enable_x64(True):
        (_, (value, stats)), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(case["logprobs"])
    expected = np.zeros(case["mask"].shape)
    for place in zip(*np.nonzero(case["mask"]), strict=True):
        expected[place] = rl_oracle.cispo_gradient(
            case["logprobs"][place], case["old"][place], case["advantages"][place], **clip
        )
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)
    np.testing.assert_allclose(
        value, np.where(case["mask"], expected * np.where(case["mask"], case["logprobs"], 0), 0), rtol=1e-12
    )
    assert (gradient != 0)[case["mask"] & (case["advantages"] != 0)].all() and stats[
        "clipped_high_positive"
    ] > 0


def test_whole_loss_in_float32_is_close_to_float64():
    case = draw(2)
    # without ratios of 1e9, whose sum hides all else
    case["old"] = np.maximum(case["old"], case["logprobs"] - 3)
    f32 = jax.tree.map(
        lambda a: a.astype(np.float32) if a.dtype == np.float64 else a,
        jax.tree.map(np.asarray, arguments(case)),
    )
    (value, _), gradient = value_and_gradient(*f32, kl_coef=0.1)
    with jax.enable_x64(True):
        f64 = jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, f32)
        (exact, _), exact_gradient = value_and_gradient(*f64, kl_coef=0.1)
    assert value.dtype == gradient.dtype == jnp.float32
    # exp of a log ratio with an error of a few roundoffs, and a sum of 48
    np.testing.assert_allclose(value, exact, rtol=2e-6)
    np.testing.assert_allclose(gradient, exact_gradient, rtol=4e-6, atol=1e-7 * np.abs(exact_gradient).max())


def test_on_policy_gradient_is_minus_advantage():
    case = draw()
    loss, stats, gradient = tokens_and_gradient(case["logprobs"], None, case["advantages"], case["mask"])
    expected = np.where(case["mask"], -case["advantages"], 0).astype(np.float32)
    np.testing.assert_array_equal(gradient, expected)
    np.testing.assert_array_equal(loss, expected)
    assert float(stats["ratio_sum"]) == float(stats["tokens"]) == case["mask"].sum()
    assert stats["old_kl_sum"] == 0


def test_statistics_count_what_the_oracle_counts():
    case = draw(3)
    _, stats, _ = tokens_and_gradient(*[case[n] for n in ("logprobs", "old", "advantages", "mask")])
    ratio = np.exp(np.clip(case["logprobs"] - case["old"], -20, 20))[case["mask"]]
    advantage = case["advantages"][case["mask"]]
    expected = {
        "tokens": len(ratio), "positive_tokens": (advantage > 0).sum(), "negative_tokens": (advantage < 0).sum(),
        "clipped_high_positive": ((advantage > 0) & (ratio > 1.28)).sum(), "clipped_low_negative": ((advantage < 0) & (ratio < 0.8)).sum(),
        "clipped_dual_negative": ((advantage < 0) & (ratio > 3)).sum(), "outside_low_positive": ((advantage > 0) & (ratio < 0.8)).sum(),
        "outside_high_negative": ((advantage < 0) & (ratio > 1.28)).sum(),
        "ratio_sum": ratio.sum(), "old_kl_sum": (ratio - 1 - np.log(ratio)).sum(),
    }  # fmt: skip
    assert min(expected.values()) > 0
    assert set(stats) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("estimator", "aggregation"), [("k1", "token_mean"), ("k2", "token_mean"), ("k3", "sequence_mean")]
)
def test_masked_nonfinite_values_change_neither_loss_nor_gradient(estimator, aggregation):
    case = draw(4)
    spoiled = dict(case)
    for i, name in enumerate(("logprobs", "old", "advantages", "ref", "inverse")):
        bad = np.resize(np.roll([-np.inf, np.nan, np.inf, 1e30], i), case["mask"].shape)
        spoiled[name] = np.where(case["mask"], case[name], bad)
    clean, dirty = (
        value_and_gradient(*arguments(c), kl_coef=0.1, estimator=estimator, aggregation=aggregation)
        for c in (case, spoiled)
    )
    chex.assert_trees_all_equal(clean, dirty)
    assert np.isfinite(clean[1]).all() and not np.asarray(clean[1])[~case["mask"]].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_unmasked_nonfinite_logprob_reaches_the_loss(bad):
    case = draw()
    case["logprobs"][0, int(np.argmax(case["mask"][0]))] = bad
    assert not np.isfinite(value_and_gradient(*arguments(case), kl_coef=0.1, estimator="k1")[0][0])


def test_zero_advantage_gives_zero_gradient():
    case = draw()
    case["advantages"] = np.zeros_like(case["advantages"])
    assert not np.asarray(value_and_gradient(*arguments(case))[1]).any()


def test_loss_of_nothing_is_zero():
    case = draw()
    case["mask"] = np.zeros_like(case["mask"])
    case["denominators"] = Denominators(0.0, 0.0, 0.0)
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        (value, stats), gradient = value_and_gradient(*arguments(case), kl_coef=0.1, aggregation=aggregation)
        assert value == 0 and not np.asarray(gradient).any() and not any(stats.values())


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (3, 1), (1, 2, 1)])
def test_microbatches_add_up_to_the_batch(rows, aggregation):
    case = draw(5)
    names = ("logprobs", "old", "advantages", "mask", "inverse")
    edges = np.cumsum([0, *rows])
    # every part padded to four rows: one compiled program, as in training
    parts = []
    for first, last in itertools.pairwise(edges):
        part = {n: np.zeros_like(case[n]) for n in names} | {
            "ref": np.zeros_like(case["ref"]),
            "denominators": case["denominators"],
        }
        for n in (*names, "ref"):
            part[n][: last - first] = case[n][first:last]
        parts.append(part)
    (whole, whole_stats), whole_gradient = value_and_gradient(
        *arguments(case), kl_coef=0.1, aggregation=aggregation
    )
    pieces = [value_and_gradient(*arguments(part), kl_coef=0.1, aggregation=aggregation) for part in parts]
    np.testing.assert_allclose(sum(p[0][0] for p in pieces), whole, rtol=1e-5)
    gradient = np.concatenate([np.asarray(p[1])[:n] for p, n in zip(pieces, rows, strict=True)])
    np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-6)
    for name, total in whole_stats.items():
        np.testing.assert_allclose(sum(p[0][1][name] for p in pieces), total, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalty_matches_oracle(estimator):
    differences = np.array([0.0, 1e-3, -1e-3, 0.5, -0.5, 2.2, -2.2, -2.7, -15.0, 15.0, -40.0])
    ref = np.linspace(-3, -1, len(differences))
    mask = np.ones(len(differences), bool)
    expected = [rl_oracle.kl(d + r, r, estimator) for d, r in zip(differences, ref, strict=True)]
    with jax.enable_x64(True):
        got = losses.kl_penalty(jnp.asarray(differences + ref), jnp.asarray(ref), mask, estimator=estimator)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)
    assert estimator == "k1" or (np.asarray(got) >= 0).all()


@pytest.mark.parametrize(("estimator", "expectation"), [("k1", "zero"), ("k2", "reverse"), ("k3", "forward")])
def test_kl_penalty_has_the_documented_expected_gradient(estimator, expectation):
    """Over all tokens of a vocabulary, weighted by the policy's probabilities: no sampling error."""
    rng = np.random.default_rng(0)
    logits, ref_logits = rng.normal(size=(2, 11))

    def expected_penalty(x, weights):
        logprobs = jax.nn.log_softmax(x)
        return (
            weights
            * losses.kl_penalty(
                logprobs, jax.nn.log_softmax(ref_logits), jnp.ones(11, bool), estimator=estimator
            )
        ).sum()

    def divergence(x):
        p, q = jax.nn.log_softmax(x), jax.nn.log_softmax(ref_logits)
        return {
            "zero": 0.0 * x[0],
            "reverse": (jnp.exp(p) * (p - q)).sum(),
            "forward": (jnp.exp(q) * (q - p)).sum(),
        }[expectation]

    with jax.enable_x64(True):
        logits, ref_logits = jnp.asarray(logits), jnp.asarray(ref_logits)
        gradient, expected = jax.jit(
            lambda x: (jax.grad(expected_penalty)(x, jax.nn.softmax(x)), jax.grad(divergence)(x))
        )(logits)
    np.testing.assert_allclose(gradient, expected, atol=1e-15, rtol=1e-12)


def test_unknown_names_raise():
    x = jnp.zeros((1, 2))
    with pytest.raises(ValueError, match="got estimator='k4'"):
        losses.kl_penalty(x, x, x, estimator="k4")
    with pytest.raises(ValueError, match="got aggregation='mean'"):
        losses.aggregate(x, x, x, aggregation="mean", denominators=Denominators(1.0, 1.0, 1.0))
