"""A policy on the kernels of attention: the same bits in packed rows, in prefill and in decode, and a gradient."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetrl_jax.models.attention import segment_unit
from jetrl_jax.models.cache import KVCache
from jetrl_jax.models.logprobs import completion_logprobs
from pallas_kernels.implementations import gpu_problem, interpreter_problem
from tests.parity.small_policy import CONFIG, VOCAB, SmallPolicy

KERNEL = "mosaic_gpu" if gpu_problem() is None else "mosaic_interpret"
PROBLEM = None if gpu_problem() is None else interpreter_problem()
pytestmark = [
    pytest.mark.skipif(PROBLEM is not None, reason=f"{KERNEL}: {PROBLEM}"),
    pytest.mark.usefixtures("operations_one_by_one"),
    *([pytest.mark.gpu] if KERNEL == "mosaic_gpu" else []),
]
LENGTHS, STARTS, TOKENS = (130, 9), (0, 256), 272


def policy(attention: str = KERNEL) -> SmallPolicy:
    sizes = dataclasses.replace(CONFIG, head_dim=64, num_heads=2, num_kv_heads=1)
    return SmallPolicy("bf16", sizes, attention=attention)


def packed(starts: tuple[int, ...] = STARTS) -> tuple[np.ndarray, ...]:
    """token_ids, positions and segment_ids [1, T]."""
    ids, positions, segments = (np.zeros((1, TOKENS), np.int32) for _ in range(3))
    rng = np.random.default_rng(0)
    for number, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
        ids[0, start : start + length] = rng.integers(0, VOCAB, length)
        positions[0, start : start + length] = np.arange(length)
        segments[0, start : start + length] = number + 1
    return ids, positions, segments


@pytest.mark.newest
@pytest.mark.long
def test_trainer_and_engine_have_the_same_bits() -> None:
    """A prompt without its last tokens, which are decoded one by one, and two at a time; four of the second."""
    made = policy()
    assert segment_unit(made.numerics) == 128 and made.numerics.choices.cache.name == "bfloat16"
    ids, positions, segments = packed()
    hidden = np.asarray(made.training_model()(ids, positions, segments), np.float32)[0]
    engine = made.rollout_model()
    for start, length in zip(STARTS, LENGTHS, strict=True):
        row, place = ids[:, start : start + length], positions[:, start : start + length]
        begun, kept = engine.prefill(row[:, :-4], place[:, :-4])
        cache = [KVCache.of(layer, 136, made.numerics) for layer in kept]
        found = [np.asarray(begun, np.float32)[0]]
        parts = [slice(-4, None)] if start else [slice(-4, -3), slice(-3, -2), slice(-2, None)]
        for part in parts:
            new, cache = engine.extend(row[:, part], place[:, part], cache)
            found.append(np.asarray(new, np.float32)[0])
        np.testing.assert_array_equal(np.concatenate(found), hidden[start : start + length])


@pytest.mark.newest
@pytest.mark.long
def test_gradients_are_those_of_the_exact_form_but_for_roundings() -> None:
    gradients = []
    for attention in (KERNEL, "xla"):
        made = policy(attention)

        def loss(params: nnx.State, made: SmallPolicy = made) -> jax.Array:
            model = nnx.merge(made.graphdef, made.plan.training_weights(params, made.published))
            logprobs, _ = completion_logprobs(model, *packed(), temperature=1.0, chunk_tokens=512)
            _, positions, segments = packed()
            return jnp.sum(jnp.where((segments > 0) & (positions > 0), logprobs, 0.0))

        gradients.append(jax.tree.map(lambda x: np.asarray(x, np.float64), jax.grad(loss)(made.params)))
    for one, other in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert np.isfinite(one).all() and np.linalg.norm(one - other) <= 0.02 * np.linalg.norm(other)


@pytest.mark.newest
@pytest.mark.long
def test_a_segment_that_is_not_aligned_is_nan_and_its_neighbour_is_not() -> None:
    made = policy()
    hidden = np.asarray(made.rollout_model()(*packed((0, 200))), np.float32)[0]
    assert np.isnan(hidden[200:209]).all() and np.isfinite(hidden[:128]).all()
