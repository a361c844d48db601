"""Sampling against the distribution it claims, and its independence of batch, slot and size."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.config.types import TEMPERATURES
from jetrl_jax.models import vocabulary
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import jit
from jetrl_jax.rollout.embedded.sampling import Controls, request_keys, sample

DRAWS = 20_000
CHI_SQUARE_15_999 = 37.70  # 99.9 % quantile of chi-square with 15 degrees of freedom
U_FP32 = 2.0**-24


def controls(temperature: float = 1.0, greedy: bool = False, seed: int = 0, vocab: int = 16) -> Controls:
    return Controls(jnp.float32(temperature), jnp.asarray(greedy), jnp.uint32(seed), jnp.zeros(vocab, bool))


@functools.partial(jit, static_argnames="exact")
def draw(
    logits: jax.Array, seeds: jax.Array, positions: jax.Array, call: Controls, exact: bool = True
) -> tuple[jax.Array, jax.Array]:
    return sample(logits, request_keys(call.seed, seeds), positions, call, Numerics(exact=exact))


def logits_of(vocab: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.9, vocab).astype(np.float32)


def softmax64(logits: np.ndarray, temperature: float) -> np.ndarray:
    wide = np.exp(logits.astype(np.float64) / temperature - (logits.astype(np.float64) / temperature).max())
    return wide / wide.sum()


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = len(tokens) * probabilities
    assert expected.min() > 5, "the test itself needs five expected draws of each token"
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("vary", ["request", "position"])
def test_tokens_follow_the_softmax(exact: bool, temperature: float, vary: str) -> None:
    logits, index, fixed = logits_of(), np.arange(DRAWS), np.zeros(DRAWS)
    seeds, positions = (index, fixed) if vary == "request" else (fixed, index)
    rows = np.tile(logits, (DRAWS, 1))
    tokens, _ = draw(
        rows, seeds.astype(np.uint32), positions.astype(np.int32), controls(temperature), exact=exact
    )
    assert chi_square(np.asarray(tokens), softmax64(logits, temperature)) < CHI_SQUARE_15_999


def test_tokens_of_different_calls_follow_the_softmax() -> None:
    logits, zero = logits_of(), jnp.zeros(1, jnp.int32)

    def one(call_seed: jax.Array) -> jax.Array:
        return sample(
            jnp.asarray(logits)[None],
            request_keys(call_seed, zero.astype(jnp.uint32)),
            zero,
            controls(),
            Numerics(),
        )[0][0]

    tokens = jit(jax.vmap(one))(jnp.arange(DRAWS, dtype=jnp.uint32))
    assert chi_square(np.asarray(tokens), softmax64(logits, 1.0)) < CHI_SQUARE_15_999


@pytest.mark.parametrize("exact", [True, False])
def test_logprobs_hold_at_every_temperature_that_is_taken_and_not_far_below(exact: bool) -> None:
    """Logits of hundreds: at the lowest temperature they are off by their own roundoff; what FP32 has as 0
    gives NaN.
    """
    logits = np.random.default_rng(0).normal(0, 100, (32, 16)).astype(np.float32)
    seeds, positions = jnp.arange(32, dtype=jnp.uint32), jnp.zeros(32, jnp.int32)
    for temperature in (*TEMPERATURES, 0.1):
        tokens, logprobs = draw(jnp.asarray(logits), seeds, positions, controls(temperature), exact=exact)
        wide = logits.astype(np.float64) / np.float64(np.float32(temperature))
        oracle = (
            wide[np.arange(32), tokens]
            - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1))
            - wide.max(-1)
        )
        assert np.abs(logprobs - oracle).max() <= 4 * U_FP32 * max(np.abs(wide).max(), 16)
    assert not np.isfinite(draw(jnp.asarray(logits), seeds, positions, controls(1e-40), exact=exact)[1]).any()
    # not the bits of a logit twice: its roundoff, divided by the temperature, is the log-probability
    if not exact:
        assert not np.isfinite(
            draw(jnp.asarray(logits), seeds, positions, controls(1e-12), exact=False)[1]
        ).all()


def test_the_chi_square_test_can_fail() -> None:
    """The same draws against the distribution of a temperature 10 % off."""
    rows = np.tile(logits_of(), (DRAWS, 1))
    tokens, _ = draw(rows, np.arange(DRAWS, dtype=np.uint32), np.zeros(DRAWS, np.int32), controls(1.0))
    assert chi_square(np.asarray(tokens), softmax64(logits_of(), 1.1)) > CHI_SQUARE_15_999


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_logprobs_match_a_float64_log_softmax(exact: bool, temperature: float) -> None:
    """Error at most: the division, then the normaliser (and its sum, without exact) and the difference round
    to FP32.
    """
    logits = np.random.default_rng(1).normal(0, 6, (64, 301)).astype(np.float32)
    call = controls(temperature, vocab=301)
    tokens, logprobs = draw(
        jnp.asarray(logits), jnp.arange(64, dtype=jnp.uint32), jnp.zeros(64, jnp.int32), call, exact=exact
    )
    scaled = logits.astype(np.float64) / np.float32(temperature).astype(np.float64)
    top = scaled.max(-1, keepdims=True)
    reference = scaled - top - np.log(np.exp(scaled - top).sum(-1, keepdims=True))
    chosen = np.take_along_axis(reference, np.asarray(tokens)[:, None], -1)[:, 0]
    magnitude = np.abs(scaled).max(-1)
    # 301 FP32 terms summed pairwise or by lanes, and the exponentials' own error
    roundings = 4 if exact else 4 + 16
    assert (
        np.abs(np.asarray(logprobs) - chosen) <= roundings * U_FP32 * (magnitude + np.abs(chosen) + 6)
    ).all()


def test_a_token_depends_on_its_own_seed_and_position_alone() -> None:
    rng = np.random.default_rng(2)
    logits, seeds = rng.normal(0, 1, (48, 16)).astype(np.float32), rng.integers(0, 2**32, 48, np.uint32)
    positions = rng.integers(0, 500, 48).astype(np.int32)
    tokens, logprobs = map(np.asarray, draw(logits, seeds, positions, controls(0.8)))
    order = rng.permutation(48)
    moved_tokens, moved_logprobs = map(
        np.asarray, draw(logits[order], seeds[order], positions[order], controls(0.8))
    )
    np.testing.assert_array_equal(moved_tokens, tokens[order])
    np.testing.assert_array_equal(moved_logprobs, logprobs[order])
    for rows in (1, 3, 20):
        few_tokens, few_logprobs = map(
            np.asarray, draw(logits[:rows], seeds[:rows], positions[:rows], controls(0.8))
        )
        np.testing.assert_array_equal(few_tokens, tokens[:rows])
        np.testing.assert_array_equal(few_logprobs, logprobs[:rows])


def test_seed_position_and_call_change_the_noise() -> None:
    rows = jnp.zeros((2000, 16), jnp.float32)
    index, fixed = jnp.arange(2000, dtype=jnp.uint32), jnp.zeros(2000, jnp.int32)
    base, _ = draw(rows, index, fixed, controls(seed=0))
    for seeds, positions, call_seed in ((index + 7, fixed, 0), (index, fixed + 1, 0), (index, fixed, 1)):
        other, _ = draw(rows, seeds, positions, controls(seed=call_seed))
        agreement = float((np.asarray(base) == np.asarray(other)).mean())
        assert abs(agreement - 1 / 16) < 4 * (1 / 16 * 15 / 16 / 2000) ** 0.5


def test_greedy_takes_the_lowest_of_the_best_and_reports_temperature_one() -> None:
    logits = np.zeros((3, 16), np.float32)
    logits[0, [4, 9]] = 2.0
    logits[1, 15] = 1.0
    tokens, logprobs = map(
        np.asarray,
        draw(logits, np.arange(3, dtype=np.uint32), np.zeros(3, np.int32), controls(1.0, greedy=True)),
    )
    assert tokens.tolist() == [4, 15, 0]
    np.testing.assert_allclose(
        logprobs, [np.log(softmax64(logits[i], 1.0)[t]) for i, t in enumerate(tokens)], rtol=1e-6
    )


def test_a_nan_is_reported_not_hidden() -> None:
    logits = np.zeros((2, 16), np.float32)
    logits[1, 3] = np.nan
    tokens, logprobs = map(
        np.asarray, draw(logits, np.arange(2, dtype=np.uint32), np.zeros(2, np.int32), controls())
    )
    assert np.isfinite(logprobs[0]) and np.isnan(logprobs[1]) and 0 <= tokens[1] < 16


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.3])
def test_the_engines_and_the_trainers_temperature_give_the_same_bits(temperature: float) -> None:
    """The engine divides by a float32 argument, the trainer by a constant (at 1 by nothing)."""
    logits = np.random.default_rng(3).normal(0, 9, (512, 64)).astype(np.float32)
    as_argument = jit(lambda x, t: vocabulary.scale_logits(x, t))(logits, jnp.float32(temperature))
    as_constant = jit(lambda x: vocabulary.scale_logits(x, temperature))(logits)
    np.testing.assert_array_equal(as_argument, as_constant)
    np.testing.assert_array_equal(as_argument, logits / np.float32(temperature))


@pytest.mark.long
@pytest.mark.parametrize(("target", "draft"), [(6.0, 0.2), (2.5, 1.0), (1.0, 3.0)])
def test_two_policies_with_the_same_noise_agree_as_often_as_the_closed_form_says(target, draft) -> None:
    """10^6 coupled draws of p and q = p with noise on its logits:  P[same] = sum_i 1 / sum_j max(p_j / p_i,
    q_j / q_i)  >= (1 - TV) / (1 + TV);  a draft that is one token is right with its probability.
    """
    rng, size, rounds = np.random.default_rng(5), 40, 50
    logits = rng.normal(0, target, size)
    logits = np.stack([logits, logits + rng.normal(0, draft, size)])
    p, q = np.exp(logits - logits.max(axis=1, keepdims=True))
    p, q = p / p.sum(), q / q.sum()
    ratios = np.maximum(p[None] / p[:, None], q[None] / q[:, None])  # [i, j]
    expected, distance = (1 / ratios.sum(axis=1)).sum(), np.abs(p - q).sum() / 2
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance + 1e-12

    @jit
    def same(seeds: jax.Array, controls: Controls) -> tuple[jax.Array, jax.Array]:
        keys = request_keys(controls.seed, seeds)
        both = [
            sample(
                jnp.broadcast_to(row, (len(seeds), size)), keys, jnp.full(len(seeds), 7), controls, Numerics()
            )[0]
            for row in jnp.asarray(logits, jnp.float32)
        ]
        return (both[0] == both[1]).sum(), (both[0] == int(p.argmax())).sum()

    counts = np.zeros(2)
    draws = 10**6
    for seeds in np.split(np.arange(draws, dtype=np.uint32), rounds):
        controls = Controls(np.float32(1), np.bool_(False), np.uint32(1), np.zeros(size, bool))
        counts += [int(count) for count in same(seeds, jax.device_put(controls))]
    for count, chance in zip(counts, (expected, p.max()), strict=True):
        assert abs(count - draws * chance) < 5 * np.sqrt(draws * chance * (1 - chance)), (
            count / draws,
            chance,
        )
