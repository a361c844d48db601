"""The first half of a step: the engine completes prompts, and the completions are decoded and scored.

With dynamic sampling (DAPO) a group whose task rewards are all equal carries no gradient and is replaced by a
new one, for a bounded number of rounds.  Rewards are shaped later (overlong penalty), so shaping does not
influence which groups are replaced.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from jetrl_jax.collect.batch import Group, RolloutBatch, add_failures
from jetrl_jax.collect.prompts import SEED_ROLLOUT, PromptStream, derived_seeds
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.record.console import Console
from jetrl_jax.rewards.distributed import score
from jetrl_jax.rewards.functions import RewardFunctions
from jetrl_jax.rl.advantages import informative_groups
from jetrl_jax.rl.algorithm import ResolvedAlgorithm
from jetrl_jax.rollout.engine import RolloutEngine
from jetrl_jax.rollout.types import Request, SamplingParams
from jetrl_jax.text.tokenizer import Tokenizer

MOST_MESSAGES = 20  # distinct reward failures that a run prints; the metrics count all


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


@dataclass(kw_only=True)
class Collector:
    """Makes the rollout batches of a run.

    algorithm: the config's algorithm with every null resolved.
    engine: samples the completions of `prompts`, which `tokenizer` decodes and `rewards` scores.
    console: shows phases and warnings.
    """

    config: RunConfig
    algorithm: ResolvedAlgorithm
    engine: RolloutEngine
    rewards: RewardFunctions
    tokenizer: Tokenizer
    prompts: PromptStream
    console: Console
    _said: set[str] = field(default_factory=set)  # reward failures already printed as warnings

    def collect(self, step: int, clock: StepClock) -> RolloutBatch:
        """A batch of P groups; dynamic sampling replaces groups of equal rewards while rounds remain."""
        wanted = self.config.rollout.prompts_per_step
        batch = self._sample(step, 0, wanted, clock)
        if not self.algorithm.dynamic_sampling:
            return batch
        kept, failures, rounds, counts = _informative(batch), batch.failures, 1, Counter(batch.counts)
        while len(kept) < wanted and rounds < self.algorithm.max_generation_rounds:
            more = self._sample(step, rounds, wanted, clock)
            kept, failures, rounds = (
                kept + _informative(more),
                add_failures(failures, more.failures),
                rounds + 1,
            )
            counts.update(more.counts)
        if len(kept) < wanted:
            self.console.warn(
                f"step {step}: {len(kept)} of {wanted} groups are informative after {rounds} rounds; "
                "going on with them"
            )
        return RolloutBatch(
            kept[:wanted] or batch.groups, failures if kept else batch.failures, rounds, counts
        )

    def _sample(self, step: int, round_index: int, count: int, clock: StepClock) -> RolloutBatch:
        rollout, group = self.config.rollout, self.config.rollout.group_size
        prompts = self.prompts.take(count)
        seeds = derived_seeds(count * group, self.config.seed, SEED_ROLLOUT, step, round_index)
        requests = [Request(i, prompts[i // group].ids, seed) for i, seed in enumerate(seeds)]
        sampling = SamplingParams(
            rollout.temperature,
            rollout.max_completion_tokens,
            tuple(self.tokenizer.eos_ids),
            self.config.seed,
        )
        with self.console.phase("rollout", len(requests), "completions") as progress, clock.phase("rollout"):
            trajectories = self.engine.generate(requests, sampling)
            counts = self.engine.counts()
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
        members = [slice(first, first + group) for first in range(0, len(requests), group)]
        return RolloutBatch(
            [
                Group(
                    prompt,
                    trajectories[m],
                    texts[m],
                    rewards.total[m],
                    {name: part[m] for name, part in rewards.parts.items()},
                )
                for prompt, m in zip(prompts, members, strict=True)
            ],
            rewards.failures,
            counts=counts,
        )


def _informative(batch: RolloutBatch) -> list[Group]:
    """The groups whose rewards are not all equal."""
    rewards = [group.rewards[None] for group in batch.groups]
    return [
        group
        for group, row in zip(batch.groups, rewards, strict=True)
        if informative_groups(row, ~np.isnan(row))[0]
    ]
