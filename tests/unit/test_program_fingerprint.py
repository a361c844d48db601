"""The fingerprint's own logic: what it leaves out of a program's text, what it keeps, and how two are
compared.
"""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import pytest

from tests.benchmarks.fingerprint import HOMES, differences, main, normalized, prints


def text(function: object, debug_info: bool = False) -> str:
    """A function's lowered program."""
    return jax.jit(function).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).as_text(debug_info=debug_info)


def inner(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, jnp.tanh(x) + 0.5, x)


def one(x: jax.Array) -> jax.Array:
    return jax.jit(inner)(x)


def other(value: jax.Array) -> jax.Array:
    """As `one`: names differ, the program does not."""

    def within(y: jax.Array) -> jax.Array:
        return jnp.where(y > 0, jnp.tanh(y) + 0.5, y)

    return jax.jit(within)(value)


def test_names_and_locations_are_left_out() -> None:
    assert text(one) != text(other)
    assert normalized(text(one)) == normalized(text(other))
    assert "loc(" in text(one, debug_info=True) and "#loc" in text(one, debug_info=True)
    assert "loc" not in normalized(text(one, debug_info=True))
    assert normalized('{jax.result_info = "a.b", mhlo.sharding = "x"}') == normalized(
        '{jax.result_info = "c", mhlo.sharding = "x"}'
    )


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: jnp.where(x > 0, jnp.tanh(x) + 0.25, x),
        lambda x: jnp.where(x > 0, jnp.tanh(x.astype(jnp.bfloat16)).astype(x.dtype) + 0.5, x),
    ],
)
def test_another_constant_and_another_rounding_are_seen(changed: object) -> None:
    assert normalized(text(inner)) != normalized(text(changed))


def test_called_function_and_called_kernel_are_kept() -> None:
    assert normalized("call @a\ncall @b\ncall @a") == "call @s0\ncall @s1\ncall @s0"
    assert normalized("stablehlo.custom_call @Sharding") != normalized("stablehlo.custom_call @Other")


def test_each_difference_is_named() -> None:
    assert differences({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "d": "4"}) == [
        "b: differs",
        "c: gone",
        "d: new",
    ]
    assert not differences({"a": "1"}, {"a": "1"})


def test_its_command_says_so_with_its_status(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("tests.benchmarks.fingerprint.prints", lambda: {"program/x": "1"})
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")
    file = tmp_path / "before.json"
    monkeypatch.setattr("sys.argv", ["fingerprint.py", "--out", str(file)])
    assert main() == 0
    monkeypatch.setattr("sys.argv", ["fingerprint.py", "--against", str(file)])
    assert main() == 0
    monkeypatch.setattr("tests.benchmarks.fingerprint.prints", lambda: {"program/x": "2"})
    assert main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "program/x: differs"


def test_its_table_names_what_is_there() -> None:
    assert callable(prints)
    assert all(hasattr(importlib.import_module(module), name) for name, module in HOMES.items())
