"""Log-probabilities and entropies of given tokens, without holding the logits of a whole batch.

The head and the softmax run over chunks of tokens (`lax.map`), and the backward recomputes each chunk
(`jax.checkpoint`), so that memory holds one chunk's [tokens, V] instead of [R, T, V].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jetrl_jax.models import vocabulary
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.kv_cache import KVUse


def completion_logprobs(
    model: Decoder,
    token_ids: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """The log-probability of every token given those before it, and the entropy of its distribution.

    Args:
      model: the policy with its weights bound.
      token_ids, positions, segment_ids: int32 [R, T], packed rows.
      temperature: the sampling temperature at which the rollout reported its logprobs.
      chunk_tokens: number of tokens whose logits exist at the same time.

    Returns:
      (logprobs, entropy), float32 [R, T]; entry t belongs to token t, predicted from token t - 1.  Column 0
      and the first token of each segment hold no valid prediction and must be masked.  The entropy carries no
      gradient.

    Raises:
      ValueError: other shapes, or chunk_tokens below 1.
    """
    return completion_logprobs_with_use(
        model, token_ids, positions, segment_ids, temperature=temperature, chunk_tokens=chunk_tokens
    )[:2]


def completion_logprobs_with_use(
    model: Decoder,
    token_ids: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[jax.Array, jax.Array, KVUse | None]:
    """As `completion_logprobs`, and how the tokens used the FP8 range of keys and values, [L, n] or None."""
    if chunk_tokens < 1:
        raise ValueError(f"completion_logprobs: got chunk_tokens={chunk_tokens}, expected at least 1.")
    hidden, use = model.with_use(token_ids, positions, segment_ids)
    hidden = hidden[:, :-1]
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), token_ids[:, 1:].reshape(-1)
    count = flat.shape[0]
    if count == 0:  # rows of one token predict nothing
        return jnp.zeros(token_ids.shape, jnp.float32), jnp.zeros(token_ids.shape, jnp.float32), use
    chunk = min(chunk_tokens, count)
    padding = -count % chunk
    flat = jnp.pad(flat, ((0, padding), (0, 0))).reshape(-1, chunk, flat.shape[-1])
    targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk)

    head = model.head()  # gathered once, not in every chunk
    split, exact = model.splits(head), model.numerics.exact

    @jax.checkpoint
    def one_chunk(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = vocabulary.scale_logits(model.logits(part[0], head), temperature, exact=exact)
        return vocabulary.token_logprobs(logits, part[1], exact=exact, split=split), vocabulary.entropy(
            logits, split=split
        )

    outputs = (
        one_chunk((flat[0], targets[0])) if flat.shape[0] == 1 else jax.lax.map(one_chunk, (flat, targets))
    )
    rows = [part.reshape(-1)[:count].reshape(token_ids.shape[0], -1) for part in outputs]
    logprobs, entropy = (jnp.pad(part, ((0, 0), (1, 0))) for part in rows)
    return logprobs, entropy, use
