"""A run small enough for tests: one layer, three-letter words, seconds of compute."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl_jax.commands.entry import run_entry_point
from jetrl_jax.config.load import config_from_dict, dump_config
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.record.checkpoint import CheckpointStore
from jetrl_jax.record.metrics import read_metrics, without_clocks

ROOT = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = {
    "model": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 32,
    },
    "task": {
        "name": "reverse",
        "options": {"min_letters": 2, "max_letters": 3, "train_size": 200, "eval_size": 16},
    },
    "rollout": {
        "prompts_per_step": 4,
        "group_size": 4,
        "max_prompt_tokens": 8,
        "max_completion_tokens": 6,
        "engine": {"kind": "jax", "slots": 16, "prefill_rows": 4, "decode_chunk_tokens": 3},
    },
    "rewards": [{"name": "tiny:shorter"}],
    "optimizer": {"learning_rate": 1e-3},
    "batch": {"microbatch_tokens": 112},
    "warm_start": {"steps": 3, "batch_size": 16},
    "eval": {"prompts": 8, "samples": 2},
    "checkpoint": {"every_steps": 2},
    "run": {"steps": 4, "tensorboard": False},
}


def tiny_config(directory: str | Path, **sections: dict[str, Any] | list[Any] | None) -> RunConfig:
    """`TINY` with the fields of `sections` changed, a list in place of its own; a section of None has its
    defaults.
    """
    data: dict[str, Any] = {
        name: dict(section) if isinstance(section, dict) else section for name, section in TINY.items()
    }
    for name, section in sections.items():
        if section is None:
            data.pop(name)
        else:
            data[name] = data.get(name, {}) | section if isinstance(section, dict) else section
    data["run"]["directory"] = str(directory)
    return config_from_dict(data)


def shorter(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    """A reward that differs within almost every group of an untrained policy."""
    return [-float(len(completion)) for completion in completions]


def noted(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    """As `shorter`; notes the prompts of each call in a file of this process, in the directory that NOTES
    names.
    """
    with open(Path(os.environ["NOTES"]) / str(os.getpid()), "a") as file:
        file.write(json.dumps(prompts) + "\n")
    return shorter(prompts, completions, answers)


CALLS = []


def forgetful(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    """A reward that depends on how often this process has called it: a restart changes it."""
    CALLS.append(None)
    return [float(len(completion) * len(CALLS)) for completion in completions]


def command_environment(cache: Path | None = None) -> dict[str, str]:
    """The environment of a child: CPU, this checkout, and a compilation cache where one is given."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        # of an entry that another test writes just then
        "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
    }
    if cache is not None:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    return environment


def rows(directory: Path) -> list[dict[str, float]]:
    """A run's metrics without its clocks."""
    return [without_clocks(row) for row in read_metrics(directory / "metrics.jsonl")]


def manifest(directory: Path) -> Any:
    """Shape, dtype and SHA-256 of every array of the newest checkpoint, and the trainer's counters."""
    with CheckpointStore(directory / "checkpoints", read_only=True) as store:
        document = store.read_metadata(store.steps()[-1])
    return document["manifest"], {
        name: value for name, value in document["metadata"].items() if name != "before"
    }


def write_config(config: RunConfig, path: Path) -> Path:
    """The config as a YAML file."""
    path.write_text(dump_config(config))
    return path


def train_command(config_path: Path, *arguments: str) -> list[str]:
    """`python -m jetrl_jax.train --config ...` as a user types it."""
    return [sys.executable, "-m", "jetrl_jax.train", "--config", str(config_path), *arguments]


def run_here(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As `run_module`, in this process: what is claimed is the command's work, not its start."""
    command, output, errors = importlib.import_module(module), io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as ended:
            run_entry_point(command.main)
    return subprocess.CompletedProcess(
        [module, *arguments], ended.value.code, output.getvalue(), errors.getvalue()
    )


def run_module(
    module: str, *arguments: str, cache: Path | None = None, timeout_s: float = 900.0
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module` and returns what it printed and its exit status."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, env=command_environment(cache), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )
