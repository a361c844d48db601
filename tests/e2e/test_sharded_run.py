"""Whole runs on a mesh of four (fake) devices: exact, resumable to the bit, and resumable on another mesh."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import rows, run_module, tiny_config, write_config

SPLIT_LAYERS = {"data": 2, "tensor": 2}
WIDE: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128},
    "batch": {"microbatch_tokens": 28},
    "warm_start": {"steps": 1},
    "precision": {"kv_cache": "fp8"},
    "checkpoint": {"every_steps": 1},
    "run": {"steps": 2, "tensorboard": False},
}


@pytest.fixture(autouse=True)
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")


@pytest.mark.long
def test_run_on_a_mesh_is_exact_resumes_and_goes_on_on_another_mesh(
    tmp_path: Path, compilation_cache: Path
) -> None:
    """With keys and values in FP8, whose scales are those of one device: heads and rows of other devices count
    in the maxima.
    """

    def train(directory: str, *more: str, sharding: dict[str, int] = SPLIT_LAYERS) -> list[dict[str, float]]:
        config = write_config(
            tiny_config(tmp_path / directory, sharding=sharding, **WIDE), tmp_path / f"{directory}.yaml"
        )
        process = run_module("jetrl_jax.train", "--config", str(config), *more, cache=compilation_cache)
        assert process.returncode == 0, process.stderr
        return rows(tmp_path / directory)

    first = train("run")
    assert [row["mismatch/logprob_abs_max"] for row in first[1:]] == [0.0, 0.0]
    assert '"tensor": 2' in (tmp_path / "run" / "environment.json").read_text()
    one = train("one", "--set", "run.steps=1", sharding={})
    keys = [f"kv/{kind}_exponent_{side}" for kind in "kv" for side in ("min", "max")]
    assert [first[1][key] for key in keys] == [one[1][key] for key in keys]
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "2")
    assert train("again", "--resume") == first
    weights = [tmp_path / name / "export" / "model.safetensors" for name in ("run", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    other = ["sharding.tensor=1", "sharding.fsdp=2", "batch.remat=layer", "run.steps=3"]
    after = train("run", "--resume", *(word for text in other for word in ("--set", text)))
    assert after[:3] == first and after[3]["step"] == 3 and after[3]["mismatch/logprob_abs_max"] == 0.0
    assert after[3]["policy_version"] == first[2]["policy_version"] + 1


def test_more_devices_than_there_are_is_one_message(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path / "run", sharding={"data": 8}), tmp_path / "config.yaml")
    process = run_module("jetrl_jax.train", "--config", str(config))
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert (
        "got 4 (cpu), expected sharding.data * sharding.fsdp * sharding.tensor = 8 * 1 * 1 = 8"
        in process.stderr
    )
    assert not (tmp_path / "run").exists()
