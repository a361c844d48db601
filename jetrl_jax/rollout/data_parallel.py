"""The embedded engine on many devices: one engine each, with whole weights and its share of the requests.

Decoding needs no other device once the weights are there, so the engines run side by side, each in a thread that drives
its device; nothing waits for the longest answer of another device.  A policy version reaches them from the trainer's
shards by one resharding on the devices, codes as codes.

With several processes each drives the engines of its own devices and is given all requests; what they sampled is exchanged,
so that every process has all trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jetrl_jax import processes
from jetrl_jax.rollout.engine import Request, SamplingParams, Trajectory
from jetrl_jax.rollout.jax_engine import JaxEngine


class DataParallelEngine:
    """`RolloutEngine` over several devices.

    Args:
      build: makes the engine of one device.
      devices: one engine each; those of this process, where there are several, each with as many.
      replicate: published weights -> a whole copy on each of the devices, in their order (`Layout.replicate`).

    With `numerics.exact` a completion does not depend on the number of devices; without, its bits depend on the compiled
    shapes, as they do on one device.
    """

    def __init__(self, build: Callable[[], JaxEngine], devices: Sequence[jax.Device], replicate: Callable[[Any], list[Any]]) -> None:
        self.devices, self._replicate = tuple(devices), replicate
        self.engines = [build() for _ in self.devices]
        self._threads = ThreadPoolExecutor(len(self.devices), thread_name_prefix="rollout")

    @property
    def policy_version(self) -> int:
        """Version of the loaded weights; -1 before the first `load_weights`."""
        return self.engines[0].policy_version

    def load_weights(self, published: Any, version: int) -> None:
        """Copies published weights, split or not, to every device.

        Raises:
          ValueError: as `JaxEngine.load_weights`.
        """
        for engine, copy in zip(self.engines, self._replicate(published), strict=True):
            engine.load_weights(copy, version)

    def warmup(self) -> None:
        """Compiles every program for every device."""
        self._each(lambda engine, _: engine.warmup(), [[] for _ in self.engines])

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Trajectory]:
        """One trajectory per request, in the order of the requests, which are dealt out in even runs.

        Raises:
          RuntimeError, ValueError: as `JaxEngine.generate`.
        """
        parts = np.array_split(np.arange(len(requests)), len(self.engines) * processes.count())
        first = len(self.engines) * processes.index()
        shares = [[requests[i] for i in part] for part in parts[first : first + len(self.engines)]]
        sampled = [t for share in self._each(lambda engine, share: engine.generate(share, sampling), shares) for t in share]
        return sampled if processes.count() == 1 else _exchange(requests, sampled, self.policy_version)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def _each(self, run: Callable[[JaxEngine, Any], Any], shares: Sequence[Any]) -> list[Any]:
        """`run(engine, share)` for every engine at once, on its device."""

        def one(engine: JaxEngine, device: jax.Device, share: Any) -> Any:
            with jax.default_device(device):
                return run(engine, share)

        return list(self._threads.map(one, self.engines, self.devices, shares))


def _exchange(requests: Sequence[Request], sampled: list[Trajectory], version: int) -> list[Trajectory]:
    """The trajectories of all processes, in the order of the requests, of those that this one sampled."""
    own = {
        "lengths": np.array([len(t.completion_ids) for t in sampled], np.int64),
        "ids": np.concatenate([np.zeros(0, np.int32), *(t.completion_ids for t in sampled)]),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *(t.rollout_logprobs for t in sampled)]),
        "stopped": np.array([t.finish_reason == "stop" for t in sampled], bool),
    }
    everywhere = processes.exchange(own)
    lengths, ids, logprobs, stopped = (np.concatenate([given[name] for given in everywhere]) for name in own)
    ends = np.cumsum(lengths)
    return [
        Trajectory(
            request.id,
            np.array(request.prompt_ids, np.int32),
            ids[end - length : end],
            logprobs[end - length : end],
            "stop" if by_token else "length",
            version,
        )
        for request, length, end, by_token in zip(requests, lengths, ends, stopped, strict=True)
    ]
