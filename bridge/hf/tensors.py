"""A published policy version as the tensors of a Hugging Face checkpoint: the one definition of this mapping.

    FP8 weight         ->  X.weight float8_e4m3fn [N, K]  and  X.weight_scale_inv float32 [ceil(N/128), ceil(K/128)]
    any other tensor   ->  X in bfloat16

Codes and scales are the trainer's own, never requantised.  Checkpoint export, weight sync and manifests use this order
and these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from bridge.hf.names import parameter_shapes, to_hf_name
from jetrl_jax.errors import UserError
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.precision.formats import FP8_BLOCKS
from jetrl_jax.precision.parameters import named_params
from pallas_kernels import ScaledArray

# Layers that vLLM fuses: their parts share one format, and each part but the last ends on a block's edge.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def hf_tensors(config: ModelConfig, published: nnx.State) -> Iterator[tuple[str, Any]]:
    """(name, array) pairs of `PrecisionPlan.publish`'s result, in the order of `parameter_shapes`; arrays stay on their devices."""
    values = dict(named_params(published))
    for path in parameter_shapes(config):
        name, value = to_hf_name(path), values[path]
        if isinstance(value, ScaledArray):
            yield name, value.qvalue
            yield f"{name}_scale_inv", value.scale
        else:
            yield name, jnp.asarray(value, jnp.bfloat16)


def to_host(array: Any) -> np.ndarray:
    """A contiguous numpy array of the same bits."""
    return np.ascontiguousarray(np.asarray(array))


def quantization_config(model: ModelConfig, fp8_paths: Iterable[str]) -> dict[str, Any] | None:
    """`quantization_config` of a model whose weights `fp8_paths` (parameter paths) are block FP8; None where there are none.

    Raises:
      UserError: layers that vLLM fuses differ in format, or a part of them does not end on a block's edge.
    """
    fp8 = set(fp8_paths)
    if not fp8:
        return None
    rows = {
        "q_proj": model.num_heads * model.head_dim,
        "k_proj": model.num_kv_heads * model.head_dim,
        "gate_proj": model.intermediate_size,
    }
    left_out, problems = [], []
    for layer in range(model.num_layers):
        for block, names in (("self_attn", FUSED[0]), ("self_attn", ("o_proj",)), ("mlp", FUSED[1]), ("mlp", ("down_proj",))):
            inside = [f"layers.{layer}.{block}.{name}.weight" in fp8 for name in names]
            if any(inside) and not all(inside):
                problems.append(f"layers.{layer}.{block}: {', '.join(names)} share one format in vLLM, got a mixture")
            if all(inside):
                edges = [name for name in names[:-1] if rows[name] % FP8_BLOCKS.weight[0]]
                problems += [
                    f"layers.{layer}.{block}.{name}: got {rows[name]} rows, "
                    f"expected a multiple of {FP8_BLOCKS.weight[0]} before the next part"
                    for name in edges
                ]
            else:
                left_out += [f"model.layers.{layer}.{block}.{name}" for name in names]
    if problems:
        raise UserError(
            "vLLM: it cannot hold this model in FP8: " + "; ".join(problems[:4]) + ". Choose other sizes or precision.overrides."
        )
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(FP8_BLOCKS.weight),
        "modules_to_not_convert": ["lm_head", *left_out],
    }
