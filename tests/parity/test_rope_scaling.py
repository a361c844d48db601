"""YaRN's frequencies and factor against transformers' own function, for any values that a config.json may
state.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from bridge.hf.config import from_hf, rope_to_hf
from jetrl_jax.models import ops
from jetrl_jax.models.config import RopeScaling
from jetrl_jax.precision.numerics import Numerics
from tests.oracles import decoder_oracle
from tests.parity.hf_reference import transformers
from tests.unit.test_hf_config import QWEN3, YARN

pytestmark = pytest.mark.compiled_quickly

ROUNDOFF = 2.0**-24


def stated(rng: np.random.Generator) -> dict[str, float | bool]:
    """A rope dictionary: factors from 1 to 40, lengths from 2 to 131,072, any of the keys that may be left
    out.
    """
    scale = {
        "factor": float(rng.choice([1.0, 4.0, rng.uniform(1, 40)])),
        "original_max_position_embeddings": int(2 ** rng.integers(1, 18)),
    }
    betas = {"beta_fast": float(rng.uniform(2, 64)), "beta_slow": float(rng.uniform(0.01, 2))}
    optional = {
        "attention_factor": rng.uniform(0.5, 2),
        "mscale": rng.uniform(0.5, 2),
        "mscale_all_dim": rng.uniform(0.5, 2),
    }
    chosen = {key: float(value) for key, value in optional.items() if rng.random() < 0.4}
    return (
        scale
        | (betas if rng.random() < 0.6 else {})
        | chosen
        | ({"truncate": bool(rng.integers(2))} if rng.random() < 0.6 else {})
    )


def test_frequencies_and_factor_match_transformers():
    rng = np.random.default_rng(0)
    for _ in range(50):
        head_dim, theta, rope = 2 * int(rng.integers(1, 129)), float(10 ** rng.uniform(0.1, 8)), stated(rng)
        longest = int(rope["factor"] * rope["original_max_position_embeddings"])
        parameters = {"rope_type": "yarn", "rope_theta": theta, **rope}
        config = transformers.Qwen3Config(
            head_dim=head_dim, max_position_embeddings=longest, rope_parameters=parameters
        )
        theirs, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
        scaling = RopeScaling("yarn", **rope)
        ours = ops.rope_frequencies(head_dim, theta, scaling)
        assert ours.dtype == np.float32
        # theirs: an exponent rounded to FP32, its power, and six operations more
        np.testing.assert_allclose(
            ours, theirs.numpy(), rtol=(8 + math.log(theta)) * ROUNDOFF, err_msg=str((head_dim, theta, rope))
        )
        assert math.isclose(scaling.attention_scaling, factor, rel_tol=1e-14), rope
        assert math.isclose(decoder_oracle.magnitude(rope_to_hf(scaling)), factor, rel_tol=1e-14), rope


@pytest.mark.parametrize(
    "rope",
    [YARN, YARN | {"factor": 2.5, "attention_factor": 0.75, "beta_fast": 16.0, "truncate": False}],
    ids=str,
)
def test_the_bf16_table_is_that_of_float64_rounded_where_transformers_and_vllm_round(rope):
    """Cosine in float64, FP32, times the factor in FP32, BF16."""
    config = from_hf(QWEN3 | {"rope_scaling": rope})
    positions = np.asarray([0, 1, 2, 77, 4095, 40959], np.int32)
    table = ops.rope_table(jnp.asarray(positions)[None], config, Numerics())
    frequencies = ops.rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angles = (positions[:, None].astype(np.float32) * frequencies).astype(np.float64)
    factor = np.float32(decoder_oracle.magnitude(rope))
    for part, function in zip(table, (np.cos, np.sin), strict=True):
        expected = (function(angles).astype(np.float32) * factor).astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(part[0]), expected)
    # at position 0
    assert np.asarray(table[0][0, 0], np.float32) == pytest.approx(np.full(64, factor), rel=2**-8)


@pytest.mark.parametrize("broken", ["factor", "beta_fast", "attention_factor", "truncate"])
def test_every_value_of_yarn_is_seen(broken):
    """The values above can tell a decoder that ignores one of them."""
    rope = {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
        "attention_factor": 1.2,
        "truncate": True,
    }
    other = rope | {"factor": 5.0, "beta_fast": 8.0, "attention_factor": 1.3, "truncate": False}
    one, two = (RopeScaling("yarn", **values) for values in (rope, rope | {broken: other[broken]}))
    changed = np.abs(ops.rope_frequencies(24, 1e4, two) / ops.rope_frequencies(24, 1e4, one) - 1).max()
    assert changed > 1e-2 or (broken == "attention_factor" and two.attention_scaling != one.attention_scaling)
