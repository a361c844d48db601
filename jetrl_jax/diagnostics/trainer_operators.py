"""The trainer's operators other than FP8 products, as functions of numpy arrays, for `check-engine`.

Each takes a case of the contract (parameters and inputs by name) and returns its outputs by name.  It
computes them as an exact run beside vLLM does: compiled, rounded where `numerics.engine_variant` says, with
products that are not FP8 in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.models import attention, ops, vocabulary
from jetrl_jax.models.choices import resolve
from jetrl_jax.models.config import ModelConfig, RopeScaling
from jetrl_jax.models.dense import dense
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import jit

Arrays = Mapping[str, Any]
BF16 = jnp.bfloat16


def run(case: str, parameters: Mapping[str, Any], inputs: Arrays) -> dict[str, np.ndarray]:
    """The outputs by name of one case of the contract, such as "rope llama3"."""
    operator = OPERATORS[case.split()[0]]
    numerics = resolve(
        Numerics(attention="xla", dense="float64", engine_variant=parameters.get("engine_variant", "native")),
        _model(),
    )
    outputs = jit(lambda arrays: operator(parameters, arrays, numerics))(
        {name: jnp.asarray(array) for name, array in inputs.items()}
    )
    return {name: np.asarray(array) for name, array in outputs.items()}


def _model(head_dim: int = 2, theta: float = 1e4, scaling: RopeScaling | None = None) -> ModelConfig:
    """The smallest model with this rotary embedding; its other sizes are not read."""
    return ModelConfig(
        architecture="llama",
        vocab_size=1,
        hidden_size=head_dim,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        max_position_embeddings=1 << 14,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=False,
        qk_norm=False,
        eos_token_ids=(),
    )


def _norm(parameters: Mapping[str, Any], arrays: Arrays, numerics: Numerics) -> dict[str, jax.Array]:
    weight = arrays["weight"].astype(jnp.float32)
    normed, total = ops.add_rms_norm(arrays["x"], arrays["residual"], weight, parameters["eps"], numerics)
    return {"normed": normed, "total": total}


def _rope(parameters: Mapping[str, Any], arrays: Arrays, numerics: Numerics) -> dict[str, jax.Array]:
    x = arrays["x"][None]
    config = _model(
        x.shape[-1],
        parameters["theta"],
        RopeScaling(**parameters["scaling"]) if parameters["scaling"] else None,
    )
    return {"rotated": ops.rope(x, ops.rope_table(arrays["positions"][None], config, numerics), numerics)[0]}


def _attention(parameters: Mapping[str, Any], arrays: Arrays, numerics: Numerics) -> dict[str, jax.Array]:
    q, k, v = (arrays[name][None] for name in "qkv")
    return {"attended": attention.attend(q, k, v, None, numerics)[0]}


def _silu(parameters: Mapping[str, Any], arrays: Arrays, numerics: Numerics) -> dict[str, jax.Array]:
    return {"product": ops.silu_multiply(arrays["gate"], arrays["up"], numerics)}


def _linear(parameters: Mapping[str, Any], arrays: Arrays, numerics: Numerics) -> dict[str, jax.Array]:
    bias = arrays["bias"].astype(jnp.float32) if "bias" in arrays else None
    return {"out": dense(arrays["x"], arrays["weight"], BF16, numerics, bias)}


def _head(parameters: Mapping[str, Any], arrays: Arrays, numerics: Numerics) -> dict[str, jax.Array]:
    logits = dense(arrays["x"], arrays["weight"], jnp.float32, numerics)
    every = jnp.tile(jnp.arange(logits.shape[1], dtype=jnp.int32)[None], (logits.shape[0], 1))
    logprobs = jax.vmap(
        lambda ids: vocabulary.token_logprobs(logits, ids, exact=numerics.exact), in_axes=1, out_axes=1
    )(every)
    return {"logits": logits, "logprobs": logprobs}


OPERATORS: Mapping[str, Callable[..., dict[str, jax.Array]]] = {
    "norm": _norm,
    "rope": _rope,
    "attention": _attention,
    "silu": _silu,
    "linear": _linear,
    "head": _head,
}
