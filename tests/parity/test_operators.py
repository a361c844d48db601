"""The decoder taken apart is the decoder, and the comparison of two flows says what differs and nothing
else.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flax import nnx

from jetrl_jax.diagnostics.operators import FINAL, Difference, compare
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.parameters import jit, map_params
from tests.parity.small_policy import CONFIG, SmallPolicy

TWO = dataclasses.replace(CONFIG, num_layers=2)
UNTIED = dataclasses.replace(TWO, tie_word_embeddings=False)
QWEN2 = dataclasses.replace(
    TWO, architecture="qwen2", qk_norm=False, attention_bias=True, tie_word_embeddings=False
)


def tokens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two packed rows: two segments and padding, and one segment."""
    rng = np.random.default_rng(4)
    segments = np.array([[1] * 7 + [2] * 4 + [0] * 3, [1] * 14], np.int32)
    positions = np.array([[*range(7), *range(4), 0, 0, 0], list(range(14))], np.int32)
    return rng.integers(0, CONFIG.vocab_size, (2, 14)).astype(np.int32), positions, segments


def part(differences: list[Difference], layer: int, operator: str) -> Difference:
    (found,) = [d for d in differences if (d.layer, d.operator) == (layer, operator)]
    return found


@pytest.mark.parametrize(
    ("preset", "config"),
    [
        ("bf16", TWO),
        ("fp8_unified", QWEN2),
        pytest.param("fp8_unified", TWO, marks=pytest.mark.long),
        pytest.param("fp16", TWO, marks=pytest.mark.long),
    ],
)
def test_the_parts_make_the_whole(preset: str, config: object) -> None:
    small = SmallPolicy(preset, config)
    model = small.rollout_model()
    ids, positions, segments = tokens()
    differences, logits, again = compare(model, model, ids, positions, segments)
    graphdef, state = nnx.split(model)

    def whole(state: nnx.State, *arrays: np.ndarray) -> object:
        decoder: Decoder = nnx.merge(graphdef, state)
        return decoder.logits(decoder(*arrays))

    expected = np.asarray(jit(whole)(state, ids, positions, segments))
    used = segments > 0
    np.testing.assert_array_equal(np.asarray(logits)[used], expected[used])
    np.testing.assert_array_equal(np.asarray(again), np.asarray(logits))
    assert all(d.accumulated == d.own == d.unequal == d.largest == 0 for d in differences)
    per_layer = 10 if config.qk_norm else 9
    assert len(differences) == 2 * per_layer + 2 and differences[-1].operator == "lm_head"


def test_fp8_differs_in_its_linear_layers_alone() -> None:
    """E4M3 keeps 4 bits: a relative error near 2^-5.3 for each product of two rounded operands."""
    a, b = SmallPolicy("bf16", TWO).rollout_model(), SmallPolicy("fp8_unified", TWO).rollout_model()
    differences, *_ = compare(a, b, *tokens())
    linear = {"qkv", "o_proj", "gate_up", "down"}
    for d in differences:
        assert (d.own > 0) == (d.operator in linear), d
        if d.operator in linear:
            assert 0.005 < d.own < 0.08, d
    first = next(d for d in differences if d.unequal > 0)
    assert (first.layer, first.operator) == (0, "qkv") and first.own == first.accumulated


@pytest.mark.parametrize(
    ("path", "layer", "operator"),
    [
        ("layers.1.self_attn.k_proj.weight", 1, "qkv"),
        ("layers.0.self_attn.q_norm.weight", 0, "qk_norm"),
        ("layers.1.mlp.up_proj.weight", 1, "gate_up"),
        ("layers.0.post_attention_layernorm.weight", 0, "post_norm"),
        ("norm.weight", FINAL, "norm"),
    ],
)
def test_a_changed_tensor_is_found(path: str, layer: int, operator: str) -> None:
    small = SmallPolicy("bf16", TWO)
    changed = map_params(lambda name, value: value * 1.5 if name == path else value, small.published)
    model = nnx.merge(small.graphdef, changed)
    differences, *_ = compare(small.rollout_model(), model, *tokens())
    first = next(d for d in differences if d.unequal > 0)
    assert (first.layer, first.operator) == (layer, operator)
    assert [(d.layer, d.operator) for d in differences if d.own > 0] == [(layer, operator)], (
        "every other operator is innocent"
    )


def test_padding_is_not_compared() -> None:
    ids, positions, segments = tokens()
    spare = CONFIG.vocab_size - 1
    ids = np.where(segments == 0, spare, np.minimum(ids, spare - 1)).astype(np.int32)
    small = SmallPolicy("bf16", UNTIED)
    changed = map_params(
        lambda name, value: value.at[spare].add(1.0) if name == "embed_tokens.weight" else value,
        small.published,
    )
    differences, *_ = compare(
        small.rollout_model(), nnx.merge(small.graphdef, changed), ids, positions, segments
    )
    assert all(d.unequal == d.own == 0 for d in differences)


def test_decoders_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in size"):
        compare(SmallPolicy("bf16", TWO).model, SmallPolicy("bf16", CONFIG).model, *tokens())
