"""`Lookup` against a slow loop, on random texts of few tokens; the texts that it reads; its errors."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jetrl_jax.rollout.embedded.speculation import NOTHING, Lookup, Texts


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
    found = np.asarray(jax.jit(Lookup(tokens, longest))(text, last))
    expected = [
        slow_lookup(row.tolist(), int(place), tokens, longest) for row, place in zip(text, last, strict=True)
    ]
    np.testing.assert_array_equal(found, expected)
    assert (found >= 0).all(axis=1).any() and (found[:, 0] == NOTHING).any()


def test_texts_are_siblings_of_the_prompt_then_the_sequence() -> None:
    prompts = [np.array([5, 6, 7], np.int32), np.array([8], np.int32)]
    texts = Texts(prompts, np.array([0, 1, 0, 0]), max_tokens=3, width=9, context=2)
    texts.add(np.array([0, 0, 2, 1]), np.array([0, 1, 0, 0]), np.array([1, 2, 3, 4]))
    np.testing.assert_array_equal(
        texts.of(np.array([2, -1, 1]), 5),
        [[-1] * 9 + [5, 6, 7, 3, -1], [-1] * 14, [-1] * 9 + [8, 4, -1, -1, -1]],
    )
    texts.finish(0, 2)
    texts.finish(2, 1)
    np.testing.assert_array_equal(texts.of(np.array([3]), 4), [[6, 7, 1, 2, -1, 6, 7, 3, -1, 5, 6, 7, -1]])
    np.testing.assert_array_equal(texts.of(np.array([1]), 2), [[-1] * 9 + [8, 4]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "tokens=0, expected 1 .. 16"), ((17,), "tokens=17"), ((3, 0), "longest=0, expected >= 1")],
)
def test_lookup_raises_on_bad_lengths(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lookup(*arguments)
