"""The config of a policy on disk, read without JAX so that mistakes are found before a device is used.

A run directory has its own `config.yaml`.  A Hugging Face directory, and a PEFT directory with the base that
it names, runs in BF16, or as a config file says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.hf.peft import CONFIG_FILE, read_adapter_config
from jetrl_jax.config.load import config_from_dict, load_config
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError

BASE_DIRECTORY, ADAPTER_DIRECTORY = "base", "adapter"  # side by side in a run with adapters and in its export


def is_run(directory: str | Path) -> bool:
    """Whether a directory is a run directory."""
    return (user_path(directory) / "config.yaml").is_file()


def is_adapter_directory(path: Path) -> bool:
    """Whether a directory is one of PEFT."""
    return (path / CONFIG_FILE).is_file()


def adapter_sections(path: Path) -> dict[str, Any]:
    """The sections of a config for the policy in a PEFT directory.

    Raises:
      UserError: it is no plain LoRA, or its base is not on this machine.
    """
    values = read_adapter_config(path)
    named, targets = values.get("base_model_name_or_path"), values.get("target_modules")
    # a run or an export that was moved has its base beside the adapter
    places = [user_path(named), path.absolute().parent / Path(named).name] if isinstance(named, str) else []
    base = next((place for place in places if (place / "config.json").is_file()), None)
    if base is None:
        raise UserError(
            f"{path / CONFIG_FILE}: the base is not there: got base_model_name_or_path={named!r}, expected a "
            "Hugging Face directory there, or one of that name beside the adapter."
        )
    if not isinstance(targets, list):
        raise UserError(
            f"{path / CONFIG_FILE}: got target_modules={targets!r}, expected a list of layers' last names."
        )
    lora = {
        "rank": values["r"],
        "alpha": float(values["lora_alpha"]),
        "rslora": bool(values.get("use_rslora", False)),
        "targets": targets,
        "path": str(path),
    }
    return {"model": {"path": str(base)}, "lora": lora}


def policy_config(
    directory: str | Path,
    overrides: Sequence[str] = (),
    config: str | Path | None = None,
    rollout: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The config of the policy in a directory; commands call this before they import JAX.

    Args:
      directory: a run directory, a Hugging Face directory or one of PEFT.
      overrides: changes of the config (`a.b=c`), as after ``--set``.
      config: YAML file in place of the run's; its `model` and `lora` give way to those of a PEFT directory.
      rollout: fields of `rollout` for a Hugging Face directory without a config.

    Raises:
      UserError: the directory is neither, or the config or the overrides have a mistake.
    """
    path = user_path(directory)
    adapter = adapter_sections(path) if is_adapter_directory(path) else None
    if not is_run(path) and adapter is None and not (path / "config.json").is_file():
        raise UserError(
            f"no policy there: got {path}, expected a run directory (config.yaml), a Hugging Face "
            "directory (config.json) or one of PEFT (adapter_config.json)."
        )
    if config is not None and adapter is not None and not is_run(path):
        # the adapters are trained, and stand on a base that is
        given = {**adapter, "warm_start": None}
        own = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items()]
        try:
            return load_config(config, [*own, *overrides])
        except UserError as error:
            if not any(f"--set {name}={{" in str(error) for name in adapter):
                raise
            raise UserError(
                f"{error}\nHere --set lora and --set model are of {path / CONFIG_FILE}."
            ) from None
    if config is not None or is_run(path):
        return load_config(config or path / "config.yaml", overrides)
    fields = {
        "model": {"path": str(path)},
        "tokenizer": {"kind": "huggingface"},
        "precision": {"preset": "bf16"},
        **(adapter or {}),
    }
    return config_from_dict(fields | ({} if rollout is None else {"rollout": dict(rollout)}), overrides)
