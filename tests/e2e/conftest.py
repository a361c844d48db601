"""What the tests of whole runs share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compilation import compilation


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation() -> Iterator[None]:
    """But in `make test-avx2`, whose run is compiled as the product's."""
    with compilation(quick="JETRL_TEST_ISA" not in os.environ):
        yield


@pytest.fixture(scope="session")
def compilation_cache() -> Path:
    """Where the commands of a test keep their compiled programs for each other, and for later sessions."""
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
