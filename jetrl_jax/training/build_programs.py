"""The training programs that a config asks for: one definition for runs and for plans of runs."""

from __future__ import annotations

import optax

from jetrl_jax.config import RunConfig
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision import PrecisionPlan
from jetrl_jax.sharding import Layout
from jetrl_jax.training.loss_scale import LossScale
from jetrl_jax.training.optimizer import build_optimizer
from jetrl_jax.training.step import PolicyPrograms


def build_programs(
    config: RunConfig, model: Decoder, plan: PrecisionPlan, layout: Layout | None, optimizer: optax.GradientTransformation | None = None
) -> PolicyPrograms:
    """The training programs of a config; the model's parameters may be abstract.  `optimizer` None is that of the RL phase."""
    return PolicyPrograms(
        model,
        plan,
        optimizer or build_optimizer(config.optimizer, config.total_updates),
        temperature=config.rollout.temperature if optimizer is None else 1.0,
        chunk_tokens=config.batch.logprob_chunk_tokens,
        loss_scale=LossScale.start(config.loss_scale) if config.precision.preset == "fp16" else None,
        layout=layout,
    )
