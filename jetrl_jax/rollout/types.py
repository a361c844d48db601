"""What goes into a rollout engine and comes out: sampling parameters, requests, trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from jetrl_jax.config.types import TEMPERATURES

FinishReason = Literal["stop", "length"]  # a stop token was sampled, or max_tokens were
Role = Literal["prompt", "policy", "environment"]
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one call of `generate` samples.

    temperature: divides the float32 logits; within `TEMPERATURES` (ignored when greedy).
    max_tokens: longest completion, in tokens, including the stop token.
    stop_token_ids: a sampled token of these ends the completion and is its last token.
    seed: of the whole call; a request's noise depends on this, on the request's own seed and on the token's
        position, and on nothing else.
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
        problems = []
        low, high = TEMPERATURES
        if not self.greedy and not low <= self.temperature <= high:
            problems.append(f"got temperature={self.temperature}, expected a number from {low} to {high} (use greedy=True for argmax)")
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

    id: the caller's name for it, returned in the trajectory.
    prompt_ids: at least one token.
    seed: of this request, 0 .. 2**32 - 1; requests of a group share the prompt and differ in the seed.
    """

    id: int
    prompt_ids: list[int]
    seed: int


@dataclass(frozen=True)
class Turn:
    """A stretch of a trajectory that one side wrote.

    start, stop: of its tokens.
    role: "prompt" (the first turn), "policy", or "environment" (what an environment answered).
    finish_reason: of a policy's turn, else None.
    """

    start: int
    stop: int
    role: Role
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A prompt and what followed, as the policy saw it; the policy is trained on the sampled tokens only.

    token_ids: int32 [T]: the prompt, then every turn, stop tokens included.
    sampled: bool [T], true where the policy wrote the token.
    logprobs: float32 [T], log p(token | what stands before it) over the full vocabulary at the sampling temperature (at
        temperature 1 when greedy); 0 where nothing was sampled.
    turns: who wrote which tokens, in order, without a gap.
    versions: (start, stop, policy version) of the weights that sampled the tokens between, in order.

    Raises:
      ValueError: arrays, turns and versions that do not fit each other.
    """

    request_id: int
    token_ids: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    turns: tuple[Turn, ...]
    versions: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        total = len(self.token_ids)
        problems = [
            f"{len(array)} {name}, expected {total}, one per token"
            for name, array in (("sampled", self.sampled), ("logprobs", self.logprobs))
            if len(array) != total
        ]
        edges = [0, *(turn.stop for turn in self.turns)]
        if [turn.start for turn in self.turns] != edges[:-1] or edges[-1] != total:
            problems.append(f"turns {[(t.start, t.stop) for t in self.turns]}, expected them to divide 0 to {total}")
        if not self.turns or self.turns[0].role != "prompt":
            problems.append("a first turn that is no prompt")
        if not problems:
            covered = np.zeros(total, bool)
            for start, stop, _ in self.versions:
                covered[start:stop] = True
            if not covered[self.sampled].all():
                problems.append(f"versions {self.versions} that leave out sampled tokens")
            if self.sampled[: self.turns[0].stop].any():
                problems.append("sampled tokens in the prompt")
        if problems:
            raise ValueError(f"Trajectory: request {self.request_id}: got {'; '.join(problems)}.")

    @classmethod
    def of_completion(
        cls, request_id: int, prompt_ids: ArrayLike, completion_ids: ArrayLike, logprobs: ArrayLike, reason: FinishReason, version: int
    ) -> Trajectory:
        """One prompt and one completion, sampled from one version of the weights."""
        prompt, completion = np.asarray(prompt_ids, np.int32), np.asarray(completion_ids, np.int32)
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
    def prompt_ids(self) -> np.ndarray:
        """int32: the first turn."""
        return self.token_ids[: self.turns[0].stop]

    @property
    def completion_ids(self) -> np.ndarray:
        """int32: all that follows the prompt, whoever wrote it."""
        return self.token_ids[self.turns[0].stop :]

    @property
    def sampled_logprobs(self) -> np.ndarray:
        """float32 [sampled tokens]."""
        return self.logprobs[self.sampled]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy wrote."""
        return int(np.count_nonzero(self.sampled))

    @property
    def finish_reason(self) -> FinishReason:
        """Why the policy's last turn ended."""
        return next(turn.finish_reason for turn in reversed(self.turns) if turn.finish_reason is not None)

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled it."""
        return min(version for *_, version in self.versions)
