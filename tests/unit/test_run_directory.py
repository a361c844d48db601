"""The run directory: who may open it, what is written in it, and what a kill leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.errors import UserError
from jetrl_jax.record import run_directory
from jetrl_jax.record.console import Console
from jetrl_jax.record.run_directory import (
    MAX_BAD_BATCHES,
    RunDirectory,
    atomic_write,
    collect_environment,
    git_state,
    json_value,
    read_jsonl,
    truncate_jsonl,
)
from jetrl_jax.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]


def begun(path: Path) -> Path:
    """A directory in which a run was begun and closed."""
    with RunDirectory.create(path) as run:
        run.write_config("seed: 0\n")
    return path


def test_create_makes_a_new_run(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "runs" / "a") as run:
        assert not run.resumed
        run.write_config("seed: 0\n")
        run.write_precision("site  format\n")
        assert run.config_path.read_text() == "seed: 0\n"
        assert (run.path / "precision.txt").read_text() == "site  format\n"
        assert run.events.is_dir() and run.checkpoints.is_dir() and run.bad_batches.is_dir()


def test_create_raises_on_a_run_without_resume(tmp_path: Path) -> None:
    path = begun(tmp_path / "a")
    with pytest.raises(
        UserError, match=r"already holds a run: got run.directory=.*Continue it with --resume"
    ):
        RunDirectory.create(path)
    with RunDirectory.create(path, resume=True) as run:
        assert run.resumed
        assert run.config_path.read_text() == "seed: 0\n"


def test_create_raises_on_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(UserError, match=r"neither empty nor a run: got run.directory=.* with notes\.txt"):
            RunDirectory.create(tmp_path, resume=resume)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]  # nothing of ours is left in it
    with pytest.raises(UserError, match="is a file"):
        RunDirectory.create(tmp_path / "notes.txt")
    with pytest.raises(UserError, match="cannot be written"):
        RunDirectory.create(tmp_path / "notes.txt" / "below")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.yaml").write_text("seed: 0\n")  # a config alone is no run
    with pytest.raises(UserError, match="neither empty nor a run"):
        RunDirectory.create(tmp_path / "configs", resume=True)


def test_create_with_resume_begins_where_nothing_was_written(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", resume=True) as run:
        assert not run.resumed
    with RunDirectory.create(tmp_path / "a") as run:  # a start that ended before its config counts as nothing
        assert not run.resumed


def test_create_raises_on_a_run_that_is_open(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    run.write_config("seed: 0\n")
    with pytest.raises(UserError, match="in use by this process"):
        RunDirectory.create(tmp_path / "a", resume=True)
    code = (
        "import sys; from jetrl_jax.record.run_directory import RunDirectory\n"
        "try: RunDirectory.create(sys.argv[1], resume=True)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(run.path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "UserError run directory: in use by another run" in other.stdout
    assert f"process {os.getpid()} on " in other.stdout
    run.close()
    run.close()
    RunDirectory.create(tmp_path / "a", resume=True).close()


def test_create_takes_over_the_lock_of_a_killed_run(tmp_path: Path) -> None:
    """Even where a worker that the run had forked is still alive."""
    code = (
        "import os, sys, time; from jetrl_jax.record.run_directory import RunDirectory\n"
        "run = RunDirectory.create(sys.argv[1]); run.write_config('seed: 0')\n"
        "child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        warnings: list[str] = []
        try:
            with RunDirectory.create(tmp_path / "a", resume=True, warn=warnings.append) as run:
                assert run.resumed
        finally:
            os.kill(worker, signal.SIGKILL)
    assert len(warnings) == 1
    assert f"locked by process {process.pid}" in warnings[0]
    RunDirectory.create(tmp_path / "a", resume=True, warn=warnings.append).close()
    assert len(warnings) == 1  # a lock that was released is not spoken of


def test_create_removes_half_written_files(tmp_path: Path) -> None:
    path = begun(tmp_path / "a")
    (path / ".config.yaml.partial-77").write_text("se")
    RunDirectory.create(path, resume=True).close()
    assert not list(path.glob(".*partial*"))


def test_atomic_write_leaves_the_old_file_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    atomic_write(path, "old")
    monkeypatch.setattr(run_directory.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        atomic_write(path, "new")
    assert path.read_text() == "old"


def test_environment_keeps_every_start(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a") as run:
        environment = collect_environment(["train", "--config", "c.yaml"])
        run.write_environment(environment)
        run.write_environment({"command": ["second"]})
        run.add_to_environment({"rollout_engine": {"mode": "jax"}})
        starts = json.loads((run.path / "environment.json").read_text())["starts"]
    assert starts[0] == environment
    assert starts[1] == {"command": ["second"], "rollout_engine": {"mode": "jax"}}
    assert environment["packages"]["jax"] and environment["packages"]["orbax-checkpoint"]
    assert environment["backend"] == "cpu" and environment["device_count"] >= 1
    assert environment["command"] == ["train", "--config", "c.yaml"]


def test_git_state_knows_commit_and_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    file = tmp_path / "module.py"
    file.write_text("a = 1\n")
    assert git_state(file) == {"commit": None, "dirty": None}  # no repository
    git("init", "-q")
    assert git_state(file) == {"commit": None, "dirty": None}  # in a repository that does not track it
    git("add", "module.py")
    git("commit", "-q", "-m", "one")
    assert git_state(file) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    file.write_text("a = 2\n")
    assert git_state(file)["dirty"] is True


def test_samples_are_written_and_truncated_by_step(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a") as run:
        for step in (1, 2, 3):
            samples = [
                {"prompt": f"{step}+1=", "completion": "ü\ud800\n", "answer": "2", "reward": np.float32(0.5)},
                {"reward": np.nan},
            ]
            run.append_samples(step, samples)
        with open(run.samples_path, "ab") as file:
            file.write(b'{"step": 3, "prom')  # a kill
        assert [row["step"] for row in read_jsonl(run.samples_path)] == [1, 1, 2, 2, 3, 3]
        run.truncate_after(2)
        run.append_samples(3, [])
        run.append_samples(3, [{"reward": 1.0}])
        rows = read_jsonl(run.samples_path)
    assert [row["step"] for row in rows] == [1, 1, 2, 2, 3]
    assert rows[0] == {"step": 1, "prompt": "1+1=", "completion": "ü\ud800\n", "answer": "2", "reward": 0.5}
    assert rows[1]["reward"] is None


@pytest.mark.parametrize(
    "tail", [b"", b'{"step": 4, "a"', b'{"step": 4}', b"\0\0\0\0", b"\xff\xfe\n", b"[4]\n", b'{"a": 1}\n']
)
@pytest.mark.parametrize("step", [-1, 0, 2, 99])
def test_truncate_jsonl_keeps_whole_rows_up_to_the_step(tmp_path: Path, tail: bytes, step: int) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [b'{"step": 1, "a": 1}\n', b'{"step": 2, "a": 1}\n', b'{"step": 3, "a": 1}\n']
    path.write_bytes(b"".join(rows) + tail)
    kept = min(3, max(0, step))
    assert truncate_jsonl(path, step) == (kept or None)
    assert path.read_bytes() == b"".join(rows[:kept])


def test_truncate_jsonl_of_no_file() -> None:
    assert truncate_jsonl(Path("no-such-file.jsonl"), 3) is None


def test_read_jsonl_raises_on_a_broken_line_between_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"rows.jsonl:2"):
        read_jsonl(path)
    path.write_bytes(b'{"step": 1}\n\0\0\0\0\n\0\0')  # zeros at the end are what a power cut leaves
    assert read_jsonl(path) == [{"step": 1}]


def test_json_value_turns_everything_into_json() -> None:
    value = {
        "a": (np.int64(3), jnp.float32(0.5)),
        "b": [float("nan"), np.array([1.0, np.inf])],
        1: Path("x"),
        "t": True,
        "n": None,
    }
    expected = {"a": [3, 0.5], "b": [None, [1.0, None]], "1": "x", "t": True, "n": None}
    assert json_value(value) == expected
    assert json.loads(json.dumps(json_value(value), allow_nan=False)) == expected


def test_bad_batch_is_saved_with_the_values_of_narrow_types(tmp_path: Path) -> None:
    arrays = {
        "token_ids": np.arange(6, dtype=np.int32).reshape(2, 3),
        "advantages": jnp.array([[1.0, np.nan]], jnp.float32),
        "hidden": jnp.array([1.5, -0.0], jnp.bfloat16),
        "codes": jnp.array([448.0, np.nan], jnp.float8_e4m3fn),
        "mask": np.array([True, False]),
    }
    with RunDirectory.create(tmp_path / "a") as run:
        path = run.save_bad_batch(12, "gradient/layers.0.mlp up_proj", arrays)
        assert path == run.bad_batches / "step_000012_gradient_layers.0.mlp_up_proj.npz"
        with np.load(path) as loaded:
            assert set(loaded) == set(arrays)
            assert loaded["hidden"].dtype == np.float32 and loaded["codes"].dtype == np.float32
            for name, array in arrays.items():
                np.testing.assert_array_equal(loaded[name], np.asarray(array, loaded[name].dtype))
        assert [entry.name for entry in run.bad_batches.iterdir()] == [path.name]


def test_bad_batches_do_not_fill_the_disk(tmp_path: Path) -> None:
    warnings: list[str] = []
    with RunDirectory.create(tmp_path / "a", warn=warnings.append) as run:
        for step in range(MAX_BAD_BATCHES):
            assert run.save_bad_batch(step, "loss", {"x": np.zeros(1)})
        assert run.save_bad_batch(0, "loss", {"x": np.ones(1)})  # replayed after a resume: replaced
        assert run.save_bad_batch(MAX_BAD_BATCHES, "loss", {"x": np.zeros(1)}) is None
        assert len(list(run.bad_batches.iterdir())) == MAX_BAD_BATCHES
    assert len(warnings) == 1
    assert f"step {MAX_BAD_BATCHES}: loss" in warnings[0]


def test_a_draft_head_of_another_policy_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    def refuse() -> None:
        raise UserError("read_draft_head: another policy's")

    config = RunConfig.model_validate({"run": {"directory": str(tmp_path / "run")}})
    parts: Any = SimpleNamespace(config=config, console=Console(), new_drafter=refuse)
    with contextlib.ExitStack() as stack, pytest.raises(UserError, match="another policy's"):
        Run(parts, stack, resume=False)
    assert list(tmp_path.iterdir()) == []
