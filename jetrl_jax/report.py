"""`python -m jetrl_jax.report RUN [RUN ...] [--out PAGE]`: one HTML page about one run, or about several laid over one another.

The page holds everything it needs (the chart library is inside it) and fetches nothing: it opens from a disk
without a network.  It reads only what `jetrl_jax.training.run_directory` writes, starts no device, and can be
made while a run goes on.  Without --out it is RUN/report.html for one run, report.html here for several.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jetrl_jax.cli import run_entry_point
from jetrl_jax.config_types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.training.metrics import read_metrics
from jetrl_jax.training.run_directory import CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, PRECISION_FILE, SAMPLES_FILE, flatten, read_jsonl

PAGE_FILE = "report.html"


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says: its rows, and what it was run with (empty where a file is missing)."""

    name: str
    path: Path
    rows: list[dict[str, float]]
    config: dict[str, Any] = field(default_factory=dict)  # dotted path -> value
    environment: dict[str, Any] = field(default_factory=dict)  # of the newest start
    starts: int = 0
    precision: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    bad_batches: int = 0


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page about ``runs`` (run directories) to ``out`` and return its path.

    Raises `UserError` on a path that is no run directory, a run without a row, a run named twice, a file of a run
    that cannot be read, and a page that cannot be written.
    """
    from jetrl_jax.report_page import render  # plotly takes its time

    paths = [user_path(run).resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise UserError(f"report: a run is named twice: got {', '.join(str(run) for run in runs)}")
    records = [read_run(path, name) for path, name in zip(paths, _short_names(paths), strict=True)]
    target = user_path(out) if out is not None else (paths[0] if len(paths) == 1 else Path()) / PAGE_FILE
    try:
        target.write_text(render(records), encoding="utf-8")
    except OSError as error:
        raise UserError(f"report: the page cannot be written: got --out {target}: {error.strerror}") from error
    return target


def read_run(path: Path, name: str) -> RunRecord:
    """Everything the page needs of the run directory ``path``; raises `UserError`."""
    if not path.is_dir():
        raise UserError(f"report: no run directory: got {path}, expected a directory that a run wrote")
    if not (path / METRICS_FILE).exists():
        what = "a run that has no row yet" if (path / CONFIG_FILE).exists() else "no run directory"
        raise UserError(f"report: {what}: got {path} without {METRICS_FILE}, expected a directory that a run wrote")
    rows = read_metrics(path / METRICS_FILE)
    if not rows:
        raise UserError(f"report: a run that has no row yet: got {path / METRICS_FILE}, expected at least one row")
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
        raise UserError(f"report: an unreadable file: got {path}: {error!r}, expected what a run wrote") from error


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell all of them apart."""
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def main(argv: list[str]) -> int:
    """Reads the command line, writes the page and says where; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jetrl_jax.report", description="Write an HTML page about one or several runs.")
    parser.add_argument("runs", type=user_path, metavar="RUN", nargs="+", help="directory of a run")
    parser.add_argument(
        "--out", type=user_path, metavar="PAGE", help=f"the page; default RUN/{PAGE_FILE}, for several runs {PAGE_FILE} here"
    )
    arguments = parser.parse_args(argv)
    page = write_report(arguments.runs, arguments.out)
    print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    run_entry_point(main)
