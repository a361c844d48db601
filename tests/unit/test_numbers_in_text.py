r"""Numbers in texts: read as a whole or not at all, against a slow reading and against values that the texts
are made from.
"""

from __future__ import annotations

import decimal
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.tasks import verify
from jetrl_jax.tasks.base import Example
from jetrl_jax.text.numbers_in_text import (
    boxed_content,
    boxed_number,
    hash_number,
    last_number,
    read_number,
    whole_number,
)
from tests.oracles import number_oracle as oracle


def score(name: str, completion: str, answer) -> float | None:
    return verify.VERIFIERS[name](completion, Example("q", answer))


@pytest.mark.parametrize("text", ["1km/", "1 km /", "7 eggs /", "1 km·"])
def test_a_unit_over_nothing_is_no_number(text: str) -> None:
    assert whole_number(text) is None


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("10,\\!080", 10080), ("1{,}000", 1000), ("5\\,000", 5000), ("5\\;000", 5000), ("1\u2009234\u2009567", 1234567), ("12~000", 12000),
        ("{42}", 42), ("{{42}}", 42), ("\\text{42}", 42), ("\\mathbf{42}", 42), ("\\mathrm{42}", 42), ("\\textbf{\\text{42}}", 42),
        ("$42$", 42), ("\\(42\\)", 42), ("\\[42\\]", 42), ("**42**", 42), ("$$42$$", 42), ("\\boxed{42}", 42), ("\\displaystyle 42", 42),
        ("\\$42", 42), ("\\text{\\$}42", 42), ("-\\$5", -5), ("{-}5", -5), ("-{5}", -5), ("42\\%", 42), ("42^\\circ", 42),
        ("42^{\\circ}", 42), ("42°", 42), ("42\\text{ eggs}", 42), ("42 \\text{ m}", 42), ("42\\text{ cm}^2", 42),
        ("42\\,\\mathrm{km}", 42),
        ("42 km/h", 42), ("42 miles per hour", 42), ("42 square feet", 42), ("42元", 42), ("42 dollars", 42), ("42km", 42),
        ("$42$ eggs", 42),
        ("42\\text{°C}", 42), ("42^{\\circ}\\text{C}", 42), ("42~\\text{km}", 42), ("4\\text{ p.m.}", 4), ("42.", 42), (" 42 ", 42),
        ("\\textbf{42} eggs", 42), ("42.0", 42),
    ],
)  # fmt: skip
def test_whole_number_reads(written, value):
    assert whole_number(written) == value
    assert boxed_number(f"so \\boxed{{{written}}}.") == value
    assert boxed_number(f"\\boxed {{ {written} }}") == value


NO_NUMBERS = [
    "3\\sqrt{13}", "2k+2", "2k", "2\\pi", "4 1/2", "4\\dfrac{1}{2}", "4\\frac12", "3\\tfrac12", "2 2/3", "2^{16}", "2^16", "2516_8",
    "2516_{8}", "3, 5, 7", "1, 2", "2;3", "10^{-3}", "1e3", "1/2", "\\frac{1}{2}", "2xy", "2 xy", "3abc", "3abcd", "2pi", "2 pi",
    "2\\theta",
    "3\\mathrm{i}", "5!", "18 17", "5 000", "1\\quad 2", "18\\\\19", "2 million", "2\\text{ million}", "3 " "dozen", "2万", "18²", "18½",
    "18 or 19", "18 and 19", "5 feet 6 inches", "0.\\overline{3}", "0.33\\ldots", "18...", "18…", "18+", "18-", "18/", "x=18", "(18)", "~5",
    "\\pm 5", "≈5", "--5", "1'000", "1_000", "0,500", "1,00", "1.2.3", "", "x", "five", "five 5", "{4", "4}", "18\\%5", "5\\cdot " "10^3",
    "5 \\times 10^3", "\\sqrt{4}", "|5|", "5:3", "12:30", "18x", "18 x", "18 mod 5", "18 squared", "two and 1", "5\\pmod 7", "5\\infty",
    "5∞",
]  # fmt: skip


@pytest.mark.parametrize("written", NO_NUMBERS)
def test_no_number_as_a_whole_is_no_answer_and_no_gold(written):
    assert whole_number(written) is None
    assert written == "4}" or boxed_number(f"\\boxed{{{written}}}") is None
    for name in ("boxed", "gsm8k", "last_number"):
        assert verify.answer_problem(name, written) is not None


@pytest.mark.parametrize(
    ("name", "completion", "answer", "expected"),
    [
        ("gsm8k", "#### 2 2/3", "2", 0), ("boxed", "\\boxed{2^{10}}", "2", 0), ("boxed", "\\boxed{10^{-3}}", "10", 0),
        ("boxed", "\\boxed{3\\tfrac12}", "3", 0), ("boxed", "\\boxed{1, 2}", "1", 0), ("boxed", "\\boxed{4", "4", 0),
        ("boxed", "\\boxed{1,\\!000}", "1000", 1), ("boxed", "\\boxed{5\\,000}", "5000", 1), ("boxed", "\\boxed{5\\,000}", "5", 0),
        ("boxed", "\\boxed{{42}}", "42", 1), ("boxed", "\\boxed{\\text{42}}", "42", 1), ("boxed", "\\boxed " "{7}", "7", 1),
        ("boxed", "\\boxed{\\frac{7}{2}}", "7", 0), ("boxed", "\\boxed{7} and \\boxed{8", "7", 0), ("boxed", "\\boxed{\\boxed{7}}", "7", 1),
        ("boxed", "\\boxed{2^{\\boxed{3}}}", "3", 0), ("boxed", "{ \\boxed{7}", "7", 1), ("boxed", "\\boxed{\\{7}", "7", 0),
        ("boxed", "\\\\boxed{7}", "7", 1), ("boxed", "\\boxed 7", "7", 0), ("boxed", "boxed{7}", "7", 0), ("boxed", "\\boxed{}", "0", 0),
        ("gsm8k", "#### \\boxed{7}", "7", 1), ("gsm8k", "#### \\boxed{7", "7", 0), ("gsm8k", "#### " "\\boxed{7^2}", "7", 0),
        ("gsm8k", "#### $5\\,000$", "5000", 1), ("gsm8k", "#### 5\\,000", "5", 0), ("gsm8k", "#### 5 000", "5", 0),
        ("gsm8k", "#### 2k", "2", 0),
        ("gsm8k", "#### 2\\pi", "2", 0), ("gsm8k", "#### 2 million", "2", 0), ("gsm8k", "#### 2½", "2", 0),
        ("gsm8k", "#### 2 and a half", "2", 0),
        ("gsm8k", "#### 18, 19", "18", 0), ("gsm8k", "#### 18 or 19", "18", 0), ("gsm8k", "#### 18 = 9*2", "18", 0),
        ("gsm8k", "#### 18+", "18", 0), ("gsm8k", "#### 50% of 84", "50", 0), ("gsm8k", "#### 50\\% of 84", "50", 0),
        ("gsm8k", "#### 50 percent of 84", "50", 0), ("gsm8k", "#### 3 of 4", "3", 0), ("gsm8k", "#### 3 of the 4 " "apples", "3", 1),
        ("gsm8k", "#### 50 percent", "50", 1), ("boxed", "\\boxed{3 \\text{ of } 4}", "3", 0),
        ("gsm8k", "#### 18 dollars + 2 dollars", "18", 0), ("gsm8k", "#### 5 feet 6 inches", "5", 0), ("gsm8k", "#### 18 " "eggs", "18", 1),
        ("gsm8k", "#### 18\n#### x = 17", "18", 0), ("gsm8k", "#### 18 a day", "18", 1), ("gsm8k", "#### " "18's", "18", 1),
        ("gsm8k", "#### 18 17 16", "18", 1), ("gsm8k", "#### 18! Done", "18", 1), ("gsm8k", "#### 18km", "18", 1),
        ("gsm8k", "#### 18**", "18", 1),
        ("gsm8k", "#### 18** 2", "18", 1), ("gsm8k", "#### 18**2", "18", 0), ("gsm8k", "#### 18 <|im_end|>", "18", 1),
        ("gsm8k", "#### 18 < 19", "18", 0),
        ("last_number", "so 1/18", "18", 0), ("last_number", "2^{18}", "18", 0), ("last_number", "2^18", "18", 0),
        ("last_number", "\\frac{1}{18}", "18", 0),
        ("last_number", "\\sqrt{18}", "18", 0), ("last_number", "3 \\sqrt 18", "18", 0), ("last_number", "9*18", "18", 0),
        ("last_number", "18\\pi", "18", 0),
        ("last_number", "2516_8", "8", 0), ("last_number", "x_{18}", "18", 0), ("last_number", "12:18", "18", 0),
        ("last_number", "1e18", "18", 0),
        ("last_number", "minus 18", "18", 0), ("last_number", "1,8", "8", 0), ("last_number", "4 1/2", "2", 0),
        ("last_number", "10^{-3}", "-3", 0),
        ("last_number", "it is **18**.", "18", 1), ("last_number", "it is *18*.", "18", 1), ("last_number", "= " "\\$18", "18", 1),
        ("last_number", "\\boxed{18}", "18", 1), ("last_number", "<answer>18</answer>", "18", 1), ("last_number", "Step 2: 18", "18", 1),
        ("last_number", "Answer : 18", "18", 1), ("last_number", "\\[ x = 18 \\]", "18", 1), ("gsm8k", "#### \\( 18 " "\\)", "18", 1),
        ("last_number", "= 18\\text{ cm}^2", "18", 1), ("last_number", "18 cm^{2}.", "18", 1), ("last_number", "18 " "x^2", "2", 0),
        ("last_number", "18 ± 2", "2", 0), ("last_number", "5 018", "18", 0), ("gsm8k", "#### \\( 18 \\) + 1", "18", 0),
        ("last_number", "12 : 18", "18", 0), ("last_number", "No.18", "0.18", 0),
        ("last_number", "it is .18", "0.18", 1), ("last_number", '{"answer": 18}', "18", 1), ("last_number", "$x = " "18$", "18", 1),
        ("last_number", "5\\,000", "5000", 1),
    ],
)  # fmt: skip
def test_scores_of_numbers_in_completions(name, completion, answer, expected):
    assert score(name, completion, answer) == expected


def test_long_numbers_are_compared_digit_by_digit_whatever_the_context():
    long = "12345678901234567890123456789013"
    with decimal.localcontext(decimal.Context(prec=3)):
        for sign in ("-", ""):
            for name, text in (("boxed", "\\boxed{%s}"), ("gsm8k", "#### %s"), ("last_number", "is %s")):
                assert score(name, text % (sign + long), sign + long) == 1.0
                assert score(name, text % (sign + long[:-1] + "2"), sign + long) == 0.0
                assert score(name, text % (sign + long + ".000"), sign + long) == 1.0
                assert score(name, text % (sign + long + ".001"), sign + long) == 0.0


# ------------------------------------------------------------------------------------- texts made from values

SEPARATORS = ("", ",", "{,}", ",\\!", "\\,", "\u2009", "\u00a0", "\u202f", "\\;")
WRAPPERS = (
    "%s",
    "{%s}",
    "\\text{%s}",
    "$%s$",
    "\\(%s\\)",
    "\\mathbf{%s}",
    "**%s**",
    " %s ",
    "{ %s }",
    "\\boxed{%s}",
    "%s.",
)
INNER = ("%s", "{%s}", "\\text{%s}", "\\mathbf{%s}", " %s ", "{ %s }", "%s.", "\\boxed{%s}")
UNITS = (
    "",
    "\\%",
    "%",
    " eggs",
    "\\text{ dollars}",
    "\\ \\text{cm}",
    "km",
    "^\\circ",
    " \\text{ cm}^2",
    "\\,\\mathrm{kg}",
    " miles per hour",
)
SPOILERS = (
    "^2", "^{10}", "_8", "_{8}", "\\pi", "\\sqrt{2}", "\\frac12", "\\dfrac{1}{2}", " 1/2", "½", "²", "k", "x", "xy", "e5", "/2", "/x",
    "+1", "-1",
    " + 1", " - x", "*2", "\\cdot 2", "\\times 10^3", ", 7", ",7", "; 7", ":30", " million", "\\text{ " "thousand}", " or 7", "=7", " = 7",
    "\\%7", "..",
    "\\ldots", "{2}x", "(2)", "(x+1)", "\\choose 2", " squared", "\\mathrm{i}", "\\infty", "\\theta", "\\over 2", "!!/2", "'000",
    "\\,00", ",00",
)  # fmt: skip


@st.composite
def numbers(draw) -> tuple[str, Fraction]:
    """(a number in some notation, its value)."""
    whole = draw(st.one_of(st.integers(0, 9999), st.integers(0, 10**40)))
    part = draw(st.one_of(st.just(""), st.text("0123456789", min_size=1, max_size=30)))
    separator = draw(st.sampled_from(SEPARATORS))
    sign = draw(st.sampled_from(("", "-", "\u2212", "- ", "+")))
    money = draw(st.sampled_from(("", "", "\\$", "€")))
    digits = f"{whole:,}".replace(",", separator)
    value = Fraction(int(str(whole) + part), 10 ** len(part))
    return sign + money + digits + ("." + part if part else ""), -value if sign.strip() in (
        "-",
        "\u2212",
    ) else value


def value_of(read) -> Fraction | None:
    return None if read is None else Fraction(read)


@settings(max_examples=80, deadline=None)
@given(numbers(), st.sampled_from(INNER), st.sampled_from(WRAPPERS[:-1]), st.sampled_from(UNITS))
def test_numbers_of_every_notation_have_their_value(number, inner, outer, unit):
    text, value = number
    for written in (outer % (inner % text), text + unit, "{" + text + "}" + unit, outer % (text + unit)):
        assert value_of(whole_number(written)) == value, written
        assert value_of(boxed_number(f"\\boxed{{1}} then \\boxed{{{written}}}")) == value, written
    for written in (text, f"**{text}**", f"${text}$", f"{text} eggs, because 3*4 is 12", f"{text}. Then 7"):
        assert value_of(hash_number(f"#### 5\nno\n#### {written}\nand 6")) == value, written
    assert value_of(hash_number(f"#### {text}{unit}. Then 7")) == value, text + unit
    assert value_of(last_number(f"from 7 to 9, so it is {text} eggs")) == (
        value if not text.startswith("- ") else abs(value)
    )


@settings(max_examples=80, deadline=None)
@given(numbers(), st.sampled_from(SPOILERS), st.sampled_from(("%s", "{%s}", "$%s$", "\\text{%s}")))
def test_numbers_with_mathematics_behind_them_are_none(number, spoiler, wrapper):
    text, _ = number
    assert whole_number(wrapper % (text + spoiler)) is None
    assert boxed_number(f"\\boxed{{{text}{spoiler}}}") is None
    assert read_number(text + spoiler) is None
    assert hash_number(f"#### {text}{spoiler}") is None
    assert hash_number(f"#### ${text}{spoiler}$") is None


PIECES = (
    "1", "2", "20", "0", "000", "080", ",", "\\!", "\\,", "{,}", "{", "}", "{}", "^", "_", "\\frac", "\\sqrt", "\\pi", "k", "km", " ",
    "-", "+", "/", "%",
    "\\%", "\\text{", "\\mathbf{", ".", "$", "\\$", "\\boxed{", "eggs", "=", "!", "(", ")", "\\quad ", "~", "\\;", "x", "e", "½", "'",
    ":", "\u2009",
)  # fmt: skip
# units over units, with powers, or before a full stop
UNITS_UNKNOWN_TO_THE_ORACLE = re.compile(r"(km|eggs)(\\quad|\W)*[/^.]")


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=7).map("".join))
def test_what_is_read_is_what_the_slow_reading_sees(text):
    read, seen = (
        whole_number(text),
        oracle.digits_if_a_number(text.replace("\\boxed{", "\\text{").replace("~", "\\,")),
    )
    if seen is None:
        assert read is None or UNITS_UNKNOWN_TO_THE_ORACLE.search(text), (text, read)
    elif read is not None:
        assert Fraction(read) == oracle.value(seen), text
    content = boxed_content(f"\\boxed{{{text}}}")
    assert content is None or boxed_number(f"\\boxed{{{content}}}") == whole_number(content)


@settings(max_examples=80, deadline=None)
@given(numbers(), st.sampled_from(["\\boxed{%s}", "#### %s", "it is %s"]), st.integers(0, 10**6))
def test_completions_cut_off_or_with_another_number_never_score(number, form, other):
    text, value = number
    name = {"\\": "boxed", "#": "gsm8k", "i": "last_number"}[form[0]]
    gold = f"{other}"
    assert score(name, form % text, gold) == float(
        value == other or (name == "last_number" and text.startswith("- ") and -value == other)
    )
    if name == "boxed":
        assert score(name, (form % text)[:-1], gold) == 0.0
