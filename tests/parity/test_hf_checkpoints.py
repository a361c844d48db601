"""Checkpoint directories exchanged with transformers, offline: it reads ours, we read its, with equal
tensors.
"""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bridge import load_checkpoint, save_checkpoint
from bridge.hf.config import from_hf, to_hf
from bridge.hf.names import to_hf_name
from jetrl_jax.models.config import ModelConfig
from tests.parity.hf_reference import CASES, random_model, save, torch, transformers

pytestmark = pytest.mark.compiled_quickly

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def to_numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().to(torch.float32).numpy()


def stored(model: Any) -> dict[str, np.ndarray]:
    """The model's own parameters (a tied head once), widened to float32."""
    return {name: to_numpy(value) for name, value in model.named_parameters()}


def params_of(model: Any) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    config = from_hf(model.config.to_dict())
    return config, {name.removeprefix("model."): value for name, value in stored(model).items()}


@pytest.mark.parametrize("max_shard_bytes", [5e9, 40_000], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("case", list(CASES))
def test_transformers_reads_our_checkpoint(tmp_path, case, dtype, max_shard_bytes):
    model = random_model(case)
    config, params = params_of(model)
    target = save_checkpoint(tmp_path / "out", config, params, dtype=dtype, max_shard_bytes=max_shard_bytes)
    assert (target / "model.safetensors").exists() == (max_shard_bytes == 5e9)
    read, info = transformers.AutoModelForCausalLM.from_pretrained(
        target, output_loading_info=True, local_files_only=True
    )
    assert not any(info.values()), info  # nothing missing, unexpected, mismatched or failed
    assert type(read) is type(model)
    assert read.dtype == getattr(torch, dtype)
    expected, got = stored(model), stored(read)
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value.astype(DTYPES[dtype]).astype(np.float32))
    if config.tie_word_embeddings:
        assert read.lm_head.weight.data_ptr() == read.model.embed_tokens.weight.data_ptr()
    assert read.generation_config.eos_token_id == [1, 2] and read.generation_config.pad_token_id == 0


@pytest.mark.parametrize("case", list(CASES))
def test_transformers_computes_the_same_from_our_checkpoint(tmp_path, case):
    model = random_model(case)
    target = save_checkpoint(tmp_path / "out", *params_of(model), dtype="float32")
    read = transformers.AutoModelForCausalLM.from_pretrained(
        target, local_files_only=True, attn_implementation="eager"
    )
    tokens = torch.arange(1, 31)[None]
    with torch.no_grad():
        assert torch.equal(read(tokens).logits, model(tokens).logits)
    assert from_hf(read.config.to_dict()) == from_hf(model.config.to_dict())


@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("case", list(CASES))
def test_we_read_the_checkpoint_of_transformers(tmp_path, case, dtype, max_shard_size):
    model = random_model(case).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "5GB")
    config, params = load_checkpoint(tmp_path)
    assert config == from_hf(model.config.to_dict())
    expected = stored(model)
    assert {to_hf_name(path) for path in params} == set(expected)
    for path, value in params.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, expected[to_hf_name(path)])


@pytest.mark.parametrize("case", list(CASES))
def test_a_checkpoint_goes_round_unchanged(tmp_path, case):
    """transformers -> we -> transformers -> we, in bfloat16: the same numbers and configuration all along."""
    first = load_checkpoint(save(random_model(case).to(torch.bfloat16), tmp_path / "theirs"))
    target = save_checkpoint(tmp_path / "ours", *first)
    again = transformers.AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    second = load_checkpoint(save(again, tmp_path / "theirs_again"))
    assert first[0] == second[0]
    for path, value in first[1].items():
        np.testing.assert_array_equal(value, second[1][path])


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("spelling", ["rope_theta", "rope_parameters"])
def test_either_rope_spelling_of_our_config_is_the_same_model(tmp_path, case, spelling):
    """What transformers 4 sees (it ignores rope_parameters) and what transformers 5 sees (it prefers them)
    agree.
    """
    config = from_hf(random_model(case).config.to_dict())
    values = to_hf(config)
    for key in ("rope_parameters",) if spelling == "rope_theta" else ("rope_theta", "rope_scaling"):
        del values[key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    read = transformers.AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert from_hf(read.to_dict()) == config == from_hf(values)
