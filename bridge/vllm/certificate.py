"""The parity certificate: after each weight sync, proof that engine and trainer hold one policy.

    tensors   the hash of every tensor that the engine holds against the trainer's own      differences: none
    probe     |logprob(engine) - logprob(trainer)| of one fixed token sequence, the mean    at most its budget

`CertifiedEngine` wraps an engine, so that nothing samples from weights without a certificate.  A row per sync goes to
whoever records it (``certificates.jsonl`` of the run); a certificate that fails stops the run, or warns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from bridge.vllm.manifest import Manifest
from jetrl_jax.errors import RunStopped
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory

SHOWN = 5


class VllmEngine(Protocol):
    """What in-process and server engines have in common."""

    @property
    def policy_version(self) -> int:
        """Version of the loaded weights; -1 before the first."""
        ...

    @property
    def description(self) -> dict[str, Any]:
        """What runs, for the run's record."""
        ...

    log_directory: Path | None

    def load_weights(self, published: Any, version: int) -> Manifest:
        """Hands over a policy version; returns the trainer's manifest of it."""
        ...

    def held(self, names: Sequence[str]) -> Manifest:
        """The manifest of what the engine holds now."""
        ...

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Trajectory]:
        """One trajectory per request."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probabilities of given tokens."""
        ...

    def sleep(self) -> None:
        """Gives its memory back until the next `load_weights`, where its settings say so."""
        ...

    def close(self) -> None:
        """Ends the engine."""
        ...


class CertifiedEngine:
    """`RolloutEngine` that certifies each policy version before it samples from it.

    Args:
      engine: the engine itself.
      score: (published weights, token ids) -> float32 [length], the trainer's log-probabilities at temperature 1,
        entry 0 meaningless.
      probe: the token ids of the probe; empty: none is scored.
      tolerance: largest mean |difference| of the probe's log-probabilities, in nats.
      on_mismatch: "stop" raises `RunStopped`, "warn" calls `warn`.
    """

    def __init__(
        self,
        engine: VllmEngine,
        score: Callable[[Any, Sequence[int]], np.ndarray],
        probe: Sequence[int],
        *,
        tolerance: float,
        on_mismatch: Literal["stop", "warn"] = "stop",
    ) -> None:
        self.engine, self.probe, self.tolerance, self.on_mismatch = engine, list(probe), tolerance, on_mismatch
        self._score = score
        self._record: Callable[[dict[str, Any]], None] = lambda row: None
        self._warn: Callable[[str], None] = lambda message: None

    def attach(self, record: Callable[[dict[str, Any]], None], warn: Callable[[str], None], log_directory: Path | None) -> None:
        """Says where certificates, warnings and an engine's log go."""
        self._record, self._warn = record, warn
        self.engine.log_directory = log_directory

    @property
    def policy_version(self) -> int:
        """Version of the loaded weights; -1 before the first `load_weights`."""
        return self.engine.policy_version

    def load_weights(self, published: Any, version: int) -> None:
        """Hands over a policy version and certifies it.

        Raises:
          RunStopped: the certificate does not hold (`on_mismatch` "stop"), or the engine failed.
        """
        start = time.perf_counter()
        manifest = self.engine.load_weights(published, version)
        synced = time.perf_counter()
        differences = manifest.differences(self.engine.held(list(manifest.entries)))
        row: dict[str, Any] = {
            "policy_version": version,
            "engine": self.engine.description,
            "tensors": len(manifest.entries),
            "bytes": manifest.total_bytes,
            "differences": differences,
            "sync_s": synced - start,
        }
        problems = [f"{len(differences)} tensors differ: " + "; ".join(differences[:SHOWN])] if differences else []
        if self.probe:
            theirs = self.engine.score([self.probe])[0]
            gap = np.abs(self._score(published, self.probe)[1:] - theirs[1:])
            row |= {"probe_logprob_abs_mean": float(gap.mean()), "probe_logprob_abs_max": float(gap.max())}
            if not gap.mean() <= self.tolerance:
                problems.append(f"mean |logprob difference| of the probe: got {gap.mean():.3g}, expected at most {self.tolerance:g}")
        row |= {"holds": not problems, "certificate_s": time.perf_counter() - synced}
        self._record(row)
        if problems:
            message = f"weight sync of policy version {version}: engine and trainer differ: " + "; and ".join(problems)
            if self.on_mismatch == "stop":
                raise RunStopped(message + " (vllm.on_mismatch)")
            self._warn(message)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Trajectory]:
        """One trajectory per request, in the order of the requests."""
        return self.engine.generate(requests, sampling)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The engine's log-probabilities of given tokens at temperature 1; entry 0 of each is 0."""
        return self.engine.score(sequences)

    def sleep(self) -> None:
        """Gives the engine's memory to the trainer until the next `load_weights`, where `vllm.sleep` says so."""
        self.engine.sleep()

    def close(self) -> None:
        """Ends the engine."""
        self.engine.close()
