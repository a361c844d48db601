"""The trainer's log-probabilities of given tokens under published weights: its own full forward, with nothing
cached.

An engine on the trainer's devices scores so (`JaxEngine.score`), and the certificate of any other is compared
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

CHUNK_TOKENS = 1024  # whose logits exist at once


class Scorer:
    """(published weights, token ids) -> float32 [length], each token's log-probability given those before at
    temperature 1.

    Entry 0 is 0.  Compiled once per length.

    Args:
      model: gives structure and numerics; its parameters are not used.
      layout: the devices that the layers are split over; None is one device.
    """

    def __init__(self, model: Decoder, layout: Layout | None = None) -> None:
        graphdef, params = nnx.split(model)

        def program(
            published: nnx.State, token_ids: jax.Array, positions: jax.Array, segments: jax.Array
        ) -> jax.Array:
            decoder = nnx.merge(graphdef, published if layout is None else layout.shards(published))
            return completion_logprobs(
                decoder, token_ids, positions, segments, temperature=1.0, chunk_tokens=CHUNK_TOKENS
            )[0]

        specs = None if layout is None else (layout.specs(params), WHOLE, WHOLE, WHOLE)
        self._program = jit(program if layout is None else layout.map(program, specs, WHOLE))

    def __call__(self, published: Any, token_ids: Sequence[int], width: int | None = None) -> np.ndarray:
        """`width`: padded to so many tokens on the right, so that sequences share a program."""
        ids = np.zeros((1, len(token_ids) if width is None else width), np.int32)
        ids[0, : len(token_ids)] = token_ids
        positions = np.arange(ids.size, dtype=np.int32)[None]
        return np.asarray(self._program(published, ids, positions, np.ones_like(ids)))[0, : len(token_ids)]
