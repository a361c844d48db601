"""Answers as text, and the part of a completion that may contain one.

Only ``answer_text`` turns values into text.  Numbers are written with their shortest digits, without an
exponent: ``42.0`` is ``42``, ``1e-05`` is ``0.00001``, a float32 0.1 is ``0.1``.  Values that are neither
text nor a finite number (true, NaN, lists, bytes, dates) are refused.

A thought, ``<think> ... </think>``, is working and never an answer.  Many chat templates open it in the
prompt, so that a completion begins inside it.  Verifiers get such a completion with ``<think>`` put before it
(`with_opening`), and every verifier uses `answer_part`, the text after the thought.  A completion that ends
inside its thought has no answer.
"""

from __future__ import annotations

import re
import reprlib
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from numbers import Integral
from typing import Any

import numpy as np

from jetrl_jax.errors import UserError

OPENS, CLOSES = "<think>", "</think>"
MAX_DIGITS = 4300  # of a number that is turned into text

_SHOWN = reprlib.Repr()  # values in messages: cut short, and safe if a value's own repr fails
_SHOWN.maxstring = _SHOWN.maxlong = _SHOWN.maxother = 60


def answer_text(value: Any) -> str:
    """An answer as text: a text is unchanged, a number is written with its shortest digits.

    Raises:
      UserError: "got ..., expected ...", for other values, for a lone surrogate, and for a blank text.
    """
    text = value if isinstance(value, str) else _number_text(value)
    if not text.strip():
        raise UserError(f"got {_SHOWN.repr(text)}, expected a text that is not blank")
    check_text(text)
    return str(text)


def check_text(text: str) -> None:
    """Raises `UserError` for a text that UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"got the lone surrogate U+{ord(text[error.start]):04X} at character {error.start + 1}, "
            "expected Unicode text"
        ) from None


def _number_text(value: Any) -> str:
    """The digits of a finite number; raises `UserError` for everything else."""
    if isinstance(value, bool | np.bool_) or not isinstance(
        value, Integral | float | np.floating | Decimal | Fraction
    ):
        raise UserError(f"got {type(value).__name__} {_SHOWN.repr(value)}, expected a text or a number")
    too_long = UserError(f"got a number of more than {MAX_DIGITS} digits, expected a shorter one, or a text")
    if isinstance(value, Integral) and abs(int(value)) >= 10**MAX_DIGITS:
        raise too_long
    try:
        exact = Decimal(_shortest(value))
    except (InvalidOperation, ValueError):
        exact = Decimal("NaN")
    if not exact.is_finite():
        raise UserError(
            f"got {type(value).__name__} {_SHOWN.repr(value)}, expected a finite number that digits can write"
        )
    _, digits, exponent = exact.as_tuple()
    assert isinstance(exponent, int)
    if max(len(digits), abs(exponent)) > MAX_DIGITS:
        raise too_long
    text = f"{exact:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def _shortest(value: Any) -> str | Decimal:
    """The shortest digits that give the same float of the same width again."""
    if isinstance(value, Decimal):
        return value
    if isinstance(value, Fraction):
        if value.denominator != 1:
            raise ValueError
        return str(value.numerator)
    if isinstance(value, np.floating) and not isinstance(value, float):
        return np.format_float_scientific(value, unique=True)
    return float.__repr__(value) if isinstance(value, float) else str(int(value))


def with_opening(completion: str, opened: bool) -> str:
    """The completion as verifiers see it: with ``<think>`` before it if its prompt has opened a thought."""
    return OPENS + completion if opened else completion


def answer_part(completion: str) -> str | None:
    """The text after the last ``</think>``, or all of it without one; None if a thought is not closed."""
    text = completion.rpartition(CLOSES)[2]
    return None if OPENS in text else text


def opens_thought(rendered: str, prompt: str) -> bool:
    """Whether a rendered prompt leaves a thought open, after the task's text or at its very end."""
    place = rendered.rfind(prompt) if prompt else -1
    behind = rendered[place + len(prompt) :] if place >= 0 else ""
    return answer_part(behind) is None or re.search(rf"{OPENS}\s*$", rendered) is not None
