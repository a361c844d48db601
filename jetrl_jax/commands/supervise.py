"""One process of several under a watch that imports no JAX: however the worker ends, there is one message and
a status.

When JAX's coordination service loses a process, it aborts the others from native code, with a stack trace and
no way to catch it.  So the command forks before JAX is loaded: the child runs; the parent passes signals on,
waits, and says what happened.  What native code writes to stderr is kept aside and shown only where nobody
can say what it means.

    4     another process of the run was lost, or not all were there in time
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
# a process that ends with an error takes the coordinator along: the others get to say what they found
# themselves
LINGER_S = 2.0
SHOWN_BYTES = 4000


def supervise(section: DistributedSection, work: Callable[[], int]) -> int:
    """Runs `work` in a child process, to its end; returns the exit status."""
    with tempfile.TemporaryFile() as native:
        watched, holds = os.pipe()  # the child reads the end of its parent
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
    """Prints what the worker's end means where it could not say it itself; returns the exit status."""
    if status == -signal.SIGABRT and b"distributed service" in said:
        if b"RegisterTask" in said:
            _print(
                "stopped: distributed: not all processes were there within distributed.timeout_s = "
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
    """The child, which never returns."""
    os.setpgid(0, 0)  # a Ctrl-C reaches the parent alone, which passes it on
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
    os._exit(status if isinstance(status, int) else 1)  # not by way of JAX, which would wait for the others


def _guarded(section: DistributedSection, work: Callable[[], int]) -> int:
    """`work`, then the end of all processes together; raises `ProcessLost` where another one is gone."""
    from jetrl_jax.devices import processes

    try:
        status = work()
        processes.leave()
        return status
    except Exception as error:
        if not processes.tells_of_a_lost_process(error):
            raise
        raise ProcessLost(f"{_lost(section)} ({str(error).strip().splitlines()[0]})") from error
