"""The parity certificate: a check after each weight sync that engine and trainer hold the same policy.

    tensors   the hash of every tensor that the engine holds equals the trainer's
    probe     the mean |logprob(engine) - logprob(trainer)| of one fixed token sequence is within its budget

`Certificate` is a hook of the engine's `after_load`, so that no weights are sampled from without a
certificate.  Each sync gives one row (in ``certificates.jsonl`` of a run).  A failed certificate stops the
run, or warns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bridge.vllm.engine import VllmEngine
from jetrl_jax.errors import RunStopped
from jetrl_jax.rollout.engine import SHOWN, LoadReport


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Certifies each policy version that `engine` has loaded.

    score: (published weights, token ids) -> float32 [length], the trainer's log-probabilities at temperature
      1; entry 0 is meaningless.
    probe: token ids of the probe; if empty, only tensors are compared.
    tolerance: largest allowed mean |difference| of the probe's log-probabilities, in nats.
    on_mismatch: "stop" raises `RunStopped`, "warn" calls `warn`.
    record: is called with the row of each certificate.
    """

    engine: VllmEngine
    score: Callable[[Any, Sequence[int]], np.ndarray]
    probe: Sequence[int]
    tolerance: float
    on_mismatch: Literal["stop", "warn"] = "stop"
    record: Callable[[dict[str, Any]], None]
    warn: Callable[[str], None]

    def __call__(self, published: Any, report: LoadReport) -> None:
        """Certifies the loaded version and records the result.

        Raises:
          RunStopped: the certificate does not hold (`on_mismatch` "stop"), or the engine failed.
        """
        start, manifest = time.perf_counter(), report.manifest
        assert manifest is not None  # an engine that copies weights reports one
        differences = manifest.differences(self.engine.held(list(manifest.entries)))
        row: dict[str, Any] = {
            "policy_version": report.version,
            "engine": self.engine.describe(),
            "tensors": len(manifest.entries),
            "bytes": manifest.total_bytes,
            "differences": differences,
            "sync_s": report.seconds,
        }
        problems = (
            [f"{len(differences)} tensors differ: " + "; ".join(differences[:SHOWN])] if differences else []
        )
        if self.probe:
            theirs = self.engine.score([self.probe])[0]
            gap = np.abs(self.score(published, self.probe)[1:] - theirs[1:])
            row |= {"probe_logprob_abs_mean": float(gap.mean()), "probe_logprob_abs_max": float(gap.max())}
            if not gap.mean() <= self.tolerance:
                problems.append(
                    f"mean |logprob difference| of the probe: got {gap.mean():.3g}, expected at most "
                    f"{self.tolerance:g}"
                )
        row |= {"holds": not problems, "certificate_s": time.perf_counter() - start}
        self.record(row)
        if problems:
            message = (
                f"weight sync of policy version {report.version}: engine and trainer differ: "
                + "; and ".join(problems)
            )
            if self.on_mismatch == "stop":
                raise RunStopped(message + " (rollout.engine.on_mismatch)")
            self.warn(message)
