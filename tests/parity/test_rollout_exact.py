"""Rollout against trainer and against itself, bit for bit: prefill and cached decode in batches that change,
packed full forward.

The trainer's side is its own: trajectories packed into rows (`jetrl_jax.rl.batching`), logprobs in chunks
(`jetrl_jax.models.logprobs`), weights bound as in training.  Widths that are no multiples of 128 give partial
FP8 blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetrl_jax.models import attention, linear, ops
from jetrl_jax.models import cache as cache_module
from jetrl_jax.models.cache import KVCache
from jetrl_jax.models.choices import resolve
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.logprobs import completion_logprobs
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import jit, map_params, named_params
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.rl.batching import pack
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.embedded.speculation import Lookup
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from pallas_kernels import quantize
from tests.parity.small_episodes import episodes_of
from tests.small_model import small_model

VOCAB = 61
CONFIG = small_model(
    vocab_size=VOCAB,
    hidden_size=160,
    intermediate_size=192,
    num_layers=2,
    head_dim=32,
    max_position_embeddings=256,
)
TEMPERATURE, MAX_PROMPT, ROW_TOKENS = 0.7, 16, 160
# Layers, slots and longest completion.  The larger batch and the longer cache are other programs of XLA's:
# `make test-long`.
SMALL, LARGE = (1, 12, 40), (1, 32, 116)
SIZES = {
    ("bf16", True): SMALL,
    ("fp8_unified", True): (2, 12, 40),
    ("bf16", False): (2, 12, 40),
    ("bf16 large", True): LARGE,
    ("fp8_unified small", True): SMALL,
}
LONG = pytest.mark.long
FLOWS = [
    ("fp8_unified", True),
    pytest.param("bf16 large", True, marks=LONG),
]


class Setup:
    """One policy: its engine, its trainer-side logprobs."""

    def __init__(self, preset: str, exact: bool) -> None:
        numerics = Numerics(exact=exact)
        layers, slots, self.max_completion = SIZES[preset, exact]
        self.decoder = Decoder(dataclasses.replace(CONFIG, num_layers=layers), numerics, rngs=nnx.Rngs(0))
        self.graphdef, params = nnx.split(self.decoder)
        rng = np.random.default_rng(1)

        def spread(_: str, value: jax.Array) -> jax.Array:
            """Larger matrices (distributions neither flat nor certain), vectors that are not all ones."""
            return (
                value * 4
                if value.ndim == 2
                else value + np.asarray(rng.normal(size=value.shape) * 0.2, np.float32)
            )

        self.params = map_params(spread, params)
        self.plan = PrecisionPlan([path for path, _ in named_params(params)], preset.split()[0])
        self.published = jit(self.plan.publish)(self.params)
        self.sampling = SamplingParams(TEMPERATURE, self.max_completion, (1, 2), 5)
        self.engine = self.new_engine(slots=slots, prefill_rows=4, decode_chunk_tokens=6)
        self._logprobs = jit(self._logprobs_program)

    def new_engine(self, **sizes: Any) -> JaxEngine:
        engine = JaxEngine(
            self.decoder,
            self.plan,
            max_prompt_tokens=MAX_PROMPT,
            max_completion_tokens=self.max_completion,
            pad_id=0,
            **sizes,
        )
        engine.load(self.published, 3)
        return engine

    def _logprobs_program(
        self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        model = nnx.merge(self.graphdef, self.plan.training_weights(self.params, self.published))
        return completion_logprobs(
            model, token_ids, positions, segment_ids, temperature=TEMPERATURE, chunk_tokens=500
        )[0]

    def compare(self, trajectories: list[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
        """(trainer's logprobs, engine's) of every completion token."""
        ones = np.ones(len(trajectories))
        batches = pack(trajectories, ones, ones.astype(bool), ROW_TOKENS, 8 * ROW_TOKENS)
        pairs = []
        for batch in batches:
            trained = np.asarray(batch.loss_mask)
            logprobs = np.asarray(self._logprobs(batch.token_ids, batch.positions, batch.segment_ids))
            pairs.append((logprobs[trained], np.asarray(batch.rollout_logprobs)[trained]))
        ours, engines = (np.concatenate(part) for part in zip(*pairs, strict=True))
        assert len(ours) == sum(t.sampled_tokens for t in trajectories)
        return ours, engines


setup = functools.cache(Setup)


@functools.cache
def requests() -> list[Request]:
    """96 requests with 40 ragged prompts, at least three times as many as slots."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, rng.integers(1, MAX_PROMPT + 1)).tolist() for _ in range(40)]
    return [Request(i, prompts[i % 40], 1000 + i) for i in range(96)]


@functools.cache
def sampled(preset: str, exact: bool) -> list[Trajectory]:
    return setup(preset, exact).engine.generate(requests(), setup(preset, exact).sampling)


def same(a: Trajectory, b: Trajectory) -> bool:
    return (
        a.request_id == b.request_id
        and np.array_equal(a.completion_ids, b.completion_ids)
        and np.array_equal(a.sampled_logprobs.view(np.int32), b.sampled_logprobs.view(np.int32))
    )


@pytest.mark.parametrize(("preset", "exact"), FLOWS)
def test_rollout_logprobs_are_the_trainers_bits(preset: str, exact: bool) -> None:
    trajectories = sampled(preset, exact)
    lengths = np.array([len(t.completion_ids) for t in trajectories])
    assert lengths.min() < 10 and lengths.max() > 0.7 * setup(preset, exact).max_completion, (
        "the case should have short and long answers"
    )
    assert setup(preset, exact).engine.statistics.inserts > 10, "the case should refill slots"
    ours, engines = setup(preset, exact).compare(trajectories)
    unequal = int((ours.view(np.int32) != engines.view(np.int32)).sum())
    assert unequal == 0, f"{unequal} of {len(ours)} tokens differ, by up to {np.abs(ours - engines).max()}"


def test_scores_are_the_bits_that_sampling_reports() -> None:
    """At temperature 1, of completions of 1 to 40 tokens, by the full forward in rows of two lengths."""
    one = setup("fp8_unified", True)
    trajectories = one.engine.generate(requests()[:12], dataclasses.replace(one.sampling, temperature=1.0))
    scores = one.engine.score([t.token_ids for t in trajectories])
    for trajectory, row in zip(trajectories, scores, strict=True):
        assert np.array_equal(
            row[trajectory.sampled].view(np.int32), trajectory.sampled_logprobs.view(np.int32)
        )


@pytest.mark.parametrize(("preset", "exact"), FLOWS)
def test_a_request_does_not_see_its_batch(preset: str, exact: bool) -> None:
    """Alone, among few, in reverse order (other slots, other mates): the same tokens and the same bits."""
    whole, engine = sampled(preset, exact), setup(preset, exact).engine
    for chosen in ([17], [3, 95, 40], list(range(95, 0, -1))):
        got = engine.generate([requests()[i] for i in chosen], setup(preset, exact).sampling)
        assert all(same(one, whole[i]) for one, i in zip(got, chosen, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(("preset", "exact"), [("fp8_unified", True)])
def test_other_program_shapes_and_a_bf16_cache_give_the_same_bits(
    preset: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache as it is stored beside a GPU, in programs of other sizes."""
    monkeypatch.setattr(cache_module, "stored_dtype", lambda numerics: numerics.dtype)
    whole, other = (
        sampled(preset, exact),
        setup(preset, exact).new_engine(slots=3, prefill_rows=1, decode_chunk_tokens=17),
    )
    chosen = list(range(0, 96, 8))
    got = other.generate([requests()[i] for i in chosen], setup(preset, exact).sampling)
    assert all(same(one, whole[i]) for one, i in zip(got, chosen, strict=True))


@pytest.mark.parametrize(("preset", "exact"), FLOWS)
def test_episodes_are_the_trainers_bits(preset: str, exact: bool) -> None:
    """Turns and observations by turns, through the engine's cache and prefill, against one packed forward."""
    one = setup(preset, exact)
    trajectories = episodes_of(one.engine, VOCAB, TEMPERATURE, 48)
    turns = [sum(turn.role == "policy" for turn in t.turns) for t in trajectories]
    observed = sum(int((~t.sampled[t.turns[0].stop :]).sum()) for t in trajectories)
    reasons = {t.finish_reason for t in trajectories}
    assert max(turns) == 4 and reasons == {"stop", "length"} and observed > 48, (turns, reasons, observed)
    ours, engines = one.compare(trajectories)
    unequal = int((ours.view(np.int32) != engines.view(np.int32)).sum())
    assert unequal == 0, f"{unequal} of {len(ours)} tokens differ, by up to {np.abs(ours - engines).max()}"
    # an observation is context: without it the tokens after it have other log-probabilities
    long = next(t for t in trajectories if len(t.turns) > 3)
    first, _, second = long.turns[1:4]
    kept = np.r_[0 : first.stop, second.start : second.stop]
    without = Trajectory.of_completion(
        0,
        long.prompt_ids,
        long.token_ids[kept][len(long.prompt_ids) :],
        np.zeros(len(kept) - len(long.prompt_ids)),
        "stop",
        3,
    )
    ours, _ = one.compare([without])
    assert not np.array_equal(ours[first.stop - first.start :], long.logprobs[second.start : second.stop])


@LONG
@pytest.mark.parametrize(
    ("preset", "slots"),
    [pytest.param("bf16", 5, marks=(pytest.mark.instruction_sets, pytest.mark.newest)), ("fp8_unified", 24)],
)
def test_a_stream_of_turns_changes_no_episode(preset: str, slots: int) -> None:
    """From the slots' caches, with answers in any order and at any time: tokens and bits of lockstep."""
    one = setup(preset, True)
    engine = one.new_engine(slots=slots, prefill_rows=4, decode_chunk_tokens=2, streams=True)
    lockstep = episodes_of(engine if preset == "bf16" else one.engine, VOCAB, TEMPERATURE, 24)
    for timing in range(2):
        stream = episodes_of(engine, VOCAB, TEMPERATURE, 24, turns="stream", timing=timing)
        for a, b in zip(lockstep, stream, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids) and a.turns == b.turns
            assert np.array_equal(a.logprobs.view(np.int32), b.logprobs.view(np.int32))
        counts = engine.statistics
        assert counts.continuations > 3 and counts.prefills <= 24, "histories are not prefilled again"


@pytest.mark.long
def test_speculation_changes_no_episode() -> None:
    """Turns of up to three tokens, drafted from the history and from what other episodes said; in lockstep, and in
    a stream, played twice: then each turn's own earlier tokens are the draft, and more are kept.
    """
    one = setup("fp8_unified", True)
    draft = Lookup((2,))
    fast = one.new_engine(slots=12, prefill_rows=4, decode_chunk_tokens=6, draft=draft)
    stream = one.new_engine(slots=5, prefill_rows=4, decode_chunk_tokens=2, draft=draft, streams=True)
    plain = episodes_of(one.engine, VOCAB, TEMPERATURE, 24)
    found, kept = [episodes_of(fast, VOCAB, TEMPERATURE, 24)], []
    for timing in range(2):
        found.append(episodes_of(stream, VOCAB, TEMPERATURE, 24, turns="stream", timing=timing))
        assert stream.statistics.continuations > 3
        kept.append(stream.statistics.accepted)
    assert kept[1] > kept[0], kept
    for drafted in found:
        for a, b in zip(plain, drafted, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids) and a.turns == b.turns
            assert np.array_equal(a.logprobs.view(np.int32), b.logprobs.view(np.int32))


def rounding_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ops,
        "silu_multiply",
        lambda gate, up, numerics: ops.round_to(
            jax.nn.silu(gate.astype(np.float32)) * up.astype(np.float32), numerics.dtype
        ),
    )


def attention_summed_in_fp32(patch: pytest.MonkeyPatch) -> None:
    attend = attention.attend_to_cache

    def in_fp32(q: jax.Array, cache: KVCache, positions: jax.Array, numerics: Numerics) -> jax.Array:
        return attend(q, cache, positions, resolve(dataclasses.replace(numerics, exact=False), CONFIG))

    patch.setattr(attention, "attend_to_cache", in_fp32)


def norm_rounded_once(patch: pytest.MonkeyPatch) -> None:
    scale = ops._scale
    patch.setattr(
        ops,
        "_scale",
        lambda normed, weight, numerics: scale(
            normed, weight, dataclasses.replace(numerics, engine_variant="cuda")
        ),
    )


def cache_in_fp8(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache_module, "stored_dtype", lambda numerics: jnp.float8_e4m3fn)


def other_promotion_order(patch: pytest.MonkeyPatch) -> None:
    product = linear.fprop
    patch.setattr(
        linear,
        "fprop",
        lambda *operands, **options: product(*operands, **options | {"promotion_order": "triton"}),
    )


def other_scales(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        linear, "_quantize", lambda x, block, numerics: quantize(x, block, scale_format="power_of_two")
    )


@LONG  # in `make test`: test_extend.py::test_the_comparison_can_fail
@pytest.mark.parametrize(
    "ingredient",
    [
        other_scales,
        cache_in_fp8,
        rounding_left_out,
        attention_summed_in_fp32,
        norm_rounded_once,
        other_promotion_order,
    ],
)
def test_equality_needs_each_ingredient(ingredient: Callable[[pytest.MonkeyPatch], None]) -> None:
    """The engine alone computes one thing otherwise: some of its logprobs are no longer the trainer's
    bits.
    """
    # one layer shows all but this one
    one = setup("fp8_unified" if ingredient is attention_summed_in_fp32 else "fp8_unified small", True)
    engine = one.new_engine(slots=12, prefill_rows=4, decode_chunk_tokens=6)
    with pytest.MonkeyPatch.context() as patch:
        ingredient(patch)
        trajectories = engine.generate(requests()[:48], one.sampling)
    ours, engines = one.compare(trajectories)
    assert (ours != engines).any()


@LONG
def test_without_exact_logprobs_are_close() -> None:
    """BF16, FP32 reductions: a reduction off by an FP32 ulp flips some BF16 roundings, each by 2**-8 of a
    value.

    The bound is empirical (mean 1.0e-3, largest 0.03 when written); the exact programs above differ by
    nothing.
    """
    ours, engines = setup("bf16", False).compare(sampled("bf16", False))
    difference = np.abs(ours - engines)
    assert difference.mean() < 4e-3 and difference.max() < 0.15


@LONG
def test_rollout_only_fp8_differs_from_a_bf16_trainer() -> None:
    """The comparison can fail: FP8 rollout against a BF16 forward, the mismatch that the project is about."""
    fp8 = setup("fp8_unified", True)
    trajectories = sampled("fp8_unified", True)
    other = setup("bf16", False)
    ours, engines = other.compare(trajectories)
    assert np.abs(ours - engines).mean() > 1e-2
    assert fp8.engine.policy_version == {t.oldest_version for t in trajectories}.pop() == 3
