"""The bridge against the decoder itself: the same paths and shapes, and reading into it changes all or
nothing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge import decoder_parameters, load_checkpoint, read_into, save_checkpoint
from bridge.hf.names import parameter_shapes
from jetrl_jax.errors import UserError
from jetrl_jax.models.config import ModelConfig, RopeScaling
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.numerics import Numerics
from tests.small_model import MINUTE, small_model

QWEN3 = small_model(**MINUTE, max_position_embeddings=64)
CONFIGS = {
    "qwen3": QWEN3,
    "qwen3_bias": dataclasses.replace(QWEN3, attention_bias=True, tie_word_embeddings=False),
    "qwen2": dataclasses.replace(QWEN3, architecture="qwen2", attention_bias=True, qk_norm=False),
    "llama": dataclasses.replace(QWEN3, architecture="llama", qk_norm=False, tie_word_embeddings=False),
    "llama_bias": dataclasses.replace(QWEN3, architecture="llama", qk_norm=False, attention_bias=True),
}


def make_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    return Decoder(config, Numerics(compute_dtype="float32"), rngs=nnx.Rngs(seed))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_decoder_has_exactly_the_mapped_parameters(name):
    decoder = nnx.eval_shape(lambda: make_decoder(CONFIGS[name]))
    found = {path: value.shape for path, value in decoder_parameters(decoder).items()}
    assert found == parameter_shapes(CONFIGS[name])
    assert {value.dtype for value in decoder_parameters(decoder).values()} == {jnp.dtype(jnp.float32)}


def test_read_into_restores_what_was_saved(tmp_path):
    written, decoder = make_decoder(QWEN3, 1), make_decoder(QWEN3, 2)
    save_checkpoint(tmp_path / "out", QWEN3, decoder_parameters(written), dtype="float32")
    assert read_into(decoder, tmp_path / "out") == QWEN3
    for path, value in decoder_parameters(decoder).items():
        np.testing.assert_array_equal(value, decoder_parameters(written)[path])
        assert value.dtype == jnp.float32 and not value.committed


def test_read_into_fills_an_abstract_decoder(tmp_path):
    written, decoder = make_decoder(QWEN3, 1), nnx.eval_shape(lambda: make_decoder(QWEN3))
    save_checkpoint(tmp_path / "out", QWEN3, decoder_parameters(written), dtype="float32")
    read_into(decoder, tmp_path / "out")
    row = jnp.ones((1, 4), jnp.int32)
    np.testing.assert_array_equal(decoder(row, row, row), written(row, row, row))


def test_read_into_keeps_the_placement(tmp_path):
    decoder = make_decoder(QWEN3)
    save_checkpoint(tmp_path / "out", QWEN3, decoder_parameters(decoder))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    decoder.norm.weight.set_value(jax.device_put(decoder.norm.weight.get_value(), sharding))
    read_into(decoder, tmp_path / "out")
    assert decoder.norm.weight.get_value().sharding == sharding


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", 500000.0),
        ("rope_scaling", RopeScaling("linear", 2.0)),
        ("rms_norm_eps", 1e-5),
        ("num_layers", 3),
        ("tie_word_embeddings", False),
        ("attention_bias", True),
    ],
    ids=str,
)
def test_read_into_raises_on_another_model_and_changes_nothing(tmp_path, field, value):
    decoder = make_decoder(dataclasses.replace(QWEN3, **{field: value}))
    before = {path: np.asarray(array) for path, array in decoder_parameters(decoder).items()}
    save_checkpoint(tmp_path / "out", QWEN3, decoder_parameters(make_decoder(QWEN3, 1)))
    with pytest.raises(UserError, match=f"another model than the decoder: {field}: got"):
        read_into(decoder, tmp_path / "out")
    for path, array in decoder_parameters(decoder).items():
        np.testing.assert_array_equal(array, before[path])


def test_read_into_takes_other_lengths_and_special_ids(tmp_path):
    save_checkpoint(tmp_path / "out", QWEN3, decoder_parameters(make_decoder(QWEN3)))
    decoder = make_decoder(
        dataclasses.replace(QWEN3, max_position_embeddings=32, eos_token_ids=(), pad_token_id=0)
    )
    assert read_into(decoder, tmp_path / "out") == load_checkpoint(tmp_path / "out")[0] == QWEN3
