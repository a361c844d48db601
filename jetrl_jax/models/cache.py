"""The key/value cache of one layer: [B, K, S, H], head-major, so that a decoded token reads its head's keys
in one piece.

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
    """The dtype that a cache is stored in, and why; its values are always of `numerics.dtype`.  Starts the
    JAX backend.

    XLA's CPU backend multiplies only what stands in memory in the type of the product, so there the cache is
    kept in that type instead of being converted for every token.

    elsewhere: for a GPU that is not here.
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
    """Of a cache's arrays."""
    return jnp.dtype(numerics.choices.cache.name)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every row's tokens 0, 1, ...: [B, K, S, H] each, in `stored_dtype`.

    Places above a row's last token may hold anything: `attend_to_cache` is told which tokens are visible.
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def of(cls, keys: jax.Array, values: jax.Array, length: int, numerics: Numerics) -> KVCache:
        """From keys and values [B, T, K, H] of tokens 0 .. T - 1, zeros up to `length`."""

        def stored(x: jax.Array) -> jax.Array:
            return _stored(
                jnp.pad(jnp.moveaxis(x, 1, 2), ((0, 0), (0, 0), (0, length - x.shape[1]), (0, 0))), numerics
            )

        return cls(stored(keys), stored(values))

    @property
    def length(self) -> int:
        """S."""
        return int(self.keys.shape[2])

    def write(self, keys: jax.Array, values: jax.Array, positions: jax.Array, numerics: Numerics) -> KVCache:
        """With keys and values [B, t, K, H] at positions int32 [B, t];
        in place where the buffers may be reused.
        """
        return KVCache(
            _written(self.keys, keys, positions, numerics), _written(self.values, values, positions, numerics)
        )

    def read(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values as they are multiplied."""
        return self.keys.astype(dtype), self.values.astype(dtype)


def empty_cache(
    config: ModelConfig, numerics: Numerics, rows: int, length: int, kv_heads: int | None = None
) -> list[KVCache]:
    """Zeros for `rows` sequences of up to `length` tokens, for every layer; `kv_heads` None:
    as configured.
    """
    shape, dtype = (rows, kv_heads or config.num_kv_heads, length, config.head_dim), stored_dtype(numerics)
    with jax.enable_x64(numerics.exact):
        return [KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)]


def _stored(x: jax.Array, numerics: Numerics) -> jax.Array:
    """Exact: a cache's dtype has every value of the dtype between operations."""
    with jax.enable_x64(numerics.exact):
        return x.astype(stored_dtype(numerics))


def _written(old: jax.Array, new: jax.Array, positions: jax.Array, numerics: Numerics) -> jax.Array:
    B, K, S, H = old.shape
    # row of the flat cache where each head of each sequence begins
    first = jnp.arange(B * K, dtype=jnp.int32) * S
    if positions.shape[1] == 1:  # no axis of its own, as in `attend_to_cache`
        rows, new = first + jnp.repeat(positions[:, 0], K, total_repeat_length=B * K), new[:, 0]
    else:
        rows = (first[:, None] + jnp.repeat(positions, K, axis=0, total_repeat_length=B * K)).reshape(-1)
        new = jnp.moveaxis(new, 1, 2)
    with jax.enable_x64(numerics.exact):
        flat = old.reshape(B * K * S, H).at[rows].set(_stored(new, numerics).reshape(-1, H))
        return flat.reshape(B, K, S, H)
