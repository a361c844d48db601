"""How a watched process may end, and what its parent makes of it; without JAX's runtime, which
`test_two_processes.py` starts.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jetrl_jax.config.devices import DistributedSection
from jetrl_jax.devices import processes
from jetrl_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
PREAMBLE = """
import json, os, signal, sys, time
from jetrl_jax.commands.entry import run_entry_point
from jetrl_jax.config.devices import DistributedSection
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.commands.supervise import supervise

def native(text):
    os.write(2, text.encode())

def command(body):
    exec(f"def work(): {body}", globals())
    assert "jax" not in sys.modules
    run_entry_point(lambda words: supervise(DistributedSection(processes=2, timeout_s=9), work))
"""
# Each body as a process of its own, all at once: a worker that fails lingers.
ALL_OF_THEM = """
children = {}
for directory, body in json.loads(sys.argv.pop()):
    if not (child := os.fork()):
        for descriptor, name in ((1, "output"), (2, "errors")):
            os.dup2(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        command(body)
    children[child] = directory
for child, directory in children.items():
    with open(f"{directory}/status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
LOST = (
    "stopped: distributed: another process of the run ended, or was silent for "
    "distributed.timeout_s = 9 s; its own output may say why"
)
FATAL = (
    "native('Terminating process because the JAX distributed service detected fatal errors. "
    "{rpc}'); os.abort()"
)


ENDS = [
    ("print('done'); native('noise'); return 0", 0, ""),
    ("native('noise'); return 143", 143, ""),
    ("native('noise'); raise UserError('bad input')", 2, "error: bad input\n"),
    ("native('noise'); raise RunStopped('no more')", 3, "stopped: no more\n"),
    (FATAL.format(rpc=""), 4, LOST),
    (
        FATAL.format(rpc="RPC: RegisterTask"),
        4,
        "stopped: distributed: not all processes had joined within distributed.timeout_s = 9 s.\n",
    ),
    (
        "native('a check failed'); os.abort()",
        134,
        "stopped: distributed: this process was ended by SIGABRT.\na check failed\n",
    ),
    (
        "native('noise'); os.kill(os.getpid(), signal.SIGKILL)",
        137,
        "stopped: distributed: this process was ended by SIGKILL.\n",
    ),
    ("native('a hint'); raise ArithmeticError('a bug')", 1, "ArithmeticError: a bug\na hint\n"),
    ("raise ValueError('Gloo AllGather failed: Connection closed by peer')", 1, "closed by peer\n"),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A directory for each of `ENDS`, with its status and what it wrote."""
    directories = [tmp_path_factory.mktemp("end") for _ in ENDS]
    bodies = json.dumps(
        [(str(directory), body) for directory, (body, *_) in zip(directories, ENDS, strict=True)]
    )
    subprocess.run(
        [sys.executable, "-c", PREAMBLE + ALL_OF_THEM, bodies], env=ENVIRONMENT, check=True, timeout=120
    )
    return directories


def start(body: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"{PREAMBLE}command({body!r})"]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("index", "status", "message"), [(index, *end[1:]) for index, end in enumerate(ENDS)]
)
def test_end_of_the_worker_is_one_message_and_a_status(
    ended: list[Path], index: int, status: int, message: str
) -> None:
    """What native code wrote is shown where nothing else explains the end; a collective cannot fail where
    there is one process.
    """
    found, output, errors = ((ended[index] / name).read_text() for name in ("status", "output", "errors"))
    assert int(found) == status, errors
    assert message in errors and ("noise" not in errors) and output == ("done\n" if status == 0 else "")
    assert ("Traceback" in errors) == (status == 1) and (message or not errors)


def test_signals_are_passed_on() -> None:
    process = start(
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked', flush=True), os._exit(143))); "
        "print('up', flush=True); time.sleep(60)"
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "asked\n" and process.returncode == 143


def test_worker_ends_with_its_parent() -> None:
    process = start("print(os.getpid(), flush=True); time.sleep(60)")
    assert process.stdout is not None
    worker = Path("/proc") / process.stdout.readline().strip()
    process.kill()
    process.communicate(timeout=60)  # until the worker's end of the pipe is closed too
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and worker.exists() and " Z " not in (worker / "stat").read_text():
        time.sleep(0.01)
    assert not worker.exists() or " Z " in (worker / "stat").read_text()


def test_coordinators_port_of_another_run_is_refused() -> None:
    # as gRPC listens: the port may be shared
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        section = DistributedSection(
            processes=2, process_id=0, coordinator=f"127.0.0.1:{other.getsockname()[1]}", timeout_s=5
        )
        with pytest.raises(UserError, match="the coordinator's port is taken"):
            processes.start(section)
