"""`Lookup` against a slow loop, on random texts of few tokens; the texts that drafts read; their length."""

from __future__ import annotations

import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jetrl_jax.rollout.embedded.continuous_batching import EngineStatistics, Generation
from jetrl_jax.rollout.embedded.draft_length import MEASURED, TRIED_AGAIN, DraftLength
from jetrl_jax.rollout.embedded.speculation import NOTHING, REFUSED, Completions, Lookup, Texts, repeated


def slow_lookup(text: list[int], last: int, tokens: int, longest: int) -> list[int]:
    """By the docstring of `Lookup`, one place after the other."""
    best, place = 0, None
    for candidate in range(last):
        agreement = 0
        while (
            agreement < longest
            and candidate - agreement >= 0
            and text[candidate - agreement] == text[last - agreement] != NOTHING
        ):
            agreement += 1
        if text[candidate + 1] != NOTHING and agreement and agreement >= best:
            best, place = agreement, candidate
    guess: list[int] = []
    while place is not None and len(guess) < tokens:
        followed = (text[: last + 1] + guess)[place + 1 + len(guess)]
        if followed == NOTHING:
            break
        guess.append(followed)
    return guess + [NOTHING] * (tokens - len(guess))


@pytest.mark.parametrize(("tokens", "longest"), [(1, 1), (3, 3), (7, 2)])
def test_lookup_matches_a_slow_loop(tokens: int, longest: int) -> None:
    rng = np.random.default_rng(tokens)
    rows, width = 200, 24
    text = rng.integers(0, 3, (rows, width)).astype(np.int32)
    text[rng.random(text.shape) < 0.1] = NOTHING
    last = rng.integers(0, width, rows).astype(np.int32)
    for row, place in zip(text, last, strict=True):
        row[place], row[place + 1 :] = rng.integers(0, 3), NOTHING
    found = np.asarray(jax.jit(Lookup((tokens,), longest), static_argnums=2)(text, last, tokens))
    expected = [
        slow_lookup(row.tolist(), int(place), tokens, longest) for row, place in zip(text, last, strict=True)
    ]
    np.testing.assert_array_equal(found, expected)
    assert (found >= 0).all(axis=1).any() and (found[:, 0] == NOTHING).any()


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def noises(count: int) -> list:
    return [(7, False, 1.0, seed) for seed in range(count)]


def test_texts_are_siblings_of_the_prompt_then_the_sequence() -> None:
    prompts, prompt_of = [ints(5, 6, 7), ints(8)], np.array([0, 1, 0, 0])
    texts = Texts(prompts, prompt_of, noises(4), 3, 9, 2, Completions())
    texts.add(ints(0, 0, 2, 1), ints(0, 1, 0, 0), ints(1, 2, 3, 4), np.zeros(4))
    text, again = texts.of(np.array([2, -1, 1]), 5)
    running = [6, 7, 3, -1], [8, 4, -1]  # a sequence is itself among those that are still sampled
    shown = [[-1] * 5 + running[0] + [5, 6, 7, 3, -1], [-1] * 14, [-1] * 6 + running[1] + [8, 4, -1, -1, -1]]
    np.testing.assert_array_equal(text, shown)
    assert (again == NOTHING).all()
    texts.finish(0)
    texts.finish(2)
    text, _ = texts.of(np.array([3]), 4)  # of those that are sampled, none has a place left
    np.testing.assert_array_equal(text, [[6, 7, 1, 2, -1, 6, 7, 3, -1, 5, 6, 7, -1]])


def test_texts_of_a_later_call_have_the_completions_of_the_prompt_and_of_the_same_noise() -> None:
    kept, prompts, prompt_of = Completions(), [ints(5, 6), ints(8)], np.array([0, 0, 1])
    for tokens in ([1, 2], [3, 4]):  # the second in place of the first
        texts = Texts(prompts, prompt_of, noises(3), 3, 8, 1, kept)
        texts.add(ints(1, 1), ints(0, 1), np.array(tokens), np.zeros(2))
        texts.finish(1)
    text, again = Texts(prompts, prompt_of, noises(3), 1, 8, 1, kept).of(np.array([0, 1, 2]), 4)
    np.testing.assert_array_equal(again, [[-1] * 4, [-1, -1, 3, -1], [-1] * 4])  # as many as may be sampled
    assert text[0].tolist() == [6, 3, 4, -1, 6, -1, 6, -1, 5, 6, -1, -1]
    assert text[2].tolist() == [-1] * 6 + [8, -1] + [8, -1, -1, -1]


def test_a_sequence_with_a_nan_is_shown_to_no_other() -> None:
    """Neither while it is sampled nor finished: keys of its tokens may be NaN."""
    kept, prompts = Completions(), [ints(5, 6)]
    texts = Texts(prompts, np.zeros(2, int), noises(2), 3, 8, 1, kept)
    texts.add(ints(0, 1), ints(0, 0), ints(1, 2), np.array([np.nan, -1.0]))
    for _ in range(2):
        text, _ = texts.of(ints(0, 1), 4)
        np.testing.assert_array_equal(text[:, :8], [[-1] * 5 + [6, 2, -1]] * 2)
        texts.finish(0)
    assert kept.of(prompts[0]) == {}


def test_completions_keep_the_newest() -> None:
    kept = Completions(most_tokens=9, most_of_prompt=2)
    for prompt, seed, tokens in [(1, 0, 3), (2, 0, 2), (1, 1, 2), (1, 0, 1), (1, 2, 3), (3, 0, 2)]:
        kept.add(ints(prompt), noises(3)[seed], np.full(tokens, seed, np.int32))
    assert [list(kept.of(ints(prompt))) for prompt in (1, 2, 3)] == [
        [noises(3)[0], noises(3)[2]],  # the first with its newer completion
        [],
        [noises(3)[0]],
    ]
    assert kept.tokens == 2 + 1 + 3 + 2  # two prompts of one token


def test_repeated_is_what_followed_the_same_token_at_the_same_position() -> None:
    again = np.array([[NOTHING, 4, 5, 6, NOTHING]] * 4, np.int32)
    found = repeated(again, ints(4, 5, 6, 4), ints(1, 2, 3, 2), 2)
    np.testing.assert_array_equal(found, [[5, 6], [6, NOTHING], [NOTHING] * 2, [NOTHING] * 2])


def test_a_draft_length_is_the_fastest_by_counts_and_times() -> None:
    """Of 0, 1 and 3: the first guess is kept nine times of ten, the others never."""
    length, shape, chosen = DraftLength((0, 1, 3)), (8, 64), []
    first = 3 * MEASURED
    for chunk in range(first + 3 * TRIED_AGAIN):
        k = length.choose(shape)
        seconds = {0: 1.0, 1: 1.2, 3: 1.6}[k] * (100 if chunk < 3 else 1)  # a program's first call is slow
        length.add(shape, k, seconds, np.arange(10)[:, None] >= np.array([1, 10, 10])[:k])
        chosen.append(k)
    assert sorted(chosen[:first]) == sorted(MEASURED * [0, 1, 3])
    others = [k for k in chosen[first:] if k != 1]  # tried again now and then
    assert sorted(others) in ([0, 0, 3], [0, 3, 3])
    assert length.speed(shape, 1) == pytest.approx(1.9 / 1.2)
    assert length.speed(shape, 3) == pytest.approx(1.9 / 1.6)


def test_a_draft_length_follows_guesses_of_chunks_that_are_not_timed() -> None:
    """Each chunk comes after an insert, so only those to be measured are timed; a head learns after the first
    ones.
    """
    statistics, busy = EngineStatistics(), np.zeros(8, np.int64)
    length = DraftLength((0, 1))
    chosen: list[int] = []
    while len(chosen) < 4 * TRIED_AGAIN:
        k = length.choose((8, 64))
        chunk = np.zeros((k + 1, 8), np.int32)  # of one step: token 0 in each slot, and the guess is kept
        if len(chosen) < 2 * MEASURED:
            chunk[1:] = REFUSED
        began = time.perf_counter() - (1.5 if k else 1.0)
        told = {"occupant": busy, "statistics": statistics, "state": SimpleNamespace(shape=(8, 64))}
        now = {"drafted": k, "timed": length.measuring, "started": began, "length": length}
        Generation._count(SimpleNamespace(**told, **now), chunk)  # type: ignore[arg-type]
        chosen.append(k)
    assert set(chosen[2 * MEASURED : TRIED_AGAIN]) == {0}
    assert set(chosen[-TRIED_AGAIN + 1 :]) == {1}


def test_a_draft_length_is_measured_for_each_shape() -> None:
    length = DraftLength((0, 2))
    for shape, seconds in (((8, 64), 1.0), ((256, 64), 3.0)):
        for _ in range(2 * MEASURED):
            k = length.choose(shape)
            length.add(shape, k, seconds if k else 1.0, np.ones((5, k), bool))
    assert (length.choose((8, 64)), length.choose((256, 64))) == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((),), r"lengths=\(\), expected some of 0 .. 16"),
        (((0, 17),), r"lengths=\(0, 17\)"),
        (((-1,),), r"lengths=\(-1,\)"),
        (((3,), 0), "longest=0, expected >= 1"),
    ],
)
def test_lookup_raises_on_bad_lengths(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lookup(*arguments)
