"""The output of a rollout, groups of completions with their rewards, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jetrl_jax.collect.episodes import Episode, episode_metrics
from jetrl_jax.collect.prompts import Prompt
from jetrl_jax.rl import metrics as rl_metrics
from jetrl_jax.rl.advantages import in_rows
from jetrl_jax.rollout.types import Trajectory

Failures = dict[str, dict[str, int]]
ENVIRONMENT_REWARD = "task"  # the name of the sum of an episode's rewards


@dataclass(frozen=True, eq=False)
class Group:
    """The G completions of one prompt, whose rewards are compared with each other.

    trajectories, texts: the completions as tokens and as decoded text.
    rewards: float64 [G], NaN where a reward failed.
    parts: reward function -> its rewards, float64 [G], NaN where it failed.
    episodes: those of the trajectories; none without an environment.
    """

    prompt: Prompt
    trajectories: list[Trajectory]
    texts: list[str]
    rewards: np.ndarray
    parts: Mapping[str, np.ndarray]
    episodes: Sequence[Episode] = ()

    def turn_rewards(self, weights: Mapping[str, float]) -> list[np.ndarray]:
        """Of each episode the weighted reward of each of the policy's turns, float64 [turns].

        Reward functions other than the environment's see the whole episode and belong to its last turn.  A
        function of weight 0 is left out, as in the total, so that it may fail.
        """
        others = np.zeros(len(self.trajectories))
        for name, values in self.parts.items():
            if name != ENVIRONMENT_REWARD and weights[name] != 0.0:
                others += weights[name] * values
        rewards = []
        for trajectory, episode, rest in zip(self.trajectories, self.episodes, others, strict=True):
            turns = np.zeros(sum(turn.role == "policy" for turn in trajectory.turns))
            turns[: len(episode.rewards)] = weights[ENVIRONMENT_REWARD] * np.array(episode.rewards)
            turns[-1] += rest
            rewards.append(turns)
        return rewards


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """The groups of one step.

    failures: reward function -> cause -> number of samples that failed.
    rounds: how many times prompts were sampled to fill the batch.
    counts: of the engine's work (`RolloutEngine.counts`), over all rounds.
    """

    groups: list[Group]
    failures: Failures
    rounds: int = 1
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of all groups, one group after the other."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def rewards(self) -> np.ndarray:
        """The rewards of all groups, float64, in the order of `trajectories`."""
        return np.concatenate([group.rewards for group in self.groups])

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """Reward function -> its rewards, in the order of `trajectories`."""
        return {
            name: np.concatenate([group.parts[name] for group in self.groups])
            for name in self.groups[0].parts
        }


def add_failures(one: Failures, other: Failures) -> Failures:
    """The sum of two failure counts."""
    return {
        name: {kind: one[name].get(kind, 0) + other[name].get(kind, 0) for kind in one[name] | other[name]}
        for name in one
    }


def nonfinite_part(batch: RolloutBatch) -> str | None:
    """The name of the part of a batch that is not finite, or None; missing rewards (NaN) are allowed."""
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
    if episodes := [episode for group in batch.groups for episode in group.episodes]:
        row |= episode_metrics(episodes)
    return row | (speculation_metrics(batch.counts) if batch.counts else {})


def speculation_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Metrics of `RolloutEngine.counts` of an engine with a draft."""
    drafted, accepted, verified = (counts[name] for name in ("drafted", "accepted", "verified"))
    row = {
        "speculation/drafted_tokens": drafted,
        "speculation/accepted_tokens": accepted,
        "speculation/length_mean": counts["asked"] / max(verified, 1),
        "speculation/tokens_per_step": 1 + accepted / max(verified, 1),
    }
    if drafted:
        row["speculation/accepted_fraction"] = accepted / drafted
    for name, count in counts.items():
        kind, _, place = name.partition("_")
        if kind == "drafted" and place and count:
            row[f"speculation/accepted_{place}_fraction"] = counts[f"accepted_{place}"] / count
    return row
