"""The loss of a draft head: how far its guesses are from the policy's own distributions.

    L = - 1/k sum_i mean_t sum_v p(v | tokens up to t+1+i) log q_i(v)            i = 0 .. k-1

p is the policy's distribution over the draft's vocabulary, q_i the head's in its i-th step from t on: step 0
reads the policy's features of token t, a later step the state of the step before.  Features, p and embedding
are constants, so that the policy has no gradient from here.

A row t of step i stands at position t + i.  It sees the inputs of step 0 up to t, which in a rollout are
those of tokens that are known, and its own of each later step: the "training-time test" of EAGLE-3.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jetrl_jax.models import vocabulary
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.draft_head import DraftHead, feature_layers, product


def draft_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """AdamW of the head alone, with its own clipping."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, b2=0.95, weight_decay=0.0))


def ahead(x: jax.Array, count: int) -> jax.Array:
    """x [B, T, ...] at t + count, with zeros behind the end."""
    return jnp.pad(x[:, count:], ((0, 0), (0, count), *((0, 0) for _ in x.shape[2:])))


def draft_loss(
    head: DraftHead,
    model: Decoder,
    token_ids: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    segment_ids: Int32[Array, "B T"],
    sampled: Bool[Array, "B T"],
    steps: int,
) -> tuple[Float[Array, ""], Float[Array, " steps"]]:
    """(loss, of each step the mean of sum_v min(p, q) over the draft's vocabulary).

    The latter is the share of guesses that rejection sampling would keep.

    Args:
      model: the policy with the weights of its rollouts.
      token_ids, positions, segment_ids: packed rows, as `Decoder.__call__`.
      sampled: the tokens that the policy wrote; a guess of any other is not counted.
      steps: how many tokens the head guesses one after the other, k.
    """
    layers = feature_layers(model.config.num_layers)
    hidden, features = model.with_features(token_ids, positions, segment_ids, layers)
    teacher = product(hidden, model.head()[head.d2t[...]])
    embedded = vocabulary.embed(model.embed_tokens.whole(), token_ids, model.numerics)
    embedded, features, teacher = jax.lax.stop_gradient((embedded, features, teacher))
    length = token_ids.shape[1]
    same = (segment_ids[:, :, None] == segment_ids[:, None]) & jnp.tril(jnp.ones((1, length, length), bool))
    own = jnp.broadcast_to(jnp.eye(length, dtype=bool)[None], same.shape)
    states, earlier, masks = head.combine(features), [], []
    losses, overlaps = [], []
    for step in range(steps):
        masks = [*masks, own if step else same]
        states, pair = head(ahead(embedded, step + 1), states, positions + step, earlier, masks)
        earlier = [*earlier, pair]
        following = segment_ids == ahead(segment_ids, step + 2)
        counted = ahead(sampled, step + 2) & following & (segment_ids > 0)
        p = jax.nn.softmax(ahead(teacher, step + 1), axis=-1)
        logq = jax.nn.log_softmax(head.logits(states), axis=-1)
        count = jnp.maximum(counted.sum(), 1).astype(jnp.float32)
        losses.append(-jnp.where(counted, (p * logq).sum(axis=-1), 0.0).sum() / count)
        overlaps.append(jnp.where(counted, jnp.minimum(p, jnp.exp(logq)).sum(axis=-1), 0.0).sum() / count)
    return jnp.stack(losses).mean(), jnp.stack(overlaps)


def draft_gradient(
    head: nnx.State,
    graphdef: nnx.GraphDef[DraftHead],
    model: Decoder,
    arrays: Sequence[jax.Array],
    steps: int,
) -> tuple[nnx.State, jax.Array, jax.Array]:
    """(gradient of the head's parameters, loss, overlaps) of one microbatch; `arrays` as `draft_loss`."""
    trained, fixed = nnx.split_state(head, nnx.Param, ...)

    def loss(trained: nnx.State) -> tuple[jax.Array, jax.Array]:
        return draft_loss(nnx.merge(graphdef, trained, fixed), model, *arrays, steps=steps)

    (value, overlaps), gradient = jax.value_and_grad(loss, has_aux=True)(trained)
    return gradient, value, overlaps
