"""Compares two policies A and B on the same tokens, operator by operator of the decoder's forward.

Each operator runs three times: by A on A's inputs, by B on B's inputs, and by B on A's inputs.  The second
against the first is the *accumulated* difference, which includes all earlier operators.  The third against
the first is the operator's *own* difference.

The pieces are the modules and operations of `jetrl_jax.models.decoder`, in its order; a test compares the
last output with the decoder's own, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jetrl_jax.models import attention, ops
from jetrl_jax.models.decoder import Decoder, DecoderLayer, RMSNorm
from jetrl_jax.precision.parameters import jit

Values = dict[str, jax.Array]
FINAL = -1  # the layer number of the operators after the last layer


@dataclass(frozen=True)
class Difference:
    """The difference between the outputs of one operator in A and in B, over all tokens except padding.

    Attributes:
        layer: number of the layer; `FINAL` for the final norm and the head.
        operator: name of the operator.
        accumulated: ||B - A|| / ||A|| (Frobenius), each on its own inputs.
        own: the same with B on A's inputs; NaN if that was not run.
        unequal: share of elements whose bits differ, accumulated.
        largest: largest absolute difference, accumulated.
    """

    layer: int
    operator: str
    accumulated: float
    own: float
    unequal: float
    largest: float


def compare(
    a: Decoder, b: Decoder, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array
) -> tuple[list[Difference], jax.Array, jax.Array]:
    """Compares decoders A and B on the same tokens.

    Args:
      a, b: decoders of the same architecture, with their weights bound.
      token_ids, positions, segment_ids: int32 [R, T] as `Decoder.__call__` takes them.

    Returns:
      (differences in the order of the forward, logits of A, logits of B), logits float32 [R, T, V].

    Raises:
      ValueError: decoders of different sizes.
    """
    if a.config != b.config:
        raise ValueError(
            f"compare: the decoders differ in size: got {a.config} and {b.config}, expected one architecture"
        )
    used = np.asarray(segment_ids) > 0
    inputs_a, inputs_b = (_start(model, token_ids, positions, segment_ids) for model in (a, b))
    differences = []
    for (layer, name, run_a), (_, _, run_b) in zip(_operators(a), _operators(b), strict=True):
        out_a, out_b, own = run_a(inputs_a), run_b(inputs_b), run_b(inputs_a)
        differences.append(_difference(layer, name, out_a, out_b, own, used))
        inputs_a, inputs_b = inputs_a | out_a, inputs_b | out_b
    return differences, inputs_a["logits"], inputs_b["logits"]


def outputs(
    model: Decoder, token_ids: ArrayLike, positions: ArrayLike, segment_ids: ArrayLike
) -> Iterator[tuple[int, str, dict[str, np.ndarray]]]:
    """The outputs of every operator of one decoder, in the order of the forward.

    Arguments as `compare`.  Yields (layer, operator, {name: values}), values float32 [tokens, width]; the
    tokens are all except padding, row after row.
    """
    used = np.asarray(segment_ids) > 0
    values = _start(model, *(jnp.asarray(part) for part in (token_ids, positions, segment_ids)))
    for layer, name, run in _operators(model):
        made = run(values)
        values = values | made
        yield (
            layer,
            name,
            {
                key: np.asarray(value).astype(np.float32)[used].reshape(used.sum(), -1)
                for key, value in made.items()
            },
        )


def difference(
    layer: int, name: str, a: np.ndarray, b: np.ndarray, own: np.ndarray | None = None
) -> Difference:
    """The `Difference` of an operator's values `b` from `a`, float64; `own`: B's output on A's inputs."""
    size = np.linalg.norm(a) or 1.0
    gap = np.abs(b - a)
    return Difference(
        layer,
        name,
        accumulated=float(np.linalg.norm(gap) / size),
        own=float("nan") if own is None else float(np.linalg.norm(own - a) / size),
        unequal=float(np.mean(gap != 0)),
        largest=float(gap.max()),
    )


def _start(model: Decoder, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> Values:
    cos, sin = jit(ops.rope_table, static_argnums=(1, 2))(positions, model.config, model.numerics)
    embedding = model.embed_tokens.weight.get_value()
    mask = attention.packed_mask(segment_ids, model.numerics)
    return {
        "x": ops.round_to(embedding[token_ids], model.numerics.dtype),
        "mask": mask,
        "cos": cos,
        "sin": sin,
    }


def _operators(model: Decoder) -> Iterator[tuple[int, str, Callable[[Values], Values]]]:
    """(layer, name, function from values to the operator's outputs), in the order of the forward."""
    for index, layer in enumerate(model.layers):
        for name, operator in _LAYER.items():
            if name == "qk_norm" and not model.config.qk_norm:
                continue
            yield index, name, _bound(operator, layer)
    yield FINAL, "norm", _bound(_final_norm, model)
    yield FINAL, "lm_head", _bound(_head, model)


def _bound(operator: Callable[[Any, Values], Values], module: nnx.Module) -> Callable[[Values], Values]:
    graphdef, state = nnx.split(module)
    return lambda values: _program()(operator, graphdef, state, values)


def _apply(operator: Callable[[Any, Values], Values], graphdef: Any, state: Any, values: Values) -> Values:
    return operator(nnx.merge(graphdef, state), values)


@functools.cache
def _program() -> Any:
    """`_apply`, compiled once for each operator and its shapes."""
    return jit(_apply, static_argnums=(0, 1))


def _add_norm(norm: RMSNorm, values: Values) -> Values:
    normed, residual = norm.add(values["x"], values.get("residual"))
    return {"normed": normed.value, "residual": residual}


def _named(names: str, values: Iterable[jax.Array]) -> Values:
    return dict(zip(names.split(), values, strict=True))


# The decoder's own modules and operations, in its order.
_LAYER: dict[str, Callable[[DecoderLayer, Values], Values]] = {
    "input_norm": lambda layer, made: _add_norm(layer.input_layernorm, made),
    "qkv": lambda layer, made: _named(
        "q k v", (_heads(reader(made["normed"]), layer) for reader in layer.self_attn.readers)
    ),
    "qk_norm": lambda layer, made: {
        "q": layer.self_attn.q_norm(made["q"]),
        "k": layer.self_attn.k_norm(made["k"]),
    },
    "rope": lambda layer, made: {
        name: ops.rope(made[name], (made["cos"], made["sin"]), layer.self_attn.numerics)
        for name in ("q", "k")
    },
    "attention": lambda layer, made: {
        "attended": attention.attend(
            *layer.self_attn.rounded(made["q"], made["k"], made["v"]), made["mask"], layer.self_attn.numerics
        )
    },
    "o_proj": lambda layer, made: {"x": layer.self_attn.o_proj(made["attended"])},
    "post_norm": lambda layer, made: _add_norm(layer.post_attention_layernorm, made),
    "gate_up": lambda layer, made: _named(
        "gate up", (reader(made["normed"]) for reader in layer.mlp.readers)
    ),
    "silu": lambda layer, made: {
        "activated": ops.silu_multiply(made["gate"], made["up"], layer.mlp.numerics)
    },
    "down": lambda layer, made: {"x": layer.mlp.down_proj(made["activated"])},
}


def _heads(x: jax.Array, layer: DecoderLayer) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, layer.self_attn.config.head_dim)


def _final_norm(model: Decoder, values: Values) -> Values:
    return {"hidden": _add_norm(model.norm, values)["normed"]}


def _head(model: Decoder, values: Values) -> Values:
    return {"logits": model.logits(values["hidden"])}


def _difference(layer: int, name: str, a: Values, b: Values, own: Values, used: np.ndarray) -> Difference:
    flat_a, flat_b, flat_own = (
        np.concatenate([np.asarray(value).astype(np.float64)[used].reshape(-1) for value in values.values()])
        for values in (a, b, own)
    )
    return difference(layer, name, flat_a, flat_b, flat_own)
