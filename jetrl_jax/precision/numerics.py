"""Rounding points and reductions of a forward pass, and the implementation chosen for each operation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.formats import BLOCK, SCALE_FORMATS
from pallas_kernels.implementations import IMPLEMENTATIONS, Choice

VALUES = ("float32", "bfloat16", "float16")  # dtypes of values
KV_FORMATS = ("bf16", "fp8")  # as they were made, or `jetrl_jax.precision.kv_cache`
KV_CODES = "float8_e4m3fn"
ALLOWED: dict[str, tuple[str | bool | None, ...]] = {  # setting of `Numerics` -> its allowed values
    "compute_dtype": VALUES,
    "engine_variant": ("native", "cuda"),
    "exact": (True, False),
    "promotion_order": ("deepgemm", "triton"),
    "wgrad_operand": ("requantize", "dual", "block"),
    "scale_format": SCALE_FORMATS,
    "kernels": IMPLEMENTATIONS,
    # planned: `jetrl_jax.models.flash_attention.PLANNED`
    "attention": ("auto", "xla", "cudnn", "mosaic_gpu", "mosaic_interpret", "planned"),
    "dense": ("auto", "float64"),
    "head_gradient": ("auto", "fp32", "bf16x3", "bf16x2", "bf16"),
    "kv_cache": KV_FORMATS,
    "kv_query": KV_FORMATS,
    "stored_dtype": (None, *VALUES, "float64", KV_CODES),
}


def kv_kinds(kv_cache: str, kv_query: str) -> tuple[str, ...]:
    """What these formats round to codes before attention; each kind has a scale in every layer."""
    if kv_cache == "bf16":
        return ()
    return ("k", "v", "q") if kv_query == "fp8" else ("k", "v")


@dataclass(frozen=True)
class Choices:
    """The implementation of each operation of a policy, with the reason for it.

    `jetrl_jax.models.choices.resolve` decides once; every forward pass reads the result.

    settings, sizes: the numerics and the model's (hidden_size, intermediate_size, head_dim, query heads to a
      key/value head) that the choices were made for.
    forward, backward: the FP8 products.
    dense: the products of the forward that are not FP8.
    dense_backward: these products in the backward, except those of the head.
    head_backward: the head's, from FP32 logits.
    attention: attention over whole sequences, and of one token of each row against a cache.
    extension: attention of several tokens of each row against a cache.
    cache: the dtype in which keys and values are stored.
    quantize, quantize_partial: the quantisers of operands whose rows are whole blocks, and of other operands.
    norm, silu: RMSNorm, and SiLU(gate) * up, each followed by a quantiser.  A kernel fuses both; "xla" runs
      one after the other.
    norm_in_training: `norm` where an FP8 WGrad reads the input.
    silu_value: SiLU by itself.
    """

    settings: Numerics
    sizes: tuple[int, int, int, int]
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
    silu_value: Choice

    def quantizer(self, columns: int) -> Choice:
        """The quantiser of an operand with rows of `columns` values."""
        return self.quantize_partial if columns % BLOCK else self.quantize

    def names(self) -> dict[str, str]:
        """Operation -> name of its implementation."""
        return {
            operation: choice.name for operation, choice in vars(self).items() if isinstance(choice, Choice)
        }

    def record(self) -> dict[str, Any]:
        """The choices as nested dictionaries, for the run's record."""
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
            "silu": found["silu_value"],
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
      never rounds.
    engine_variant: "native" (vLLM's eager ops: two roundings in RMSNorm, variance of the unrounded residual
        sum) or "cuda" (vLLM's CUDA kernels: one rounding, variance of the rounded sum).
    exact: reductions in float64, or in a kernel with one order of sums, so that a token's bits do not depend
        on the shape of the program around it.
    promotion_order, scale_format: see `pallas_kernels`.
    wgrad_operand: how the saved activation reaches WGrad; see `jetrl_jax.models.linear`.
    kernels: implementation of the FP8 products; see `jetrl_jax.models.linear.product_implementation`.
    attention: implementation of attention; see `jetrl_jax.models.flash_attention.attention_implementation`.
    dense: products of an exact run that are not FP8: "auto", or "float64", in which an exact vLLM computes
      them; see `jetrl_jax.models.dense`.
    head_gradient: parts of the gradient of logits; see `jetrl_jax.models.dense.head_backward_implementation`.
    kv_cache, kv_query: "fp8" rounds keys and values, and queries, to codes (`jetrl_jax.precision.kv_cache`).
    stored_dtype: dtype of the key/value cache; None chooses by backend (`jetrl_jax.models.cache`).
    resolved: the implementations; None until a `Decoder` is built, which calls
        `jetrl_jax.models.choices.resolve`, and again after `dataclasses.replace` changes a setting.

    Raises:
      ValueError: a setting that is not in `ALLOWED`.
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
    kv_cache: str = "bf16"
    kv_query: str = "bf16"
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
        if not problems and self.kv_query == "fp8" != self.kv_cache:
            problems = ["got kv_query='fp8' with kv_cache='bf16', expected fp8 of both"]
        allowed = (None, self.compute_dtype, "float32", "float64", *((KV_CODES,) if self.kinds else ()))
        if not problems and self.stored_dtype not in allowed:
            problems = [
                f"got stored_dtype={self.stored_dtype!r}, expected a dtype with every value of "
                f"compute_dtype={self.compute_dtype!r}"
            ]
        if problems:
            raise ValueError("Numerics: bad value: " + "; ".join(problems) + ".")
        if self.resolved is not None and self.resolved.settings != self.settings:
            object.__setattr__(self, "resolved", None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is rounded to codes before attention: keys "k", values "v", queries "q"."""
        return kv_kinds(self.kv_cache, self.kv_query)

    @property
    def settings(self) -> Numerics:
        """These numerics without the resolved implementations."""
        return self if self.resolved is None else dataclasses.replace(self, resolved=None)

    @property
    def choices(self) -> Choices:
        """The implementations; raises ValueError if they are not resolved."""
        if self.resolved is None:
            raise ValueError(
                "Numerics: no implementations: got resolved=None, expected the numerics of a Decoder, or "
                "jetrl_jax.models.choices.resolve(numerics, config)."
            )
        return self.resolved

    @property
    def dtype(self) -> Any:
        """The JAX dtype of activations between operations."""
        return jnp.dtype(self.compute_dtype)
