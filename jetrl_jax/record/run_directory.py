"""The directory of a run: its lock, its files, and how they are written.

    config.yaml        the resolved config
    environment.json   versions, device, commit, command line and rollout engine of every start of the run
    precision.txt      the resolved precision table
    metrics.jsonl      one row per step (`jetrl_jax.record.metrics`)
    samples.jsonl      a few completions of each step: prompt, answer, reward, tokens with their
                       log-probabilities
    certificates.jsonl one row per weight sync to vLLM: the differences found (`bridge.vllm.certificate`)
    events/            TensorBoard events
    checkpoints/       Orbax checkpoints (`jetrl_jax.record.checkpoint`)
    bad_batches/       the batch of every step that was skipped for a non-finite value
    export/            the trained policy as a Hugging Face checkpoint
    run.lock           held by the process that writes here

A whole file is written to a temporary neighbour and then renamed, so that a reader (or a kill) finds either
the old file or the new one.  The ``.jsonl`` files grow line by line.  A kill can leave an incomplete last
line, which every reader here ignores and `truncate_jsonl` removes.

The lock is a POSIX record lock (`fcntl.lockf`).  The kernel releases it however the process ends, so a stale
lock file never blocks a resume.  Forked workers do not inherit it.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.record.console import print_warning

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
PRECISION_FILE = "precision.txt"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CERTIFICATES_FILE = "certificates.jsonl"
LOCK_FILE = "run.lock"
MAX_BAD_BATCHES = 32  # so that a run that keeps skipping steps does not fill the disk

RECORDED_PACKAGES = (
    "jetrl-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "ml_dtypes",
    "transformers",
    "vllm",
)

_TEMPORARY = ".partial-"
_locked_here: set[Path] = set()  # a POSIX lock does not exclude its own process


def atomic_write(path: Path, data: str | bytes) -> None:
    """Writes ``data`` to ``path`` (at any moment the old or the new file); it is on disk on return."""
    payload = data.encode("utf-8") if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}{_TEMPORARY}{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``.jsonl`` file, without an incomplete last line (after a kill, or while a run writes).

    Raises `UserError` naming the line if another line is not a JSON object.
    """
    lines = path.read_bytes().split(b"\n")
    rows = []
    # after the last newline comes an incomplete line, or nothing
    for number, line in enumerate(lines[:-1], start=1):
        row = _parse_row(line)
        if row is None:
            if not any(_parse_row(later) is not None for later in lines[number:]):
                break
            raise UserError(
                f"read_jsonl: a line is no JSON object: got {path}:{number}, expected one row a line"
            )
        rows.append(row)
    return rows


def truncate_jsonl(path: Path, after_step: int) -> int | None:
    """Truncates a ``.jsonl`` file of rows with a ``step``, so that no row is later than ``after_step``.

    The file is cut in place at the first row that is later or unreadable (an incomplete line, zeros left by a
    power cut); earlier rows are not touched.  Returns the last remaining step, or None if no row remains.
    """
    if not path.exists():
        return None
    last, offset = None, 0
    with open(path, "r+b") as file:
        for line in file:
            row = _parse_row(line) if line.endswith(b"\n") else None
            if row is None or not isinstance(row.get("step"), int) or row["step"] > after_step:
                break
            last, offset = row["step"], offset + len(line)
        file.truncate(offset)
        os.fsync(file.fileno())
    return last


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return row if isinstance(row, dict) else None


def json_value(value: Any) -> Any:
    """``value`` as JSON: arrays become numbers and lists, non-finite numbers None, other objects text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):
        return json_value(value.tolist())
    return str(value)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value of a nested config; lists count by index, empty containers are kept."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        items = (
            {str(index): item for index, item in enumerate(value)}
            if isinstance(value, list | tuple)
            else value
        )
        if isinstance(items, Mapping) and items:
            flat.update(flatten(items, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class RunDirectory:
    """An open run directory, locked by this process until `close` (or the end of the ``with`` block).

    ``resumed``: whether it held a run before.  It is False if ``resume`` was given but nothing had been
    written yet; the run then simply starts.
    """

    def __init__(self, path: Path, lock: IO[str], resumed: bool, warn: Callable[[str], None]) -> None:
        self.path = path
        self.resumed = resumed
        self._lock: IO[str] | None = lock
        self._warn = warn

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        resume: bool = False,
        warn: Callable[[str], None] = print_warning,
    ) -> RunDirectory:
        """Creates (or, with ``resume``, reopens) the run directory ``path`` and locks it.

        Raises `UserError` if the path is a file or cannot be written, if another process (or this one) has
        locked it, if it holds a run and ``resume`` is False, or if it holds anything that is not a run.
        """
        path = user_path(path).resolve()
        _check_contents(path, resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _acquire_lock(path, warn)
        except OSError as error:
            raise UserError(
                f"run directory: cannot be written: got {path}: {error.strerror}. Choose another "
                "run.directory."
            ) from error
        try:
            # again, as another process may have filled it before we held the lock
            _check_contents(path, resume)
            resumed = (path / CONFIG_FILE).exists()
            for leftover in path.glob(f".*{_TEMPORARY}*"):
                leftover.unlink()
            for name in ("events", "checkpoints", "bad_batches"):
                if (path / name).exists() and not (path / name).is_dir():
                    raise UserError(
                        f"run directory: is damaged: got a file at {path / name}, expected a directory"
                    )
                (path / name).mkdir(exist_ok=True)
        except BaseException:
            _release_lock(path, lock)
            raise
        return cls(path, lock, resumed, warn)

    @property
    def config_path(self) -> Path:
        """``config.yaml``."""
        return self.path / CONFIG_FILE

    @property
    def metrics_path(self) -> Path:
        """``metrics.jsonl``."""
        return self.path / METRICS_FILE

    @property
    def samples_path(self) -> Path:
        """``samples.jsonl``."""
        return self.path / SAMPLES_FILE

    @property
    def events(self) -> Path:
        """Directory of the TensorBoard events."""
        return self.path / "events"

    @property
    def checkpoints(self) -> Path:
        """Directory of the Orbax checkpoints."""
        return self.path / "checkpoints"

    @property
    def bad_batches(self) -> Path:
        """Directory of the batches of skipped steps."""
        return self.path / "bad_batches"

    def write_config(self, text: str) -> None:
        """Writes ``config.yaml``; from then on the directory holds a run."""
        atomic_write(self.config_path, text)

    def write_precision(self, text: str) -> None:
        """Writes ``precision.txt``, the resolved precision table."""
        atomic_write(self.path / PRECISION_FILE, text)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Adds a start of the run to ``environment.json``: ``{"starts": [oldest, …, newest]}``."""
        path = self.path / ENVIRONMENT_FILE
        starts: list[Any] = []
        if path.exists():
            try:
                starts = json.loads(path.read_bytes())["starts"]
            except (ValueError, KeyError, TypeError):
                self._warn(f"{path} is unreadable; the starts before this one are not kept in it")
        atomic_write(path, json.dumps({"starts": [*starts, dict(environment)]}, indent=2) + "\n")

    def add_to_environment(self, more: Mapping[str, Any]) -> None:
        """Adds facts that are known only later to the newest start in ``environment.json``."""
        path = self.path / ENVIRONMENT_FILE
        starts = json.loads(path.read_bytes())["starts"]
        starts[-1] |= more
        atomic_write(path, json.dumps({"starts": starts}, indent=2) + "\n")

    def append_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Appends completions of ``step`` to ``samples.jsonl``, one line each, converted by `json_value`."""
        lines = [
            json.dumps(json_value({"step": step, **sample}), ensure_ascii=False) + "\n" for sample in samples
        ]
        with open(self.samples_path, "a", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write("".join(lines))

    def append_certificate(self, row: Mapping[str, Any]) -> None:
        """Appends the certificate of a weight sync; syncs repeated by a resumed run appear twice."""
        with open(self.path / CERTIFICATES_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(json_value(row)) + "\n")

    def truncate_after(self, step: int) -> None:
        """Drops the samples of steps after ``step``, which a resumed run makes again."""
        truncate_jsonl(self.samples_path, step)

    def save_bad_batch(self, step: int, name: str, arrays: Mapping[str, Any]) -> Path | None:
        """Saves the batch of a step in which tensor ``name`` was not finite; returns the file.

        ``bad_batches/step_<step>_<name>.npz`` holds the arrays under their names.  Arrays in bfloat16 and
        float8 are stored as float32 with the same values, as numpy's format lacks the narrow types.  After
        `MAX_BAD_BATCHES` files it only warns and returns None.
        """
        file_name = f"step_{step:06d}_{re.sub(r'[^A-Za-z0-9.-]+', '_', name)[:100]}.npz"
        path = self.bad_batches / file_name
        if not path.exists() and sum(1 for _ in self.bad_batches.glob("*.npz")) >= MAX_BAD_BATCHES:
            self._warn(
                f"step {step}: {name} is not finite; its batch is not saved, {self.bad_batches} already "
                f"holds {MAX_BAD_BATCHES}"
            )
            return None
        temporary = self.bad_batches / f".{file_name}{_TEMPORARY}{os.getpid()}"
        with open(temporary, "wb") as file:
            np.savez(file, allow_pickle=False, **{key: _npz_array(value) for key, value in arrays.items()})
        os.replace(temporary, path)
        return path

    def close(self) -> None:
        """Releases the lock; the directory may then be opened again."""
        if self._lock is not None:
            _release_lock(self.path, self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_contents(path: Path, resume: bool) -> None:
    """Raises `UserError` for a path that cannot hold this run; leftovers of a killed start are allowed."""
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(
            f"run directory: is a file: got run.directory={path}, expected a directory or a new path"
        )
    if (path / CONFIG_FILE).exists() and any(
        (path / name).exists() for name in (LOCK_FILE, ENVIRONMENT_FILE, METRICS_FILE)
    ):
        if not resume:
            raise UserError(
                f"run directory: already holds a run: got run.directory={path}. Continue it with "
                "--resume or choose another directory."
            )
        return
    ours = {LOCK_FILE, "events", "checkpoints", "bad_batches"}
    # left by a start that ended before the run had a config; a reward's log may show why
    kept = (_TEMPORARY, "reward-")
    foreign = sorted(
        entry.name
        for entry in path.iterdir()
        if entry.name not in ours and not any(part in entry.name for part in kept)
    )
    if foreign:
        raise UserError(
            f"run directory: is neither empty nor a run: got run.directory={path} with "
            f"{', '.join(foreign[:5])}, "
            "expected a new or empty directory, or with --resume that of a run"
        )


def _acquire_lock(path: Path, warn: Callable[[str], None]) -> IO[str]:
    """Locks ``path`` and writes the holder's name; warns if the last holder ended without releasing it."""
    # checked before the file is opened, as closing a second handle would drop the first one's lock
    if path in _locked_here:
        raise UserError(
            f"run directory: in use by this process: got run.directory={path}. Close the first run before."
        )
    lock = open(path / LOCK_FILE, "a+", encoding="utf-8")
    lock.seek(0)
    holder = lock.read().strip()
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.close()
        owner = holder or "an unknown process"
        raise UserError(
            f"run directory: in use by another run: got run.directory={path}, held by {owner}."
        ) from None
    except BaseException:
        lock.close()
        raise
    if holder:
        warn(f"{path} was left locked by {holder}, which no longer runs; the lock is taken over")
    lock.truncate(0)
    lock.write(
        f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    )
    lock.flush()
    _locked_here.add(path)
    return lock


def _release_lock(path: Path, lock: IO[str]) -> None:
    lock.truncate(0)
    lock.close()
    _locked_here.discard(path)


def _npz_array(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return (
        array.astype(np.float32)
        if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat16", "float8", "float4"))
        else array
    )


def collect_environment(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The environment needed to repeat a run: command line, versions, devices, commit, XLA and JAX variables.

    Starts the JAX backend.  ``commit`` is None if this package is not in a git checkout, or git is absent.
    """
    import jax

    devices = jax.devices()
    steering = ("XLA_", "JAX_", "LIBTPU_", "CUDA_VISIBLE")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(sys.argv if argv is None else argv),
        "directory": os.getcwd(),
        "python": platform.python_version(),
        "packages": {name: version for name in RECORDED_PACKAGES if (version := _version(name))},
        "backend": jax.default_backend(),
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(steering)},
        **git_state(Path(__file__)),
    }


def git_state(file: Path) -> dict[str, Any]:
    """``{"commit", "dirty"}`` of the git checkout that tracks ``file``; both None if none does."""
    unknown = {"commit": None, "dirty": None}
    git = shutil.which("git")
    if git is None:
        return unknown

    def run(*arguments: str) -> str:
        command = [git, "-C", str(file.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        # a package installed inside another repository does not belong to it
        run("ls-files", "--error-unmatch", file.name)
        return {
            "commit": run("rev-parse", "HEAD"),
            "dirty": bool(run("status", "--porcelain", "--untracked-files=no")),
        }
    except (subprocess.SubprocessError, OSError):
        return unknown


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
