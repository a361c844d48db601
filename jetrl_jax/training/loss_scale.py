"""Dynamic loss scaling of the FP16 flow.

FP16 represents a gradient of 1e-7 poorly, but 2^15 times that well.  So the loss is multiplied by `factor`
before the backward, and the gradient is divided by it afterwards, in FP32.  If the gradient overflows, the
policy is not updated and the factor is halved; `growth_interval` good updates in a row double it.  A factor
that starts as a power of two stays one, and scaling is then exact unless a value underflows.

Source: Micikevicius et al., "Mixed Precision Training"; interval 400 for RL: "Defeating the
Training-Inference Mismatch via FP16".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jetrl_jax.config.precision import LossScaleSection

GROWTH, BACKOFF = 2.0, 0.5
SMALLEST, LARGEST = 1.0, 2.0**24  # a gradient that overflows even unscaled is not the scale's fault


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The scale of an update and its history.

    Attributes:
        factor: float32 scalar.
        good_updates: int32 scalar, number of finite updates since the factor last changed.
        growth_interval: number of finite updates in a row after which the factor doubles.
    """

    factor: jax.Array
    good_updates: jax.Array
    growth_interval: int = field(metadata={"static": True})

    @classmethod
    def start(cls, section: LossScaleSection) -> LossScale:
        """The scale of a run's first update."""
        return cls(jnp.float32(section.initial), jnp.int32(0), section.growth_interval)

    def after(self, finite: jax.Array) -> LossScale:
        """The scale of the next update, given whether this update's gradient was finite; traceable."""
        good = jnp.where(finite, self.good_updates + 1, 0)
        grow = good >= self.growth_interval
        value = jnp.where(finite, jnp.where(grow, self.factor * GROWTH, self.factor), self.factor * BACKOFF)
        return LossScale(
            jnp.clip(value, SMALLEST, LARGEST),
            jnp.where(grow, 0, good).astype(jnp.int32),
            self.growth_interval,
        )
