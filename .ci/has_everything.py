"""Status 0 where this Python has every package that the project and its tests on a GPU need, else 1 and a
line of those missing.

`make gpu` asks it before it makes an environment: a GPU machine without network has its packages already.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOR_TESTS = ("pytest", "pytest-xdist", "hypothesis", "beartype", "jax-cuda13-plugin")


def missing() -> list[str]:
    """Names of distributions that are not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.match(r"[A-Za-z0-9._-]+", requirement).group() for requirement in project["dependencies"]]
    return [name for name in (*names, *FOR_TESTS) if not any(metadata.distributions(name=name))]


if __name__ == "__main__":
    if absent := missing():
        print(
            f"{sys.executable} lacks {', '.join(absent)}; make gpu PYTHON_GPU=... takes it all the same",
            file=sys.stderr,
        )
    sys.exit(bool(absent))
