"""The console: stable plain lines, a live area on every odd terminal, and never an exception."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl_jax.record import console as console_module
from jetrl_jax.record.console import COLUMNS, HEADER_EVERY_ROWS, Console, print_warning
from jetrl_jax.record.metrics import find_metric

ROW = {
    "step": 12,
    "reward/mean": 0.53125,
    "length/completion_tokens_mean": 9.125,
    "mismatch/k3": 0.0,
    "mismatch/logprob_abs_mean": 3.21e-4,
    "optimizer/grad_norm": float("nan"),
    "rate/rollout_tokens_per_s": 23011.4,
    "time/step_s": 0.512,
    "loss/total": 1.0,  # has no column
}


def drive(console: Console) -> None:
    """Everything a trainer does with a console."""
    with console:
        for step in range(1, 4):
            for name, total in (("rollout", 64.0), ("reward", None), ("train", 0)):
                with console.phase(name, total, unit="sequences") as phase:
                    for _ in range(4):
                        phase.advance(16)
            console.step({**ROW, "step": step})
        console.message("Held-out accuracy 39 % → 92 % ✓ 数学")
        console.warn("checkpoint 20 is damaged")
        console.message("[bold]not markup[/bold] [/]")
    console.step({**ROW, "step": 4})  # after the end: plain


class FakeTerminal(io.StringIO):
    """A terminal of a given encoding that can be made to fail."""

    def __init__(self, encoding: str = "utf-8", fail_after: int | None = None) -> None:
        super().__init__()
        self._encoding = encoding
        self.fail_after = fail_after

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise OSError(5, "Input/output error")
        text.encode(self._encoding)  # as a real stream would
        return super().write(text)


def test_columns_are_declared_metrics() -> None:
    for column in COLUMNS:
        find_metric(column.metric)
        assert len(column.heading) <= column.width


def test_plain_lines_are_stable_and_parseable() -> None:
    stream = io.StringIO()
    with Console(200, stream=stream) as console:
        with console.phase("rollout", 64) as phase:
            phase.advance(64)
        console.step(ROW)
        console.step({"step": 13, "eval/accuracy": 0.9})
        console.warn("careful")
    assert stream.getvalue() == (
        "step=12 steps=200 reward/mean=0.5312 length/completion_tokens_mean=9.1 mismatch/k3=0 "
        "mismatch/logprob_abs_mean=3.21e-04 "
        "optimizer/grad_norm=nan rate/rollout_tokens_per_s=23011 time/step_s=0.51\n"
        "step=13 steps=200 eval/accuracy=0.9000\n"
        "warning: careful\n"
    )
    fields = dict(part.split("=") for part in stream.getvalue().splitlines()[0].split())
    assert float(fields["reward/mean"]) == pytest.approx(0.53125, abs=1e-4)


def test_a_long_phase_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 31.0, 40.0, 62.0])
    monkeypatch.setattr(console_module.time, "monotonic", clock.__next__)
    stream = io.StringIO()
    with Console(stream=stream, live=False).phase("warm start", 400, unit="steps") as phase:
        for _ in range(4):
            phase.advance(62)
    assert phase.done == 248
    assert stream.getvalue() == (
        "phase=warm_start done=124 total=400 per_s=4 left_s=69 unit=steps\n"
        "phase=warm_start done=248 total=400 per_s=4 left_s=38 unit=steps\n"
    )


def test_a_phase_hands_on_the_exception_of_its_block() -> None:
    console = Console(stream=FakeTerminal(), live=True)
    with pytest.raises(RuntimeError, match="from the trainer"), console, console.phase("train", 4):
        raise RuntimeError("from the trainer")


@pytest.mark.parametrize("columns", ["1", "4", "20", "79", "400", "not a number"])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252"])
def test_live_display_survives_odd_terminals(
    monkeypatch: pytest.MonkeyPatch, columns: str, encoding: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "1" if columns == "1" else "24")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = FakeTerminal(encoding)
    drive(Console(200, stream=stream, live=True))
    text = stream.getvalue()
    assert "step=4 steps=200" in text  # the row after the end
    if columns == "400" and encoding == "utf-8":
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        assert (
            len(
                re.findall(
                    r"[\r\n]\s*3/200\s+0\.5312\s+9\.1\s+0\s+3\.21e-04\s+nan\s+23011\s+0\.51\s*\n", plain
                )
            )
            == 1
        )
        for expected in (
            "39 % → 92 % ✓ 数学",
            "warning: checkpoint 20 is damaged",
            "[bold]not markup[/bold] [/]",
            "sequences/s",
            "64/64",
        ):
            assert expected in plain


def test_live_header_returns_every_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = FakeTerminal()
    with Console(stream=stream, live=True) as console:
        for step in range(HEADER_EVERY_ROWS + 1):
            console.step({**ROW, "step": step})
    assert stream.getvalue().count("rollout t/s") == 2


@pytest.mark.parametrize("fail_after", [0, 1, 5, 20])
@pytest.mark.parametrize("live", [True, False])
def test_a_stream_that_breaks_silences_the_console(
    monkeypatch: pytest.MonkeyPatch, fail_after: int, live: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    drive(Console(200, stream=FakeTerminal(fail_after=fail_after), live=live))


def test_closed_and_missing_streams_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    drive(Console(stream=closed, live=False))
    monkeypatch.setattr(sys, "stdout", None)
    drive(Console())
    monkeypatch.setattr(sys, "stderr", None)
    print_warning("nobody hears")


def test_dumb_terminals_and_pipes_get_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = FakeTerminal()
    drive(Console(200, stream=stream))
    assert stream.getvalue().startswith("step=1 steps=200 ")
    assert "\x1b" not in stream.getvalue()


def test_a_character_that_the_stream_lacks_is_substituted() -> None:
    stream = FakeTerminal("ascii")
    Console(stream=stream, live=False).message("✓ done")
    assert stream.getvalue() == "\\u2713 done\n"


PROGRAM = """
from jetrl_jax.record.console import Console
import sys, time
with Console(3) as console:
    for step in range(1, 4):
        with console.phase("rollout", 4) as phase:
            for _ in range(4):
                time.sleep(0.02)
                phase.advance()
        console.step({"step": step, "reward/mean": 0.5})
        print("printed by a reward function")
"""
ROOT = Path(__file__).resolve().parents[2]


def run_program(**arguments: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        **arguments,
    )


def test_on_a_real_terminal_rows_stand_and_the_live_area_goes() -> None:
    parent, child = pty.openpty()
    with run_program(stdout=child, stderr=child) as process:
        os.close(child)
        output = b""
        while True:
            try:
                chunk = os.read(parent, 4096)
            except OSError:  # the other side is closed
                break
            if not chunk:
                break
            output += chunk
    os.close(parent)
    assert process.returncode == 0
    text = output.decode()
    assert text.count("printed by a reward function") == 3
    assert len(re.findall(r"[123]/3\s+0\.5000", text)) == 3
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is shown again


def test_a_reader_that_leaves_does_not_stop_the_run() -> None:
    with run_program(stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert process.returncode == 0
    assert errors == ""
