"""The trainer's side of environments in worker processes (`jetrl_jax.workers.playing`).

    what happens in reset or step     what becomes of the episode
    it raises                         it fails; the others go on
    it exceeds its time limit         its worker is killed, it fails; the others are played again and go on
    its process ends                  likewise
    it answers a history otherwise    it fails: not repeatable
    it breaks the contract            `UserError`: this is the author's error

An episode that fails has no reward, so its sample is masked like one whose reward function failed.
After `MAX_HANGS` time-outs in one call the remaining episodes of the worker fail without a try.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jetrl_jax.errors import UserError
from jetrl_jax.workers import playing
from jetrl_jax.workers.process import MAX_CRASHES, MAX_HANGS, Crashed, TimedOut, WorkerProcess

Observation = str | list[dict[str, str]]


@dataclass(frozen=True)
class Job:
    """The next answer of an environment.

    key: of the episode; it decides which worker holds the environment.
    seed: of its reset; actions: the turns so far, none for the first observation.
    digest: of the answers before, as `Answer.digest`.
    demonstrate: ask for a demonstration from `seed` instead.
    """

    key: int
    seed: int
    actions: tuple[str, ...] = ()
    digest: str = ""
    demonstrate: bool = False


@dataclass(frozen=True)
class Answer:
    """The answer of an environment to a job.

    failed: why there is none: "exception", "timeout", "not repeatable"; "" if there is one.
    message: of a failure.
    observation, reward, terminated, truncated: as gymnasium's step returns them.
    counts: calls and errors of tools in this step.
    digest: of all the answers so far.
    turns: of a demonstration, (action, answer) in order.
    """

    failed: str = ""
    message: str = ""
    observation: Observation = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    counts: Mapping[str, int] | None = None
    digest: str = ""
    turns: tuple[tuple[str, Answer], ...] = ()

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Answer:
        """The answer in a worker's message."""
        turns = tuple(
            (turn["action"], cls.of({k: v for k, v in turn.items() if k != "action"}))
            for turn in message.get("turns", ())
        )
        return cls(**{**message, "turns": turns})


class _EnvironmentProcess(WorkerProcess):
    """One worker and the episodes that it holds."""

    def __init__(self, name: str, start: Mapping[str, Any], timeout_s: float, logs: str | Path | None):
        message = {"environment": start, "served_by": playing.__name__}
        super().__init__("environment", name, message, timeout_s, log_directory=logs)
        self._sent = False
        self._lost = False  # environments that must be played again
        self.probe = Answer()

    def start(self) -> None:
        """Starts the worker; the first start with a check plays a step, whose answer is `probe`."""
        started = self._process is None
        super().start()
        if started and self._ready["probe"] is not None:
            self.probe = Answer.of(self._ready["probe"])
            self._start_message["environment"] |= {"check": False}

    def begin(self, jobs: Sequence[Job]) -> None:
        """Sends jobs, whose answers `finish` returns."""
        if jobs:
            self._awake()
            try:
                self._ask(jobs)
                self._sent = True
            except (TimedOut, Crashed):
                self._stop()

    def finish(self, jobs: Sequence[Job]) -> list[Answer]:
        """The answers; a worker that hangs or ends is started again and goes on after the job at fault."""
        answers: list[Answer] = []
        hangs = crashes = 0
        replaying = self._lost
        self._lost = False
        while len(answers) < len(jobs):
            rest = jobs[len(answers) :]
            if hangs >= MAX_HANGS or crashes >= MAX_CRASHES:
                why = f"given up after {hangs} time-outs and {crashes} crashes in one turn"
                failed = "timeout" if hangs >= MAX_HANGS else "exception"
                return [*answers, *(Answer(failed, why) for _ in rest)]
            try:
                if not self._sent:
                    replaying = self._lost = True
                    self.start()
                    self._ask(rest)
                for job in rest:
                    limit = self._timeout_s * (len(job.actions) + 1 if replaying or job.demonstrate else 1)
                    answers.append(self._checked(self._receive(limit)))
            except TimedOut:
                self._stop()
                hangs += 1
                answers.append(Answer("timeout", f"no answer within {self._timeout_s:g} s"))
            except Crashed as error:
                self._stop()
                crashes += 1
                answers.append(Answer("exception", f"its process ended: {error}"))
            self._sent = False
        return answers

    def _ask(self, jobs: Sequence[Job]) -> None:
        self._send_json({"jobs": [asdict(job) for job in jobs]}, self._timeout_s)

    def _checked(self, message: dict[str, Any]) -> Answer:
        if "bad" in message:
            self._stop()  # further answers to this request must not answer the next
            raise UserError(f"{self.what}: {message['bad'][0]}.")
        return Answer.of(message)


class EnvironmentPool:
    """Environments of one kind in worker processes, which the first call starts and `close` ends.

    Args:
      name: for messages; target: module:attribute of the class or function that makes an environment from
        `options`.
      workers: number of processes; timeout_s: limit of one reset or step.
      log_directory: directory of their output; None: temporary files.
    """

    def __init__(
        self,
        name: str,
        target: str,
        options: Mapping[str, Any],
        *,
        workers: int,
        timeout_s: float,
        log_directory: str | Path | None = None,
    ) -> None:
        start = {"target": target, "options": dict(options)}
        self._workers = [
            _EnvironmentProcess(
                name if index == 0 else f"{name}-{index}",
                start | {"check": index == 0},
                timeout_s,
                log_directory,
            )
            for index in range(workers)
        ]

    def check(self) -> Answer:
        """Starts the first worker, which plays a step; returns the answer to its empty action.

        Raises:
          UserError: the environment cannot be made or breaks its contract.
        """
        self._workers[0].start()
        return self._workers[0].probe

    def play(self, jobs: Sequence[Job]) -> list[Answer]:
        """The answers to jobs, in their order; workers run at the same time, their timing changes nothing.

        Environments of episodes without a job are closed.

        Raises:
          UserError: an environment breaks its contract.
        """
        places: list[list[int]] = [[] for _ in self._workers]
        for place, job in enumerate(jobs):
            places[job.key % len(self._workers)].append(place)
        shares = [[jobs[place] for place in share] for share in places]
        for worker, share in zip(self._workers, shares, strict=True):
            worker.begin(share)
        answers: dict[int, Answer] = {}
        for worker, share, where in zip(self._workers, shares, places, strict=True):
            answers |= zip(where, worker.finish(share), strict=True)
        return [answers[place] for place in range(len(jobs))]

    def close(self) -> None:
        """Ends the workers; a later call starts others."""
        for worker in self._workers:
            worker.close()
