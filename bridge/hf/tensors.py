"""The mapping of a published policy version to the tensors of a Hugging Face checkpoint.

    FP8 weight         ->  X.weight float8_e4m3fn [N, K]
                           X.weight_scale_inv float32 [ceil(N/128), ceil(K/128)]
    any other tensor   ->  X in bfloat16

Codes and scales are the trainer's own and are not quantised again.  Checkpoint export, weight sync and
manifests all use this order and these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from bridge.hf.names import parameter_shapes, to_hf_name
from jetrl_jax.errors import UserError
from jetrl_jax.models import anatomy
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.ops import round_to
from jetrl_jax.precision.formats import ADAPTER, FP8_BLOCKS, is_adapter, is_kv_scale
from jetrl_jax.precision.parameters import named_params
from pallas_kernels import ScaledArray


def hf_tensors(config: ModelConfig, published: nnx.State) -> Iterator[tuple[str, Any]]:
    """(name, array) pairs of published weights, in the order of `parameter_shapes`.

    Scales of keys and values are left out.

    published: the result of `PrecisionPlan.publish`; the arrays stay on their devices.
    """
    values = dict(named_params(published))
    for path in parameter_shapes(config):
        name, value = to_hf_name(path), values[path]
        if isinstance(value, ScaledArray):
            yield name, value.qvalue
            yield f"{name}_scale_inv", value.scale
        else:
            yield name, jnp.asarray(value, jnp.bfloat16)


def synced_tensors(config: ModelConfig, published: nnx.State) -> Iterator[tuple[str, Any]]:
    """The tensors that an engine gets: `hf_tensors`, then the scales of keys and values, float32 [1]."""
    yield from hf_tensors(config, published)
    for path, value in named_params(published):
        if is_kv_scale(path):
            yield to_hf_name(path), jnp.reshape(value, 1)


def adapter_tensors(published: nnx.State, scale: float) -> Iterator[tuple[str, Any]]:
    """The adapters of published weights as an engine multiplies them: B is multiplied by `scale`, rounded."""
    for path, value in named_params(published):
        if is_adapter(path):
            scaled = path.endswith(ADAPTER[1]) and scale != 1
            yield (
                to_hf_name(path),
                round_to(value.astype(jnp.float32) * scale, value.dtype) if scaled else value,
            )


def to_host(array: Any) -> np.ndarray:
    """A contiguous numpy array of the same bits."""
    return np.ascontiguousarray(np.asarray(array))


def quantization_config(model: ModelConfig, fp8_paths: Iterable[str]) -> dict[str, Any] | None:
    """The `quantization_config` of a model whose weights `fp8_paths` are block FP8; None without any.

    Raises:
      UserError: layers that vLLM fuses differ in format, or one of them does not end at a block's edge.
    """
    fp8 = set(fp8_paths)
    if not fp8:
        return None
    left_out: list[str] = []
    problems: list[str] = []
    for layer in range(model.num_layers):
        # the parts of a fused layer share one format, and each except the last ends at a block's edge
        for group in anatomy.fused_groups():
            paths = [f"layers.{layer}.{matrix.path}" for matrix in group]
            inside = [f"{path}.weight" in fp8 for path in paths]
            if any(inside) and not all(inside):
                parent, names = paths[0].rsplit(".", 1)[0], ", ".join(matrix.name for matrix in group)
                problems.append(f"{parent}: {names} share one format in vLLM, got a mixture")
            if not all(inside):
                left_out += map(to_hf_name, paths)
                continue
            for path, matrix in zip(paths[:-1], group, strict=False):
                rows = matrix.shape(model)[0]
                if rows % anatomy.BLOCK:
                    problems.append(
                        f"{path}: got {rows} rows, expected a multiple of {anatomy.BLOCK} before the "
                        "next part"
                    )
    if problems:
        raise UserError(
            "vLLM: it cannot hold this model in FP8: "
            + "; ".join(problems[:4])
            + ". Choose other sizes or precision.overrides."
        )
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(FP8_BLOCKS.weight),
        "modules_to_not_convert": [anatomy.HEAD, *left_out],
    }
