"""What the tests of whole runs share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compilation_cache() -> Path:
    """Where the commands of a test keep their compiled programs for each other, and for later sessions."""
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
