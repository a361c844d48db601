r"""Verifiers: does a completion contain the answer?

    exact_match   the completion is the answer, apart from outer whitespace
    gsm8k         the number after the last ``####`` equals the answer
    last_number   the last number of the completion equals the answer
    boxed         the number in the last ``\boxed{...}`` equals the answer
    math_verify   the library's symbolic comparison (extra ``tasks``)

Each is ``(completion, example) -> 1.0 or 0.0``, or None if it cannot judge the answer itself.  For all of
them, text inside ``<think> ... </think>`` is working and never an answer (`jetrl_jax.text.answers`).

Numbers are read as a whole or not at all (`jetrl_jax.text.numbers_in_text`), and are compared exactly, as
decimals: ``1,000`` = ``1000`` = ``1000.0`` = ``$1,000.`` = ``1000 %``.  A sign counts; an expression
(``3+4``, ``1/2``, ``2^{10}``, ``1e3``) is not a number.  If several ``####`` are followed by a number, the
last decides, so that a policy gains nothing by writing several and may correct itself.  A heading such as
``#### Note`` is skipped.

Before a run, ``answer_problem`` checks whether a verifier can compare with an answer.
"""

from __future__ import annotations

import importlib
import pickle
import re
import threading
from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from jetrl_jax.errors import UserError
from jetrl_jax.text.answers import answer_part, answer_text
from jetrl_jax.text.numbers_in_text import boxed_content, boxed_number, hash_number, last_number, whole_number
from jetrl_jax.text.numbers_in_text import read_number as read_number
from jetrl_jax.workers.process import RewardProcess

if TYPE_CHECKING:
    from jetrl_jax.tasks.base import Example


def exact_match(completion: str, example: Example) -> float:
    """1.0 if the completion after its thought is the answer, apart from outer whitespace."""
    expected = _expected("exact_match", example.answer).strip()
    text = answer_part(completion)
    return float(text is not None and text.strip() == expected)


def gsm8k(completion: str, example: Example) -> float:
    """1.0 if the number after the last ``####`` equals the answer."""
    return _same_number("gsm8k", hash_number, completion, example)


def final_number(completion: str, example: Example) -> float:
    """1.0 if the last number of the completion equals the answer."""
    return _same_number("last_number", last_number, completion, example)


def boxed(completion: str, example: Example) -> float:
    r"""1.0 if the number in the last ``\boxed{...}`` equals the answer."""
    return _same_number("boxed", boxed_number, completion, example)


def answer_problem(verifier: str, answer: Any) -> str | None:
    """Why the named verifier cannot compare with an answer, as "got ..., expected ...", or None."""
    try:
        text = answer_text(answer)
    except UserError as error:
        return str(error)
    if answer_part(text) != text:
        return (
            f"got {_short(text)}, expected a text without <think> and </think>, which no "
            "completion's answer holds"
        )
    if verifier == "math_verify" and _BASE.search(text):
        return (
            f"got {_short(text)}, expected a number in base ten (of another base the library reads "
            "the digits only)"
        )
    if verifier in _NUMBERS and whole_number(text) is None:
        return (
            f"got {_short(text)}, expected a number as a whole, at most with a unit; exact_match and "
            "math_verify take other answers"
        )
    return None


def _expected(verifier: str, answer: Any) -> str:
    problem = answer_problem(verifier, answer)
    if problem:
        raise UserError(f"{verifier}: cannot compare with this answer: {problem}.")
    return answer_text(answer)


def _same_number(
    verifier: str, extract: Callable[[str], Decimal | None], completion: str, example: Example
) -> float:
    expected = whole_number(_expected(verifier, example.answer))
    text = answer_part(completion)
    found = None if text is None else extract(text)
    return float(found is not None and found == expected)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


class MathVerify:
    """1.0 if the library math-verify finds the completion's answer equal to the example's.

    Returns None if the example's answer cannot be parsed.  Raises TimeoutError if the library's own limits
    are exceeded (5 s to parse, 5 s to compare).  The library uses SIGALRM for them, which only the main
    thread may set.  Other threads therefore send the comparison to a worker process.  The first such call
    starts it (in seconds), all threads share it, one call at a time, and it is ended if a call takes longer
    than ``thread_limit_s``.
    """

    def __init__(self, thread_limit_s: float = 20.0) -> None:
        self.thread_limit_s = thread_limit_s
        self._lock = threading.Lock()
        self._process: RewardProcess | None = None

    def __reduce__(self) -> tuple[type[MathVerify], tuple[float]]:
        return MathVerify, (self.thread_limit_s,)

    def prepare(self) -> Any:
        """Imports the library, which takes seconds."""
        try:
            return importlib.import_module("math_verify")
        except ImportError as error:
            from jetrl_jax.errors import missing_extra

            raise missing_extra("math_verify", "math-verify", "tasks") from error

    def __call__(self, completion: str, example: Example) -> float | None:
        """The score of a completion."""
        if isinstance(example.answer, str) and not example.answer.strip():
            return None
        expected, text = _expected("math_verify", example.answer), answer_part(completion)
        if threading.current_thread() is threading.main_thread():
            return self._score(text, expected)
        return self._score_in_process(completion, expected)

    def close(self) -> None:
        """Ends the worker process that serves other threads, if one runs."""
        with self._lock:
            if self._process is not None:
                self._process.close()
                self._process = None

    def _score(self, text: str | None, expected: str) -> float | None:
        """The library's score of the text after the thought, computed in this thread."""
        library = self.prepare()
        from math_verify.errors import TimeoutException

        try:
            gold = _parse_gold(library, expected)
            if not gold:
                return None
            if text is None or _BASE.search(boxed_content(text) or ""):
                return 0.0
            try:
                found = library.parse(_for_library(text), raise_on_error=True)
            # the library fails on much malformed LaTeX; an answer that cannot be read is wrong
            except Exception:
                return 0.0
            try:
                return float(library.verify(gold, found, raise_on_error=True))
            except Exception:  # one pair of readings cannot be compared; the library tries the others
                return float(library.verify(gold, found))
        except TimeoutException as error:
            raise TimeoutError("math_verify passed its own time limit") from error

    def _score_in_process(self, completion: str, expected: str) -> float | None:
        """The same score, for a thread that may not set signals."""
        with self._lock:
            if self._process is None:
                self.prepare()  # reports a missing library here, with its hint
                self._process = RewardProcess(
                    "math_verify", target=None, pickled=pickle.dumps(self), timeout_s=self.thread_limit_s
                )
            columns: dict[str, list[Any]] = {
                "completions": [completion],
                "examples": [SimpleNamespace(answer=expected)],
            }
            scores = self._process.score(columns, 1)
        if scores.failed:
            message = "; ".join(scores.messages)
            raise (
                TimeoutError(f"math_verify: {message}")
                if scores.failed[0] == "timeout"
                else RuntimeError(f"math_verify: {message}")
            )
        return scores.values[0]


def _for_library(text: str) -> str:
    r"""The text with forms rewritten that math-verify 0.9 misreads: ``5\,000`` (as 0), ``2**10`` (as 2)."""
    text = re.sub(r"(?<=[0-9])(?:\\[,;:! ]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", "", text)
    return re.sub(r"(?<=[0-9A-Za-z)])\*\*\s*(-?[0-9]+|[A-Za-z])(?![0-9A-Za-z])", r"^{\1}", text)


def _parse_gold(library: Any, answer: str) -> list[Any]:
    """The parsed answer, which is LaTeX (in dollars or bare) or a Python-like expression."""
    answer = _for_library(answer)
    gold = (
        library.parse(f"${answer}$")
        if "$" not in answer and "\\boxed" not in answer
        else library.parse(answer)
    )
    return list(gold or library.parse(answer))


math_verify = MathVerify()
VERIFIERS: dict[str, Callable[[str, Any], float | None]] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "last_number": final_number,
    "boxed": boxed,
    "math_verify": math_verify,
}
NEEDS_PROCESS = frozenset({"math_verify"})  # may hang or sets signals
_BASE = re.compile(r"[0-9A-Fa-f]\s*_\s*\{?\s*[0-9]")  # 2516_8
_NUMBERS = frozenset({"gsm8k", "last_number", "boxed"})
