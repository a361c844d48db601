"""The policy, a decoder-only transformer: Qwen3, and with other configurations Qwen2 and Llama 3.

    h = embed(ids)
    per layer:  h += o_proj(attention(rope(q_norm(q)), rope(k_norm(k)), v)),  q, k, v from norm(h)
                h += down_proj(silu(gate_proj(n)) * up_proj(n)),              n = norm(h)
    logits = norm(h) . W_head^T          in FP32

Parameters are FP32 masters with Hugging Face's names (without `model.`) and layout [out, in], which is also
the K-major layout that FP8 tensor cores need.  A parameter's value may be an array (BF16 or FP32 layer), a
`ScaledArray` (rollout) or a `TrainableFp8Weight` (training); see `jetrl_jax.models.linear`.

The residual stream is carried as (x, residual) and added inside the norms, where the engine adds it.
An `Activation` is a value and, if FP8 layers read it, its codes, quantised once for all of them
(`jetrl_jax.models.fp8_producers`).  If weights or layers are split over devices, a module gathers its own
weights (`jetrl_jax.models.sharded`) and activations (`jetrl_jax.models.tensor_parallel`).

Axes: B rows, T tokens, t new tokens, D width, V vocabulary, N query heads, K key/value heads, H head width,
S cache length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetrl_jax.models import attention, fp8_producers, ops, tensor_parallel, vocabulary
from jetrl_jax.models.anatomy import MATRICES, Matrix
from jetrl_jax.models.cache import KeysValues, KVCache
from jetrl_jax.models.choices import resolve
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.dense import dense, trainable_dense
from jetrl_jax.models.linear import Activation, Adapter, activation, linear
from jetrl_jax.models.lora import AdapterMatrix, Adapters
from jetrl_jax.models.sharded import gathered, local
from jetrl_jax.precision.kv_cache import KVScale, KVUse, stored
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.trainable_weight import TrainableMatrix

RopeTable = tuple[jax.Array, jax.Array]  # cos and sin, [B, T, H / 2] each
Embeddings = jax.Array | TrainableMatrix  # [V, D]
INIT_STDDEV = 0.02


def _normal(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    return nnx.Param(INIT_STDDEV * jax.random.normal(rngs.params(), shape, jnp.float32))


class Embedding(nnx.Module):
    """A matrix [V, D] for embeddings of ids, or for the head that makes logits."""

    def __init__(self, config: ModelConfig, numerics: Numerics, *, rngs: nnx.Rngs) -> None:
        self.numerics = numerics
        self.weight = _normal(rngs, config.vocab_size, config.hidden_size)

    def whole(self) -> Embeddings:
        """The gathered matrix [V, D]; under tensor parallelism this device's rows."""
        return gathered(self.weight, self.numerics.dtype)


class Linear(nnx.Module):
    """y = x W^T + b; weight [out, in], optional bias [out], optional adapter (`jetrl_jax.models.lora`)."""

    def __init__(
        self,
        matrix: Matrix,
        config: ModelConfig,
        numerics: Numerics,
        adapters: Adapters | None,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.numerics = numerics
        self.split_input = matrix.split_input
        outputs, inputs = matrix.shape(config)
        self.weight = _normal(rngs, outputs, inputs)
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32)) if matrix.has_bias(config) else None
        self.adapters = adapters if adapters is not None and matrix.name in adapters.targets else None
        if self.adapters is not None:
            self.lora_A = AdapterMatrix(self.adapters.rank, inputs)
            self.lora_B = AdapterMatrix(outputs, self.adapters.rank)

    def __call__(self, x: Activation | jax.Array) -> jax.Array:
        """[..., in] -> [..., out] in `numerics.dtype`.

        If devices share the layer: from whole inputs to this device's outputs or, in a layer that reads such
        outputs, from this device's inputs to whole outputs.
        """
        dtype = self.numerics.dtype
        bias, weight = None if self.bias is None else gathered(self.bias, dtype), gathered(self.weight, dtype)
        x, adapter = read(x, (self,)), self._adapter()
        y = linear(x, weight, bias, self.numerics, split_input=self.split_input, adapter=adapter)
        return tensor_parallel.gather(y) if self.split_input else y

    def _adapter(self) -> Adapter | None:
        if self.adapters is None:
            return None
        a, b = (gathered(matrix.weight, self.numerics.dtype) for matrix in (self.lora_A, self.lora_B))
        return a, b, self.adapters.scale


def read(x: Activation | jax.Array, readers: Sequence[Linear]) -> Activation:
    """x as these layers read it; an array is quantised if one of them is FP8."""
    if isinstance(x, Activation):
        return x
    made = activation(x, [local(reader.weight) for reader in readers], readers[0].numerics)
    return made if readers[0].split_input else made.entered()


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * w; weight [D]."""

    def __init__(self, features: int, eps: float, numerics: Numerics) -> None:
        self.eps = eps
        self.numerics = numerics
        self.weight = nnx.Param(jnp.ones(features, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return ops.rms_norm(x, gathered(self.weight, self.numerics.dtype), self.eps, self.numerics)

    def add(
        self, x: jax.Array, residual: jax.Array | None, readers: Sequence[Linear] = ()
    ) -> tuple[Activation, jax.Array]:
        """RMSNorm of x + residual (of x if None), for the layers `readers`; returns ([..., D], the sum)."""
        weight = gathered(self.weight, self.numerics.dtype)
        normed, total = fp8_producers.rms_norm(
            x, residual, weight, self.eps, [local(r.weight) for r in readers], self.numerics
        )
        return (normed.entered() if readers else normed), total


def _check_shapes(caller: str, token_ids: jax.Array, others: dict[str, tuple[int, ...]]) -> None:
    """Raises ValueError if shapes differ; a smaller one would be broadcast to wrong positions or masks."""
    if (
        token_ids.ndim != 2
        or 0 in token_ids.shape
        or any(shape != token_ids.shape for shape in others.values())
    ):
        found = " and ".join(
            f"{name}.shape={shape}" for name, shape in {"token_ids": token_ids.shape, **others}.items()
        )
        raise ValueError(
            f"{caller}: wrong shapes: got {found}, expected one shape [rows, tokens] of all, at least "
            "one of each."
        )


def _check_cache(
    shape: tuple[int, ...], positions: jax.Array, cache: Sequence[KVCache], config: ModelConfig
) -> None:
    """Raises ValueError if tokens and cache do not fit, such as a position beyond the cache."""
    rows, count = shape
    problems = (
        []
        if len(cache) == config.num_layers
        else [f"{len(cache)} layers in cache, expected {config.num_layers}"]
    )
    heads = config.num_kv_heads // tensor_parallel.degree()
    for index, layer in enumerate(cache):
        expected = (rows, heads, layer.length, config.head_dim)
        if not layer.keys.shape == layer.values.shape == expected or layer.length < count:
            problems.append(
                f"cache[{index}] {layer.keys.shape}, expected [B, K, S, H] = {expected} and S of at "
                f"least t={count}"
            )
            break
    if not problems and not isinstance(positions, jax.core.Tracer):
        known = np.asarray(positions)
        if (
            (known < 0).any()
            or (known >= cache[0].length).any()
            or (np.diff(known.astype(np.int64), axis=1) <= 0).any()
        ):
            problems.append(
                f"positions {known.tolist()}, expected them ascending in each row, from 0 to below "
                f"S={cache[0].length}"
            )
    if problems:
        raise ValueError(f"Decoder.extend: tokens and cache do not fit: got {'; '.join(problems)}.")


def _linears(
    module: str, config: ModelConfig, numerics: Numerics, adapters: Adapters | None, rngs: nnx.Rngs
) -> list[Linear]:
    """The linear layers of a module, in the order of `anatomy`."""
    return [
        Linear(matrix, config, numerics, adapters, rngs=rngs)
        for matrix in MATRICES
        if matrix.path.startswith(f"{module}.")
    ]


class Attention(nnx.Module):
    """Grouped-query attention with RoPE and, in Qwen3, RMSNorm of each query and key head."""

    def __init__(
        self, config: ModelConfig, numerics: Numerics, adapters: Adapters | None = None, *, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        self.numerics = numerics
        linears = _linears("self_attn", config, numerics, adapters, rngs)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = linears
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, numerics)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, numerics)
        for kind in numerics.kinds:
            setattr(self, f"{kind}_scale", KVScale(jnp.ones((), jnp.float32)))

    def __call__(
        self,
        x: Activation | jax.Array,  # [B, T, D]
        rope: RopeTable,
        mask: jax.Array | None,  # bool [B, T, T]; None: every earlier token, or the whole cache
        cache: KVCache | None = None,
        positions: jax.Array | None = None,  # int32 [B, T], places in the cache
    ) -> tuple[jax.Array, KeysValues | KVCache]:
        """[B, T, D] -> ([B, T, D], keys and values or, if given, the cache with them)."""
        numerics, x = self.numerics, read(x, self.readers)
        q, k, v = (
            projection(x).reshape(*x.value.shape[:2], -1, self.config.head_dim) for projection in self.readers
        )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = ops.rope(q, rope, numerics), ops.rope(k, rope, numerics)
        made, scales = {"k": k, "v": v, "q": q}, self.scales
        q, k, v = self.rounded(q, k, v)
        pair = (scales["k"], scales["v"]) if scales else None
        if cache is None:
            use = KVUse.of(made, scales) if scales else None
            return self.o_proj(attention.attend(q, k, v, mask, numerics)), KeysValues(k, v, pair, use)
        assert positions is not None  # a cache comes with the positions of the new tokens
        cache = cache.scaled(pair).write(k, v, positions, numerics)
        return self.o_proj(attention.attend_to_cache(q, cache, positions, numerics)), cache.scaled(None)

    def rounded(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values as attention reads them."""
        scales = self.scales

        def one(kind: str, x: jax.Array) -> jax.Array:
            return stored(x, scales[kind]) if kind in scales else x

        return one("q", q), one("k", k), one("v", v)

    @property
    def scales(self) -> dict[str, jax.Array]:
        """The scale of each kind that is rounded to FP8, see `jetrl_jax.precision.kv_cache`."""
        return {kind: getattr(self, f"{kind}_scale").get_value() for kind in self.numerics.kinds}

    @property
    def readers(self) -> tuple[Linear, Linear, Linear]:
        """The layers that read the input."""
        return self.q_proj, self.k_proj, self.v_proj


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(
        self, config: ModelConfig, numerics: Numerics, adapters: Adapters | None = None, *, rngs: nnx.Rngs
    ) -> None:
        self.numerics = numerics
        self.gate_proj, self.up_proj, self.down_proj = _linears("mlp", config, numerics, adapters, rngs)

    def __call__(self, x: Activation | jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        x, numerics, reader = read(x, self.readers), self.numerics, local(self.down_proj.weight)
        if fp8_producers.fuses_silu_gradient([local(layer.weight) for layer in self.readers], numerics):
            gate, up = (gathered(layer.weight, numerics.dtype) for layer in self.readers)
            return self.down_proj(fp8_producers.gated(x, gate, up, reader, numerics))
        gate, up = (projection(x) for projection in self.readers)
        return self.down_proj(fp8_producers.silu_multiply(gate, up, reader, numerics))

    @property
    def readers(self) -> tuple[Linear, Linear]:
        """The layers that read the input."""
        return self.gate_proj, self.up_proj


class DecoderLayer(nnx.Module):
    """Norm, attention, norm, MLP, with the residual added inside the norms."""

    def __init__(
        self, config: ModelConfig, numerics: Numerics, adapters: Adapters | None = None, *, rngs: nnx.Rngs
    ) -> None:
        numerics = resolve(numerics, config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        self.self_attn = Attention(config, numerics, adapters, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        self.mlp = MLP(config, numerics, adapters, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,  # [B, T, D], the branch not yet added
        residual: jax.Array | None,  # [B, T, D], None before the first layer
        rope: RopeTable,
        mask: jax.Array | None,
        cache: KVCache | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, KeysValues | KVCache]:
        """Returns (branch output, residual, keys and values or the cache)."""
        n, residual = self.input_layernorm.add(x, residual, self.self_attn.readers)
        attended, kept = self.self_attn(n, rope, mask, cache, positions)
        n, residual = self.post_attention_layernorm.add(attended, residual, self.mlp.readers)
        return self.mlp(n), residual, kept


class Decoder(nnx.Module):
    """A causal language model.

    Args:
      config: sizes and architecture.
      numerics: dtype between operations, mirrored engine and exactness; implementations are resolved here
        (`choices.resolve`).
      rngs: its `params` stream initialises normal(0, 0.02) matrices; norms are one, biases zero.
      remat: keep only each layer's input for the backward, which computes (and gathers) the rest again.
      adapters: of which linear layers; None: of none.

    Accuracy: with `compute_dtype="float32"` the logits' error against Hugging Face transformers in float64 is
    at most twice that of transformers in FP32 (tests/parity/test_hf_logits.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        *,
        rngs: nnx.Rngs,
        remat: bool = False,
        adapters: Adapters | None = None,
    ) -> None:
        numerics = resolve(numerics, config)
        self.config = config
        self.adapters = adapters
        self.numerics = numerics
        self.remat = remat
        self.embed_tokens = Embedding(config, numerics, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, numerics, adapters, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config, numerics, rngs=rngs)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """Hidden states after the final norm.

        Args:
          token_ids, positions, segment_ids: int32 [B, T].  A token sees the tokens at or before it in its row
            with the same segment id; segment 0 is padding, on the left or right.  A segment begins at a
            multiple of `attention.segment_unit(numerics)` tokens: 1, but for the kernels of attention.

        Returns:
          [B, T, D] in `numerics.dtype`; values at padding are finite but meaningless.
        """
        return self.prefill(token_ids, positions, segment_ids)[0]

    def with_use(
        self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, KVUse | None]:
        """As `__call__`, with the use of the FP8 range [L, n] by the tokens that are no padding.

        None if keys and values are not in FP8.
        """
        hidden, kept = self.prefill(token_ids, positions, segment_ids)
        uses = [layer.use for layer in kept if layer.use is not None]
        return hidden, KVUse.total(uses, segment_ids > 0) if uses else None

    def prefill(
        self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, list[KeysValues]]:
        """As `__call__`, with each layer's keys and values (for `KVCache.of`).

        Without segment ids only right padding is allowed.
        """
        shapes = {"positions": positions.shape} | (
            {} if segment_ids is None else {"segment_ids": segment_ids.shape}
        )
        _check_shapes("Decoder", token_ids, shapes)
        mask = None if segment_ids is None else attention.packed_mask(segment_ids, self.numerics)
        return self._run(token_ids, positions, mask, None)[:2]

    def with_features(
        self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array, layers: Sequence[int]
    ) -> tuple[jax.Array, jax.Array]:
        """As `__call__`, with the residual stream before each of `layers`, side by side [B, T, L D]."""
        mask = attention.packed_mask(segment_ids, self.numerics)
        hidden, _, features = self._run(token_ids, positions, mask, None, layers)
        return hidden, jnp.concatenate(features, axis=-1)

    def featured(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        cache: list[KVCache] | None,
        layers: Sequence[int],
    ) -> tuple[jax.Array, list[Any], jax.Array]:
        """`prefill` without segments (no cache), or `extend`, and the residual stream before each layer."""
        hidden, kept, features = self._run(token_ids, positions, None, cache, layers)
        return hidden, kept, jnp.concatenate(features, axis=-1)

    def extend(
        self, token_ids: jax.Array, positions: jax.Array, cache: list[KVCache]
    ) -> tuple[jax.Array, list[KVCache]]:
        """Runs new tokens of each row against a cache of the row's earlier tokens; decoding has t = 1.

        Args:
          token_ids: int32 [B, t].
          positions: int32 [B, t], ascending within a row and below S; a token sees the cached and new tokens
            up to its own position.
          cache: one per layer, from `empty_cache` or `KVCache.of`.

        Returns:
          (hidden [B, t, D], the cache with the tokens written at their positions).  With `exact` the bits of
          a token do not depend on t (tests/parity/test_extend.py).

        Raises:
          ValueError: other shapes, or a cache with other rows, layers or heads, or shorter than t; other
            positions, if they are known (outside `jax.jit`).
        """
        _check_shapes("Decoder.extend", token_ids, {"positions": positions.shape})
        _check_cache(token_ids.shape, positions, cache, self.config)
        return self._run(token_ids, positions, None, cache)[:2]

    def _run(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        cache: list[KVCache] | None,
        features_of: Sequence[int] = (),
    ) -> tuple[jax.Array, list[Any], list[jax.Array]]:
        rope = ops.rope_table(positions, self.config, self.numerics)
        embedding = self.embed_tokens.whole()
        x, residual, kept = (
            vocabulary.embed(embedding, token_ids, self.numerics, split=self.splits(embedding)),
            None,
            [],
        )
        features = []
        for index, layer in enumerate(self.layers):
            if index in features_of and residual is not None:
                features.append(ops.round_to(x.astype(jnp.float32) + residual.astype(jnp.float32), x.dtype))
            run = jax.checkpoint(layer.__call__) if self.remat else layer
            x, residual, new = run(
                x, residual, rope, mask, *(() if cache is None else (cache[index], positions))
            )
            kept.append(new)
        return self.norm.add(x, residual)[0].value, kept, features

    def head(self) -> Embeddings:
        """The gathered matrix [V, D] that makes logits; under tensor parallelism this device's rows."""
        return (self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).whole()

    def splits(self, matrix: Embeddings) -> bool:
        """Whether an embedding or head [V, D] is only a part, with the rest on other devices."""
        return matrix.shape[0] < self.config.vocab_size

    def logits(self, hidden: jax.Array, head: Embeddings | None = None) -> jax.Array:
        """The float32 logits [..., V] of hidden [..., D], one per row of `head` (None: `head()`)."""
        head = self.head() if head is None else head
        if self.splits(head):
            hidden = tensor_parallel.enter(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        if isinstance(head, TrainableMatrix):
            flat = trainable_dense(flat, head.master, head.value, jnp.float32, self.numerics)
        else:
            flat = dense(flat, head, jnp.float32, self.numerics)
        return flat.reshape(*hidden.shape[:-1], -1)


def without_adapters(model: Decoder) -> Decoder:
    """The structure of a model without its adapters; its parameters are abstract."""
    return nnx.eval_shape(lambda: Decoder(model.config, model.numerics, rngs=nnx.Rngs(0), remat=model.remat))
