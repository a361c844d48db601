"""What a rollout gives to a training step: groups of completions with their rewards,
and what is logged of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jetrl_jax.collect.prompts import Prompt
from jetrl_jax.rl import metrics as rl_metrics
from jetrl_jax.rl.advantages import in_rows
from jetrl_jax.rollout.types import Trajectory

Failures = dict[str, dict[str, int]]


@dataclass(frozen=True, eq=False)
class Group:
    """Completions of one prompt, which are compared with each other.

    trajectories: G of them; texts: what they decode to.
    rewards: float64 [G], NaN where a reward failed.
    parts: by reward function, float64 [G], NaN where it failed.
    """

    prompt: Prompt
    trajectories: list[Trajectory]
    texts: list[str]
    rewards: np.ndarray
    parts: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """The groups of one step; by reward function how many samples failed for which cause;
    how many rounds were sampled.
    """

    groups: list[Group]
    failures: Failures
    rounds: int = 1

    @property
    def trajectories(self) -> list[Trajectory]:
        """Of all groups, one after the other."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def rewards(self) -> np.ndarray:
        """float64, in the order of `trajectories`."""
        return np.concatenate([group.rewards for group in self.groups])

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """By reward function, in the order of `trajectories`."""
        return {
            name: np.concatenate([group.parts[name] for group in self.groups])
            for name in self.groups[0].parts
        }


def add_failures(one: Failures, other: Failures) -> Failures:
    """Both counts together."""
    return {
        name: {kind: one[name].get(kind, 0) + other[name].get(kind, 0) for kind in one[name] | other[name]}
        for name in one
    }


def nonfinite_part(batch: RolloutBatch) -> str | None:
    """The name of what is not finite in what was sampled, or None;
    a sample without a reward is no such thing.
    """
    if not all(np.isfinite(t.sampled_logprobs).all() for t in batch.trajectories):
        return "rollout_logprobs"
    return None


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Rewards (before shaping), lengths and counts of a batch."""
    trajectories = batch.trajectories
    rewards = in_rows(batch.rewards, [len(group.trajectories) for group in batch.groups], np.nan)
    row = rl_metrics.reward_metrics(rewards, ~np.isnan(rewards)) | rl_metrics.reward_part_metrics(batch.parts)
    row |= rl_metrics.length_metrics(
        [t.sampled_tokens for t in trajectories],
        [len(t.prompt_ids) for t in trajectories],
        [t.finish_reason for t in trajectories],
    )
    for name, failures in batch.failures.items():
        row |= {f"count/reward_{name}_{kind}": count for kind, count in failures.items()}
    row["count/prompts"] = len(batch.groups)
    row["count/completions"] = len(trajectories)
    row["count/rollout_tokens"] = sum(t.sampled_tokens for t in trajectories)
    row["count/generation_rounds"] = batch.rounds
    return row
