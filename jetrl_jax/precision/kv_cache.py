"""Keys and values in FP8: one format for the cache that is sampled from and for the trainer's forward.

    s = 2^e,  e = ceil(log2(1.05 A / 448)),  A the largest magnitude of the last updates
    code = E4M3(clip(x / s, -448, 448)), to nearest even;   x^ = code s

There is one s for each layer and kind: keys after their norm and RoPE, values as projected and, to mirror an
engine that quantises them, queries after RoPE.  Attention reads x^ of every token, its own too, in training,
prefill and decode.  Scales are powers of two, so that x / s and x (1 / s) are the same number and x^ is exact
in BF16 and FP16.  Any formula and any attention kernel then gives the same bits.

Scales belong to a policy version (`PrecisionPlan.publish`).  A smaller or an older A costs range, since
larger values are clipped, but never equality.  The gradient of x^ is that of x, also where x is clipped.

The form follows FP8-RL (arXiv 2601.18150), which recalibrates at each step; its trainer does not round keys
and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32

from pallas_kernels.formats import E4M3_MAX

MARGIN = 1.05
HISTORY = 16  # updates whose maxima count
# exponents of a scale with which every code has an exact value in this dtype
EXPONENTS = {"bfloat16": (-32, 16), "float16": (-15, 7), "float32": (-32, 16)}
CODES = jnp.float8_e4m3fn


class KVScale(nnx.Variable):
    """The scale of one layer's keys, values or queries: float32, a power of two.  Not trained."""


def scales_for(largest: jax.Array, compute_dtype: str) -> jax.Array:
    """The scales, float32 powers of two, of largest magnitudes, which are positive and finite."""
    fraction, exponent = jnp.frexp(largest * np.float32(MARGIN / E4M3_MAX))
    exponent = exponent - (fraction == 0.5).astype(exponent.dtype)
    least, most = EXPONENTS[compute_dtype]
    return jax.lax.bitcast_convert_type(
        (jnp.clip(exponent, least, most).astype(jnp.int32) + 127) << 23, jnp.float32
    )


def to_codes(x: jax.Array, scale: jax.Array) -> jax.Array:
    """E4M3 codes of x / scale, clipped; those of a value of `stored` are exact.  NaN stays NaN."""
    return jnp.clip(x.astype(jnp.float32) / scale, -E4M3_MAX, E4M3_MAX).astype(CODES)


def from_codes(codes: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """code * scale in a dtype that has all these values."""
    return (codes.astype(jnp.float32) * scale).astype(dtype)


@jax.custom_jvp
def stored(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x as the cache stores it, code * scale in x's dtype, which is exact; the gradient is the identity."""
    return from_codes(to_codes(x, scale), scale, x.dtype)


@stored.defjvp
def _stored_jvp(primals: Any, tangents: Any) -> Any:
    return stored(*primals), tangents[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVUse:
    """How keys, values and, if quantised, queries used their range; leading axes as those that made it.

    largest: float32 [..., n], the largest magnitude before rounding, of each of n kinds.
    clipped, count: float32 [..., n], numbers of values that were clipped, and of all.
    """

    largest: Any
    clipped: Any
    count: Any

    @classmethod
    def of(cls, values: Mapping[str, jax.Array], scales: Mapping[str, jax.Array]) -> KVUse:
        """The use of values [B, T, heads, H], by kind, of each token: [B, T, n]."""

        def one(kind: str) -> tuple[jax.Array, jax.Array, jax.Array]:
            size = jnp.abs(jax.lax.stop_gradient(values[kind]).astype(jnp.float32))
            clipped = jnp.sum(size > E4M3_MAX * scales[kind], axis=(2, 3), dtype=jnp.float32)
            return size.max((2, 3)), clipped, jnp.full_like(clipped, size.shape[2] * size.shape[3])

        parts = zip(*(one(kind) for kind in scales), strict=True)
        return cls(*(jnp.stack(part, axis=-1) for part in parts))

    @staticmethod
    def total(layers: list[KVUse], counted: jax.Array) -> KVUse:
        """The use of each layer [L, n] over the tokens `counted`, bool [B, T]."""
        uses: KVUse = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)  # [L, B, T, n]
        mask = counted[None, :, :, None]
        return KVUse(
            jnp.max(jnp.where(mask, uses.largest, 0.0), axis=(1, 2)),
            jnp.sum(jnp.where(mask, uses.clipped, 0.0), axis=(1, 2)),
            jnp.sum(jnp.where(mask, uses.count, 0.0), axis=(1, 2)),
        )

    def over(self, axes: tuple[str, ...]) -> KVUse:
        """The use over all devices of these mesh axes."""
        return KVUse(
            jax.lax.pmax(self.largest, axes),
            jax.lax.psum(self.clipped, axes),
            jax.lax.psum(self.count, axes),
        )

    def and_also(self, other: KVUse | None) -> KVUse:
        """The use of two batches, as numpy arrays."""
        if other is None:
            return self
        return KVUse(
            np.maximum(self.largest, other.largest),
            self.clipped + other.clipped,
            self.count + other.count,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCalibration:
    """The scales of a policy version, and the maxima from which the next ones follow.

    Attributes:
      largest: of the last updates, the newest first; zeros before the first.
      scales: those with which the version was published.
    """

    largest: Float32[Array, "16 L n"]
    scales: Float32[Array, "L n"]

    @classmethod
    def start(cls, scales: jax.Array) -> KVCalibration:
        """Without a history."""
        return cls(jnp.zeros((HISTORY, *scales.shape), jnp.float32), scales)

    def after(self, largest: jax.Array) -> KVCalibration:
        """The history after an update with these maxima; the scales stay until `recalibrated`."""
        return KVCalibration(jnp.concatenate([largest[None], self.largest[:-1]]), self.scales)

    def recalibrated(self, compute_dtype: str) -> KVCalibration:
        """With the scales of the history."""
        return KVCalibration(self.largest, scales_for(self.largest.max(0), compute_dtype))


def scale_paths(layers: int, kinds: tuple[str, ...]) -> list[list[str]]:
    """The parameter path of each scale: [L][n]."""
    return [[f"layers.{layer}.self_attn.{kind}_scale" for kind in kinds] for layer in range(layers)]


def with_scales(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """A state with these values (path -> scale) added or replaced."""
    flat = dict(nnx.to_flat_state(state))
    for path, value in values.items():
        parts = tuple(int(part) if part.isdecimal() else part for part in path.split("."))
        flat[parts] = KVScale(value)
    return nnx.from_flat_state(flat)


def split_model(model: nnx.Module) -> tuple[Any, nnx.State]:
    """(graph definition, parameters) of a model; the scales, which are no parameters, are left out."""
    graphdef, params, *_ = nnx.split(model, nnx.Param, ...)
    return graphdef, params
