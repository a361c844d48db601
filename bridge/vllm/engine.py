"""What both ways of running vLLM share: asleep or awake, requests as vLLM's parameters, answers as
trajectories.

An engine in this process (`in_process`) or behind HTTP (`server`) says how weights get into vLLM, how it is
asked, and where in an answer the tokens and log-probabilities are.  Beside `RolloutEngine` it can state what
vLLM holds (`held`), which the certificate compares.  Free of torch and vLLM.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.vllm.settings import (
    EngineFailed,
    EngineSettings,
    check_requests,
    sampling_fields,
    scoring_fields,
    trajectory,
)
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.rollout.engine import Results, RolloutEngine, check_sequences
from jetrl_jax.rollout.manifest import Manifest
from jetrl_jax.rollout.types import Request, SamplingParams

# token ids and vLLM's sampling parameters of each request
Asked = Sequence[tuple[Sequence[int], dict[str, Any]]]
Answers = Generator[tuple[int, Any], None, None]  # (place in what was asked, what vLLM says), as they arrive


class VllmEngine(RolloutEngine):
    """`RolloutEngine` over vLLM.

    A refused `load` leaves the version before whole in vLLM, unless it was dropped for sleep; nothing is
    sampled from it all the same until a `load` succeeds.

    Args:
      model: the architecture; fp8_paths: parameter paths that are published as `ScaledArray`.
    """

    def __init__(self, model: ModelConfig, fp8_paths: Sequence[str], settings: EngineSettings) -> None:
        super().__init__()
        self.model = model
        self.fp8_paths = list(fp8_paths)
        self.settings = settings
        self.operations: dict[str, str] = {}  # what computes what, once vLLM has told
        self._asleep = False

    def held(self, names: Sequence[str]) -> Manifest:
        """The manifest of the checkpoint tensors `names` as vLLM holds them; errors as `score`."""
        self._require("held")
        return Manifest.from_json(self._held(list(names)))

    def check(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Raises ValueError for what vLLM would refuse, or silently cut."""
        check_requests(requests, sampling, self.settings, self.model.vocab_size)

    def describe(self) -> Mapping[str, Any]:
        """Mode and release of vLLM, its operations, whether it sleeps between rollouts."""
        return {**self._identity(), "operations": self.operations, "sleep": self.settings.sleep}

    def _load(self, published: Any, version: int) -> Manifest:
        self._accepted = False
        manifest = self._hand_over(published, version)
        self._asleep = False
        return manifest

    def _sample(self, requests: list[Request], sampling: SamplingParams) -> Results:
        asked = [(request.prompt_ids, sampling_fields(sampling, request)) for request in requests]
        with contextlib.closing(self._ask(asked)) as answers:
            for place, answer in answers:
                yield trajectory(requests[place], *self._completion(answer), sampling, self._version)

    def _score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        check_sequences(sequences, self.settings.longest, self.model.vocab_size)
        answers = dict(self._ask([(ids, scoring_fields()) for ids in sequences]))
        if len(answers) != len(sequences):
            raise EngineFailed(
                f"vLLM: it left out sequences: got {len(answers)} answers, expected {len(sequences)}."
            )
        return [
            np.array([0.0, *self._of_prompt(answers[place], ids[1:])], np.float32)
            for place, ids in enumerate(sequences)
        ]

    def _sleep(self) -> None:
        """Drops weights and cache, where the settings say so."""
        if self.settings.sleep and not self._asleep:
            self._drop()
            self._asleep = True

    # How vLLM is run; each raises EngineFailed where it fails

    @abc.abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Mode and release."""

    @abc.abstractmethod
    def _hand_over(self, published: Any, version: int) -> Manifest:
        """Brings a policy version into vLLM, awake then, and empties its prefix cache; the manifest of it."""

    @abc.abstractmethod
    def _held(self, names: list[str]) -> str:
        """A manifest as JSON."""

    @abc.abstractmethod
    def _ask(self, asked: Asked) -> Answers:
        """vLLM's answer to each; closed early, it gives up the others."""

    @abc.abstractmethod
    def _completion(self, answer: Any) -> tuple[Sequence[int], Sequence[float], str | None]:
        """Token ids, their log-probabilities and the reason to end."""

    @abc.abstractmethod
    def _of_prompt(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        """The log-probabilities of a prompt's tokens but for the first."""

    @abc.abstractmethod
    def _drop(self) -> None:
        """Lets vLLM drop weights and cache."""
