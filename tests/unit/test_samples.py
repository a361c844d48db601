"""Samples of a run token by token: texts that join to the completion, log-probabilities at their tokens, and
a bounded size.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from jetrl_jax.collect.samples import MAX_TOKENS, token_record, token_texts
from jetrl_jax.rollout.types import Trajectory, Turn
from jetrl_jax.text.tokenizer import ByteTokenizer, CharacterTokenizer

CHARACTERS = CharacterTokenizer("abc=")
EOS = CHARACTERS.eos_ids[0]


def trajectory(completion: list[int], logprobs: list[float]) -> Trajectory:
    return Trajectory.of_completion(7, [5, 5], completion, np.asarray(logprobs, np.float32), "stop", 3)


def test_each_token_has_its_text_and_its_logprob() -> None:
    record = token_record(CHARACTERS, trajectory([2, 4, EOS], [-0.25, -1.00004, 0.0]))
    assert record == {"tokens": ["a", "c", ""], "logprobs": [-0.25, -1.0, 0.0]}


@pytest.mark.parametrize("text", ["", "abc", "é漢😀x", "x😀", "\n \t"])
def test_texts_of_tokens_join_to_the_text(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    texts = token_texts(ByteTokenizer(), ids)
    assert "".join(texts) == text
    assert len(texts) == len(ids)


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    broken = [2 + byte for byte in b"\xff\xff\xff\xff\xff" + b"ok"]
    assert "".join(token_texts(ByteTokenizer(), broken)).endswith("ok")
    assert token_texts(ByteTokenizer(), broken[:1]) == ["\ufffd"]


def test_what_an_environment_wrote_has_no_logprob() -> None:
    sampled = np.array([False, True, False, True])
    logprobs = np.where(sampled, np.float32(-0.5), np.float32(0))
    turns = (
        Turn(0, 1, "prompt"),
        Turn(1, 2, "policy", "stop"),
        Turn(2, 3, "environment"),
        Turn(3, 4, "policy", "stop"),
    )
    several = Trajectory(1, np.array([5, 2, 3, 4], np.int32), sampled, logprobs, turns, ((1, 4, 0),))
    assert token_record(CHARACTERS, several) == {"tokens": ["a", "b", "c"], "logprobs": [-0.5, None, -0.5]}


def test_a_long_completion_is_cut_and_counted() -> None:
    record = token_record(CHARACTERS, trajectory([2] * (MAX_TOKENS + 5), [-1.23456789] * (MAX_TOKENS + 5)))
    assert len(record["tokens"]) == len(record["logprobs"]) == MAX_TOKENS
    assert record["tokens_left_out"] == 5
    assert len(json.dumps(record)) < 20 * MAX_TOKENS


def test_an_episode_of_several_turns_is_shown_to_its_end() -> None:
    count = MAX_TOKENS + 5
    turns = Turn(0, 1, "prompt"), Turn(1, count, "environment"), Turn(count, count + 1, "policy", "stop")
    sampled = np.arange(count + 1) == count
    ids, logprobs = np.full(count + 1, 2, np.int32), np.where(sampled, np.float32(-1), np.float32(0))
    record = token_record(CHARACTERS, Trajectory(1, ids, sampled, logprobs, turns, ((1, count + 1, 0),)))
    assert len(record["tokens"]) == count and record["logprobs"][-2:] == [None, -1.0]
