"""AdamW with warm-up and decay on FP32 masters, by optax."""

from __future__ import annotations

import jax
import optax
from flax import nnx

from jetrl_jax.config.learning import OptimizerSection


def learning_rate_schedule(section: OptimizerSection, total_steps: int) -> optax.Schedule:
    """The learning rate: linear warm-up from 0, then constant, or linear or cosine decay to 0 at the end."""
    peak, warmup = section.learning_rate, section.warmup_steps
    rest = max(total_steps - warmup, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[section.schedule]
    # The first step has rate peak / (warmup + 1), not 0, so that it is not wasted.
    return (
        optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup])
        if warmup
        else after
    )


def build_optimizer(section: OptimizerSection, total_steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW with FP32 moments; vectors (norms, biases) have no weight decay."""

    def decayed(params: nnx.State) -> nnx.State:
        return jax.tree.map(lambda value: value.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(section.grad_clip),
        optax.adamw(
            learning_rate_schedule(section, total_steps),
            b1=section.b1,
            b2=section.b2,
            eps=section.eps,
            weight_decay=section.weight_decay,
            mask=decayed,
        ),
    )
