"""What the tests of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of a test keep their compiled programs for each other."""
    return tmp_path_factory.mktemp("jax-cache")
