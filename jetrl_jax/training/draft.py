"""The loss of a draft head: how far its guesses are from the policy's own distributions.

    L = - 1/k sum_i mean_t sum_v p(v | tokens up to t+1+i) log q_i(v)            i = 0 .. k-1

p is the policy's distribution over the draft's vocabulary, q_i the head's in its i-th step from t on: step 0
reads the policy's features of token t, a later step the state of the step before.  Features, p and embedding
are constants, so that the policy has no gradient from here.

An update whose loss or gradient is not finite is left out, with a warning: head and moments stay.

A row t of step i stands at position t + i.  It sees the inputs of step 0 up to t, which in a rollout are
those of tokens that are known, and its own of each later step: the "training-time test" of EAGLE-3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jetrl_jax.models import vocabulary
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.draft_head import DraftHead, KeysValues, feature_layers, product
from jetrl_jax.precision.parameters import jit
from jetrl_jax.record.console import print_warning
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.rollout.embedded.head_draft import HeadDraft
from jetrl_jax.training.programs import PolicyPrograms


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
    states = head.combine(features)
    earlier: list[KeysValues] = []
    masks: list[jax.Array] = []
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
    arrays: tuple[Any, Any, Any, Any],
    steps: int,
) -> tuple[nnx.State, jax.Array, jax.Array]:
    """(gradient of the head's parameters, loss, overlaps) of one microbatch; `arrays` as `draft_loss`."""
    trained, fixed = nnx.split_state(head, nnx.Param, ...)

    def loss(trained: nnx.State) -> tuple[jax.Array, jax.Array]:
        return draft_loss(nnx.merge(graphdef, trained, fixed), model, *arrays, steps)

    (value, overlaps), gradient = jax.value_and_grad(loss, has_aux=True)(trained)
    return gradient, value, overlaps


class DraftTrainer:
    """Trains a head beside a policy, by programs of its own: the policy's gradient does not know of it.

    Args:
      head: to begin with, or abstract for a plan; programs: of the policy.
      learning_rate: of the head; lengths: of the drafts (`HeadDraft`), the longest is trained.
      warn: shows a warning.
    """

    def __init__(
        self,
        head: DraftHead,
        programs: PolicyPrograms,
        learning_rate: float,
        lengths: tuple[int, ...],
        warn: Callable[[str], None] = print_warning,
    ) -> None:
        self.programs = programs
        self.steps = max(lengths)
        self.warn = warn
        self.draft = HeadDraft.of(head, lengths)
        self.params, self._fixed = nnx.split_state(nnx.state(head), nnx.Param, ...)
        self._optimizer = draft_optimizer(learning_rate)
        abstract = isinstance(jax.tree.leaves(self.params)[0], jax.ShapeDtypeStruct)
        begin = self._optimizer.init
        self.moments = jax.eval_shape(begin, self.params) if abstract else begin(self.params)
        self._update = jit(self._program)

    @property
    def state(self) -> nnx.State:
        """The head's weights, for an engine."""
        return nnx.merge_state(self.params, self._fixed)

    @property
    def head(self) -> DraftHead:
        """The head as it is now."""
        return nnx.merge(self.draft.graphdef, self.state)

    @property
    def saved(self) -> dict[str, Any]:
        """The arrays of a checkpoint."""
        return {"params": self.params, "moments": self.moments}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes over the arrays of a checkpoint."""
        self.params = saved["params"]
        self.moments = saved["moments"]

    def __call__(self, weights: nnx.State, batches: Sequence[TrainBatch]) -> dict[str, float]:
        """One update for each microbatch, with the policy's frozen weights; returns their mean metrics.

        Microbatches whose update was left out are not in the means.
        """
        found = []
        for batch in batches:
            arrays = batch.token_ids, batch.positions, batch.segment_ids, batch.loss_mask
            self.params, self.moments, finite, *told = self._update(
                self.params, self.moments, weights, arrays
            )
            if finite:
                found.append([float(value) for value in told])
        skipped = len(batches) - len(found)
        if skipped:
            self.warn(
                f"draft head: updates are left out, and it stays as it was: got a loss or gradient that is "
                f"not finite in {skipped} of {len(batches)} microbatches, expected finite ones"
            )
        loss, overlap = np.mean(found or [[np.nan, np.nan]], axis=0)
        return {
            "draft/loss": float(loss),
            "draft/overlap": float(overlap),
            "draft/skipped_updates": skipped,
        }

    def trace(self, weights: nnx.State, batch: TrainBatch) -> Any:
        """The program of one update, traced (`jax.stages.Traced`)."""
        arrays = batch.token_ids, batch.positions, batch.segment_ids, batch.loss_mask
        return self._update.trace(self.params, self.moments, weights, arrays)

    def _program(self, params: nnx.State, moments: Any, weights: nnx.State, arrays: Any) -> Any:
        model = nnx.merge(self.programs.graphdef, weights)
        head = nnx.merge_state(params, self._fixed)
        grads, loss, overlaps = draft_gradient(head, self.draft.graphdef, model, arrays, self.steps)
        with jax.numpy_dtype_promotion("standard"):
            changes, next_moments = self._optimizer.update(grads, moments, params)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads))
        after = optax.apply_updates(params, changes), next_moments
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, (params, moments))
        return *kept, finite, loss, overlaps[0]
