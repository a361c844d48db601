"""Speculation of the embedded engine: for any draft, the tokens and the bits of the loop without it.

The loop without speculation is the oracle.  A planted draft reads what a test wrote for each request: the
oracle's own completion, tokens that are never right, or some of each.  `Lookup` is compared with a slow loop.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.collect.batch import speculation_metrics
from jetrl_jax.models.lora import Adapters
from jetrl_jax.rollout.embedded import programs
from jetrl_jax.rollout.embedded.draft_length import DraftLength
from jetrl_jax.rollout.embedded.jax_engine import SIBLINGS, JaxEngine
from jetrl_jax.rollout.embedded.speculation import NOTHING, Completions, Draft, Lookup, Texts, count_kept
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from tests.parity.small_policy import VOCAB, SmallPolicy, surprise

LONG = pytest.mark.long
MAX_PROMPT, MAX_TOKENS, REQUESTS = 6, 12, 26
SIZES = {
    "slots": 5,
    "prefill_rows": 2,
    "decode_chunk_tokens": 2,
    "max_prompt_tokens": MAX_PROMPT,
    "max_completion_tokens": MAX_TOKENS,
    "pad_id": 0,
}
STOPS = (1, 2, 3, 4)
SAMPLING = SamplingParams(0.9, MAX_TOKENS, STOPS, 11)
WIDTH = SIBLINGS * (MAX_PROMPT + MAX_TOKENS + 1)
CHOICE = Lookup((0, 3))  # of one engine, for several tests


@dataclasses.dataclass(frozen=True)
class Planted:
    """A draft that reads the token of each position where the siblings' text would be."""

    lengths: tuple[int, ...]
    context: int = MAX_PROMPT

    def __call__(self, text: jax.Array, last: jax.Array, tokens: int) -> jax.Array:
        place = last[:, None] - WIDTH + 1 + jnp.arange(tokens, dtype=jnp.int32)[None]
        return jnp.take_along_axis(text, jnp.minimum(place, WIDTH - 1), axis=1)


@functools.cache
def requests() -> list[Request]:
    """Groups of two of short prompts, with more requests than slots."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, VOCAB, rng.integers(1, MAX_PROMPT + 1)).tolist() for _ in range(REQUESTS // 2)]
    return [Request(i, prompts[i // 2], 100 + i) for i in range(REQUESTS)]


@functools.cache
def policy(preset: str) -> SmallPolicy:
    """Of a preset, or of "PRESET, fp8 cache" or "PRESET, adapters"."""
    name, _, more = preset.partition(", ")
    adapters = Adapters(4, 2.0, ("q_proj", "v_proj", "down_proj"))
    options = {"": {}, "fp8 cache": {"kv_cache": "fp8"}, "adapters": {"adapters": adapters}}[more]
    return SmallPolicy(name, **options)


@functools.cache
def engine(preset: str, draft: Draft | None = None) -> JaxEngine:
    made = JaxEngine(policy(preset).model, policy(preset).plan, draft=draft, **SIZES)
    made.load(policy(preset).published, 0)
    if draft is not None:  # its other programs are those of the oracle's engine: compiled once
        shared = engine(preset).programs._compiled
        made.programs._compiled.update(shared)
    made._completions = Completions(most_tokens=0)  # a later test's drafts are not those of this one
    return made


@functools.cache
def one_by_one(preset: str, sampling: SamplingParams = SAMPLING) -> list[Trajectory]:
    """The oracle."""
    return engine(preset).generate(requests(), sampling)


def planted(kind: str, trajectories: list[Trajectory]) -> np.ndarray:
    """Of each request the token that is drafted for each position, int32 [R, WIDTH]."""
    rng = np.random.default_rng(3)
    noise = rng.integers(0, VOCAB, (len(trajectories), WIDTH)).astype(np.int32)
    right = noise.copy()  # beyond the end of a completion the draft goes on
    for row, trajectory in zip(right, trajectories, strict=True):
        row[: len(trajectory.token_ids)] = trajectory.token_ids
    return {
        "perfect": right,
        "random": noise,
        "adversarial": (right + 1) % VOCAB,
        "mixed": np.where(rng.random(right.shape) < 0.7, right, (right + noise) % VOCAB),
        "nothing": np.full_like(right, NOTHING),
    }[kind]


def sampled_with(
    preset: str, draft: Draft, drafted: np.ndarray | None, sampling: SamplingParams = SAMPLING
) -> list[Trajectory]:
    """By the engine that speculates; `drafted`: what a planted draft reads."""
    with pytest.MonkeyPatch.context() as patch:
        if drafted is not None:
            texts_of = Texts.of

            def of(self: Texts, occupant: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
                text, again = texts_of(self, occupant, length)
                text[:, :WIDTH] = drafted[occupant]
                return text, np.full_like(again, NOTHING)

            patch.setattr(Texts, "of", of)
        return engine(preset, draft).generate(requests(), sampling)


def unequal(ours: list[Trajectory], expected: list[Trajectory]) -> list[int]:
    """The requests whose tokens, bits or end are not those expected."""
    return [
        a.request_id
        for a, b in zip(ours, expected, strict=True)
        if a.token_ids.tolist() != b.token_ids.tolist()
        or a.logprobs.tobytes() != b.logprobs.tobytes()
        or a.finish_reason != b.finish_reason
    ]


KINDS = ("perfect", "random", "adversarial", "mixed", "nothing")
# The bits of k + 1 tokens at once are those of one in every flow (test_extend): two have every length here.
LONG_LENGTHS = {"bf16": (1, 7), "fp8_unified": (1, 3, 7), "fp16": (7,), "fp8_forward": (1,)}
LONG_LENGTHS |= {"fp8_rollout_only": (3,), "fp8_unified, fp8 cache": (3,), "bf16, adapters": (3,)}
CASES = [
    *(("bf16", 3, kind) for kind in KINDS),
    *(
        pytest.param(preset, k, kind, marks=LONG)
        for preset, lengths in LONG_LENGTHS.items()
        for k in lengths
        for kind in KINDS
    ),
]


@pytest.mark.parametrize(("preset", "k", "kind"), CASES)
def test_any_draft_gives_the_tokens_and_bits_of_one_by_one(preset: str, k: int, kind: str) -> None:
    expected = one_by_one(preset)
    lengths = np.array([t.sampled_tokens for t in expected])
    stopped = np.array([t.finish_reason == "stop" for t in expected])
    assert k > 3 or set((lengths[stopped & (lengths > 1)] - 2) % (k + 1)) == set(range(k + 1)), "each place"
    assert (~stopped).any() and engine(preset).statistics.inserts > 3, "budgets should end, slots be refilled"
    assert unequal(sampled_with(preset, Planted((k,)), planted(kind, expected)), expected) == []
    done = engine(preset, Planted((k,))).statistics
    assert done.active_slot_steps + done.accepted == lengths.sum() - REQUESTS  # the first is a prefill's
    places = [[done.places[f"{what}_{j}"] for j in range(1, k + 1)] for what in ("drafted", "accepted")]
    assert [sum(counts) for counts in places] == [done.drafted, done.accepted]
    assert sorted(places[1], reverse=True) == places[1], "a guess is kept only behind those before it"
    if kind == "perfect":
        row = speculation_metrics(engine(preset, Planted((k,))).counts())
        assert row["speculation/tokens_per_step"] == 1 + done.accepted / done.active_slot_steps
        first = row["speculation/accepted_1_fraction"]
        assert first == places[1][0] / places[0][0] > row["speculation/accepted_fraction"] * (k > 1)
        assert done.active_slot_steps == (-(-(lengths - 1) // (k + 1))).sum()
    if kind in ("adversarial", "nothing"):
        assert done.accepted == 0 and (done.drafted > 0) == (kind == "adversarial")


@pytest.mark.parametrize(
    ("preset", "k"), [("bf16", 3), *(pytest.param("fp8_unified", k, marks=LONG) for k in (3, 7))]
)
def test_lookup_gives_the_tokens_and_bits_of_one_by_one(
    preset: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a low temperature, where a policy repeats itself and lookup finds something; then greedily."""
    draft = CHOICE if k == 3 else Lookup((k,))
    monkeypatch.setattr(DraftLength, "choose", lambda self, shape: max(self.lengths))
    for sampling in (
        dataclasses.replace(SAMPLING, temperature=0.3, stop_token_ids=(1,)),
        dataclasses.replace(SAMPLING, greedy=True, max_tokens=MAX_TOKENS - 1),
    ):
        expected = one_by_one(preset, sampling)
        assert unequal(sampled_with(preset, draft, None, sampling), expected) == []
        done = engine(preset, draft).statistics
        assert 0 < done.accepted < done.drafted
        assert done.decode_steps < engine(preset).statistics.decode_steps


@pytest.mark.parametrize(
    ("preset", "draft"), [("bf16", CHOICE), pytest.param("fp8_unified", Lookup((0, 1, 3, 7)), marks=LONG)]
)
def test_another_length_in_each_chunk_gives_the_tokens_and_bits_of_one_by_one(
    preset: str, draft: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs for all lengths exist after the warm-up; the second time, drafts are the completions of the
    first with the same noise, which are perfect.
    """
    rng, chosen = np.random.default_rng(1), []

    def choose(self: DraftLength, shape: tuple[int, int]) -> int:
        chosen.append(int(rng.choice(self.lengths)))
        return chosen[-1]

    monkeypatch.setattr(DraftLength, "choose", choose)
    made, expected = engine(preset, draft), one_by_one(preset)
    made.warmup()
    made._completions, compiled, accepted = Completions(), made.compilations, []
    for _ in range(2):
        assert unequal(made.generate(requests(), SAMPLING), expected) == []
        accepted.append(made.statistics.accepted / made.statistics.asked)
    assert set(chosen) == set(draft.lengths) and made.compilations == compiled
    assert accepted[0] < 0.2 and accepted[1] > 0.5, "only the ends of completions are asked for in vain"
    assert made.counts()["asked"] == made.statistics.asked


@LONG
@pytest.mark.parametrize(("slots", "chunk"), [(1, 3), (32, 1)])
def test_slots_and_chunks_change_no_bit(slots: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 slots the last sequences move into fewer; the oracle has five.  The second time, drafts are the
    completions of the first.
    """
    monkeypatch.setattr(DraftLength, "choose", lambda self, shape: max(self.lengths))
    more = SIZES | {"slots": slots, "decode_chunk_tokens": chunk}
    one = policy("bf16")
    made = JaxEngine(one.model, one.plan, draft=CHOICE, **more)
    made.load(one.published, 0)
    count = 10 if slots == 32 else REQUESTS  # most of all end together, and few of ten are the last
    for _ in range(2):
        assert unequal(made.generate(requests()[:count], SAMPLING), one_by_one("bf16")[:count]) == []
    assert made.statistics.accepted > made.statistics.asked / 2
    if slots == 32:
        assert {key[1] for key in made.programs._compiled if key[0] == "speculate"} == {8, 32}


def trusting(drafted: jax.Array, sampled: jax.Array, *rest: Any) -> jax.Array:
    """An acceptance that takes the first drafted token whatever was sampled."""
    return count_kept(drafted.at[:, 0].set(sampled[:, 0]), sampled, *rest)


@LONG
def test_without_exact_tokens_are_draws_of_the_policy() -> None:
    """10^5 tokens, some of them guessed; guesses that are accepted unseen are found."""
    loose = SmallPolicy("bf16", exact=False)
    sizes = SIZES | {"slots": 64, "prefill_rows": 16, "decode_chunk_tokens": 6}
    rng, count = np.random.default_rng(2), 9_000
    asked = [Request(i, rng.integers(5, VOCAB, MAX_PROMPT).tolist(), i) for i in range(count)]
    sampling = SamplingParams(1.0, MAX_TOKENS, (), 3)

    def sampled(draft: Draft | None) -> tuple[JaxEngine, list[Trajectory]]:
        made = JaxEngine(loose.model, loose.plan, draft=draft, **sizes)
        made.load(loose.published, 0)
        return made, made.generate(asked, sampling)

    made, ours = sampled(Lookup((3,)))
    assert sum(one.sampled_tokens for one in ours) > 1e5 and made.statistics.accepted > 1e3
    assert max(surprise(loose, ours)) < 4.5
    assert "every token is drawn from the policy" in made.describe()["speculation"]["promise"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "count_kept", trusting)
        asked = asked[:3000]
        assert max(surprise(loose, sampled(Lookup((3,)))[1])) > 10


@LONG
def test_a_mismatch_that_is_accepted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    monkeypatch.setattr(programs, "count_kept", trusting)
    expected = one_by_one("bf16")
    assert unequal(sampled_with("bf16", Planted((2,)), planted("random", expected)), expected)
