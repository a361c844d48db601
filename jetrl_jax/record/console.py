"""The console output of a run: one progress line per phase and one table row per step.

On a terminal it draws a live area (rich) with a line for each phase of the step (done, rate, time left),
below a growing table of steps.  Elsewhere it prints one plain line per step, ``step=12 steps=200
reward/mean=0.53125 …`` (keys and order as in `COLUMNS`, missing values left out), and a ``phase=…`` line
every 30 seconds of a long phase.  Warnings and messages are separate lines.

The console never stops a run.  A character that the stream cannot show is replaced, and if the stream is
gone (a closed pipe, a lost terminal) the console falls silent.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

PLAIN_PROGRESS_EVERY_S = 30.0
HEADER_EVERY_ROWS = 25


@dataclass(frozen=True)
class Column:
    """One column of the table of steps."""

    heading: str
    metric: str
    format: str
    width: int


COLUMNS: tuple[Column, ...] = (
    Column("reward", "reward/mean", ".4f", 8),
    Column("accuracy", "eval/accuracy", ".4f", 8),
    Column("greedy", "eval/greedy_accuracy", ".4f", 8),
    Column("length", "length/completion_tokens_mean", ".1f", 7),
    Column("k3", "mismatch/k3", ".2e", 9),
    Column("|dlogp|", "mismatch/logprob_abs_mean", ".2e", 9),
    Column("entropy", "policy/entropy", ".3f", 7),
    Column("grad", "optimizer/grad_norm", ".3g", 8),
    Column("rollout t/s", "rate/rollout_tokens_per_s", ".0f", 11),
    Column("train t/s", "rate/train_tokens_per_s", ".0f", 9),
    Column("seconds", "time/step_s", ".2f", 8),
)


def print_warning(message: str) -> None:
    """Prints ``warning: message`` to standard error; the default of every ``warn`` argument here."""
    _print(sys.stderr, f"warning: {message}")


class Phase:
    """A running phase of a step; `advance` counts the work done."""

    def __init__(self, on_advance: Callable[[float], None]) -> None:
        self._on_advance = on_advance
        self.done = 0.0

    def advance(self, n: float = 1) -> None:
        """Counts ``n`` more units of work (the unit of `Console.phase`)."""
        self.done += n
        self._on_advance(n)


class Console:
    """The console of a run; a context manager that leaves the terminal as it was.

    ``steps``: steps of the run; None if unknown.  ``stream``: by default, standard output.  ``live``: whether
    to draw; by default, if the stream is a terminal that can move its cursor.
    """

    def __init__(
        self, steps: int | None = None, *, stream: TextIO | None = None, live: bool | None = None
    ) -> None:
        self._steps = steps
        self._stream = sys.stdout if stream is None else stream
        self._rows = 0
        self._live: _Live | None = None
        if live is None or live:
            self._guarded(lambda: self._start(force=bool(live)))

    def _start(self, force: bool) -> None:
        from rich.console import Console as RichConsole

        terminal = RichConsole(
            file=self._stream, force_terminal=True if force else None, highlight=False, soft_wrap=False
        )
        if terminal.is_terminal and not terminal.is_dumb_terminal:
            self._live = _Live(terminal)

    @contextlib.contextmanager
    def phase(self, name: str, total: float | None = None, unit: str = "") -> Iterator[Phase]:
        """Shows phase ``name`` while the block runs; its work is ``total`` (None: unknown) ``unit``."""
        reporter = self._live or _PlainProgress(self._write)
        self._guarded(lambda: reporter.begin(name, total, unit))
        try:
            yield Phase(lambda n: self._guarded(lambda: reporter.advance(name, n)))
        finally:
            self._guarded(lambda: reporter.end(name))

    def step(self, row: Mapping[str, Any]) -> None:
        """Shows the row of a step: its metrics, ``step`` included."""
        if self._live is None:
            parts = [f"step={row['step']}", *([f"steps={self._steps}"] if self._steps is not None else [])]
            parts += [
                f"{column.metric}={_cell(row[column.metric], column.format)}"
                for column in COLUMNS
                if column.metric in row
            ]
            self._write(" ".join(parts))
            return
        width = max(4, len(str(self._steps or 0)) * 2 + 1)
        if self._rows % HEADER_EVERY_ROWS == 0:
            self._show(
                "step".rjust(width) + "".join(f"  {column.heading:>{column.width}}" for column in COLUMNS),
                "bold",
            )
        self._rows += 1
        step = f"{row['step']}/{self._steps}" if self._steps is not None else f"{row['step']}"
        cells = [
            _cell(row[column.metric], column.format) if column.metric in row else "" for column in COLUMNS
        ]
        self._show(
            step.rjust(width)
            + "".join(f"  {cell:>{column.width}}" for cell, column in zip(cells, COLUMNS, strict=True)),
            "",
        )

    def message(self, text: str) -> None:
        """Shows one or more lines of text."""
        self._show(text, "", crop=False)

    def warn(self, text: str) -> None:
        """Show a warning."""
        self._show(f"warning: {text}", "yellow", crop=False)

    def close(self) -> None:
        """Ends the live area; later messages and rows are plain lines."""
        live = self._live
        self._live = None
        if live is not None:
            self._guarded(live.stop)

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _show(self, text: str, style: str, crop: bool = True) -> None:
        live = self._live
        if live is None:
            self._write(text)
        else:
            self._guarded(lambda: live.show(text, style, crop))

    def _write(self, line: str) -> None:
        _print(self._stream, line)

    def _guarded(self, action: Callable[[], Any]) -> None:
        """Runs a drawing action; if it fails, the console continues with plain lines."""
        try:
            action()
        except Exception as error:  # a failing display must not stop the run
            live = self._live
            self._live = None
            if live is not None:
                with contextlib.suppress(Exception):
                    live.stop()
            self._write(f"warning: the live display is off: {type(error).__name__}: {error}")


class _Live:
    """The live area: one rich progress bar per phase, reused from step to step."""

    def __init__(self, terminal: Any) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=terminal,
            transient=True,
            refresh_per_second=4,
        )
        self._tasks: dict[str, Any] = {}
        self._units: dict[str, str] = {}
        self._begun: dict[str, float] = {}
        self._progress.start()

    def begin(self, name: str, total: float | None, unit: str) -> None:
        self._units[name] = unit
        self._begun[name] = time.monotonic()
        if name in self._tasks:
            self._progress.reset(self._tasks[name], total=total, rate="")
        else:
            self._tasks[name] = self._progress.add_task(name, total=total, rate="")

    def advance(self, name: str, n: float) -> None:
        task = self._progress.tasks[self._progress.task_ids.index(self._tasks[name])]
        rate = _rate(task.completed + n, time.monotonic() - self._begun[name], self._units[name])
        self._progress.update(self._tasks[name], advance=n, rate=rate)

    def end(self, name: str) -> None:
        self._progress.stop_task(self._tasks[name])

    def show(self, text: str, style: str, crop: bool) -> None:
        from rich.text import Text

        self._progress.console.print(
            Text(text, style=style, no_wrap=crop, overflow="crop" if crop else "fold"), crop=crop
        )

    def stop(self) -> None:
        self._progress.stop()


class _PlainProgress:
    """Progress on a stream that is not a terminal: a line every `PLAIN_PROGRESS_EVERY_S` seconds."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._total: float | None = None
        self._unit = ""
        self._done = 0.0
        self._begun = self._said = time.monotonic()

    def begin(self, name: str, total: float | None, unit: str) -> None:
        self._total = total
        self._unit = unit

    def advance(self, name: str, n: float) -> None:
        self._done += n
        now = time.monotonic()
        if now - self._said < PLAIN_PROGRESS_EVERY_S:
            return
        self._said = now
        rate = self._done / (now - self._begun)
        line = f"phase={name.replace(' ', '_')} done={self._done:g}"
        if self._total is not None:
            line += f" total={self._total:g}"
        line += f" per_s={rate:.4g}"
        if self._total is not None and rate > 0:
            line += f" left_s={max(0.0, (self._total - self._done) / rate):.0f}"
        self._write(line + (f" unit={self._unit}" if self._unit else ""))

    def end(self, name: str) -> None:
        pass


def _rate(done: float, seconds: float, unit: str) -> str:
    return f"{done / seconds:,.4g} {unit}/s" if seconds > 0 else ""


def _cell(value: Any, form: str) -> str:
    """A number in ``form``; exact zeros stay short, and values that are not finite are named."""
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    return "0" if number == 0 and "e" in form else format(number, form)


def _print(stream: TextIO, line: str) -> None:
    """Writes a line; replaces characters that the stream's encoding lacks, and ignores a closed stream."""
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except BrokenPipeError:
        # otherwise Python would find the broken pipe again at exit, with status 120
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    # a full disk, a closed file, or None (a process without a console)
    except (OSError, ValueError, AttributeError):
        pass
