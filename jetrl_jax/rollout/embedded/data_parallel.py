"""The embedded engine on many devices: an engine for each copy of the policy, with its share of the requests.

A copy lies on one device, or on those that its layers are split over.  Decoding needs no other copy once the weights are
there, so the engines run side by side, each in a thread that drives its devices; nothing waits for the longest answer of
another copy.  A policy version reaches them from the trainer's shards by one resharding on the devices, codes as codes.

With several processes each drives the engines of its own devices and is given all requests; what they sampled is exchanged,
so that every process has all trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax import nnx

from jetrl_jax.devices import processes
from jetrl_jax.devices.layout import Layout
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory


class DataParallelEngine:
    """`RolloutEngine` over several devices.

    Args:
      build: makes the engine of one copy, given its layout.
      copies: the layout of each (`Layout.copies`).
      replicate: published weights -> those of each copy, in the same order (`Layout.replicate`).

    With `numerics.exact` a completion does not depend on the number of devices; without, its bits depend on the compiled
    shapes, as they do on one device.
    """

    def __init__(
        self, build: Callable[[Layout], JaxEngine], copies: Sequence[Layout], replicate: Callable[[nnx.State], list[nnx.State]]
    ) -> None:
        self._replicate = replicate
        self.engines = [build(copy) for copy in copies]
        self._first_devices = [copy.mesh.devices.flat[0] for copy in copies]
        self._threads = ThreadPoolExecutor(len(copies), thread_name_prefix="rollout")

    @property
    def policy_version(self) -> int:
        """Version of the loaded weights; -1 before the first `load_weights`."""
        return self.engines[0].policy_version

    def load_weights(self, published: nnx.State, version: int) -> None:
        """Copies published weights, split or not, to the devices of every engine.

        Raises:
          ValueError: as `JaxEngine.load_weights`.
        """
        for engine, copy in zip(self.engines, self._replicate(published), strict=True):
            engine.load_weights(copy, version)

    def warmup(self) -> None:
        """Compiles every program for every engine."""
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

    def sleep(self) -> None:
        """As `JaxEngine.sleep`."""

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def _each(self, run: Callable[[JaxEngine, Any], Any], shares: Sequence[Any]) -> list[Any]:
        """`run(engine, share)` for every engine at once, what has no place yet on its first device."""

        def one(engine: JaxEngine, device: jax.Device, share: Any) -> Any:
            with jax.default_device(device):
                return run(engine, share)

        return list(self._threads.map(one, self.engines, self._first_devices, shares))


def _exchange(requests: Sequence[Request], sampled: list[Trajectory], version: int) -> list[Trajectory]:
    """The trajectories of all processes, in the order of the requests, of those that this one sampled."""
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
