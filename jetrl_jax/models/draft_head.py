"""A small model that guesses the policy's next tokens from its hidden states, in EAGLE-3's form.

    g_t = fc([h^a_t ; h^b_t ; h^c_t])                  features: the residual stream before three layers
    x_t = g_t + attention([norm(e_{t+1}) ; norm(g_t)]) e: the policy's embedding of the token after t
    f_t = x_t + mlp(norm(x_t))
    logits of the token after t + 1 = norm(f_t) . W^T  over the draft's own vocabulary

f_t stands for g_{t+1} when the next guess is made: there the policy's features are not known yet.  The
attention sees its own earlier inputs, those of guesses included.  A guess decides no token
(`rollout.embedded.speculation`), so the head computes in the policy's dtype with ordinary sums.

Names and layouts are those of vLLM's `llama_eagle3`, which loads an exported head (`bridge.hf.draft`).
Source: Li et al., EAGLE-3, arXiv 2503.01840.

Axes: B rows, T tokens, D width of the policy, N query heads, K key/value heads, H head width, W draft
vocabulary.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jetrl_jax.models import ops
from jetrl_jax.models.anatomy import FEWEST_LAYERS
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.decoder import INIT_STDDEV, MLP, RMSNorm
from jetrl_jax.precision.numerics import Numerics

KeysValues = tuple[Float[Array, "B T N H"], Float[Array, "B T N H"]]


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers before which the residual stream is read: EAGLE-3's, others in a shallow policy.

    Raises:
      ValueError: fewer than four layers.
    """
    if num_layers < FEWEST_LAYERS:
        raise ValueError(
            f"feature_layers: a draft head reads three layers: got num_layers={num_layers}, expected at "
            f"least {FEWEST_LAYERS}."
        )
    low, middle, high = 2, num_layers // 2, num_layers - 3
    return (low, middle, high) if low < middle < high else (1, middle, num_layers - 1)


class Projection(nnx.Module):
    """y = x W^T in the dtype of x; weight [out, in]."""

    def __init__(self, outputs: int, inputs: int, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(
            INIT_STDDEV * jax.random.normal(rngs.params(), (outputs, inputs), jnp.float32)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out]; sums in FP32."""
        return product(x, self.weight[...]).astype(x.dtype)


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x W^T with FP32 sums of products in the dtype of x, float32 [..., out]."""
    return jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype), preferred_element_type=jnp.float32)


class Attention(nnx.Module):
    """Grouped-query attention of inputs [norm(e) ; norm(g)], without norms of heads."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, heads = config.hidden_size, config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = Projection(heads, 2 * width, rngs)
        self.k_proj = Projection(kv, 2 * width, rngs)
        self.v_proj = Projection(kv, 2 * width, rngs)
        self.o_proj = Projection(width, heads, rngs)

    def project(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], numerics: Numerics
    ) -> tuple[jax.Array, KeysValues]:
        """(queries, keys and values), rotated, each [B, T, N, H]; a key is repeated for the queries of its
        group.
        """
        q, k, v = (
            proj(x).reshape(*x.shape[:-1], -1, self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = ops.rope(q, rope, numerics), ops.rope(k, rope, numerics)
        group = q.shape[2] // k.shape[2]
        return q, (jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2))


class DraftLayer(nnx.Module):
    """The head's only layer."""

    def __init__(self, config: ModelConfig, numerics: Numerics, rngs: nnx.Rngs) -> None:
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps, numerics)
        self.hidden_norm = RMSNorm(config.hidden_size, eps, numerics)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps, numerics)
        self.mlp = MLP(config, numerics, rngs=rngs)


class DraftHead(nnx.Module):
    """The head of one policy.

    Args:
      config: the policy's.
      numerics: the policy's, resolved.
      d2t: the token id of each entry of the draft's vocabulary, ascending.

    Raises:
      ValueError: a policy of fewer than four layers; token ids that are not ascending, or not the policy's.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, d2t: np.ndarray, *, rngs: nnx.Rngs) -> None:
        feature_layers(config.num_layers)
        ids = np.asarray(d2t, np.int64)
        if not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= config.vocab_size:
            raise ValueError(
                f"DraftHead: not a part of the vocabulary: got d2t {ids[:3]}... of {len(ids)} ids, expected "
                f"ascending ids below vocab_size={config.vocab_size}."
            )
        self.config = config
        self.numerics = numerics
        self.fc = Projection(config.hidden_size, 3 * config.hidden_size, rngs)
        self.midlayer = DraftLayer(config, numerics, rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        self.lm_head = Projection(len(ids), config.hidden_size, rngs)
        self.d2t = nnx.Variable(jnp.asarray(ids, jnp.int32))  # not trained

    def combine(self, features: Float[Array, "B T D3"]) -> Float[Array, "B T D"]:
        """g of the three residual streams of each token, one after the other."""
        return self.fc(features)

    def logits(self, states: Float[Array, "... D"]) -> Float[Array, "... W"]:
        """The float32 logits over the draft's vocabulary of states f."""
        return product(self.norm(states), self.lm_head.weight[...])

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        states: Float[Array, "B T D"],
        positions: Int32[Array, "B T"],
        earlier: list[KeysValues],
        masks: list[Bool[Array, "B T S"]],
    ) -> tuple[Float[Array, "B T D"], KeysValues]:
        """The states f of one step, and the keys and values of its inputs.

        Args:
          embedded: e, of the token after each.
          states: g, or f of the step before.
          positions: of each token (that after which `embedded` stands).
          earlier: keys and values of earlier steps.
          masks: which of the keys of each earlier step, and then of this one, a token sees.
        """
        layer, numerics = self.midlayer, self.numerics
        inputs = jnp.concatenate([layer.input_layernorm(embedded), layer.hidden_norm(states)], axis=-1)
        q, own = layer.self_attn.project(inputs, ops.rope_table(positions, self.config, numerics), numerics)
        attended = _attend(q, [*earlier, own], masks)
        x = states + layer.self_attn.o_proj(attended.reshape(*states.shape[:-1], -1))
        return x + layer.mlp(layer.post_attention_layernorm(x)), own


def _attend(q: jax.Array, pairs: list[KeysValues], masks: list[jax.Array]) -> jax.Array:
    """Softmax attention over several sets of keys, [B, T, N, H]; sums in FP32."""
    scores, exact = [], q.astype(jnp.float32) / math.sqrt(q.shape[-1])
    for (keys, _), mask in zip(pairs, masks, strict=True):
        score = jnp.einsum("btnh,bsnh->bnts", exact, keys.astype(jnp.float32))
        scores.append(jnp.where(mask[:, None], score, -jnp.inf))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    values = jnp.concatenate([values for _, values in pairs], axis=1).astype(jnp.float32)
    return jnp.einsum("bnts,bsnh->btnh", weights, values).astype(q.dtype)
