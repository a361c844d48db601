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
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine

SPEC, METRICS = ROOT / "configs/tiny_spec_cpu.yaml", "metrics.jsonl"


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


def test_stopped_and_resumed_run_equals_an_uninterrupted_one(finished, tmp_path, compilation_cache):
    config = write_config(tiny_config(tmp_path / "run"), tmp_path / "config.yaml")
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


SPOKEN = {
    "run.steps": 2,
    "run.tensorboard": "false",
    "checkpoint.every_steps": 1,
    "eval": "{prompts: 8, samples: 2, every_steps: 20}",
    "warm_start": "{steps: 6, batch_size: 32, noise: 0.1}",
    "rewards": "[{name: 'tiny:shorter'}]",
    "rollout.prompts_per_step": 4,
    "rollout.engine.slots": 12,
    "batch.microbatch_tokens": 960,
}
DRAFTS = {
    "none": "none",
    "lookup": "{kind: lookup, lengths: [0, 3]}",
    "head": "{kind: head, lengths: [0, 2], learning_rate: 0.01}",
}


@pytest.mark.long
def test_the_shipped_run_with_speculation_equals_the_one_without(tmp_path, monkeypatch):
    """Guesses from the text and of a head that is trained, which is also resumed before the last step; smaller than
    the shipped run.  Its policy is hardly trained here, so drafts are asked for by chance, and any completion
    has a reward.  The commands that read the head's run sample with it.  Of programs that are compiled as the
    product's: tests/parity/test_speculation.py.
    """
    rng, loaded, load = np.random.default_rng(0), [], JaxEngine.load_draft
    monkeypatch.setattr(DraftLength, "choose", lambda self, shape: int(rng.choice(self.lengths)))
    monkeypatch.setattr(JaxEngine, "load_draft", lambda self, head: loaded.append(head) or load(self, head))

    def train(directory, draft, *more):
        sets = SPOKEN | {"run.directory": directory, "rollout.engine.speculation": DRAFTS[draft]}
        said = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        process = run_here("jetrl_jax.train", "--config", str(SPEC), *said, *more)
        assert process.returncode == 0, process.stderr
        told = json.loads((directory / "environment.json").read_text())["starts"][-1]["rollout_engine"]
        promise = told.get("speculation", {}).get("promise", "")
        assert ("bit for bit those without" in promise) == (draft != "none")
        return rows(directory), (directory / "samples.jsonl").read_bytes(), exported_weights(directory)

    expected = train(tmp_path / "none", "none")
    assert len(expected[0]) == 3 and any(row.get("optimizer/grad_norm", 0) > 0 for row in expected[0])
    for draft in ("lookup", "head"):
        directory, again = tmp_path / draft, tmp_path / f"{draft} again"
        table, *others = train(directory, draft)
        plain = [{k: v for k, v in row.items() if not k.startswith("draft/")} for row in table]
        assert (plain, *others) == expected
        accepted = [row.get("speculation/accepted_tokens", 0) for row in read_metrics(directory / METRICS)]
        assert sum(accepted) > 0
        if draft == "lookup":  # of which a checkpoint has nothing
            continue
        shutil.copytree(directory, again)
        shutil.rmtree(again / "checkpoints" / "2")
        assert train(again, draft, "--resume") == (table, *others)
    assert 0 < table[1]["draft/overlap"] <= 1 and table[1]["draft/loss"] != table[2]["draft/loss"]
    weights = [
        (tmp_path / name / "draft_head/model.safetensors").read_bytes() for name in ("head", "head again")
    ]
    assert weights[0] == weights[1]

    def evaluated(directory, *more):
        count, words = len(loaded), ("--checkpoint", str(directory), *more)
        scored = run_here("jetrl_jax.commands.evaluate", *words)
        assert scored.returncode == 0, scored.stderr
        found = json.loads(scored.stdout)
        assert found["eval/accuracy"] == expected[0][-1]["eval/accuracy"]
        return len(loaded) > count, "no trained draft head is there" in scored.stderr

    head, export = tmp_path / "head", tmp_path / "head" / "export"
    assert evaluated(head) == (True, False)
    (tmp_path / "head again" / "config.yaml").write_text(
        (head / "config.yaml").read_text().replace("head_path: null", "head_path: /gone/draft_head")
    )
    assert evaluated(tmp_path / "head again") == (True, False), "its own draft_head has the sizes"
    given = "--config", str(head / "config.yaml")
    assert evaluated(export, *given) == (False, True)
    at = f"rollout.engine.speculation.head_path={head / 'draft_head'}"
    assert evaluated(export, *given, "--set", at) == (True, False)


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
    config = write_config(tiny_config(tmp_path / "run", warm_start=None), tmp_path / "config.yaml")
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
    fields = {"rewards": None, "warm_start": None}
    config = write_config(tiny_config(tmp_path / "run", **fields), tmp_path / "config.yaml")
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
    steps, kills = 18, 2
    sections = {"run": {"steps": steps, "tensorboard": False}, "checkpoint": {"every_steps": 1}}
    sections |= {"warm_start": None}
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
