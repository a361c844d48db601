"""JAX's memory on a GPU that the trainer shares with vLLM; imports no jax.

    vLLM sleeps while the trainer learns   XLA takes memory as it needs it and returns what it frees
                                           (cuda_async, nothing preallocated), so that each side can use
                                           the memory that the other has freed
    vLLM stays awake                       XLA preallocates 1 - RESERVE -
                                           rollout.engine.gpu_memory_utilization of the GPU

By default JAX preallocates 75 % and never returns any of it, so both ways need the environment variables of
this module, which JAX reads once, when it finds the GPU.  Sources: JAX's page on GPU memory allocation; XLA's
allocator "cuda_async" sets the release threshold of CUDA's memory pool to the size that it preallocates.  Not
run on a GPU yet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jetrl_jax.config.rollout import RESERVE
from jetrl_jax.errors import UserError

if TYPE_CHECKING:
    from jetrl_jax.config.rollout import StartedVllmSection
    from jetrl_jax.config.run_config import RunConfig


ALLOCATOR, PREALLOCATE, FRACTION = (
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
)
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the older name; JAX refuses both at once
RETURNING = ("cuda_async", "platform")  # allocators that give memory back to the driver
NO = ("false", "False", "0")


def sleeps(section: StartedVllmSection, on_gpu: bool) -> bool:
    """Whether vLLM sleeps while the trainer learns: `rollout.engine.sleep`; null is true on a GPU.

    Raises:
      UserError: sleep is requested on a CPU, where vLLM's sleep mode frees nothing.
    """
    if section.sleep and not on_gpu:
        raise UserError(
            "rollout.engine.sleep: got true on a CPU, where vLLM has no sleep mode, expected false, or "
            "null, which sleeps only on GPUs."
        )
    return on_gpu if section.sleep is None else section.sleep


def variables(section: StartedVllmSection) -> dict[str, str]:
    """The environment variables with which JAX shares its GPU with this vLLM; no effect on a CPU."""
    if section.sleep is not False:
        return {ALLOCATOR: RETURNING[0], PREALLOCATE: NO[0]}
    return {FRACTION: f"{1 - RESERVE - section.gpu_memory_utilization:.3f}"}


def share_gpu(config: RunConfig) -> None:
    """Sets those of `variables` that the user has not set; does nothing once JAX has found its devices."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    vllm = config.shared_vllm
    if vllm is None or (bridge is not None and bridge.backends_are_initialized()):
        return
    for name, value in variables(vllm).items():
        if not (name == FRACTION and os.environ.get(OLD_FRACTION)):
            os.environ.setdefault(name, value)


def check_device(config: RunConfig, on_gpu: bool) -> None:
    """Raises UserError if vLLM cannot share the trainer's device as configured."""
    if config.shared_vllm is not None:
        sleeps(config.shared_vllm, on_gpu)
        if on_gpu:
            check_shared_gpu(config.shared_vllm, os.environ)


def check_shared_gpu(section: StartedVllmSection, environment: Mapping[str, str]) -> None:
    """Raises UserError if JAX, started in this environment, leaves vLLM no room on their common GPU."""
    allocator = environment.get(ALLOCATOR, "default").lower()
    returns = allocator == "platform" or (allocator in RETURNING and environment.get(PREALLOCATE) in NO)
    needed = " ".join(f"{name}={value}" for name, value in variables(section).items())
    if section.sleep is not False:
        fits = returns
        why = "JAX keeps what it frees while vLLM sleeps (rollout.engine.sleep)"
    else:
        share = environment.get(FRACTION) or environment.get(OLD_FRACTION) or "1"
        fits = returns or (float(share) + section.gpu_memory_utilization <= 1)
        why = (
            "JAX takes memory beside "
            f"rollout.engine.gpu_memory_utilization={section.gpu_memory_utilization:g}"
        )
    if fits:
        return
    got = ", ".join(
        f"{name}={environment[name]}"
        for name in (ALLOCATOR, PREALLOCATE, FRACTION, OLD_FRACTION)
        if name in environment
    )
    raise UserError(
        f"vLLM and the trainer do not fit on one GPU: {why}: got {got or 'none of its variables'} in "
        f"the environment, expected {needed}. "
        "Set these before Python starts, or unset yours: the commands of jetrl_jax set what is "
        "missing, unless JAX has started before them."
    )
