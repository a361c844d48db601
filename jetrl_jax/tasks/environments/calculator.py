"""Arithmetic with a calculator, in a notation that a small vocabulary can write.

    the problem         37*4+85?
    a turn that asks    37*4+85=      the observation is the value, 233
    a turn that answers #233          the episode ends; reward 1 if it is right, else 0

The calculator reads numbers, + - * / // % ** and brackets, without names or calls (`calculate`).  Its errors
are observations.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable
from typing import Any

LONGEST_CHARS = 200  # of an expression
LARGEST = 10**30  # of any value on the way, so that a power ends at once

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculate(expression: str) -> int | float:
    """The value of an arithmetic expression.

    Raises:
      ValueError: it is too long, has something else than numbers and operators, has no value, or a value on
        the way is larger than 1e30.
    """
    if len(expression) > LONGEST_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, at most {LONGEST_CHARS} are read")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic expression") from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 100:
            raise ValueError("a power has an exponent above 100")
        return _bounded(_OPERATORS[type(node.op)](left, right))
    raise ValueError("an expression has numbers, + - * / // % ** and brackets only")


def _bounded(value: Any) -> int | float:
    if not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError("a value is larger than 1e30, or no real number")
    return value


class Calculator:
    """The environment: expressions of `operands` numbers below 10**`digits`."""

    def __init__(self, operands: int = 3, digits: int = 2) -> None:
        self._operands = operands
        self._digits = digits
        self._problem = ""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Draws an expression."""
        rng = random.Random(seed)
        numbers = [str(rng.randrange(10**self._digits)) for _ in range(self._operands)]
        self._problem = numbers[0] + "".join(rng.choice("+-*") + number for number in numbers[1:])
        return self._problem + "?", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Calculates, or judges the answer."""
        if text.startswith("#"):
            right = text.removeprefix("#").strip() == str(calculate(self._problem))
            return "", float(right), True, False, {}
        try:
            value, errors = str(calculate(text.strip().removesuffix("="))), 0
        except ValueError:
            value, errors = "!", 1
        return value, 0.0, False, False, {"tool_calls": 1, "tool_errors": errors}

    def close(self) -> None:
        """Nothing to end."""

    def demonstration(self) -> list[str]:
        """Asks for the whole expression, then answers."""
        return [self._problem + "=", f"#{calculate(self._problem)}"]
