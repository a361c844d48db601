"""The first half of a step: prompts are sampled from the engine, decoded and scored; groups without a signal replaced.

With dynamic sampling (DAPO) a group whose task rewards are all equal carries no gradient and is replaced by a new
one, for a bounded number of rounds.  Shaping of rewards (overlong penalty) comes later and does not enter that choice.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jetrl_jax.collect.prompts import SEED_ROLLOUT, Prompt, PromptStream, derived_seeds
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.record.console import Console
from jetrl_jax.rewards.functions import RewardFunctions, RewardResult
from jetrl_jax.rewards.scoring import score
from jetrl_jax.rl import metrics as rl_metrics
from jetrl_jax.rl.advantages import informative_groups
from jetrl_jax.rl.algorithm import ResolvedAlgorithm
from jetrl_jax.rollout.engine import RolloutEngine
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from jetrl_jax.text.tokenizer import Tokenizer

MOST_MESSAGES = 20  # distinct failures of reward functions that a run tells; the metrics count all


@dataclass
class RolloutBatch:
    """P prompts with G completions each, prompt-major, and their rewards."""

    prompts: list[Prompt]
    trajectories: list[Trajectory]
    texts: list[str]
    rewards: RewardResult
    rounds: int = 1


@dataclass
class StepClock:
    """Seconds of each phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds of the block to phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Collector:
    """Makes the rollout batches of a run; see `jetrl_jax.training.step.Trainer` for the parts."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: ResolvedAlgorithm,
        engine: RolloutEngine,
        rewards: RewardFunctions,
        tokenizer: Tokenizer,
        prompts: PromptStream,
        console: Console,
    ) -> None:
        self.config, self.algorithm, self.engine, self.rewards = config, algorithm, engine, rewards
        self.tokenizer, self.prompts, self.console = tokenizer, prompts, console
        self._said: set[str] = set()  # failures of reward functions that a warning has told

    def collect(self, step: int, clock: StepClock) -> RolloutBatch:
        """A batch of P groups; with dynamic sampling, groups whose rewards are all equal are replaced while rounds last."""
        wanted = self.config.rollout.prompts_per_step
        batch = self._sample(step, 0, wanted, clock)
        if not self.algorithm.dynamic_sampling:
            return batch
        kept = self._informative(batch)
        rounds = 1
        while len(kept.prompts) < wanted and rounds < self.algorithm.max_generation_rounds:
            more = self._informative(self._sample(step, rounds, wanted, clock))
            kept = _concatenate(kept, more)
            rounds += 1
        if len(kept.prompts) < wanted:
            self.console.warn(
                f"step {step}: {len(kept.prompts)} of {wanted} groups are informative after {rounds} rounds; going on with them"
            )
        batch = _select(kept, range(min(wanted, len(kept.prompts)))) if kept.prompts else batch
        batch.rounds = rounds
        return batch

    def _sample(self, step: int, round_index: int, count: int, clock: StepClock) -> RolloutBatch:
        rollout, group = self.config.rollout, self.config.rollout.group_size
        prompts = self.prompts.take(count)
        seeds = derived_seeds(count * group, self.config.seed, SEED_ROLLOUT, step, round_index)
        requests = [Request(i, prompts[i // group].ids, seed) for i, seed in enumerate(seeds)]
        sampling = SamplingParams(rollout.temperature, rollout.max_completion_tokens, tuple(self.tokenizer.eos_ids), self.config.seed)
        with self.console.phase("rollout", len(requests), "completions") as progress, clock.phase("rollout"):
            trajectories = self.engine.generate(requests, sampling)
            progress.advance(len(requests))
        texts = [self.tokenizer.decode(t.completion_ids.tolist()) for t in trajectories]
        examples = [prompts[i // group].example for i in range(len(requests))]
        opened = [prompt.opens_thought(self.tokenizer) for prompt in prompts]
        with self.console.phase("reward", len(requests), "completions") as progress, clock.phase("reward"):
            rewards = score(
                self.rewards,
                group,
                [example.prompt for example in examples],
                texts,
                examples,
                [t.finish_reason for t in trajectories],
                [t.completion_ids.tolist() for t in trajectories],
                [opened[i // group] for i in range(len(requests))],
            )
            progress.advance(len(requests))
        for message in rewards.messages:
            if message not in self._said and len(self._said) < MOST_MESSAGES:
                self._said.add(message)
                self.console.warn(f"step {step}: {message}")
        return RolloutBatch(prompts, trajectories, texts, rewards)

    def _informative(self, batch: RolloutBatch) -> RolloutBatch:
        rewards = batch.rewards.total.reshape(len(batch.prompts), -1)
        return _select(batch, np.flatnonzero(informative_groups(rewards, ~np.isnan(rewards))))


def nonfinite_part(batch: RolloutBatch) -> str | None:
    """The name of what is not finite in what was sampled, or None; a sample without a reward is no such thing."""
    if not all(np.isfinite(t.logprobs).all() for t in batch.trajectories):
        return "rollout_logprobs"
    return None


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Rewards (before shaping), lengths and counts of a batch."""
    trajectories, rewards = batch.trajectories, batch.rewards
    total = rewards.total.reshape(len(batch.prompts), -1)
    row = rl_metrics.reward_metrics(total, ~np.isnan(total)) | rl_metrics.reward_part_metrics(rewards.parts)
    row |= rl_metrics.length_metrics(
        [t.sampled_tokens for t in trajectories],
        [len(t.prompt_ids) for t in trajectories],
        [t.finish_reason for t in trajectories],
    )
    for name, failures in rewards.failures.items():
        row |= {f"count/reward_{name}_{kind}": count for kind, count in failures.items()}
    row["count/prompts"], row["count/completions"] = len(batch.prompts), len(trajectories)
    row["count/rollout_tokens"] = sum(t.sampled_tokens for t in trajectories)
    row["count/generation_rounds"] = batch.rounds
    return row


def _select(batch: RolloutBatch, prompts: Any) -> RolloutBatch:
    """The groups with these indices."""
    group = len(batch.trajectories) // len(batch.prompts)
    samples = [p * group + g for p in prompts for g in range(group)]
    rewards = dataclasses.replace(
        batch.rewards,
        total=batch.rewards.total[samples],
        parts={name: values[samples] for name, values in batch.rewards.parts.items()},
    )
    return RolloutBatch(
        [batch.prompts[p] for p in prompts],
        [batch.trajectories[s] for s in samples],
        [batch.texts[s] for s in samples],
        rewards,
        batch.rounds,
    )


def _concatenate(a: RolloutBatch, b: RolloutBatch) -> RolloutBatch:
    """Both batches' groups; failures of reward functions add up."""
    failures = {
        name: {
            kind: a.rewards.failures[name].get(kind, 0) + b.rewards.failures[name].get(kind, 0) for kind in kinds | a.rewards.failures[name]
        }
        for name, kinds in b.rewards.failures.items()
    }
    rewards = dataclasses.replace(
        a.rewards,
        total=np.concatenate([a.rewards.total, b.rewards.total]),
        parts={name: np.concatenate([values, b.rewards.parts[name]]) for name, values in a.rewards.parts.items()},
        failures=failures,
    )
    return RolloutBatch(a.prompts + b.prompts, a.trajectories + b.trajectories, a.texts + b.texts, rewards)
