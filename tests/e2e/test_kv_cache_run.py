"""Whole runs with keys and values in FP8: exact in every step, with scales that follow the policy, resumed to
the bit.  With FP8 products, on a mesh: test_sharded_run; in two processes, in BF16: test_two_processes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny import rows, shorter, tiny_config

from jetrl_jax.precision.parameters import named_params
from jetrl_jax.runs.grpo import GRPOTrainer
from jetrl_jax.runs.policy import build_policy, kv_scales, load_policy, published_weights

pytestmark = [pytest.mark.long, pytest.mark.as_the_product]
RUN = {"steps": 4, "tensorboard": False}


def test_run_is_exact_and_resumes_with_its_scales(tmp_path: Path) -> None:
    """In FP16, over a warm start, two minibatches a step and a reference; loading the run gives the scales too."""
    fields = {
        "precision": {"preset": "fp16", "kv_cache": "fp8"},
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
