"""Parameters by path, and how every program of a policy is compiled."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

# By default XLA may keep FP32 where the contract rounds to BF16, differently in each program (CPU and GPU).
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


def jit(function: Any, **options: Any) -> Any:
    """`jax.jit` with `COMPILER_OPTIONS`; every program of a policy is compiled by it."""
    return jax.jit(function, compiler_options=COMPILER_OPTIONS, **options)


def named_params(params: nnx.State) -> list[tuple[str, Any]]:
    """('layers.0.mlp.up_proj.weight', value) pairs in the state's order; values may be `ScaledArray`s."""
    return [(".".join(map(str, path)), variable.get_value()) for path, variable in nnx.to_flat_state(params)]


def map_params(function: Any, params: nnx.State) -> nnx.State:
    """A state whose value at each path is `function(path, value)`."""
    flat = [
        (path, variable.replace(function(".".join(map(str, path)), variable.get_value())))
        for path, variable in nnx.to_flat_state(params)
    ]
    return nnx.from_flat_state(flat)
