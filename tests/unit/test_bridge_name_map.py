"""The name map is a bijection, lists every mismatch, and names exactly the tensors that transformers' models
have.
"""

from __future__ import annotations

import pytest

from bridge.hf.names import from_hf_name, mismatches, name_map, parameter_shapes, to_hf_name
from jetrl_jax.models.config import ModelConfig
from tests.small_model import small_model


def small_config(architecture: str, *, tied: bool = False, bias: bool | None = None) -> ModelConfig:
    sizes = {"vocab_size": 29, "hidden_size": 24, "intermediate_size": 40, "num_layers": 3, "head_dim": 10}
    biases = {} if bias is None else {"attention_bias": bias}
    return small_model(architecture, **sizes, **biases, tie_word_embeddings=tied)


CASES = [
    pytest.param(small_config(architecture, tied=tied), id=f"{architecture}-{'tied' if tied else 'untied'}")
    for architecture in ("qwen3", "qwen2", "llama")
    for tied in (False, True)
]


@pytest.mark.parametrize("config", CASES)
def test_name_map_is_a_bijection(config):
    names = name_map(config)
    assert len(set(names.values())) == len(names)
    assert {from_hf_name(hf): hf for hf in names.values()} == names
    assert {path: to_hf_name(path) for path in names} == names
    assert list(names) == list(parameter_shapes(config))


def test_name_map_knows_these_names():
    names = name_map(small_config("qwen3"))
    assert names["embed_tokens.weight"] == "model.embed_tokens.weight"
    assert names["layers.2.self_attn.q_norm.weight"] == "model.layers.2.self_attn.q_norm.weight"
    assert names["lm_head.weight"] == "lm_head.weight"
    assert "lm_head.weight" not in name_map(small_config("qwen3", tied=True))
    biases = {
        path
        for path in name_map(small_config("qwen2"))
        if path.startswith("layers.0.") and path.endswith("bias")
    }
    assert biases == {f"layers.0.self_attn.{letter}_proj.bias" for letter in "qkv"}
    assert "layers.0.self_attn.o_proj.bias" in name_map(small_config("llama", bias=True))


@pytest.mark.parametrize(
    "name", ["model.lm_head.weight", "embed_tokens.weight", "transformer.h.0.weight", ""]
)
def test_from_hf_name_is_none_outside_the_image(name):
    assert from_hf_name(name) is None


def test_parameter_shapes_are_out_in():
    shapes = parameter_shapes(small_config("qwen3"))
    assert shapes["layers.0.self_attn.q_proj.weight"] == (40, 24)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (20, 24)
    assert shapes["layers.0.self_attn.o_proj.weight"] == (24, 40)
    assert shapes["layers.0.mlp.down_proj.weight"] == (24, 40)
    assert shapes["lm_head.weight"] == (29, 24)


@pytest.mark.parametrize("hf_names", [True, False])
def test_mismatches_lists_every_tensor(hf_names):
    config = small_config("llama")
    good = {to_hf_name(path) if hf_names else path: shape for path, shape in parameter_shapes(config).items()}
    assert mismatches(config, good, hf_names=hf_names) == []
    bad = dict(good)
    prefix = "model." if hf_names else ""
    norm, up, down = (
        prefix + path
        for path in ("norm.weight", "layers.1.mlp.up_proj.weight", "layers.2.mlp.down_proj.weight")
    )
    del bad[norm]
    bad[up] = bad[up][::-1]
    del bad[down]
    bad["surprise"] = (3,)
    lines = mismatches(config, bad, hf_names=hf_names)
    assert len(lines) == 4
    for start in (
        f"missing {norm}",
        f"missing {down}",
        f"wrong shape {up}: got [24, 40], expected [40, 24]",
        "unmapped surprise",
    ):
        assert any(line.startswith(start) for line in lines), (start, lines)
