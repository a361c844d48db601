"""The config sections of the policy and its tokenizer; imports no jax."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from jetrl_jax.config.types import Options, PositiveFloat, PositiveInt, Section, Text


class ModelSection(Section):
    """The policy: a Hugging Face directory to start from, or the sizes of a new model."""

    path: Text | None = Field(
        None, description="Hugging Face checkpoint directory to start from; null builds a new model from the sizes below."
    )
    architecture: Literal["qwen3", "qwen2", "llama"] = Field("qwen3", description="Architecture of a new model.")
    hidden_size: PositiveInt = Field(
        128, description="Width of the residual stream of a new model, in channels; any size, FP8 blocks may be partial."
    )
    intermediate_size: PositiveInt = Field(384, description="Width of the SwiGLU layer of a new model, in channels.")
    num_layers: PositiveInt = Field(2, description="Number of decoder layers of a new model.")
    num_heads: PositiveInt = Field(4, description="Number of query heads of a new model.")
    num_kv_heads: PositiveInt = Field(4, description="Number of key/value heads of a new model; divides num_heads.")
    head_dim: PositiveInt = Field(32, description="Width of one head of a new model, in channels; even, since RoPE turns pairs.")
    max_position_embeddings: PositiveInt = Field(512, description="Longest sequence of a new model, in tokens.")
    rope_theta: PositiveFloat = Field(10000.0, description="Base of the rotary embedding of a new model.")
    rms_norm_eps: PositiveFloat = Field(1e-6, description="Epsilon added to the mean square in the RMSNorm of a new model.")
    tie_word_embeddings: bool = Field(True, description="Whether the head of a new model is its embedding matrix.")


class TokenizerSection(Section):
    """How text becomes token ids."""

    kind: Literal["character", "byte", "huggingface"] = Field(
        "character", description="character and byte are built in; huggingface loads tokenizer files."
    )
    path: Text | None = Field(None, description="Directory or tokenizer.json of a huggingface tokenizer; null takes model.path.")
    characters: Text = Field(
        "0123456789+-*= abcdefghijklmnopqrstuvwxyz", description="Alphabet of the character tokenizer, one token per character."
    )
    chat_template: bool = Field(False, description="Whether a prompt is wrapped by the tokenizer's chat template.")
    chat_template_kwargs: Options = Field({}, description="Keyword arguments of the chat template, such as enable_thinking: false.")
    system_prompt: str | None = Field(None, description="System message put before each prompt by the chat template; null: none.")
