"""Calls a function in a child process with limits of time, memory and output.

The child is a fork, so the function need not be importable and starts at once.  The caller must be small and
have one working thread, as a worker process has.  The call cannot change the caller, end it or outlast its
limit.  This limits accidents of a policy's code.  It is no security boundary: the child has the files and the
network of its caller.
Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Limits:
    """Limits of one call.

    timeout_s: on the clock; processor time has the same limit, rounded up to seconds.
    memory_mb: beyond that of the caller; output_chars: longest text that is returned, its end is left out.
    """

    timeout_s: float = 5.0
    memory_mb: int = 256
    output_chars: int = 4096


@dataclass(frozen=True)
class Outcome:
    """The text of a call's result, or of its error."""

    text: str
    error: bool


class _Begin(io.TextIOBase):
    """Takes any text and keeps its beginning."""

    def __init__(self, chars: int) -> None:
        self.parts: list[str] = []
        self._left = chars

    def write(self, text: str) -> int:
        if self._left > 0:
            self.parts.append(text[: self._left])
            self._left -= len(text)
        return len(text)


def call_with_limits(function: Callable[..., Any], arguments: dict[str, Any], limits: Limits) -> Outcome:
    """``str(function(**arguments))`` after the text that it printed, or how it failed."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():  # of a fork beside threads; the worker's only other thread sleeps
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(ours)
        _child(function, arguments, limits, theirs)
    os.close(theirs)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # in both, as either may come first
    try:
        received = _read(ours, time.monotonic() + limits.timeout_s)
    finally:
        os.close(ours)
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if received is None:
        return Outcome(f"no answer within {limits.timeout_s:g} s", True)
    if not received:
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return Outcome(f"its process ended: {how}", True)
    return Outcome(received[1:].decode("utf-8", "replace"), received[:1] == b"!")


def _child(function: Callable[..., Any], arguments: dict[str, Any], limits: Limits, pipe: int) -> None:
    """Runs the call and writes one mark and a text; does not return."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        seconds = int(limits.timeout_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * _PAGE
        most = size + (limits.memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_REAL, limits.timeout_s + 1)  # if the caller is killed meanwhile
        printed = _Begin(limits.output_chars)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                value = function(**arguments)
            mark, text = b".", "" if value is None else str(value)
        except BaseException as error:
            mark, text = b"!", "".join(traceback.format_exception_only(error)).strip()
        shown = ("".join(printed.parts) + text)[: limits.output_chars]
        payload = mark + shown.encode("utf-8", "replace")
        while payload:
            payload = payload[os.write(pipe, payload) :]
        status = 0
    finally:
        os._exit(status)


def _read(pipe: int, deadline: float) -> bytes | None:
    """All that comes through a pipe; None if its end does not come before the deadline."""
    parts = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return None
        piece = os.read(pipe, 1 << 16)
        if not piece:
            return bytes(parts)
        parts += piece
