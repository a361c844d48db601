"""A tool that runs Python code, for `ToolEnvironment`."""

from __future__ import annotations

import ast


def python(code: str) -> str:
    """Runs Python code; returns the text it prints, and its last line's value if that is an expression."""
    parsed = ast.parse(code)
    names: dict[str, object] = {"__name__": "__main__"}
    last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
    exec(compile(parsed, "<code>", "exec"), names)
    if last is None:
        return ""
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
    return "" if value is None else repr(value)
