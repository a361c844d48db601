"""Verifiers of numbers: what counts as a final answer, compared exactly; the library math-verify as it is."""

from __future__ import annotations

import random
import time
from decimal import Decimal
from fractions import Fraction

import pytest

from jetrl_jax.errors import UserError
from jetrl_jax.tasks import verify
from jetrl_jax.tasks.base import Example


def score(name: str, completion: str, answer) -> float | None:
    return verify.VERIFIERS[name](completion, Example("q", answer))


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("18", "18"), ("1,000", "1000"), ("1,234,567.5", "1234567.5"), ("18.", "18"), ("18.0", "18"), ("3.50", "3.5"), (".5", "0.5"),
        ("007", "7"),
        ("-5", "-5"), ("- 5", "-5"), ("\u22125", "-5"), ("\u20135", "-5"), ("+5", "5"), ("$18", "18"), ("-$5", "-5"), ("$-5", "-5"),
        ("\\$18", "18"),
        ("$ 18", "18"), ("\u20ac18", "18"), ("18%", "18"), ("18 %", "18"), ("18\\%", "18"), ("18 dollars", "18"), ("18km", "18"),
        ("$18/day", "18"), ("18!", "18"),
        ("18, and more", "18"), ("18)", "18"), ("1{,}000", "1000"), ("1\u202f000", "1000"), ("1\u00a0000", "1000"), ("18$", "18"),
        ("18}$", "18"), ("0", "0"),
        ("-0", "0"), ("18 (eighteen)", "18"), ("18.5 miles.", "18.5"), ("18 - the total", "18"), ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_read_number_reads(written, value):
    assert verify.read_number(written) == Decimal(value)
    assert verify.read_number("  " + written) == Decimal(value)


@pytest.mark.parametrize(
    "written",
    ["", "x", "x = 18", "1,00", "1,0000", "12,34", "1.2.3", "1234,567", "3+4", "3 + 4", "3*4", "3 = 3",
     "1/2", "$1/2", "10-12", "1:30", "1e3", "1E-3", "--5", "-$-5", "~5",
     "(5", "3 \\times 4", "five", "NaN", "inf", ".", "\u0663", "\u00b2"],
)  # fmt: skip
def test_read_number_refuses(written):
    assert verify.read_number(written) is None


def test_read_number_matches_fractions_on_random_decimals():
    rng = random.Random(0)
    for _ in range(500):
        value = Fraction(rng.randrange(-(10**12), 10**12), 10 ** rng.randrange(0, 6))
        digits = format(
            Decimal(value.numerator) / Decimal(value.denominator), "," if rng.random() < 0.5 else ""
        )
        read = verify.read_number(digits)
        assert read is not None and Fraction(read) == value


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("so\n#### 18", 1), ("####18", 1), ("#### $18", 1), ("#### **18**", 1), ("#### \\boxed{18}", 1), ("#### " "$18$", 1),
        ("#### `18`", 1), ("##### 18", 1), ("#### 18.00", 1),
        ("#### 18\nThat was 3 more than 15.", 1), ("#### 18 because 9*2", 1), ("#### 18. Or 19?", 1), ("#### 18\n#### " "Note\n5 " "eggs", 1),
        ("#### 18 ####", 1),
        ("#### 17\nNo:\n#### 18", 1), ("#### 18\nNo:\n#### 17", 0), ("#### 18\n#### 1/2", 0), ("#### 16 17 18", 0), ("#### 18 17 16", 1),
        ("18", 0), ("the answer is 18", 0), ("#### ", 0), ("####\n18", 0), ("#### eighteen", 0), ("### 18", 0), ("#### " "9*2=18", 0),
        ("#### 18-19", 0), ("#### -18", 0),
        ("#### 18e0", 0), ("#### 18.1", 0), ("#### 1.8", 0), ("#### 81", 0), ("#### 19", 0), ("#### 180", 0), ("#### " "018", 1),
        ("#### 18\u0660", 1), ("", 0),
        ("<think>#### 18</think>", 0), ("<think>#### 5</think>\n#### 18", 1), ("#### 18</think>#### 5", 0), ("<think>\n#### 18", 0),
        ("#### 18\r\n", 1),
    ],
)  # fmt: skip
def test_gsm8k_final_answer(completion, expected):
    assert score("gsm8k", completion, "18") == expected


@pytest.mark.parametrize(
    ("name", "completion", "expected"),
    [
        ("last_number", "16 - 3 - 4 = 9, 9 * 2 = 18 dollars.", 1), ("last_number", "18 or 19", 0), ("last_number", "x=18", 1),
        ("last_number", "21-18", 1),
        ("last_number", "costs $18.", 1), ("last_number", "none", 0), ("last_number", "is -18", 0), ("last_number", "a_18", 1),
        ("last_number", "1,8", 0), ("last_number", "", 0),
        ("boxed", "so \\boxed{18}", 1), ("boxed", "\\boxed{18\\text{ eggs}} of 20", 1), ("boxed", "\\boxed{17} " "\\boxed{18}", 1),
        ("boxed", "\\boxed{x}", 0), ("boxed", "18", 0),
        ("exact_match", " 18\n", 1), ("exact_match", "18.0", 0), ("exact_match", "=18", 0),
    ],
)  # fmt: skip
def test_other_verifiers(name, completion, expected):
    assert score(name, completion, "18") == expected


def test_last_number_keeps_a_sign_that_is_no_operator():
    assert [verify.last_number(t) for t in ("is -7", "(-7", "=-7", "3 -7", "10-7", "x-7", "-7")] == [
        -7,
        -7,
        -7,
        -7,
        7,
        7,
        -7,
    ]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("gsm8k", "x+1"),
        ("last_number", ""),
        ("boxed", "1/2"),
        ("exact_match", ["18"]),
        ("exact_match", None),
        ("exact_match", True),
    ],
)
def test_verifiers_raise_on_an_answer_they_cannot_compare(name, answer):
    with pytest.raises(UserError, match="expected"):
        score(name, "18", answer)


def test_verifiers_are_linear_in_long_completions():
    n = 50_000
    texts = [
        "9," * n,
        "1,000" * n,
        "#### " * n,
        "#" * n,
        "-" * n,
        "\\boxed{" * n,
        "####" + " " * n,
        "####" + "*" * n,
        "<think>" * n,
        "1" * n,
    ]
    started = time.process_time()
    for text in texts:
        for name in ("gsm8k", "last_number", "boxed", "exact_match"):
            score(name, text, "18")
    assert time.process_time() - started < 30  # no speed test: a quadratic pattern takes minutes


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("$\\frac{1}{2}$", "0.5", 1), ("The answer is \\boxed{\\frac{2}{4}}", "1/2", 1), ("$x^2+2x+1$", "(x+1)^2", 1),
        ("\\boxed{3}", "4", 0), ("no idea", "4", 0), ("", "4", 0),
        ("$1{,}000$", "1000", 1), ("\\boxed{\\{1,2\\}}", "\\{2,1\\}", 1), ("\\boxed{(1,2)}", "(2,1)", 0),
        ("<think>\\boxed{4}</think>\\boxed{5}", "4", 0), ("$\\sqrt{", "4", 0),
    ],
)  # fmt: skip
def test_math_verify_scores(completion, answer, expected):
    pytest.importorskip("math_verify", reason="math-verify (extra tasks) is not installed")
    assert score("math_verify", completion, answer) == expected


def test_math_verify_has_no_score_where_the_answer_cannot_be_read():
    pytest.importorskip("math_verify", reason="math-verify (extra tasks) is not installed")
    assert score("math_verify", "4", "") is None


def test_math_verify_raises_timeout_for_an_answer_that_takes_for_ever(monkeypatch):
    library = pytest.importorskip("math_verify", reason="math-verify (extra tasks) is not installed")
    from math_verify.errors import TimeoutException

    def slow(*_, **__):
        raise TimeoutException("slow")

    monkeypatch.setattr(library, "verify", slow)
    with pytest.raises(TimeoutError, match="its own time limit"):
        score("math_verify", "$4$", "4")
