"""Descriptions of models small enough for tests: one, changed by each test file where its claim needs it."""

from __future__ import annotations

import dataclasses
from typing import Any

from jetrl_jax.models.config import ModelConfig

SMALL = ModelConfig(
    architecture="qwen3",
    vocab_size=37,
    hidden_size=64,
    intermediate_size=160,  # a partial FP8 block
    num_layers=1,
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
# For files of tensors, where bytes are compared and nothing is computed: every size another number.
MINUTE = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 6,
}


def small_model(architecture: str = "qwen3", **changes: Any) -> ModelConfig:
    """`SMALL` of an architecture, whose biases and norms of queries and keys follow from it,
    with `changes`.
    """
    own = {
        "architecture": architecture,
        "attention_bias": architecture == "qwen2",
        "qk_norm": architecture == "qwen3",
    }
    return dataclasses.replace(SMALL, **own | changes)
