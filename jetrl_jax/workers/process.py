"""The trainer's side of a worker process: it starts the worker, sends calls, and kills and restarts it.

    WorkerProcess     a process and its frames
    RewardProcess     a reward function, which has no memory: any worker may take any call

A call that exceeds its time limit is killed with everything that it has started (the worker leads its own
process group).  A call that ends its process is noticed at once.  The next call gets a new worker, so only
the sample at fault is lost.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from jetrl_jax.errors import UserError
from jetrl_jax.workers import worker

START_TIMEOUT_S = 300.0  # to import the reward's module; calls have their own limit
MAX_HANGS, MAX_CRASHES = 8, 64  # per batch; after them its remaining samples are given up
_LOG_BYTES = 16 << 20  # size at which a worker's log is emptied
_FRAME_BYTES = 1 << 30


@dataclass
class Scores:
    """One reward per sample; ``failed``: index -> cause ("exception", "timeout", "none" or "nan")."""

    values: list[float | None]
    failed: dict[int, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


class TimedOut(Exception):
    """A worker did not answer in time."""


class Crashed(Exception):
    """A worker's process ended; the text says how."""


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    """Kills a worker and everything that it has started; does nothing in a fork of the trainer."""
    if os.getpid() != owner:
        return
    connection.close()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


class WorkerProcess:
    """A worker process, which the first call starts and ``close`` ends.

    kind, name: for messages and the file of its output, such as reward and module:function.
    start_message: its first message, which tells the worker its task.
    timeout_s: limit of one call.
    hint: the end of the message about a broken contract.
    """

    hint = ""

    def __init__(
        self,
        kind: str,
        name: str,
        start_message: Mapping[str, Any],
        timeout_s: float,
        log_directory: str | Path | None = None,
    ):
        self.what = f"{kind} {name}"
        self._timeout_s = timeout_s
        self._start_message = dict(start_message)
        self._log_directory = log_directory
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._finalizer: Any = None
        self._ready: dict[str, Any] = {}

    def start(self) -> None:
        """Starts the worker, which loads its function; raises `UserError` if that fails."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        log = self._open_log()
        # only the trainer may use the accelerator
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", worker.__file__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self._connection = ours
        self._finalizer = weakref.finalize(self, _end, self._process, ours, os.getpid())
        path = list(sys.path) if os.getcwd() in sys.path or "" in sys.path else [*sys.path, os.getcwd()]
        try:
            self._send({**self._start_message, "sys_path": path}, START_TIMEOUT_S)
            self._ready = self._receive(START_TIMEOUT_S)
        except TimedOut:
            self._stop()
            raise UserError(f"{self.what}: not loaded within {START_TIMEOUT_S:.0f} s.") from None
        except Crashed as error:
            raise UserError(f"{self.what}: its process ended while it was loaded: {error}") from None
        if "bad" in self._ready:
            self._stop()
            raise UserError(f"{self.what}: {worker.BadReward(*self._ready['bad']).sentence()}{self.hint}")

    def close(self) -> None:
        """Ends the worker; a later call starts another."""
        self._stop()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _awake(self) -> None:
        """A running worker with a short log, for a batch of calls."""
        self._trim_log()
        if self._process is not None and self._process.poll() is not None:  # died between two batches
            self._stop()
        self.start()

    def _send(self, message: dict[str, Any], timeout_s: float) -> None:
        try:
            payload = pickle.dumps(message)
        except Exception as error:
            raise UserError(
                f"{self.what}: its arguments cannot be sent to a worker process: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._send_frame(payload, timeout_s)

    def _send_json(self, message: Mapping[str, Any], timeout_s: float) -> None:
        self._send_frame(json.dumps(message).encode(), timeout_s)

    def _send_frame(self, payload: bytes, timeout_s: float) -> None:
        assert self._connection is not None
        self._connection.settimeout(timeout_s)
        try:
            worker.send_frame(self._connection, payload)
        except TimeoutError:
            raise TimedOut from None
        except OSError:
            raise Crashed(self._death()) from None

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        length = int.from_bytes(self._read(8, deadline), "big")
        if length > _FRAME_BYTES:
            raise Crashed(self._death())
        try:
            message = json.loads(self._read(length, deadline))
        except ValueError:
            raise Crashed(self._death()) from None
        return dict(message)

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._connection is not None and self._process is not None
        parts = bytearray()
        while len(parts) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut
            self._connection.settimeout(min(left, 0.2))
            try:
                piece = self._connection.recv(count - len(parts))
            except TimeoutError:
                if self._process.poll() is not None:  # dead, although its child may hold the socket open
                    raise Crashed(self._death()) from None
                continue
            except OSError:
                piece = b""
            if not piece:
                raise Crashed(self._death())
            parts += piece
        return bytes(parts)

    def _death(self) -> str:
        """Ends the rest of the worker; returns how it died and the end of its log."""
        process, log = self._process, self._log
        if process is None:
            return "gone"
        try:
            status: int | None = process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            status = None
        self._stop()
        tail = ""
        if log is not None:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 1200))
            tail = log.read().decode("utf-8", "replace").strip()
        how = (
            "it closed its connection"
            if status is None
            else f"signal {-status}"
            if status < 0
            else f"exit status {status}"
        )
        return how + (f"; its last output: {tail!r}" if tail else "")

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._connection = self._finalizer = None

    def _open_log(self) -> IO[bytes]:
        """The file of the worker's output: in ``log_directory`` if given, else a temporary one."""
        if self._log is None:
            if self._log_directory is None:
                self._log = tempfile.TemporaryFile("ab+")
                # so that the worker appends wherever the trainer reads
                fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)
            else:
                safe = "".join(
                    c if c.isalnum() or c in "._-" else "_" for c in self.what.replace(" ", "-", 1)
                )
                self._log = (Path(self._log_directory) / f"{safe}.log").open("ab+")
        return self._log

    def _trim_log(self) -> None:
        """Empties a log that has grown beyond 16 MiB."""
        if self._log is not None and os.fstat(self._log.fileno()).st_size > _LOG_BYTES:
            self._log.truncate(0)


class RewardProcess(WorkerProcess):
    """One reward function in a worker process.

    Give one of target (``module:function``) and pickled (a pickled ``(completion, example) -> number``).
    timeout_s: limit of one call.
    """

    def __init__(
        self,
        name: str,
        *,
        target: str | None,
        pickled: bytes | None,
        timeout_s: float,
        log_directory: str | Path | None = None,
    ):
        super().__init__(
            "reward", name, {"target": target, "pickled": pickled}, timeout_s, log_directory=log_directory
        )

    def score(self, columns: Mapping[str, Sequence[Any]], count: int) -> Scores:
        """The rewards of a batch by one call; one by one if it fails, or if the function is per sample."""
        scores = Scores([None] * count)
        self._awake()
        if not self._ready["per_sample"]:
            outcome = self._whole_batch(columns, count)
            if "values" in outcome:
                scores.values = outcome["values"]
                return scores
            scores.messages.append(outcome["message"])
            if count == 1:
                scores.failed[0] = outcome["failed"]
                return scores
        self._one_by_one(columns, count, scores)
        return scores

    def _whole_batch(self, columns: Mapping[str, Sequence[Any]], count: int) -> dict[str, Any]:
        try:
            self._request(columns, range(count), step=count)
            return self._checked(self._receive(self._timeout_s), columns, range(count))
        except TimedOut:
            self._stop()
            return {
                "failed": "timeout",
                "message": f"no answer for {count} completions within {self._timeout_s:g} s",
            }
        except Crashed as error:
            return {"failed": "exception", "message": f"its process ended: {error}"}

    def _one_by_one(self, columns: Mapping[str, Sequence[Any]], count: int, scores: Scores) -> None:
        pending, hangs, crashes = list(range(count)), 0, 0
        while pending:
            if hangs >= MAX_HANGS or crashes >= MAX_CRASHES:
                kind = "timeout" if hangs >= MAX_HANGS else "exception"
                scores.failed.update(dict.fromkeys(pending, kind))
                scores.messages.append(
                    f"gave up on {len(pending)} completions after {hangs} time-outs and {crashes} "
                    "crashes in one batch"
                )
                return
            done = 0
            try:
                self.start()
                self._request(columns, pending, step=1)
                for index in pending:
                    outcome = self._checked(self._receive(self._timeout_s), columns, [index])
                    done += 1
                    if "values" in outcome:
                        scores.values[index] = outcome["values"][0]
                    else:
                        scores.failed[index] = outcome["failed"]
                        scores.messages.append(outcome["message"])
            except TimedOut:
                self._stop()
                hangs += 1
                scores.failed[pending[done]] = "timeout"
                scores.messages.append(f"no answer within {self._timeout_s:g} s")
                done += 1
            except Crashed as error:
                crashes += 1
                scores.failed[pending[done]] = "exception"
                scores.messages.append(f"its process ended: {error}")
                done += 1
            pending = pending[done:]

    def _request(self, columns: Mapping[str, Sequence[Any]], indices: Sequence[int], step: int) -> None:
        chosen = {key: [columns[key][i] for i in indices] for key in self._ready["columns"]}
        self._send({"columns": chosen, "count": len(indices), "step": step}, self._timeout_s)

    def _checked(
        self, outcome: dict[str, Any], columns: Mapping[str, Sequence[Any]], indices: Sequence[int]
    ) -> dict[str, Any]:
        if "bad" in outcome:
            self._stop()  # further replies to this request must not answer the next
            raise UserError(f"{self.what}: {worker.BadReward(*outcome['bad']).sentence(columns, indices)}")
        return outcome
