"""Runs a command, vLLM's server, and ends it with all its children when standard input closes.

So the server never outlives its trainer, since the kernel closes the trainer's end of the pipe however the
trainer ends.  The command has its own process group, which gets SIGTERM and, if needed, SIGKILL.  This file
runs as a script, so that it imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 10.0


def main(command: list[str]) -> int:
    """Waits until the command ends or standard input closes; returns the command's status."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def watch() -> None:
        while sys.stdin.buffer.read(1):
            pass
        _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        _signal(process, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    status = process.wait()
    _signal(process, signal.SIGKILL)  # children that the command left behind
    return status


def _signal(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the trainer decides when the server ends
        signal.signal(ignored, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:]))
