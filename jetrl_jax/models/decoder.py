"""The policy: a decoder-only transformer, Qwen3 first, Qwen2 and Llama 3 as configurations of the same file.

    h = embed(ids)
    per layer:  h += o_proj(attention(rope(q_norm(q)), rope(k_norm(k)), v)),  q, k, v from norm(h)
                h += down_proj(silu(gate_proj(n)) * up_proj(n)),              n = norm(h)
    logits = norm(h) . W_head^T          in FP32

Parameters are FP32 masters under Hugging Face's names (without `model.`) in Hugging Face's layout [out, in],
which is also the K-major layout that FP8 tensor cores want.  A parameter's value may be an array (BF16 or
FP32 layer), a `ScaledArray` (rollout) or a `TrainableFp8Weight` (training): see `jetrl_jax.models.linear`.
The residual stream is carried as (x, residual) and added inside the norms, where the engine adds it.
What several FP8 layers read is quantised once, with the norm or SiLU before it where a kernel does both
(`jetrl_jax.models.fp8_producers`).

Axes: B rows, T tokens, D width, V vocabulary, N query heads, K key/value heads, H head width, S cache length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jetrl_jax.models import fp8_producers, ops, tensor_parallel, vocabulary
from jetrl_jax.models.anatomy import MATRICES, Matrix
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.dense import dense
from jetrl_jax.models.linear import InputCodes, linear
from jetrl_jax.models.sharded import held, whole
from jetrl_jax.precision.numerics import Numerics

KeysValues = tuple[jax.Array, jax.Array]  # [B, T, K, H] each; in a cache head-major, [B, K, S, H]
INIT_STDDEV = 0.02


def _normal(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    return nnx.Param(INIT_STDDEV * jax.random.normal(rngs.params(), shape, jnp.float32))


class Weight(nnx.Module):
    """A bare `weight`, so that embeddings and norms carry Hugging Face's names."""

    def __init__(self, weight: nnx.Param) -> None:
        self.weight = weight


class Linear(nnx.Module):
    """y = x W^T + b; weight [out, in], optional bias [out]."""

    def __init__(self, matrix: Matrix, config: ModelConfig, numerics: Numerics, *, rngs: nnx.Rngs) -> None:
        self.numerics = numerics
        outputs, inputs = matrix.shape(config)
        self.weight = _normal(rngs, outputs, inputs)
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32)) if matrix.has_bias(config) else None

    def __call__(self, x: jax.Array, codes: InputCodes | None = None, *, split_input: bool = False) -> jax.Array:
        """[..., in] -> [..., out] in `numerics.dtype`; codes, and under tensor parallelism x, as `linear` takes them."""
        dtype = self.numerics.dtype
        bias = None if self.bias is None else whole(self.bias, dtype)
        return linear(x, whole(self.weight, dtype), bias, self.numerics, codes=codes, split_input=split_input)


def _linears(module: str, config: ModelConfig, numerics: Numerics, rngs: nnx.Rngs) -> list[Linear]:
    """The linear layers of a module, in the order of `anatomy`."""
    return [Linear(matrix, config, numerics, rngs=rngs) for matrix in MATRICES if matrix.path.startswith(f"{module}.")]


class Attention(nnx.Module):
    """Grouped-query attention with RoPE and, in Qwen3, RMSNorm of each query and key head."""

    def __init__(self, config: ModelConfig, numerics: Numerics, *, rngs: nnx.Rngs) -> None:
        self.config, self.numerics = config, numerics
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = _linears("self_attn", config, numerics, rngs)
        if config.qk_norm:
            self.q_norm = Weight(nnx.Param(jnp.ones(config.head_dim, jnp.float32)))
            self.k_norm = Weight(nnx.Param(jnp.ones(config.head_dim, jnp.float32)))

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        rope_table: KeysValues,
        mask: jax.Array | None,  # bool [B, T, T]; None: all that is causal, or all in the cache
        cache: KeysValues | None = None,
        positions: jax.Array | None = None,  # int32 [B], where a decoded token goes
        codes: InputCodes | None = None,  # of x; None: each projection quantises it
    ) -> tuple[jax.Array, KeysValues]:
        """[B, T, D] -> ([B, T, D], keys and values: the new ones, or the cache with them written at `positions`)."""
        config, numerics = self.config, self.numerics
        x = tensor_parallel.enter(x)  # from here to o_proj, this device's heads
        q, k, v = (projection(x, codes).reshape(*x.shape[:2], -1, config.head_dim) for projection in self.readers)
        if config.qk_norm:
            q = ops.rms_norm(q, whole(self.q_norm.weight, numerics.dtype), config.rms_norm_eps, numerics)
            k = ops.rms_norm(k, whole(self.k_norm.weight, numerics.dtype), config.rms_norm_eps, numerics)
        q, k = ops.rope(q, rope_table, numerics), ops.rope(k, rope_table, numerics)
        if cache is None or positions is None:
            return self._output(ops.attention(q, k, v, mask, numerics)), (k, v)
        k, v = (ops.write_to_cache(old, new[:, 0], positions, numerics) for old, new in zip(cache, (k, v), strict=True))
        attended = ops.cached_attention(q[:, 0], k, v, positions, numerics)
        return self._output(attended[:, None]), (k, v)

    @property
    def readers(self) -> tuple[Linear, Linear, Linear]:
        """The layers that read the input."""
        return self.q_proj, self.k_proj, self.v_proj

    def _output(self, attended: jax.Array) -> jax.Array:
        return tensor_parallel.gather(self.o_proj(attended, split_input=True))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, numerics: Numerics, *, rngs: nnx.Rngs) -> None:
        self.numerics = numerics
        self.gate_proj, self.up_proj, self.down_proj = _linears("mlp", config, numerics, rngs)

    def __call__(self, x: jax.Array, codes: InputCodes | None = None) -> jax.Array:
        """[..., D] -> [..., D]; codes of x as `Attention` takes them."""
        x = tensor_parallel.enter(x)  # from here to down_proj, this device's channels
        gate, up = (projection(x, codes) for projection in self.readers)
        product, codes = fp8_producers.silu_multiply(gate, up, held(self.down_proj.weight), self.numerics)
        return tensor_parallel.gather(self.down_proj(product, codes, split_input=True))

    @property
    def readers(self) -> tuple[Linear, Linear]:
        """The layers that read the input."""
        return self.gate_proj, self.up_proj


class DecoderLayer(nnx.Module):
    """Norm, attention, norm, MLP, with the residual added inside the norms."""

    def __init__(self, config: ModelConfig, numerics: Numerics, *, rngs: nnx.Rngs) -> None:
        self.eps, self.numerics = config.rms_norm_eps, numerics
        self.input_layernorm = Weight(nnx.Param(jnp.ones(config.hidden_size, jnp.float32)))
        self.self_attn = Attention(config, numerics, rngs=rngs)
        self.post_attention_layernorm = Weight(nnx.Param(jnp.ones(config.hidden_size, jnp.float32)))
        self.mlp = MLP(config, numerics, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,  # [B, T, D], the branch not yet added
        residual: jax.Array | None,  # [B, T, D], None before the first layer
        rope_table: KeysValues,
        mask: jax.Array | None,
        cache: KeysValues | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, KeysValues]:
        """Returns (branch output, residual, keys and values)."""
        normed, residual, codes = self._norm(self.input_layernorm, x, residual, self.self_attn.readers)
        x, keys_values = self.self_attn(normed, rope_table, mask, cache, positions, codes)
        normed, residual, codes = self._norm(self.post_attention_layernorm, x, residual, self.mlp.readers)
        return self.mlp(normed, codes), residual, keys_values

    def _norm(self, norm: Weight, x: jax.Array, residual: jax.Array | None, readers: tuple[Linear, ...]) -> fp8_producers.Normed:
        weight = whole(norm.weight, self.numerics.dtype)
        weights = tuple(held(reader.weight) for reader in readers)
        return fp8_producers.rms_norm(x, residual, weight, self.eps, weights, self.numerics)


class Decoder(nnx.Module):
    """A causal language model.

    Args:
      config: sizes and architecture.
      numerics: dtype between operations, mirrored engine and exactness.
      rngs: its `params` stream initialises: normal(0, 0.02) matrices, unit norms, zero biases.
      remat: keep only each layer's input for the backward and compute (and gather) the rest again there.

    Accuracy: with `compute_dtype="float32"` the logits' error against Hugging Face transformers in float64 is at
    most twice that of transformers in FP32 (tests/parity/test_hf_logits.py).
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, *, rngs: nnx.Rngs, remat: bool = False) -> None:
        self.config, self.numerics, self.remat = config, numerics, remat
        self.embed_tokens = Weight(_normal(rngs, config.vocab_size, config.hidden_size))
        self.layers = nnx.List([DecoderLayer(config, numerics, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = Weight(nnx.Param(jnp.ones(config.hidden_size, jnp.float32)))
        if not config.tie_word_embeddings:
            self.lm_head = Weight(_normal(rngs, config.vocab_size, config.hidden_size))

    def __call__(self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """Hidden states after the final norm.

        Args:
          token_ids, positions, segment_ids: int32 [B, T].  A token sees the tokens at or before it in its row
            whose segment id is its own; segment 0 is padding, left or right.

        Returns:
          [B, T, D] in `numerics.dtype`; what stands at padding is finite and meaningless.
        """
        return self.prefill(token_ids, positions, segment_ids)[0]

    def prefill(
        self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, list[KeysValues]]:
        """As `__call__`, and each layer's keys and values [B, T, K, H]; without segment ids padding may be at the right alone."""
        mask = None if segment_ids is None else ops.packed_mask(segment_ids, self.config, self.numerics)
        return self._run(token_ids, positions, mask, None)

    def decode(self, token_ids: jax.Array, positions: jax.Array, cache: list[KeysValues]) -> tuple[jax.Array, list[KeysValues]]:
        """One token of each row, against a cache that holds the row's tokens 0 .. position - 1.

        Args:
          token_ids, positions: int32 [B]; positions are below S.
          cache: each layer's keys and values [B, K, S, H], as `empty_cache` makes them.

        Returns:
          (hidden [B, D], the cache with the token written at its position).
        """
        hidden, cache = self._run(token_ids[:, None], positions[:, None], None, cache)
        return hidden[:, 0], cache

    def _run(
        self, token_ids: jax.Array, positions: jax.Array, mask: jax.Array | None, cache: list[KeysValues] | None
    ) -> tuple[jax.Array, list[KeysValues]]:
        table = ops.rope_table(positions, self.config, self.numerics)
        embedding = whole(self.embed_tokens.weight, self.numerics.dtype)
        x, residual, keys_values = vocabulary.embed(embedding, token_ids, self.numerics, split=self.splits(embedding)), None, []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache[index]
            run = jax.checkpoint(layer.__call__) if self.remat else layer
            x, residual, new = run(x, residual, table, mask, layer_cache, positions[:, 0])
            keys_values.append(new)
        assert residual is not None  # there is at least one layer
        weight = whole(self.norm.weight, self.numerics.dtype)
        return ops.add_rms_norm(x, residual, weight, self.config.rms_norm_eps, self.numerics)[0], keys_values

    def head(self) -> jax.Array:
        """The matrix [V, D] that makes logits; under tensor parallelism this device's rows."""
        return whole((self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight, self.numerics.dtype)

    def splits(self, matrix: jax.Array) -> bool:
        """Whether embedding or head [V, D] is a part: other devices hold the rest of the vocabulary."""
        return matrix.shape[0] < self.config.vocab_size

    def logits(self, hidden: jax.Array, head: jax.Array | None = None) -> jax.Array:
        """hidden [..., D] -> float32 logits [..., V], one for each row of `head` (None: `head()`)."""
        head = self.head() if head is None else head
        if self.splits(head):
            hidden = tensor_parallel.enter(hidden)
        flat = dense(hidden.reshape(-1, hidden.shape[-1]), head, jnp.float32, self.numerics)
        return flat.reshape(*hidden.shape[:-1], -1)


def empty_cache(config: ModelConfig, numerics: Numerics, rows: int, length: int, kv_heads: int | None = None) -> list[KeysValues]:
    """Zeroed keys and values for `rows` sequences of up to `length` tokens: [rows, K, length, H] per layer; K as configured."""
    shape = (rows, kv_heads or config.num_kv_heads, length, config.head_dim)
    with jax.enable_x64(numerics.exact):
        return [
            (jnp.zeros(shape, ops.cache_dtype(numerics)), jnp.zeros(shape, ops.cache_dtype(numerics))) for _ in range(config.num_layers)
        ]
