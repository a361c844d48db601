"""The part of the build that pyproject.toml cannot say: a wheel also holds the configs, as
`jetrl_jax/configs/*.yaml`.

In a checkout, and in an editable installation of one, they stay in `configs/`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONFIGS = Path(__file__).resolve().parent / "configs"


class BuildWithConfigs(build_py):
    """Copies the configs into the package that is built."""

    def run(self) -> None:
        """Builds as always, then copies."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "jetrl_jax" / "configs"
            target.mkdir(parents=True, exist_ok=True)
            for path in sorted(CONFIGS.glob("*.yaml")):
                shutil.copy(path, target / path.name)


setup(cmdclass={"build_py": BuildWithConfigs})
