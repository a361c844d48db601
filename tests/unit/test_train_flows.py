"""The benchmark of whole training runs: its arithmetic on made-up rows, and what it reads from a run's
record; nothing is trained.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.record.metrics import METRICS


def _load() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "train_flows.py"
    spec = importlib.util.spec_from_file_location("train_flows", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = _load()
CHOICE = {"name": "xla", "reason": "auto: cudnn cannot run: the platform is 'cpu'"}


def rows(speed: float, steps: int = 6) -> list[dict[str, float]]:
    """The row before RL, then steps at speed, speed + 1, ...;
    the first of each three compiles and is slow.
    """
    made = [{"step": 0.0, "eval/accuracy": 0.5}]
    for step in range(1, steps + 1):
        value = 1.0 if step % 3 == 1 else speed + step
        made.append(
            {"step": float(step), bench.MISMATCH: step / 8, **dict.fromkeys(bench.METRICS.values(), value)}
        )
    return made


def write_run(directory: Path, speed: float, fp8: bool) -> None:
    directory.mkdir(parents=True)
    start = {
        "device_kind": "cpu",
        "packages": {"jax": "1"},
        "commit": None,
        "attention": CHOICE,
        "engine": "jax",
    }
    start |= {"fp8_products": {"forward": CHOICE, "backward": CHOICE | {"name": "xla_fast"}}}
    (directory / "environment.json").write_text(
        json.dumps({"starts": [{"attention": {"name": "old", "reason": ""}}, start]})
    )
    (directory / "precision.txt").write_text(
        "parameter  site  format  blocks\na  fprop  " + ("fp8" if fp8 else "bf16") + "  -\n"
    )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(speed)))


def test_flows_take_turns_forward_and_back() -> None:
    assert bench.turns(["a", "b"], 3) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_the_metrics_are_declared() -> None:
    assert {*bench.METRICS.values(), bench.MISMATCH} <= {metric.name for metric in METRICS}


def test_a_flow_is_a_preset_with_or_without_exactness() -> None:
    for flow, expected in {
        "bf16": [],
        "bf16-exact": ["numerics.exact=true"],
        "bf16-fast": ["numerics.exact=false"],
    }.items():
        sets = bench.settings(Path("out"), flow, 3, ["seed=1"])
        assert (
            sets[0] == "seed=1"
            and "precision.preset=bf16" in sets
            and [one for one in sets if "exact" in one] == expected
        )


def test_the_first_steps_of_a_stretch_are_left_out() -> None:
    values = bench.measured(rows(10.0), "time/step_s", 3, 2, 1)
    assert values == [[12.0, 13.0], [15.0, 16.0]]
    found = bench.summary(values)
    assert (found["median"], found["stretch_low"], found["stretch_high"]) == (14.0, 12.5, 15.5)
    assert (found["quartile_low"], found["quartile_high"]) == (12.75, 15.25)
    with pytest.raises(ValueError, match=r"got none for \[8, 9\]"):
        bench.measured(rows(10.0), "time/step_s", 3, 3, 1)


def test_ratios_are_taken_stretch_by_stretch() -> None:
    assert bench.ratios([[2.0, 2.0], [8.0]], [[1.0], [2.0, 2.0]]) == {"ratio": 3.0, "low": 2.0, "high": 4.0}


def test_report_says_what_served_what_and_leaves_out_fp8_where_there_is_none(tmp_path: Path) -> None:
    write_run(tmp_path / "fp8_unified", 38.0, fp8=True)
    write_run(tmp_path / "bf16", 13.0, fp8=False)
    record = bench.report(tmp_path, ["fp8_unified", "bf16"], 3, 2, 1)
    both = {name: flow["implementations"] for name, flow in record["flows"].items()}
    assert list(both["bf16"]) == ["attention"] and both["bf16"]["attention"].startswith("xla (auto: cudnn")
    assert list(both["fp8_unified"]) == ["attention", "fp8_products forward", "fp8_products backward"]
    low, high = 43.5 / 18.5, 40.5 / 15.5
    assert record["against_base"]["fp8_unified"]["step, s"] == pytest.approx(
        {"ratio": (low + high) / 2, "low": low, "high": high}
    )
    text = bench.table(record)
    assert "| bf16 | 17 (15.75 to 18.25; stretches 15.5 to 18.5) |" in text and text.count(" | 0.75 |") == 2
    assert "fp8_unified against bf16, stretch by stretch: rollout, tokens/s x 2.482 (2.351 to 2.613)" in text
    json.dumps(record)


def test_what_was_measured_of_the_first_flow_outlives_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: Path, sets: list[str], directory: Path) -> None:
        if directory.name == "bf16":
            raise RunStopped("no time left")
        write_run(directory, 2.0, True)

    monkeypatch.setattr(bench, "train", train)
    words = [
        "--flows",
        "fp8_unified",
        "bf16",
        "--stretches",
        "1",
        "--steps",
        "6",
        "--left-out",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    with pytest.raises(RunStopped, match="no time left"):
        bench.main(words)
    record = json.loads((tmp_path / "out" / "train_flows.json").read_text())
    assert list(record["flows"]) == ["fp8_unified"] and record["flows"]["fp8_unified"]["figures"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--flows", "bf16", "bf16"], "expected different flows"),
        (["--steps", "2", "--left-out", "2"], "below --steps"),
        (["--out", "."], "--out is not empty"),
    ],
)
def test_mistakes_end_before_anything_runs(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(words)
    assert problem in capsys.readouterr().err
    with pytest.raises(UserError, match=r"precision\.preset"):
        bench.main(["--flows", "fp9", "bf16", "--out", "nowhere"])
