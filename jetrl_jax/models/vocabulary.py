"""Operations over the whole vocabulary V: embedding rows, log-probabilities, entropies.

Under `tensor_parallel` a device holds V / degree rows of embedding and head if the degree divides V, else all
rows.  With `split`, logits are those of its part, and only sums and maxima over the vocabulary are sent.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.models import tensor_parallel
from jetrl_jax.models.ops import round_to, shape_independent
from jetrl_jax.precision.numerics import Numerics


def embed(weight: Any, token_ids: jax.Array, numerics: Numerics, *, split: bool = False) -> jax.Array:
    """The embeddings [..., D], in `numerics.dtype`, of int32 ids [...] of the whole vocabulary.

    weight: [V, D], or with `split` [V / degree, D]; an array or a `TrainableMatrix`.
    """
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


def _problems_of_logits(logits: jax.Array) -> list[str]:
    # the array's own dtype, as `jnp.result_type` gives float32 for numpy's float64
    dtype = getattr(logits, "dtype", type(logits).__name__)
    return (
        []
        if dtype == jnp.float32 and jnp.ndim(logits)
        else [f"logits {dtype} {jnp.shape(logits)}, expected float32 [..., V]"]
    )


@shape_independent
def _divide(_: None, dtype: Any, logits: jax.Array, divisor: jax.Array) -> jax.Array:
    return (logits.astype(dtype) / divisor.astype(dtype)).astype(jnp.float32)


def scale_logits(logits: jax.Array, temperature: float | jax.Array, *, exact: bool = True) -> jax.Array:
    """logits / temperature in FP32 (the identity at 1), float32 [..., V].

    With `exact` (as `Numerics.exact`) a constant (the trainer's) and a float32 scalar (the engine's) give the
    same bits.

    Raises:
      ValueError: logits are not float32; the temperature is not a scalar or, if known, not finite and
        positive.
    """
    problems = _problems_of_logits(logits)
    if isinstance(temperature, str) or jnp.ndim(temperature) != 0:
        problems.append(f"temperature {temperature!r}, expected one number")
    elif not isinstance(temperature, jax.core.Tracer) and not 0 < float(temperature) < math.inf:
        problems.append(f"temperature={temperature}, expected a finite number above 0")
    if problems:
        raise ValueError(f"scale_logits: got {'; '.join(problems)}.")
    if isinstance(temperature, float | int) and temperature == 1:
        return logits
    return _divide(None, exact, logits, jnp.asarray(temperature, jnp.float32))


def token_logprobs(
    logits: jax.Array, token_ids: jax.Array, *, exact: bool = True, split: bool = False
) -> jax.Array:
    """Log-probability of each id over the full vocabulary: logits [..., V], ids int32 [...] -> float32 [...].

    Engine and trainer both call this, with logits already scaled by the temperature.

    Raises:
      ValueError: logits are not float32; ids have another shape or are not integers or, if known, are outside
        the vocabulary (under `jax.jit` ids from V on give NaN, and negative ones count from the end).
    """
    problems = _problems_of_logits(logits)
    if jnp.shape(token_ids) != jnp.shape(logits)[:-1] or not jnp.issubdtype(
        jnp.result_type(token_ids), jnp.integer
    ):
        found = f"token_ids {jnp.result_type(token_ids)} {jnp.shape(token_ids)}"
        problems.append(
            f"{found}, expected integers of shape {jnp.shape(logits)[:-1]}, one for each row of logits"
        )
    elif not split and not isinstance(token_ids, jax.core.Tracer):
        known = np.asarray(token_ids)
        if known.size and not 0 <= known.min() <= known.max() < logits.shape[-1]:
            problems.append(
                f"token_ids from {known.min()} to {known.max()}, expected 0 to V - 1 = {logits.shape[-1] - 1}"
            )
    if problems:
        raise ValueError(f"token_logprobs: got {'; '.join(problems)}.")
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
