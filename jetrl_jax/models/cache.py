"""The key/value cache of one layer: [B, K, S, H], so that the keys of a head are contiguous in memory.

If keys and values are in FP8 (`jetrl_jax.precision.kv_cache`), a cache on a GPU has their codes.  The scales
belong to the weights; `KVCache.scaled` lends them to a cache while a layer writes and reads it.

Axes: B rows, K key/value heads, S cache length, H head width, t new tokens of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.flash_attention import KERNELS
from jetrl_jax.precision.kv_cache import CODES, KVUse, from_codes, to_codes
from jetrl_jax.precision.numerics import KV_CODES, Numerics
from pallas_kernels.implementations import Choice

Scales = tuple[jax.Array, jax.Array]  # of keys and of values, float32 scalars


class KeysValues(NamedTuple):
    """Keys and values of a whole sequence, [B, T, K, H] each.

    scales, use: if they are in FP8, their scales and how each token used the range, [B, T, n]; else None.
    """

    keys: jax.Array
    values: jax.Array
    scales: Scales | None = None
    use: KVUse | None = None


def cache_implementation(numerics: Numerics, attention: Choice, *, elsewhere: bool = False) -> Choice:
    """The dtype in which a cache is stored, and the reason; all values are representable in `numerics.dtype`.

    Starts the JAX backend.  XLA's CPU backend needs the operands of a product in memory in the product's
    dtype, so on a CPU the cache is stored in that dtype instead of being converted for every token.

    elsewhere: compile for a GPU that this machine does not have.
    """
    if numerics.stored_dtype is not None:
        return Choice(numerics.stored_dtype, "asked for by name")
    if numerics.kinds and (elsewhere or jax.default_backend() != "cpu"):
        return Choice(KV_CODES, "precision.kv_cache is fp8: codes")
    if elsewhere:
        return Choice(numerics.compute_dtype, "a GPU that is not here stores it as it was made")
    platform = jax.default_backend()
    if platform != "cpu":
        return Choice(numerics.compute_dtype, f"the platform is {platform!r}: as it was made")
    if attention.name in KERNELS:
        return Choice(numerics.compute_dtype, "as the kernels of attention read it")
    return Choice("float64" if numerics.exact else "float32", "the platform is 'cpu': as it is multiplied")


def stored_dtype(numerics: Numerics) -> Any:
    """The dtype of a cache's arrays."""
    return jnp.dtype(numerics.choices.cache.name)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every row's tokens 0, 1, ...: [B, K, S, H] each, in `stored_dtype`.

    Positions after a row's last token may contain anything, since `attend_to_cache` masks them.

    scales: of keys and values, which a cache of codes needs to write and read; otherwise None.
    """

    keys: jax.Array
    values: jax.Array
    scales: Scales | None = None

    @classmethod
    def of(cls, kept: KeysValues, length: int, numerics: Numerics) -> KVCache:
        """A cache of the keys and values of tokens 0 .. T - 1, filled up with zeros to `length`."""

        def stored(x: jax.Array, scale: jax.Array | None) -> jax.Array:
            padding = ((0, 0), (0, 0), (0, length - x.shape[1]), (0, 0))
            return _stored(jnp.pad(jnp.moveaxis(x, 1, 2), padding), numerics, scale)

        key_scale, value_scale = kept.scales or (None, None)
        return cls(stored(kept.keys, key_scale), stored(kept.values, value_scale))

    def scaled(self, scales: Scales | None) -> KVCache:
        """The same arrays, with these scales."""
        return KVCache(self.keys, self.values, scales)

    @property
    def length(self) -> int:
        """Cache length S."""
        return int(self.keys.shape[2])

    def write(self, keys: jax.Array, values: jax.Array, positions: jax.Array, numerics: Numerics) -> KVCache:
        """The cache with keys and values [B, t, K, H] written at positions int32 [B, t].

        XLA writes in place if the buffers are donated.
        """
        key_scale, value_scale = self.scales or (None, None)
        return KVCache(
            _written(self.keys, keys, positions, numerics, key_scale),
            _written(self.values, values, positions, numerics, value_scale),
            self.scales,
        )

    def read(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values in the dtype of the product."""
        if self.keys.dtype != CODES or self.scales is None:
            return self.keys.astype(dtype), self.values.astype(dtype)
        key_scale, value_scale = self.scales
        return from_codes(self.keys, key_scale, dtype), from_codes(self.values, value_scale, dtype)


def empty_cache(
    config: ModelConfig, numerics: Numerics, rows: int, length: int, kv_heads: int | None = None
) -> list[KVCache]:
    """Empty caches of all layers, for `rows` sequences of up to `length` tokens.

    kv_heads: number of key/value heads; None for `config.num_kv_heads`.
    """
    shape, dtype = (rows, kv_heads or config.num_kv_heads, length, config.head_dim), stored_dtype(numerics)
    with jax.enable_x64(numerics.exact):
        return [KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)]


def _stored(x: jax.Array, numerics: Numerics, scale: jax.Array | None) -> jax.Array:
    """Converts to the cache's dtype without rounding, since that has every value of x."""
    if stored_dtype(numerics) == CODES and numerics.kinds:
        if scale is None:
            raise ValueError(
                "KVCache: codes without a scale: got scales=None, expected `scaled(...)` before."
            )
        return to_codes(x, scale)
    with jax.enable_x64(numerics.exact):
        return x.astype(stored_dtype(numerics))


def _written(
    old: jax.Array, new: jax.Array, positions: jax.Array, numerics: Numerics, scale: jax.Array | None
) -> jax.Array:
    B, K, S, H = old.shape
    # row of the flat cache at which each head of each sequence begins
    first = jnp.arange(B * K, dtype=jnp.int32) * S
    if positions.shape[1] == 1:  # without an axis for the tokens, as in `attend_to_cache`
        rows, new = first + jnp.repeat(positions[:, 0], K, total_repeat_length=B * K), new[:, 0]
    else:
        rows = (first[:, None] + jnp.repeat(positions, K, axis=0, total_repeat_length=B * K)).reshape(-1)
        new = jnp.moveaxis(new, 1, 2)
    with jax.enable_x64(numerics.exact):
        flat = old.reshape(B * K * S, H).at[rows].set(_stored(new, numerics, scale).reshape(-1, H))
        return flat.reshape(B, K, S, H)
