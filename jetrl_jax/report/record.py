"""Reads the data of a report from a run directory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jetrl_jax.errors import UserError
from jetrl_jax.record.metrics import read_metrics
from jetrl_jax.record.run_directory import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    PRECISION_FILE,
    SAMPLES_FILE,
    flatten,
    read_jsonl,
)


@dataclass(frozen=True)
class RunRecord:
    """The data of a run directory: its rows, config, environment, precision table and samples.

    Fields are empty if their file is missing.
    """

    name: str
    path: Path
    rows: list[dict[str, float]]
    config: dict[str, Any] = field(default_factory=dict)  # dotted path -> value
    environment: dict[str, Any] = field(default_factory=dict)  # of the newest start
    starts: int = 0
    precision: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    bad_batches: int = 0


def read_run(path: Path, name: str) -> RunRecord:
    """Everything the page needs of the run directory ``path``; raises `UserError`."""
    if not path.is_dir():
        raise UserError(f"report: no run directory: got {path}, expected a directory that a run wrote")
    if not (path / METRICS_FILE).exists():
        what = "a run that has no row yet" if (path / CONFIG_FILE).exists() else "no run directory"
        raise UserError(
            f"report: {what}: got {path} without {METRICS_FILE}, expected a directory that a run wrote"
        )
    rows = read_metrics(path / METRICS_FILE)
    if not rows:
        raise UserError(
            f"report: a run that has no row yet: got {path / METRICS_FILE}, expected at least one row"
        )
    starts = _read_starts(path / ENVIRONMENT_FILE)
    precision = path / PRECISION_FILE
    return RunRecord(
        name=name,
        path=path,
        rows=rows,
        config=_read_config(path / CONFIG_FILE),
        environment=starts[-1] if starts else {},
        starts=len(starts),
        precision=precision.read_text(encoding="utf-8") if precision.exists() else "",
        samples=read_jsonl(path / SAMPLES_FILE) if (path / SAMPLES_FILE).exists() else [],
        bad_batches=sum(1 for _ in (path / "bad_batches").glob("*.npz")),
    )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"report: a config that is no YAML: got {path}: {error}") from error
    return flatten(config) if isinstance(config, dict) else {}


def _read_starts(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_bytes())["starts"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"report: an unreadable file: got {path}: {error!r}, expected what a run wrote"
        ) from error
