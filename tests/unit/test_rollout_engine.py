"""Scheduling, stopping, errors and compilation of the embedded engine, on a model whose answers are known.

The countdown model has attention and MLP switched off and a head that makes token t - 1 follow token t with
certainty: a prompt ending in t continues t - 1, t - 2, ... down to the stop token 1.  So every completion is
known without any oracle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import jit, map_params, named_params
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.embedded.shapes import batch_sizes, cache_buckets, prompt_buckets
from jetrl_jax.rollout.embedded.speculation import Lookup
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from tests.parity.small_policy import SmallPolicy
from tests.small_model import small_model

VOCAB, STOP = 160, 1
CONFIG = small_model(
    "llama",
    vocab_size=VOCAB,
    hidden_size=VOCAB,
    intermediate_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    eos_token_ids=(STOP,),
)
GREEDY = SamplingParams(1.0, 150, (STOP,), 0, greedy=True)


def model() -> Decoder:
    return Decoder(CONFIG, Numerics(compute_dtype="float32"), rngs=nnx.Rngs(0))


def plan_of(decoder: Decoder) -> PrecisionPlan:
    return PrecisionPlan([path for path, _ in named_params(nnx.state(decoder, nnx.Param))], "fp32")


def countdown_weights() -> nnx.State:
    def weight(path: str, value: jax.Array) -> jax.Array:
        if path == "embed_tokens.weight":
            return jnp.eye(VOCAB)
        if path == "lm_head.weight":  # row t - 1 answers to the embedding of t
            return jnp.roll(jnp.eye(VOCAB), -1, axis=0) * 20
        return jnp.ones_like(value) if path.endswith("norm.weight") else jnp.zeros_like(value)

    decoder = model()
    return jit(plan_of(decoder).publish)(map_params(weight, nnx.state(decoder, nnx.Param)))


def engine(**changes: Any) -> JaxEngine:
    sizes = {
        "slots": 4,
        "prefill_rows": 3,
        "decode_chunk_tokens": 8,
        "max_prompt_tokens": 12,
        "max_completion_tokens": 150,
        "pad_id": 0,
    }
    decoder = model()
    built = JaxEngine(decoder, plan_of(decoder), **(sizes | changes))
    built.load(countdown_weights(), 7)
    return built


@pytest.fixture(scope="module")
def shared() -> JaxEngine:
    """The engine of every test that changes nothing in it."""
    return engine()


@pytest.fixture
def compile_events() -> Iterator[list[str]]:
    """Names of XLA compilations that happen during a test."""
    events: list[str] = []

    def listener(name: str, duration: float, **details: object) -> None:
        if "backend_compile" in name:
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    jax.monitoring.unregister_event_duration_listener(listener)


def request(last: int, length: int = 1, identity: int = 0) -> Request:
    """A prompt of `length` tokens that continues with last - 1, last - 2, ... 1."""
    return Request(identity, [150 - i for i in range(length - 1)] + [last], identity)


def completion(last: int, max_tokens: int = 150) -> list[int]:
    return list(range(last - 1, 0, -1))[:max_tokens]


def check(trajectories: list[Trajectory], requests: list[Request], max_tokens: int = 150) -> None:
    assert [t.request_id for t in trajectories] == [r.id for r in requests]
    for trajectory, one in zip(trajectories, requests, strict=True):
        expected = completion(one.prompt_ids[-1], max_tokens)
        assert trajectory.completion_ids.tolist() == expected
        assert trajectory.prompt_ids.tolist() == one.prompt_ids
        assert trajectory.finish_reason == ("stop" if expected[-1] == STOP else "length")
        assert trajectory.oldest_version == 7
        assert trajectory.completion_ids.dtype == trajectory.prompt_ids.dtype == np.int32
        assert trajectory.sampled_logprobs.dtype == np.float32
        assert trajectory.sampled_logprobs.shape == trajectory.completion_ids.shape
        assert (trajectory.sampled_logprobs > -1e-6).all()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 23])
def test_any_number_of_requests_is_answered_in_order(shared: JaxEngine, count: int) -> None:
    lasts = np.random.default_rng(count).integers(2, 40, count)
    lengths = np.random.default_rng(count + 1).integers(1, 13, count)
    requests = [
        request(int(last), int(length), 100 - i)
        for i, (last, length) in enumerate(zip(lasts, lengths, strict=True))
    ]
    check(shared.generate(requests, GREEDY), requests)


@pytest.mark.parametrize("max_tokens", [1, 2, 9, 150])
def test_max_tokens_of_the_call_ends_a_completion(shared: JaxEngine, max_tokens: int) -> None:
    requests = [request(last, 2, last) for last in (2, 3, 4, 10, 11, 60)]
    check(shared.generate(requests, dataclasses.replace(GREEDY, max_tokens=max_tokens)), requests, max_tokens)


def test_stop_tokens_of_the_call_end_a_completion_and_are_part_of_it(shared: JaxEngine) -> None:
    stops = dataclasses.replace(GREEDY, stop_token_ids=(20, 5))
    got = shared.generate([request(25), request(15, identity=1), request(21, identity=2)], stops)
    assert [t.completion_ids.tolist() for t in got] == [[24, 23, 22, 21, 20], list(range(14, 4, -1)), [20]]
    assert {t.finish_reason for t in got} == {"stop"}
    unstopped = shared.generate([request(4)], dataclasses.replace(GREEDY, stop_token_ids=(), max_tokens=5))[0]
    assert (
        unstopped.completion_ids.tolist() == [3, 2, 1, 0, VOCAB - 1] and unstopped.finish_reason == "length"
    )


def test_a_long_answer_does_not_hold_the_batch(shared: JaxEngine) -> None:
    """One answer of 120 tokens and 60 of 7 on four slots: 3 slots serve the short ones meanwhile.

    Batches of four that wait for their longest would take 119 + 15 * 6 steps; with refills the long one hides
    the rest.
    """
    requests = [request(121, identity=0)] + [request(8, identity=i) for i in range(1, 61)]
    check(shared.generate(requests, GREEDY), requests)
    statistics, tokens = shared.statistics, 120 + 60 * 7
    assert statistics.decode_steps <= 60 * 7 / 3 + 8
    assert (tokens - 61) / statistics.slot_steps > 0.7  # a slot's first token comes from the prefill


def test_identical_prompts_are_prefilled_once(shared: JaxEngine) -> None:
    prompts = [request(9, 5), request(6, 11), request(12, 2)]
    requests = [Request(i, prompts[i % 3].prompt_ids, i) for i in range(36)]
    check(shared.generate(requests, GREEDY), requests)
    assert shared.statistics.prefills == 1
    distinct = [request(last, 1, last) for last in range(2, 12)]
    check(shared.generate(distinct, GREEDY), distinct)
    assert shared.statistics.prefills == 4  # ten prompts, three at once


def test_few_requests_and_last_long_answers_use_a_smaller_batch() -> None:
    big = engine(slots=32, decode_chunk_tokens=4, max_completion_tokens=60)
    call = dataclasses.replace(GREEDY, max_tokens=60)
    requests = [request(9, 3, i) for i in range(5)]
    check(big.generate(requests, call), requests, 60)
    assert big.statistics.slot_steps == 8 * big.statistics.decode_steps
    requests = [request(60 if i in (7, 30) else 6, 1 + i % 3, i) for i in range(32)]
    check(big.generate(requests, call), requests, 60)
    assert big.statistics.slot_steps <= 32 * 8 + 8 * 60


def test_tokens_of_a_sequence_are_independent_and_repeatable() -> None:
    """With all weights zero every token is uniform; two tokens that shared their noise would be equal."""
    uniform = engine(slots=31)
    uniform.load(jax.tree.map(jnp.zeros_like, countdown_weights()), 0)
    requests = [Request(i, [5, 6], i) for i in range(100)]
    call = SamplingParams(1.0, 40, (), 3)
    tokens, again, other = (
        np.stack([t.completion_ids for t in uniform.generate(requests, dataclasses.replace(call, seed=seed))])
        for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(tokens, again)
    for a, b in (
        (tokens[:, 1:], tokens[:, :-1]),
        (tokens[1:], tokens[:-1]),
        (tokens, other),
        (tokens[:, 8:], tokens[:, :-8]),
    ):
        equal = (a == b).mean()
        assert abs(equal - 1 / VOCAB) < 5 * (1 / VOCAB / a.size) ** 0.5
    counts = np.bincount(tokens.reshape(-1), minlength=VOCAB)
    assert ((counts - 25.0) ** 2 / 25.0).sum() < 159 + 5 * (2 * 159) ** 0.5


def test_nothing_compiles_after_warmup(compile_events: list[str]) -> None:
    warm = engine(slots=32, max_prompt_tokens=8)
    assert len(warm.shapes.cache_buckets) == len(warm.shapes.batch_sizes) == 2
    warm.warmup()
    weights = countdown_weights()
    assert compile_events, "the listener must see compilations for the test to mean anything"
    compilations, _ = warm.compilations, compile_events.clear()
    rng = np.random.default_rng(0)
    for step, count in enumerate([1, 7, 32, 33, 90]):
        warm.load(weights, step)
        requests = [request(int(rng.integers(2, 140)), int(rng.integers(1, 9)), i) for i in range(count)]
        sampling = SamplingParams(0.5 + 0.1 * step, 20 + 26 * step, (STOP, 5 + step), step, greedy=step == 2)
        assert len(warm.generate(requests, sampling)) == count
    assert warm.compilations == compilations
    assert compile_events == []


def test_non_finite_weights_do_not_reach_the_next_call() -> None:
    fresh = engine()
    requests = [request(9, 3, i) for i in range(4)]
    good = countdown_weights()
    fresh.load(map_params(lambda path, value: value * jnp.nan if "v_proj" in path else value, good), 7)
    bad = fresh.generate(requests, dataclasses.replace(GREEDY, max_tokens=20))
    assert all(np.isnan(t.sampled_logprobs).all() for t in bad)
    fresh.load(good, 7)
    check(fresh.generate(requests, GREEDY), requests)


def test_a_sequence_that_is_not_finite_does_not_reach_the_next_one_in_its_slot() -> None:
    """Token 20 has no finite embedding; in the second layer every key and value after it is NaN, far behind
    the other prompt.
    """
    policy = SmallPolicy("bf16", small_model(tie_word_embeddings=False, num_layers=2))
    sizes = {
        "slots": 1,
        "prefill_rows": 1,
        "decode_chunk_tokens": 2,
        "max_prompt_tokens": 8,
        "max_completion_tokens": 20,
        "pad_id": 0,
    }
    one = JaxEngine(policy.model, policy.plan, **sizes)
    one.load(
        map_params(
            lambda path, value: value.at[20].set(jnp.nan) if "embed" in path else value, policy.published
        ),
        0,
    )
    sampling, wanted = SamplingParams(1.0, 10, (), 7), Request(1, [3], 5)
    (alone,) = one.generate([wanted], sampling)
    assert np.isfinite(alone.sampled_logprobs).all()
    bad, after = one.generate([Request(0, [20], 1), wanted], sampling)
    assert np.isnan(bad.sampled_logprobs).all()
    np.testing.assert_array_equal(after.token_ids, alone.token_ids)
    np.testing.assert_array_equal(after.logprobs, alone.logprobs)


def test_load_takes_weights_by_reference() -> None:
    weights = countdown_weights()
    fresh = engine()
    fresh.load(weights, 11)
    assert fresh.policy_version == 11
    held = {id(leaf) for leaf in jax.tree.leaves(fresh.published)}
    assert held == {id(leaf) for leaf in jax.tree.leaves(weights)}
    assert fresh.generate([request(5)], GREEDY)[0].oldest_version == 11


def test_load_raises_on_weights_of_another_plan_or_model(shared: JaxEngine) -> None:
    def broken(path: str, value: jax.Array) -> jax.Array:
        if path == "norm.weight":
            return value[:-1]
        return value.astype(jnp.bfloat16) if "q_proj" in path else value

    listed = (
        r"2 weights.*q_proj.weight: got bfloat16.*norm.weight: got float32 \(159,\), expected "
        r"float32 \(160,\)"
    )
    with pytest.raises(ValueError, match=listed):
        shared.load(map_params(broken, countdown_weights()), 8)
    decoder = model()
    fp8 = PrecisionPlan([path for path, _ in named_params(nnx.state(decoder, nnx.Param))], "fp8_unified")
    with pytest.raises(ValueError, match=r"float8_e4m3fn.*blocks \(128, 128\).*expected float32"):
        shared.load(jit(fp8.publish)(nnx.state(decoder, nnx.Param)), 8)
    tied = Decoder(dataclasses.replace(CONFIG, tie_word_embeddings=True), decoder.numerics, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"lm_head\.weight: missing"):
        shared.load(nnx.state(tied, nnx.Param), 8)
    assert shared.policy_version == 7


def test_generate_raises_without_weights() -> None:
    decoder = model()
    bare = JaxEngine(
        decoder,
        plan_of(decoder),
        slots=2,
        prefill_rows=1,
        decode_chunk_tokens=1,
        max_prompt_tokens=4,
        max_completion_tokens=4,
        pad_id=0,
    )
    with pytest.raises(RuntimeError, match=r"no weights: got policy_version=-1, expected load\(\.\.\.\)"):
        bare.generate([request(3)], dataclasses.replace(GREEDY, max_tokens=4))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request(3, [], 0), "request 3: got a prompt of 0 tokens, expected 1 to max_prompt_tokens=12"),
        (Request(4, [5] * 13, 0), "request 4: got a prompt of 13 tokens"),
        (Request(5, [5, VOCAB], 0), "request 5: got a token id outside"),
        (Request(6, [-1], 0), "request 6: got a token id outside"),
        (Request(7, [5], 2**32), "request 7: got seed=4294967296, expected a whole number from 0 to"),
    ],
)
def test_generate_raises_on_bad_requests(shared: JaxEngine, bad: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shared.generate([request(3), bad], GREEDY)


def test_generate_raises_on_bad_sampling(shared: JaxEngine) -> None:
    with pytest.raises(ValueError, match="max_tokens=151, expected at most max_completion_tokens=150"):
        shared.generate([request(3)], dataclasses.replace(GREEDY, max_tokens=151))
    with pytest.raises(ValueError, match="stop_token_ids="):
        shared.generate([request(3)], dataclasses.replace(GREEDY, stop_token_ids=(VOCAB,)))


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"temperature": 1e-40},
        {"temperature": 1e39},
        {"max_tokens": 0},
        {"stop_token_ids": (-1,)},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": 1.5},
        {"max_tokens": 2.0},
        {"max_tokens": True},
        {"stop_token_ids": (1.5,)},
        {"temperature": "1"},
        {"greedy": "no"},
    ],
)
def test_sampling_params_raise_on_bad_values(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        SamplingParams(**({"temperature": 1.0, "max_tokens": 4, "stop_token_ids": (1,), "seed": 0} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "slots=0"),
        ({"prefill_rows": 0}, "prefill_rows=0"),
        ({"decode_chunk_tokens": 0}, "decode_chunk_tokens=0"),
        ({"max_prompt_tokens": 200}, "max_position_embeddings=256"),
        ({"pad_id": VOCAB}, "pad_id=160"),
    ],
)
def test_engine_raises_on_bad_sizes(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**change)


def test_buckets_cover_every_length_with_few_shapes() -> None:
    assert prompt_buckets(1) == (8,) and prompt_buckets(8) == (8,) and prompt_buckets(9) == (8, 16)
    assert prompt_buckets(40) == (8, 16, 32, 40) and prompt_buckets(1024)[-2:] == (512, 1024)
    assert (
        cache_buckets(44) == (48,)
        and cache_buckets(162) == (88, 168)
        and cache_buckets(1056) == (72, 136, 264, 528, 1056)
    )
    assert batch_sizes(1) == (1,) and batch_sizes(31) == (31,) and batch_sizes(256) == (64, 256)
    for total in range(2, 700, 7):
        assert cache_buckets(total)[-1] >= total and list(cache_buckets(total)) == sorted(
            set(cache_buckets(total))
        )


def test_caches_are_filled_and_extended_in_place(shared: JaxEngine) -> None:
    """XLA gives the donated arrays back under their own memory: no second cache beside the first."""
    check(shared.generate([request(9)], GREEDY), [request(9)])
    seen = set()
    for (kind, *shape), program in list(shared.programs._compiled.items()):
        if kind in ("insert", "decode"):
            cache = shared.programs.abstract_state(*shape[:2]).cache
            held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
            assert program.memory_analysis().alias_size_in_bytes >= held > 0, (kind, shape)
            seen.add(kind)
    assert seen == {"insert", "decode"}


def test_guesses_of_a_sequence_that_is_over_stay_in_its_row_of_the_cache() -> None:
    """In a stream a slot without a conversation keeps its place, here the last one of its row."""
    built = engine(slots=2, draft=Lookup((3,)), streams=True)
    programs, length = built.programs, 16
    state = programs.empty_state(2, length)
    before = jax.tree.map(jnp.ones_like, state.cache)
    state = dataclasses.replace(state, cache=before, position=jnp.array([length - 1, 8], jnp.int32))
    texts = np.zeros((2, built.shapes.siblings + length), np.int32), np.full((2, length), -1, np.int32)
    state, _ = programs.decode(built._weights, state, built._controls(GREEDY), np.int32(3), 3, *texts)
    assert state.position.tolist() == [length - 1, 8]
    for layer in state.cache:
        first, second = np.asarray(layer.keys)[:, 0]
        assert np.all(first[:12] == 1) and np.all(second[:8] == 1) and np.all(second[12:] == 1)
        assert np.all(second[8:12] == 0), "its own guesses are written"
