"""Parameters by path, and how every program of a policy is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from pallas_kernels.implementations import is_elsewhere

FUSED_LOOPS = (0, 11)
"""The first JAX whose barriers are left to XLA: 0.12 emits small loops as one kernel, which cannot hold a
barrier; 0.11 was not tried.
"""


def compiler_options() -> dict[str, Any]:
    """What XLA is told of every program of a policy; starts the backend before JAX 0.11.

    By default XLA may keep FP32 where the contract rounds to BF16, differently in each program (CPU and GPU).
    On a CPU before `FUSED_LOOPS` barriers outlive fusion here, so that codes that several products read are
    made once (`pallas_kernels.quantize.reference`; JAX 0.12 does that anyway) and rematerialisation saves
    memory. No bit depends on it. A user's own `--xla_disable_hlo_passes` in XLA_FLAGS is replaced there.
    """
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if jax.__version_info__ < FUSED_LOOPS and not is_elsewhere() and jax.default_backend() == "cpu":
        options["xla_disable_hlo_passes"] = "cse_barrier_expander"
    return options


def jit(function: Any, **options: Any) -> Any:
    """`jax.jit` with `compiler_options()`; every program of a policy is compiled by it."""
    return jax.jit(function, compiler_options=compiler_options(), **options)


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


def select(state: nnx.State, keep: Callable[[str], bool]) -> nnx.State:
    """The part of a state with the paths that `keep` accepts."""
    return nnx.from_flat_state(
        [(path, variable) for path, variable in nnx.to_flat_state(state) if keep(".".join(map(str, path)))]
    )


def merge(*states: nnx.State) -> nnx.State:
    """One state with the paths of all; of equal paths the last state's."""
    return nnx.from_flat_state(
        {path: variable for state in states for path, variable in nnx.to_flat_state(state)}
    )
