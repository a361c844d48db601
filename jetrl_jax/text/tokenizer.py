"""Text to token ids and back: characters, bytes, or the files of a Hugging Face checkpoint.

    character    id 0 pad, 1 eos, then one id per character of an alphabet
    byte         id 0 pad, 1 eos, 2 + b for byte b of the UTF-8 text
    huggingface  a directory or tokenizer.json, read by transformers if it is installed, else by tokenizers

The engine that samples a completion gives its token ids; completions are never tokenised again.  A prompt
never begins with two BOS tokens and never ends in a stop token.  A chat template must write the user's text
and the system prompt unchanged.  Both rules are checked for every prompt, and on many kinds of texts when a
template is opened.

In an episode of several turns ids are only appended.  An observation is the text that the chat template
writes after the assistant's: [user, assistant MARK, observation] is rendered, and its text after MARK taken,
which begins with the end of the assistant's turn.  If the policy sampled that token, it is not written twice.
The history itself is never rendered, so no template changes what the policy said (`check_observations`).

All kinds save files that transformers' AutoTokenizer reads back with the same ids.
transformers is imported only if a directory is opened.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jetrl_jax.config.model import ByteSection, CharacterSection, TokenizerSection
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError, missing_extra
from jetrl_jax.text.answers import CLOSES, OPENS

PAD, EOS = "<pad>", "<eos>"  # ids 0 and 1 of the built-in tokenizers
_UNKNOWN = "\ufffd"
# The files of a Hugging Face tokenizer, which save copies unchanged.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
# Texts that test a chat template when it is opened: both letter cases, several lines, signs that escaping or
# a filter would change, other scripts, and a text long enough to show truncation.
_PROBES = (
    "What is 6*7?",
    "Is \"a\" <b> & 'c'? {x} {{ y }} {% z %} \\n $5 #### 1,000",
    "First line\n\n  second\tline:\n- éü 漢字 😀",
    " ".join(f"word{i}" for i in range(2000)),
)
_MARK = "JETRL-MARK-4f1c"  # stands for the policy's turn where an observation is rendered
# Names that every template receives.
_TEMPLATE_NAMES = {
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "raise_exception",
    "strftime_now",
    "range",
    "dict",
    "lipsum",
    "cycler",
    "joiner",
    "namespace",
}


Message = Mapping[str, str]  # role and content


class Tokenizer(Protocol):
    """The interface that the trainer, the engine and the bridge need of a tokenizer."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    pad_id: int

    @property
    def end_of_turn(self) -> int:
        """The token with which a turn of the policy ends."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special tokens added."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt: within the chat template if configured, else with the tokenizer's BOS, if any."""
        ...

    def encode_observation(self, messages: Sequence[Message], after: int) -> list[int]:
        """Ids to append to a sequence that ends with a turn of the policy, whose last token is `after`."""
        ...

    def check_observations(self) -> list[str]:
        """Raises `UserError` if observations cannot be appended; returns notes for the record of a run."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens except the marks of a thought."""
        ...

    def fingerprint(self) -> str:
        """A hash of everything that determines the ids; the same across processes and machines."""
        ...

    def save(self, directory: str | Path) -> None:
        """Writes files that transformers' AutoTokenizer loads."""
        ...


class _BuiltIn:
    """Base of the two built-in tokenizers; the tokenizers library writes their tokenizer.json."""

    eos_ids: tuple[int, ...] = (1,)
    pad_id = 0
    vocab_size: int

    @property
    def end_of_turn(self) -> int:
        """The EOS."""
        return self.eos_ids[0]

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        raise NotImplementedError

    def encode_prompt(self, text: str) -> list[int]:
        """The same as ``encode``, without BOS or template."""
        return self.encode(text)

    def encode_observation(self, messages: Sequence[Message], after: int) -> list[int]:
        """The ids of the messages' texts."""
        return self.encode(_plain(messages))

    def check_observations(self) -> list[str]:
        """Nothing to check: each text has its ids, wherever it stands."""
        return []

    def backend(self) -> tokenizers.Tokenizer:
        """This tokenizer as one of the tokenizers library."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Hash of the vocabulary."""
        vocabulary = sorted(self.backend().get_vocab().items(), key=lambda item: item[1])
        return _digest([type(self).__name__, vocabulary])

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.backend().save(str(directory / "tokenizer.json"))
        _write_config(directory, {"eos_token": EOS, "pad_token": PAD})


class CharacterTokenizer(_BuiltIn):
    """One id per character; a character outside the alphabet is an error, never an unknown token."""

    def __init__(self, characters: str):
        if not characters or len(set(characters)) != len(characters):
            raise UserError(
                f"CharacterTokenizer: bad alphabet: got characters={characters!r}, expected at least "
                "one character and none twice."
            )
        self._characters = characters
        self._ids = {character: index for index, character in enumerate(characters, start=2)}
        self.vocab_size = 2 + len(characters)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; raises `UserError` naming the first character without an id."""
        try:
            return [self._ids[character] for character in text]
        except KeyError:
            unknown = next(character for character in text if character not in self._ids)
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise UserError(
            f"CharacterTokenizer: character {unknown!r} (U+{ord(unknown):04X}) is not in the alphabet: "
            f"got {shown!r}, "
            f"expected only {self._characters!r}. Add it to tokenizer.characters or take "
            "tokenizer.kind: byte."
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; pad and eos are left out, an id beyond the vocabulary becomes U+FFFD."""
        return "".join(
            self._characters[i - 2] if 2 <= i < self.vocab_size else _UNKNOWN for i in ids if i not in (0, 1)
        )

    def backend(self) -> tokenizers.Tokenizer:
        """BPE without merges: every character is a token."""
        backend = tokenizers.Tokenizer(models.BPE(vocab={PAD: 0, EOS: 1, **self._ids}, merges=[]))
        backend.decoder = decoders.Fuse()
        return _with_specials(backend)


class ByteTokenizer(_BuiltIn):
    """One id per byte of the UTF-8 text, so that any text has ids and any ids decode to text."""

    vocab_size = 258

    def encode(self, text: str) -> list[int]:
        """Ids of a text; raises `UserError` for a lone surrogate, which UTF-8 cannot encode."""
        try:
            return [2 + byte for byte in text.encode("utf-8")]
        except UnicodeEncodeError as error:
            raise UserError(
                f"ByteTokenizer: not a valid text: got U+{ord(text[error.start]):04X} at position "
                f"{error.start}, a lone surrogate."
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are not UTF-8 and ids beyond the vocabulary become U+FFFD."""
        return b"".join(
            bytes((i - 2,)) if 2 <= i < 258 else _UNKNOWN.encode() for i in ids if i not in (0, 1)
        ).decode("utf-8", "replace")

    def backend(self) -> tokenizers.Tokenizer:
        """Byte-level BPE without merges."""
        vocabulary = {character: 2 + byte for byte, character in enumerate(_byte_characters())}
        backend = tokenizers.Tokenizer(models.BPE(vocab={PAD: 0, EOS: 1, **vocabulary}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return _with_specials(backend)


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face checkpoint.

    path: directory or tokenizer.json.
    eos_ids: the EOS of generation_config.json, else of config.json (beside the tokenizer, else in
      ``model_path``), and the tokenizer's own.
    chat_template_kwargs: arguments for the template; one that it never reads is an error.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        model_path: str | Path | None = None,
        chat_template: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
    ):
        self._path = user_path(path)
        self._kwargs = dict(chat_template_kwargs or {})
        self._system_prompt = system_prompt
        self._template: str | None = None
        self._directory = self._path if self._path.is_dir() else self._path.parent
        if not self._path.exists():
            raise UserError(
                f"HuggingFaceTokenizer: no such path: got {str(path)!r}, expected a directory with "
                "tokenizer files or a tokenizer.json."
            )
        self._settings = _read_json(self._path / "tokenizer_config.json") if self._path.is_dir() else {}
        use_transformers = self._path.is_dir() and importlib.util.find_spec("transformers") is not None
        self._transformers: Any = None
        if use_transformers:
            self._transformers = self._open_transformers()
        self._backend: tokenizers.Tokenizer = (
            self._transformers.backend_tokenizer if use_transformers else self._open_tokenizers()
        )
        added = self._backend.get_added_tokens_decoder().items()
        self._silent_ids = frozenset(
            i for i, token in added if token.special and token.content not in (OPENS, CLOSES)
        )
        self._bos_id = self._special_id("bos_token")
        self.eos_ids = self._find_eos(model_path)
        pad_id = self._special_id("pad_token")
        self.pad_id = self.eos_ids[0] if pad_id is None else pad_id
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        if chat_template:
            self._template = self._find_template()
            for probe in _PROBES:
                self.encode_prompt(probe)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special tokens added."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt.

        A chat template writes every special token itself.  Without one, the tokenizer adds its BOS if it does
        so by default, and an EOS that it puts after the prompt is removed.  A second BOS is always removed.
        """
        if self._template is not None:
            ids = self.encode(self.render(text))
        else:
            ids = list(self._backend.encode(text, add_special_tokens=True).ids)
            plain = self.encode(text)
            starts = [i for i in range(len(ids) - len(plain), -1, -1) if ids[i : i + len(plain)] == plain]
            if plain and starts:
                ids = ids[: starts[0] + len(plain)]
            elif not plain:  # an empty prompt keeps only its BOS
                ids = ids[:1] if ids[:1] == [self._bos_id] and self._bos_id not in self.eos_ids else []
        while len(ids) > 1 and ids[0] == ids[1] == self._bos_id:
            ids.pop(0)
        self._check_end(text, ids)
        return ids

    def _check_end(self, text: str, ids: Sequence[int]) -> None:
        """Raises `UserError` if a prompt ends in a stop token, which would leave nothing to complete.

        Behind a chat template, blanks after the stop token do not count.
        """
        end = len(ids)
        while (
            self._template is not None
            and end
            and ids[end - 1] not in self.eos_ids
            and not self._backend.decode([ids[end - 1]], skip_special_tokens=False).strip()
        ):
            end -= 1
        if end and ids[end - 1] in self.eos_ids:
            token, what = (
                self._backend.id_to_token(ids[end - 1]),
                "the prompt" if self._template is None else "the chat template's prompt",
            )
            hint = (
                ""
                if self._template is None
                else " The template must end it with the assistant's turn (add_generation_prompt)."
            )
            raise UserError(
                f"HuggingFaceTokenizer: {what} ends in a stop token: got {token!r} (id {ids[end - 1]}) "
                f"after {_short(text)}, in "
                f"{str(self._path)!r}, expected none of the stop tokens {list(self.eos_ids)} at its "
                f"end.{hint}"
            )

    def render(self, text: str) -> str:
        """The prompt within the chat template, ready for the assistant's turn; needs ``chat_template``."""
        messages = [{"role": "user", "content": text}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        rendered = rest = self._render(messages)
        # each text needs its own place, so one that occurs only inside the other does not count
        for message in messages:
            role, content = message["role"], message["content"].strip()  # many templates trim
            if content not in rest:
                field = "" if role == "user" else " (tokenizer.system_prompt)"
                hint = (
                    "tokenizer.chat_template: false"
                    if role == "user"
                    else "put that text into task.prompt_template"
                )
                raise UserError(
                    f"HuggingFaceTokenizer: the chat template of {str(self._path)!r} does not write the "
                    f"{role}'s text{field} as it is: got "
                    f"{_short(rendered)} for {_short(content)}, expected the text in it. Take another "
                    f"template, or {hint}."
                )
            rest = rest.replace(content, "", 1)
        return rendered

    def _render(self, messages: Sequence[Message]) -> str:
        """Messages within the chat template, ready for the assistant's turn."""
        try:
            return str(
                self._transformers.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True, **self._kwargs
                )
            )
        except Exception as error:
            raise UserError(
                f"HuggingFaceTokenizer: the chat template of {str(self._path)!r} failed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def encode_observation(self, messages: Sequence[Message], after: int) -> list[int]:
        """The template's text after the assistant's, without its first token if that is `after`.

        Without a chat template the ids of the messages' texts.

        Raises:
          UserError: the template fails, writes the assistant's text twice or never, or changes an
            observation.
        """
        if self._template is None:
            return self.encode(_plain(messages))
        ids = self.encode(self._observed(messages)[1])
        return ids[1:] if ids[:1] == [after] else ids

    def _observed(self, messages: Sequence[Message]) -> tuple[str, str]:
        """(text up to the assistant's, text after it) of the rendered observation."""
        # a short fixed history, in place of the episode's own, whose ids stay as they are
        history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        rendered = self._render([*history, *messages])
        if rendered.count(_MARK) != 1:
            raise UserError(
                f"HuggingFaceTokenizer: the chat template of {str(self._path)!r} does not write the "
                f"assistant's text once: got it {rendered.count(_MARK)} times in {_short(rendered)}, "
                "expected one place, after which the observation follows. Take another template."
            )
        before, after = rendered.split(_MARK)
        rest = after
        for message in messages:
            if message["content"].strip() not in rest:
                raise UserError(
                    f"HuggingFaceTokenizer: the chat template of {str(self._path)!r} does not write an "
                    f"observation of the role {message['role']} as it is: got {_short(after)}, expected "
                    f"{_short(message['content'])} in it. Take another template, or another role."
                )
            rest = rest.split(message["content"].strip(), 1)[1]
        return before, after

    def check_observations(self) -> list[str]:
        """Checks on several texts that observations can be appended to what the policy samples.

        Raises:
          UserError: the template does not end the assistant's turn with a stop token, or the ids before and
            after the boundary are not those of the whole text.
        """
        if self._template is None:
            return []
        for probe in _PROBES:
            before, after = self._observed([{"role": "user", "content": probe}])
            ids = self.encode(after)
            if not ids or ids[0] not in self.eos_ids or ids[0] not in self._silent_ids:
                end = self._backend.id_to_token(ids[0]) if ids else ""
                raise UserError(
                    f"HuggingFaceTokenizer: the chat template of {str(self._path)!r} ends the assistant's "
                    f"turn with {end!r}, expected one of the special stop tokens "
                    f"{[self._backend.id_to_token(i) for i in self.eos_ids]}, which the policy samples. Name "
                    "it as eos_token_id in generation_config.json."
                )
            for answer in ("7", "a\n\nb ", "<tool_call>{}</tool_call>"):
                whole, parts = self.encode(before + answer + after), self.encode(before + answer)
                if whole != parts + ids:
                    raise UserError(
                        f"HuggingFaceTokenizer: an observation's ids depend on the text before it: got "
                        f"{len(whole)} ids of {_short(answer + after)} as a whole and {len(parts + ids)} "
                        "other ids of its parts, expected the same. The end of the assistant's turn must be "
                        "a special token that takes no blanks beside it (lstrip, rstrip)."
                    )
        thought = {"role": "assistant", "content": f"{OPENS}{_MARK}{CLOSES}7"}
        question = {"role": "user", "content": "?"}
        if _MARK in self._render([question, thought, question]):
            return []
        return [
            "the chat template leaves thoughts out of earlier turns; in an episode they stay, as the policy "
            "said them"
        ]

    @property
    def end_of_turn(self) -> int:
        """The token with which the assistant's turn ends."""
        if self._template is None:
            return self.eos_ids[0]
        return self.encode(self._observed([{"role": "user", "content": "?"}])[1])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens except the marks of a thought; blanks are kept."""
        return str(
            self._backend.decode(
                [int(i) for i in ids if int(i) not in self._silent_ids], skip_special_tokens=False
            )
        )

    def fingerprint(self) -> str:
        """Hash of the tokenizer's file, the template and its arguments, and the EOS ids."""
        file = self._path if self._path.is_file() else self._path / "tokenizer.json"
        content = file.read_text("utf-8") if file.is_file() else self._backend.to_str()
        return _digest(
            [
                hashlib.sha256(content.encode()).hexdigest(),
                self._template,
                self._kwargs,
                self._system_prompt,
                self.eos_ids,
                self._bos_id,
            ]
        )

    def save(self, directory: str | Path) -> None:
        """Copies the tokenizer's files; a single tokenizer.json gets a tokenizer_config.json."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if self._path.is_file():
            shutil.copyfile(self._path, directory / "tokenizer.json")
            eos = self._backend.id_to_token(self.eos_ids[0])
            _write_config(directory, {"eos_token": eos, "pad_token": self._backend.id_to_token(self.pad_id)})
            return
        for name in _FILES:
            if (self._path / name).is_file() and (self._path / name).resolve() != (
                directory / name
            ).resolve():
                shutil.copyfile(self._path / name, directory / name)

    def _open_transformers(self) -> Any:
        from transformers import AutoTokenizer

        try:
            opened = AutoTokenizer.from_pretrained(str(self._path), local_files_only=True, use_fast=True)
        except Exception as error:
            raise UserError(
                f"HuggingFaceTokenizer: transformers cannot load {str(self._path)!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if getattr(opened, "backend_tokenizer", None) is None:
            raise UserError(
                f"HuggingFaceTokenizer: {str(self._path)!r} holds a {type(opened).__name__}, expected "
                "one with a tokenizer.json."
            )
        return opened

    def _open_tokenizers(self) -> tokenizers.Tokenizer:
        file = self._path if self._path.is_file() else self._path / "tokenizer.json"
        if not file.is_file():
            raise UserError(
                f"HuggingFaceTokenizer: no tokenizer.json in {str(self._path)!r}. Its other formats "
                "need: pip install 'jetrl-jax[hf]'"
            )
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise UserError(f"HuggingFaceTokenizer: cannot read {str(file)!r}: {error}") from error

    def _special_id(self, name: str) -> int | None:
        token = (
            getattr(self._transformers, name, None)
            if self._transformers is not None
            else self._settings.get(name)
        )
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else self._backend.token_to_id(str(text))

    def _find_eos(self, model_path: str | Path | None) -> tuple[int, ...]:
        directories = [self._directory] + ([] if model_path is None else [user_path(model_path)])
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            for directory in directories:
                ids = _read_json(directory / name).get("eos_token_id")
                found = found or ([ids] if isinstance(ids, int) else list(ids or []))
        own = self._special_id("eos_token")
        ids = tuple(dict.fromkeys([*found, *([] if own is None else [own])]))
        if not ids:
            raise UserError(
                f"HuggingFaceTokenizer: no end token: got {str(self._path)!r} whose "
                "generation_config.json, config.json "
                "and tokenizer_config.json name none, expected eos_token_id or eos_token in one of them."
            )
        return ids

    def _find_template(self) -> str:
        """The chat template, after checking that it reads every configured argument."""
        if self._transformers is None:
            if self._path.is_file():
                raise UserError(
                    "HuggingFaceTokenizer: a chat template needs the tokenizer's directory: got the "
                    f"file {str(self._path)!r}."
                )
            raise missing_extra("HuggingFaceTokenizer: chat_template", "transformers", "hf")
        import jinja2
        from jinja2 import meta

        try:
            template = str(self._transformers.get_chat_template())
            # tags for assistant masks, which jinja2 does not know
            plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
            names = (
                meta.find_undeclared_variables(
                    jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
                )
                - _TEMPLATE_NAMES
            )
        except Exception as error:
            raise UserError(
                f"HuggingFaceTokenizer: no usable chat template in {str(self._path)!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for key in sorted(set(self._kwargs) - names):
            close = difflib.get_close_matches(key, names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UserError(
                "HuggingFaceTokenizer: the chat template never reads an argument: got "
                f"tokenizer.chat_template_kwargs.{key}, "
                f"expected one of: {', '.join(sorted(names)) or 'none'}.{hint}"
            )
        return template


def build_tokenizer(section: TokenizerSection, model_path: str | None = None) -> Tokenizer:
    """The tokenizer of a config; a huggingface tokenizer without a path is read from ``model_path``."""
    if isinstance(section, CharacterSection):
        return CharacterTokenizer(section.characters)
    if isinstance(section, ByteSection):
        return ByteTokenizer()
    path = section.path or model_path
    if path is None:
        raise UserError(
            "build_tokenizer: no tokenizer files: got tokenizer.path=None and model.path=None, "
            "expected one of them."
        )
    return HuggingFaceTokenizer(
        path,
        model_path=model_path,
        chat_template=section.chat_template,
        chat_template_kwargs=section.chat_template_kwargs,
        system_prompt=section.system_prompt,
    )


def _plain(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def _with_specials(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens(
        [tokenizers.AddedToken(PAD, special=True), tokenizers.AddedToken(EOS, special=True)]
    )
    return backend


def _byte_characters() -> list[str]:
    """The character of each byte in byte-level vocabularies (as GPT-2): itself if printable, else another."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _write_config(directory: Path, tokens: Mapping[str, str | None]) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
        **tokens,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"HuggingFaceTokenizer: cannot read {str(path)!r}: {error}") from error
    return content if isinstance(content, dict) else {}


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:40]!r} ... {text[-30:]!r}"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, ensure_ascii=True, sort_keys=True).encode()).hexdigest()[:32]
