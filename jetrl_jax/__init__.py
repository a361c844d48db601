"""GRPO for language models through one FP8 flow, shared by rollout and training.

    from jetrl_jax import GRPOTrainer, load_config
    GRPOTrainer(load_config("configs/tiny_cpu.yaml")).train()

Names are imported when they are first used: reading a config does not load jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetrl_jax.config.load import load_config
    from jetrl_jax.config.run_config import RunConfig
    from jetrl_jax.models.config import ModelConfig
    from jetrl_jax.models.decoder import Decoder
    from jetrl_jax.precision.plan import PrecisionPlan
    from jetrl_jax.runs.grpo import GRPOTrainer
    from jetrl_jax.runs.policy import build_policy, load_policy

__version__ = "0.1.0"
__all__ = ["Decoder", "GRPOTrainer", "ModelConfig", "PrecisionPlan", "RunConfig", "build_policy", "load_config", "load_policy"]

_HOMES = {
    "Decoder": "jetrl_jax.models.decoder",
    "GRPOTrainer": "jetrl_jax.runs.grpo",
    "ModelConfig": "jetrl_jax.models.config",
    "PrecisionPlan": "jetrl_jax.precision.plan",
    "RunConfig": "jetrl_jax.config.run_config",
    "build_policy": "jetrl_jax.runs.policy",
    "load_config": "jetrl_jax.config.load",
    "load_policy": "jetrl_jax.runs.policy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
