"""Implementations as parameters of a test: one body for all, and a reason where one cannot run here."""

from __future__ import annotations

from typing import Any

import pytest

from pallas_kernels.implementations import cannot_run


def runnable(*names: str) -> list[Any]:
    """`pytest.mark.parametrize` values of these implementations; those that this machine lacks are skipped with the reason."""
    params = []
    for name in names:
        problem = cannot_run(name)
        marks = [pytest.mark.skipif(problem is not None, reason=f"{name}: {problem}")]
        if name in ("mosaic_gpu", "triton"):
            marks.append(pytest.mark.gpu)
        params.append(pytest.param(name, marks=marks))
    return params
