"""GRPO for language models through one FP8 flow, shared by rollout and training.

    from jetrl_jax import GRPOTrainer, load_config
    GRPOTrainer(load_config("configs/tiny_cpu.yaml")).train()

Names are imported when they are first used: reading a config does not load jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetrl_jax.config import RunConfig
    from jetrl_jax.config_io import load_config
    from jetrl_jax.grpo import GRPOTrainer
    from jetrl_jax.models.decoder import Decoder
    from jetrl_jax.models.hf_config import ModelConfig
    from jetrl_jax.policy import build_policy, load_policy
    from jetrl_jax.precision import PrecisionPlan

__version__ = "0.1.0"
__all__ = ["Decoder", "GRPOTrainer", "ModelConfig", "PrecisionPlan", "RunConfig", "build_policy", "load_config", "load_policy"]

_HOMES = {
    "Decoder": "jetrl_jax.models.decoder",
    "GRPOTrainer": "jetrl_jax.grpo",
    "ModelConfig": "jetrl_jax.models.hf_config",
    "PrecisionPlan": "jetrl_jax.precision",
    "RunConfig": "jetrl_jax.config",
    "build_policy": "jetrl_jax.policy",
    "load_config": "jetrl_jax.config_io",
    "load_policy": "jetrl_jax.policy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
