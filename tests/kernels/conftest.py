"""What the tests of kernels share: an interpreter that forgets a kernel that failed, and one without fusions."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import jax
import pytest

from pallas_kernels.implementations import interpreter_problem


@pytest.fixture(autouse=True)
def _fresh_interpreter() -> Iterator[None]:
    """JAX keeps the state of an interpreted kernel that raised, and every later one would raise too."""
    yield
    if callbacks := sys.modules.get("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks"):
        callbacks.reset_gpu_interpret_mode_state()


@pytest.fixture
def operations_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, XLA would join operations of a kernel in one program and leave them apart in another."""
    if interpreter_problem() is None:
        from jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret import JaxprInterpreter

        run = JaxprInterpreter._interpret_arithmetic_primitive
        monkeypatch.setattr(
            JaxprInterpreter,
            "_interpret_arithmetic_primitive",
            lambda self, eqn, values: jax.lax.optimization_barrier(run(self, eqn, values)),
        )
