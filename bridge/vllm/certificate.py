"""The parity certificate: after each weight sync, proof that engine and trainer hold one policy.

    tensors   the hash of every tensor that the engine holds against the trainer's own      differences: none
    probe     |logprob(engine) - logprob(trainer)| of one fixed token sequence, the mean    at most its budget

`Certificate` is a hook of the engine's `after_load`, so that nothing samples from weights without one.  A row
per sync goes to whoever records it (``certificates.jsonl`` of the run); a certificate that fails stops the
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
      1, entry 0 meaningless.
    probe: the token ids of the probe; empty: none is scored.
    tolerance: largest mean |difference| of the probe's log-probabilities, in nats.
    on_mismatch: "stop" raises `RunStopped`, "warn" calls `warn`.
    record: takes the row of each certificate.
    """

    engine: VllmEngine
    score: Callable[[Any, Sequence[int]], np.ndarray]
    probe: Sequence[int]
    tolerance: float
    on_mismatch: Literal["stop", "warn"] = "stop"
    record: Callable[[dict[str, Any]], None]
    warn: Callable[[str], None]

    def __call__(self, published: Any, report: LoadReport) -> None:
        """Compares, records, and judges.

        Raises:
          RunStopped: the certificate does not hold (`on_mismatch` "stop"), or the engine failed.
        """
        start, manifest = time.perf_counter(), report.manifest
        assert manifest is not None  # of what is copied there is one
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
