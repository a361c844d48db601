"""What the trainer needs of a rollout engine: requests in, trajectories out, weights by version.

An engine samples completions from a published policy version and reports, for every sampled token, its
log-probability over the full vocabulary at the sampling temperature.  Token ids travel
from here to the loss as they are; nothing is tokenised a second time.

`jetrl_jax.rollout.embedded.jax_engine.JaxEngine` is the embedded one.  Others need only `RolloutEngine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples from one policy version at a time."""

    @property
    def policy_version(self) -> int:
        """Version of the loaded weights."""
        ...

    def load_weights(self, published: Any, version: int) -> None:
        """Takes the weights that `PrecisionPlan.publish` made; the next `generate` samples from them."""
        ...

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Trajectory]:
        """One trajectory per request, in the order of the requests."""
        ...

    def sleep(self) -> None:
        """The trainer samples nothing until the next `load_weights`: an engine with memory of its own may give it back."""
        ...
