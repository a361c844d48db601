"""`python -m jetrl_jax verify-resume --config C K`: does a resumed run equal an uninterrupted one?

Runs three processes in a temporary directory: 2K steps without a stop; the same run, which gets a SIGTERM at
the end of step K; and its resume.  Compares bit by bit every metric except clocks, every sampled prompt and
completion, every array of the last checkpoint by its SHA-256 (masters, moments, loss scale, reference), its
counters and data position, and the exported weights.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetrl_jax.commands.entry import (
    add_config_arguments,
    command_parser,
    config_from_arguments,
    run_entry_point,
)
from jetrl_jax.config.load import dump_config, load_config, override_config
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.errors import RunStopped, UserError

TRAIN = (sys.executable, "-m", "jetrl_jax.train", "--config")


def verify_resume(config: RunConfig, steps: int) -> list[str]:
    """Runs the three processes; returns one line for each comparison.

    Args:
      config: the run's config; its directory is not touched.
      steps: K.

    Raises:
      UserError: K is below 1, or the config has several processes.
      RunStopped: a process failed, or the two runs differ; the message lists where.
    """
    if steps < 1:
        raise UserError(
            f"verify_resume: nothing to resume: got --verify-resume {steps}, expected at least 1."
        )
    if config.distributed.on:
        raise UserError(
            "verify_resume: runs in one process: got distributed.processes, expected --set "
            "distributed.processes=1."
        )
    with tempfile.TemporaryDirectory(prefix="verify_resume_") as name:
        root = Path(name)
        whole, parts = root / "whole", root / "parts"
        _run([*TRAIN, _write(config, root, whole, steps)])
        again = _write(config, root, parts, steps)
        _run(
            [sys.executable, "-m", "jetrl_jax.commands.verify_resume", again, str(steps)],
            expected=128 + signal.SIGTERM,
        )
        _run([*TRAIN, again, "--resume"])
        different, same = _compare(whole, parts)
    if different:
        lines = "\n".join(f"  {line}" for line in different)
        raise RunStopped(
            f"verify_resume: stopped after step {steps} and resumed, the run is not the same:\n{lines}"
        )
    return [f"stopped after step {steps} of {2 * steps}, resumed in a new process", *same]


def _write(config: RunConfig, root: Path, directory: Path, steps: int) -> str:
    """Writes the config file of a run of 2K steps in `directory`; returns its path."""
    updates = 2 * steps * config.algorithm.epochs * config.algorithm.minibatches
    changes = [
        f"run.directory={directory}",
        f"run.steps={2 * steps}",
        f"checkpoint.every_steps={2 * steps}",
        "run.wandb_project=null",
    ]
    changes += [f"optimizer.warmup_steps={min(config.optimizer.warmup_steps, updates - 1)}"]
    file = root / f"{directory.name}.yaml"
    file.write_text(dump_config(override_config(config, changes)), encoding="utf-8")
    return str(file)


def _run(command: list[str], expected: int = 0) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != expected:
        what, status = " ".join(command[2:]), f"{done.returncode}, not {expected}"
        raise RunStopped(
            f"verify_resume: {what} ended with status {status}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
        )


def _run_and_stop(file: str, steps: int) -> int:
    """Runs a config file in this process with a SIGTERM at the end of step K; returns the exit status."""
    from jetrl_jax.record.console import Console
    from jetrl_jax.runs.grpo import GRPOTrainer

    class Stopping(Console):
        def step(self, row: Mapping[str, Any]) -> None:
            super().step(row)
            if row["step"] == steps:
                os.kill(os.getpid(), signal.SIGTERM)

    config = load_config(file)
    outcome = GRPOTrainer(config, console=Stopping(config.run.steps)).train()
    return 128 + signal.Signals[outcome["stopped_by"]].value if outcome["stopped_by"] else 0


def _compare(whole: Path, parts: Path) -> tuple[list[str], list[str]]:
    """The differences between the whole run and the run in two parts, and the equalities, one line each."""
    from jetrl_jax.record.checkpoint import CheckpointStore
    from jetrl_jax.record.metrics import read_metrics, without_clocks
    from jetrl_jax.record.run_directory import read_jsonl

    pairs: dict[str, tuple[Any, Any]] = {}
    rows = [[without_clocks(row) for row in read_metrics(path / "metrics.jsonl")] for path in (whole, parts)]
    pairs[f"metrics of {len(rows[0])} rows"] = (rows[0], rows[1])
    samples = [read_jsonl(path / "samples.jsonl") for path in (whole, parts)]
    pairs[f"{len(samples[0])} samples"] = (samples[0], samples[1])
    documents = []
    for path in (whole, parts):
        with CheckpointStore(path / "checkpoints", read_only=True) as store:
            documents.append(store.read_metadata(store.steps()[-1]))
        metadata = documents[-1]["metadata"]
        metadata["before"] = without_clocks(metadata["before"])
    for name in sorted({*documents[0]["manifest"], *documents[1]["manifest"]}):
        pairs[f"array {name}"] = tuple(document["manifest"].get(name) for document in documents)
    pairs["counters and data position"] = (documents[0]["metadata"], documents[1]["metadata"])
    exports = [
        # an adapter's config names the place of its base
        {
            str(file.relative_to(path)): file.read_bytes()
            for name in WRITTEN
            for file in sorted(path.glob(name))
        }
        for path in (whole, parts)
    ]
    pairs["exported files"] = (exports[0], exports[1])
    different = [_shown(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]
    arrays = sum(name.startswith("array ") for name in pairs)
    return different, [
        *(f"equal: {name}" for name in pairs if not name.startswith("array ")),
        f"equal: {arrays} arrays of the checkpoint",
    ]


def _shown(name: str, one: Any, other: Any) -> str:
    if isinstance(one, list) and isinstance(other, list):
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            if a != b:
                keys = [key for key in a if a.get(key) != b.get(key)]
                return (
                    f"{name}: row {index} differs in {', '.join(keys)}: {a.get(keys[0])!r} and "
                    f"{b.get(keys[0])!r}"
                )
        return f"{name}: {len(one)} and {len(other)} rows"
    return name


WRITTEN = ("export/*", "base/*", "adapter/*.safetensors")


def main(argv: list[str]) -> int:
    """Parses the command line, runs, prints what was compared; returns the exit status."""
    parser = command_parser(
        "verify-resume",
        "Check that a stopped and resumed run is the same.",
        "verify-resume --config configs/tiny_cpu.yaml 3",
    )
    add_config_arguments(parser)
    parser.add_argument("steps", type=int, metavar="K", help="the run is stopped after K steps of 2K")
    arguments = parser.parse_args(argv)
    print("\n".join(verify_resume(config_from_arguments(arguments), arguments.steps)))
    return 0


if __name__ == "__main__":
    run_entry_point(lambda words: _run_and_stop(words[0], int(words[1])))
