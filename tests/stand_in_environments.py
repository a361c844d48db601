"""Environments that answer in this process, in place of an `EnvironmentPool` and its `Conversation`."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from jetrl_jax.workers.environments import Answer, Job


class StandInEnvironments(abc.ABC):
    """Notes what is asked of it; a test's class says what is answered (`answer`) and when (`answers`)."""

    def __init__(self) -> None:
        self.asked: list[Job] = []
        self.live: set[int] = set()

    @abc.abstractmethod
    def answer(self, job: Job) -> Answer:
        """The answer to a job."""

    def play(self, jobs: Sequence[Job]) -> list[Answer]:
        return [self.answer(job) for job in jobs]

    def conversation(self) -> StandInEnvironments:
        return self

    def begin(self, keys: Sequence[int]) -> None:
        self.live = set(keys)

    def end(self, key: int) -> None:
        self.live.remove(key)

    def ask(self, job: Job) -> None:
        self.asked.append(job)

    @abc.abstractmethod
    def answers(self, *, wait: bool) -> list[tuple[int, Answer]]:
        """(key, answer) of some jobs that were asked; of at least one if `wait`."""

    def close(self) -> None:
        assert not self.asked and not self.live, "every environment has answered and ended"
