"""Watches one process of a run on several processes, so that every end gives one message and an exit status.

When JAX's coordination service loses a process, it aborts the others from native code, with a stack trace
that cannot be caught.  So the command forks before JAX is loaded.  The child runs; the parent, which never
imports JAX, passes signals on, waits, and reports how the child ended.  The child's native stderr is held
back and shown only if the end has no known explanation.

    4     another process of the run was lost, or some did not start in time
    128+n the worker was ended by signal n
    else  the worker's own exit status
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO

from jetrl_jax.commands.entry import run_entry_point
from jetrl_jax.config.devices import DistributedSection
from jetrl_jax.errors import ProcessLost

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
# A process that ends with an error may take the coordinator with it.  It waits this long, so that the others
# can first report their own errors.
LINGER_S = 2.0
SHOWN_BYTES = 4000


def supervise(section: DistributedSection, work: Callable[[], int]) -> int:
    """Runs `work` in a child process until it ends; returns the exit status."""
    with tempfile.TemporaryFile() as native:
        watched, holds = os.pipe()  # the child notices here that its parent has ended
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        child = os.fork()
        if child == 0:
            os.close(holds)
            _work(section, work, native, watched)
        os.close(watched)
        for number in PASSED_ON:
            signal.signal(number, lambda number, frame: _pass_on(child, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(holds)
        if status in (0, 2, ProcessLost.exit_code):
            return status
        native.seek(0)
        return _explain(section, status, native.read())


def _pass_on(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _explain(section: DistributedSection, status: int, said: bytes) -> int:
    """Prints why the worker ended if it could not print that itself; returns the exit status."""
    if status == -signal.SIGABRT and b"distributed service" in said:
        if b"RegisterTask" in said:
            _print(
                "stopped: distributed: not all processes had joined within distributed.timeout_s = "
                f"{section.timeout_s} s."
            )
        else:
            _print(f"stopped: {_lost(section)}")
        return ProcessLost.exit_code
    if status < 0:
        _print(f"stopped: distributed: this process was ended by {signal.Signals(-status).name}.")
    if said and status in (1, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
        _print(said[-SHOWN_BYTES:].decode(errors="replace"))
    return status if status >= 0 else 128 - status


def _lost(section: DistributedSection) -> str:
    return (
        "distributed: another process of the run ended, or was silent for distributed.timeout_s = "
        f"{section.timeout_s} s; its own "
        "output may say why. Go on with --resume."
    )


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _work(section: DistributedSection, work: Callable[[], int], native: IO[bytes], watched: int) -> None:
    """Runs `work` as the child; never returns."""
    os.setpgid(0, 0)  # a Ctrl-C reaches only the parent, which passes it on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    os.dup2(native.fileno(), 2)
    threading.Thread(
        target=lambda: os.read(watched, 1) or os._exit(ProcessLost.exit_code), daemon=True
    ).start()
    status: object = 1
    try:
        run_entry_point(lambda words: _guarded(section, work))
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    if status in (1, 2, 3):
        time.sleep(LINGER_S)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if isinstance(status, int) else 1)  # skips JAX's exit hooks, which wait for the others


def _guarded(section: DistributedSection, work: Callable[[], int]) -> int:
    """Runs `work`, then leaves together with the others; raises `ProcessLost` if another process is lost."""
    from jetrl_jax.devices import processes

    try:
        status = work()
        processes.leave()
        return status
    except Exception as error:
        if not processes.tells_of_a_lost_process(error):
            raise
        raise ProcessLost(f"{_lost(section)} ({str(error).strip().splitlines()[0]})") from error
