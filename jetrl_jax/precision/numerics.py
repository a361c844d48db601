"""Rounding points and reductions of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class Numerics:
    """Rounding points and reductions of a forward pass; hashable, so that `jax.jit` may close over it.

    compute_dtype: "bfloat16" and "float16" round between operations where the mirrored engine does; "float32" never does.
    engine_variant: "native" (vLLM's eager ops: two roundings in RMSNorm, variance of the unrounded residual
        sum) or "cuda" (vLLM's CUDA kernels: one rounding, variance of the rounded sum).
    exact: reductions in float64, so that a token's bits do not depend on the shape of the program around it.
    promotion_order, scale_format: see `pallas_kernels`.
    wgrad_operand: how the saved activation reaches WGrad; see `jetrl_jax.models.linear`.
    kernels: implementation of the FP8 products; see `jetrl_jax.models.linear.product_implementation`.
    attention: implementation of attention; see `jetrl_jax.models.flash_attention.attention_implementation`.
    dense: products that are not FP8 of an exact run: "auto", or "float64" as an exact vLLM forms them; see `jetrl_jax.models.dense`.
    stored_dtype: dtype of a key/value cache; None is what suits the backend (`models.ops.cache_dtype`).
    """

    compute_dtype: str = "bfloat16"
    engine_variant: str = "native"
    exact: bool = True
    promotion_order: str = "deepgemm"
    wgrad_operand: str = "requantize"
    scale_format: str = "float32"
    kernels: str = "auto"
    attention: str = "auto"
    dense: str = "auto"
    stored_dtype: str | None = None

    @property
    def dtype(self) -> Any:
        """The JAX dtype that activations have between operations."""
        return jnp.dtype(self.compute_dtype)
