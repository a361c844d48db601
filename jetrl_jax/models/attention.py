"""Attention of whole sequences, and of new tokens against a cache: softmax(q k^T / sqrt(H)) v over the
visible keys.

`Numerics.choices` selects the implementation: XLA in this module, cuDNN (`jetrl_jax.models.flash_attention`)
or the Pallas kernels (`pallas_kernels.attention`).  Scores and sums are FP32.  With `exact`, XLA computes in
float64, and the kernels add in a fixed order.  The result is rounded once.

Axes: B rows, T tokens, t new tokens, N query heads, K key/value heads, G = N / K, Q = t G, H head width, S
  keys.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.models.cache import KVCache
from jetrl_jax.models.flash_attention import KERNELS, PLANNED, flash_attention, flash_cached_attention
from jetrl_jax.models.ops import round_to, shape_independent
from jetrl_jax.precision.kv_cache import CODES
from jetrl_jax.precision.numerics import Numerics
from pallas_kernels.attention import cached_attention, causal_attention, segment_blocks
from pallas_kernels.formats import BLOCK

HIDDEN = -1e30  # the score of a key that is not visible


def packed_mask(segment_ids: jax.Array, numerics: Numerics) -> jax.Array:
    """The visible keys of each token of a packed row: those of its segment, up to itself.

    Args:
      segment_ids: int32 [B, T]; 0 is padding.
      numerics: its implementation of attention determines the form of the mask.

    Returns:
      bool [B, T, T].  Padding sees nothing, or with cuDNN itself.  For the kernels instead the result of
      `segment_blocks`: the first block of each block's segment, int32 [B, ceil(T / 128)].
    """
    if _by_blocks(numerics):
        return segment_blocks(segment_ids)
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    mask = jnp.tril(jnp.ones((length, length), bool))[None] & same & (segment_ids[:, :, None] > 0)
    return mask if numerics.choices.attention.name == "xla" else mask | jnp.eye(length, dtype=bool)[None]


def segment_unit(numerics: Numerics) -> int:
    """Every segment of a packed row has to begin at a multiple of this; otherwise the kernels return NaN."""
    return BLOCK if _by_blocks(numerics) else 1


def _by_blocks(numerics: Numerics) -> bool:
    name = numerics.choices.attention.name
    return name in KERNELS or (name == PLANNED and numerics.exact)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, numerics: Numerics) -> jax.Array:
    """Causal attention of whole sequences.

    Args:
      q: [B, T, N, H]; k, v: [B, T, K, H], N a multiple of K (grouped-query attention).
      mask: from `packed_mask`; None: each token sees all tokens up to itself.  The values of a token without
        a visible key are meaningless.

    Returns:
      [B, T, N * H] in `numerics.dtype`.
    """
    B, T, N, H = q.shape
    chosen = numerics.choices.attention.name
    if chosen in KERNELS:
        return causal_attention(q, k, v, mask, implementation=chosen).reshape(B, T, N * H)
    if chosen != "xla":
        mask = None if _by_blocks(numerics) else mask
        return flash_attention(q, k, v, mask, planned=chosen == PLANNED).reshape(B, T, N * H)
    if mask is None:
        mask = jnp.tril(jnp.ones((T, T), bool))[None]
    return round_to(_attention(H**-0.5, numerics.exact, q, k, v, mask), numerics.dtype)


def attend_to_cache(q: jax.Array, cache: KVCache, positions: jax.Array, numerics: Numerics) -> jax.Array:
    """Attention of new tokens against a cache that already contains them; not differentiable.

    Args:
      q: [B, t, N, H].
      cache: keys and values of the layer.
      positions: int32 [B, t]; a token sees the keys up to its own position.

    Returns:
      [B, t, N * H] in `numerics.dtype`; with `exact` the same bits as `attend` on the same tokens.
    """
    B, t, N, H = q.shape
    K, S = cache.keys.shape[1:3]
    chosen = (numerics.choices.attention if t == 1 else numerics.choices.extension).name
    if chosen in KERNELS:
        scales = None if cache.scales is None or cache.keys.dtype != CODES else jnp.stack(cache.scales)
        out = cached_attention(q, cache.keys, cache.values, positions, scales, implementation=chosen)
        return out.reshape(B, t, N * H)
    if chosen != "xla":
        out = flash_cached_attention(
            q[:, 0], *cache.read(q.dtype), positions[:, 0], planned=chosen == PLANNED
        )
        return out.reshape(B, 1, N * H)
    queries = q.astype(jnp.float32) * np.float32(H**-0.5)
    hidden = _hidden(positions, S, N // K)
    precision = jax.lax.Precision.HIGHEST
    with jax.enable_x64(numerics.exact):
        dtype = jnp.float64 if numerics.exact else jnp.float32
        keys, values = cache.read(dtype)
        grouped = _heads_first(queries.astype(dtype), K)
        scores = jnp.einsum("BKQH,BKSH->BKQS", grouped, keys, precision=precision)
        scores = jnp.where(hidden, jnp.asarray(HIDDEN, dtype), scores)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        out = jnp.einsum("BKQS,BKSH->BKQH", weights, values, precision=precision)
        out = (out / weights.sum(-1, keepdims=True)).astype(jnp.float32)
    return round_to(_tokens_first(out, t), numerics.dtype)


# The t tokens of a row are treated as more queries of its heads, Q = t G for each key/value head, so that one
# product with the keys is enough.  For t = 1 there is no axis for the tokens, so that decoding one token
# compiles to the same program as without support for several.


def _hidden(positions: jax.Array, length: int, group: int) -> jax.Array:
    """bool [B, 1, Q, S] (Q may be 1), true for keys that a query does not see; positions: int32 [B, t]."""
    keys = jnp.arange(length, dtype=jnp.int32)
    if positions.shape[1] == 1:
        return (keys[None] > positions)[:, None, None]
    return (keys[None, None] > jnp.repeat(positions, group, axis=1)[:, :, None])[:, None]


def _heads_first(q: jax.Array, kv_heads: int) -> jax.Array:
    """[B, t, N, H] -> [B, K, Q, H]."""
    B, t, N, H = q.shape
    if t == 1:
        return q.reshape(B, kv_heads, N // kv_heads, H)
    return jnp.moveaxis(q.reshape(B, t, kv_heads, N // kv_heads, H), 2, 1).reshape(B, kv_heads, -1, H)


def _tokens_first(out: jax.Array, t: int) -> jax.Array:
    """[B, K, Q, H] -> [B, t, N * H]."""
    B, K, Q, H = out.shape
    if t > 1:
        out = jnp.moveaxis(out.reshape(B, K, t, Q // t, H), 1, 2)
    return out.reshape(B, t, -1)


@shape_independent
def _attention(
    scale: float, dtype: Any, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
    B, T, N, H = q.shape
    K = k.shape[2]
    precision = jax.lax.Precision.HIGHEST
    queries = (q.astype(jnp.float32) * np.float32(scale)).astype(dtype).reshape(B, T, K, N // K, H)
    keys, values = k.astype(dtype), v.astype(dtype)
    # With the heads first a CPU copies less.  The float32 form, the gradient's, keeps its order of sums.
    head_first = dtype == jnp.float64
    if head_first:
        queries, keys, values = (
            jnp.moveaxis(queries, 1, 3),
            jnp.moveaxis(keys, 1, 2),
            jnp.moveaxis(values, 1, 2),
        )
    form = "BKGTH,BKSH->BKGTS" if head_first else "BTKGH,BSKH->BKGTS"
    scores = jnp.einsum(form, queries, keys, precision=precision)
    scores = jnp.where(mask[:, None, None], scores, jnp.asarray(HIDDEN, dtype))
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    if head_first:
        out = jnp.einsum("BKGTS,BKSH->BKGTH", weights, values, precision=precision)
        out = jnp.moveaxis(out / weights.sum(-1, keepdims=True), 3, 1)
    else:
        out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, values, precision=precision)
        out = out / jnp.moveaxis(weights.sum(-1), 3, 1)[..., None]  # [B, T, K, G, 1]
    return out.astype(jnp.float32).reshape(B, T, N * H)
