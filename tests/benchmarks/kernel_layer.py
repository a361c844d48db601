"""A whole decoder layer of Qwen3-8B, forward and backward, for ``python -m pallas_kernels.bench layer
--rivals`` this file.

The trainer's own `DecoderLayer` under its own precision plan, FP8 flow against BF16, one program each: norms,
attention, SiLU, the seven linear layers and all quantisation of activations and gradients. Weights are
published before the clock starts, as the trainer does once per policy version, and the BF16 layer casts its
FP32 masters inside, as it does there. Gradients reach the masters in FP32. Rows are sequences of up to 4,096
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bridge.hf.read import read_config
from jetrl_jax.models import ops
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.decoder import DecoderLayer
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.precision.plan import PrecisionPlan
from pallas_kernels.measure import Contender, jax_contender

MODEL, SEQUENCE_TOKENS = Path(__file__).parents[2] / "configs/models/qwen3_8b", 4096
FLOWS = {f"fp8, wgrad {operand}": ("fp8_unified", operand) for operand in ("requantize", "dual", "block")} | {
    "jax bf16": ("bf16", "dual")
}
"""{contender: (preset, WGrad operand)}."""


class OneLayer(nnx.Module):
    """A decoder layer under the path that the precision plan knows it by."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        self.layers = nnx.List([DecoderLayer(config, numerics, rngs=nnx.Rngs(0))])


def layer(tokens: int) -> dict[str, Contender]:
    """Contenders for one layer on `tokens` tokens."""
    return {name: jax_contender(*program(read_config(MODEL), tokens, *flow)) for name, flow in FLOWS.items()}


def program(
    config: ModelConfig, tokens: int, preset: str, operand: str
) -> tuple[Callable[..., Any], Any, Any, jax.Array, jax.Array, Any]:
    """(function, its arguments): ((branch output, residual), gradients of the masters, of x and of the
    residual).

    Raises ValueError where `tokens` are not whole sequences of 4,096, nor one shorter sequence.
    """
    length = min(tokens, SEQUENCE_TOKENS)
    if tokens % length:
        raise ValueError(
            f"layer: not whole sequences: got {tokens} tokens, expected a multiple of {SEQUENCE_TOKENS} "
            "or fewer than that."
        )
    numerics = Numerics(engine_variant="cuda", exact=False, wgrad_operand=operand)
    graph, masters = nnx.split(OneLayer(config, numerics))
    plan = PrecisionPlan([path for path, _ in named_params(masters)], preset, wgrad_operand=operand)
    shape = (tokens // length, length, config.hidden_size)
    x, residual, *cotangents = (
        jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in range(4)
    )

    def forward_and_backward(
        masters: Any, published: Any, x: jax.Array, residual: jax.Array, cotangents: Any
    ) -> Any:
        table = ops.rope_table(
            jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), shape[:2]), config, numerics
        )

        def forward(masters: Any, x: jax.Array, residual: jax.Array) -> Any:
            model = nnx.merge(graph, plan.training_weights(masters, published))
            return model.layers[0](x, residual, table, None)[:2]

        out, backward = jax.vjp(forward, masters, x, residual)
        return out, *backward(cotangents)

    return forward_and_backward, masters, jax.jit(plan.publish)(masters), x, residual, tuple(cotangents)
