"""SIGINT and SIGTERM as a wish to stop after the step,
which all processes of a run come to at the same step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from jetrl_jax.devices import processes

# a batch system signals a process and the parent that passes signals on to it: the two are one request
ONE_REQUEST_S = 1.0


class StopSignals:
    """The stop signal that this process got, and the one that the run heeds;
    a second one ends the process at once.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.received: int | None = None
        self._warn = warn
        self._at = 0.0

    def agreed(self) -> int | None:
        """The signal that any process got so far; all processes must ask, and get the same answer."""
        return max(
            (number for number in processes.exchange_json(self.received) if number is not None), default=None
        )

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Answers the signals in the block, those of a block before forgotten;
        off the main thread the caller does.
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
