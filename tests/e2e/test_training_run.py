"""Whole runs by the command line: the record, resuming bit for bit, kills, what reads a run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import (
    ROOT,
    TINY,
    command_environment,
    rows,
    run_here,
    run_module,
    tiny_config,
    train_command,
    write_config,
)

from jetrl_jax.record.metrics import read_metrics
from jetrl_jax.rollout.embedded.draft_length import DraftLength


def exported_weights(directory: Path) -> bytes:
    return (directory / "export" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, compilation_cache: Path
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of four steps by the command line."""
    base = tmp_path_factory.mktemp("finished")
    config = write_config(tiny_config(base / "run"), base / "config.yaml")
    return base / "run", run_module("jetrl_jax.train", "--config", str(config), cache=compilation_cache)


def test_run_leaves_its_whole_record(finished):
    directory, process = finished
    assert process.returncode == 0, process.stderr
    assert "held-out accuracy" in process.stdout
    for name in (
        "config.yaml",
        "environment.json",
        "precision.txt",
        "metrics.jsonl",
        "samples.jsonl",
        "checkpoints/4",
        "export/config.json",
    ):
        assert (directory / name).exists(), name
    (start,) = json.loads((directory / "environment.json").read_text())["starts"]
    assert start["attention"]["name"] == "xla" and "mosaic_gpu cannot run" in start["attention"]["reason"]
    assert (
        start["dense_products"]["name"] == "xla_fast"
        and "the platform is 'cpu'" in start["dense_products"]["reason"]
    )
    assert all(choice["reason"].startswith("auto: ") for choice in start["fp8_products"].values())
    assert start["rollout_engine"] == {"mode": "jax", "slots": 16, "decode_chunk_tokens": 3}
    table = rows(directory)
    assert [row["step"] for row in table] == [0, 1, 2, 3, 4]
    assert all("mismatch/k3" in row and "reward/mean" in row for row in table[1:])
    assert [row["policy_version"] for row in table] == [0, 0, 1, 2, 3]
    assert "eval/accuracy" in table[0] and "eval/accuracy" in table[4] and "eval/accuracy" not in table[2]


def test_exact_run_has_no_mismatch(finished):
    assert [row["mismatch/logprob_abs_max"] for row in rows(finished[0])[1:]] == [0.0] * 4


def test_export_is_read_by_transformers(finished):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(finished[0] / "export")
    assert sum(p.numel() for p in model.parameters()) > 10_000
    assert transformers.AutoTokenizer.from_pretrained(finished[0] / "export")("abc")["input_ids"]


@pytest.mark.long
@pytest.mark.newest
def test_generate_and_evaluate_read_the_run_and_its_export(finished):
    directory = finished[0]
    said = run_here(
        "jetrl_jax.commands.generate", "--checkpoint", str(directory), "--prompt", "ab=", "--samples", "2"
    )
    assert said.returncode == 0 and len(said.stdout.splitlines()) == 2, said.stderr
    other = run_here(
        "jetrl_jax.commands.generate",
        "--checkpoint",
        str(directory / "export"),
        "--prompt",
        "ab=",
        "--max-tokens",
        "4",
    )
    assert other.returncode == 0, other.stderr
    scored = run_here("jetrl_jax.commands.evaluate", "--checkpoint", str(directory), "--step", "best")
    assert scored.returncode == 0, scored.stderr
    answer = json.loads(scored.stdout)
    assert answer["step"] == 4 and answer["eval/accuracy"] == rows(directory)[-1]["eval/accuracy"]


@pytest.mark.long
@pytest.mark.newest
def test_mismatch_names_the_first_operator_that_differs(finished, tmp_path):
    command = ("jetrl_jax.commands.mismatch", "--checkpoint", str(finished[0]))
    outputs = ("--json", str(tmp_path / "numbers.json"), "--out", str(tmp_path / "page.html"))
    found = run_here(*command, "--flow-a", "bf16", "--flow-b", "fp8_unified", "--completions", "4", *outputs)
    assert found.returncode == 0 and "they part at layer 0 qkv" in found.stdout, found.stderr
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["logprobs"]["metrics"]["mismatch/logprob_abs_max"] > 0 and len(numbers["operators"]) == 12
    assert "layer 0 qkv" in (tmp_path / "page.html").read_text(encoding="utf-8")
    same = run_here(*command, "--text", "ab=ba")
    assert same.returncode == 0 and "they never part" in same.stdout and "k3 0" in same.stdout, (
        same.stdout + same.stderr
    )
    for argument in (
        ["--completions", "0"],
        ["--out", str(tmp_path / "no" / "page.html")],
        ["--text", "ab=" * 9999],
    ):
        refused = run_here(*command, *argument)
        assert (
            refused.returncode == 2 and "Traceback" not in refused.stderr and "mismatch: " in refused.stderr
        ), refused.stderr
    taskless = run_here("jetrl_jax.commands.mismatch", "--checkpoint", str(finished[0] / "export"))
    assert taskless.returncode == 2 and "expected --text" in taskless.stderr
    wrong = run_here(*command, "--flow-a", "fp9")
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr and "'fp9'" in wrong.stderr


@pytest.mark.parametrize(
    "speculation",
    [
        pytest.param({"kind": "none"}, id="plain"),
        pytest.param({"kind": "lookup", "lengths": [0, 2]}, id="lookup", marks=pytest.mark.long),
    ],
)
def test_stopped_and_resumed_run_equals_an_uninterrupted_one(
    speculation, finished, tmp_path, compilation_cache
):
    """The one that is stopped may speculate, the other does not."""
    engine = TINY["rollout"]["engine"] | {"speculation": speculation}
    config = write_config(tiny_config(tmp_path / "run", rollout={"engine": engine}), tmp_path / "config.yaml")
    process = subprocess.Popen(
        train_command(config),
        env=command_environment(compilation_cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 1):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert rows(tmp_path / "run")[-1]["step"] < 4
    resumed = run_here("jetrl_jax.train", "--config", str(config), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert rows(tmp_path / "run") == rows(finished[0])
    assert exported_weights(tmp_path / "run") == exported_weights(finished[0])
    told = json.loads((tmp_path / "run" / "environment.json").read_text())["starts"][-1]["rollout_engine"]
    promise = told.get("speculation", {}).get("promise", "")
    assert ("bit for bit those without" in promise) == (speculation["kind"] == "lookup")


@pytest.mark.long
def test_the_shipped_run_with_speculation_equals_the_one_without(tmp_path, monkeypatch):
    """Its policy is hardly trained here, so drafts are asked for by chance, and any completion has a reward."""
    rng, found = np.random.default_rng(0), []
    monkeypatch.setattr(DraftLength, "choose", lambda self, shape: int(rng.choice(self.lengths)))
    for name in ("lookup", "none"):
        sets = {
            "run.directory": tmp_path / name,
            "run.steps": 4,
            "eval.every_steps": 2,
            "eval.prompts": 16,
            "warm_start.steps": 20,
            "rewards": "[{name: 'tiny:shorter'}]",
            "rollout.engine.speculation": name,
        }
        said = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        process = run_here("jetrl_jax.train", "--config", str(ROOT / "configs/tiny_spec_cpu.yaml"), *said)
        assert process.returncode == 0, process.stderr
        table = read_metrics(tmp_path / name / "metrics.jsonl")
        assert name == "none" or any(row.get("speculation/accepted_tokens", 0) > 0 for row in table)
        samples = (tmp_path / name / "samples.jsonl").read_bytes()
        found.append((rows(tmp_path / name), samples, exported_weights(tmp_path / name)))
    assert found[0] == found[1] and len(found[0][0]) == 5
    assert any(row.get("optimizer/grad_norm", 0) > 0 for row in found[0][0])


@pytest.mark.long
def test_a_draft_head_is_trained_and_changes_no_metric_of_the_policy(tmp_path):
    found = []
    for speculation in ({"kind": "head", "lengths": [0, 2], "learning_rate": 1e-2}, {"kind": "none"}):
        config = tiny_config(
            tmp_path / speculation["kind"],
            model=TINY["model"] | {"num_layers": 4},
            rollout={"engine": TINY["rollout"]["engine"] | {"speculation": speculation}},
        )
        file = write_config(config, tmp_path / f"{speculation['kind']}.yaml")
        process = run_here("jetrl_jax.train", "--config", str(file))
        assert process.returncode == 0, process.stderr
        table = rows(tmp_path / speculation["kind"])
        found.append([{k: v for k, v in row.items() if not k.startswith("draft/")} for row in table])
        if speculation["kind"] == "head":
            losses = [row["draft/loss"] for row in table[1:]]
            assert losses[-1] < losses[0] and 0 < table[1]["draft/overlap"] <= 1
    assert found[0] == found[1]
    assert exported_weights(tmp_path / "head") == exported_weights(tmp_path / "none")


@pytest.mark.long
def test_a_run_with_a_draft_head_resumes_to_the_same_arrays(tmp_path, compilation_cache):
    engine = TINY["rollout"]["engine"] | {"speculation": {"kind": "head", "lengths": [0, 2]}}
    model = TINY["model"] | {"num_layers": 4}
    config = tiny_config(tmp_path / "run", model=model, rollout={"engine": engine})
    file = str(write_config(config, tmp_path / "config.yaml"))
    found = run_module("jetrl_jax.train", "--config", file, "--verify-resume", "1", cache=compilation_cache)
    assert found.returncode == 0 and "arrays of the checkpoint" in found.stdout, found.stderr


def test_resuming_a_finished_run_changes_no_row(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}
    config = write_config(tiny_config(tmp_path / "run"), tmp_path / "config.yaml")
    process = run_here("jetrl_jax.train", "--config", str(config), "--resume")
    assert process.returncode == 0, process.stderr
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before
    assert exported_weights(tmp_path / "run") == exported_weights(finished[0])


@pytest.mark.long
def test_verify_resume_finds_the_run_equal(tmp_path, compilation_cache):
    config = write_config(tiny_config(tmp_path / "run"), tmp_path / "config.yaml")
    found = run_module(
        "jetrl_jax.train", "--config", str(config), "--verify-resume", "2", cache=compilation_cache
    )
    assert found.returncode == 0, found.stderr
    for what in (
        "after step 2 of 4, resumed",
        "metrics of 5 rows",
        "samples",
        "arrays of the checkpoint",
        "data position",
        "exported files",
    ):
        assert what in found.stdout, found.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_verify_resume_names_what_a_restart_changes(tmp_path, compilation_cache):
    config = write_config(tiny_config(tmp_path / "run", rewards=None), tmp_path / "config.yaml")
    sets = ("--set", "rewards=[{name: 'tiny:forgetful'}]", "--verify-resume", "2")
    found = run_module("jetrl_jax.train", "--config", str(config), *sets, cache=compilation_cache)
    assert found.returncode == 3 and "Traceback" not in found.stderr, found.stderr
    assert "reward/mean" in found.stderr and "array params" in found.stderr


def test_resume_with_another_config_is_refused_with_the_fields(finished, tmp_path):
    config = write_config(
        tiny_config(finished[0], model={"hidden_size": 128}, optimizer={"learning_rate": 2e-3}),
        tmp_path / "other.yaml",
    )
    process = run_here("jetrl_jax.train", "--config", str(config), "--resume")
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert "model.hidden_size" in process.stderr and "optimizer.learning_rate" in process.stderr


def test_resume_of_a_run_whose_files_are_damaged_is_one_message(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    config = write_config(tiny_config(tmp_path / "run"), tmp_path / "config.yaml")
    (tmp_path / "run" / "config.yaml").write_text("a: [\n")
    process = run_here("jetrl_jax.train", "--config", str(config), "--resume")
    assert (
        process.returncode == 2 and "Traceback" not in process.stderr and "config.yaml:" in process.stderr
    ), process.stderr
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").touch()
    process = run_here("jetrl_jax.train", "--config", str(config), "--resume")
    assert (
        process.returncode == 2
        and "Traceback" not in process.stderr
        and "expected a directory" in process.stderr
    ), process.stderr


def test_second_run_in_a_directory_is_refused(finished, tmp_path):
    config = write_config(tiny_config(finished[0]), tmp_path / "config.yaml")
    process = run_here("jetrl_jax.train", "--config", str(config))
    assert (
        process.returncode == 2 and "Traceback" not in process.stderr and str(finished[0]) in process.stderr
    )


@pytest.mark.long
def test_killed_run_resumes_to_the_same_end(tmp_path, compilation_cache):
    """SIGKILL at random moments, some of them during a save, against an uninterrupted run."""
    steps, kills = 40, 5
    sections = {"run": {"steps": steps, "tensorboard": False}, "checkpoint": {"every_steps": 1}}
    straight = write_config(tiny_config(tmp_path / "straight", **sections), tmp_path / "straight.yaml")
    process = run_module("jetrl_jax.train", "--config", str(straight), cache=compilation_cache)
    assert process.returncode == 0, process.stderr
    killed = write_config(tiny_config(tmp_path / "killed", **sections), tmp_path / "killed.yaml")
    rng = np.random.default_rng(0)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for kill in range(kills):
        child = subprocess.Popen(
            train_command(killed, "--resume"),
            env=command_environment(compilation_cache),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wanted = (kill + 1) * steps // (kills + 2)
        while child.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") <= wanted):
            time.sleep(0.005)
        time.sleep(float(rng.uniform(0, 0.15)))
        assert child.poll() is None, "the run ended before it was killed"
        child.kill()
        child.wait()
    process = run_module("jetrl_jax.train", "--config", str(killed), "--resume", cache=compilation_cache)
    assert process.returncode == 0, process.stderr
    assert rows(tmp_path / "killed") == rows(tmp_path / "straight")
    assert exported_weights(tmp_path / "killed") == exported_weights(tmp_path / "straight")
