"""Any dataset of the library reasoning-gym by name (extra ``tasks``), with the library's ``score_answer``.

``task.options`` holds the dataset's own config and three more options: ``train_size`` (10000), ``eval_size``
(512) and ``answer_tag`` (null: the whole completion is the answer; ``answer``: the content of the last
``<answer>...</answer>``).

The library makes item i from ``Random(seed + i)``, so adjacent seeds share all items except one.  Training
seeds are hashed into [0, 2**29) and the held-out seed is 2**30, so that the ranges never meet.  If a held-out
prompt still comes up in training, the next item is taken instead.  Held-out prompts are distinct and the same
for every seed.

``score_answer`` may parse a completion with sympy, which can hang (``9**9**9**9``), so it runs in a worker
process.  Scores are in [0, 1]; many datasets give partial credit.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jetrl_jax.config.task import ReasoningGymSection
from jetrl_jax.errors import UserError, missing_extra
from jetrl_jax.tasks.base import Example, LazyExamples, format_prompt, option_int
from jetrl_jax.text.answers import answer_part

_TRAIN_SIZE, _EVAL_SIZE, _LARGEST = 10_000, 512, 1 << 24
_EVAL_SEED = 1 << 30
_EVAL_DRAWS = 8  # items drawn for one held-out prompt before the dataset counts as too small
# Their items depend on the order of Python sets, so on PYTHONHASHSEED (measured on 0.1.25).
_HASH_SEED_DATASETS = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise missing_extra("reasoning_gym", "reasoning-gym", "tasks") from error
    return reasoning_gym


def _dataset(name: str, config: dict[str, Any]) -> Any:
    """A dataset of the library; raises `UserError` for an unknown name or option."""
    library = _library()
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise UserError(
            f"reasoning_gym: unknown dataset: got task.name={name!r}, expected one of the library's "
            f"{len(DATASETS)}.{hint}"
        )
    try:
        return library.create_dataset(name, **config)
    except (AssertionError, TypeError, ValueError) as error:
        options = {key: value for key, value in config.items() if key not in ("seed", "size")}
        raise UserError(
            f"reasoning_gym: dataset {name} refuses its options: got {options}: {error}"
        ) from error


@dataclass
class ReasoningGymVerifier:
    """``score_answer`` of a dataset; its pickle is small, as the dataset is made where it is used."""

    name: str
    config: dict[str, Any]
    answer_tag: str | None
    _scorer: Any = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scorer": None}

    def prepare(self) -> None:
        """Imports the library and makes the dataset, so that the first call is as fast as the others."""
        if self._scorer is None:
            self._scorer = _dataset(self.name, {**self.config, "seed": 0, "size": 4})

    def __call__(self, completion: str, example: Example) -> float:
        """The library's score, 0 to 1, of the text after the thought; 0 if the thought is not closed."""
        self.prepare()
        text = answer_part(completion)
        if text is None:
            return 0.0
        answer: str | None = text.strip()
        if self.answer_tag is not None:
            from reasoning_gym.utils import extract_answer

            answer = extract_answer(text, self.answer_tag)
        return float(self._scorer.score_answer(answer, example.metadata["entry"]))


class ReasoningGymTask:
    """A dataset of the library; ``example.metadata["entry"]`` is the library's own item."""

    separate_process = True

    def __init__(
        self,
        config: dict[str, Any],
        section: ReasoningGymSection,
        seed: int,
        train_size: int,
        eval_size: int,
        answer_tag: str | None,
    ):
        self.name = name = section.name
        self._template = section.prompt_template
        self._verifier = ReasoningGymVerifier(name, config, answer_tag)
        train_seed = int.from_bytes(hashlib.sha256(f"train/{seed}".encode()).digest()[:4], "big") % (1 << 29)
        self._source = _dataset(name, {**config, "seed": train_seed, "size": train_size})
        self.eval = self._held_out(
            _dataset(name, {**config, "seed": _EVAL_SEED, "size": eval_size * _EVAL_DRAWS}), eval_size
        )
        self._held = {e.prompt for e in self.eval}
        self.train = LazyExamples(train_size, self._train_example)
        self.notes: tuple[str, ...] = ()
        if name in _HASH_SEED_DATASETS and os.environ.get("PYTHONHASHSEED", "random") == "random":
            self.notes = (
                f"items of {name} depend on PYTHONHASHSEED; set it so that a resumed run sees the same ones",
            )

    def verify(self, completion: str, example: Example) -> float:
        """The library's score, in this process (see `separate_process`)."""
        return self._verifier(completion, example)

    def verifier(self) -> Callable[[str, Example], float]:
        """The verifier without the task, picklable."""
        return self._verifier

    def _example(self, entry: dict[str, Any], index: int) -> Example:
        answer = entry["answer"]
        solution = "" if answer is None else str(answer)
        if solution and self._verifier.answer_tag is not None:
            solution = f"<{self._verifier.answer_tag}>{solution}</{self._verifier.answer_tag}>"
        return Example(
            format_prompt(self._template, entry["question"]), answer, solution, index, {"entry": entry}
        )

    def _train_example(self, index: int) -> Example:
        size = len(self.train)
        for step in range(size):
            example = self._example(self._source[(index + step) % size], index)
            if example.prompt not in self._held:
                return example
        raise UserError(
            f"reasoning_gym: every training prompt of {self.name} is held out: got "
            f"task.options.eval_size={len(self.eval)}, "
            "expected less for so small a dataset."
        )

    def _held_out(self, source: Any, size: int) -> list[Example]:
        found: dict[str, Example] = {}
        for index in range(size * _EVAL_DRAWS):
            example = self._example(source[index], len(found))
            found.setdefault(example.prompt, example)
            if len(found) == size:
                return list(found.values())
        raise UserError(
            f"reasoning_gym: too few distinct held-out prompts: got task.options.eval_size={size}, "
            f"found {len(found)} in {size * _EVAL_DRAWS} items of {self.name}. Lower eval_size or widen "
            "the dataset's options."
        )


def build(section: ReasoningGymSection, seed: int) -> ReasoningGymTask:
    """The task of a config with ``kind: reasoning_gym``; ``name`` is the dataset."""
    config = dict(section.options)
    train_size = option_int("reasoning_gym", config, "train_size", _TRAIN_SIZE, 1, _LARGEST)
    eval_size = option_int("reasoning_gym", config, "eval_size", _EVAL_SIZE, 1, _LARGEST)
    answer_tag = config.get("answer_tag")
    if answer_tag is not None and not (isinstance(answer_tag, str) and answer_tag.isidentifier()):
        raise UserError(
            f"reasoning_gym: bad option: got task.options.answer_tag={answer_tag!r}, expected a tag's "
            "name, such as answer."
        )
    for key in ("train_size", "eval_size", "answer_tag"):
        config.pop(key, None)
    for key in ("seed", "size"):
        if key in config:
            raise UserError(
                f"reasoning_gym: task.options.{key} is not free: got {config[key]!r}, expected seed, "
                "train_size and eval_size instead."
            )
    task = ReasoningGymTask(config, section, seed, train_size, eval_size, answer_tag)
    task.train[0]  # if the dataset is too small for both splits, fail here and not in the middle of a run
    return task
