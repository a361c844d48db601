"""Whole runs with keys and values in FP8: exact in every step, with scales that follow the policy, resumed to
the bit, on a mesh and in two processes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny import rows, run_module, shorter, tiny_config, write_config

from jetrl_jax.precision.parameters import named_params
from jetrl_jax.runs.grpo import GRPOTrainer
from jetrl_jax.runs.policy import build_policy, kv_scales, load_policy, published_weights

pytestmark = pytest.mark.long
RUN = {"steps": 4, "tensorboard": False}


@pytest.mark.parametrize("preset", ["bf16", "fp8_unified", "fp16"])
def test_run_is_exact_and_resumes_with_its_scales(preset: str, tmp_path: Path) -> None:
    """Over a warm start, two minibatches a step and a reference; loading the run gives the scales too."""
    fields = {
        "precision": {"preset": preset, "kv_cache": "fp8"},
        "algorithm": {"kl_coef": 0.1, "minibatches": 2},
        "optimizer": {"learning_rate": 0.02},  # so that keys and values grow
        "run": RUN,
    }
    whole = GRPOTrainer(tiny_config(tmp_path / "whole", **fields), reward_functions=[shorter])
    whole.train()
    expected = rows(tmp_path / "whole")[1:]
    assert [row["mismatch/logprob_abs_max"] for row in expected] == [0.0] * 4
    assert all(row["kv/clip_fraction"] < 1e-2 for row in expected)
    assert all(row["kv/k_exponent_min"] <= row["kv/k_exponent_max"] for row in expected)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    GRPOTrainer(tiny_config(tmp_path / "run", **fields), reward_functions=[shorter], resume=True).train()
    keys = (
        "step",
        "loss/total",
        "optimizer/grad_norm",
        "kv/k_exponent_max",
        "kv/v_exponent_max",
        "kv/clip_fraction",
    )
    assert [[row[key] for key in keys] for row in rows(tmp_path / "run")[1:]] == [
        [row[key] for key in keys] for row in expected
    ]
    policies = [load_policy(tmp_path / name) for name in ("whole", "run")]
    one, other = (dict(named_params(published_weights(policy))) for policy in policies)
    scales = [path for path in one if path.endswith("_scale")]
    assert len(scales) == 2 and all(np.array_equal(one[path], other[path]) for path in scales)
    assert all(float(one[path]) != 1.0 for path in scales), "these are no scales of a policy"
    plain = load_policy(tmp_path / "run", ["precision.kv_cache=bf16"])
    assert kv_scales(plain) is None
    fresh = kv_scales(build_policy(tiny_config(tmp_path / "fresh", **fields)))
    assert fresh is not None and fresh.shape == (1, 2) and (np.asarray(fresh) < 1).all()


@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 2}])
def test_run_on_a_mesh_is_exact_with_the_scales_of_one_device(
    mesh: dict[str, int], tmp_path: Path, compilation_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads and rows of other devices count in the maxima."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    wide = {
        "model": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128},
        "batch": {"microbatch_tokens": 28},
        "warm_start": {"steps": 1},
        "precision": {"kv_cache": "fp8"},
        "run": {"steps": 2, "tensorboard": False},
    }
    found = {}
    for name, sharding in (("mesh", mesh), ("one", {})):
        config = write_config(
            tiny_config(tmp_path / name, sharding=sharding, **wide), tmp_path / f"{name}.yaml"
        )
        process = run_module("jetrl_jax.train", "--config", str(config), cache=compilation_cache)
        assert process.returncode == 0, process.stderr
        found[name] = rows(tmp_path / name)[1:]
    assert [row["mismatch/logprob_abs_max"] for row in found["mesh"]] == [0.0, 0.0]
    keys = [f"kv/{kind}_exponent_{side}" for kind in "kv" for side in ("min", "max")]
    assert [found["mesh"][0][key] for key in keys] == [found["one"][0][key] for key in keys]
