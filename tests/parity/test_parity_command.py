"""`jetrl_jax.commands.parity`: its figures by hand, and the command with the real vLLM, a flow beside its
floor.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jetrl_jax.commands import parity
from jetrl_jax.config.load import config_from_dict
from jetrl_jax.errors import UserError
from jetrl_jax.runs.policy import Policy, build_policy

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 32,
}
LENGTHS = {"max_prompt_tokens": 16, "max_completion_tokens": 24}
NEEDS_VLLM = "trainer and engine are compared with the real vLLM, and vllm is not installed"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return build_policy(
        config_from_dict({"model": SIZES, "rollout": LENGTHS, "precision": {"preset": "fp8_unified"}})
    )


def test_gap_is_the_textbooks():
    trainer = [np.array([9.0, -1.0, -2.0], np.float32), np.array([9.0, -0.5], np.float32)]
    engine = [np.array([0.0, -1.5, -2.0], np.float32), np.array([0.0, -0.25], np.float32)]
    row = parity.gap(trainer, engine)
    differences = [0.5, 0.0, -0.25]
    assert row["tokens"] == 3 and row["logprob_abs_max"] == 0.5 and row["logprob_abs_mean"] == 0.25
    assert row["k3"] == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 3, rel=1e-12)
    assert row["equal_share"] == pytest.approx(1 / 3)
    assert row["by_position"] == [[1, 1, 0.375, 2], [2, 2, 0.0, 1]]


def test_nothing_to_score_is_an_error():
    with pytest.raises(UserError, match="--sequences 0"):
        parity.main(["--model", "anywhere", "--sequences", "0"])


@pytest.mark.parametrize("file", ["nowhere/parity.json", "."])
def test_output_that_cannot_be_written_is_an_error_before_anything_runs(file, tmp_path):
    with pytest.raises(
        UserError, match=r"parity: the output (is not in a writable directory|is a directory)"
    ):
        parity.main(["--model", "anywhere", "--json", str(tmp_path / file)])


@pytest.mark.long
def test_parity_command_prints_the_flow_beside_its_floor(policy: Policy, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    policy.save(tmp_path / "model", dtype="float32")
    fields = [
        "precision.preset=fp8_unified",
        "rollout.engine.kv_cache_memory_mb=64",
        "rollout.engine.max_num_seqs=16",
    ]
    fields += [f"rollout.{name}={value}" for name, value in LENGTHS.items()]
    command = [
        "--model",
        str(tmp_path / "model"),
        "--sequences",
        "8",
        "--json",
        str(tmp_path / "parity.json"),
    ]
    command += [word for field in fields for word in ("--set", field)]
    ended = subprocess.run(
        [sys.executable, "-m", "jetrl_jax", "parity", *command],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    print(f"\n{ended.stdout}")
    pairs = json.loads((tmp_path / "parity.json").read_text())
    assert list(pairs) == ["policy", "bf16_floor", "bf16_fp8"] and "bf16_fp8" in ended.stdout
    assert pairs["policy"]["equal_share"] == 1 and pairs["bf16_fp8"]["equal_share"] < 0.1
    assert "policy, operators: they never part" in ended.stdout and "bf16_floor, operators: " in ended.stdout
    assert pairs["policy"]["k3"] < pairs["bf16_fp8"]["k3"] / 1e6
