"""Chooses the implementation of each operation of a policy, once, from settings, sizes and device.

Every module has the rule for its own operation (`product_implementation`, `dense_implementation`, ...), and
`resolve` calls them all.  A forward pass only reads `Numerics.choices`; `environment.json` of a run has them.
"""

from __future__ import annotations

import dataclasses

from jetrl_jax.models import fp8_producers
from jetrl_jax.models.cache import cache_implementation
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.dense import (
    dense_backward_implementation,
    dense_implementation,
    head_backward_implementation,
)
from jetrl_jax.models.flash_attention import attention_implementation, extension_implementation
from jetrl_jax.models.linear import product_implementation, quantizer_implementation
from jetrl_jax.models.ops import silu_implementation
from jetrl_jax.precision.numerics import Choices, Numerics
from pallas_kernels.implementations import on_gpu

PARTIAL = "the last block of a row is partial"
COPIED = "in training numerics.wgrad_operand takes the value"


def resolve(numerics: Numerics, sizes: ModelConfig, *, elsewhere: bool = False) -> Numerics:
    """The numerics with the implementations for a model of these sizes; unchanged if they are chosen already.

    Args:
      numerics: implementations by name, or "auto".
      sizes: sizes of the model.
      elsewhere: choose for a GPU that this machine does not have, with this version of JAX; then nothing can
        be tried out.

    Raises:
      UserError: an implementation that was requested by name cannot run.
    """
    group = sizes.num_heads // sizes.num_kv_heads
    made_for = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim, group
    if not elsewhere and numerics.resolved is not None and numerics.resolved.sizes == made_for:
        return numerics
    numerics = numerics.settings
    forward = product_implementation(numerics, forward=True)
    float32 = (
        f"activations are {numerics.dtype}, expected bfloat16 or float16"
        if numerics.compute_dtype == "float32"
        else None
    )
    attention = attention_implementation(numerics, sizes.head_dim, group, elsewhere=elsewhere)
    norm = fp8_producers.norm_problem(sizes.hidden_size, numerics)
    copied = COPIED if numerics.wgrad_operand != "requantize" else None
    choices = Choices(
        settings=numerics,
        sizes=made_for,
        forward=forward,
        backward=product_implementation(numerics, forward=False),
        dense=dense_implementation(numerics, elsewhere=elsewhere),
        dense_backward=dense_backward_implementation(numerics, elsewhere=elsewhere),
        head_backward=head_backward_implementation(numerics, elsewhere=elsewhere),
        attention=attention,
        extension=extension_implementation(attention),
        cache=cache_implementation(numerics, attention, elsewhere=elsewhere),
        quantize=quantizer_implementation(forward, float32),
        quantize_partial=quantizer_implementation(forward, float32 or PARTIAL),
        norm=quantizer_implementation(forward, norm),
        norm_in_training=quantizer_implementation(forward, norm or copied),
        silu=quantizer_implementation(forward, fp8_producers.silu_problem(sizes.intermediate_size, numerics)),
        silu_value=silu_implementation(numerics, elsewhere=elsewhere),
    )
    return dataclasses.replace(numerics, resolved=choices)


def slow_exactness(numerics: Numerics) -> str | None:
    """A warning if an exact policy computes attention in float64 on a GPU; None if it does not."""
    choice = numerics.choices.attention
    if not numerics.exact or choice.name != "xla" or not on_gpu():
        return None
    return (
        f"numerics.exact: attention is in float64 here, which is slow on a GPU: {choice.reason}. "
        "For speed use numerics.exact: false."
    )
