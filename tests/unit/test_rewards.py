"""Rewards in the trainer's process: weights, masks, counts, and the contract of a user's function."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from jetrl_jax.config.task import RewardSection
from jetrl_jax.errors import UserError
from jetrl_jax.rewards.functions import FAILURES, RewardFunctions, RewardResult
from jetrl_jax.tasks.base import Example
from jetrl_jax.tasks.registry import as_task, build_task
from tests.sections import task_section

TASK = as_task(
    [{"prompt": str(i), "answer": str(i), "solution": f"s{i}", "level": i} for i in range(9)], task_section()
)
NONE_FAILED = dict.fromkeys(FAILURES, 0)


def run(rewards: RewardFunctions, completions: list[str], answers: list | None = None) -> RewardResult:
    examples = [Example(f"p{i}", a, f"s{i}", i, {"level": i}) for i, a in enumerate(answers or completions)]
    return rewards(
        [e.prompt for e in examples],
        completions,
        examples,
        ["stop"] * len(completions),
        [np.arange(i + 1, dtype=np.int32) for i in range(len(completions))],
    )


def score(function, completions=("a", "b", "c"), **kwargs) -> RewardResult:
    with RewardFunctions.from_functions([function], TASK, **kwargs) as rewards:
        return run(rewards, list(completions))


def test_rewards_are_summed_by_weight_and_kept_apart():
    def length(completions, **kwargs):
        return [len(c) for c in completions]

    def first(answers, **kwargs):
        return [a == "a" for a in answers]

    rewards = RewardFunctions.from_functions([length, first, "exact_match"], TASK, weights=[0.5, -2.0, 10])
    result = run(rewards, ["a", "bbb", "xx"], ["a", "b", "xx"])
    assert rewards.names == ("length", "first", "exact_match") == tuple(result.parts)
    np.testing.assert_array_equal(result.parts["length"], [1, 3, 2])
    np.testing.assert_array_equal(result.parts["first"], [1, 0, 0])
    np.testing.assert_array_equal(result.parts["exact_match"], [1, 0, 1])
    np.testing.assert_array_equal(result.total, [0.5 - 2 + 10, 1.5, 11.0])
    assert result.total.dtype == np.float64 and not result.messages
    assert result.failures == dict.fromkeys(rewards.names, NONE_FAILED)


def test_reward_function_gets_the_columns_it_names():
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [0.0] * 2

    def two(completion_ids, metadata=None):
        seen["two"] = (completion_ids, metadata)
        return [0.0] * 2

    run(RewardFunctions.from_functions([everything, two], TASK), ["x", "y"], ["1", "2"])
    assert seen == {
        "prompts": ["p0", "p1"], "completions": ["x", "y"], "answers": ["1", "2"], "solutions": ["s0",
        "s1"], "completion_ids": [[0], [0, 1]],
        "finish_reasons": ["stop", "stop"], "metadata": [{"level": 0}, {"level": 1}], "two": ([[0], [0, 1]], [{"level": 0}, {"level": 1}]),
    }  # fmt: skip


NANS = [float("nan"), np.float32("nan"), np.array(np.nan), Decimal("NaN"), Decimal("sNaN")]
INFINITE = [
    math.inf,
    -math.inf,
    np.float16("inf"),
    np.array([-np.inf]),
    10**400,
    -(10**400),
    Fraction(10**400),
    Decimal("Infinity"),
    1e39,
    -3.5e38,
]


def test_reward_none_and_nan_mask_their_sample():
    def mixed(completions, **kwargs):
        return [1.0, None, *NANS, 3.4e38, 0]

    result = score(mixed, "abcdefghi")
    np.testing.assert_array_equal(result.total, [1, *[np.nan] * 6, 3.4e38, 0])
    np.testing.assert_array_equal(result.masked, [False, *[True] * 6, False, False])
    assert result.failures["mixed"] == {**NONE_FAILED, "none": 1, "nan": 5}


@pytest.mark.parametrize("value", INFINITE, ids=lambda value: f"{type(value).__name__} {str(value)[:8]}")
@pytest.mark.parametrize("alone", [False, True])
def test_reward_raises_naming_function_and_sample_on_what_is_not_finite(value, alone):
    """As a function over the batch, and as a verifier that is called once for each sample."""

    def judge(completions, **kwargs):
        return [value if completion == "b" else 1.0 for completion in completions]

    class Mine:
        name, train, eval = "mine", (Example("a", "1"),), (Example("b", "1"),)

        def verify(self, completion, example):
            return value if completion == "b" else 1.0

    rewards = RewardFunctions.from_functions(["task" if alone else judge], as_task(Mine(), task_section()))
    where = (
        r" for completion 1 \('b' after the prompt 'p1'\), expected a number that is finite in "
        r"FP32, or None or NaN to leave"
    )
    with pytest.raises(UserError, match=rf"^reward {'task' if alone else 'judge'}: returned .*{where}"):
        run(rewards, ["a", "b", "c"])


def test_weighted_sum_that_is_not_finite_names_its_terms():
    def large(completions, **kwargs):
        return [1e38 if completion == "b" else None for completion in completions]

    rewards = RewardFunctions.from_functions([large, "exact_match"], TASK, weights=[10, 1])
    with pytest.raises(
        UserError,
        match=r"got 10 \* 1e\+38 \(large\) \+ 1 \* 0 \(exact_match\) for completion 1 \('b' after the "
        r"prompt 'p1'\)",
    ):
        run(rewards, ["a", "b"], ["x", "y"])
    rewards = RewardFunctions.from_functions([large, "exact_match"], TASK, weights=[1.7e308, 1])
    with pytest.raises(UserError, match="not finite in FP32"):
        run(rewards, ["a", "b"], ["x", "y"])


def test_reward_failure_of_one_function_masks_the_sum_but_not_the_other_part():
    def fails_on_b(completions, **kwargs):
        return [None if c == "b" else 1.0 for c in completions]

    def counts(completions, **kwargs):
        return [2.0 for _ in completions]

    def logged_only(completions, **kwargs):
        return [None for _ in completions]

    result = run(
        RewardFunctions.from_functions([fails_on_b, counts, logged_only], TASK, weights=[1, 1, 0]), ["a", "b"]
    )
    np.testing.assert_array_equal(result.total, [3, np.nan])
    np.testing.assert_array_equal(result.parts["counts"], [2, 2])
    assert result.failures["logged_only"]["none"] == 2


def test_reward_exception_costs_its_sample_alone():
    calls = []

    def fails_on_b(completions, **kwargs):
        calls.append(list(completions))
        if "b" in completions:
            raise KeyError("b")
        return [1.0] * len(completions)

    result = score(fails_on_b)
    np.testing.assert_array_equal(result.total, [1, np.nan, 1])
    assert result.failures["fails_on_b"] == {**NONE_FAILED, "exception": 1}
    assert calls == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert len(result.messages) == 1 and result.messages[0].startswith(
        "reward fails_on_b: KeyError: 'b' (test_rewards.py:"
    )


def test_reward_timeout_error_counts_as_timeout_and_one_sample_is_not_tried_twice():
    calls = []

    def late(completions, **kwargs):
        calls.append(1)
        raise TimeoutError("late")

    result = score(late, ["a"])
    assert (
        result.failures["late"] == {**NONE_FAILED, "timeout": 1} and len(calls) == 1 and result.masked.all()
    )


def test_reward_exception_without_a_text_is_described():
    class Nasty(Exception):
        def __str__(self):
            raise ValueError

    def nasty(completions, **kwargs):
        raise Nasty

    assert "Nasty: (no text)" in score(nasty).messages[0]


def test_reward_interrupt_is_not_swallowed():
    def interrupted(completions, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted)


@pytest.mark.parametrize(
    "values",
    [[1, 0.5, True], (1, 0.5, 1), np.array([1, 0.5, 1]), np.float32([1, 0.5, 1]), (x for x in [1, 0.5, 1]),
     [Fraction(1), Decimal("0.5"), np.bool_(True)], [np.array(1.0), np.array([0.5]), np.int8(1)]],
    ids=["list", "tuple", "float64", "float32", "generator", "exotic scalars", "arrays of one"],
)  # fmt: skip
def test_reward_accepts_numbers_of_every_kind(values):
    np.testing.assert_array_equal(score(lambda completions: values).total, [1, 0.5, 1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ["1", 1, 1],
            "returned str '1' for completion 0 .'a' after the prompt 'p0'., expected a number that is "
            "finite in FP32, or None or NaN",
        ),
        ([1, [1], 1], "returned list .1. for completion 1 .'b' after"),
        ([1, 1, 1j], "returned complex 1j for completion 2 "),
        ([1, 1, np.ones(2)], "returned ndarray of more than one value for completion 2 "),
        ([1, 1, float], "returned type"),
        ([1, 1], "returned 2 rewards for 3 completions"),
        ([1, 1, 1, 1, 1], "returned more than 3 rewards for 3 completions"),
        ([], "returned 0 rewards"),
        (None, "returned NoneType None, expected a list of 3 numbers"),
        (1.0, "returned float 1.0"),
        ("abc", "returned str 'abc'"),
        (b"abc", "returned bytes"),
        ({"a": 1, "b": 2, "c": 3}, "returned dict"),
        ({1, 2, 3}, "returned set"),
    ],
)
def test_reward_raises_naming_the_function_on_what_is_no_number(values, message):
    def judge(completions, **kwargs):
        return values

    with pytest.raises(UserError, match=rf"^reward judge: {message}"):
        score(judge)


def test_reward_raises_on_arguments_it_cannot_get():
    def needs(completions, gold):
        return [0.0]

    def positional(completions, /):
        return [0.0]

    with pytest.raises(UserError, match="reward needs: needs an argument 'gold'"):
        score(needs)
    with pytest.raises(UserError, match="reward positional: takes 'completions' by position only"):
        score(positional)


def test_reward_functions_raise_on_bad_lists():
    def same(completions):
        return [0.0] * len(completions)

    for functions, kwargs, message in [
        ([], {}, "empty list"),
        ([same, same], {}, "got same more than once"),
        ([same], {"weights": [1, 2]}, "bad weights"),
        ([same], {"weights": [math.nan]}, "bad weights"),
        (["judge"], {}, "unknown reward: got 'judge'"),
        ([":f"], {}, "expected module:function"),
        ([5], {}, "not a function: got int"),
        ([lambda completions: []], {"separate_process": True}, "cannot be imported by a worker"),
    ]:
        with pytest.raises(UserError, match=message):
            RewardFunctions.from_functions(functions, TASK, **kwargs)
    with pytest.raises(ValueError, match=r"got .*'prompts': 1.*expected 2 each"):
        RewardFunctions.from_functions([same], TASK)(["p"], ["a", "b"], [], [], [])


def test_reward_of_the_task_and_of_nothing():
    rewards = RewardFunctions.from_config(
        (RewardSection(), RewardSection(name="exact_match", weight=0.5)),
        build_task(task_section(name="sum"), 0),
    )
    result = run(rewards, ["4", " 5 ", "6"], ["4", "5", "7"])
    np.testing.assert_array_equal(result.total, [1.5, 1.5, 0])
    empty = run(rewards, [])
    assert empty.total.shape == (0,) and empty.failures == {"task": NONE_FAILED, "exact_match": NONE_FAILED}


def test_reward_of_a_users_task():
    class Mine:
        name, train, eval = "mine", (Example("a", "1"),), (Example("b", "1"),)

        def verify(self, completion, example):
            return {"one": 1, "none": None, "error": 1 / 0 if completion == "error" else 0}[completion]

    result = run(
        RewardFunctions.from_config((RewardSection(),), as_task(Mine(), task_section())),
        ["one", "none", "error", "one"],
    )
    np.testing.assert_array_equal(result.total, [1, np.nan, np.nan, 1])
    assert result.failures["task"] == {**NONE_FAILED, "none": 1, "exception": 1}


def test_reward_answer_that_the_verifier_cannot_compare_is_the_users_error():
    with pytest.raises(UserError, match="exact_match: cannot compare with this answer: got list"):
        run(RewardFunctions.from_functions(["exact_match"], TASK), ["a"], [["a"]])
