"""The config sections of the policy and its tokenizer; imports no jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from jetrl_jax.config.types import (
    Options,
    PositiveFloat,
    PositiveInt,
    Rule,
    Section,
    Text,
    UserPath,
    must,
    option,
)

EvenInt = Annotated[PositiveInt, Field(multiple_of=2)]
Alphabet = Annotated[
    Text,
    must(lambda text: len(text) == len({*text}), "a character stands twice in the alphabet", "each once"),
]


class NewModelSection(Section, title="a new model"):
    """The sizes of a new model."""

    architecture: Literal["qwen3", "qwen2", "llama"] = option("qwen3", "Architecture of the model.")
    hidden_size: PositiveInt = option(128, "Width of the residual stream, in channels; any size.")
    intermediate_size: PositiveInt = option(384, "Width of the SwiGLU layer, in channels.")
    num_layers: PositiveInt = option(2, "Number of decoder layers.")
    num_heads: PositiveInt = option(4, "Number of query heads.")
    num_kv_heads: PositiveInt = option(4, "Number of key/value heads; divides num_heads.")
    head_dim: EvenInt = option(32, "Width of one head, in channels; even, since RoPE turns pairs.")
    max_position_embeddings: PositiveInt = option(512, "Longest sequence of the model, in tokens.")
    rope_theta: PositiveFloat = option(10000.0, "Base of the rotary embedding.")
    rms_norm_eps: PositiveFloat = option(1e-6, "Epsilon added to the mean square in the RMSNorm.")
    tie_word_embeddings: bool = option(True, "Whether the head is the embedding matrix.")

    def _rules(self) -> Iterator[Rule]:
        holds, of_heads = self.num_heads % self.num_kv_heads == 0, f"of model.num_heads = {self.num_heads}"
        uneven = "query heads cannot be shared evenly among key/value heads"
        yield Rule(holds, "num_kv_heads", uneven, f"a divisor {of_heads}")
        holds = self.architecture != "llama" or self.hidden_size % self.num_heads == 0
        uneven = "the width of a llama model is not shared evenly among its heads"
        yield Rule(holds, "hidden_size", uneven, f"a multiple {of_heads}, or another model.architecture")


class SavedModelSection(Section, title="a checkpoint"):
    """A Hugging Face checkpoint, whose config.json has the sizes."""

    path: UserPath = Field(description="Hugging Face checkpoint directory to start from.")


def _source(value: Any) -> str:
    saved = "path" in value if isinstance(value, dict) else isinstance(value, SavedModelSection)
    return "a checkpoint" if saved else "a new model"


ModelSection = Annotated[
    Annotated[NewModelSection, Tag("a new model")] | Annotated[SavedModelSection, Tag("a checkpoint")],
    Discriminator(_source),
]


class CharacterSection(Section):
    """One token per character of an alphabet."""

    kind: Literal["character"] = option(
        "character", "How text becomes tokens: by characters, bytes or files of Hugging Face."
    )
    characters: Alphabet = option("0123456789+-*= abcdefghijklmnopqrstuvwxyz", "Alphabet, a token each.")


class ByteSection(Section):
    """One token per byte."""

    kind: Literal["byte"] = "byte"


class HuggingFaceSection(Section):
    """The files of a Hugging Face tokenizer."""

    kind: Literal["huggingface"] = "huggingface"
    path: UserPath | None = option(None, "Directory or tokenizer.json; null takes model.path.")
    chat_template: bool = option(False, "Whether a prompt is wrapped by the tokenizer's chat template.")
    chat_template_kwargs: Options = option({}, "Arguments of the template, such as enable_thinking: false.")
    system_prompt: str | None = option(None, "System message before each prompt; null: none.")

    def _rules(self) -> Iterator[Rule]:
        if not self.chat_template:
            names = ("chat_template_kwargs", "system_prompt")
            yield from self.idle("tokenizer.chat_template is false", *names)


TokenizerSection = Annotated[CharacterSection | ByteSection | HuggingFaceSection, Field(discriminator="kind")]
