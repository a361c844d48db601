"""Defaults of the algorithms, what overrides them, and the objective put together from its parts."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jetrl_jax.errors import UserError
from jetrl_jax.rl import advantages
from jetrl_jax.rl.algorithm import policy_objective, resolve_algorithm
from jetrl_jax.rl.batching import TrainBatch, count_denominators
from jetrl_jax.rl.metrics import METRICS
from tests.oracles import rl_oracle
from tests.sections import algorithm_section, correction_section


@pytest.mark.parametrize(
    ("name", "advantage", "aggregation", "clips", "dynamic_sampling", "buffer"),
    [
        ("grpo", advantages.grpo, "token_mean", (0.2, 0.2), False, 0),
        ("dapo", advantages.grpo, "token_mean", (0.2, 0.28), True, 4096),
        ("dr_grpo", advantages.dr_grpo, "constant", (0.2, 0.2), False, 0),
        ("rloo", advantages.rloo, "token_mean", (0.2, 0.2), False, 0),
        ("reinforce_pp", advantages.reinforce_pp, "token_mean", (0.2, 0.2), False, 0),
        ("gspo", advantages.grpo, "sequence_mean", (3e-4, 4e-4), False, 0),
        ("cispo", advantages.grpo, "token_mean", (1.0, 4.0), False, 0),
    ],
)
def test_resolve_algorithm_defaults(name, advantage, aggregation, clips, dynamic_sampling, buffer):
    resolved = resolve_algorithm(algorithm_section(name=name), 20480)
    assert (resolved.advantage, resolved.aggregation, (resolved.clip_low, resolved.clip_high)) == (
        advantage,
        aggregation,
        clips,
    )
    assert (resolved.dynamic_sampling, resolved.overlong_buffer_tokens, resolved.max_completion_tokens) == (
        dynamic_sampling,
        buffer,
        20480,
    )
    assert (
        resolved.dual_clip is None
        and not resolved.needs_reference
        and resolved.on_policy
        and not resolved.notes
    )
    assert not resolved.bypass and not resolved.recompute and not resolved.needs_old
    hash(resolved)


def test_correction_decides_which_logprobs_are_computed():
    several = algorithm_section(minibatches=2)
    assert resolve_algorithm(several, 10).needs_old
    assert not resolve_algorithm(several, 10, correction_section(mode="bypass")).needs_old
    for fields in ({"weight": "token_truncate"}, {"reject": "k1"}, {"veto": 1e-4}):
        assert resolve_algorithm(algorithm_section(), 10, correction_section(**fields)).needs_old


OVERRIDES = {
    "loss_aggregation": "sequence_mean", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0, "kl_coef": 0.01, "kl_estimator": "k2",
    "epochs": 2, "minibatches": 4, "mask_truncated": True, "dynamic_sampling": False, "max_generation_rounds": 3,
    "overlong_buffer_tokens": 0, "credit": "turn",
}  # fmt: skip


NAMES = ("grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo")


@pytest.mark.parametrize("name", NAMES)
def test_resolve_algorithm_keeps_what_the_config_sets(name):
    has = {field: value for field, value in OVERRIDES.items() if name != "cispo" or field != "dual_clip"}
    section = algorithm_section(name=name, **has)
    record = resolve_algorithm(section, 100).record()
    assert set(has) == set(type(section).model_fields) - {"name"}
    for field, value in has.items():
        assert record[field.removeprefix("loss_")] == value, field
    assert record["name"] == name and isinstance(record["advantage"], str)


def test_on_policy_needs_one_pass_and_one_minibatch():
    assert not resolve_algorithm(algorithm_section(epochs=2), 10).on_policy
    assert not resolve_algorithm(algorithm_section(minibatches=2), 10).on_policy


def test_resolve_algorithm_raises_on_buffer_longer_than_completion():
    with pytest.raises(
        UserError, match=r"overlong_buffer_tokens=11, expected at most rollout.max_completion_tokens=10"
    ):
        resolve_algorithm(algorithm_section(overlong_buffer_tokens=11), 10)


@pytest.mark.parametrize(
    ("settings", "word"), [({"kl_coef": 0.1, "kl_estimator": "k1"}, "k1"), ({"clip_low": 1.0}, "clip_low")]
)
def test_settings_without_the_wanted_effect_are_noted(settings, word):
    (note,) = resolve_algorithm(algorithm_section(**settings), 10).notes
    assert word in note


def test_shape_rewards_adds_the_overlong_penalty():
    resolved = resolve_algorithm(algorithm_section(name="dapo"), 100)
    rewards = np.array([[1.0, 1.0, np.nan], [0.0, 1.0, 1.0]])
    lengths = np.array([[80, 90, 100], [100, 81, 1]])
    np.testing.assert_allclose(
        resolved.shape_rewards(rewards, lengths), [[1.0, 0.5, np.nan], [-1.0, 0.95, 1.0]]
    )
    np.testing.assert_array_equal(
        resolve_algorithm(algorithm_section(), 100).shape_rewards(rewards, lengths), rewards
    )


def draw_batch():
    rng = np.random.default_rng(0)
    shape = (2, 8)
    sequence = np.array([[0, 0, 0, 0, 1, 1, 1, -1], [2, 2, 2, 2, 2, 2, -1, -1]])
    mask = np.array([[0, 0, 1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0, 0]], bool)
    count = np.bincount(sequence[mask])
    logprobs = -rng.exponential(1.0, shape).astype(np.float32)
    # what is not trained is not finite, so that a mask left out anywhere is seen
    noisy = lambda scale: np.where(mask, logprobs + scale * rng.normal(size=shape), np.nan).astype(np.float32)  # noqa: E731
    # A < 0: dual clip, low clip; A > 0: inside, high clip; below, above, inside, and just outside 1.2
    log_ratio = np.zeros(shape)
    log_ratio[mask] = [0.6, -0.5, 0.1, 0.9, -0.9, 0.3, -0.1, 0.05, 0.22]
    batch = TrainBatch(
        token_ids=np.zeros(shape, np.int32), positions=np.zeros(shape, np.int32), segment_ids=(sequence >= 0).astype(np.int32),
        loss_mask=mask, rollout_logprobs=noisy(0.1), advantages=np.where(mask, np.array([-1.0, 0.7, 1.2])[sequence], 0).astype(np.float32),
        sequence_index=sequence.astype(np.int32), inverse_length=np.where(mask, 1 / count[sequence], 0).astype(np.float32),
        old_logprobs=np.where(mask, logprobs - log_ratio, np.nan).astype(np.float32), ref_logprobs=noisy(0.3),
    )  # fmt: skip
    return np.where(mask, logprobs, -np.inf), batch


@functools.partial(jax.jit, static_argnames="algorithm")
def objective_and_gradient(logprobs, batch, denominators, algorithm, entropy):
    function = functools.partial(
        policy_objective, batch=batch, denominators=denominators, algorithm=algorithm, entropy=entropy
    )
    return jax.value_and_grad(function, has_aux=True)(logprobs)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "dapo"},
        {"name": "dr_grpo", "kl_coef": 0.2, "dual_clip": 1.5},
        {"loss_aggregation": "sequence_mean"},
    ],
)
def test_objective_matches_oracle(settings):
    logprobs, batch = draw_batch()
    algorithm = resolve_algorithm(algorithm_section(**settings), 6)

    def oracle(point):
        return rl_oracle.objective(
            point, batch.old_logprobs, batch.advantages, batch.loss_mask, batch.sequence_index,
            clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, dual_clip=algorithm.dual_clip, kl_coef=algorithm.kl_coef,
            ref=batch.ref_logprobs, estimator="k3", aggregation=algorithm.aggregation, max_tokens=6,
        )  # fmt: skip

    entropy = np.where(batch.loss_mask, 0.5, np.nan)
    (loss, stats), gradient = objective_and_gradient(
        logprobs, batch, count_denominators([batch], 6), algorithm, entropy
    )
    finite = np.where(batch.loss_mask, logprobs, 0).astype(np.float64)
    np.testing.assert_allclose(loss, oracle(finite), rtol=3e-6)
    numeric = rl_oracle.central_difference(oracle, finite)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-5, atol=1e-7)
    assert stats["clipped_low_negative"] == 1 and stats["clipped_high_positive"] == (
        2 if settings.get("name") == "dapo" else 3
    )
    assert stats["clipped_dual_negative"] == int("dual_clip" in settings)
    np.testing.assert_allclose(stats["entropy_sum"], 0.5 * batch.loss_mask.sum())
    if algorithm.needs_reference:
        pairs = zip(finite[batch.loss_mask], batch.ref_logprobs[batch.loss_mask].astype(float), strict=True)
        kl = sum(rl_oracle.kl(now, ref, "k3") for now, ref in pairs)
        np.testing.assert_allclose(stats["kl_sum"], kl, rtol=1e-5)
    else:
        assert "kl_sum" not in stats


def test_objective_without_old_logprobs_is_on_policy():
    logprobs, batch = draw_batch()
    batch = batch.replace(old_logprobs=None, ref_logprobs=None)
    algorithm = resolve_algorithm(algorithm_section(), 6)
    (loss, stats), gradient = objective_and_gradient(
        logprobs, batch, count_denominators([batch], 6), algorithm, None
    )
    expected = -batch.advantages / batch.loss_mask.sum()
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    np.testing.assert_allclose(loss, expected.sum(), rtol=1e-6)
    assert not stats["clipped_low_negative"] and not stats["clipped_high_positive"]


def test_correction_weighs_the_policy_loss_and_not_the_kl_term():
    logprobs, batch = draw_batch()
    algorithm = resolve_algorithm(algorithm_section(kl_coef=0.2), 6)
    weight = np.where(
        batch.loss_mask, np.random.default_rng(3).uniform(0, 2, batch.loss_mask.shape), np.nan
    ).astype(np.float32)
    denominators = count_denominators([batch], 6)
    _, policy = objective_and_gradient(
        logprobs, batch, denominators, resolve_algorithm(algorithm_section(), 6), None
    )
    _, both = objective_and_gradient(logprobs, batch, denominators, algorithm, None)
    _, corrected = objective_and_gradient(
        logprobs, batch.replace(correction=weight), denominators, algorithm, None
    )
    expected = np.where(batch.loss_mask, weight, 0) * policy + (both - policy)
    np.testing.assert_allclose(corrected, expected, rtol=1e-5, atol=1e-7)


def test_objective_raises_without_reference():
    logprobs, batch = draw_batch()
    algorithm = resolve_algorithm(algorithm_section(kl_coef=0.1), 6)
    with pytest.raises(ValueError, match="ref_logprobs=None"):
        policy_objective(
            logprobs, batch.replace(ref_logprobs=None), count_denominators([batch], 6), algorithm
        )


def test_documented_defaults_are_the_resolved_ones():
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    table = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2 : 2 + len(NAMES)]}
    assert list(table) == list(NAMES)
    for name, documented in table.items():
        resolved = resolve_algorithm(algorithm_section(name=name), 20480)
        assert documented["advantage"].lower().replace(".", "_") == resolved.advantage.__name__
        assert documented["loss_aggregation"] == resolved.aggregation
        assert (float(documented["clip_low"]), float(documented["clip_high"])) == (
            resolved.clip_low,
            resolved.clip_high,
        )
        assert documented["dynamic_sampling"] == str(resolved.dynamic_sampling).lower()
        assert documented["overlong_buffer_tokens"].startswith("a fifth") == (
            resolved.overlong_buffer_tokens == 20480 // 5
        )
        assert documented["overlong_buffer_tokens"].startswith("0") == (resolved.overlong_buffer_tokens == 0)


def test_documented_metrics_are_declared():
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:mismatch|clip|policy)/\w+)`", text))
    assert len(named) > 8 and named <= set(METRICS)
