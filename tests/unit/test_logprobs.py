"""Log-probabilities of given tokens: the bits do not depend on how tokens are batched, the values are those
of float64.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetrl_jax.models import vocabulary
from jetrl_jax.models.cache import empty_cache
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.logprobs import completion_logprobs
from jetrl_jax.precision.parameters import jit
from jetrl_jax.rl.batching import TrainBatch, pack, unpack
from jetrl_jax.rollout.types import Trajectory
from tests.oracles.tolerances import U_FP32, gamma
from tests.parity.small_policy import CONFIG, VOCAB, SmallPolicy, trajectories

pytestmark = pytest.mark.as_the_product

TEMPERATURE = 0.7
LENGTHS = [(3, 20), (1, 9), (7, 1), (2, 14), (5, 5), (1, 2)]
# BF16 in `make test`: tests/parity/test_rollout_exact.py.
FLOWS = ("fp8_unified", "fp8_forward", pytest.param("bf16", marks=pytest.mark.long))
policy = functools.cache(SmallPolicy)


def programs(model: Decoder, chunk_tokens: int = 1000, temperature: float = TEMPERATURE):
    return jit(
        lambda *arrays: completion_logprobs(
            model, *arrays, temperature=temperature, chunk_tokens=chunk_tokens
        )
    )


def packed(rows: int, row_tokens: int) -> list[TrainBatch]:
    ones = np.ones(len(LENGTHS))
    return pack(trajectories(LENGTHS), ones, ones.astype(bool), row_tokens, rows * row_tokens)


def over_batches(program, batches: list[TrainBatch], part: int = 0) -> list[np.ndarray]:
    """Per trajectory, one value per completion token."""
    values = [np.asarray(program(b.token_ids, b.positions, b.segment_ids)[part]) for b in batches]
    return unpack(batches, values, len(LENGTHS))


def one_row(trajectory: Trajectory, left: int, right: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(token_ids, positions, segment_ids) [1, T] with padding on both sides."""
    tokens = np.concatenate([trajectory.prompt_ids, trajectory.completion_ids])
    rows = (tokens, np.arange(len(tokens)), np.ones(len(tokens)))
    return tuple(jnp.asarray(np.pad(row, (left, right)), jnp.int32)[None] for row in rows)


def decoded(small: SmallPolicy, chosen: list[Trajectory]) -> list[np.ndarray]:
    """The rollout's way: published weights, one token of each row at a time against a cache."""
    length = max(len(t.prompt_ids) + len(t.completion_ids) for t in chosen)
    tokens = np.stack(
        [np.pad(np.concatenate([t.prompt_ids, t.completion_ids]), (0, length))[: length + 1] for t in chosen]
    )

    @jit
    def step(model_tokens: jax.Array, next_tokens: jax.Array, positions: jax.Array, cache):
        model = small.rollout_model()
        hidden, cache = model.extend(model_tokens[:, None], positions[:, None], cache)
        logits = vocabulary.scale_logits(
            model.logits(hidden[:, 0]), jnp.float32(TEMPERATURE), exact=small.numerics.exact
        )
        return vocabulary.token_logprobs(logits, next_tokens, exact=small.numerics.exact), cache

    cache, columns = empty_cache(CONFIG, small.numerics, len(chosen), length + 5), []
    for t in range(length):
        values, cache = step(tokens[:, t], tokens[:, t + 1], jnp.full(len(chosen), t, jnp.int32), cache)
        columns.append(np.asarray(values))
    rows = np.stack(columns, axis=1)
    firsts = [len(t.prompt_ids) - 1 for t in chosen]
    return [
        row[first : first + len(t.completion_ids)] for row, first, t in zip(rows, firsts, chosen, strict=True)
    ]


def assert_same_bits(got: list[np.ndarray], expected: list[np.ndarray], what: str) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert np.array_equal(a.view(np.int32), b.view(np.int32)), (
            f"{what}, trajectory {i}: differs by up to {np.abs(a - b).max()}"
        )


@pytest.mark.parametrize("preset", FLOWS)
def test_exact_logprobs_have_the_same_bits_in_every_batch(preset: str) -> None:
    small = policy(preset)
    program = programs(small.training_model())
    expected = over_batches(program, packed(3, 40))
    assert [len(values) for values in expected] == [completion for _, completion in LENGTHS]
    assert_same_bits(over_batches(program, packed(1, 23)), expected, "one row at a time")
    for place, (left, right) in {0: (0, 0), 2: (9, 4)}.items():
        trajectory = trajectories(LENGTHS)[place]
        row = np.asarray(program(*one_row(trajectory, left, right))[0])[0]
        stop = len(row) - right
        assert_same_bits(
            [row[stop - len(trajectory.completion_ids) : stop]],
            [expected[place]],
            f"alone, padded by {left} and {right}",
        )
    rollout = over_batches(programs(small.rollout_model(), 20), packed(3, 40))
    assert_same_bits(rollout, expected, "published weights")
    assert_same_bits(decoded(small, trajectories(LENGTHS)[:2]), expected[:2], "decoded token by token")


def test_a_bf16_forward_of_fp8_rollout_only_differs() -> None:
    """The comparison above can fail: where the trainer's FProp is BF16, its bits are not the engine's."""
    small = policy("fp8_rollout_only")
    trained, rollout = (
        over_batches(programs(model), packed(3, 40))
        for model in (small.training_model(), small.rollout_model())
    )
    assert all(np.any(a != b) for a, b in zip(trained, rollout, strict=True))


@pytest.mark.long
def test_chunk_size_changes_no_bit_and_the_gradient_by_roundoff() -> None:
    small, batch = policy("bf16"), packed(3, 40)[0]
    weights = jnp.asarray(np.random.default_rng(3).normal(size=(3, 40)) * batch.loss_mask, jnp.float32)

    def run(chunk_tokens: int):
        def loss(hidden_shift: jax.Array):
            arrays = (batch.token_ids, batch.positions, batch.segment_ids)
            model = small.training_model()
            matrix = model.embed_tokens.weight.get_value().whole()
            model.embed_tokens.weight.set_value(matrix + hidden_shift)
            logprobs, entropy = completion_logprobs(
                model, *arrays, temperature=TEMPERATURE, chunk_tokens=chunk_tokens
            )
            return jnp.sum(logprobs * weights), (logprobs, entropy)

        gradient, outputs = jit(jax.grad(loss, has_aux=True))(jnp.zeros((VOCAB, CONFIG.hidden_size)))
        return np.asarray(gradient), *(np.asarray(part) for part in outputs)

    whole = run(1000)
    gradient, logprobs, entropy = run(29)  # 117 tokens: the last chunk has one of them
    np.testing.assert_array_equal(logprobs.view(np.int32), whole[1].view(np.int32))
    np.testing.assert_allclose(entropy, whole[2], rtol=gamma(VOCAB + 20))  # a statistic: FP32
    # The head's gradient is summed chunk by chunk in FP32; what flows on is rounded to BF16 and may flip by
    # an ulp.
    assert np.abs(gradient - whole[0]).max() <= 2**-8 * np.abs(whole[0]).max()


def float64_log_softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    wide = logits.astype(np.float64) / np.float64(np.float32(temperature))
    top = wide.max(-1, keepdims=True)
    return wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("preset", "temperature", "exact"),
    [("bf16", 1.0, True), ("fp8_unified", 0.7, True), ("fp32", 1.3, False)],
)
def test_logprobs_and_entropy_are_those_of_a_float64_softmax(
    preset: str, temperature: float, exact: bool
) -> None:
    small, batch = policy(preset, exact=exact), packed(3, 40)[0]
    arrays = (batch.token_ids, batch.positions, batch.segment_ids)
    logprobs, entropy = (
        np.asarray(part) for part in programs(small.training_model(), 50, temperature)(*arrays)
    )
    model = small.training_model()
    logits = np.asarray(jit(lambda *a: model.logits(model(*a)))(*arrays))
    oracle = float64_log_softmax(logits, temperature)[:, :-1]
    chosen = np.take_along_axis(oracle, np.asarray(batch.token_ids)[:, 1:, None], axis=-1)[..., 0]
    largest = np.abs(logits / temperature).max(-1)[:, :-1]
    # Rounded to FP32: the scaled logit, the normaliser, the difference; without exact, V terms of the sum and
    # exp, log.
    bound = (5 if exact else 4 * VOCAB) * U_FP32 * (largest + np.abs(chosen) + np.log(VOCAB))
    if not exact:  # and the logits themselves may come from another program
        bound += gamma(4 * CONFIG.hidden_size) * np.abs(logits).max()
    mask = np.asarray(batch.loss_mask)[:, 1:]
    assert np.all((np.abs(logprobs[:, 1:] - chosen) <= bound)[mask])
    assert np.all(logprobs[:, 0] == 0) and np.all(entropy[:, 0] == 0)
    expected = -(np.exp(oracle) * oracle).sum(-1)
    # Each of V terms p log p has p off by the error of log p: relative to the sum of |p log p| and its first
    # moment.
    limit = gamma(VOCAB + 20) * (
        expected + (np.exp(oracle) * (np.abs(oracle) + 1)).sum(-1) * (largest + 1)
    ) + (0 if exact else bound * 10)
    assert np.all((np.abs(entropy[:, 1:] - expected) <= limit)[mask])
    assert expected[mask].min() < 0.9 * np.log(VOCAB), "the case should not be uniform"


def test_entropy_carries_no_gradient() -> None:
    small, batch = policy("fp32"), packed(3, 40)[0]

    def total(scale: jax.Array) -> jax.Array:
        model = small.training_model()
        model.norm.weight.set_value(model.norm.weight.get_value() * scale)
        arrays = (batch.token_ids, batch.positions, batch.segment_ids)
        return jnp.sum(completion_logprobs(model, *arrays, temperature=1.0, chunk_tokens=64)[1])

    assert float(jit(jax.grad(total))(jnp.float32(1))) == 0


def test_temperature_as_constant_and_as_scalar_gives_the_same_bits() -> None:
    """The trainer closes over a number, the engine passes an array; at 1 nothing is divided."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(50, VOCAB)) * 8, jnp.float32)
    for temperature in (0.7, 1.3, 1e-2):
        constant = jit(lambda x, t=temperature: vocabulary.scale_logits(x, t))(logits)
        scalar = jit(lambda x, t: vocabulary.scale_logits(x, t))(logits, jnp.float32(temperature))
        np.testing.assert_array_equal(np.asarray(constant), np.asarray(scalar))
        # IEEE division
        np.testing.assert_array_equal(np.asarray(constant), np.asarray(logits) / np.float32(temperature))
    assert vocabulary.scale_logits(logits, 1.0) is logits


def test_rows_of_one_token_predict_nothing_and_a_chunk_has_a_token() -> None:
    model, ids = SmallPolicy("bf16").model, jnp.ones((2, 1), jnp.int32)
    graphdef, state = nnx.split(model)
    whole = jit(
        lambda state: completion_logprobs(
            nnx.merge(graphdef, state), ids, ids, ids, temperature=1.0, chunk_tokens=4
        )
    )
    for found in whole(state):
        assert found.shape == (2, 1) and not found.any()
    with pytest.raises(ValueError, match="completion_logprobs: got chunk_tokens=0"):
        completion_logprobs(model, ids, ids, ids, temperature=1.0, chunk_tokens=0)
