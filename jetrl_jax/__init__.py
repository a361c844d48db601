"""GRPO for language models through one FP8 flow, shared by rollout and training.

    from jetrl_jax import GRPOTrainer, load_config
    GRPOTrainer(load_config("configs/tiny_cpu.yaml")).train()

The names of this module are the public interface.  Each is imported when it is first used, so that reading a
config does not load jax.  `advantages` and `losses` are modules: `advantages.grpo`, `losses.policy_loss`, ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.hf.write import save_published as save_published
    from jetrl_jax.config.load import load_config as load_config
    from jetrl_jax.config.run_config import RunConfig as RunConfig
    from jetrl_jax.models.config import ModelConfig as ModelConfig
    from jetrl_jax.models.decoder import Decoder as Decoder
    from jetrl_jax.models.logprobs import completion_logprobs as completion_logprobs
    from jetrl_jax.models.vocabulary import scale_logits as scale_logits
    from jetrl_jax.models.vocabulary import token_logprobs as token_logprobs
    from jetrl_jax.precision.numerics import Numerics as Numerics
    from jetrl_jax.precision.plan import PrecisionPlan as PrecisionPlan
    from jetrl_jax.rewards.functions import RewardFunctions as RewardFunctions
    from jetrl_jax.rl import advantages as advantages
    from jetrl_jax.rl import losses as losses
    from jetrl_jax.rl.algorithm import policy_objective as policy_objective
    from jetrl_jax.rl.algorithm import resolve_algorithm as resolve_algorithm
    from jetrl_jax.rl.assemble import assemble as assemble
    from jetrl_jax.rl.batching import TrainBatch as TrainBatch
    from jetrl_jax.rl.batching import count_denominators as count_denominators
    from jetrl_jax.rl.batching import pack as pack
    from jetrl_jax.rl.batching import split_minibatches as split_minibatches
    from jetrl_jax.rl.batching import unpack as unpack
    from jetrl_jax.rl.correction import correct as correct
    from jetrl_jax.rl.metrics import mismatch_metrics as mismatch_metrics
    from jetrl_jax.rollout.embedded.jax_engine import JaxEngine as JaxEngine
    from jetrl_jax.rollout.engine import RolloutEngine as RolloutEngine
    from jetrl_jax.rollout.types import Request as Request
    from jetrl_jax.rollout.types import SamplingParams as SamplingParams
    from jetrl_jax.rollout.types import Trajectory as Trajectory
    from jetrl_jax.runs.engines import build_engine as build_engine
    from jetrl_jax.runs.grpo import GRPOTrainer as GRPOTrainer
    from jetrl_jax.runs.policy import Policy as Policy
    from jetrl_jax.runs.policy import build_policy as build_policy
    from jetrl_jax.runs.policy import load_policy as load_policy
    from jetrl_jax.runs.policy import published_weights as published_weights
    from jetrl_jax.runs.sampler import PolicySampler as PolicySampler

__version__ = "0.1.0"
_NAMES = {  # module -> its public names
    "bridge.hf.write": "save_published",
    "jetrl_jax.config.load": "load_config",
    "jetrl_jax.config.run_config": "RunConfig",
    "jetrl_jax.models.config": "ModelConfig",
    "jetrl_jax.models.decoder": "Decoder",
    "jetrl_jax.models.logprobs": "completion_logprobs",
    "jetrl_jax.models.vocabulary": "scale_logits token_logprobs",
    "jetrl_jax.precision.numerics": "Numerics",
    "jetrl_jax.precision.plan": "PrecisionPlan",
    "jetrl_jax.rewards.functions": "RewardFunctions",
    "jetrl_jax.rl.algorithm": "policy_objective resolve_algorithm",
    "jetrl_jax.rl.assemble": "assemble",
    "jetrl_jax.rl.batching": "TrainBatch count_denominators pack split_minibatches unpack",
    "jetrl_jax.rl.correction": "correct",
    "jetrl_jax.rl.metrics": "mismatch_metrics",
    "jetrl_jax.rollout.embedded.jax_engine": "JaxEngine",
    "jetrl_jax.rollout.engine": "RolloutEngine",
    "jetrl_jax.rollout.types": "Request SamplingParams Trajectory",
    "jetrl_jax.runs.engines": "build_engine",
    "jetrl_jax.runs.grpo": "GRPOTrainer",
    "jetrl_jax.runs.policy": "Policy build_policy load_policy published_weights",
    "jetrl_jax.runs.sampler": "PolicySampler",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {"advantages": "jetrl_jax.rl.advantages", "losses": "jetrl_jax.rl.losses"}
__all__ = sorted({*_HOMES, *_MODULES})  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = import_module(_MODULES[name])
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
