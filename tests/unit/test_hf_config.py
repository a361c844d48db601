"""ModelConfig against config.json files in the spellings of transformers 4 and 5,
and every refusal by name.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from bridge.hf.config import from_hf, to_hf
from jetrl_jax.errors import UserError
from jetrl_jax.models.config import ModelConfig, RopeScaling

# As transformers 4 wrote them for published models (sizes and switches as published).
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2 = {
    **{key: value for key, value in QWEN3.items() if key not in ("head_dim", "attention_bias")},
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
ALL = [pytest.param(c, id=c["model_type"]) for c in (QWEN3, QWEN2, LLAMA)]


def newer(config: dict) -> dict:
    """The same file as transformers 5 writes it: one rope_parameters dictionary."""
    rest = {
        key: value
        for key, value in config.items()
        if key not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    rope = {"rope_type": "default", **(config["rope_scaling"] or {}), "rope_theta": config["rope_theta"]}
    return {**rest, "rope_parameters": rope, "dtype": "bfloat16"}


def test_from_hf_reads_published_values():
    llama = from_hf(LLAMA)
    assert llama == ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        rms_norm_eps=1e-05,
        tie_word_embeddings=True,
        attention_bias=False,
        qk_norm=False,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
    )
    qwen2, qwen3 = from_hf(QWEN2), from_hf(QWEN3)
    assert (qwen2.head_dim, qwen2.attention_bias, qwen2.o_proj_bias, qwen2.qk_norm) == (
        64,
        True,
        False,
        False,
    )
    assert (qwen3.head_dim, qwen3.attention_bias, qwen3.qk_norm, qwen3.eos_token_ids) == (
        128,
        False,
        True,
        (151645,),
    )
    assert isinstance(qwen3.rope_theta, float)
    biased = from_hf(LLAMA | {"attention_bias": True})
    assert biased.o_proj_bias


@pytest.mark.parametrize("config", ALL)
def test_from_hf_reads_both_rope_spellings_alike(config):
    old, new = from_hf(config), from_hf(newer(config))
    assert old == new and hash(old) == hash(new)


@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize("eos", [None, 3, [3, 4]], ids=str)
def test_to_hf_round_trips_through_json(config, eos):
    model = from_hf(config | {"eos_token_id": eos})
    assert from_hf(json.loads(json.dumps(to_hf(model, dtype="bfloat16")))) == model


def test_to_hf_round_trips_linear_scaling():
    model = from_hf(QWEN3 | {"rope_scaling": {"type": "linear", "factor": 4}})
    assert model.rope_scaling == RopeScaling("linear", 4.0)
    assert from_hf(to_hf(model)) == model


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"type": "yarn", "factor": 4},
        {"attention_factor": 1, "beta_fast": 16, "beta_slow": 2},
        {"mscale": 0.7, "mscale_all_dim": 0.2, "truncate": False},
        {"beta_fast": None, "truncate": None},
    ],
    ids=str,
)
def test_yarn_is_read_and_written_as_stated(stated):
    config = QWEN3 | {"max_position_embeddings": 131072, "rope_scaling": YARN | stated}
    model = from_hf(config)
    assert from_hf(newer(config)) == model
    written = json.loads(json.dumps(to_hf(model)))
    assert from_hf(written) == model
    said = {key: value for key, value in (YARN | stated).items() if value is not None and key != "type"}
    assert written["rope_scaling"] == said and written["rope_parameters"] == said | {"rope_theta": 1e6}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"factor": 0.5}, r"got factor=0.5, expected at least 1"),
        ({"factor": "4"}, r"got factor='4', expected a positive number"),
        (
            {"factor": 4.0, "original_max_position_embeddings": 8192},
            r"got max_position_embeddings=40960, expected at most .* = 32768",
        ),
        (
            {"original_max_position_embeddings": 32768.5},
            r"got original_max_position_embeddings=32768.5, expected a positive integer",
        ),
        ({"beta_fast": 1, "beta_slow": 2}, r"got beta_fast=1.0, expected at least beta_slow=2.0"),
        ({"beta_slow": 33}, r"got beta_fast=32.0, expected at least beta_slow=33.0"),
        ({"attention_factor": 0.0}, r"got attention_factor=0.0, expected a positive number"),
        ({"mscale": True}, r"got mscale=True, expected a positive number"),
        ({"truncate": 1}, r"got truncate=1, expected true or false"),
        (
            {"low_freq_factor": 1.0},
            r"unsupported rope_scaling.low_freq_factor: got 1.0 with rope_type 'yarn', expected absent",
        ),
        ({"factor": None}, r"missing rope_scaling.factor"),
        (
            {"original_max_position_embeddings": None},
            r"missing rope_scaling.original_max_position_embeddings",
        ),
        ({"rope_theta": 1.0}, r"got rope_theta=1.0, expected more than 1 for yarn"),
    ],
    ids=str,
)
def test_from_hf_raises_on_yarn_that_cannot_be(rope, message):
    config = {key: value for key, value in QWEN3.items() if key != "rope_theta" or "rope_theta" not in rope}
    with pytest.raises(UserError, match=message):
        from_hf(config | {"rope_scaling": YARN | rope})


REQUIRED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "hidden_act",
    "eos_token_id",
]


@pytest.mark.parametrize("config", ALL)
def test_from_hf_raises_on_every_missing_value(config):
    required = (
        REQUIRED
        + {"qwen3": ["head_dim", "attention_bias"], "qwen2": [], "llama": ["attention_bias"]}[
            config["model_type"]
        ]
    )
    for key in required:
        with pytest.raises(UserError, match=f"missing {key}"):
            from_hf({k: v for k, v in config.items() if k != key})
    with pytest.raises(UserError) as caught:
        from_hf({"model_type": config["model_type"]})
    for key in required:
        assert f"missing {key}" in str(caught.value) or key == "head_dim"


def test_from_hf_raises_on_every_missing_rope_value():
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        rope = {k: v for k, v in LLAMA["rope_scaling"].items() if k != key}
        with pytest.raises(UserError, match=rf"missing rope_scaling\.{key}"):
            from_hf(LLAMA | {"rope_scaling": rope})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mistral"),
        ("model_type", ["qwen3"]),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"quant_method": "fp8"}),
        ("mlp_bias", True),
        ("attention_dropout", 0.1),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Custom"}),
        ("architectures", ["Qwen3ForSequenceClassification"]),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 4.0}),
        (
            "rope_scaling",
            {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0], "long_factor": [1.0]},
        ),
        (
            "rope_scaling",
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "finetuned": True,
            },
        ),
        ("rope_scaling", {"rope_type": "linear", "factor": 4.0, "attention_factor": 2.0}),
        ("rope_scaling", {"factor": 4.0}),
        ("rope_scaling", [4.0]),
        ("rope_scaling", {"rope_type": "linear", "factor": -1.0}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
    ids=str,
)
def test_from_hf_raises_on_unsupported(key, value):
    with pytest.raises(UserError, match=f"(unsupported|ambiguous).*{key.split('_')[0]}"):
        from_hf(QWEN3 | {key: value})


def test_from_hf_raises_where_the_two_rope_spellings_disagree():
    rope = {
        "rope_parameters": {"rope_type": "default"},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    with pytest.raises(UserError, match="ambiguous rope scaling"):
        from_hf(QWEN3 | rope)


def test_from_hf_raises_on_architecture_specific_values():
    with pytest.raises(UserError, match="unsupported attention_bias"):
        from_hf(QWEN2 | {"attention_bias": False})
    with pytest.raises(UserError, match="unsupported sliding_window"):
        from_hf(LLAMA | {"sliding_window": 4096})
    with pytest.raises(UserError, match="missing head_dim"):
        from_hf(QWEN2 | {"hidden_size": 900})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture", "gpt2"),
        ("vocab_size", 0),
        ("vocab_size", "151936"),
        ("num_layers", 2.0),
        ("num_layers", True),
        ("num_kv_heads", 3),
        ("head_dim", 31),
        ("rope_theta", 0.0),
        ("rope_theta", float("nan")),
        ("rms_norm_eps", "1e-6"),
        ("tie_word_embeddings", 1),
        ("qk_norm", False),
        ("eos_token_ids", (151936,)),
        ("eos_token_ids", (None,)),
        ("eos_token_ids", [1]),
        ("bos_token_id", -1),
        ("rope_scaling", {"factor": 2.0}),
    ],
    ids=str,
)
def test_model_config_raises_naming_the_field(field, value):
    with pytest.raises(UserError, match=f"got {field}="):
        dataclasses.replace(from_hf(QWEN3), **{field: value})


def test_errors_are_collected():
    with pytest.raises(UserError) as caught:
        from_hf(QWEN3 | {"hidden_act": "gelu", "mlp_bias": True, "rms_norm_eps": None})
    message = str(caught.value)
    assert "hidden_act" in message and "mlp_bias" in message and "missing rms_norm_eps" in message
    with pytest.raises(UserError, match=r"vocab_size.*head_dim"):
        dataclasses.replace(from_hf(QWEN3), vocab_size=-1, head_dim=-1)


def test_rope_scaling_raises_on_bad_values():
    with pytest.raises(UserError, match="high_freq_factor"):
        RopeScaling("llama3", 8.0, 4.0, 4.0, 8192)
    with pytest.raises(UserError, match="original_max_position_embeddings"):
        RopeScaling("llama3", 8.0, 1.0, 4.0)
    with pytest.raises(UserError, match="low_freq_factor"):
        RopeScaling("linear", 8.0, low_freq_factor=1.0)
