"""The trainer's side of environments in worker processes (`jetrl_jax.workers.playing`).

    what happens in reset or step     what becomes of the episode
    it raises                         it fails; the others go on
    it exceeds its time limit         its worker is killed, it fails; the others are played again and go on
    its process ends                  likewise
    it answers a history otherwise    it fails: not repeatable
    it breaks the contract            `UserError`: this is the author's error

An episode that fails has no reward, so its sample is masked like one whose reward function failed.
After `MAX_HANGS` time-outs or `MAX_CRASHES` crashes in one call, or in one `Conversation`, the remaining
episodes of the worker fail without a try.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
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

    hint = ". docs/environments.md has the contract of an environment."

    def __init__(self, name: str, start: Mapping[str, Any], timeout_s: float, logs: str | Path | None):
        message = {"environment": start, "served_by": playing.__name__}
        super().__init__("environment", name, message, timeout_s, log_directory=logs)
        self._sent = False
        self._held: set[int] = set()  # keys of the episodes that the present process has played
        self._hangs = self._crashes = 0  # since `begin_count`
        self.probe = Answer()

    def begin_count(self) -> None:
        """Time-outs and crashes count from here on."""
        self._hangs = 0
        self._crashes = 0

    def start(self) -> None:
        """Starts the worker; the first start with a check plays a step, whose answer is `probe`."""
        started = self._process is None
        super().start()
        if started and self._ready["probe"] is not None:
            self.probe = Answer.of(self._ready["probe"])
            self._start_message["environment"] |= {"check": False}

    @property
    def _given_up(self) -> bool:
        return self._hangs >= MAX_HANGS or self._crashes >= MAX_CRASHES

    def begin(self, jobs: Sequence[Job], keep: Sequence[int]) -> None:
        """Sends jobs, whose answers `finish` yields; closes environments of other episodes than `keep`."""
        if jobs and not self._given_up:
            self._awake()
            try:
                self._ask(jobs, keep)
                self._sent = True
            except (TimedOut, Crashed):
                self._stop()

    def finish(self, jobs: Sequence[Job], keep: Sequence[int]) -> Iterator[Answer]:
        """The answers; a worker that hangs or ends is started again and goes on after the job at fault."""
        rest = list(jobs)
        while rest:
            if self._given_up:
                self._stop()  # no reply may answer a job of the next count
                why = f"given up after {self._hangs} time-outs and {self._crashes} crashes"
                failed = "timeout" if self._hangs >= MAX_HANGS else "exception"
                yield from (Answer(failed, why) for _ in rest)
                return
            try:
                if not self._sent:
                    self.start()
                    self._ask(rest, keep)
                    self._sent = True
                answer = self._checked(self._receive(self._limit(rest[0])))
                self._held.add(rest[0].key)
            except TimedOut:
                self._stop()
                self._hangs += 1
                answer = Answer("timeout", f"no answer within {self._timeout_s:g} s")
            except Crashed as error:
                self._stop()
                self._crashes += 1
                answer = Answer("exception", f"its process ended: {error}")
            rest.pop(0)
            yield answer
        self._sent = False

    def _limit(self, job: Job) -> float:
        """Seconds for a job, whose history may have to be played again."""
        again = job.demonstrate or job.key not in self._held
        return self._timeout_s * (len(job.actions) + 1 if again else 1)

    def _stop(self) -> None:
        super()._stop()
        self._sent = False
        self._held.clear()

    def _ask(self, jobs: Sequence[Job], keep: Sequence[int]) -> None:
        self._held &= set(keep)
        self._send_json({"jobs": [asdict(job) for job in jobs], "keep": list(keep)}, self._timeout_s)

    def _checked(self, message: dict[str, Any]) -> Answer:
        if "bad" in message:
            self._stop()  # further answers to this request must not answer the next
            raise UserError(f"{self.what}: {message['bad'][0]}{self.hint}")
        return Answer.of(message)


class Conversation:
    """Jobs that are asked one by one and answered as soon as they can be, each worker in a thread of its own.

    A worker answers in the order in which it was asked.  No `EnvironmentPool.play` meanwhile.
    """

    def __init__(self, workers: Sequence[_EnvironmentProcess]) -> None:
        self._inboxes: list[SimpleQueue[tuple[Job, list[int]] | None]] = [SimpleQueue() for _ in workers]
        self._answered: SimpleQueue[tuple[int, Answer] | BaseException] = SimpleQueue()
        self._live: list[set[int]] = [set() for _ in workers]  # keys of episodes that are not over
        self._threads = [
            threading.Thread(target=self._serve, args=given, daemon=True)
            for given in zip(workers, self._inboxes, strict=True)
        ]
        for worker in workers:
            worker.begin_count()
        for thread in self._threads:
            thread.start()

    def begin(self, keys: Sequence[int]) -> None:
        """The episodes that will be asked for, whose environments are kept until `end`."""
        for key in keys:
            self._live[key % len(self._live)].add(key)

    def end(self, key: int) -> None:
        """An episode is over."""
        self._live[key % len(self._live)].discard(key)

    def ask(self, job: Job) -> None:
        """Asks for the answer to a job."""
        place = job.key % len(self._inboxes)
        self._inboxes[place].put((job, list(self._live[place])))

    def answers(self, *, wait: bool) -> list[tuple[int, Answer]]:
        """(key, answer) of jobs that are answered; if `wait`, of at least one.

        Raises:
          UserError: an environment breaks its contract.
        """
        found = [self._answered.get()] if wait else []
        while True:
            try:
                found.append(self._answered.get_nowait())
            except Empty:
                break
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if not isinstance(one, BaseException)]

    def close(self) -> None:
        """Ends the threads, after the jobs that they have; not the workers."""
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: _EnvironmentProcess, inbox: SimpleQueue[tuple[Job, list[int]] | None]) -> None:
        """Passes on all jobs that are there, until None comes or an environment breaks its contract."""
        try:
            while (given := inbox.get()) is not None:
                asked = [given]
                while not inbox.empty() and (given := inbox.get()) is not None:
                    asked.append(given)
                jobs, keep = [job for job, _ in asked], asked[-1][1]
                worker.begin(jobs, keep)
                for job, answer in zip(jobs, worker.finish(jobs, keep), strict=True):
                    self._answered.put((job.key, answer))
                if given is None:
                    return
        except BaseException as error:
            self._answered.put(error)


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
            worker.begin_count()
            worker.begin(share, [job.key for job in share])
        answers: dict[int, Answer] = {}
        for worker, share, where in zip(self._workers, shares, places, strict=True):
            answers |= zip(where, worker.finish(share, [job.key for job in share]), strict=True)
        return [answers[place] for place in range(len(jobs))]

    def conversation(self) -> Conversation:
        """Jobs one by one, with the environments as `play` left them."""
        return Conversation(self._workers)

    def close(self) -> None:
        """Ends the workers; a later call starts others."""
        for worker in self._workers:
            worker.close()
