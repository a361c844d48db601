"""Two processes on JAX's distributed runtime: the same run as one process with their devices, and the ends it
may come to.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny import ROOT, command_environment, manifest, rows, run_here, tiny_config, train_command, write_config

from jetrl_jax.config.devices import DistributedSection
from jetrl_jax.config.load import override_config
from jetrl_jax.devices import processes
from jetrl_jax.errors import UserError

STEPS = 3
FOUR_TERMS = 2 * 3 * 2**-24  # a sum of four float32, of magnitudes that add to one, in two orders
# of distributed.timeout_s: longer than a start on a busy machine takes, and worth waiting for
PATIENT_S, SHORT_S = 120, 12
RUN = {"steps": STEPS, "tensorboard": False}
SECTIONS: dict[str, dict[str, Any] | None] = {
    "warm_start": None,
    "sharding": {"data": 2},
    "batch": {"microbatch_tokens": 56},
    "run": RUN,
}
LOST = (
    "stopped: distributed: another process of the run ended, or was silent for "
    "distributed.timeout_s = {} s; its own output"
)


@dataclass
class Ended:
    """How a process ended."""

    status: int
    output: str
    errors: str


class World:
    """Where the runs of this file live: their environment, and what they share."""

    def __init__(self, root: Path, cache: Path, *fields: str) -> None:
        self.root = root
        self.cache = cache
        self.config = write_config(
            override_config(
                tiny_config(root / "run", **SECTIONS),
                ["rewards.0.name=tiny:noted", *fields],
            ),
            root / "config.yaml",
        )

    def environment(self, notes: str, **more: str) -> dict[str, str]:
        (self.root / notes).mkdir(exist_ok=True)
        own = {"NOTES": str(self.root / notes), "JAX_NUM_CPU_DEVICES": "1"}
        return command_environment(self.cache) | own | more

    def alone(self, directory: Path, *arguments: str, devices: int = 2) -> Ended:
        command = train_command(self.config, "--set", f"run.directory={directory}", *arguments)
        environment = self.environment(f"{directory.name}.notes", JAX_NUM_CPU_DEVICES=str(devices))
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
        return Ended(done.returncode, done.stdout, done.stderr)

    def start(
        self,
        directory: Path,
        *arguments: str,
        by: Callable[[int], dict[str, str]] | None = None,
        only: int | None = None,
        timeout_s: int = PATIENT_S,
    ) -> list[subprocess.Popen[str]]:
        """Two processes (or `only` one) of the run in `directory`, told who they are by the command line, or
        `by` the environment.
        """
        sets = [
            f"run.directory={directory}",
            f"distributed.timeout_s={timeout_s}",
            f"distributed.processes={'null' if by else 2}",
        ]
        port, started = free_port(), []
        for index in (0, 1) if only is None else (only,):
            own = (
                [] if by else [f"distributed.coordinator=127.0.0.1:{port}", f"distributed.process_id={index}"]
            )
            command = train_command(
                self.config, *arguments, *(word for one in [*sets, *own] for word in ("--set", one))
            )
            environment = self.environment(f"{directory.name}.notes", **(by(index) if by else {}))
            pipe = subprocess.PIPE
            started.append(
                subprocess.Popen(command, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
            )
        return started


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ended(started: list[subprocess.Popen[str]], timeout_s: float = 300) -> list[Ended]:
    """Waits for all; each must end by itself."""
    found = []
    try:
        for process in started:
            output, errors = process.communicate(timeout=timeout_s)
            found.append(Ended(process.returncode, output, errors))
    finally:
        for process in started:
            process.kill()
    for one in found:
        assert "Traceback" not in one.errors and "stack trace" not in one.errors, one.errors
    return found


def wait_for_rows(directory: Path, count: int, started: list[subprocess.Popen[str]]) -> None:
    metrics, deadline = directory / "metrics.jsonl", time.monotonic() + 250
    while time.monotonic() < deadline and (not metrics.exists() or metrics.read_bytes().count(b"\n") < count):
        assert all(process.poll() is None for process in started), ended(started)
        time.sleep(0.01)


def exported(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (directory / "export").iterdir()}


def calls(notes: Path) -> list[list[list[str]]]:
    """By process that scored: the prompts of each call."""
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(notes.iterdir())]


@pytest.fixture(scope="module")
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compilation_cache: Path
) -> World:
    """In BF16, which compiles in half the time, without exact sums; the long tests, which compare the same, are
    exact, with keys and values in FP8.
    """
    here = [item for item in request.session.items if item.path == request.path]
    long = any(item.get_closest_marker("long") for item in here)
    fields = ("precision.preset=bf16", "precision.kv_cache=fp8" if long else "numerics.exact=false")
    return World(tmp_path_factory.mktemp("two"), compilation_cache, *fields)


@pytest.fixture(scope="module")
def single(world: World) -> Path:
    """A run of one process with two devices."""
    done = world.alone(world.root / "single")
    assert done.status == 0, done.errors
    return world.root / "single"


@pytest.fixture(scope="module")
def pair(world: World) -> tuple[Path, list[Ended]]:
    """The same run of two processes with one device each."""
    found = ended(world.start(world.root / "pair"))
    assert [one.status for one in found] == [0, 0], found
    return world.root / "pair", found


def test_two_processes_train_what_one_trains(single: Path, pair: tuple[Path, list[Ended]]) -> None:
    directory, _ = pair
    assert rows(directory) == rows(single) and [row["policy_version"] for row in rows(single)] == [
        0,
        *range(STEPS),
    ]
    assert manifest(directory) == manifest(single)
    assert exported(directory) == exported(single)
    assert (directory / "samples.jsonl").read_bytes() == (single / "samples.jsonl").read_bytes()


def test_record_is_written_once_and_names_no_process(
    world: World, pair: tuple[Path, list[Ended]], single: Path
) -> None:
    directory, (first, second) = pair
    assert (
        f"finished {STEPS} steps" in first.output
        and "step=" not in second.output + second.errors
        and "finished" not in second.output
    )
    assert {path.name for path in directory.iterdir()} == {path.name for path in single.iterdir()}
    text = (directory / "config.yaml").read_text()
    assert "processes: 2" in text and "process_id: null" in text
    environment = json.loads((directory / "environment.json").read_text())
    assert [start["processes"] for start in environment["starts"]] == [2]


def test_each_process_scores_its_own_groups(
    world: World, pair: tuple[Path, list[Ended]], single: Path
) -> None:
    whole, divided = calls(world.root / "single.notes"), calls(world.root / "pair.notes")
    assert len(whole) == 1 and len(divided) == 2
    assert [len(call) for call in whole[0]] == [16] * STEPS and [
        len(call) for one in divided for call in one
    ] == [8] * 2 * STEPS
    for step in range(STEPS):
        parts = [one[step] for one in divided]
        assert sum((Counter(part) for part in parts), Counter()) == Counter(whole[0][step])
        assert all(part[group] == part[group + 3] for part in parts for group in (0, 4)), (
            "a group is not whole"
        )


@pytest.mark.long
def test_two_processes_train_the_adapters_that_one_trains(world: World, tmp_path: Path) -> None:
    """And one process goes on with them, beside the base that two wrote."""
    adapters = ("--set", "lora={rank: 4, alpha: 4.0}", "--set", "algorithm.kl_coef=0.1")
    alone, both = tmp_path / "alone", tmp_path / "both"
    done = world.alone(alone, *adapters)
    assert done.status == 0, done.errors
    found = ended(world.start(both, *adapters))
    assert [one.status for one in found] == [0, 0], found
    assert rows(both) == rows(alone) and manifest(both) == manifest(alone)
    further = (*adapters, "--resume", "--set", f"run.steps={STEPS + 1}")
    for directory in (alone, both):
        done = world.alone(directory, *further)
        assert done.status == 0, done.errors
    assert rows(both) == rows(alone) and manifest(both) == manifest(alone)
    for file in ("base/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (both / file).read_bytes() == (alone / file).read_bytes()


@pytest.mark.long
def test_checkpoint_goes_on_with_another_number_of_processes(
    world: World, pair: tuple[Path, list[Ended]], single: Path, tmp_path: Path
) -> None:
    """From two processes to one with two devices, and back; then to one device, which restores and exports
    the same bits.
    """
    further = ("--resume", "--set", f"run.steps={STEPS + 1}")
    shutil.copytree(pair[0], tmp_path / "to_one")
    shutil.copytree(single, tmp_path / "to_two")
    done = world.alone(tmp_path / "to_one", *further)
    assert done.status == 0, done.errors
    found = ended(world.start(tmp_path / "to_two", *further))
    assert [one.status for one in found] == [0, 0], found
    assert (
        rows(tmp_path / "to_one") == rows(tmp_path / "to_two") and len(rows(tmp_path / "to_one")) == STEPS + 2
    )
    assert all(row["mismatch/logprob_abs_max"] == 0 for row in rows(tmp_path / "to_one")[1:])
    assert manifest(tmp_path / "to_one") == manifest(tmp_path / "to_two")
    assert exported(tmp_path / "to_one") == exported(tmp_path / "to_two") != exported(single)
    shutil.copytree(pair[0], tmp_path / "to_one_device")
    (tmp_path / "to_one_device" / "export" / "model.safetensors").unlink()
    done = world.alone(tmp_path / "to_one_device", "--resume", "--set", "sharding.data=1", devices=1)
    assert done.status == 0, done.errors
    assert exported(tmp_path / "to_one_device") == exported(pair[0])


@pytest.mark.long
def test_sigterm_to_one_stops_all_after_the_step_and_the_run_resumes(
    world: World, single: Path, tmp_path: Path
) -> None:
    """The processes learn who they are from the environment: from JAX's variables, then from SLURM's."""
    address = f"127.0.0.1:{free_port()}"
    started = world.start(
        tmp_path / "run",
        by=lambda i: {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(i)},
    )
    wait_for_rows(tmp_path / "run", 1, started)
    started[1].send_signal(signal.SIGTERM)
    found = ended(started)
    assert [one.status for one in found] == [128 + signal.SIGTERM] * 2, found
    last = int(rows(tmp_path / "run")[-1]["step"])
    assert last < STEPS and (tmp_path / "run" / "checkpoints" / str(last)).is_dir()
    assert f"stopped by SIGTERM after step {last}" in found[0].output
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
    }
    again = world.start(
        tmp_path / "run", "--resume", by=lambda i: slurm | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
    )
    found = ended(again)
    assert [one.status for one in found] == [0, 0], found
    assert rows(tmp_path / "run") == rows(single) and manifest(tmp_path / "run") == manifest(single)
    assert exported(tmp_path / "run") == exported(single)


@pytest.mark.long
@pytest.mark.parametrize(("victim", "fault"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_lost_process_ends_the_other_in_time(
    victim: int, fault: signal.Signals, world: World, pair: tuple[Path, list[Ended]], tmp_path: Path
) -> None:
    """Killed, or alive and silent as a machine that hangs.  Killed after a warm start: in the others the start
    policy goes straight from the processes' own devices to those of all.
    """
    timeout_s = SHORT_S if fault == signal.SIGSTOP else PATIENT_S
    long = ["--set", "run.steps=100000", "--set", "checkpoint.every_steps=1000"]
    if fault == signal.SIGKILL:
        long += ["--set", "warm_start.steps=3", "--set", "warm_start.batch_size=16"]
    started = world.start(tmp_path / "run", *long, timeout_s=timeout_s)
    wait_for_rows(tmp_path / "run", 2, started)
    worker = int(
        Path(f"/proc/{started[victim].pid}/task/{started[victim].pid}/children").read_text().split()[0]
    )
    begun = time.monotonic()
    os.kill(worker if fault == signal.SIGSTOP else started[victim].pid, fault)
    (survivor,) = ended([started[1 - victim]])
    assert survivor.status == 4 and survivor.errors.startswith(LOST.format(timeout_s)), survivor
    assert time.monotonic() - begun < timeout_s + 30
    os.kill(started[victim].pid, signal.SIGKILL)
    ended([started[victim]])  # its output ends: so did the worker, which holds the other end
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert [name for name in saved if name.isdecimal()] == ["0"]


def test_process_that_fails_says_why_and_the_other_ends(
    world: World, pair: tuple[Path, list[Ended]], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "foreign").touch()
    first, second = ended(world.start(tmp_path / "run"))
    assert first.status == 2 and first.errors.startswith(
        "error: run directory: is neither empty nor a run"
    ), first
    assert second.status == 4 and second.errors.startswith(LOST.format(PATIENT_S)), second


def test_processes_that_cannot_run_together_are_one_message(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose others never come, for real; what is refused before anything is joined, in this process."""
    names = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_PROCESS_ID": "0",
        "JAX_NUM_PROCESSES": "3",
    }
    (absent,) = ended(world.start(tmp_path / "absent", by=lambda i: names, only=0, timeout_s=5))
    assert (
        absent.status == 4
        and "not all processes had joined within distributed.timeout_s = 5 s" in absent.errors
    )
    refused = run_here(
        "jetrl_jax.train",
        "--config",
        str(world.config),
        "--verify-resume",
        "1",
        "--set",
        "distributed.processes=2",
    )
    assert refused.returncode == 2 and "verify_resume: runs in one process" in refused.stderr
    # as where a run starts
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    with pytest.raises(UserError, match="got coordinator=None, processes=2, process_id=None"):
        processes.start(DistributedSection(processes=2))
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(UserError, match="got JAX_NUM_PROCESSES='two'"):
        processes.start(DistributedSection(processes=None, coordinator="127.0.0.1:1", process_id=1))
    assert not (tmp_path / "absent").exists()


def test_other_configs_and_devices_that_cannot_be_shared_are_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What two processes would tell each other, without them."""
    monkeypatch.setattr(processes, "exchange_json", lambda text: ["a: 1\nseed: 0\n", text])
    processes.check_same("config", "a: 1\nseed: 0\n")
    with pytest.raises(
        UserError, match=r"process 1 has another config: got 'seed: 1', expected 'seed: 0' as process 0\."
    ):
        processes.check_same("config", "a: 1\nseed: 1\n")
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(UserError, match="devices are not shared evenly: got 1 groups of 1 and 2 processes"):
        processes.mesh_devices(1, 1)


@pytest.mark.long
def test_processes_with_other_configs_are_refused(world: World, tmp_path: Path) -> None:
    names = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    started = [
        world.start(
            tmp_path / "run",
            "--set",
            f"seed={seed}",
            by=lambda i: names | {"JAX_PROCESS_ID": str(i)},
            only=seed,
        )[0]
        for seed in (0, 1)
    ]
    for one in ended(started):
        assert one.status == 2, one
        assert (
            "distributed: process 1 has another config: got 'seed: 1', expected 'seed: 0' as process 0."
            in one.errors
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_two_devices_in_each_of_two_processes_step_as_four_in_one(world: World, tmp_path: Path) -> None:
    """Data parallel over the processes, fully sharded within them: the same but for the order of sums; and
    what is sampled where.
    """
    section = {
        "precision": {"preset": "fp32"},
        "numerics": {"exact": False},
        "sharding": {"data": 2, "fsdp": 2},
        "warm_start": None,
    }
    config = write_config(
        tiny_config(tmp_path / "run", **section, batch={"microbatch_tokens": 28}), tmp_path / "config.yaml"
    )
    command = [sys.executable, str(Path(__file__).with_name("process_probe.py")), str(config)]

    def start(devices: int, *sets: str) -> subprocess.Popen[str]:
        environment = world.environment("probe.notes", JAX_NUM_CPU_DEVICES=str(devices))
        return subprocess.Popen(
            [*command, *sets],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    address = f"distributed.coordinator=127.0.0.1:{free_port()}"
    both = [start(2, "distributed.processes=2", address, f"distributed.process_id={i}") for i in (0, 1)]
    found = [*ended([start(4)]), *ended(both)]
    assert [one.status for one in found] == [0, 0, 0], found
    alone, first, second = (
        json.loads(one.output[one.output.index("PROBE ") + 6 :].splitlines()[0]) for one in found
    )
    assert first["rows"] == second["rows"]
    for ours, theirs in zip(first["rows"], alone["rows"], strict=True):
        assert ours == pytest.approx(theirs, rel=FOUR_TERMS, abs=FOUR_TERMS)
    shares = sorted([list(range(4 * i, 4 * i + 4)) for i in range(4)] * 2)
    assert sorted(alone["asked"]) == shares
    assert sorted(first["asked"]) == [share for share in shares if share[0] < 8]
    assert sorted(second["asked"]) == [share for share in shares if share[0] >= 8]
    assert first["parts"] == second["parts"] == [[[], "int16", ""], [[0, 1, 2], "int16", "ü"]]
    assert first["values"] == second["values"] == [{"own": 0}, {"own": 1}] and alone["message"] == ""
    assert (
        first["message"]
        == second["message"]
        == "distributed: process 1 has another colour: got 'blue', expected 'red' as process 0."
    )
