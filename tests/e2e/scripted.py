"""A run without a device: an engine and device programs that follow a script, under the real trainer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.rl.algorithm import policy_objective
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.rollout.engine import Results, RolloutEngine
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from jetrl_jax.runs.grpo import GRPOTrainer
from jetrl_jax.training.programs import TrainState, UpdateReport


class ScriptedEngine(RolloutEngine):
    """Answers sums, less and less well from version to version, the last one first; remembers what it was
    asked.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.asked = []

    def check(self, requests: Any, sampling: SamplingParams) -> None:
        """Takes everything."""

    def describe(self) -> dict[str, Any]:
        return {"mode": "scripted"}

    def _load(self, published: Any, version: int) -> None:
        """Needs none."""

    def _sample(self, requests: list[Request], sampling: SamplingParams) -> Results:
        self.asked.append((len(requests), sampling.temperature, sampling.max_tokens, sampling.greedy))
        for request in reversed(requests):
            yield self._answer(request, sampling)

    def _score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return [np.append(np.float32(0), scripted_logprobs(ids[1:], 0)) for ids in sequences]

    def _answer(self, request: Request, sampling: SamplingParams) -> Trajectory:
        rng = np.random.default_rng((request.seed, sampling.seed))
        prompt = self.tokenizer.decode(request.prompt_ids).strip("=")
        right = rng.random() < 0.9 - 0.2 * self.policy_version
        text = (
            str(sum(map(int, prompt.split("+"))))
            if right
            else "".join(map(str, rng.integers(0, 10, rng.integers(1, 8))))
        )
        ids = np.array(
            [*self.tokenizer.encode(text), self.tokenizer.eos_ids[0]][: sampling.max_tokens], np.int32
        )
        reason = "stop" if ids[-1] == self.tokenizer.eos_ids[0] else "length"
        return Trajectory.of_completion(
            request.id,
            np.array(request.prompt_ids, np.int32),
            ids,
            scripted_logprobs(ids, 0) - 0.01,
            reason,
            self.policy_version,
        )


def scripted_logprobs(ids: np.ndarray, updates: int) -> np.ndarray:
    """Log-probabilities that move by up to one with each update."""
    return (-1.1 - 0.1 * ((np.asarray(ids) * 7 + 5 * updates) % 11)).astype(np.float32)


class ScriptedPrograms:
    """`PolicyPrograms` without a device: scripted logprobs, the real objective, the real optimiser on two
    small arrays.
    """

    def __init__(self, real: Any) -> None:
        self.optimizer = real.optimizer
        self.segment_unit = real.segment_unit
        self.updates = 0
        self.shapes: list[tuple[int, ...]] = []
        self.losses: list[float] = []
        self.supervised: list[np.ndarray] = []
        self.weights = {"matrix": jnp.linspace(-1, 1, 6).reshape(2, 3), "vector": jnp.ones(3)}
        self.moments = self.optimizer.init(self.weights)

    def init(self, params: Any, kv: None = None, base: None = None) -> TrainState:
        return TrainState(params, {"updates": np.int32(self.updates)}, {})

    def frozen(self, state: TrainState) -> int:
        return -1 if self.updates == 0 else self.updates

    reference = frozen

    def logprobs(self, weights: int, batch: TrainBatch) -> np.ndarray:
        return scripted_logprobs(batch.token_ids, weights)

    def policy_gradient(self, state: TrainState, batch: TrainBatch, denominators: Any, algorithm: Any) -> Any:
        logprobs = scripted_logprobs(batch.token_ids, self.updates)
        loss, stats = policy_objective(jnp.asarray(logprobs), batch, denominators, algorithm)
        self.shapes.append(batch.token_ids.shape)
        self.losses.append(float(loss))
        return {}, stats | {"loss": loss}, logprobs

    def next_gradient(self, total: Any, *arguments: Any) -> Any:
        return self.policy_gradient(*arguments)

    def supervised_gradient(self, state: TrainState, batch: TrainBatch, tokens: float) -> Any:
        self.supervised.append(batch.token_ids)
        return {}, 1.0, None

    def add(self, total: Any, grads: Any) -> Any:
        return grads

    def recalibrated(self, state: TrainState) -> TrainState:
        return state

    def update(self, state: TrainState, grads: Any, largest: None = None) -> tuple[TrainState, UpdateReport]:
        rng = np.random.default_rng(self.updates)
        scale = 0.3 if self.updates % 2 == 0 else 3.0  # below and above the clip
        raw = {
            name: jnp.asarray(scale * rng.normal(size=value.shape)) for name, value in self.weights.items()
        }
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            change, self.moments = self.optimizer.update(raw, self.moments, self.weights)
        self.weights = {name: value + change[name] for name, value in self.weights.items()}
        self.updates += 1
        return state, UpdateReport(1.0, ())


class ScriptedTrainer(GRPOTrainer):
    """The real trainer with `ScriptedPrograms` in both phases."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        parts = self.parts
        warm = None if parts.warm_programs is None else ScriptedPrograms(parts.warm_programs)
        self.parts: Any = dataclasses.replace(
            parts, programs=ScriptedPrograms(parts.programs), warm_programs=warm
        )
