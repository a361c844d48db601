"""``make gpu`` without a GPU: how its stages are run, kept and taken up again, on made-up commands."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from pathlib import Path

import pytest

from jetrl_jax.errors import UserError
from tests.benchmarks import gpu, train_flows

CARD = {"gpu": "NVIDIA H100 80GB HBM3, 580.1", "python": "3.12.3"}


def stage(name: str, code: str, limit_s: float = 30.0, **fields: str) -> gpu.Stage:
    return gpu.Stage(name, ("-c", code), limit_s, **fields)


def record(out: Path) -> dict[str, dict[str, object]]:
    return json.loads((out / "gpu.json").read_text())["stages"]


def test_stages_are_kept_and_only_what_did_not_pass_is_run_again(tmp_path: Path) -> None:
    note = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); "
    result = "import json; json.dump([1, 2], open(r'{out}/a.json', 'w')); print('wrote')"
    stages = [stage("a", note + result, result="a.json"), stage("b", "print('broken'); raise SystemExit(3)")]
    assert gpu.run_stages(stages, tmp_path, 60.0, lambda: CARD) == 1
    seen = record(tmp_path)
    assert seen["a"]["status"] == 0 and seen["a"]["result"] == [1, 2] and seen["a"]["output"] == "wrote\n"
    assert seen["b"]["status"] == 3 and seen["b"]["output"] == "broken\n" and "result" not in seen["b"]
    stages[1] = stage("b", "print('mended')")
    assert gpu.run_stages(stages, tmp_path, 60.0, lambda: CARD) == 0
    assert record(tmp_path)["b"]["output"] == "mended\n" and (tmp_path / "runs").read_text() == "x"
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# NVIDIA H100") and "| b | 0 |" in page and "mended" in page


@pytest.mark.parametrize(
    ("code", "fields", "status"),
    [
        ("print('3 passed')", {"expects": r"[1-9] passed"}, 0),
        ("print('6 skipped')", {"expects": r"[1-9] passed"}, "no '[1-9] passed' in"),
        ("print('3 passed, 1 skipped')", {"expects": r"[1-9] passed", "refuses": "skipped"}, "'skipped' in"),
        ("pass", {"result": "none.json"}, "no result: "),
        ("print('{', file=open(r'{out}/half.json', 'w'))", {"result": "half.json"}, "no result: "),
    ],
)
def test_an_end_without_error_is_not_enough(tmp_path: Path, code: str, fields: dict[str, str], status: int | str) -> None:
    code = code.replace("'{'", "chr(123)")
    assert gpu.run_stages([stage("a", code, **fields)], tmp_path, 60.0, lambda: CARD) == int(status != 0)
    assert str(record(tmp_path)["a"]["status"]).startswith(str(status))


def test_an_exact_flow_with_a_mismatch_has_not_passed() -> None:
    flow = {"device": "cpu", "implementations": {}, "figures": {}}
    for largest, found in ((0.0, False), (2.4e-7, True)):
        flows = {"bf16-exact": flow | {"largest_difference": largest}, "bf16-fast": flow | {"largest_difference": 0.5}}
        table = train_flows.table({"flows": flows, "against_base": {}, "base": "bf16-fast"})
        assert bool(re.search(gpu.MISMATCH, table)) is found, table


def test_a_stage_is_run_again_with_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [stage("a", f"open({str(tmp_path / 'runs')!r}, 'a').write('x')")]
    for commit in ("1", "1", "2"):
        monkeypatch.setattr(gpu, "state", lambda commit=commit: {"commit": commit})
        assert gpu.run_stages(stages, tmp_path, 60.0, lambda: CARD) == 0
    assert (tmp_path / "runs").read_text() == "xx" and "commit 2" in (tmp_path / "gpu.md").read_text()


def test_a_stage_that_runs_out_of_time_ends_with_all_its_children(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(alive)!r}).touch()"
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); print('started', flush=True); time.sleep(60)"
    )
    assert gpu.run_stages([stage("slow", code, limit_s=1.0)], tmp_path, 60.0, lambda: CARD) == 1
    assert record(tmp_path)["slow"]["status"] == "out of time" and record(tmp_path)["slow"]["output"] == "started\n"
    time.sleep(3)
    assert not alive.exists()


def test_what_a_stage_left_half_done_is_gone_before_it_starts_again(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "old").touch()
    again = stage("again", "import os; assert not os.path.exists(r'{out}/made')", directory="made")
    assert gpu.run_stages([again], tmp_path, 60.0, lambda: CARD) == 0


def test_no_stage_starts_without_time_or_on_another_card(tmp_path: Path) -> None:
    stages = [stage("a", "print(1)")]
    assert "jax" in gpu.state() and "commit" in gpu.state()
    assert gpu.run_stages(stages, tmp_path, 1.0, lambda: CARD) == 1 and not (tmp_path / "gpu.json").exists()
    gpu.run_stages(stages, tmp_path, 60.0, lambda: CARD)
    with pytest.raises(UserError, match="of another machine: got NVIDIA H200"):
        gpu.run_stages(stages, tmp_path, 60.0, lambda: CARD | {"gpu": "NVIDIA H200"})


def test_every_stage_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(gpu.STAGES) == len({one.name for one in gpu.STAGES})
    for one in gpu.STAGES:
        for word in one.command:
            if word.startswith(("tests/", "configs/", str(gpu.ROOT))):
                assert (gpu.ROOT / word).exists(), word
        for module in (word for flag, word in zip(one.command, one.command[1:], strict=False) if flag == "-m" and "." in word):
            assert importlib.util.find_spec(module) is not None
        assert one.changes is None or (gpu.ROOT / one.changes).exists()
