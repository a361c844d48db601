"""What a mesh of devices demands of the other fields: a part of the tables of `jetrl_jax.config_rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetrl_jax.config_rule_types import Rule
from jetrl_jax.config_sharding import fitting_degrees, shard_axis

if TYPE_CHECKING:
    from jetrl_jax.config import RunConfig


def _matrices(config: RunConfig) -> dict[str, tuple[int, int]]:
    """Name -> shape of each kind of linear layer of a new model."""
    model = config.model
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "q_proj": (heads, model.hidden_size),
        "k_proj and v_proj": (kv_heads, model.hidden_size),
        "o_proj": (model.hidden_size, heads),
        "gate_proj and up_proj": (model.intermediate_size, model.hidden_size),
        "down_proj": (model.hidden_size, model.intermediate_size),
    }


def any_fp8(config: RunConfig) -> bool:
    """Whether any layer of the config has block scales."""
    return config.precision.preset.startswith("fp8") or any(item.format == "fp8" for item in config.precision.overrides)


def _cut(config: RunConfig) -> dict[str, tuple[int, int]]:
    """The matrices that the degree cannot split."""
    degree, fp8 = config.sharding.fsdp, any_fp8(config)
    if degree == 1 or config.model.path is not None:
        return {}
    return {name: shape for name, shape in _matrices(config).items() if shard_axis(shape, degree, fp8) is None}


def _expected(config: RunConfig) -> str:
    fp8 = any_fp8(config)
    fitting = [f"{name} {list(shape)}: {', '.join(map(str, fitting_degrees(shape, fp8)))}" for name, shape in _cut(config).items()]
    return "a degree that fits " + "; ".join(fitting)


SHARDING_RULES: tuple[Rule, ...] = (
    Rule(
        ("sharding.fsdp", "model.hidden_size", "model.intermediate_size", "precision.preset", "model.path"),
        lambda c: not _cut(c),
        "shards would cut a matrix inside a row or a 128x128 block of its scales",
        _expected,
    ),
    Rule(
        ("warm_start.batch_size", "sharding.data", "sharding.fsdp"),
        lambda c: c.warm_start.steps == 0 or c.warm_start.batch_size % c.sharding.devices == 0,
        "the examples of a supervised step are not shared evenly among the devices",
        lambda c: f"a multiple of sharding.data * sharding.fsdp = {c.sharding.devices}",
    ),
    Rule(
        ("sharding.data", "sharding.fsdp", "rollout.engine"),
        lambda c: c.sharding.devices == 1 or c.rollout.engine == "jax",
        "vLLM samples beside a trainer on one device only",
        lambda c: "1, or rollout.engine: jax",
    ),
)
