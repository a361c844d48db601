"""Typed Python functions as tools, and environments in which the policy calls them.

A call is JSON between marks, as Qwen and Hermes models write it; a turn may have several:

    <tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>

The schema that the policy reads comes from the function's hints and docstring (`schema`).  A turn without a
call is the answer.

    what the policy does wrong                     what it observes
    no JSON, another form, an unknown tool         error: what was expected
    a missing, unknown or badly typed argument     error: what was expected
    the tool raises, or exceeds its limits         error: how it failed

A tool runs in a child of the worker with limits of time, memory and output (`jetrl_jax.workers.limits`), so
it has no memory between calls.
"""

from __future__ import annotations

import abc
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jetrl_jax.workers.limits import Limits, call_with_limits

_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean"}
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
INSTRUCTIONS = """You may call these tools:
<tools>
{tools}
</tools>
A call is <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>. A reply without a call is your answer.

{problem}"""


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function's call, in the form of OpenAI's tools.

    Raises:
      TypeError: a parameter has no hint, or another than str, int, float, bool, Literal, list and unions with
        None.
    """
    hints = get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"tool {function.__name__}: parameter {name} has no type, expected a hint of its own."
            )
        properties[name] = _kind(function.__name__, name, hints[name])
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    described = {"name": function.__name__, "description": inspect.getdoc(function) or ""}
    return {"type": "function", "function": described | {"parameters": parameters}}


def _kind(tool: str, name: str, hint: Any) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _KINDS:
        return {"type": _KINDS[hint]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is list and len(inner) == 1:
        return {"type": "array", "items": _kind(tool, name, inner[0])}
    if origin in (typing.Union, types.UnionType) and type(None) in inner and len(inner) == 2:
        one = next(part for part in inner if part is not type(None))
        return {"anyOf": [_kind(tool, name, one), {"type": "null"}]}
    raise TypeError(
        f"tool {tool}: parameter {name} has the type {hint}, expected str, int, float, bool, Literal, a list "
        "of one of them, or one of them or None."
    )


def mismatch(value: Any, kind: dict[str, Any]) -> str | None:
    """The expected kind in words if a JSON value is of another; None if it fits."""
    if "anyOf" in kind:
        return None if any(mismatch(value, one) is None for one in kind["anyOf"]) else "null or another type"
    if "enum" in kind:
        return None if value in kind["enum"] else f"one of {', '.join(map(repr, kind['enum']))}"
    if kind["type"] == "array":
        fits = isinstance(value, list) and all(mismatch(one, kind["items"]) is None for one in value)
    else:
        expected = {"null": type(None), **{word: known for known, word in _KINDS.items()}}[kind["type"]]
        fits = type(value) is expected or (expected is float and type(value) is int)
    return None if fits else str(kind["type"])


class ToolEnvironment(abc.ABC):
    """An environment whose policy calls `tools`, then answers.

    A subclass names its `tools` and defines `problem` and `score`:

        class Products(ToolEnvironment):
            tools = (multiply,)

            def problem(self, seed):
                a, b = random.Random(seed).choices(range(1000), k=2)
                return f"What is {a} times {b}?", a * b

    limits: of one call of a tool; instructions: the first observation, with {tools} and {problem}.
    """

    tools: Sequence[Callable[..., Any]] = ()
    limits = Limits()
    instructions = INSTRUCTIONS

    def __init__(self) -> None:
        self._schemas = {function.__name__: schema(function) for function in self.tools}
        self._functions = {function.__name__: function for function in self.tools}
        self._answer: Any = None

    @abc.abstractmethod
    def problem(self, seed: int | None) -> tuple[str, Any]:
        """(the text of a problem, its answer), a function of the seed."""

    def score(self, text: str, answer: Any) -> float:
        """The reward of the policy's last turn: 1 if its last word is the answer, else 0."""
        words = text.split()
        return float(bool(words) and words[-1].strip(".,;:!*$") == str(answer))

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draws a problem."""
        problem, self._answer = self.problem(seed)
        tools = "\n".join(json.dumps(one) for one in self._schemas.values())
        return self.instructions.format(tools=tools, problem=problem), {}

    def step(self, text: str) -> tuple[str | list[dict[str, str]], float, bool, bool, dict[str, Any]]:
        """Makes the calls of a turn, or scores the answer."""
        calls = _CALL.findall(text)
        if not calls:
            return "", self.score(text, self._answer), True, False, {}
        results = [self._call(call) for call in calls]
        errors = sum(result.startswith("error: ") for result in results)
        messages = [{"role": "tool", "content": result} for result in results]
        return messages, 0.0, False, False, {"tool_calls": len(calls), "tool_errors": errors}

    def close(self) -> None:  # noqa: B027  # a subclass may have resources
        """Nothing to end."""

    def _call(self, text: str) -> str:
        try:
            call = json.loads(text)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return 'error: a call is JSON of the form {"name": ..., "arguments": {...}}'
        if not isinstance(name, str) or name not in self._functions:
            return f"error: there is no tool {name!r}; there are {', '.join(self._functions)}"
        if not isinstance(arguments, dict):
            return "error: arguments is an object of names and values"
        kinds = self._schemas[name]["function"]["parameters"]
        problems = [f"{key} is missing" for key in kinds["required"] if key not in arguments]
        for key, value in arguments.items():
            if key not in kinds["properties"]:
                problems.append(f"{key} is no argument of {name}")
            elif (expected := mismatch(value, kinds["properties"][key])) is not None:
                problems.append(f"{key} is {value!r}, expected {expected}")
        if problems:
            return f"error: {'; '.join(problems)}"
        outcome = call_with_limits(self._functions[name], arguments, self.limits)
        return f"error: {outcome.text}" if outcome.error else outcome.text
