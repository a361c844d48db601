"""The axes in a signature, `Float[Array, "M K"]`, are what a function is given and gives.

Imported by `conftest.py` before the packages: each of their public functions that names axes is held to them
in every test that calls it, when it returns, so that its own errors come first.  In a compiled program that
is once, while it is traced.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from beartype.door import is_bearable
from jaxtyping import AbstractArray, jaxtyped

PACKAGES = ("pallas_kernels", "jetrl_jax.rl", "jetrl_jax.rollout")


def names_axes(hint: Any) -> bool:
    """Whether an array with axes stands anywhere in a type."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(names_axes, typing.get_args(hint)))


def or_numpy(hint: Any) -> Any:
    """The type, with the arrays and numbers of numpy beside those of JAX, whose functions take them too."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        of_jax = hint.array_type is jax.Array
        return hint.dtype[jax.Array | np.ndarray | np.generic, hint.dim_str] if of_jax else hint
    parts = tuple(map(or_numpy, typing.get_args(hint)))
    if isinstance(hint, types.UnionType):
        return functools.reduce(operator.or_, parts)
    return typing.get_origin(hint)[parts] if isinstance(hint, types.GenericAlias) else hint


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with an AssertionError where an argument or the result has other axes than its signature."""
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        found = typing.get_type_hints(function)
        return {name: or_numpy(hint) for name, hint in found.items() if names_axes(hint)}

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        given = signature.bind(*arguments, **options).arguments | {"return": result}
        with jaxtyped("context"):
            for name, value in given.items():
                if name in hints() and not is_bearable(value, hints()[name]):
                    shapes = {other: shape_of(one) for other, one in given.items() if other in hints()}
                    raise AssertionError(
                        f"{function.__module__}.{function.__qualname__}: {name} is not {hints()[name]}: {shapes}"
                    )
        return result

    return call


def shape_of(value: Any) -> Any:
    """Shape and dtype for a message, the value itself where it has none."""
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else value


def check(module: types.ModuleType) -> None:
    """Replaces the public functions and methods of a module whose signatures name axes."""
    classes = [one for one in vars(module).values() if isinstance(one, type)]
    for holder in (module, *(one for one in classes if one.__module__ == module.__name__)):
        for name, member in list(vars(holder).items()):
            function = member.fget if isinstance(member, property) else member
            if name.startswith("_") or not isinstance(function, types.FunctionType):
                continue
            # unevaluated: axes are in quotes, and a name may be imported for type checkers only
            quoted = any('"' in hint or "'" in hint for hint in function.__annotations__.values())
            if quoted and function.__module__ == module.__name__:
                made = checked(function)
                setattr(holder, name, property(made) if isinstance(member, property) else made)


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        check(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(name == package or name.startswith(f"{package}.") for package in PACKAGES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder())
