"""Implementations as parameters of a test: one body for all, and a reason where one cannot run here."""

from __future__ import annotations

from typing import Any

import pytest

from pallas_kernels.implementations import gpu_problem, interpreter_problem


def runnable(*names: str) -> list[Any]:
    """`pytest.mark.parametrize` values of these implementations; those that this machine lacks are skipped with the reason."""
    problems = {"mosaic_gpu": gpu_problem, "mosaic_interpret": interpreter_problem}
    params = []
    for name in names:
        problem = problems[name]() if name in problems else None
        marks = [pytest.mark.skipif(problem is not None, reason=f"{name}: {problem}")]
        if name == "mosaic_gpu":
            marks.append(pytest.mark.gpu)
        params.append(pytest.param(name, marks=marks))
    return params
