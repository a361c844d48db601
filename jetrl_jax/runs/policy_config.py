"""The config of a policy on disk, read without JAX so that mistakes are found before a device is used.

A run directory has its own `config.yaml`.  A Hugging Face directory runs in BF16, or as a config file says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetrl_jax.config.load import config_from_dict, load_config
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError


def is_run(directory: str | Path) -> bool:
    """Whether a directory is a run directory."""
    return (user_path(directory) / "config.yaml").is_file()


def policy_config(
    directory: str | Path,
    overrides: Sequence[str] = (),
    config: str | Path | None = None,
    rollout: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The config of the policy in a directory; commands call this before they import JAX.

    Args:
      directory: a run directory or a Hugging Face directory.
      overrides: changes of the config (`a.b=c`), as after ``--set``.
      config: YAML file in place of the run's.
      rollout: fields of `rollout` for a Hugging Face directory without a config.

    Raises:
      UserError: the directory is neither, or the config or the overrides have a mistake.
    """
    path = user_path(directory)
    if not is_run(path) and not (path / "config.json").is_file():
        raise UserError(
            f"no policy there: got {path}, expected a run directory (config.yaml) or a Hugging Face "
            "directory (config.json)."
        )
    if config is not None or is_run(path):
        return load_config(config or path / "config.yaml", overrides)
    fields = {
        "model": {"path": str(path)},
        "tokenizer": {"kind": "huggingface"},
        "precision": {"preset": "bf16"},
    }
    return config_from_dict(fields | ({} if rollout is None else {"rollout": dict(rollout)}), overrides)
