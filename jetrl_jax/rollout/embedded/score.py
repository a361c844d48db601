"""The trainer's log-probabilities of given tokens under published weights, by its forward without a cache.

The embedded engine scores with it (`JaxEngine.score`), and the certificates of other engines are compared
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jetrl_jax.devices.layout import WHOLE, Layout
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.logprobs import completion_logprobs
from jetrl_jax.precision.parameters import jit

CHUNK_TOKENS = 1024  # number of tokens whose logits exist at the same time


class Scorer:
    """(published weights, token ids) -> float32 [length], the log-probability of each token at temperature 1.

    Each token is conditioned on those before it; entry 0 is 0.  Compiled once per length.

    Args:
      model: gives structure and numerics; its parameters are not used.
      layout: the devices over which the layers are split; None is one device.
    """

    def __init__(self, model: Decoder, layout: Layout | None = None) -> None:
        graphdef, state = nnx.split(model)  # with the scales of keys and values

        def program(
            published: nnx.State, token_ids: jax.Array, positions: jax.Array, segments: jax.Array
        ) -> jax.Array:
            decoder = nnx.merge(graphdef, published if layout is None else layout.shards(published))
            return completion_logprobs(
                decoder, token_ids, positions, segments, temperature=1.0, chunk_tokens=CHUNK_TOKENS
            )[0]

        specs = None if layout is None else (layout.specs(state), WHOLE, WHOLE, WHOLE)
        self._program = jit(program if layout is None else layout.map(program, specs, WHOLE))

    def __call__(self, published: Any, token_ids: Sequence[int], width: int | None = None) -> np.ndarray:
        """Scores one sequence, padded on the right to `width` tokens so that sequences share a program."""
        ids = np.zeros((1, len(token_ids) if width is None else width), np.int32)
        ids[0, : len(token_ids)] = token_ids
        positions = np.arange(ids.size, dtype=np.int32)[None]
        return np.asarray(self._program(published, ids, positions, np.ones_like(ids)))[0, : len(token_ids)]
