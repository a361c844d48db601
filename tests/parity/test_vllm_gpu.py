"""Trainer and vLLM on one GPU: what the one gives up, the other takes.  Needs an NVIDIA GPU and vLLM's CUDA build; not run yet."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARE = 0.6  # of the GPU, for each of the two in turn: together they do not fit


def problem() -> str | None:
    """Why the test cannot run here."""
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU: JAX's platform is {jax.default_backend()!r}"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    from vllm.platforms import current_platform

    return "this vLLM is a CPU build" if current_platform.is_cpu() else None


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_process", "server"])
def test_trainer_and_vllm_take_turns_on_one_gpu(mode: str, tmp_path: Path) -> None:
    if (why := problem()) is not None:
        pytest.skip(why)
    command = [sys.executable, str(Path(__file__).resolve()), mode]  # a process of its own: JAX here has taken the GPU already
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    ran = subprocess.run(command, cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert seen["certified"] and seen["largest"] < 1.0 and seen["versions"] == [0, 1, 2]


def take_turns(mode: str) -> dict[str, Any]:
    """Three rollouts of a small policy by a vLLM that may take `SHARE` of the GPU; between them the trainer takes as much."""
    import jax.numpy as jnp
    import numpy as np

    from bridge.engine.factory import build_vllm_engine
    from jetrl_jax.config_io import load_config
    from jetrl_jax.gpu_memory import share_gpu
    from jetrl_jax.policy import build_policy, published_weights
    from jetrl_jax.rollout.engine import Request, SamplingParams

    sizes = "{hidden_size: 256, intermediate_size: 256, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 64}"
    changes = [f"model={sizes}", "rollout.engine=vllm", "numerics.engine_variant=cuda", f"vllm.mode={mode}"]
    config = load_config(None, [*changes, f"vllm.gpu_memory_utilization={SHARE}", "vllm.on_mismatch=warn"])
    share_gpu(config)
    policy = build_policy(config)
    published = published_weights(policy)
    engine = build_vllm_engine(policy.model, policy.plan, config)
    rows: list[dict[str, Any]] = []
    engine.attach(rows.append, print, None)
    total = _memory_bytes()
    try:
        for version in range(3):
            engine.load_weights(published, version)
            sampled = engine.generate([Request(i, [5, 6, 7], i) for i in range(8)], SamplingParams(1.0, 8, (1,), 0))
            assert {t.policy_version for t in sampled} == {version}
            engine.sleep()
            ballast = jnp.ones(int(SHARE * total) // 4, jnp.float32)
            assert float(ballast[-1]) == 1.0
            del ballast
            np.asarray(jnp.zeros(1))  # what was freed returns to the driver when the device is next waited for
    finally:
        engine.close()
    largest = max(row["probe_logprob_abs_max"] for row in rows)
    certified = all(not row["differences"] for row in rows)
    return {"certified": certified, "largest": largest, "versions": [row["policy_version"] for row in rows]}


def _memory_bytes() -> int:
    """Of the first GPU, as the driver states it."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


if __name__ == "__main__":
    print(json.dumps(take_turns(sys.argv[1])))
