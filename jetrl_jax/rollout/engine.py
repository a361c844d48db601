"""The interface of a rollout engine, which takes weights by version and requests, and returns trajectories.

    load        takes a published policy version, and calls every hook of `after_load` on it
    submit      takes requests, which are checked at once
    results     yields their trajectories as they finish; generate = submit + results, in the order requested
    score       returns log-probabilities of given tokens
    sleep       announces that nothing is requested until the next `load`, so that memory may be freed
    close       ends the engine

An engine samples completions from one policy version.  For every sampled token it reports the log-probability
over the full vocabulary at the sampling temperature.  Token ids go from here to the loss unchanged; nothing
is tokenised again.

An engine that `streams` also takes replies.  A conversation begins with a request, and each of its
trajectories gets one reply, the next request of the same id or the end.  Other sequences go on meanwhile.

Only one submission is active at a time.  It ends when its results are read, when reading raises, or when the
iterator is closed or dropped.  Requests without a result are then dropped, and the engine takes the next
submission.  Requests are never lost otherwise, as any call while results are unread is an error.

Engines: `rollout.embedded.jax_engine`, `rollout.embedded.data_parallel`, `bridge.vllm.in_process`,
`bridge.vllm.server`.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32

from jetrl_jax.rollout.manifest import Manifest
from jetrl_jax.rollout.types import MAX_SEED, Request, SamplingParams, Trajectory, is_whole

SHOWN = 5
Results = Generator[Trajectory, None, None]


@dataclass(frozen=True)
class LoadReport:
    """The report of a `load`.

    version: of the weights; seconds: time to transfer them, without the hooks.
    manifest: of the transferred tensors; None if the engine multiplies the trainer's own arrays.
    """

    version: int
    seconds: float
    manifest: Manifest | None = None


@dataclass(frozen=True)
class Reply:
    """What follows a trajectory of a conversation.

    id: of the request that the trajectory answered.
    request: with the same id; its prompt begins with all tokens of the trajectory.  None: the
      conversation is over.
    """

    id: int
    request: Request | None = None


class Replies(Protocol):
    """Where an engine asks for replies; each trajectory gets exactly one."""

    def take(self, *, wait: bool) -> Sequence[Reply]:
        """The replies that are there; if `wait`, at least one, as a trajectory is still without."""
        ...


def check_kinds(requests: Sequence[Request]) -> None:
    """Raises ValueError for prompts that are not sequences of whole numbers, invalid seeds and lengths."""
    problems = []
    # the prompts of a group are often the same list
    prompts = {id(request.prompt_ids): request.prompt_ids for request in requests}
    kinds = {key: _kind_of_ids(ids) for key, ids in prompts.items()}
    for request in requests:
        if (kind := kinds[id(request.prompt_ids)]) is not None:
            problems.append(
                f"request {request.id}: got prompt_ids of {kind}, expected a sequence of whole numbers"
            )
        if not is_whole(request.seed) or not 0 <= request.seed <= MAX_SEED:
            problems.append(
                f"request {request.id}: got seed={request.seed!r}, expected a whole number from 0 to "
                "2**32 - 1"
            )
        if request.max_tokens is not None and (not is_whole(request.max_tokens) or request.max_tokens < 1):
            problems.append(
                f"request {request.id}: got max_tokens={request.max_tokens!r}, expected a whole number from "
                "1 on, or None"
            )
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError("submit: bad request: " + "; ".join(problems[:SHOWN]) + more + ".")


def _kind_of_ids(ids: Any) -> str | None:
    """The kind of values given instead of token ids; None if they are whole numbers, or empty."""
    try:
        array = np.asarray(ids)
    except ValueError:
        return "unequal parts"
    if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
        return None
    return f"{array.dtype} {array.shape}"


def check_sequences(sequences: Sequence[Sequence[int]], longest: int, vocab_size: int) -> None:
    """Raises ValueError for token ids that an engine for sequences of up to `longest` tokens cannot score."""
    problems = []
    for place, ids in enumerate(sequences):
        if not 0 < len(ids) <= longest:
            problems.append(
                f"sequence {place}: got {len(ids)} tokens, expected 1 to max_prompt_tokens + "
                f"max_completion_tokens = {longest}"
            )
        elif not 0 <= min(ids) <= max(ids) < vocab_size:
            problems.append(
                f"sequence {place}: got a token id outside 0 .. vocab_size - 1 = {vocab_size - 1}"
            )
    if problems:
        raise ValueError("score: bad sequence: " + "; ".join(problems[:SHOWN]) + ".")


def too_long(requests: Sequence[Request], sampling: SamplingParams, longest: int) -> list[str]:
    """The requests whose prompt and completion may exceed `longest` tokens, in words."""
    return [
        f"request {request.id}: got {len(request.prompt_ids)} tokens of prompt and up to "
        f"{request.limit(sampling)} more, expected at most {longest} in all"
        for request in requests
        if len(request.prompt_ids) + request.limit(sampling) > longest
    ]


AfterLoad = Callable[[Any, LoadReport], None]  # (published weights, report)


class RolloutEngine(abc.ABC):
    """Samples from one policy version at a time.

    An engine implements `check`, `describe`, `_load`, `_sample` and `_score`, and if it holds resources also
    `_sleep` and `_close`.

    Attributes:
      streams: whether `submit` takes replies.
      after_load: hooks called in order at the end of each `load`; they may score, and stop the load by
        raising.
    """

    streams = False

    def __init__(self) -> None:
        self.after_load: list[AfterLoad] = []
        self._version = -1
        self._accepted = False  # by the hooks
        self._loading = self._sleeping = False
        self._closed = False
        self._submitted: tuple[list[Request], SamplingParams, Replies | None] | None = None
        self._reading: weakref.ref[Results] | None = None

    @property
    def policy_version(self) -> int:
        """The version of the loaded weights; -1 before the first `load`."""
        return self._version

    def load(self, published: Any, version: int) -> LoadReport:
        """Takes weights made by `PrecisionPlan.publish`, and calls the hooks on them.

        If the weights are refused, the previous version stays loaded unless the engine documents otherwise.
        If a hook raises, the new weights are held and may be scored, but nothing is sampled until a `load`
        succeeds.

        Raises:
          RuntimeError: results are unread, the engine is closed, or a hook calls `load`.
          ValueError: the version is not a whole number from 0 on.
        """
        self._require("load", weights=False)
        if self._loading:
            raise RuntimeError(
                f"load: version {self._version} is being loaded: got a load(...) by one of its hooks, "
                "expected it to raise."
            )
        if not is_whole(version) or version < 0:
            raise ValueError(f"load: got version={version!r}, expected a whole number from 0 on.")
        start = time.perf_counter()
        self._loading = True
        try:
            manifest = self._load(published, version)
            report = LoadReport(version, time.perf_counter() - start, manifest)
            self._version = version
            self._accepted = False
            self._sleeping = False
            # a copy, as a hook may remove itself
            for hook in tuple(self.after_load):
                hook(published, report)
            self._accepted = True
        finally:
            self._loading = False
        return report

    def submit(
        self, requests: Sequence[Request], sampling: SamplingParams, replies: Replies | None = None
    ) -> None:
        """Takes any number of requests; `results` yields their trajectories.

        Work begins when the first result is read.

        replies: answers each trajectory, in the thread that reads the results and after it was yielded; None:
          a trajectory ends its request.

        Raises:
          NotImplementedError: replies, and this engine does not stream.
          RuntimeError: results of an earlier submission are unread, no weights are loaded and accepted, the
            engine sleeps or is closed.
          ValueError: an id occurs twice, or this engine cannot answer a request; no request is taken.
        """
        requests = list(requests)  # an iterator can be read only once
        self._require("submit")
        if replies is not None and not self.streams:
            raise NotImplementedError(
                f"submit: {type(self).__name__} takes no replies: got some, expected None. Episodes run in "
                "lockstep here."
            )
        if not self._accepted:
            raise RuntimeError(
                f"submit: policy version {self._version} was not accepted by the hooks of load(...), "
                "expected a load(...) that succeeds."
            )
        twice = [
            identity for identity, count in Counter(request.id for request in requests).items() if count > 1
        ]
        if twice:
            raise ValueError(
                f"submit: ids stand twice: got {twice[:SHOWN]}, expected each request with an id of its own."
            )
        check_kinds(requests)
        self.check(requests, sampling)
        self._submitted = requests, sampling, replies

    def results(self) -> Results:
        """The trajectories of the submitted requests, in the order in which they finish.

        If the iterator is closed or dropped, or raises, unanswered requests are dropped.

        Raises:
          RuntimeError: nothing was submitted, or the results are already being read; while reading, if the
            engine left out a request.
        """
        if self._submitted is None:
            raise RuntimeError(
                "results: nothing to read: got no submit(...) since the last results(), expected one before."
            )
        submitted = self._submitted
        self._submitted = None
        reading = self._answers(*submitted)
        self._reading = weakref.ref(reading)
        return reading

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Trajectory]:
        """One trajectory per request, in the order of the requests; errors as `submit` and `results`."""
        requests = list(requests)
        self.submit(requests, sampling)
        with contextlib.closing(self.results()) as results:
            done = {trajectory.request_id: trajectory for trajectory in results}
        return [done[request.id] for request in requests]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Float32[np.ndarray, " length"]]:
        """Log-probabilities of each sequence's tokens given those before, at temperature 1; entry 0 is 0.

        Raises:
          RuntimeError: as `submit`, except that hooks need not have accepted the weights.
          ValueError: this engine cannot take a sequence.
        """
        self._require("score")
        given = list(sequences)
        kinds = [(place, kind) for place, ids in enumerate(given) if (kind := _kind_of_ids(ids)) is not None]
        if kinds:
            found = "; ".join(f"sequence {place}: got {kind}" for place, kind in kinds[:SHOWN])
            raise ValueError(f"score: bad sequence: {found}, expected sequences of whole numbers.")
        return self._score([np.asarray(ids).tolist() for ids in given])

    def sleep(self) -> None:
        """Announces that nothing is sampled until the next `load`; an engine may free its memory.

        Raises:
          RuntimeError: results are unread, the engine is closed, or a hook of `load` calls this.
        """
        self._require("sleep", weights=False)
        if self._loading:
            raise RuntimeError(
                f"sleep: version {self._version} is being loaded: got sleep() by one of its hooks, "
                "expected it after load(...)."
            )
        self._sleeping = True
        self._sleep()

    @abc.abstractmethod
    def check(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Raises ValueError that names all requests which this engine cannot answer."""

    @abc.abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """A description of the engine as JSON values, for the run's record and certificates."""

    def load_draft(self, head: Any) -> None:
        """Takes the weights of a `DraftHead`, on which no distribution depends; after `load`.

        Raises:
          NotImplementedError: this engine has no draft with weights.
        """
        raise NotImplementedError(
            f"load_draft: no draft with weights: got {type(self).__name__}, expected an engine with one."
        )

    def counts(self) -> Mapping[str, int]:
        """Counts of the last submission's work for the metrics of a step; most engines have none."""
        return {}

    def close(self) -> None:
        """Ends the engine and drops unanswered requests; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._submitted = None
        self.after_load.clear()  # a hook may hold this engine
        reading = self._active()
        if reading is not None and inspect.getgeneratorstate(reading) != inspect.GEN_RUNNING:
            reading.close()
        self._close()

    # What an engine implements

    @abc.abstractmethod
    def _load(self, published: Any, version: int) -> Manifest | None:
        """Takes weights, whole or not at all; returns the manifest of the transferred tensors."""

    @abc.abstractmethod
    def _sample(self, requests: list[Request], sampling: SamplingParams) -> Results:
        """Yields the trajectories of checked requests; leaves the engine free when it ends in any way."""

    def _converse(self, requests: list[Request], sampling: SamplingParams, replies: Replies) -> Results:
        """As `_sample`, with replies, which are checked; of an engine that streams."""
        raise NotImplementedError

    @abc.abstractmethod
    def _score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """As `score`."""

    def _sleep(self) -> None:  # noqa: B027  # not abstract: not every engine has memory of its own
        """Frees the memory that can be freed."""

    def _close(self) -> None:  # noqa: B027  # nor something that runs outside
        """Ends everything that runs outside this object."""

    # Checks of the state

    def _require(self, what: str, *, weights: bool = True) -> None:
        """Raises RuntimeError if a call is not allowed now; `weights`: whether it needs loaded weights."""
        if self._closed:
            raise RuntimeError(f"{what}: the engine is closed.")
        if self._submitted is not None or self._active() is not None:
            raise RuntimeError(
                f"{what}: results are unread: got a submission under way, expected results() read to "
                "the end, or closed."
            )
        if weights and self._version < 0:
            raise RuntimeError(
                f"{what}: no weights: got policy_version={self._version}, expected load(...) before."
            )
        if weights and self._sleeping:
            raise RuntimeError(
                f"{what}: the engine sleeps: got no load(...) since sleep(), expected one before."
            )

    def _active(self) -> Results | None:
        """The iterator of a submission that has not ended."""
        reading = None if self._reading is None else self._reading()
        return (
            None if reading is None or inspect.getgeneratorstate(reading) == inspect.GEN_CLOSED else reading
        )

    def _answers(self, requests: list[Request], sampling: SamplingParams, replies: Replies | None) -> Results:
        """`_sample` or `_converse`, checked to yield one trajectory per request."""
        waiting = {request.id for request in requests}
        checked = None if replies is None else _Checked(self, sampling, replies, waiting)
        sampling_all = (
            self._sample(requests, sampling)
            if checked is None
            else self._converse(requests, sampling, checked)
        )
        with contextlib.closing(sampling_all) as sampled:
            for trajectory in sampled:
                if trajectory.request_id not in waiting:
                    raise RuntimeError(
                        f"results: got a trajectory of request {trajectory.request_id}, expected one of "
                        "a request that waits."
                    )
                waiting.remove(trajectory.request_id)
                if checked is not None:
                    checked.open[trajectory.request_id] = trajectory.token_ids
                yield trajectory
        waiting |= set() if checked is None else set(checked.open)
        if waiting:
            raise RuntimeError(
                f"results: the engine left out requests: got none of {sorted(waiting)[:SHOWN]}, "
                "expected one trajectory of each."
            )


class _Checked:
    """Replies, checked: one to each trajectory, whose tokens the next prompt begins with.

    open: request id -> token ids of a trajectory without a reply.
    waiting: ids of requests without a trajectory.
    """

    def __init__(
        self, engine: RolloutEngine, sampling: SamplingParams, replies: Replies, waiting: set[int]
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._replies = replies
        self.waiting = waiting
        self.open: dict[int, np.ndarray] = {}

    def take(self, *, wait: bool) -> Sequence[Reply]:
        """As `Replies.take`.

        Raises:
          ValueError: a reply to no trajectory, a request that does not go on from it, or a bad request.
          RuntimeError: no reply, although the engine waits for one.
        """
        replies = list(self._replies.take(wait=wait))
        if wait and not replies:
            raise RuntimeError(
                f"replies: none came: got no reply for {len(self.open)} trajectories, expected one at least."
            )
        for reply in replies:
            history, request = self.open.pop(reply.id, None), reply.request
            if history is None:
                raise ValueError(f"replies: got a reply to request {reply.id}, which has no open trajectory.")
            if request is None:
                continue
            given = np.asarray(request.prompt_ids)[: len(history)]
            if request.id != reply.id or not np.array_equal(given, history):
                raise ValueError(
                    f"replies: request {request.id} does not go on: got another id or prompt, expected "
                    f"request {reply.id} with the {len(history)} tokens of its trajectory before new ones."
                )
            self.waiting.add(request.id)
        requests = [reply.request for reply in replies if reply.request is not None]
        check_kinds(requests)
        self._engine.check(requests, self._sampling)
        return replies
