"""Rounding points and reductions of a forward pass, and which implementation serves each of its
operations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.formats import BLOCK, SCALE_FORMATS
from pallas_kernels.implementations import IMPLEMENTATIONS, Choice

VALUES = ("float32", "bfloat16", "float16")  # dtypes of values
ALLOWED: dict[str, tuple[str | bool | None, ...]] = {  # of each setting of `Numerics`
    "compute_dtype": VALUES,
    "engine_variant": ("native", "cuda"),
    "exact": (True, False),
    "promotion_order": ("deepgemm", "triton"),
    "wgrad_operand": ("requantize", "dual", "block"),
    "scale_format": SCALE_FORMATS,
    "kernels": IMPLEMENTATIONS,
    "attention": ("auto", "xla", "cudnn", "planned"),  # planned: `jetrl_jax.models.flash_attention.PLANNED`
    "dense": ("auto", "float64"),
    "head_gradient": ("auto", "fp32", "bf16x3", "bf16x2", "bf16"),
    "stored_dtype": (None, *VALUES, "float64"),
}


@dataclass(frozen=True)
class Choices:
    """What serves each operation of a policy, and why: decided once, by `jetrl_jax.models.choices.resolve`,
    and read by every forward.

    settings, sizes: the numerics and the model's (hidden_size, intermediate_size, head_dim) that they were
      made for.
    forward, backward: the FP8 products.
    dense: the products that are not FP8, forward.
    dense_backward: these products of the backward, but the head's.
    head_backward: the head's, from FP32 logits.
    attention: of whole sequences, and of one token of each row against a cache.
    extension: attention of several tokens of each row against a cache.
    cache: the dtype that keys and values are stored in.
    quantize, quantize_partial: the quantisers of operands whose rows are whole blocks, and of others.
    norm, silu: RMSNorm, and SiLU(gate) * up, with the quantiser behind it: a kernel does both, "xla" one
      after the other.
    norm_in_training: `norm` where a WGrad in FP8 reads the input.
    """

    settings: Numerics
    sizes: tuple[int, int, int]
    forward: Choice
    backward: Choice
    dense: Choice
    dense_backward: Choice
    head_backward: Choice
    attention: Choice
    extension: Choice
    cache: Choice
    quantize: Choice
    quantize_partial: Choice
    norm: Choice
    norm_in_training: Choice
    silu: Choice

    def quantizer(self, columns: int) -> Choice:
        """Of an operand with rows of so many values."""
        return self.quantize_partial if columns % BLOCK else self.quantize

    def record(self) -> dict[str, Any]:
        """For the run's record."""
        found = {
            name: dataclasses.asdict(choice)
            for name, choice in vars(self).items()
            if isinstance(choice, Choice)
        }
        return {
            "fp8_products": {name: found[name] for name in ("forward", "backward")},
            "fp8_inputs": {
                name: found[name]
                for name in ("norm", "norm_in_training", "silu", "quantize", "quantize_partial")
            },
            "dense_products": found["dense"],
            "dense_gradients": found["dense_backward"],
            "head_gradient": found["head_backward"],
            "attention": found["attention"],
            "attention_of_extensions": found["extension"],
            "kv_cache": found["cache"],
        }


@dataclass(frozen=True)
class Numerics:
    """Rounding points and reductions of a forward pass; hashable, so that `jax.jit` may close over it.

    compute_dtype: "bfloat16" and "float16" round between operations where the mirrored engine does; "float32"
      never does.
    engine_variant: "native" (vLLM's eager ops: two roundings in RMSNorm, variance of the unrounded residual
        sum) or "cuda" (vLLM's CUDA kernels: one rounding, variance of the rounded sum).
    exact: reductions in float64, so that a token's bits do not depend on the shape of the program around it.
    promotion_order, scale_format: see `pallas_kernels`.
    wgrad_operand: how the saved activation reaches WGrad; see `jetrl_jax.models.linear`.
    kernels: implementation of the FP8 products; see `jetrl_jax.models.linear.product_implementation`.
    attention: implementation of attention; see `jetrl_jax.models.flash_attention.attention_implementation`.
    dense: products that are not FP8 of an exact run: "auto", or "float64" as an exact vLLM forms them; see
      `jetrl_jax.models.dense`.
    head_gradient: parts of the gradient of logits; see `jetrl_jax.models.dense.head_backward_implementation`.
    stored_dtype: dtype of a key/value cache; None is what suits the backend (`jetrl_jax.models.cache`).
    resolved: the implementations; None until `jetrl_jax.models.choices.resolve`, which a `Decoder` calls
        where it is built, and again where `dataclasses.replace` changed a setting.

    Raises:
      ValueError: a setting that is none of `ALLOWED`.
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
    head_gradient: str = "auto"
    stored_dtype: str | None = None
    resolved: Choices | None = None

    def __post_init__(self) -> None:
        problems = [
            f"got {name}={getattr(self, name)!r}, expected one of {allowed}"
            for name, allowed in ALLOWED.items()
            if not any(
                type(value) is type(getattr(self, name)) and value == getattr(self, name) for value in allowed
            )
        ]
        if not problems and self.stored_dtype not in (None, self.compute_dtype, "float32", "float64"):
            problems = [
                f"got stored_dtype={self.stored_dtype!r}, expected a dtype with every value of "
                f"compute_dtype={self.compute_dtype!r}"
            ]
        if problems:
            raise ValueError("Numerics: bad value: " + "; ".join(problems) + ".")
        if self.resolved is not None and self.resolved.settings != self.settings:
            object.__setattr__(self, "resolved", None)

    @property
    def settings(self) -> Numerics:
        """Without implementations."""
        return self if self.resolved is None else dataclasses.replace(self, resolved=None)

    @property
    def choices(self) -> Choices:
        """The implementations.  Raises ValueError where they are not resolved."""
        if self.resolved is None:
            raise ValueError(
                "Numerics: no implementations: got resolved=None, expected the numerics of a Decoder, or "
                "jetrl_jax.models.choices.resolve(numerics, config)."
            )
        return self.resolved

    @property
    def dtype(self) -> Any:
        """The JAX dtype that activations have between operations."""
        return jnp.dtype(self.compute_dtype)
