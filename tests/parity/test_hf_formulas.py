"""Three independent decoders agree: transformers in float64, published formulas in numpy, and ours in FP32.

The numpy decoder vouches for the float64 twin of the parity tests, and stands in for it where torch is
absent.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge.hf.config import from_hf, to_hf
from bridge.hf.names import to_hf_name
from bridge.hf.read import parameters_by_path
from jetrl_jax.models.config import RopeScaling
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.numerics import Numerics
from tests.oracles import decoder_oracle
from tests.small_model import small_model

pytestmark = pytest.mark.compiled_quickly

QWEN3 = small_model(
    vocab_size=53,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    head_dim=12,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    eos_token_ids=(),
)
YARN = RopeScaling(
    "yarn", 8.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.2, truncate=False
)
LLAMA = dataclasses.replace(
    QWEN3, architecture="llama", qk_norm=False, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
)
CONFIGS = {
    "qwen3": QWEN3,
    "qwen3_bias": dataclasses.replace(QWEN3, attention_bias=True, tie_word_embeddings=True),
    "qwen2": dataclasses.replace(QWEN3, architecture="qwen2", qk_norm=False, attention_bias=True),
    "qwen3_yarn": dataclasses.replace(QWEN3, rope_scaling=YARN),
    "llama3": LLAMA,
    "llama_linear": dataclasses.replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0), attention_bias=True),
}


def random_weights(decoder: Decoder) -> dict[str, np.ndarray]:
    """Fills every parameter with random values; returns them by Hugging Face's names."""
    rng, weights = np.random.default_rng(0), {}
    for path, variable in parameters_by_path(decoder).items():
        shape = variable.get_value().shape
        scale = 1.0 if "embed" in path else shape[-1] ** -0.5 if len(shape) == 2 else 0.5
        value = (("norm" in path) + scale * rng.normal(size=shape)).astype(np.float32)
        variable.set_value(jnp.asarray(value))
        weights[to_hf_name(path)] = value
    return weights


@pytest.mark.parametrize(
    ("name", "exact"), [*((name, True) for name in CONFIGS), ("qwen3", False), ("llama3", False)]
)
def test_decoder_matches_float64_formulas(name, exact):
    config, length = CONFIGS[name], 20
    decoder = Decoder(config, Numerics(compute_dtype="float32", exact=exact), rngs=nnx.Rngs(0))
    weights = random_weights(decoder)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, length)
    expected = decoder_oracle.logits(to_hf(config), weights, tokens.tolist())
    row = (jnp.asarray(x, jnp.int32)[None] for x in (tokens, np.arange(length), np.ones(length)))
    got = np.asarray(nnx.jit(lambda d, *batch: d.logits(d(*batch)))(decoder, *row)[0], np.float64)
    # Some 2 x 8 roundings in a chain, each of 2^-24 relative to the largest value of its tensor, with sums of
    # 48 terms.
    assert np.abs(got - expected).max() < 32 * 2.0**-24 * np.abs(expected).max()
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("case", ["qwen3", "qwen3_yarn", "qwen2", "llama3", "llama_bias"])
def test_the_float64_twin_of_transformers_is_float64(case):
    pytest.importorskip("torch", reason="the twin is a torch model: pip install jetrl-jax[torch]")
    from tests.parity.hf_reference import float64_twin, hf_logits, ragged_batch, random_model, true_float64

    model = random_model(case)
    tokens, positions, mask = ragged_batch([20], "left", 61)
    with true_float64():
        twin = hf_logits(float64_twin(model), tokens, positions, mask)[0]
    config = to_hf(from_hf(model.config.to_dict()))
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    expected = decoder_oracle.logits(config, weights, tokens[0].tolist())
    assert np.abs(twin - expected).max() < 1e-14 * 16 * np.abs(expected).max()
