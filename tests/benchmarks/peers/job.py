"""What the three trainers are given and how they are timed: the same model, words, reward, lengths and clock.

This file runs in the virtual environment of each trainer, so it needs nothing but the standard library and
`tokenizers`.  Every prompt has `prompt_tokens` tokens and every completion exactly `completion_tokens`: the
ids of the stop and the padding token lie outside the model's vocabulary, so neither is ever sampled and
nobody stops early.  The setting `real` is a pretrained model (``make real-model``) with its own tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VOCAB = 64
PAD, EOS = "<pad>", "<eos>"  # ids 64 and 65, or behind those of a real model
REAL_MODEL = Path(__file__).resolve().parents[3] / ".cache/real_model/SmolLM2-135M-Instruct"
CHARACTERS = "|=+-*abcdefghijklmnopqrstuvwxyz0123456789 _$()>:"


@dataclass(frozen=True)
class Setting:
    """Sizes of the model, the batch and the sequences, in the words of a Qwen3 config.

    model: directory of a pretrained model, whose config counts then.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    learning_rate: float = 3e-4
    model: str | None = None

    @property
    def sequences(self) -> int:
        """Completions of one step."""
        return self.prompts * self.group_size


SETTINGS = {
    # 434,944 parameters; 1,152 new tokens a step
    "tiny": Setting(128, 2, 4, 32, 384, prompts=8, group_size=16, prompt_tokens=8, completion_tokens=9),
    # 3,426,816 parameters and more new tokens a step: less of the time is dispatch
    "small": Setting(256, 4, 8, 32, 768, prompts=8, group_size=8, prompt_tokens=16, completion_tokens=64),
    # 134,515,008 parameters, Llama's architecture
    "real": Setting(
        576,
        30,
        9,
        64,
        1536,
        prompts=2,
        group_size=8,
        prompt_tokens=16,
        completion_tokens=24,
        learning_rate=1e-6,
        model=str(REAL_MODEL),
    ),
}


def build_tokenizer(setting: Setting) -> Any:
    """A `tokenizers.Tokenizer` of one token per character; ids 64 and 65 are padding and stop.

    A real model's own tokenizer, with padding and stop added; the characters of a prompt are tokens there too.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if setting.model:
        tokenizer = Tokenizer.from_file(str(Path(setting.model) / "tokenizer.json"))
        tokenizer.add_special_tokens([PAD, EOS])
        return tokenizer
    names = [*CHARACTERS, *(f"<unused{i}>" for i in range(VOCAB - len(CHARACTERS))), PAD, EOS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unused0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def hf_tokenizer(setting: Setting) -> Any:
    """The same as a transformers tokenizer; `|` begins every text."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(setting),
        pad_token=PAD,
        eos_token=EOS,
        bos_token="|",
        unk_token="<unused0>",
        padding_side="left",
    )


def words(setting: Setting, seed: int = 0) -> Iterator[str]:
    """Endless random words that fill a prompt of `|word=`; of digits for a real model."""
    letters = random.Random(seed)
    first, count = ("0", 10) if setting.model else ("a", 26)
    while True:
        yield "".join(chr(ord(first) + letters.randrange(count)) for _ in range(setting.prompt_tokens - 2))


def prompt_of(word: str) -> str:
    """Text of the prompt that asks for a word backward."""
    return f"|{word}="


def reward_of(completion: str, answer: str) -> float:
    """Share of the characters of the answer that stand in their place."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer)


class Channel:
    """JSON lines to and from the parent; whatever libraries print goes to standard error instead."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def send(self, **message: Any) -> None:
        """Send one message."""
        self._replies.write(json.dumps(message) + "\n")

    def receive(self) -> dict[str, Any]:
        """Wait for a command; the end of the stream is a command to quit."""
        line = sys.stdin.readline()
        return json.loads(line) if line.strip() else {"command": "quit"}


class StepGate:
    """Called by a training loop between two steps: times bursts and waits for commands between them.

    A loop cannot be called one step at a time from outside in every library, but each offers a place that
    runs between steps.  There the gate blocks until the parent asks for `{"command": "steps", "count": n}`,
    lets n steps pass, calls `finish` (which waits for work still running on the device) and answers with
    their seconds. `{"command": "decode", "count": n}` runs n rollouts alone.  `quit` ends the process.
    A loop that knows the rates of its parts (tokens a second) gives them; those of the last step are sent.
    """

    def __init__(
        self, channel: Channel, setting: Setting, finish: Callable[[], Any], decode: Callable[[], int]
    ) -> None:
        self._channel = channel
        self._setting = setting
        self._finish = finish
        self._decode = decode
        self._left = 0
        self._count = 0
        self._start = 0.0

    def between_steps(self, **rates: float) -> None:
        """To be called before the first step and after every one."""
        if self._left:
            self._left -= 1
            if self._left:
                return
            self._finish()
            self._channel.send(seconds=time.perf_counter() - self._start, steps=self._count, **rates)
        while True:
            command = self._channel.receive()
            if command["command"] == "steps":
                self._left = self._count = command["count"]
                self._start = time.perf_counter()
                return
            if command["command"] == "decode":
                start = time.perf_counter()
                tokens = sum(self._decode() for _ in range(command["count"]))
                self._channel.send(seconds=time.perf_counter() - start, tokens=tokens)
            else:
                os._exit(0)


def arguments() -> argparse.Namespace:
    """Command line of a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="tiny")
    parser.add_argument(
        "--flavor", default="float32", help="float32, bfloat16 or, for our trainer, a precision preset"
    )
    return parser.parse_args()


def introduce(channel: Channel, parameters: int, versions: dict[str, str], setting: Setting) -> None:
    """First message of a worker: what it runs."""
    channel.send(ready=True, parameters=parameters, versions=versions, setting=asdict(setting))
