"""FP8 keys and values: the embedded engine's bits are the trainer's, in a cache of codes too, and only if both
do the same; a policy against Hugging Face's, whose cache rounds likewise.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from bridge import read_into
from bridge.hf.read import read_config
from jetrl_jax.models import attention
from jetrl_jax.models import decoder as decoder_module
from jetrl_jax.models.cache import KVCache
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.logprobs import completion_logprobs
from jetrl_jax.precision.kv_cache import KVCalibration, scales_for, stored, with_scales
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import jit, named_params
from jetrl_jax.rl.batching import pack
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.embedded.score import Scorer
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from jetrl_jax.training.programs import PolicyPrograms
from pallas_kernels.formats import E4M3_MAX
from tests.parity.hf_reference import ragged_batch, random_model, save, torch, transformers
from tests.parity.small_episodes import episodes_of
from tests.parity.small_policy import CONFIG, SmallPolicy

TWO_LAYERS = dataclasses.replace(CONFIG, num_layers=2)
QWEN2 = dataclasses.replace(
    TWO_LAYERS, architecture="qwen2", qk_norm=False, attention_bias=True, tie_word_embeddings=False
)
SAMPLING = SamplingParams(0.8, 24, (1,), 0)
LONG = pytest.mark.long
# a flow, its model, the dtype of the cache
FLOWS = [
    ("fp8_unified", "qwen3", "float8_e4m3fn"),
    *(
        pytest.param(flow, marks=LONG)
        for flow in (
            ("fp8_unified", "qwen3", None),
            ("bf16", "qwen2", "float8_e4m3fn"),
            ("fp16", "qwen3", "float8_e4m3fn"),
        )
    ),
]


class Case:
    """A policy with FP8 keys and values, its engine's completions, and the trainer's logprobs of them."""

    def __init__(self, preset: str, model: str, dtype: str | None) -> None:
        config = {"qwen3": TWO_LAYERS, "qwen2": QWEN2}[model]
        self.policy = SmallPolicy(preset, config, kv_cache="fp8", stored_dtype=dtype)
        self.logprobs = jit(self._logprobs_program)

    def engine(self, published: nnx.State | None = None, **changes: Any) -> JaxEngine:
        sizes = {"slots": 6, "prefill_rows": 2, "decode_chunk_tokens": 5}
        lengths = {"max_prompt_tokens": 8, "max_completion_tokens": 24}
        engine = JaxEngine(self.policy.model, self.policy.plan, pad_id=0, **{**sizes, **lengths, **changes})
        engine.load(self.policy.published if published is None else published, 0)
        return engine

    def _logprobs_program(self, published: nnx.State, *arrays: jax.Array) -> jax.Array:
        policy = self.policy
        model = nnx.merge(policy.graphdef, policy.plan.training_weights(policy.params, published))
        return completion_logprobs(model, *arrays, temperature=0.8, chunk_tokens=500)[0]

    def gap(self, trajectories: list[Trajectory], published: nnx.State | None = None) -> np.ndarray:
        """Trainer minus engine of every completion token, of trajectories packed as in training."""
        count = len(trajectories)
        pairs = []
        for batch in pack(trajectories, np.ones(count), np.ones(count, bool), 64, 256):
            weights = self.policy.published if published is None else published
            logprobs = np.asarray(self.logprobs(weights, batch.token_ids, batch.positions, batch.segment_ids))
            mask = np.asarray(batch.loss_mask)
            pairs.append(logprobs[mask].astype(np.float64) - np.asarray(batch.rollout_logprobs)[mask])
        return np.concatenate(pairs)

    def other_scales(self, path: str = "layers.1.self_attn.v_scale") -> nnx.State:
        """The published weights with one scale so small that values are clipped; others would stay as they are."""
        values = dict(named_params(self.policy.published))
        return with_scales(self.policy.published, {path: values[path] * 2.0**-6})


case = functools.cache(Case)


def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(i, rng.integers(3, CONFIG.vocab_size, int(rng.integers(1, 9))).tolist(), i) for i in range(16)
    ]


@functools.cache
def sampled(*flow: Any) -> list[Trajectory]:
    return case(*flow).engine().generate(requests(), SAMPLING)


@pytest.mark.parametrize("flow", FLOWS)
def test_rollout_logprobs_are_the_trainers_bits(flow: tuple[Any, ...]) -> None:
    """Prefill, decode and refilled slots against packed rows; with another exponent on one side they differ."""
    gap = case(*flow).gap(sampled(*flow))
    assert len(gap) > 200 and not gap.any(), f"{np.count_nonzero(gap)} of {len(gap)}, by {np.abs(gap).max()}"
    assert case(*flow).gap(sampled(*flow), case(*flow).other_scales()).any()


@LONG
def test_episodes_have_the_trainers_bits_in_lockstep_and_in_a_stream() -> None:
    one = case(*FLOWS[0])
    engine = one.engine(max_prompt_tokens=15, max_completion_tokens=4, streams=True)
    lockstep, stream = (
        episodes_of(engine, CONFIG.vocab_size, SAMPLING.temperature, 24, turns=turns)
        for turns in ("lockstep", "stream")
    )
    assert engine.statistics.continuations > 3
    for a, b in zip(lockstep, stream, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids) and a.turns == b.turns
        assert np.array_equal(a.logprobs.view(np.int32), b.logprobs.view(np.int32))
    gap = one.gap(stream)
    assert len(gap) > 60 and not gap.any()


def test_a_cache_of_codes_has_one_byte_for_each_value() -> None:
    state = case(*FLOWS[0]).engine().programs.abstract_state(6, 32)
    assert {leaf.dtype.name for layer in state.cache for leaf in (layer.keys, layer.values)} == {
        "float8_e4m3fn"
    }
    assert all(layer.scales is None for layer in state.cache), "scales are the weights', not the slots'"


@LONG
def test_both_dtypes_of_the_cache_give_the_same_tokens_and_bits() -> None:
    for one, other in zip(
        sampled("fp8_unified", "qwen3", "float8_e4m3fn"), sampled("fp8_unified", "qwen3", None), strict=True
    ):
        assert np.array_equal(one.completion_ids, other.completion_ids)
        assert np.array_equal(one.sampled_logprobs.view(np.int32), other.sampled_logprobs.view(np.int32))


def truncated(patch: pytest.MonkeyPatch) -> None:
    """As vLLM's kernel for CPUs: the mantissa is cut."""

    def cut(x: jax.Array, scale: jax.Array) -> jax.Array:
        y = jnp.clip(x.astype(jnp.float32) / scale, -E4M3_MAX, E4M3_MAX)
        nearest = y.astype(jnp.float8_e4m3fn).astype(jnp.float32)
        # the bits of a float32 with three of the mantissa's
        bits = jax.lax.bitcast_convert_type(y, jnp.uint32) & jnp.uint32(0xFFF00000)
        small = jnp.abs(y) < 2.0**-6
        return (jnp.where(small, nearest, jax.lax.bitcast_convert_type(bits, jnp.float32)) * scale).astype(
            x.dtype
        )

    patch.setattr(decoder_module, "stored", cut)


def own_token_not_rounded(patch: pytest.MonkeyPatch) -> None:
    """A new token's keys and values reach attention as they were made; the cache has them rounded."""
    made: list[jax.Array] = []
    attend = attention.attend_to_cache

    def remembered(x: jax.Array, scale: jax.Array) -> jax.Array:
        made.append(x)
        return stored(x, scale)

    def with_own(q: jax.Array, cache: KVCache, positions: jax.Array, numerics: Numerics) -> jax.Array:
        return attend(q, cache.write(*made[-2:], positions, numerics), positions, numerics)

    patch.setattr(decoder_module, "stored", remembered)
    patch.setattr(attention, "attend_to_cache", with_own)


def values_not_rounded(patch: pytest.MonkeyPatch) -> None:
    """Each second call is that of the values."""
    calls = itertools.count()
    patch.setattr(decoder_module, "stored", lambda x, scale: x if next(calls) % 2 else stored(x, scale))


@LONG
@pytest.mark.parametrize("ingredient", [truncated, own_token_not_rounded, values_not_rounded])
def test_equality_needs_each_ingredient(ingredient: Callable[[pytest.MonkeyPatch], None]) -> None:
    """The engine alone does one thing otherwise: some of its logprobs are no longer the trainer's bits."""
    one = case("fp8_unified", "qwen3", None)
    with pytest.MonkeyPatch.context() as patch:
        ingredient(patch)
        trajectories = one.engine().generate(requests(), SAMPLING)
    assert one.gap(trajectories).any()


@LONG
def test_a_trainer_that_does_not_round_keys_and_values_is_far_off() -> None:
    """As in FP8-RL: the mismatch that one flow removes.  At temperature 1, at which scores are."""
    plain = SmallPolicy("fp8_unified", TWO_LAYERS)
    engine = case("fp8_unified", "qwen3", "float8_e4m3fn").engine()
    trajectories = engine.generate(requests(), dataclasses.replace(SAMPLING, temperature=1.0))
    score = Scorer(plain.rollout_model())
    gaps = [score(plain.published, t.token_ids, 32)[t.sampled] - t.sampled_logprobs for t in trajectories]
    assert np.abs(np.concatenate(gaps)).mean() > 1e-2


class RoundedCache(transformers.DynamicCache):
    """Transformers' cache, which attention reads back, with keys and values rounded as they are added."""

    def __init__(self, scales: np.ndarray) -> None:
        super().__init__()
        self.scales = scales

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *others: Any, **options: Any) -> Any:
        def rounded(x: Any, scale: float) -> Any:
            return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

        key, value = self.scales[layer_idx].tolist()
        return super().update(
            rounded(key_states, key), rounded(value_states, value), layer_idx, *others, **options
        )


@LONG
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama3"])
def test_a_policy_is_hugging_faces_with_a_cache_that_rounds(name: str, tmp_path: Path) -> None:
    """In FP32, where both sides differ by summation order; a code flips only where a value is at a tie."""
    model = random_model(name)
    save(model, tmp_path)
    numerics = Numerics(compute_dtype="float32", kv_cache="fp8")
    decoder = Decoder(read_config(tmp_path), numerics, rngs=nnx.Rngs(0))
    read_into(decoder, tmp_path)
    scales = np.float32(2.0) ** -np.array([[6, 7], [5, 8]], np.float32)
    for layer, (key, value) in zip(decoder.layers, scales, strict=True):
        layer.self_attn.k_scale.set_value(jnp.asarray(key))
        layer.self_attn.v_scale.set_value(jnp.asarray(value))
    tokens, positions, mask = ragged_batch([24, 24], "right", 61)

    @nnx.jit
    def logits(decoder: Decoder) -> jax.Array:
        return decoder.logits(decoder(tokens, positions, mask))

    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        theirs, plain = (
            model(input_ids=ids, past_key_values=cache, use_cache=True).logits.numpy()
            for cache in (RoundedCache(scales), transformers.DynamicCache())
        )
    ours = np.asarray(logits(decoder))
    assert np.abs(theirs - plain).mean() > 1e-2, "the cache changes nothing: the case shows nothing"
    assert np.abs(ours - theirs).max() < 1e-4


@LONG
def test_an_update_whose_range_is_not_known_is_skipped_and_others_wait_for_the_next_version() -> None:
    """A maximum of zero or infinity names its layer; scales change when they are recalibrated."""
    policy = case("bf16", "qwen3", None).policy
    programs = PolicyPrograms(policy.model, policy.plan, optax.sgd(1e-3), temperature=1.0, chunk_tokens=64)
    state = programs.init(policy.params, KVCalibration.start(jnp.asarray(policy.scales)))
    grads = jax.tree.map(jnp.ones_like, policy.params)
    state, report = programs.update(state, grads, np.array([[3, 0], [np.inf, 5]], np.float32))
    assert report.nonfinite == (
        "largest magnitude behind layers.0.self_attn.v_scale",
        "largest magnitude behind layers.1.self_attn.k_scale",
    )
    assert state.kv is not None and not np.asarray(state.kv.largest).any()
    largest = np.array([[3, 4], [400, 5]], np.float32)
    state, report = programs.update(state, jax.tree.map(jnp.ones_like, policy.params), largest)
    assert not report.nonfinite and state.kv is not None
    np.testing.assert_array_equal(state.kv.largest[0], largest)

    def published() -> list[list[float]]:
        values = dict(named_params(state.published))
        return [[float(values[path]) for path in paths] for paths in policy.plan.scale_paths]

    assert published() == policy.scales.tolist()
    state = programs.recalibrated(state)
    assert published() == np.asarray(scales_for(jnp.asarray(largest), "bfloat16")).tolist()
