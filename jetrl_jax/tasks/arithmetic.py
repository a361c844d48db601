"""Built-in problems in few characters: sums, chains, sorting, spelling backward.

    family    prompt          answer    options (default)
    sum       12+34=          46        operands (2), digits (2)
    chain     7+2-5+9=        13        operands (4), digits (1)
    reverse   jetrl=          lrtej     min_letters (4), max_letters (8)
    sort      493817=         134789    length (6)

and for all: train_size (131072), eval_size (512).  The worked solution is the answer: what the policy should
  write.

A problem is a function of (family, options, seed, split, index) through SHA-256, so no library's random
numbers enter and any index can be made alone.  The split of a prompt is a hash of its text: the share
``eval_fraction`` of all possible prompts is held out, for every seed.  Held-out prompts are distinct and the
same for every seed; training prompts may repeat, as draws with replacement do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from jetrl_jax.config.task import ArithmeticSection
from jetrl_jax.errors import UserError
from jetrl_jax.tasks import verify
from jetrl_jax.tasks.base import Example, LazyExamples, check_options, format_prompt, option_int

_TRAIN_SIZE, _EVAL_SIZE, _LARGEST = 131072, 512, 1 << 31
_TRIES = 10_000  # draws after which a training problem outside the held-out share is given up
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

Draw = Callable[[int], int]  # draw(n): a whole number below n


def _option(default: int, low: int, high: int) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True)
class Sum:
    """a+b+...=: numbers below 10**digits."""

    operands: int = _option(2, 2, 16)
    digits: int = _option(2, 1, 18)

    def problem(self, draw: Draw) -> tuple[str, str]:
        """(prompt, answer)."""
        numbers = [draw(10**self.digits) for _ in range(self.operands)]
        return "+".join(map(str, numbers)) + "=", str(sum(numbers))


@dataclass(frozen=True)
class Chain:
    """a+b-c+d=: each sign is drawn; the answer may be negative."""

    operands: int = _option(4, 2, 16)
    digits: int = _option(1, 1, 18)

    def problem(self, draw: Draw) -> tuple[str, str]:
        """(prompt, answer)."""
        total = draw(10**self.digits)
        prompt = str(total)
        for _ in range(self.operands - 1):
            sign, number = draw(2), draw(10**self.digits)
            prompt += "+-"[sign] + str(number)
            total += -number if sign else number
        return prompt + "=", str(total)


@dataclass(frozen=True)
class Reverse:
    """A word of random lower-case letters, spelt backward."""

    min_letters: int = _option(4, 1, 64)
    max_letters: int = _option(8, 1, 64)

    def problem(self, draw: Draw) -> tuple[str, str]:
        """(prompt, answer)."""
        length = self.min_letters + draw(self.max_letters - self.min_letters + 1)
        word = "".join(_LETTERS[draw(26)] for _ in range(length))
        return word + "=", word[::-1]


@dataclass(frozen=True)
class Sort:
    """Digits in rising order."""

    length: int = _option(6, 2, 512)

    def problem(self, draw: Draw) -> tuple[str, str]:
        """(prompt, answer)."""
        digits = "".join(str(draw(10)) for _ in range(self.length))
        return digits + "=", "".join(sorted(digits))


FAMILIES: dict[str, type] = {"sum": Sum, "chain": Chain, "reverse": Reverse, "sort": Sort}


def _draws(key: str) -> Draw:
    """A stream of independent draws from SHA-256 in counter mode;
    the bias of 256 bits modulo n is below n/2**256.
    """

    def numbers() -> Iterator[int]:
        counter = 0
        while True:
            yield int.from_bytes(hashlib.sha256(f"{key}/{counter}".encode()).digest(), "big")
            counter += 1

    stream = numbers()
    return lambda n: next(stream) % n


def is_held_out(prompt: str, eval_fraction: float) -> bool:
    """Whether a prompt's hash falls into the held-out share."""
    return (
        int.from_bytes(hashlib.sha256(f"split/{prompt}".encode()).digest()[:8], "big")
        < eval_fraction * 2.0**64
    )


class ArithmeticTask:
    """A family with its options; ``characters`` is the alphabet a character tokenizer needs for it."""

    separate_process = False
    notes: tuple[str, ...] = ()

    def __init__(self, family: Any, section: ArithmeticSection, seed: int, train_size: int, eval_size: int):
        self.name = type(family).__name__.lower()
        self._family = family
        self._seed = seed
        self._template = section.prompt_template
        self._eval_fraction = section.eval_fraction
        letters = {Reverse: _LETTERS, Sum: "0123456789+", Chain: "0123456789+-", Sort: "0123456789"}[
            type(family)
        ]
        self.characters = "".join(sorted(set(letters + "=" + format_prompt(self._template, ""))))
        self.train = LazyExamples(train_size, self._train_example)
        self.eval = self._held_out(eval_size)

    def verify(self, completion: str, example: Example) -> float:
        """1.0 where the completion is the answer, outer whitespace aside."""
        return verify.exact_match(completion, example)

    def verifier(self) -> Callable[[str, Example], float]:
        """The verifier alone, picklable."""
        return verify.exact_match

    def _example(self, prompt: str, answer: str, index: int) -> Example:
        return Example(format_prompt(self._template, prompt), answer, answer, index, {"problem": prompt})

    def _train_example(self, index: int) -> Example:
        draw = _draws(f"{self._family}/train/{self._seed}/{index}")
        for _ in range(_TRIES):
            prompt, answer = self._family.problem(draw)
            if not is_held_out(prompt, self._eval_fraction):
                return self._example(prompt, answer, index)
        raise UserError(
            f"arithmetic: no training problem found in {_TRIES} draws: got {self._family}, "
            f"task.eval_fraction={self._eval_fraction}, expected a larger family or a smaller fraction."
        )

    def _held_out(self, size: int) -> list[Example]:
        draw = _draws(f"{self._family}/eval")
        found: dict[str, str] = {}
        for _ in range(int(20 * size / self._eval_fraction) + _TRIES):
            prompt, answer = self._family.problem(draw)
            if is_held_out(prompt, self._eval_fraction):
                found.setdefault(prompt, answer)
            if len(found) == size:
                return [self._example(prompt, answer, i) for i, (prompt, answer) in enumerate(found.items())]
        raise UserError(
            f"arithmetic: too few held-out problems: got task.options.eval_size={size}, found "
            f"{len(found)} of {self._family} "
            f"at task.eval_fraction={self._eval_fraction}. Lower eval_size, raise eval_fraction or take "
            "more digits or letters."
        )


def build(section: ArithmeticSection, seed: int) -> ArithmeticTask:
    """The task of ``kind: arithmetic``."""
    kind, where = FAMILIES[section.name], f"arithmetic {section.name}"
    specs: dict[str, Any] = {f.name: f for f in fields(kind)}
    check_options(where, section.options, [*specs, "train_size", "eval_size"])
    values = {
        key: option_int(where, section.options, key, f.default, f.metadata["low"], f.metadata["high"])
        for key, f in specs.items()
    }
    family = kind(**values)
    if isinstance(family, Reverse) and family.min_letters > family.max_letters:
        raise UserError(
            f"{where}: sizes do not fit: got min_letters={family.min_letters} above "
            f"max_letters={family.max_letters}."
        )
    train_size = option_int(where, section.options, "train_size", _TRAIN_SIZE, 1, _LARGEST)
    eval_size = option_int(where, section.options, "eval_size", _EVAL_SIZE, 1, _LARGEST)
    task = ArithmeticTask(family, section, seed, train_size, eval_size)
    task.train[0]  # fails here, not in the middle of a run, where every problem is held out
    return task
