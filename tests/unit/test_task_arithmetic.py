"""The built-in problems: answers against sympy, splits disjoint, every index reproducible alone."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

import pytest

from jetrl_jax.config.task import ArithmeticSection
from jetrl_jax.errors import UserError
from jetrl_jax.tasks.arithmetic import FAMILIES, is_held_out
from jetrl_jax.tasks.base import Task
from jetrl_jax.tasks.registry import build_task
from tests.sections import task_section


def task(
    name: str | None = None, seed: int = 0, eval_fraction: float = 0.1, template: str = "{prompt}", **options
) -> Task:
    return build_task(
        task_section(name=name, eval_fraction=eval_fraction, prompt_template=template, options=options), seed
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("sum", {"operands": 3, "digits": 4}), ("sum", {}), ("chain", {}), ("chain", {"digits": 3})],
)
def test_arithmetic_answers_match_sympy(name, options):
    sympy = pytest.importorskip("sympy", reason="sympy (extra tasks) is the oracle of the answers")
    built = task(name, **options)
    signs = set()
    for example in [*built.train[:150], *built.eval[:150]]:
        left, equals, right = example.prompt.partition("=")
        assert equals and not right
        assert sympy.Integer(example.answer) == sympy.sympify(left)
        assert len(re.findall(r"\d+", left)) == options.get("operands", {"sum": 2, "chain": 4}[name])
        assert max(len(n) for n in re.findall(r"\d+", left)) <= options.get(
            "digits", {"sum": 2, "chain": 1}[name]
        )
        signs |= set(re.findall(r"[+-]", left))
    assert signs == ({"+"} if name == "sum" else {"+", "-"})


def test_arithmetic_repeat_matches_a_loop():
    sizes = set()
    for example in task("repeat").train[:300]:
        word, times = re.fullmatch(r"([a-z]+)\*(\d)=", example.prompt).groups()
        answer = ""
        for _ in range(int(times)):
            answer += word
        assert example.answer == answer
        sizes.add((len(word), int(times)))
    assert sizes == {(letters, times) for letters in (3, 4, 5) for times in (2, 3, 4)}


def test_arithmetic_reverse_and_sort_match_loops():
    lengths = set()
    for example in task("reverse").train[:300]:
        word = example.prompt[:-1]
        lengths.add(len(word))
        for i, letter in enumerate(word):
            assert example.answer[len(word) - 1 - i] == letter
        assert len(example.answer) == len(word)
    assert lengths == {4, 5, 6, 7, 8}
    for example in task("sort", length=7).train[:300]:
        digits = example.prompt[:-1]
        assert len(digits) == len(example.answer) == 7
        assert all(a <= b for a, b in zip(example.answer, example.answer[1:], strict=False))
        assert all(digits.count(d) == example.answer.count(d) for d in "0123456789")


@pytest.mark.parametrize("name", FAMILIES)
def test_arithmetic_splits_are_disjoint_for_every_seed(name):
    held_out = task(name, eval_size=300).eval
    prompts = {e.prompt for e in held_out}
    assert len(prompts) == 300
    for seed in (0, 1, 2):
        other = task(name, seed, eval_size=300, train_size=3000)
        assert [e.prompt for e in other.eval] == [e.prompt for e in held_out]
        assert not prompts & {e.prompt for e in other.train}
        assert all(is_held_out(e.metadata["problem"], 0.1) for e in other.eval)


def test_arithmetic_share_of_held_out_prompts_is_the_fraction():
    prompts = [f"{a}+{b}=" for a in range(100) for b in range(100)]
    for fraction in (0.05, 0.1, 0.5):
        share = sum(is_held_out(p, fraction) for p in prompts) / len(prompts)
        assert abs(share - fraction) < 4 * (fraction * (1 - fraction) / len(prompts)) ** 0.5


def test_arithmetic_example_depends_on_index_and_seed_alone():
    first, second = task("chain", 3), task("chain", 3)
    backward = [second.train[i] for i in range(50, -1, -1)][::-1]
    assert [first.train[i] for i in range(51)] == backward
    assert first.train[-1] == first.train[len(first.train) - 1]
    assert [e.prompt for e in first.train[:20]] != [e.prompt for e in task("chain", 4).train[:20]]
    assert len({e.prompt for e in task("reverse").train[:2000]}) > 1990
    with pytest.raises(IndexError):
        first.train[len(first.train)]


def test_arithmetic_is_the_same_in_another_process():
    program = (
        "from jetrl_jax.config.task import ArithmeticSection; from jetrl_jax.tasks.registry import "
        "build_task; import sys;"
        "t = build_task(ArithmeticSection(name='reverse'), 7); print([e.prompt for e in t.train[:5]]); "
        "assert 'jax' not in sys.modules"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert ran.stdout.strip() == str([e.prompt for e in task("reverse", 7).train[:5]])


def test_arithmetic_pinned_items():
    """The data of a seed is part of a published result: these must never change."""
    assert [e.prompt for e in task("sum").train[:4]] == ["4+95=", "29+99=", "96+10=", "64+63="]
    assert [e.prompt for e in task("reverse").eval[:2]] == ["fxeycejw=", "fwjfc="]


def test_arithmetic_verify_accepts_the_solution_and_nothing_near():
    for name in FAMILIES:
        built = task(name)
        for example in built.train[:50]:
            assert built.verify(example.solution, example) == 1.0
            assert built.verify(f" {example.answer}\n", example) == 1.0
            for wrong in (
                "",
                example.answer + "0",
                example.answer[:-1],
                example.prompt,
                example.answer + " " + example.answer,
            ):
                assert built.verify(wrong, example) == 0.0
        assert pickle.loads(pickle.dumps(built.verifier())) is built.verifier()


def test_arithmetic_template_and_alphabet():
    built = task("sum", template="solve {prompt}? {x}")
    assert re.fullmatch(r"solve \d+\+\d+=\? \{x\}", built.train[0].prompt)
    for name in FAMILIES:
        built = task(name, template="q {prompt}")
        used = set("".join(e.prompt + e.solution for e in built.train[:500]))
        assert used == set(built.characters)
    assert build_task(ArithmeticSection(), 0).name == "sum"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "sum", "digit": 3}, "got task.options.digit, .*Did you mean 'digits'"),
        ({"name": "sum", "digits": "3"}, "got task.options.digits='3', expected a whole number from 1 to 18"),
        ({"name": "sum", "digits": True}, "task.options.digits=True"),
        ({"name": "sum", "digits": 0}, "task.options.digits=0"),
        ({"name": "sum", "train_size": 0}, "task.options.train_size=0"),
        ({"name": "reverse", "min_letters": 9}, "min_letters=9 above max_letters=8"),
        ({"name": "repeat", "min_letters": 6}, "min_letters=6 above max_letters=5"),
        (
            {"name": "sum", "digits": 1, "eval_size": 50},
            "too few held-out problems: got task.options.eval_size=50, found",
        ),
    ],
)
def test_arithmetic_raises_on_bad_options(arguments, message):
    with pytest.raises(UserError, match=message):
        task(**arguments)


def test_arithmetic_raises_where_nothing_is_left_to_train_on():
    with pytest.raises(UserError, match="no training problem found"):
        task("reverse", eval_fraction=0.9999999, min_letters=1, max_letters=1, eval_size=20)
