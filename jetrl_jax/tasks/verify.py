r"""Verifiers: does a completion hold the answer?

    exact_match   the completion is the answer, outer whitespace aside
    gsm8k         the number after the last ``####`` equals the answer
    last_number   the last number of the completion equals the answer
    boxed         the number in the last ``\boxed{...}`` equals the answer
    math_verify   the library's symbolic comparison (extra ``tasks``)

Each is ``(completion, example) -> 1.0, 0.0`` or None where the answer itself cannot be judged.  Numbers are compared
exactly, as decimals: ``1,000`` = ``1000`` = ``1000.0`` = ``$1,000.`` = ``1000 %``; a sign counts; an expression
(``3+4``, ``1/2``, ``10-12``, ``1e3``) is not a number; digits not grouped by threes (``1,00``) are none either.
Where several ``####`` are followed by a number, the last decides: a policy gains nothing by writing several, and
one that corrects itself is believed.  A heading such as ``#### Note`` is passed over.  What stands inside
``<think> ... </think>`` is working and never an answer.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from jetrl_jax.errors import UserError

if TYPE_CHECKING:
    from jetrl_jax.tasks.task import Example

_GROUP = "[,\u00a0\u2009\u202f]"  # comma and the spaces that typography puts between thousands
_DIGITS = rf"(?:[0-9]{{1,3}}(?:{_GROUP}[0-9]{{3}})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_MINUS = "-\u2212\u2013"
# Sign and currency in either order; digits in group 3.
_NUMBER = rf"([{_MINUS}+]?)[ ]?(?:\\?[$€£]){{0,2}}[ ]?([{_MINUS}+]?)({_DIGITS})"
# What makes the text before it part of an expression or of a longer, malformed number.
_CONTINUES = re.compile(
    rf"[0-9]|[.{_GROUP[1:-1]}][0-9]|[eE:][-+]?[0-9]|\s*[{_MINUS}+*/=^×÷]\s*[$(]?[0-9.]|\\frac|\s*\\(?:times|cdot|div|pm)"
)
_HASHES = re.compile(r"(?<!#)#{4,}+[ \t]*+(?:\*\*|__|`|\\boxed\{|\\\(|\\\[)*[ ]?(?=[-+\u2212\u2013$€£\\.0-9])")
_NUMBER_HERE = re.compile(_NUMBER)
_NUMBER_ANYWHERE = re.compile(rf"(?<![0-9A-Za-z_.,])(?:(?<![)\]])[{_MINUS}])?(?:\\?[$€£])?(?:{_DIGITS})|(?:{_DIGITS})")


def read_number(text: str) -> Decimal | None:
    """The number ``text`` begins with (blanks, sign, currency, then digits), or None where it begins with none."""
    text = text.lstrip().replace("{,}", ",")
    match = _NUMBER_HERE.match(text)
    if match is None or (match[1] and match[2]) or _CONTINUES.match(text, match.end()):
        return None
    value = Decimal(re.sub(_GROUP, "", match[3]))
    return -value if (match[1] or match[2] or "+") != "+" else value


def without_thinking(text: str) -> str:
    """The text after the last ``</think>``; empty where a ``<think>`` is left open."""
    text = text.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def hash_number(text: str) -> Decimal | None:
    """The number after the last ``####`` that is followed by one, or None."""
    found = list(_HASHES.finditer(text))
    return read_number(text[found[-1].end() :].partition("\n")[0]) if found else None


def last_number(text: str) -> Decimal | None:
    """The last number of a text, or None; in ``16-3`` the minus is an operator."""
    found = list(_NUMBER_ANYWHERE.finditer(text.replace("{,}", ",")))
    return read_number(found[-1][0]) if found else None


def boxed_number(text: str) -> Decimal | None:
    r"""The number in the last ``\boxed{...}``, or None."""
    start = text.rfind("\\boxed{")
    return None if start < 0 else read_number(text[start + len("\\boxed{") :])


def exact_match(completion: str, example: Example) -> float:
    """1.0 where the completion is the answer, outer whitespace aside; needs a text or number as answer."""
    answer = example.answer
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UserError(
            f"exact_match: cannot compare with this answer: got {type(answer).__name__} {answer!r}, expected a text or a number."
        )
    return float(completion.strip() == str(answer).strip())


def _same_number(extract: Callable[[str], Decimal | None], completion: str, example: Example) -> float:
    expected = read_number(str(example.answer))
    if expected is None:
        raise UserError(
            f"verify: the answer is no number: got answer={example.answer!r}, expected digits. "
            "Take verifier exact_match or math_verify for other answers."
        )
    return float(extract(without_thinking(completion)) == expected)


def gsm8k(completion: str, example: Example) -> float:
    """1.0 where the number after the last ``####`` equals the answer."""
    return _same_number(hash_number, completion, example)


def final_number(completion: str, example: Example) -> float:
    """1.0 where the last number of the completion equals the answer."""
    return _same_number(last_number, completion, example)


def boxed(completion: str, example: Example) -> float:
    r"""1.0 where the number in the last ``\boxed{...}`` equals the answer."""
    return _same_number(boxed_number, completion, example)


class MathVerify:
    """1.0 where the library math-verify finds the completion's answer equal to the example's.

    None where the example's answer cannot be parsed.  Raises TimeoutError where the library's own limits (5 s to
    parse, 5 s to compare) are passed.  It sets SIGALRM, so it runs in the main thread of a worker process.
    """

    def prepare(self) -> Any:
        """Imports the library, which takes seconds."""
        try:
            return importlib.import_module("math_verify")
        except ImportError as error:
            from jetrl_jax.tasks.task import missing_extra

            raise missing_extra("math_verify", "math-verify", "tasks") from error

    def __call__(self, completion: str, example: Example) -> float | None:
        """Score of a completion."""
        library = self.prepare()
        from math_verify.errors import TimeoutException

        try:
            gold = _parse_gold(library, str(example.answer))
            if not gold:
                return None
            try:
                found = library.parse(without_thinking(completion), raise_on_error=True)
            except Exception:  # the library fails on much malformed LaTeX: no answer that can be read is a wrong one
                return 0.0
            try:
                return float(library.verify(gold, found, raise_on_error=True))
            except Exception:  # one pair of readings cannot be compared; let the library try the others
                return float(library.verify(gold, found))
        except TimeoutException as error:
            raise TimeoutError("math_verify passed its own time limit") from error


def _parse_gold(library: Any, answer: str) -> list[Any]:
    """The answer, written as LaTeX in dollars, as a bare LaTeX or Python-like expression."""
    gold = library.parse(f"${answer}$") if "$" not in answer and "\\boxed" not in answer else library.parse(answer)
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
