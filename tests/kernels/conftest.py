"""What the tests of kernels share: an interpreter that forgets a kernel that failed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _fresh_interpreter() -> Iterator[None]:
    """JAX keeps the state of an interpreted kernel that raised, and every later one would raise too."""
    yield
    if callbacks := sys.modules.get("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks"):
        callbacks.reset_gpu_interpret_mode_state()
