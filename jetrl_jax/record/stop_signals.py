"""SIGINT and SIGTERM as requests to stop after the current step, the same step in all processes of a run."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from jetrl_jax.devices import processes

# A batch system may signal both a process and the parent that passes signals on; both count as one request.
ONE_REQUEST_S = 1.0


class StopSignals:
    """The stop signal that this process has received; a second one ends the process at once."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.received: int | None = None
        self._warn = warn
        self._at = 0.0

    def agreed(self) -> int | None:
        """A signal that any process has received; all processes must call this, and get the same answer."""
        return max(
            (number for number in processes.exchange_json(self.received) if number is not None), default=None
        )

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handles the signals within the block; outside the main thread the caller's handlers stay.

        Signals received in an earlier block are forgotten.
        """
        self.received = None
        try:
            before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: Any) -> None:
        if self.received is not None:
            if processes.count() > 1 and time.monotonic() - self._at < ONE_REQUEST_S:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = number
        self._at = time.monotonic()
        self._warn(f"{signal.Signals(number).name}: finishing the step, then saving; once more ends at once")
