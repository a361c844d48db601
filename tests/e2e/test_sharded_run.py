"""Whole runs on a mesh of four (fake) devices: exact, resumable to the bit, and resumable on another mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import rows, run_module, tiny_config, write_config

MESH = {"data": 2, "fsdp": 2}
SPLIT_LAYERS = {"data": 2, "tensor": 2}
WIDE: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128},
    "batch": {"microbatch_tokens": 28},
    "warm_start": {"steps": 1},
}


@pytest.fixture(autouse=True)
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")


@pytest.mark.long
def test_run_on_a_mesh_is_exact_and_goes_on_on_another_mesh(tmp_path: Path, compilation_cache: Path) -> None:
    run = {"steps": 2, "tensorboard": False}
    config = write_config(
        tiny_config(tmp_path / "run", sharding=SPLIT_LAYERS, run=run, **WIDE), tmp_path / "config.yaml"
    )
    process = run_module("jetrl_jax.train", "--config", str(config), cache=compilation_cache)
    assert process.returncode == 0, process.stderr
    first = rows(tmp_path / "run")
    assert [row["mismatch/logprob_abs_max"] for row in first[1:]] == [0.0, 0.0]
    assert '"tensor": 2' in (tmp_path / "run" / "environment.json").read_text()
    other = (
        "--set",
        "sharding.tensor=1",
        "--set",
        "sharding.fsdp=2",
        "--set",
        "batch.remat=layer",
        "--set",
        "run.steps=3",
    )
    process = run_module(
        "jetrl_jax.train", "--config", str(config), "--resume", *other, cache=compilation_cache
    )
    assert process.returncode == 0, process.stderr
    after = rows(tmp_path / "run")
    assert after[:3] == first and after[3]["step"] == 3 and after[3]["mismatch/logprob_abs_max"] == 0.0
    assert after[3]["policy_version"] == first[2]["policy_version"] + 1


@pytest.mark.long
def test_stopped_run_on_a_mesh_resumes_to_the_same_bits(tmp_path: Path, compilation_cache: Path) -> None:
    config = write_config(tiny_config(tmp_path / "run", sharding=MESH, **WIDE), tmp_path / "config.yaml")
    found = run_module(
        "jetrl_jax.train", "--config", str(config), "--verify-resume", "1", cache=compilation_cache
    )
    assert found.returncode == 0 and "after step 1 of 2, resumed" in found.stdout, found.stderr


def test_more_devices_than_there_are_is_one_message(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path / "run", sharding={"data": 8}), tmp_path / "config.yaml")
    process = run_module("jetrl_jax.train", "--config", str(config))
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert (
        "got 4 (cpu), expected sharding.data * sharding.fsdp * sharding.tensor = 8 * 1 * 1 = 8"
        in process.stderr
    )
    assert not (tmp_path / "run").exists()
