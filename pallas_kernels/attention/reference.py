"""The definition of batch-invariant causal attention, in plain XLA: blocks, order of sums, roundings.

A token at position p sees the keys 0 .. p of its own segment.  They are divided into blocks of 128, starting
at the segment's first token.  The blocks b = 0, 1, ... p // 128 are processed in order, and each updates the
running maximum m, the sum l and the output o of a row:

    s[j]  = sum over the head's width of q[h] k[j, h]            FP32, j in block b and j <= p
    m'    = max(m, max over j of s[j] * c)                       c = log2(e) / sqrt(H), one FP32 product
    w[j]  = exp2(s[j] * c - m')                                  one multiply-add, one exponential
    a     = exp2(m - m')                                         0 in the first block, where m is -infinity
    l'    = l * a + (sum over j of w[j])                         the sum in FP32, then one multiply-add
    o'[h] = o[h] * a + (sum over j of w16[j] v[j, h])            w16: w in the operands' dtype

The result is o / l, rounded once.  The weight of a key that is not visible is exactly 0.  A row's bits
therefore depend on its query and on the keys 0 .. p of its segment, but not on other rows, on the batch, or
on values after p, as long as these are finite.  Training, prefill and decode process the same blocks.

In this module the three sums are computed in float64 and rounded once to FP32; a tensor core has its own
order of additions.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import BLOCK, round_output, round_to_float32, to_float64

_jit = functools.partial(jax.jit, inline=True)


def score_factor(width: int) -> np.float32:
    """c, the factor that turns scores into exponents of two."""
    return np.float32(math.log2(math.e) / math.sqrt(width))


@_jit
def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, first_blocks: jax.Array) -> jax.Array:
    """`api.causal_attention` without a gradient."""
    B, T, N, H = q.shape
    rows = jnp.moveaxis(q.reshape(B, T, k.shape[2], -1, H), 1, 3)  # [B, K, G, T, H]
    keys, values = (jnp.moveaxis(x, 1, 2) for x in (k, v))
    out = _attend(rows, keys, values, *_bounds(first_blocks, T))
    return jnp.moveaxis(out, 3, 1).reshape(B, T, N, H)


@_jit
def cached_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    scales: jax.Array | None = None,
) -> jax.Array:
    """`api.cached_attention`."""
    B, t, N, H = q.shape
    if scales is not None:
        keys, values = (
            (codes.astype(jnp.float32) * scale).astype(q.dtype)
            for codes, scale in zip((keys, values), scales, strict=True)
        )
    rows = jnp.moveaxis(q.reshape(B, t, keys.shape[1], -1, H), 1, 3)  # [B, K, G, t, H]
    out = _attend(rows, keys, values, jnp.zeros_like(positions), positions)
    return jnp.moveaxis(out, 3, 1).reshape(B, t, N, H)


def _attend(
    rows: jax.Array, keys: jax.Array, values: jax.Array, first: jax.Array, last: jax.Array
) -> jax.Array:
    """Attention of rows [B, K, G, R, H] with keys and values [B, K, S, H].

    first, last: int32 [B, R], the first and the last visible key of each row.
    """
    blocks = -(-keys.shape[2] // BLOCK)
    missing = ((0, 0), (0, 0), (0, blocks * BLOCK - keys.shape[2]), (0, 0))
    keys, values = (jnp.pad(x, missing) for x in (keys, values))
    factor, shape = score_factor(rows.shape[-1]), rows.shape[:-1]
    with jax.enable_x64(True):
        wide = to_float64(rows)

        def step(block: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            m, total, out = carry
            k, v = (to_float64(x[:, :, block * BLOCK : (block + 1) * BLOCK]) for x in (keys, values))
            key = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.int32)
            visible = _between(first, key, last)[:, None, None]
            s = round_to_float32(jnp.einsum("BKGRH,BKSH->BKGRS", wide, k))
            s = jnp.where(visible, s, jnp.float32(-np.inf))
            top = jnp.maximum(m, s.max(-1) * factor)
            base = jnp.where(jnp.isneginf(top), jnp.float32(0), top)  # for a row without a visible key so far
            exponent = round_to_float32(to_float64(s) * np.float64(factor) - to_float64(base)[..., None])
            w = round_to_float32(jnp.exp2(to_float64(exponent)))
            a = round_to_float32(jnp.exp2(to_float64(m - base)))
            total = _multiply_add(total, a, round_to_float32(to_float64(w).sum(-1)))
            product = jnp.einsum("BKGRS,BKSH->BKGRH", to_float64(round_output(w, rows.dtype)), v)
            return top, total, _multiply_add(out, a[..., None], round_to_float32(product))

        carry: tuple[jax.Array, ...] = (
            jnp.full(shape, -np.inf, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(rows.shape, jnp.float32),
        )
        for block in range(blocks):
            carry = step(block, carry)
        _, total, out = carry
        quotient = round_to_float32(to_float64(out) / to_float64(total)[..., None])
    return round_output(quotient, rows.dtype)


def _bounds(first_blocks: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last visible key of each token, int32 [B, T]."""
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (first_blocks.shape[0], length))
    return jnp.repeat(first_blocks * BLOCK, BLOCK, axis=1)[:, :length], place


def _between(first: jax.Array, keys: np.ndarray, last: jax.Array) -> jax.Array:
    """bool [B, R, S], true for the keys [S] that a row sees."""
    keys = keys[None, None]
    return (first[..., None] <= keys) & (keys <= last[..., None])


def _multiply_add(x: jax.Array, factor: jax.Array, term: jax.Array) -> jax.Array:
    """x * factor + term, rounded once (except for ties)."""
    return round_to_float32(to_float64(x) * to_float64(factor) + to_float64(term))


@_jit
def causal_gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, first_blocks: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv of softmax(q k^T / sqrt(H)) v in float64, rounded once."""
    T, H = q.shape[1], q.shape[3]
    first, last = _bounds(first_blocks, T)
    visible = _between(first, np.arange(T, dtype=np.int32), last)[:, None]
    group = q.shape[2] // k.shape[2]

    def exact(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) * np.float64(H**-0.5)
        weights = jax.nn.softmax(jnp.where(visible, scores, -np.inf), axis=-1)
        return jnp.einsum("BNTS,BSNH->BTNH", weights, v)

    with jax.enable_x64(True):
        _, pullback = jax.vjp(exact, *map(to_float64, (q, k, v)))
        gradients = [round_to_float32(x) for x in pullback(to_float64(cotangent))]
    dq, dk, dv = (round_output(x, like.dtype) for x, like in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv
