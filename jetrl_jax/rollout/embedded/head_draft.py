"""A draft head in the decode program: its keys and values of every slot, and its guesses for the next step.

    after a step that kept y_0 .. y_m   the head reads (features of x_p .. , y_0 ..) of the step's own forward
    guess 1                             from its state at y_m
    guess 2 .. k                        one after the other, each from the state and the guess before

A guess is drawn with the noise of its position (`sampling`), as the policy's token there will be, so that two
like distributions give the same token.  Whatever the head's keys hold, guesses decide no token.  A chunk
without drafts leaves a gap in them: the head then sees its inputs after the gap only.

Axes: B slots, S cache length, N heads, H head width, k guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jetrl_jax.models import vocabulary
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.draft_head import DraftHead, feature_layers
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.rollout.embedded.sampling import Controls, sample
from jetrl_jax.rollout.embedded.speculation import NOTHING


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadState:
    """Of every slot: the head's keys and values, the first place that it sees, the next step's guesses."""

    keys: Float[Array, "B S N H"]
    values: Float[Array, "B S N H"]
    since: Int32[Array, " B"]
    guesses: Int32[Array, "B k"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadPrompts:
    """Of prefilled prompts: the head's keys and values, and the combined features of the last token."""

    keys: Float[Array, "R T N H"]
    values: Float[Array, "R T N H"]
    last: Float[Array, "R D"]


@dataclass(frozen=True)
class HeadDraft:
    """A draft whose guesses are made at the end of each step (`HeadSteps`), not from a text.

    graphdef: of the `DraftHead`; abstract: its state as shapes.
    """

    lengths: tuple[int, ...]
    graphdef: nnx.GraphDef[DraftHead]
    abstract: nnx.State
    context: int = 0

    @classmethod
    def of(cls, head: DraftHead, lengths: tuple[int, ...]) -> HeadDraft:
        """For heads of this one's sizes."""
        graphdef, state = nnx.split(head)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        return cls(lengths, graphdef, shapes)

    def __call__(
        self, text: Int32[Array, "B W"], last: Int32[Array, " B"], tokens: int
    ) -> Int32[Array, "B k"]:
        """From a text it guesses nothing; its guesses stand in the slots."""
        return jnp.full((len(last), tokens), NOTHING, jnp.int32)


class HeadSteps:
    """What a head does inside the programs of one model."""

    def __init__(self, head: DraftHead, model: Decoder, numerics: Numerics) -> None:
        self.head = head
        self.model = model
        self.numerics = numerics
        self.layers = feature_layers(model.config.num_layers)

    def embedded(self, ids: jax.Array) -> jax.Array:
        """The policy's embedding of ids [...]."""
        return vocabulary.embed(self.model.embed_tokens.whole(), ids, self.numerics)

    def prompts(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        lengths: jax.Array,
        features: jax.Array,
        longest: int,
    ) -> HeadPrompts:
        """Reads prompts [R, T]; the token after the last one is not known yet.  `longest`: of all prompts, T
        of the result.
        """
        states = self.head.combine(features)
        following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        causal = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
        causal = jnp.broadcast_to(causal, (len(tokens), *causal.shape[1:]))
        _, pair = self.head(self.embedded(following), states, positions, [], [causal])
        padding = ((0, 0), (0, longest - tokens.shape[1]), (0, 0), (0, 0))
        keys, values = (jnp.pad(x, padding) for x in pair)
        last = jnp.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return HeadPrompts(keys, values, last)

    def guess(
        self,
        state: HeadState,
        states: Float[Array, "B w D"],
        tokens: Int32[Array, "B w"],
        first: Int32[Array, " B"],
        count: Int32[Array, " B"],
        keys: jax.Array,
        controls: Controls,
    ) -> HeadState:
        """Reads the features g of places first, first + 1, ... with the tokens after them, of which `count`
        are kept, and guesses the tokens that follow the last kept one.
        """
        count, k = jnp.maximum(count, 1), state.guesses.shape[1]
        out, state = self._read(state, states, tokens, first)
        one = jnp.take_along_axis(out, (count - 1)[:, None, None], axis=1)
        place, guesses = first + count - 1, []
        for index in range(k):
            guesses.append(self._drawn(one[:, 0], keys, place + 2, controls))
            if index + 1 < k:
                place = place + 1
                one, state = self._read(state, one, guesses[-1][:, None], place)
        return HeadState(state.keys, state.values, state.since, jnp.stack(guesses, axis=1))

    def _read(
        self, state: HeadState, states: jax.Array, tokens: jax.Array, first: jax.Array
    ) -> tuple[jax.Array, HeadState]:
        """One call of the head, whose keys and values are kept."""
        slots, wide = tokens.shape
        places = first[:, None] + jnp.arange(wide, dtype=jnp.int32)[None]
        at = jnp.arange(state.keys.shape[1], dtype=jnp.int32)[None]
        seen = (at < first[:, None]) & (at >= state.since[:, None])
        seen = jnp.broadcast_to(seen[:, None], (slots, wide, seen.shape[1]))
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((1, wide, wide), bool)), (slots, wide, wide))
        earlier = [(state.keys, state.values)]
        out, (keys, values) = self.head(self.embedded(tokens), states, places, earlier, [seen, causal])
        rows = jnp.arange(slots, dtype=jnp.int32)[:, None]
        keys = state.keys.at[rows, places].set(keys, mode="drop")
        values = state.values.at[rows, places].set(values, mode="drop")
        return out, HeadState(keys, values, state.since, state.guesses)

    def _drawn(
        self, state: jax.Array, keys: jax.Array, positions: jax.Array, controls: Controls
    ) -> jax.Array:
        """A token of the head's distribution, with the noise of its position; any token if it has none."""
        logits = jnp.full((len(state), self.model.config.vocab_size), -jnp.inf, jnp.float32)
        logits = logits.at[:, self.head.d2t[...]].set(self.head.logits(state))
        return sample(logits, keys, positions, controls, self.numerics)[0]
