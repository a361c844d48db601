"""The config sections of the policy and its tokenizer; imports no jax."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from jetrl_jax.config.rule import Rule
from jetrl_jax.config.types import Options, PositiveFloat, PositiveInt, Section, Text, UserPath


class NewModelSection(Section):
    """The sizes of a new model."""

    architecture: Literal["qwen3", "qwen2", "llama"] = Field(
        "qwen3", description="Architecture of the model."
    )
    hidden_size: PositiveInt = Field(
        128, description="Width of the residual stream, in channels; any size, FP8 blocks may be partial."
    )
    intermediate_size: PositiveInt = Field(384, description="Width of the SwiGLU layer, in channels.")
    num_layers: PositiveInt = Field(2, description="Number of decoder layers.")
    num_heads: PositiveInt = Field(4, description="Number of query heads.")
    num_kv_heads: PositiveInt = Field(4, description="Number of key/value heads; divides num_heads.")
    head_dim: PositiveInt = Field(
        32, description="Width of one head, in channels; even, since RoPE turns pairs."
    )
    max_position_embeddings: PositiveInt = Field(512, description="Longest sequence of the model, in tokens.")
    rope_theta: PositiveFloat = Field(10000.0, description="Base of the rotary embedding.")
    rms_norm_eps: PositiveFloat = Field(1e-6, description="Epsilon added to the mean square in the RMSNorm.")
    tie_word_embeddings: bool = Field(True, description="Whether the head is the embedding matrix.")

    def _rules(self) -> Iterator[Rule]:
        of_heads = f"of model.num_heads = {self.num_heads}"
        yield Rule(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            "query heads cannot be shared evenly among key/value heads",
            f"a divisor {of_heads}",
            involves=("num_heads",),
        )
        yield Rule(
            self.head_dim % 2 == 0,
            "head_dim",
            "a head of odd width",
            "an even number",
            "RoPE turns pairs of channels",
        )
        yield Rule(
            self.architecture != "llama" or self.hidden_size % self.num_heads == 0,
            "hidden_size",
            "the width of a llama model is not shared evenly among its heads",
            f"a multiple {of_heads}",
            involves=("num_heads", "architecture"),
        )


class SavedModelSection(Section):
    """A Hugging Face checkpoint, whose config.json has the sizes."""

    path: UserPath = Field(
        description="Hugging Face checkpoint directory to start from; without it the model is new."
    )


def _source(value: Any) -> str:
    saved = "path" in value if isinstance(value, dict) else isinstance(value, SavedModelSection)
    return "a checkpoint" if saved else "a new model"


ModelSection = Annotated[
    Annotated[NewModelSection, Tag("a new model")] | Annotated[SavedModelSection, Tag("a checkpoint")],
    Discriminator(_source),
]


class _Tokenizer(Section):
    kind: str = Field(
        description="How text becomes tokens: character and byte are built in; huggingface loads "
        "tokenizer files."
    )


class CharacterSection(_Tokenizer):
    """One token per character of an alphabet."""

    kind: Literal["character"] = "character"
    characters: Text = Field(
        "0123456789+-*= abcdefghijklmnopqrstuvwxyz", description="Alphabet, one token per character."
    )

    def _rules(self) -> Iterator[Rule]:
        twice = sorted({x for x in self.characters if self.characters.count(x) > 1})
        told = f"each once; twice: {json.dumps(''.join(twice))}"
        yield Rule(not twice, "characters", "a character stands twice in the alphabet", told)


class ByteSection(_Tokenizer):
    """One token per byte."""

    kind: Literal["byte"] = "byte"


class HuggingFaceSection(_Tokenizer):
    """The files of a Hugging Face tokenizer."""

    kind: Literal["huggingface"] = "huggingface"
    path: UserPath | None = Field(None, description="Directory or tokenizer.json; null takes model.path.")
    chat_template: bool = Field(
        False, description="Whether a prompt is wrapped by the tokenizer's chat template."
    )
    chat_template_kwargs: Options = Field(
        {}, description="Keyword arguments of the chat template, such as enable_thinking: false."
    )
    system_prompt: str | None = Field(
        None, description="System message put before each prompt by the chat template; null: none."
    )

    def _rules(self) -> Iterator[Rule]:
        if not self.chat_template:
            yield from self.idle("tokenizer.chat_template is false", "chat_template_kwargs", "system_prompt")


TokenizerSection = Annotated[CharacterSection | ByteSection | HuggingFaceSection, Field(discriminator="kind")]
