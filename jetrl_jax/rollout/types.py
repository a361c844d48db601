"""The input and output of a rollout engine: sampling parameters, requests, trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float32, Int32
from numpy.typing import ArrayLike

from jetrl_jax.config.types import TEMPERATURES

# A stop token was sampled; a limit of tokens was reached; an episode ended by a limit of its turns.
FinishReason = Literal["stop", "length", "turns"]
Role = Literal["prompt", "policy", "environment"]
MAX_SEED = 2**32 - 1


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number of Python or numpy, not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one submission.

    temperature: divides the float32 logits; within `TEMPERATURES` (ignored when greedy).
    max_tokens: longest completion, in tokens, including the stop token.
    stop_token_ids: one of these, when sampled, ends the completion and is its last token.
    seed: of the whole submission; a request's noise depends only on this, on the request's own seed and on
        the token's position.
    greedy: take the most likely token (the lowest id among equals); logprobs are then those at temperature 1.

    Raises:
      ValueError: a value outside its range.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    greedy: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"got {name}={value!r}, expected {expected}"
            for name, value, holds, expected in (
                (
                    "temperature",
                    self.temperature,
                    isinstance(self.temperature, float | int | np.floating | np.integer),
                    "a number",
                ),
                ("max_tokens", self.max_tokens, is_whole(self.max_tokens), "a whole number"),
                ("seed", self.seed, is_whole(self.seed), "a whole number"),
                (
                    "stop_token_ids",
                    self.stop_token_ids,
                    all(map(is_whole, self.stop_token_ids)),
                    "whole numbers",
                ),
                ("greedy", self.greedy, isinstance(self.greedy, bool | np.bool_), "True or False"),
            )
            if not holds
        ]
        if problems:
            raise ValueError("SamplingParams: bad value: " + "; ".join(problems) + ".")
        low, high = TEMPERATURES
        if not self.greedy and not low <= self.temperature <= high:
            problems.append(
                f"got temperature={self.temperature}, expected a number from {low} to {high} (use "
                "greedy=True for argmax)"
            )
        if self.max_tokens < 1:
            problems.append(f"got max_tokens={self.max_tokens}, expected >= 1")
        if any(token < 0 for token in self.stop_token_ids):
            problems.append(f"got stop_token_ids={self.stop_token_ids}, expected ids >= 0")
        if not 0 <= self.seed <= MAX_SEED:
            problems.append(f"got seed={self.seed}, expected 0 .. 2**32 - 1")
        if problems:
            raise ValueError("SamplingParams: bad value: " + "; ".join(problems) + ".")


@dataclass(frozen=True)
class Request:
    """One completion to sample.

    id: chosen by the caller, returned in the trajectory.
    prompt_ids: at least one token.
    seed: 0 .. 2**32 - 1; requests of a group share the prompt and differ in the seed.
    max_tokens: longest completion, if less than that of the submission; None: no less.
    """

    id: int
    prompt_ids: list[int]
    seed: int
    max_tokens: int | None = None

    def limit(self, sampling: SamplingParams) -> int:
        """The longest completion of this request, in tokens."""
        return sampling.max_tokens if self.max_tokens is None else min(self.max_tokens, sampling.max_tokens)


@dataclass(frozen=True)
class Turn:
    """A range of a trajectory's tokens written by one side.

    start, stop: the range of tokens.
    role: "prompt" (the first turn), "policy", or "environment" (an environment's answer).
    finish_reason: of a policy's turn, else None.
    """

    start: int
    stop: int
    role: Role
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A prompt and the tokens after it, as the policy saw them; only sampled tokens are trained.

    token_ids: the prompt, then every turn, stop tokens included.
    sampled: true where the policy wrote the token.
    logprobs: log p(token | the tokens before it) over the full vocabulary at the sampling temperature (at
        temperature 1 when greedy); 0 where nothing was sampled.
    turns: the turns in order, without a gap.
    versions: (start, stop, policy version) of the weights that sampled this range of tokens, in order.

    Raises:
      ValueError: arrays, turns and versions do not fit each other.
    """

    request_id: int
    token_ids: Int32[np.ndarray, " T"]
    sampled: Bool[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    turns: tuple[Turn, ...]
    versions: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        problems = self._problems_of_arrays() or self._problems_of_parts()
        if problems:
            raise ValueError(f"Trajectory: request {self.request_id}: got {'; '.join(problems)}.")

    def _problems_of_arrays(self) -> list[str]:
        total = np.size(self.token_ids)
        return [
            f"{name} {getattr(array, 'dtype', type(array).__name__)} {np.shape(array)}, expected "
            f"{np.dtype(dtype)} ({total},)"
            for name, array, dtype in (
                ("token_ids", self.token_ids, np.int32),
                ("sampled", self.sampled, bool),
                ("logprobs", self.logprobs, np.float32),
            )
            if getattr(array, "dtype", None) != dtype or np.shape(array) != (total,)
        ]

    def _problems_of_parts(self) -> list[str]:
        """The problems of turns and versions."""
        total, problems = len(self.token_ids), []
        edges = [0, *(turn.stop for turn in self.turns)]
        if [turn.start for turn in self.turns] != edges[:-1] or edges != sorted(edges) or edges[-1] != total:
            return [f"turns {[(t.start, t.stop) for t in self.turns]}, expected them to divide 0 to {total}"]
        roles = [turn.role for turn in self.turns]
        reasons = [turn.finish_reason for turn in self.turns]
        if not set(roles) <= set(get_args(Role)) or not set(reasons) <= {None, *get_args(FinishReason)}:
            return [
                f"turns of {roles} that ended by {reasons}, expected {get_args(Role)} and "
                f"{get_args(FinishReason)}"
            ]
        if not roles or roles[0] != "prompt" or "policy" not in roles:
            problems.append(
                f"turns of {', '.join(roles)}, expected a prompt first and at least one of the policy"
            )
        if [reason is not None for reason in reasons] != [role == "policy" for role in roles]:
            problems.append("finish reasons that are not those of the policy's turns")
        if any(self.sampled[turn.start : turn.stop].any() for turn in self.turns if turn.role != "policy"):
            problems.append("sampled tokens outside the policy's turns")
        if np.any(self.logprobs[~self.sampled]):
            problems.append("logprobs of tokens that were not sampled, expected 0")
        places = [place for start, stop, _ in self.versions for place in (start, stop)]
        if places != sorted(places) or not all(0 <= place <= total for place in places):
            problems.append(f"versions {self.versions}, expected stretches within 0 to {total}, in order")
        covered = np.zeros(total, bool)
        for start, stop, _ in self.versions:
            covered[max(start, 0) : max(stop, 0)] = True
        if np.any(self.sampled & ~covered):
            problems.append(f"versions {self.versions} that leave out sampled tokens")
        return problems

    @classmethod
    def of_completion(
        cls,
        request_id: int,
        prompt_ids: ArrayLike,
        completion_ids: ArrayLike,
        logprobs: ArrayLike,
        reason: FinishReason,
        version: int,
    ) -> Trajectory:
        """One prompt and one completion, sampled from one version of the weights.

        Raises:
          ValueError: token ids are not int32, or the completion lacks one log-probability per token.
        """
        prompt, completion = _token_ids(prompt_ids), _token_ids(completion_ids)
        if np.shape(logprobs) != completion.shape:
            raise ValueError(
                f"Trajectory: request {request_id}: got logprobs {np.shape(logprobs)}, expected "
                f"{completion.shape}."
            )
        start, stop = len(prompt), len(prompt) + len(completion)
        return cls(
            request_id,
            np.concatenate([prompt, completion]),
            np.arange(stop) >= start,
            np.concatenate([np.zeros(start, np.float32), np.asarray(logprobs, np.float32)]),
            (Turn(0, start, "prompt"), Turn(start, stop, "policy", reason)),
            ((start, stop, version),),
        )

    @property
    def prompt_ids(self) -> Int32[np.ndarray, " prompt"]:
        """The first turn."""
        return self.token_ids[: self.turns[0].stop]

    @property
    def completion_ids(self) -> Int32[np.ndarray, " completion"]:
        """All tokens after the prompt, from any writer."""
        return self.token_ids[self.turns[0].stop :]

    @property
    def sampled_logprobs(self) -> Float32[np.ndarray, " sampled"]:
        """The log-probabilities of the tokens that the policy wrote."""
        return self.logprobs[self.sampled]

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy wrote."""
        return int(np.count_nonzero(self.sampled))

    @property
    def finish_reason(self) -> FinishReason:
        """Why the policy's last turn ended."""
        return next(turn.finish_reason for turn in reversed(self.turns) if turn.finish_reason is not None)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled it."""
        return min(version for *_, version in self.versions)


def _token_ids(values: ArrayLike) -> np.ndarray:
    array = np.asarray(values)
    ids = array.astype(np.int32)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or (ids != array).any())):
        raise ValueError(f"Trajectory: got token ids {array.dtype} {array.shape}, expected int32 [tokens].")
    return ids
