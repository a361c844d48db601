"""Tools: schemas, calls and their errors, limits; environments whose policy calls them."""

from __future__ import annotations

import json
import os
import random
from typing import Literal

import pytest

from jetrl_jax.tasks.environments.python import python
from jetrl_jax.tasks.environments.retries import Retries
from jetrl_jax.tasks.environments.tools import ToolEnvironment, schema
from jetrl_jax.workers.environments import EnvironmentPool, Job
from jetrl_jax.workers.limits import Limits, call_with_limits


def multiply(a: int, b: int = 1) -> int:
    """The product of two numbers."""
    return a * b


def search(words: list[str], order: Literal["new", "old"] = "new", most: float | None = None) -> str:
    """Searches."""
    return f"{words} {order} {most}"


def fails() -> str:
    raise KeyError("lost")


class Products(ToolEnvironment):
    tools = (multiply, search, fails, python)
    limits = Limits(timeout_s=30, memory_mb=200, output_chars=100)

    def problem(self, seed: int | None) -> tuple[str, int]:
        a, b = random.Random(seed).choices(range(1000), k=2)
        return f"What is {a} times {b}?", a * b


def test_schema_is_that_of_openai_from_hints_and_docstring():
    assert schema(multiply) == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "The product of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }
    assert schema(search)["function"]["parameters"]["properties"] == {
        "words": {"type": "array", "items": {"type": "string"}},
        "order": {"enum": ["new", "old"]},
        "most": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    }

    def untyped(a): ...

    def odd(a: dict): ...

    for function in (untyped, odd):
        with pytest.raises(TypeError, match="parameter a has"):
            schema(function)


def called(*calls: object) -> list[str]:
    game = Products()
    game.reset(seed=1)
    text = "let me see " + "".join(
        f"<tool_call>{c if isinstance(c, str) else json.dumps(c)}</tool_call>" for c in calls
    )
    observation, reward, terminated, truncated, info = game.step(text)
    assert isinstance(observation, list) and {m["role"] for m in observation} == {"tool"}
    assert (reward, terminated, truncated, info["tool_calls"]) == (0.0, False, False, len(calls))
    results = [m["content"] for m in observation]
    assert info["tool_errors"] == sum(result.startswith("error: ") for result in results)
    return results


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments}


def test_calls_are_answered_in_order_and_the_policys_errors_are_observations():
    assert called(call("multiply", a=6, b=7), call("search", words=["x"], most=2)) == ["42", "['x'] new 2"]
    wrong = {
        "no json": "error: a call is JSON",
        '{"name": "multiply"}': "error: a call is JSON",
        "[" * 5000: "error: a call is JSON",
        json.dumps(
            call("divide")
        ): "error: there is no tool 'divide'; there are multiply, search, fails, python",
        json.dumps(call("multiply", b=2)): "error: a is missing",
        json.dumps(
            call("multiply", a="6", c=1)
        ): "error: a is '6', expected integer; c is no argument of multiply",
        json.dumps(call("multiply", a=True)): "error: a is True, expected integer",
        json.dumps(call("search", words=["a", 1])): "error: words is ['a', 1], expected array",
        json.dumps(
            call("search", words=[], order="odd")
        ): "error: order is 'odd', expected one of 'new', 'old'",
        json.dumps(call("fails")): "error: KeyError: 'lost'",
        '{"name": "multiply", "arguments": 3}': "error: arguments is an object",
    }
    results = called(*wrong)
    for result, expected in zip(results, wrong.values(), strict=True):
        assert result.startswith(expected), (result, expected)


class Quick(Products):
    limits = Limits(timeout_s=0.5, memory_mb=200, output_chars=100)


def test_the_python_tool_prints_and_has_limits():
    """In a worker, as in a run: what hangs is given half a second, all others half a minute."""
    pools = {
        name: EnvironmentPool(name, f"{__name__}:{name}", {}, workers=1, timeout_s=60)
        for name in ("Products", "Quick")
    }
    begun = {name: pool.play([Job(0, 1)])[0].digest for name, pool in pools.items()}

    def run(code: str, name: str = "Products") -> str:
        text = f"<tool_call>{json.dumps(call('python', code=code))}</tool_call>"
        (answer,) = pools[name].play([Job(0, 1, (text,), begun[name])])
        assert not answer.failed, answer
        return answer.observation[0]["content"]

    assert run("x = 6\nprint('a')\nx * 7") == "a\n42"
    assert run("1/0") == "error: ZeroDivisionError: division by zero"
    assert "SyntaxError" in run("1 +")
    assert run("print('x' * 10**6)") == "x" * 100
    assert run("b'x' * (1 << 30)") == "error: MemoryError"
    assert run("import os; os._exit(3)") == "error: its process ended: exit status 3"
    assert run("import os; os.kill(os.getpid(), 9)") == "error: its process ended: signal 9"
    assert run("import sys; sys.exit()") == "error: SystemExit"
    assert run("print(input())") == "error: EOFError: EOF when reading a line"
    for hangs in (
        "while True: print('flood')",
        "import time; time.sleep(60)",
        "9**9**9**9",
        "import subprocess; subprocess.run(['sleep', '60'])",
    ):
        assert run(hangs, "Quick") == "error: no answer within 0.5 s", hangs
    for pool in pools.values():
        pool.close()


def test_a_call_changes_nothing_of_its_caller():
    seen: list[int] = []

    def remember(value: int) -> str:
        seen.append(value)
        return str(seen)

    before = os.listdir("/proc/self/fd")
    assert call_with_limits(remember, {"value": 1}, Limits(timeout_s=30)).text == "[1]" and seen == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_tool_episode_ends_with_the_answer():
    game = Products()
    text, _ = game.reset(seed=5)
    assert text == Products().reset(seed=5)[0] and '"name": "multiply"' in text and "{{" not in text
    a, b = (int(word.strip("?")) for word in text.split() if word.strip("?").isdigit())
    assert game.step(f"It is {a * b}.")[1:3] == (1.0, True) and game.step("no idea")[1:3] == (0.0, True)
    game.close()


@pytest.mark.long
def test_reasoning_gym_items_can_be_retried():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym (extra tasks) is not installed")
    game = Retries("basic_arithmetic", min_terms=2, max_terms=2)
    question, _ = game.reset(seed=3)
    assert question == Retries("basic_arithmetic", min_terms=2, max_terms=2).reset(seed=3)[0]
    answer = game._dataset[0]["answer"]
    observation, first, terminated, *_ = game.step("xyz")
    assert "Try again" in observation and not terminated and first < 0.1
    assert game.step(f"<think>so</think> {answer}")[1:3] == (1.0 - first, True)
