"""What goes into a rollout engine and comes out: sampling parameters, requests, trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jetrl_jax.config.types import TEMPERATURES

FinishReason = Literal["stop", "length"]
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


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A sampled completion.

    prompt_ids: int32 [prompt length].
    completion_ids: int32 [length], including the stop token when there is one.
    rollout_logprobs: float32 [length], log p(token | what stands before it) over the full vocabulary at the
        sampling temperature (at temperature 1 when greedy).
    finish_reason: "stop" (a stop token was sampled) or "length" (max_tokens were).
    policy_version: of the weights that sampled it.
    """

    request_id: int
    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    rollout_logprobs: np.ndarray
    finish_reason: FinishReason
    policy_version: int
