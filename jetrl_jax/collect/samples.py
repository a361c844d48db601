"""A completion token by token for the record of a run: each token's text and its log-probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jetrl_jax.rollout.types import Trajectory
from jetrl_jax.text.tokenizer import Tokenizer

MAX_TOKENS, MAX_EPISODE_TOKENS = 256, 1024  # recorded per sample of one turn, of several; the rest is counted
_PART_OF_A_CHARACTER = "\ufffd"


def token_record(tokenizer: Tokenizer, trajectory: Trajectory) -> dict[str, Any]:
    """Texts and log-probabilities of the tokens after the prompt, as JSON values.

    tokens           text of each of the first `MAX_TOKENS` tokens (of several turns `MAX_EPISODE_TOKENS`);
                     a stop token has an empty text
    logprobs         of each, as the engine reported it, rounded to 1e-4; None if the policy did not sample it
    tokens_left_out  number of further tokens; present only if there are any
    """
    start, ids = trajectory.turns[0].stop, trajectory.completion_ids
    most = MAX_TOKENS if len(trajectory.turns) == 2 else MAX_EPISODE_TOKENS
    kept = slice(start, start + most)
    logprobs = zip(trajectory.logprobs[kept], trajectory.sampled[kept], strict=True)
    record: dict[str, Any] = {
        "tokens": token_texts(tokenizer, ids[:most].tolist()),
        "logprobs": [round(float(logprob), 4) if sampled else None for logprob, sampled in logprobs],
    }
    return record | ({"tokens_left_out": len(ids) - most} if len(ids) > most else {})


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """One text per token; if several tokens make one character, the last has it and the others are empty."""
    texts, begin = [], 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[begin:end])
        # UTF-8 has at most four bytes
        if text.endswith(_PART_OF_A_CHARACTER) and end < len(ids) and end - begin < 4:
            texts.append("")
        else:
            texts.append(text)
            begin = end
    return texts
