"""The key/value cache of one layer: [B, K, S, H], so that the keys of a head are contiguous in memory.

Axes: B rows, K key/value heads, S cache length, H head width, t new tokens of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.flash_attention import KERNELS
from jetrl_jax.precision.numerics import Numerics
from pallas_kernels.implementations import Choice


def cache_implementation(numerics: Numerics, attention: Choice, *, elsewhere: bool = False) -> Choice:
    """The dtype in which a cache is stored, and the reason; all values are representable in `numerics.dtype`.

    Starts the JAX backend.  XLA's CPU backend needs the operands of a product in memory in the product's
    dtype, so on a CPU the cache is stored in that dtype instead of being converted for every token.

    elsewhere: compile for a GPU that this machine does not have.
    """
    if numerics.stored_dtype is not None:
        return Choice(numerics.stored_dtype, "asked for by name")
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
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def of(cls, keys: jax.Array, values: jax.Array, length: int, numerics: Numerics) -> KVCache:
        """A cache of keys and values [B, T, K, H] of tokens 0 .. T - 1, filled up with zeros to `length`."""

        def stored(x: jax.Array) -> jax.Array:
            return _stored(
                jnp.pad(jnp.moveaxis(x, 1, 2), ((0, 0), (0, 0), (0, length - x.shape[1]), (0, 0))), numerics
            )

        return cls(stored(keys), stored(values))

    @property
    def length(self) -> int:
        """Cache length S."""
        return int(self.keys.shape[2])

    def write(self, keys: jax.Array, values: jax.Array, positions: jax.Array, numerics: Numerics) -> KVCache:
        """The cache with keys and values [B, t, K, H] written at positions int32 [B, t].

        XLA writes in place if the buffers are donated.
        """
        return KVCache(
            _written(self.keys, keys, positions, numerics), _written(self.values, values, positions, numerics)
        )

    def read(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values in the dtype of the product."""
        return self.keys.astype(dtype), self.values.astype(dtype)


def empty_cache(
    config: ModelConfig, numerics: Numerics, rows: int, length: int, kv_heads: int | None = None
) -> list[KVCache]:
    """Empty caches of all layers, for `rows` sequences of up to `length` tokens.

    kv_heads: number of key/value heads; None for `config.num_kv_heads`.
    """
    shape, dtype = (rows, kv_heads or config.num_kv_heads, length, config.head_dim), stored_dtype(numerics)
    with jax.enable_x64(numerics.exact):
        return [KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)]


def _stored(x: jax.Array, numerics: Numerics) -> jax.Array:
    """Converts to the cache's dtype without rounding: it can represent every value of `numerics.dtype`."""
    with jax.enable_x64(numerics.exact):
        return x.astype(stored_dtype(numerics))


def _written(old: jax.Array, new: jax.Array, positions: jax.Array, numerics: Numerics) -> jax.Array:
    B, K, S, H = old.shape
    # row of the flat cache at which each head of each sequence begins
    first = jnp.arange(B * K, dtype=jnp.int32) * S
    if positions.shape[1] == 1:  # without an axis for the tokens, as in `attend_to_cache`
        rows, new = first + jnp.repeat(positions[:, 0], K, total_repeat_length=B * K), new[:, 0]
    else:
        rows = (first[:, None] + jnp.repeat(positions, K, axis=0, total_repeat_length=B * K)).reshape(-1)
        new = jnp.moveaxis(new, 1, 2)
    with jax.enable_x64(numerics.exact):
        flat = old.reshape(B * K * S, H).at[rows].set(_stored(new, numerics).reshape(-1, H))
        return flat.reshape(B, K, S, H)
