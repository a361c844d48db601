"""Implementations as parameters of a test: one body for all, and a reason where one cannot run here."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from pallas_kernels.implementations import cannot_run
from tests.kernels import vllm_interpreter


def runnable(*names: str) -> list[Any]:
    """`pytest.mark.parametrize` values of these implementations; those that this machine lacks are skipped
    with the reason.

    On a CPU "triton" is for tests that interpret it: `vllm_interpreter.matmul` in place of
    `vllm_triton.matmul`.
    """
    params = []
    for name in names:
        problem = cannot_run(name)
        if name == "triton" and jax.default_backend() == "cpu":
            problem = vllm_interpreter.missing()
        marks = [pytest.mark.skipif(problem is not None, reason=f"{name}: {problem}")]
        if name in ("mosaic_gpu", "triton"):
            marks.append(pytest.mark.gpu)
        params.append(pytest.param(name, marks=marks))
    return params
