"""Tunix's GRPOLearner with its own JAX sampler on the common job; started by `compare.py` with the Python of
`.venv-tunix`.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("WANDB_MODE", "disabled")

from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import job
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

STEPS = 10**6  # more than any comparison asks for


def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Rewards in the form Tunix calls them."""
    return [
        job.reward_of(completion, expected) for completion, expected in zip(completions, answer, strict=True)
    ]


def build_actor(setting: job.Setting, dtype: jnp.dtype) -> qwen3.Qwen3:
    """A random policy with FP32 parameters that computes in `dtype`."""
    config = qwen3.ModelConfig(
        num_layers=setting.num_layers,
        vocab_size=job.VOCAB,
        embed_dim=setting.hidden_size,
        hidden_dim=setting.intermediate_size,
        num_heads=setting.num_heads,
        head_dim=setting.head_dim,
        num_kv_heads=setting.num_heads,
        rope_theta=10000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=dtype,
        param_dtype=jnp.float32,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def build_cluster(setting: job.Setting, actor: qwen3.Qwen3, mesh: jax.sharding.Mesh) -> rl_cluster.RLCluster:
    """Actor and sampler on one device."""
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(setting.learning_rate),
            eval_every_n_steps=STEPS,
            max_steps=STEPS,
            mini_batch_size=setting.prompts,
            train_micro_batch_size=setting.prompts,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=setting.completion_tokens,
            max_prompt_length=setting.prompt_tokens,
            kv_cache_size=setting.prompt_tokens + setting.completion_tokens,
            temperature=1.0,
            top_p=1.0,  # Tunix samples only where top_p is given
            top_k=None,
            eos_tokens=[job.VOCAB + 1],
        ),
    )
    return rl_cluster.RLCluster(
        actor=actor, reference=None, tokenizer=job.hf_tokenizer(setting), cluster_config=config
    )


def batches(setting: job.Setting, gate: job.StepGate) -> Iterator[dict[str, np.ndarray]]:
    """Batches of prompts; Tunix asks for the next one when a step is over, which is where the gate stands."""
    drawn = job.words(setting)
    # The loop looks at the first batch before it starts, so that one passes without waiting.
    first = True
    while True:
        if not first:
            gate.between_steps()
        chosen = list(islice(drawn, setting.prompts))
        yield {
            "prompts": np.array([job.prompt_of(word) for word in chosen]),
            "answer": np.array([word[::-1] for word in chosen]),
        }
        first = False


def main() -> None:
    """Build, introduce, train until told to quit."""
    channel, options = job.Channel(), job.arguments()
    setting = job.SETTINGS[options.setting]
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        actor = build_actor(setting, jnp.dtype(options.flavor))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(actor, nnx.Param)))
        cluster = build_cluster(setting, actor, mesh)
        prompts = [
            job.prompt_of(word)
            for word in islice(job.words(setting, 1), setting.prompts)
            for _ in range(setting.group_size)
        ]

        def finish() -> None:
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model, nnx.Param))

        def decode() -> int:
            tokens = cluster.generate(prompts).tokens
            assert len(tokens) == setting.sequences and all(
                len(row) == setting.completion_tokens for row in tokens
            )
            return setting.sequences * setting.completion_tokens

        gate = job.StepGate(channel, setting, finish, decode)
        algorithm = grpo_learner.GRPOConfig(
            num_generations=setting.group_size, num_iterations=1, beta=0.0, epsilon=0.2
        )
        learner = grpo_learner.GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=reward)
        versions = {name: version(name) for name in ("google-tunix", "jax", "flax")}
        job.introduce(channel, parameters, versions, setting)
        learner.train(batches(setting, gate))


if __name__ == "__main__":
    main()
