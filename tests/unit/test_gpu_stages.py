"""``make gpu`` without a GPU: how its stages are run, kept and taken up again, on made-up commands."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from pathlib import Path

import pytest

from jetrl_jax.errors import UserError
from pallas_kernels import bench
from tests.benchmarks import gpu, gpu_dry, gpu_stages, train_flows

CARD = {"gpu": "NVIDIA H100 80GB HBM3, 580.1", "python": "3.12.3"}


def stage(name: str, code: str, limit_s: float = 30.0, **fields: str) -> gpu.Stage:
    return gpu.Stage(name, ("-c", code), limit_s, **fields)


def here(tmp_path: Path, **fields: object) -> gpu.Places:
    return gpu.Places(tmp_path, tmp_path / "scratch", **fields)


def record(out: Path) -> dict[str, dict[str, object]]:
    return json.loads((out / "gpu.json").read_text())["stages"]


def test_stages_are_kept_and_only_what_did_not_pass_is_run_again(tmp_path: Path) -> None:
    note = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); "
    result = "import json; json.dump([1, 2], open(r'{out}/a.json', 'w')); print('wrote')"
    stages = [
        stage("a", note + result, result="{out}/a.json"),
        stage("b", "print('broken'); raise SystemExit(3)"),
    ]
    assert gpu.run_stages(stages, here(tmp_path), 60.0, lambda: CARD) == 1
    seen = record(tmp_path)
    assert seen["a"]["status"] == 0 and seen["a"]["result"] == [1, 2] and seen["a"]["output"] == "wrote\n"
    assert seen["b"]["status"] == 3 and seen["b"]["output"] == "broken\n" and "result" not in seen["b"]
    stages[1] = stage("b", "print('mended')")
    assert gpu.run_stages(stages, here(tmp_path), 60.0, lambda: CARD) == 0
    assert record(tmp_path)["b"]["output"] == "mended\n" and (tmp_path / "runs").read_text() == "x"
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# NVIDIA H100") and "| b | 0 |" in page and "mended" in page


@pytest.mark.parametrize(
    ("code", "fields", "status"),
    [
        ("print('3 passed')", {"expects": r"[1-9] passed"}, 0),
        ("print('6 skipped')", {"expects": r"[1-9] passed"}, "no '[1-9] passed' in"),
        ("print('3 passed, 1 skipped')", {"expects": r"[1-9] passed", "refuses": "skipped"}, "'skipped' in"),
        ("pass", {"result": "{out}/none.json"}, "no result: "),
        ("print('{', file=open(r'{out}/half.json', 'w'))", {"result": "{out}/half.json"}, "no result: "),
    ],
)
def test_an_end_without_error_is_not_enough(
    tmp_path: Path, code: str, fields: dict[str, str], status: int | str
) -> None:
    assert gpu.run_stages([stage("a", code, **fields)], here(tmp_path), 60.0, lambda: CARD) == int(
        status != 0
    )
    assert str(record(tmp_path)["a"]["status"]).startswith(str(status))


def test_an_exact_flow_with_a_mismatch_has_not_passed() -> None:
    flow = {"device": "cpu", "implementations": {}, "figures": {}}
    for largest, found in ((0.0, False), (2.4e-7, True)):
        flows = {
            "bf16-exact": flow | {"largest_difference": largest},
            "bf16-fast": flow | {"largest_difference": 0.5},
        }
        table = train_flows.table({"flows": flows, "against_base": {}, "base": "bf16-fast"})
        assert bool(re.search(gpu_stages.MISMATCH, table)) is found, table


def test_a_stage_is_run_again_with_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [stage("a", f"open({str(tmp_path / 'runs')!r}, 'a').write('x')")]
    for commit in ("1", "1", "2"):
        monkeypatch.setattr(gpu, "state", lambda packed, commit=commit: {"commit": commit})
        assert gpu.run_stages(stages, here(tmp_path), 60.0, lambda: CARD) == 0
    assert (tmp_path / "runs").read_text() == "xx" and "commit 2" in (tmp_path / "gpu.md").read_text()


def test_a_stage_that_runs_out_of_time_ends_with_all_its_children(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(7); pathlib.Path({str(alive)!r}).touch()"
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "print('started', flush=True); time.sleep(60)"
    )
    assert gpu.run_stages([stage("slow", code, limit_s=5.0)], here(tmp_path), 60.0, lambda: CARD) == 1
    assert (
        record(tmp_path)["slow"]["status"] == "out of time"
        and record(tmp_path)["slow"]["output"] == "started\n"
    )
    time.sleep(5)
    assert not alive.exists()


def test_what_a_stage_left_half_done_is_gone_before_it_starts_again(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "made").mkdir(parents=True)
    (tmp_path / "scratch" / "made" / "old").touch()
    again = stage("again", "import os; assert not os.path.exists(r'{scratch}/made')", directory="made")
    assert gpu.run_stages([again], here(tmp_path), 60.0, lambda: CARD) == 0


def test_no_stage_starts_without_time_or_on_another_card(tmp_path: Path) -> None:
    stages = [stage("a", "print(1)")]
    assert "jax" in gpu.state() and "commit" in gpu.state()
    assert (
        gpu.run_stages(stages, here(tmp_path), 1.0, lambda: CARD) == 1
        and not (tmp_path / "gpu.json").exists()
    )
    gpu.run_stages(stages, here(tmp_path), 60.0, lambda: CARD)
    with pytest.raises(UserError, match="of another machine: got NVIDIA H200"):
        gpu.run_stages(stages, here(tmp_path), 60.0, lambda: CARD | {"gpu": "NVIDIA H200"})


def test_a_result_that_is_half_made_is_kept_with_the_status(tmp_path: Path) -> None:
    code = "import json, time; json.dump([1], open(r'{out}/a.json', 'w')); time.sleep(60)"
    assert (
        gpu.run_stages(
            [stage("a", code, limit_s=5.0, result="{out}/a.json")], here(tmp_path), 60.0, lambda: CARD
        )
        == 1
    )
    assert record(tmp_path)["a"]["status"] == "out of time" and record(tmp_path)["a"]["result"] == [1]


def test_stages_of_a_group_run_side_by_side_and_others_in_turn(tmp_path: Path) -> None:
    """Each of the group waits for the other's file; the last one finds both."""
    wait = (
        "import os, time; open(r'{out}/MINE', 'w').close()\nwhile not "
        "os.path.exists(r'{out}/OTHER'): time.sleep(0.01)"
    )
    pair = [
        stage(one, wait.replace("MINE", one).replace("OTHER", other), group="pair")
        for one, other in ("ab", "ba")
    ]
    last = stage("last", "import os; assert os.path.exists(r'{out}/a') and os.path.exists(r'{out}/b')")
    assert [[one.name for one in together] for together in gpu.rounds([*pair, last])] == [
        ["a", "b"],
        ["last"],
    ]
    assert gpu.run_stages([*pair, last], here(tmp_path), 60.0, lambda: CARD) == 0


def test_metrics_of_a_run_are_kept_and_its_directory_is_not(tmp_path: Path) -> None:
    code = (
        "import pathlib; run = pathlib.Path(r'{scratch}/runs/bf16'); run.mkdir(parents=True); (run "
        "/ 'metrics.jsonl').write_text('row')"
    )
    assert gpu.run_stages([stage("a", code, directory="runs")], here(tmp_path), 60.0, lambda: CARD) == 0
    assert (tmp_path / "a.bf16.jsonl").read_text() == "row"


def test_a_machine_without_git_takes_the_commit_that_was_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu.commit() is None or re.fullmatch(r"[0-9a-f]{40}", gpu.commit())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu, "PACKED", tmp_path)
    assert gpu.state()["commit"] is None
    (tmp_path / "COMMIT").write_text("abc\n")
    assert gpu.state()["commit"] == "abc"


def test_environment_of_a_stage_has_the_packed_packages_that_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("site", "vllm", "triton"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setenv("XLA_FLAGS", "--other")
    wants = stage("a", "", packages=("vllm", "absent"), group="side by side")
    found = here(tmp_path, packed=tmp_path).environment(wants)
    assert found["PYTHONPATH"].split(os.pathsep) == [
        str(gpu.ROOT),
        str(tmp_path / "site"),
        str(tmp_path / "vllm"),
        "mine",
    ]
    assert (
        found["XLA_FLAGS"] == "--other --xla_gpu_enable_triton_gemm=false"
        and found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    )
    assert (found["JAX_PLATFORMS"], here(tmp_path, dry=True).environment(wants)["JAX_PLATFORMS"]) == (
        "cuda,cpu",
        "cpu",
    )


def test_every_stage_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    assert (
        len(capsys.readouterr().out.splitlines()) == len(gpu.STAGES) == len({one.name for one in gpu.STAGES})
    )
    assert {one.partition(" ")[0] for one in gpu_stages.LAYERS} == set(bench.LAYERS)
    for one in gpu.STAGES:
        for word in one.command:
            if word.startswith(("tests/", "configs/")):
                assert (gpu.ROOT / word).exists(), word
        for module in (
            word
            for flag, word in zip(one.command, one.command[1:], strict=False)
            if flag == "-m" and "." in word
        ):
            assert importlib.util.find_spec(module) is not None
        assert one.changes is None or (gpu.ROOT / one.changes).exists()


def test_every_benchmark_of_the_stages_takes_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gpu.ROOT)
    seen = set()
    for one in gpu.STAGES:
        words = one.words(tmp_path, tmp_path)
        if words[:2] == ["-m", "pallas_kernels.bench"]:
            options = bench.parse(words[2:])
            seen |= {(options.what, layer, rows) for layer in options.layers for rows in options.rows}
        elif words[0].endswith("train_flows.py"):
            train_flows.options(words[1:])
            train_flows.options([*words[1:], *one.dry])
    for layer in gpu_stages.LAYERS:  # nothing that the benchmarks know is left out
        assert {("gemm", layer, rows) for rows in bench.TRAINING_ROWS} | {
            ("decode", layer, rows) for rows in bench.DECODE_ROWS
        } <= seen


def test_calls_are_stages_with_shorter_limits_and_a_dry_form() -> None:
    stages = {one.name: one for one in gpu.STAGES}
    for name, call in gpu_stages.CALLS.items():
        made = gpu.chosen(None, name, False)
        assert [one.name for one in made] == [one for one in stages if one in call.limits_s] and len(
            made
        ) == len(call.limits_s)
        assert all(one.limit_s == call.limits_s[one.name] <= stages[one.name].limit_s for one in made)
        assert call.seconds < 420 and {gpu_dry.named(one.command)[0] for one in made} <= set(gpu_dry.COMMANDS)
    called = {name for call in gpu_stages.CALLS.values() for name in call.limits_s}
    assert [one.name for one in gpu.chosen(None, None, True)] == [one for one in stages if one in called]
    assert gpu.chosen(["train"], None, True) == [stages["train"]]
    with pytest.raises(UserError, match="not in call 1: got --only train, expected some of tests-gemm, "):
        gpu.chosen(["train", "tests-gemm"], "1", False)
    assert gpu.chosen(["train"], None, False) == [stages["train"]] and gpu.chosen(None, None, False) == list(
        gpu.STAGES
    )


# ----------------------------------------------------------------------------------------------------------------- dry


def test_a_dry_run_fails_at_a_field_that_is_gone_and_names_the_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (
        "tests/benchmarks/train_flows.py",
        "--flows",
        "bf16",
        "--out",
        "{scratch}/run",
        "--set",
        "rollout.slotz=1",
    )
    planted = gpu.Stage("planted", command, 60.0, dry=("--steps", "1"))
    assert gpu.run_stages([planted], here(tmp_path, dry=True), 60.0, gpu.no_machine) == 1
    assert (
        "rollout.slotz" in str(record(tmp_path)["planted"]["output"])
        and not (tmp_path / "scratch" / "run").exists()
    )
    assert capsys.readouterr().out.splitlines()[-1] == "planted: 2"


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "pallas_kernels.bench", "gemm", "--layerz", "o"],
        ["-m", "jetrl_jax", "check-engine", "--config", "configs/tiny_vllm_cpu.yaml", "--zet", "run.steps=1"],
        ["tests/benchmarks/train_flows.py", "--stretchez", "1"],
    ],
)
def test_a_dry_run_fails_at_an_unknown_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        gpu_dry.main(words)
    assert end.value.code == 2 and "unrecognized arguments" in capsys.readouterr().err


def test_a_command_without_a_dry_form_is_refused() -> None:
    with pytest.raises(UserError, match=r"no dry form: got jetrl_jax\.train, expected one of pytest, "):
        gpu_dry.main(["-m", "jetrl_jax.train"])


def test_rivals_that_need_torch_are_read_and_must_have_the_benchmark(tmp_path: Path) -> None:
    (tmp_path / "rivals.py").write_text("import torch\ndef gemm(m, n, k): return {}\n")
    assert gpu_dry.rivals(tmp_path / "rivals.py", "gemm", bench.load_rivals) is None
    with pytest.raises(UserError, match="no rivals in decode"):
        gpu_dry.rivals(tmp_path / "rivals.py", "decode", bench.load_rivals)
    (tmp_path / "plain.py").write_text("def layer(tokens): return {'a': tokens}\n")
    assert gpu_dry.rivals(tmp_path / "plain.py", "layer", bench.load_rivals).layer(3) == {"a": 3}
