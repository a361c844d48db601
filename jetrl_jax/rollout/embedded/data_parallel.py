"""The embedded engine on many devices: one engine per copy of the policy, each with a share of the requests.

A copy is on one device, or on the devices over which its layers are split.  Decoding does not need other
copies, so the engines run side by side, each in a thread that drives its devices, and do not wait for the
longest answer of another copy.  A policy version reaches them from the trainer's shards by one resharding on
the devices, with codes sent as codes.

With several processes, each drives the engines of its own devices and gets all requests.  The trajectories
are exchanged, so that every process has all of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
from flax import nnx

from jetrl_jax.devices import processes
from jetrl_jax.devices.layout import Layout
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.engine import Replies, Results, RolloutEngine
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory


class DataParallelEngine(RolloutEngine):
    """A `RolloutEngine` on several devices.

    Args:
      build: makes the engine of one copy, given its layout.
      copies: the layout of each copy (`Layout.copies`).
      replicate: published weights -> those of each copy, in the same order (`Layout.replicate`).

    With `numerics.exact` a completion does not depend on the number of devices.  Without it, its bits depend
    on the compiled shapes, as on one device.
    """

    def __init__(
        self,
        build: Callable[[Layout], JaxEngine],
        copies: Sequence[Layout],
        replicate: Callable[[nnx.State], list[nnx.State]],
    ) -> None:
        super().__init__()
        self._replicate = replicate
        self.engines = [build(copy) for copy in copies]
        self.streams = len(self.engines) == 1 and self.engines[0].streams
        self._first_devices = [copy.mesh.devices.flat[0] for copy in copies]
        self._threads = ThreadPoolExecutor(len(copies), thread_name_prefix="rollout")

    def warmup(self) -> None:
        """Compiles every program for every engine."""
        self._each(lambda engine, _: engine.warmup(), [[] for _ in self.engines])

    def describe(self) -> Mapping[str, Any]:
        """The description of one engine, and the number of engines in this process."""
        return {**self.engines[0].describe(), "copies": len(self.engines)}

    def counts(self) -> Mapping[str, int]:
        """The sum over the engines of every process, each of which must call this."""
        if not self.engines[0].counts():
            return {}
        totals: Counter[str] = Counter()
        for counts in processes.exchange_json([dict(engine.counts()) for engine in self.engines]):
            for one in counts:
                totals.update(one)
        return totals

    def _load(self, published: nnx.State, version: int) -> None:
        """Copies published weights, split or whole, to the devices of every engine; errors as `JaxEngine`."""
        for engine, copy in zip(self.engines, self._replicate(published), strict=True):
            engine.load(copy, version)

    def check(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """As one of the engines, which are alike."""
        self.engines[0].check(requests, sampling)

    def _sample(self, requests: list[Request], sampling: SamplingParams) -> Results:
        """Divides the requests evenly; yields trajectories as engines finish them.

        With several processes, yields them when all are done.
        """
        parts = np.array_split(np.arange(len(requests)), len(self.engines) * processes.count())
        first = len(self.engines) * processes.index()
        shares = [[requests[i] for i in part] for part in parts[first : first + len(self.engines)]]
        if processes.count() > 1:
            sampled = [
                t
                for share in self._each(lambda engine, share: engine.generate(share, sampling), shares)
                for t in share
            ]
            yield from _exchange(requests, sampled, self.policy_version)
            return
        done: SimpleQueue[Trajectory | None] = SimpleQueue()  # None: an engine has ended
        given_up = threading.Event()

        def run(engine: JaxEngine, share: list[Request]) -> None:
            try:
                engine.submit(share, sampling)
                with contextlib.closing(engine.results()) as results:
                    for trajectory in results:
                        done.put(trajectory)
                        if given_up.is_set():
                            return
            finally:
                done.put(None)

        calls = self._start(run, shares)
        try:
            for _ in calls:
                yield from iter(done.get, None)
        finally:
            given_up.set()
            wait(calls)
        for call in calls:
            call.result()

    def _converse(self, requests: list[Request], sampling: SamplingParams, replies: Replies) -> Results:
        """Of the only copy, whose layers may be split."""
        (engine,), (device,) = self.engines, self._first_devices
        engine.submit(requests, sampling, replies)
        with contextlib.closing(engine.results()) as results:
            while True:
                with jax.default_device(device):
                    trajectory = next(results, None)
                if trajectory is None:
                    return
                yield trajectory

    def _score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Divides the sequences among this process's engines; each process scores all."""
        shares = [
            [sequences[i] for i in part]
            for part in np.array_split(np.arange(len(sequences)), len(self.engines))
        ]
        return [
            scores
            for share in self._each(lambda engine, share: engine.score(share), shares)
            for scores in share
        ]

    def _close(self) -> None:
        """Ends the engines and their threads."""
        for engine in self.engines:
            engine.close()
        self._threads.shutdown()

    def _each(self, run: Callable[[JaxEngine, Any], Any], shares: Sequence[Any]) -> list[Any]:
        """The results of `run(engine, share)` for every engine, which run at the same time."""
        calls = self._start(run, shares)
        wait(calls)  # even if one fails, so that none is left running
        return [call.result() for call in calls]

    def _start(self, run: Callable[[JaxEngine, Any], Any], shares: Sequence[Any]) -> list[Future[Any]]:
        """Starts `run(engine, share)` for every engine in its thread, with its first device as default."""

        def one(engine: JaxEngine, device: jax.Device, share: Any) -> Any:
            with jax.default_device(device):
                return run(engine, share)

        return [
            self._threads.submit(one, *given)
            for given in zip(self.engines, self._first_devices, shares, strict=True)
        ]


def _exchange(requests: Sequence[Request], sampled: list[Trajectory], version: int) -> list[Trajectory]:
    """The trajectories of all processes, in the order of the requests; `sampled`: those of this process."""
    own = {
        "lengths": np.array([t.sampled_tokens for t in sampled], np.int64),
        "ids": np.concatenate([np.zeros(0, np.int32), *(t.token_ids[t.sampled] for t in sampled)]),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *(t.sampled_logprobs for t in sampled)]),
        "stopped": np.array([t.finish_reason == "stop" for t in sampled], bool),
    }
    everywhere = processes.exchange(own)
    lengths, ids, logprobs, stopped = (np.concatenate([given[name] for given in everywhere]) for name in own)
    ends = np.cumsum(lengths)
    return [
        Trajectory.of_completion(
            request.id,
            request.prompt_ids,
            ids[end - length : end],
            logprobs[end - length : end],
            "stop" if by_token else "length",
            version,
        )
        for request, length, end, by_token in zip(requests, lengths, ends, stopped, strict=True)
    ]
