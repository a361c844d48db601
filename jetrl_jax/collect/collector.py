"""The first half of a step: the engine completes prompts, and the completions are decoded and scored.

With dynamic sampling (DAPO) a group whose task rewards are all equal carries no gradient and is replaced by a
new one, for a bounded number of rounds.  Rewards are shaped later (overlong penalty), so shaping does not
influence which groups are replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jetrl_jax.collect.batch import Group, RolloutBatch, add_failures
from jetrl_jax.collect.clock import StepClock
from jetrl_jax.collect.episodes import Episode, EpisodePlayer
from jetrl_jax.collect.prompts import SEED_ROLLOUT, Prompt, PromptStream, derived_seeds
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.record.console import Console
from jetrl_jax.rewards.distributed import score
from jetrl_jax.rewards.functions import RewardFunctions
from jetrl_jax.rl.advantages import informative_groups
from jetrl_jax.rl.algorithm import ResolvedAlgorithm
from jetrl_jax.rollout.engine import RolloutEngine
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from jetrl_jax.text.tokenizer import Tokenizer

MOST_MESSAGES = 20  # distinct reward failures that a run prints; the metrics count all


@dataclass(kw_only=True)
class Collector:
    """Makes the rollout batches of a run.

    algorithm: the config's algorithm with every null resolved.
    engine: samples the completions of `prompts`, which `tokenizer` decodes and `rewards` scores.
    console: shows phases and warnings.
    player: plays the episodes of an environment; None if a prompt has one completion.
    """

    config: RunConfig
    algorithm: ResolvedAlgorithm
    engine: RolloutEngine
    rewards: RewardFunctions
    tokenizer: Tokenizer
    prompts: PromptStream
    console: Console
    player: EpisodePlayer | None = None
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

    def turn_rewards(self, batch: RolloutBatch) -> list[np.ndarray] | None:
        """The rewards of each trajectory's turns, adding up to its reward; None if credit is per episode."""
        if self.algorithm.credit == "episode":
            return None
        weights = self.rewards.weights
        return [rewards for group in batch.groups for rewards in group.turn_rewards(weights)]

    def _sample(self, step: int, round_index: int, count: int, clock: StepClock) -> RolloutBatch:
        rollout, group = self.config.rollout, self.config.rollout.group_size
        prompts = self.prompts.take(count)
        requests = [prompts[i // group] for i in range(count * group)]
        words = self.config.seed, SEED_ROLLOUT, step, round_index
        episodes: list[Episode] = []
        with self.console.phase("rollout", len(requests), "completions") as progress:
            if self.player is None:
                trajectories, counts = self._complete(requests, words, clock)
                examples = [prompt.example for prompt in requests]
            else:
                episodes, counts = self.player.play(
                    self.engine,
                    requests,
                    lambda turn: derived_seeds(len(requests), *words, turn),
                    self.player.sampling(self.config.seed, rollout.temperature),
                    clock,
                )
                trajectories = [episode.trajectory for episode in episodes]
                examples = [episode.example for episode in episodes]
            progress.advance(len(requests))
        texts = [self.tokenizer.decode(t.completion_ids.tolist()) for t in trajectories]
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
        for message in [*rewards.messages, *(f"environment: {e.failed}" for e in episodes if e.failed)]:
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
                    episodes[m],
                )
                for prompt, m in zip(prompts, members, strict=True)
            ],
            rewards.failures,
            counts=counts,
        )

    def _complete(
        self, prompts: Sequence[Prompt], words: tuple[int, ...], clock: StepClock
    ) -> tuple[list[Trajectory], Mapping[str, int]]:
        """One completion of each prompt, with noise that depends on `words`, and the engine's counts."""
        rollout = self.config.rollout
        seeds = derived_seeds(len(prompts), *words)
        requests = [Request(i, prompt.ids, seeds[i]) for i, prompt in enumerate(prompts)]
        sampling = SamplingParams(
            rollout.temperature,
            rollout.max_completion_tokens,
            tuple(self.tokenizer.eos_ids),
            self.config.seed,
        )
        with clock.phase("rollout"):
            return self.engine.generate(requests, sampling), self.engine.counts()


def _informative(batch: RolloutBatch) -> list[Group]:
    """The groups whose rewards are not all equal."""
    rewards = [group.rewards[None] for group in batch.groups]
    return [
        group
        for group, row in zip(batch.groups, rewards, strict=True)
        if informative_groups(row, ~np.isnan(row))[0]
    ]
