"""What is computed over the whole vocabulary V: embedding rows, log-probabilities, entropies.

Under `tensor_parallel` a device holds V / degree rows of embedding and head where the degree divides V, else all of them.
With `split` logits are those of its part, and only sums and maxima over the vocabulary are sent.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.models import tensor_parallel
from jetrl_jax.models.ops import round_to, shape_independent
from jetrl_jax.precision.numerics import Numerics


def embed(weight: jax.Array, token_ids: jax.Array, numerics: Numerics, *, split: bool = False) -> jax.Array:
    """Rows of weight [V, D] (split: [V / degree, D]) for int32 ids [...] of the whole vocabulary: [..., D] in `numerics.dtype`."""
    if not split:
        return round_to(weight[token_ids], numerics.dtype)
    ids, mine = tensor_parallel.local_ids(token_ids, weight.shape[0])
    rows = round_to(weight[ids], numerics.dtype)
    return tensor_parallel.total(jnp.where(mine[..., None], rows, jnp.zeros_like(rows)))


@shape_independent
def _log_normalizer(split: bool, dtype: Any, logits: jax.Array) -> jax.Array:
    wide = logits.astype(dtype)
    top = jax.lax.stop_gradient(wide.max(-1, keepdims=True))
    if split:
        top = tensor_parallel.maximum(top)
    total = jnp.exp(wide - top).sum(-1)
    return (jnp.log(tensor_parallel.total(total) if split else total) + top[..., 0]).astype(jnp.float32)


def log_normalizer(logits: jax.Array, *, exact: bool = True, split: bool = False) -> jax.Array:
    """log(sum(exp(logits))) over the vocabulary, float32; `exact`: as `Numerics.exact`."""
    return _log_normalizer(split, exact, logits)


@shape_independent
def _divide(_: None, dtype: Any, logits: jax.Array, divisor: jax.Array) -> jax.Array:
    return (logits.astype(dtype) / divisor.astype(dtype)).astype(jnp.float32)


def scale_logits(logits: jax.Array, temperature: float | jax.Array, *, exact: bool = True) -> jax.Array:
    """logits / temperature in FP32 (the identity at 1), float32 [..., V].

    With `exact` (as `Numerics.exact`) a constant (the trainer's) and a float32 scalar (the engine's) give the same bits.
    """
    if isinstance(temperature, float | int) and temperature == 1:
        return logits
    return _divide(None, exact, logits, jnp.asarray(temperature, jnp.float32))


def token_logprobs(logits: jax.Array, token_ids: jax.Array, *, exact: bool = True, split: bool = False) -> jax.Array:
    """Log-probability of each id over the full vocabulary: logits [..., V], ids int32 [...] -> float32 [...].

    Engine and trainer both call this on logits already scaled by the temperature.
    """
    if split:
        ids, mine = tensor_parallel.local_ids(token_ids, logits.shape[-1])
        chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
        chosen = tensor_parallel.total(jnp.where(mine, chosen, jnp.zeros_like(chosen)))
    else:
        chosen = jnp.take_along_axis(logits, token_ids[..., None], axis=-1)[..., 0]
    return chosen - log_normalizer(logits, exact=exact, split=split)


def entropy(logits: jax.Array, *, split: bool = False) -> jax.Array:
    """Entropy of each distribution in nats, FP32: logits [..., V] -> float32 [...]; no gradient."""
    logits = jax.lax.stop_gradient(logits)
    if split:
        log_softmax = logits - _log_normalizer(True, False, logits)[..., None]
        return -tensor_parallel.total((jnp.exp(log_softmax) * log_softmax).sum(-1))
    log_softmax = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_softmax) * log_softmax).sum(-1)
