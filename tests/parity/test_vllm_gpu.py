"""Trainer and vLLM on one GPU: the same log-probabilities, and memory that the one gives up and the other
takes.

Needs a Hopper GPU and vLLM's CUDA build; not run yet.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from bridge.vllm.settings import set_environment

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


def alone(arguments: list[str], directory: Path) -> Any:
    """What this file prints last as a program, in a process of its own:
    JAX here has taken the GPU already.
    """
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    ran = subprocess.run(
        command,
        cwd=directory,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("context", [0, 2000])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2"])
def test_an_exact_trainer_and_vllm_with_its_operations_agree_on_every_token(
    architecture: str, context: int, tmp_path: Path
) -> None:
    """Prompts of some tokens, and of so many that FlashAttention would split them."""
    if (why := problem()) is not None:
        pytest.skip(why)
    seen = alone(["exact", architecture, str(context)], tmp_path)
    assert seen["ours"]["tokens"] > 100 and seen["ours"]["equal"] == 1.0 and seen["ours"]["mean"] <= 1e-6
    assert seen["mixed"]["mean"] > 1e-3, "a trainer in BF16 is another policy"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["vllm", "vllm_server"])
def test_trainer_and_vllm_take_turns_on_one_gpu(mode: str, tmp_path: Path) -> None:
    if (why := problem()) is not None:
        pytest.skip(why)
    seen = alone(["turns", mode], tmp_path)
    assert seen["certified"] and seen["largest"] < 1.0 and seen["versions"] == [0, 1, 2]


def exact_gaps(architecture: str, context: int) -> dict[str, Any]:
    """The gaps of `tests/benchmarks/vllm_gap.py` for one policy, with the trainer's operations in vLLM; also
    runs on a CPU.
    """
    from tests.benchmarks.vllm_gap import rows  # first: it leaves vLLM room before JAX starts
    from tests.parity.vllm_policy import QWEN2, QWEN3

    set_environment(jax.default_backend() == "cpu")
    found = rows({"qwen3": QWEN3, "qwen2": QWEN2}[architecture], 0, 24, context or None, {"exact": True})
    return {name: dataclasses.asdict(gap) for name, gap in found.items()}


def take_turns(mode: str) -> dict[str, Any]:
    """Three rollouts of a small policy by a vLLM that may take `SHARE` of the GPU; between them the trainer
    takes as much.
    """
    import jax.numpy as jnp
    import numpy as np

    from jetrl_jax.config.load import load_config
    from jetrl_jax.devices.gpu_memory import share_gpu
    from jetrl_jax.rollout.types import Request, SamplingParams
    from jetrl_jax.runs.engines import build_vllm_engine
    from jetrl_jax.runs.policy import build_policy, published_weights

    sizes = (
        "{hidden_size: 256, intermediate_size: 256, num_layers: 2, num_heads: 4, num_kv_heads: 2, "
        "head_dim: 64}"
    )
    changes = [f"model={sizes}", f"rollout.engine={mode}", "numerics.engine_variant=cuda"]
    config = load_config(
        None, [*changes, f"rollout.engine.gpu_memory_utilization={SHARE}", "rollout.engine.on_mismatch=warn"]
    )
    share_gpu(config)
    policy = build_policy(config)
    published = published_weights(policy)
    rows: list[dict[str, Any]] = []
    engine = build_vllm_engine(policy, record=rows.append, warn=print)
    total = _memory_bytes()
    try:
        for version in range(3):
            engine.load(published, version)
            sampled = engine.generate(
                [Request(i, [5, 6, 7], i) for i in range(8)], SamplingParams(1.0, 8, (1,), 0)
            )
            assert {t.oldest_version for t in sampled} == {version}
            engine.sleep()
            ballast = jnp.ones(int(SHARE * total) // 4, jnp.float32)
            assert float(ballast[-1]) == 1.0
            del ballast
            # what was freed returns to the driver when the device is next waited for
            np.asarray(jnp.zeros(1))
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
    what, *arguments = sys.argv[1:]
    if what == "exact":
        print(json.dumps(exact_gaps(arguments[0], int(arguments[1]))))
    else:
        print(json.dumps(take_turns(arguments[0])))
