"""Answers as text, thoughts, and the question whether a verifier can compare with an answer."""

from __future__ import annotations

import datetime
import threading
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.config.task import RewardSection
from jetrl_jax.errors import UserError
from jetrl_jax.rewards.functions import RewardFunctions
from jetrl_jax.tasks import verify
from jetrl_jax.tasks.base import Example
from jetrl_jax.tasks.records import ListTask
from jetrl_jax.tasks.registry import as_task
from jetrl_jax.text.answers import answer_part, answer_text, opens_thought, with_opening
from tests.sections import task_section


class Colour(IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a b", "a b"), (np.str_("x"), "x"), (42, "42"), (-7, "-7"), (42.0, "42"), (1.10, "1.1"), (1e-05, "0.00001"),
        (1e22, "1" + "0" * 22),
        (-0.0, "0"), (0.1, "0.1"), (np.float32(0.1), "0.1"), (np.float16(0.1), "0.1"), (np.float64(0.1), "0.1"), (np.float32(42), "42"),
        (np.int64(5), "5"), (np.uint8(200), "200"), (Decimal("42.00"), "42"), (Decimal("1E+2"), "100"), (Fraction(4, 2), "2"),
        (10**40, "1" + "0" * 40),
        (Decimal("0.1234567890123456789012345678901234"), "0.1234567890123456789012345678901234"), (Colour.RED, "3"),
        (5e-324, "0." + "0" * 323 + "5"),
    ],
)  # fmt: skip
def test_answer_text_writes_the_shortest_digits(value, text):
    written = answer_text(value)
    assert written == text and type(written) is str


@pytest.mark.parametrize(
    "value",
    [True, np.bool_(False), None, ["18"], {"a": 1}, b"18", datetime.date(2024, 1, 18), datetime.timedelta(1), float("nan"), float("inf"),
     -np.inf,
     np.float32("nan"), Decimal("sNaN"), Decimal("Infinity"), 1j, Fraction(1, 2), np.array([1]), np.datetime64("2024"), object(), "",
     " \n", "a\ud800",
     10**5000, Decimal("1e999999999")],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_answer_text_refuses_what_is_neither_text_nor_number(value):
    with pytest.raises(UserError, match=r"^got .*, expected "):
        answer_text(value)
    for name in verify.VERIFIERS:
        assert verify.answer_problem(name, value) is not None


@settings(max_examples=80, deadline=None)
@given(
    st.one_of(
        st.floats(allow_nan=False, allow_infinity=False),
        st.integers(-(10**60), 10**60),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_numbers_come_back_from_their_text(value):
    text = answer_text(value)
    assert set(text) <= set("-0123456789.") and type(value)(text) == value
    assert not text.endswith((".0", ".")) and verify.answer_problem("boxed", value) is None
    assert verify.boxed(f"\\boxed{{{text}}}", Example("q", value)) == 1.0
    if abs(value) < 3e38:
        narrow = np.float32(value)
        shown = answer_text(narrow)
        assert np.float32(shown) == narrow and len(shown.replace(".", "").strip("-0")) <= 9


# ------------------------------------------------------------------------------------------------------
# thoughts


@pytest.mark.parametrize("name", ["exact_match", "gsm8k", "last_number", "boxed", "math_verify"])
@pytest.mark.parametrize(
    ("before", "behind", "opened", "expected"),
    [
        ("<think>5 or 6</think>\n", "", False, 1), ("5 or 6\n</think>\n\n", "", True, 1), ("", "", False, 1), ("", "", True, 0),
        ("<think>5 or 6\n", "", False, 0), ("5 or 6 ", "", True, 0), ("", "</think>", True, 0), ("", "</think>\n7", True, 0),
        ("", "<think>", True, 0),
        ("a</think>b</think>", "", True, 1), ("a</think><think>", "", True, 0),
    ],
)  # fmt: skip
def test_every_verifier_reads_behind_the_thought_only(name, before, behind, opened, expected):
    if name == "math_verify":
        pytest.importorskip("math_verify", reason="math-verify (extra tasks) is not installed")
    answer = {"gsm8k": "#### 18", "boxed": "\\boxed{18}", "math_verify": "\\boxed{18}"}.get(name, "18")
    completion = with_opening(before + answer + behind, opened)
    assert verify.VERIFIERS[name](completion, Example("q", "18")) == expected


def test_answer_part_is_what_stands_behind_the_last_thought():
    assert [answer_part(t) for t in ("a", "<think>a</think>b", "a</think>b", "<think>a", "", "</think>", "a</think><think>b")] == [
        "a", "b", "b", None, "", "", None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rendered", "prompt", "opened"),
    [
        ("user\nq\nassistant\n<think>\n", "q", True), ("user\nq\nassistant\n<think>", "q", True), ("user\nq\nassistant\n", "q", False),
        ("user\nq\nassistant\n<think>\n\n</think>\n\n", "q", False), ("Think in <think>.\nq\nassistant\n", "q", False),
        ("q\nassistant\n<think>\nOkay, ", "q", True), ("say <think> twice", "say <think> twice", False), ("q " "<think>", "q " "<think>", True),
        ("user\nwhat is <think>?\nassistant\n<think>\n", "what is <think>?", True), ("", "", False),
    ],
)  # fmt: skip
def test_opens_thought_reads_how_the_prompt_ends(rendered, prompt, opened):
    assert opens_thought(rendered, prompt) is opened


def test_rewards_tell_verifiers_and_functions_that_ask_how_the_prompt_ended():
    seen = {}

    def asks(completions, thought_opened):
        seen["asks"] = (completions, thought_opened)
        return [0.0] * len(completions)

    def takes_all(**kwargs):
        seen["takes_all"] = kwargs
        return [0.0] * len(kwargs["completions"])

    examples = [Example("p", "18")] * 3
    task = ListTask("t", examples, examples, "boxed")
    texts = ["\\boxed{18}", "so</think>\\boxed{18}", "\\boxed{18}"]
    with RewardFunctions.from_functions(["task", asks, takes_all], task) as rewards:
        result = rewards(["p"] * 3, texts, examples, ["stop"] * 3, [[1]] * 3, [True, True, False])
        np.testing.assert_array_equal(result.parts["task"], [0, 1, 1])
        assert seen["asks"] == (texts, [True, True, False])
        assert seen["takes_all"]["completions"] == texts and "thought_opened" not in seen["takes_all"]
        np.testing.assert_array_equal(
            rewards(["p"] * 3, texts, examples, ["stop"] * 3, [[1]] * 3).parts["task"], [1, 1, 1]
        )
        with pytest.raises(ValueError, match="'thought_opened': 1"):
            rewards(["p"] * 3, texts, examples, ["stop"] * 3, [[1]] * 3, [True])


# ------------------------------------------------------------------------------------------------ asked at
# load


def test_rewards_ask_their_verifier_about_every_answer_of_the_task():
    rows = [{"prompt": f"q{i}", "answer": "1/2" if i == 7 else str(i)} for i in range(41)]
    task = as_task(rows, task_section(eval_fraction=0.1))
    with pytest.raises(
        UserError,
        match=r"reward boxed: 1 broken record:\n  dataset:train\[7\]: boxed cannot compare .*got '1/2', "
        r"expected a number",
    ):
        RewardFunctions.from_config((RewardSection(name="boxed"),), task)
    RewardFunctions.from_config((RewardSection(name="exact_match"), RewardSection(name="task")), task)
    bad = ListTask("mine", [Example("a", "x")], [Example("b", True)], "gsm8k")
    with pytest.raises(
        UserError,
        match=r"2 broken records:\n  mine:train\[0\]: gsm8k .*got 'x'.*\n  mine:eval\[0\]: gsm8k .*got "
        r"bool True",
    ):
        RewardFunctions.from_config((RewardSection(),), bad)


# ----------------------------------------------------------------------------------------------------
# math_verify


def in_thread(function) -> object:
    """What a function returns or raises in a thread of its own."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


def test_math_verify_works_from_any_thread():
    pytest.importorskip("math_verify", reason="math-verify (extra tasks) is not installed")
    verifier = verify.MathVerify()
    cases = [
        ("\\boxed{\\frac{2}{4}}", "1/2", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("<think>\\boxed{4}", "4", 0.0),
        ("4", "", None),
    ]
    try:
        for completion, answer, expected in cases:
            assert (
                in_thread(lambda c=completion, a=answer: verifier(c, Example("q", a)))
                == expected
                == verifier(completion, Example("q", answer))
            )
        assert isinstance(in_thread(lambda: verifier("4", Example("q", True))), UserError)
    finally:
        verifier.close()


@pytest.mark.long
def test_math_verify_in_a_thread_ends_with_its_limit():
    pytest.importorskip("math_verify", reason="math-verify (extra tasks) is not installed")
    late = verify.MathVerify(thread_limit_s=1e-6)
    try:
        assert isinstance(in_thread(lambda: late("4", Example("q", "4"))), TimeoutError)
    finally:
        late.close()


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("\\boxed{5\\,000}", "5000", 1), ("\\boxed{0}", "5\\,000", 0), ("\\boxed{5000}", "5\\,000", 1), ("\\boxed{2}", "2**10", 0),
        ("\\boxed{1024}", "2**10", 1), ("\\boxed{2516_8}", "2516", 0),
    ],
)  # fmt: skip
def test_math_verify_is_not_given_what_it_misreads(completion, answer, expected):
    pytest.importorskip("math_verify", reason="math-verify (extra tasks) is not installed")
    assert verify.math_verify(completion, Example("q", answer)) == expected
    assert "base ten" in str(verify.answer_problem("math_verify", "2516_8"))
