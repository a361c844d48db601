"""`Decoder.extend`: several tokens of each row against a cache, against the same tokens one by one and in a
whole forward.

Rows begin at different lengths; what earlier sequences left above a row's last token is large and must not be
seen.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetrl_jax.models import attention
from jetrl_jax.models import cache as cache_module
from jetrl_jax.models.cache import KeysValues, KVCache, empty_cache
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.parameters import jit
from tests.oracles import attention_oracle, tolerances
from tests.parity.small_policy import CONFIG, SmallPolicy, resolved

QWEN2 = dataclasses.replace(
    CONFIG, architecture="qwen2", qk_norm=False, attention_bias=True, tie_word_embeddings=False
)
LENGTH, SLOTS, NEW = 14, 24, 5
STARTS = np.array([0, 3, LENGTH - NEW], np.int32)  # tokens of each row that the cache holds before
LEFT_BEHIND = 64.0
LONG = pytest.mark.long
FLOWS = [
    ("fp8_unified", CONFIG),
    ("bf16", QWEN2),
    *(
        pytest.param(preset, config, marks=LONG)
        for preset, config in [("bf16", CONFIG), ("fp8_unified", QWEN2), ("fp16", CONFIG)]
    ),
    *(
        pytest.param(preset, config, marks=LONG)
        for preset in ("fp8_forward", "fp8_rollout_only")
        for config in (CONFIG, QWEN2)
    ),
]


class Case:
    """One policy's published weights, the tokens of three rows, and the programs on them."""

    def __init__(self, preset: str, config: ModelConfig, **options: Any) -> None:
        self.policy = SmallPolicy(preset, config, **options)
        self.graphdef, self.weights = nnx.split(self.policy.rollout_model())
        rng = np.random.default_rng(3)
        self.ids = jnp.asarray(rng.integers(0, config.vocab_size, (len(STARTS), LENGTH)), jnp.int32)
        self.extend = jit(lambda weights, *arrays: self.model(weights).extend(*arrays))

    def model(self, weights: Any) -> Decoder:
        return nnx.merge(self.graphdef, weights)

    def whole(self) -> tuple[np.ndarray, list[KVCache]]:
        """(hidden [B, T, D] of all tokens, their cache with only the first `STARTS` of each row)."""
        positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], self.ids.shape)
        numerics = self.policy.numerics

        def program(weights: Any) -> Any:
            hidden, kept = self.model(weights).prefill(self.ids, positions, jnp.ones_like(self.ids))
            return hidden, [KVCache.of(layer, SLOTS, numerics) for layer in kept]

        def filled(x: jax.Array) -> jax.Array:
            return jnp.asarray(np.where(seen[:, None, :, None], np.asarray(x), LEFT_BEHIND), x.dtype)

        hidden, caches = jit(program)(self.weights)
        seen = np.arange(SLOTS)[None] < STARTS[:, None]
        with jax.enable_x64(numerics.exact):
            return np.asarray(hidden, np.float64), jax.tree.map(filled, caches)

    def extended(self, tokens_at_once: int, cache: list[KVCache]) -> tuple[np.ndarray, list[KVCache]]:
        """(hidden [B, NEW, D] of the tokens after the cache's, so many at once; the cache)."""
        parts = []
        for first in range(0, NEW, tokens_at_once):
            positions = (
                STARTS[:, None] + np.arange(first, min(first + tokens_at_once, NEW), dtype=np.int32)[None]
            )
            tokens = jnp.take_along_axis(self.ids, jnp.asarray(positions), axis=1)
            hidden, cache = self.extend(self.weights, tokens, jnp.asarray(positions), cache)
            parts.append(np.asarray(hidden, np.float64))
        return np.concatenate(parts, axis=1), cache


case = functools.cache(Case)


def expected(whole: np.ndarray) -> np.ndarray:
    """Of a whole forward, the tokens that are extended."""
    return np.stack([row[start : start + NEW] for row, start in zip(whole, STARTS, strict=True)])


@pytest.mark.parametrize(("preset", "config"), FLOWS)
def test_tokens_at_once_have_the_bits_of_one_after_another_and_of_a_whole_forward(
    preset: str, config: ModelConfig
) -> None:
    one = case(preset, config)
    whole, cache = one.whole()
    by_one, cache_by_one = one.extended(1, cache)
    np.testing.assert_array_equal(by_one, expected(whole))
    at_once, cache_at_once = one.extended(NEW, cache)
    np.testing.assert_array_equal(at_once, by_one)
    for a, b in zip(jax.tree.leaves(cache_at_once), jax.tree.leaves(cache_by_one), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    "broken", ["sees the token after itself", "does not see its mates", "written one slot too far"]
)
def test_the_comparison_can_fail(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Case("bf16", QWEN2)
    whole, cache = one.whole()
    attend, write = attention.attend_to_cache, cache_module.KVCache.write
    if broken == "written one slot too far":
        monkeypatch.setattr(
            cache_module.KVCache, "write", lambda self, k, v, p, numerics: write(self, k, v, p + 1, numerics)
        )
    else:
        shift = (
            (lambda p: p + 1)
            if broken == "sees the token after itself"
            else (lambda p: jnp.broadcast_to(p[:, :1], p.shape))
        )
        monkeypatch.setattr(
            attention, "attend_to_cache", lambda q, kept, p, numerics: attend(q, kept, shift(p), numerics)
        )
    assert (one.extended(NEW, cache)[0] != expected(whole)).any()


@pytest.mark.long
def test_without_exact_hidden_states_are_close() -> None:
    """BF16 roundings that may fall otherwise on another CPU: four units in the last place; a token too many
    or too few is 2**0 off.
    """
    one = Case("bf16", CONFIG, exact=False)
    whole, cache = one.whole()
    at_once, by_one = one.extended(NEW, cache)[0], one.extended(1, cache)[0]
    for other in (expected(whole), by_one):
        assert np.abs(at_once - other).max() <= 2**-6 * np.abs(other).max()
    single = Case("fp32", CONFIG, exact=False)
    whole, cache = single.whole()
    np.testing.assert_allclose(single.extended(NEW, cache)[0], expected(whole), rtol=0, atol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
def test_attention_against_a_cache_matches_float64(exact: bool) -> None:
    """Grouped heads, ragged rows, in FP32 against loops in float64."""
    B, t, N, K, H, S = 3, 4, 6, 2, 16, 13
    rng = np.random.default_rng(1)
    numerics = resolved(compute_dtype="float32", exact=exact)
    q = rng.normal(size=(B, t, N, H)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3], [5, 6, 7, 8], [9, 10, 11, 12]], np.int32)
    visible = np.arange(S)[None, None] <= positions[:, :, None]
    keys, values = (rng.normal(size=(B, S, K, H)).astype(np.float32) for _ in range(2))
    for x in (keys, values):
        x[~visible[:, -1]] = 1e4
    kept = KVCache.of(KeysValues(jnp.asarray(keys), jnp.asarray(values)), S, numerics)
    found = jit(lambda q, kept: attention.attend_to_cache(q, kept, jnp.asarray(positions), numerics))(
        jnp.asarray(q), kept
    )
    oracle = attention_oracle.attention(q, keys, values, visible, np.zeros((B, t, N, H)))
    bound = tolerances.attention(S, H, oracle.spread, 0.0) * oracle.magnitudes[0] + 1e-30
    assert np.all(np.abs(np.asarray(found, np.float64).reshape(B, t, N, H) - oracle.values[0]) <= bound)


def test_an_empty_cache_and_a_written_one_have_one_layout() -> None:
    numerics = resolved(compute_dtype="bfloat16")
    (empty,) = empty_cache(CONFIG, numerics, 2, 9)
    assert (
        empty.keys.shape == empty.values.shape == (2, CONFIG.num_kv_heads, 9, CONFIG.head_dim)
        and empty.length == 9
    )
    new = jnp.asarray(
        np.random.default_rng(0).normal(size=(2, 3, CONFIG.num_kv_heads, CONFIG.head_dim)), jnp.bfloat16
    )
    positions = jnp.asarray([[0, 1, 2], [6, 7, 8]], jnp.int32)
    written = empty.write(new, -new, positions, numerics)
    assert written.keys.dtype == empty.keys.dtype == jnp.dtype(numerics.choices.cache.name)
    expected_keys = np.zeros(empty.keys.shape)
    expected_keys[0, :, :3], expected_keys[1, :, 6:] = (
        np.moveaxis(np.asarray(new, np.float64), 1, 2)[row] for row in (0, 1)
    )
    np.testing.assert_array_equal(np.asarray(written.keys, np.float64), expected_keys)
    np.testing.assert_array_equal(np.asarray(written.values, np.float64), -expected_keys)


def test_a_decoder_raises_on_shapes_that_would_be_broadcast() -> None:
    """One segment id for a row would show other tokens, one position would turn all alike."""
    model = case("bf16", QWEN2).policy.model
    ids, one = jnp.ones((2, 3), jnp.int32), jnp.ones((2, 1), jnp.int32)
    for arrays in (
        (ids, ids, one),
        (ids, one, ids),
        (ids, ids[:1], ids),
        (ids, ids, ids[:1]),
        (ids[0], ids[0], ids[0]),
        (one[:, :0],) * 3,
    ):
        with pytest.raises(
            ValueError, match=r"Decoder: wrong shapes: got token_ids\.shape=.*segment_ids\.shape="
        ):
            model(*arrays)
    cache = empty_cache(QWEN2, model.numerics, 3, SLOTS)
    for arrays in (ids[:, 0], ids[:, 0]), (ids, one):
        with pytest.raises(ValueError, match=r"Decoder\.extend: wrong shapes: got token_ids\.shape="):
            model.extend(*arrays, cache)


@pytest.mark.parametrize(
    ("positions", "rows", "length", "message"),
    [
        (
            [[2, 3, 4]],
            1,
            4,
            r"positions \[\[2, 3, 4\]\], expected them ascending in each row, from 0 to below S=4",
        ),
        ([[-1, 0, 1]], 1, 4, "positions"),
        ([[2, 1, 0]], 1, 4, "positions"),
        ([[1, 1, 2]], 1, 4, "positions"),
        ([[0, 1, 2]], 2, 4, r"cache\[0\] \(2, .*expected \[B, K, S, H\] = \(1,"),
        ([[0, 1, 2]], 1, 2, "S of at least t=3"),
    ],
)
def test_extend_raises_on_what_would_be_written_elsewhere(
    positions: list[list[int]], rows: int, length: int, message: str
) -> None:
    """A position beyond the cache is a place of the next head, or of another row."""
    model = case("bf16", QWEN2).policy.model
    ids = jnp.ones((1, 3), jnp.int32)
    with pytest.raises(ValueError, match=message):
        model.extend(ids, jnp.asarray(positions, jnp.int32), empty_cache(QWEN2, model.numerics, rows, length))
    if "positions" not in message:  # of shapes also under jit
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(model.extend, ids, ids, empty_cache(QWEN2, model.numerics, rows, length))
    with pytest.raises(ValueError, match="2 layers in cache, expected 1"):
        model.extend(ids, jnp.asarray([[0, 1, 2]], jnp.int32), 2 * empty_cache(QWEN2, model.numerics, 1, 4))
