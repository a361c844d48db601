"""Metrics: every name declared once, one row a step through kills and resumes, TensorBoard's records, W&B
behind its wall.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import threading
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jetrl_jax.errors import UserError
from jetrl_jax.record.metrics import METRICS, MetricsWriter, find_metric, read_metrics, without_clocks
from jetrl_jax.rl import metrics as rl_metrics


def test_every_metric_is_declared_once_and_described() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.unit and metric.description, metric.name
        assert metric.better in ("higher", "lower", "zero", "neither")
        assert find_metric(metric.name.replace("*", "x")) is metric


def test_what_the_rl_functions_return_is_declared() -> None:
    logprobs = np.array([[-1.0, -2.0, -0.5]])
    rows: dict[str, float] = {}
    rows |= rl_metrics.mismatch_metrics(logprobs, logprobs - 0.1, logprobs < 0, np.array([[0, 0, 1]]))
    rows |= rl_metrics.reward_metrics([[0.0, 1.0]], [[True, True]])
    rows |= rl_metrics.reward_part_metrics({"task": [1.0], "my_rewards:length.bonus-2": [0.5]})
    rows |= rl_metrics.length_metrics([3, 4], [2, 2], ["stop", "length"])
    for name in rows:
        find_metric(name)
    assert find_metric("reward/my_rewards:length.bonus-2_mean").name == "reward/*_mean"
    assert find_metric("reward/mean").name == "reward/mean"


def test_find_metric_raises_with_the_nearest_name() -> None:
    with pytest.raises(
        ValueError, match=r"undeclared metric: got name='mismatch/k_3'.*Did you mean .*mismatch/k3"
    ):
        find_metric("mismatch/k_3")
    with pytest.raises(ValueError, match="undeclared"):
        find_metric("eval/pass_at_")


def test_without_clocks_leaves_what_two_equal_runs_share() -> None:
    row = {"step": 1, "reward/mean": 0.5, "time/train_s": 1.0, "rate/train_tokens_per_s": 2.0}
    assert without_clocks(row) == {"step": 1, "reward/mean": 0.5}


def test_rows_are_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(0, {"eval/accuracy": 0.39})
        writer.write(
            1,
            {
                "reward/mean": np.float32(0.1),
                "policy_version": np.int64(3),
                "loss/total": jnp.float32(np.nan),
                "mismatch/k3": 1e-7,
            },
        )
        assert len(read_metrics(path)) == 2  # each row has left the process already
    rows = read_metrics(path)
    assert rows[0] == {"step": 0, "eval/accuracy": 0.39}
    assert rows[1]["reward/mean"] == float(np.float32(0.1))
    assert rows[1]["policy_version"] == 3 and isinstance(rows[1]["policy_version"], int)
    assert math.isnan(rows[1]["loss/total"])
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_write_raises_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(3, {"reward/mean": 0.5})
        with pytest.raises(ValueError, match="undeclared metric"):
            writer.write(4, {"reward/mean": 0.5, "reward/wean": 0.5})
        with pytest.raises(ValueError, match=r"no number: got reward/mean='high' \(str\)"):
            writer.write(4, {"reward/mean": "high"})
        with pytest.raises(ValueError, match="no number"):
            writer.write(4, {"reward/mean": np.zeros(2)})
        with pytest.raises(ValueError, match="one row a step: got step=3, expected more than 3"):
            writer.write(3, {"reward/mean": 0.5})
    assert len(read_metrics(path)) == 1


def test_a_killed_and_resumed_run_has_one_row_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    warnings: list[str] = []
    with MetricsWriter(path) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": step})
    with open(path, "ab") as file:
        file.write(b'{"step": 6, "rew')
    with MetricsWriter(path, warn=warnings.append) as writer:
        assert writer.last_step == 5
        writer.truncate_after(3)
        for step in range(4, 8):
            writer.write(step, {"reward/mean": step * 10})
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["reward/mean"] for row in rows] == [1, 2, 3, 40, 50, 60, 70]
    assert not warnings
    with MetricsWriter(path) as writer:
        writer.truncate_after(-1)  # no checkpoint: the run begins again
        writer.write(0, {"reward/mean": 0})
    assert [row["step"] for row in read_metrics(path)] == [0]


def test_truncate_after_warns_where_rows_are_missing(tmp_path: Path) -> None:
    warnings: list[str] = []
    with MetricsWriter(tmp_path / "metrics.jsonl", warn=warnings.append) as writer:
        writer.write(1, {"reward/mean": 1})
    with MetricsWriter(tmp_path / "metrics.jsonl", warn=warnings.append) as writer:
        writer.truncate_after(20)
    assert len(warnings) == 1
    assert "ends at step 1, the checkpoint is of step 20" in warnings[0]


def test_truncate_after_raises_once_rows_went_out(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl", events=tmp_path / "events") as writer:
        writer.write(1, {"reward/mean": 1})
        with pytest.raises(RuntimeError, match="rows were written already"):
            writer.truncate_after(0)


def read_events(directory: Path) -> list[Event]:
    """The records of all event files, in the order of the files: length (8), its CRC (4), record, its CRC
    (4).
    """
    events = []
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        offset = 0
        while offset < len(content):
            (length,) = struct.unpack_from("<Q", content, offset)
            events.append(Event.FromString(content[offset + 12 : offset + 12 + length]))
            offset += 16 + length
    return events


def scalars_as_tensorboard_shows_them(directory: Path) -> dict[str, dict[int, float]]:
    """TensorBoard drops, at a session that starts at step n,
    what earlier sessions wrote of steps from n on.
    """
    shown: dict[str, dict[int, float]] = {}
    for event in read_events(directory):
        if event.session_log.status == 1:
            shown = {
                tag: {step: value for step, value in points.items() if step < event.step}
                for tag, points in shown.items()
            }
        for value in event.summary.value:
            shown.setdefault(value.tag, {})[event.step] = value.simple_value
    return shown


def test_tensorboard_has_every_metric_once_a_step_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # files are named by the second
    monkeypatch.setattr("time.time", iter(range(1_000_000_000, 1_000_100_000)).__next__)
    with MetricsWriter(tmp_path / "metrics.jsonl", events=tmp_path / "events") as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward/mean": step, "reward/mod:f_mean": 0.5})
    with MetricsWriter(tmp_path / "metrics.jsonl", events=tmp_path / "events") as writer:
        writer.truncate_after(1)
        writer.write(2, {"reward/mean": 20, "loss/total": float("nan")})
    shown = scalars_as_tensorboard_shows_them(tmp_path / "events")
    assert shown["reward/mean"] == {1: 1.0, 2: 20.0}
    assert shown["reward/mod_f_mean"] == {1: 0.5}
    assert math.isnan(shown["loss/total"][2])


class FakeWandb(types.ModuleType):
    """Records what it is told; raises in the calls named by ``failing``."""

    def __init__(self, failing: tuple[str, ...] = (), hang: threading.Event | None = None) -> None:
        super().__init__("wandb")
        self.failing = failing
        self.hang = hang
        self.calls: list[Any] = []
        self.id = "run-1"

    def Settings(self, **arguments: Any) -> dict[str, Any]:
        return arguments

    def init(self, **arguments: Any) -> FakeWandb:
        self._call("init", arguments)
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        self._call("log", (step, row))

    def finish(self) -> None:
        self._call("finish", None)
        if self.hang is not None:
            self.hang.wait(30)

    def _call(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if name in self.failing:
            raise ConnectionError(f"{name} failed")


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_wandb_failures_warn_once_and_never_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    fake = FakeWandb((failing,))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    warnings: list[str] = []
    with MetricsWriter(tmp_path / "metrics.jsonl", wandb_project="p", warn=warnings.append) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward/mean": step})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert warnings == [f"Weights & Biases is off for this run: ConnectionError: {failing} failed"]
    assert [name for name, _ in fake.calls].count(failing) == 1


def test_wandb_gets_the_rows_and_goes_on_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (1, 2):
        with MetricsWriter(tmp_path / "metrics.jsonl", wandb_project="p", wandb_config={"seed": 1}) as writer:
            writer.write(step, {"reward/mean": step})
    inits = [what for name, what in fake.calls if name == "init"]
    assert [init["id"] for init in inits] == [None, "run-1"]
    assert inits[0]["project"] == "p" and inits[0]["config"] == {"seed": 1}
    assert [what for name, what in fake.calls if name == "log"] == [
        (1, {"reward/mean": 1}),
        (2, {"reward/mean": 2}),
    ]


def test_wandb_that_is_not_installed_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    warnings: list[str] = []
    MetricsWriter(tmp_path / "metrics.jsonl", wandb_project="p", warn=warnings.append).close()
    assert len(warnings) == 1
    assert "pip install jetrl-jax[wandb]" in warnings[0]


def test_wandb_that_hangs_at_the_end_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(hang=released))
    warnings: list[str] = []
    writer = MetricsWriter(tmp_path / "metrics.jsonl", wandb_project="p", warn=warnings.append)
    assert writer._wandb is not None
    writer._wandb.finish(timeout_s=0.05)
    released.set()
    writer.close()
    assert warnings == ["Weights & Biases did not finish within 0 s; the run goes on without it"]


def test_read_metrics_raises_on_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot a row\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path / "metrics.jsonl")
