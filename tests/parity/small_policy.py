"""A small policy and ragged trajectories, shared by the tests of log-probabilities, gradients and updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.hf_config import ModelConfig
from jetrl_jax.precision import Numerics, PrecisionPlan, jit, map_params, named_params
from jetrl_jax.rollout.engine import Trajectory

VOCAB = 37
CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=160,  # a partial FP8 block
    num_layers=1,  # tests/parity/test_rollout_exact.py has two
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rope_theta=1e4,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    attention_bias=False,
    qk_norm=True,
    eos_token_ids=(1,),
)


class SmallPolicy:
    """Model, masters, plan and published weights of one preset; the masters are the same for every preset."""

    def __init__(
        self, preset: str, config: ModelConfig = CONFIG, *, seed: int = 0, overrides: Sequence[tuple[str, str]] = (), **options: Any
    ) -> None:
        dtype = {"fp32": "float32", "fp16": "float16"}.get(preset, "bfloat16")
        self.numerics = Numerics(compute_dtype=dtype, **options)
        self.model = Decoder(config, self.numerics, rngs=nnx.Rngs(seed))
        self.graphdef, params = nnx.split(self.model)
        rng = np.random.default_rng(seed + 1)

        def spread(_: str, value: jax.Array) -> jax.Array:
            """Larger matrices (distributions neither flat nor certain), vectors that are not all alike."""
            return value * 6 if value.ndim == 2 else value + np.asarray(rng.normal(size=value.shape) * 0.2, np.float32)

        self.params = map_params(spread, params)
        self.paths = [path for path, _ in named_params(self.params)]
        self.plan = PrecisionPlan(self.paths, preset, overrides)
        self.published = jit(self.plan.publish)(self.params)

    def training_model(self) -> Decoder:
        return nnx.merge(self.graphdef, self.plan.training_weights(self.params, self.published))

    def rollout_model(self) -> Decoder:
        return nnx.merge(self.graphdef, self.published)


def trajectories(lengths: list[tuple[int, int]], seed: int = 0) -> list[Trajectory]:
    """Random trajectories of (prompt, completion) lengths."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(2, VOCAB, count).astype(np.int32)

    return [
        Trajectory(i, tokens(prompt), tokens(completion), np.full(completion, -3, np.float32), "stop", 0)
        for i, (prompt, completion) in enumerate(lengths)
    ]
