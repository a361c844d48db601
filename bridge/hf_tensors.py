"""A published policy version as the tensors of a Hugging Face checkpoint: the one definition of this mapping.

    FP8 weight         ->  X.weight float8_e4m3fn [N, K]  and  X.weight_scale_inv float32 [ceil(N/128), ceil(K/128)]
    any other tensor   ->  X in bfloat16

Codes and scales are the trainer's own, never requantised.  Checkpoint export, weight sync and manifests use this order
and these names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from bridge.name_map import parameter_shapes, to_hf_name
from jetrl_jax.models.hf_config import ModelConfig
from jetrl_jax.precision import named_params
from pallas_kernels import ScaledArray


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
