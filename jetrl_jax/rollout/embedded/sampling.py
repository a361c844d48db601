"""Sampling as a function of (logits, seed, position), independent of slot, batch and program.

Token v is drawn by an exponential race, which is the Gumbel-max rule without its outer logarithm:

    E_v = -log(1 - U_v),  U_v uniform        token = argmax_v p_v / E_v,   p_v = exp(logits_v / temperature)

U depends only on the request's key and the absolute position of the token (Threefry), so that a refilled
slot, another batch size or a resumed run draws the same token from the same logits.  `numerics.exact`
computes the race in float64.

The reported log-probability is over the full vocabulary at the sampling temperature, by the same operations
as in the trainer (`vocabulary.scale_logits`, `vocabulary.token_logprobs`).  Top-k and top-p are not offered,
as a truncated distribution is not the policy that is trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jetrl_jax.models import vocabulary
from jetrl_jax.precision.numerics import Numerics

KEY_IMPLEMENTATION = "threefry2x32"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Controls:
    """The parameters of a call of `generate` as device values, so that a change needs no compilation.

    seed: of the call.
    """

    temperature: Float32[Array, ""]
    greedy: Bool[Array, ""]
    seed: UInt32[Array, ""]
    is_stop: Bool[Array, " V"]


def request_keys(call_seed: UInt32[Array, ""], request_seeds: UInt32[Array, " B"]) -> UInt32[Array, "B 2"]:
    """The key data of requests with these seeds in a call with `call_seed`."""
    key = jax.random.key(call_seed, impl=KEY_IMPLEMENTATION)
    return jax.vmap(lambda seed: jax.random.key_data(jax.random.fold_in(key, seed)))(request_seeds)


def _uniform_bits(key_data: jax.Array, position: jax.Array, count: int) -> jax.Array:
    key = jax.random.wrap_key_data(key_data, impl=KEY_IMPLEMENTATION)
    return jax.random.bits(jax.random.fold_in(key, position), (count,), jnp.uint32)


def sample(
    logits: Float32[Array, "B V"],
    keys: UInt32[Array, "B 2"],
    positions: Int32[Array, " B"],
    controls: Controls,
    numerics: Numerics,
) -> tuple[Int32[Array, " B"], Float32[Array, " B"]]:
    """Draws one token per row.

    Args:
      logits: not yet divided by the temperature.
      keys: from `request_keys`.
      positions: absolute positions of the tokens to draw.
      controls: temperature (1 when greedy) and whether to take the argmax.

    Returns:
      (token ids, log-probabilities).  A row with a NaN gives the last id and NaN.
    """
    scaled = vocabulary.scale_logits(logits, controls.temperature, exact=numerics.exact)
    bits = jax.vmap(_uniform_bits, in_axes=(0, 0, None))(keys, positions, logits.shape[-1])
    with jax.enable_x64(numerics.exact):
        wide = scaled.astype(jnp.float64 if numerics.exact else jnp.float32)
        weight = jnp.exp(wide - wide.max(-1, keepdims=True))
        uniform = (bits.astype(wide.dtype) + 0.5) * 2.0**-32  # in (0, 1]
        race = jnp.where(controls.greedy, wide, weight / -jnp.log1p(-uniform))
        best = race == race.max(-1, keepdims=True)
    # The first of the best, by two plain reductions, as XLA's argmax is slow on CPU.
    ids = jnp.broadcast_to(jnp.arange(logits.shape[-1], dtype=jnp.int32)[None], logits.shape)
    tokens = jnp.where(best, ids, logits.shape[-1] - 1).min(-1)
    return tokens, vocabulary.token_logprobs(scaled, tokens, exact=numerics.exact)
