"""`jetrl_jax.train` that trains what an environment wrote too: the control of ``docs/results.md``, episodes.

    python tests/benchmarks/unmasked_episodes.py --config configs/tiny_turns_cpu.yaml

Every token after the prompt gets the advantage of its episode and a log-probability, as if the policy had
sampled it; the supervised warm start and evaluations stay as they are.  The log-probabilities of observations
are the engine's scores, so that the mismatch stays 0.  All arguments are those of `jetrl_jax.train`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jetrl_jax import train
from jetrl_jax.collect.batch import RolloutBatch
from jetrl_jax.collect.clock import StepClock
from jetrl_jax.collect.collector import Collector
from jetrl_jax.commands.entry import run_entry_point
from jetrl_jax.rollout.types import Trajectory


def unmasked(trajectory: Trajectory, scores: np.ndarray) -> Trajectory:
    """The trajectory with every turn after the prompt as the policy's; `scores`: of all its tokens."""
    turns = tuple(
        turn if turn.role == "prompt" else dataclasses.replace(turn, role="policy", finish_reason=reason)
        for turn in trajectory.turns
        for reason in [turn.finish_reason or "stop"]
    )
    sampled = np.arange(len(trajectory.token_ids)) >= trajectory.turns[0].stop
    logprobs = np.where(trajectory.sampled, trajectory.logprobs, np.where(sampled, scores, 0))
    return dataclasses.replace(trajectory, sampled=sampled, logprobs=logprobs.astype(np.float32), turns=turns)


def main(argv: list[str]) -> int:
    """Replaces `Collector.collect`, and is `jetrl_jax.train` from there on."""
    collect = Collector.collect

    def collect_unmasked(self: Collector, step: int, clock: StepClock) -> RolloutBatch:
        batch = collect(self, step, clock)
        if self.config.rollout.temperature != 1:
            raise ValueError("unmasked_episodes: scores are at temperature 1: got another one.")
        known: dict[bytes, Any] = {}
        for one in batch.trajectories:
            known.setdefault(one.token_ids.tobytes(), one.token_ids)
        scores = dict(zip(known, self.engine.score(list(known.values())), strict=True))
        groups = [
            dataclasses.replace(
                group, trajectories=[unmasked(t, scores[t.token_ids.tobytes()]) for t in group.trajectories]
            )
            for group in batch.groups
        ]
        return dataclasses.replace(batch, groups=groups)

    Collector.collect = collect_unmasked  # type: ignore[method-assign]
    return train.main(argv)


if __name__ == "__main__":
    run_entry_point(main)
