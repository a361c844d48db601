"""The base of both vLLM engines: sleep, requests as vLLM's parameters, and answers as trajectories.

The engines in this process (`in_process`) and behind HTTP (`server`) define how weights get into vLLM, how
requests are sent, and where an answer holds tokens and log-probabilities.  Beyond `RolloutEngine`, `held`
lists the tensors that vLLM holds, for the certificate.  Imports neither torch nor vLLM.
"""

from __future__ import annotations

import abc
import contextlib
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bridge.hf.draft import draft_tensors
from bridge.hf.peft import PeftAdapter, save_adapter
from bridge.hf.tensors import hf_tensors, synced_tensors, to_host
from bridge.vllm.settings import (
    EngineFailed,
    EngineSettings,
    check_requests,
    sampling_fields,
    scoring_fields,
    speculation_counts,
    trajectory,
)
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.draft_head import DraftHead
from jetrl_jax.precision.formats import is_adapter
from jetrl_jax.precision.parameters import named_params, select
from jetrl_jax.rollout.engine import Results, RolloutEngine, check_sequences
from jetrl_jax.rollout.manifest import Manifest
from jetrl_jax.rollout.types import Request, SamplingParams

# token ids and vLLM's sampling parameters of each request
Asked = Sequence[tuple[Sequence[int], dict[str, Any]]]
Answers = Generator[tuple[int, Any], None, None]  # (index of the request, vLLM's answer), as they arrive


class VllmEngine(RolloutEngine):
    """A `RolloutEngine` that runs vLLM.

    A refused `load` leaves the previous version whole in vLLM, unless sleep has dropped it.  Still, nothing
    is sampled until a `load` succeeds.

    Args:
      model: the architecture; fp8_paths: paths of the parameters published as `ScaledArray`.
    """

    def __init__(self, model: ModelConfig, fp8_paths: Sequence[str], settings: EngineSettings) -> None:
        super().__init__()
        self.model = model
        self.fp8_paths = list(fp8_paths)
        self.settings = settings
        self.operations: dict[str, str] = {}  # operation -> implementation, once vLLM has started
        self._asleep = False
        self._base: list[Any] | None = None  # the arrays of a frozen base that vLLM holds
        self._adapters = 0  # number of adapters that it was given
        self._counts: dict[str, int] = {}
        self._process_number = 0  # of vLLM's; a new process counts from 0

    def held(self, names: Sequence[str]) -> Manifest:
        """The manifest of the checkpoint tensors `names` as vLLM holds them; errors as `score`."""
        self._require("held")
        return Manifest.from_json(self._held(list(names)))

    def check(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Raises ValueError for requests that vLLM would refuse or silently truncate."""
        check_requests(requests, sampling, self.settings, self.model.vocab_size)

    def describe(self) -> Mapping[str, Any]:
        """Mode and release of vLLM, its operations, whether it sleeps, and its speculation."""
        speculation = self.settings.described_speculation
        return {
            **self._identity(),
            "operations": self.operations,
            "sleep": self.settings.sleep,
            **({} if speculation is None else {"speculation": speculation}),
        }

    def load_draft(self, head: DraftHead) -> None:
        """Gives the draft of vLLM's speculation (eagle3) other weights.

        Raises:
          RuntimeError: as `score`.
          EngineFailed: this vLLM has no draft with weights, or refuses these.
        """
        self._require("load_draft")
        self._hand_over_draft(draft_tensors(head))

    def counts(self) -> Mapping[str, int]:
        """Of vLLM's own speculation: as `RolloutEngine.counts`.

        Nothing without speculation, after a restart within the submission, or if vLLM's metrics failed.
        """
        return self._counts

    def _load(self, published: Any, version: int) -> Manifest:
        self._accepted = False
        manifest = self._hand_over(published, version)
        self._asleep = False
        return manifest

    def _sample(self, requests: list[Request], sampling: SamplingParams) -> Results:
        asked = [(request.prompt_ids, sampling_fields(sampling, request)) for request in requests]
        self._counts = {}
        before, process = self._speculated(), self._process_number
        with contextlib.closing(self._ask(asked)) as answers:
            for place, answer in answers:
                yield trajectory(requests[place], *self._completion(answer), sampling, self._version)
        after = self._speculated()
        if before and after and process == self._process_number:
            counts = {name: count - before[name] for name, count in after.items()}
            # a server that somebody else restarted counts from 0
            self._counts = counts if min(counts.values()) >= 0 else {}

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
        """Drops weights and cache if `settings.sleep` is set."""
        if self.settings.sleep and not self._asleep:
            self._drop()
            self._asleep = True

    # Adapters beside a frozen base

    def _to_send(self, published: Any) -> list[tuple[str, Any]]:
        """The tensors to transfer: all; of a policy with adapters its base, and nothing if vLLM holds it."""
        if self.settings.lora is None:
            return list(synced_tensors(self.model, published))
        base = jax.tree.leaves(select(published, lambda path: not is_adapter(path)))
        held = self._base is not None and all(a is b for a, b in zip(self._base, base, strict=True))
        return [] if held else list(hf_tensors(self.model, published))

    def _now_held(self, published: Any) -> None:
        """Notes that vLLM holds the base of these weights."""
        if self.settings.lora is not None:
            self._base = jax.tree.leaves(select(published, lambda path: not is_adapter(path)))

    def _next_adapter(self, published: Any, directory: Path) -> tuple[str, int, Path]:
        """Writes the adapters for vLLM; returns the name and number of the next one, and its directory.

        Each version has a name and a number of its own: vLLM would go on with an adapter whose number it
        knows.
        """
        lora = self.settings.lora
        assert lora is not None
        self._adapters += 1
        arrays = {path: to_host(value) for path, value in named_params(published) if is_adapter(path)}
        made = PeftAdapter(lora.rank, lora.alpha, lora.rslora, lora.targets, None, arrays)
        name = f"jetrl-{os.getpid()}-{self._adapters}"
        return name, self._adapters, save_adapter(directory / name, made)

    def _speculated(self) -> dict[str, int]:
        """Counts of vLLM's speculation since its process began; none without, or if its metrics failed."""
        told = self.settings.described_speculation
        if told is None:
            return {}
        try:
            return speculation_counts(self._metrics(), told["draft"]["num_speculative_tokens"])
        except EngineFailed as error:  # the next call of a dead server restarts it, or ends the run
            print(f"the metrics of vLLM's speculation are left out: {error}", file=sys.stderr, flush=True)
            return {}

    # How vLLM is run; each raises EngineFailed on failure

    @abc.abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Mode and release."""

    @abc.abstractmethod
    def _hand_over(self, published: Any, version: int) -> Manifest:
        """Loads a policy version into vLLM, wakes it and empties its prefix cache; returns the manifest."""

    @abc.abstractmethod
    def _hand_over_draft(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Loads the tensors of a draft's file into vLLM, behind the policy's weights."""

    @abc.abstractmethod
    def _held(self, names: list[str]) -> str:
        """The manifest, as JSON, of the tensors that vLLM holds."""

    @abc.abstractmethod
    def _ask(self, asked: Asked) -> Answers:
        """vLLM's answer to each request; closing the generator early aborts the others."""

    @abc.abstractmethod
    def _completion(self, answer: Any) -> tuple[Sequence[int], Sequence[float], str | None]:
        """The completion's token ids, their log-probabilities and the finish reason."""

    @abc.abstractmethod
    def _of_prompt(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        """The log-probabilities of all tokens of a prompt except the first."""

    @abc.abstractmethod
    def _metrics(self) -> str:
        """vLLM's metrics, in Prometheus's text."""

    @abc.abstractmethod
    def _drop(self) -> None:
        """Makes vLLM drop weights and cache."""
