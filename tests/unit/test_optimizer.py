"""AdamW, schedules and FP32 masters, and the update program that never lets a non-finite step through."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from jetrl_jax.config.learning import OptimizerSection
from jetrl_jax.precision.parameters import map_params, named_params
from jetrl_jax.training.optimizer import build_optimizer, learning_rate_schedule
from jetrl_jax.training.programs import PolicyPrograms, TrainState
from tests.oracles.tolerances import U_FP32
from tests.parity.small_policy import SmallPolicy

DOWN = "layers.0.mlp.down_proj.weight"
HUGE = 1e30  # a learning rate with which gradients of ordinary size take a master to the end of FP32


def rate(section: OptimizerSection, total: int, step: int) -> float:
    """The learning rate of step 0, 1, 2 ... in plain arithmetic."""
    peak, warmup = section.learning_rate, section.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return (
        peak
        * {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[
            section.schedule
        ]
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_learning_rate_of_every_step(schedule: str, warmup: int) -> None:
    section = OptimizerSection(learning_rate=3e-4, schedule=schedule, warmup_steps=warmup)
    ours = learning_rate_schedule(section, 12)
    for step in range(15):
        assert float(ours(step)) == pytest.approx(rate(section, 12, step), rel=1e-5, abs=3e-4 * 1e-6), step
    assert float(ours(0)) > 0, "the first step must not be wasted"
    if schedule != "constant":
        assert float(ours(12)) == pytest.approx(0, abs=1e-10)


def adamw(
    section: OptimizerSection,
    total: int,
    params: dict[str, np.ndarray],
    gradients: list[dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Loshchilov & Hutter 2019 in float64, gradients clipped by their global norm first; vectors are not
    decayed.
    """
    params = {name: value.astype(np.float64) for name, value in params.items()}
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    for step, raw in enumerate(gradients):
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in raw.values()))
        factor = min(1.0, section.grad_clip / norm)
        for name in params:
            g = raw[name].astype(np.float64) * factor
            first[name] = section.b1 * first[name] + (1 - section.b1) * g
            second[name] = section.b2 * second[name] + (1 - section.b2) * g**2
            m_hat = first[name] / (1 - section.b1 ** (step + 1))
            v_hat = second[name] / (1 - section.b2 ** (step + 1))
            decay = section.weight_decay if params[name].ndim > 1 else 0.0
            params[name] = params[name] - rate(section, total, step) * (
                m_hat / (np.sqrt(v_hat) + section.eps) + decay * params[name]
            )
    return params


@pytest.mark.parametrize(
    "options",
    [
        {"grad_clip": 1e9},
        {"grad_clip": 0.5, "schedule": "cosine", "warmup_steps": 2},
        {"b1": 0.8, "b2": 0.95, "eps": 1e-3, "weight_decay": 0.3, "schedule": "linear"},
        {"weight_decay": 0.0},
    ],
    ids=str,
)
def test_five_steps_match_float64_adamw(options: dict[str, float]) -> None:
    section = OptimizerSection(learning_rate=1e-2, **options)
    rng = np.random.default_rng(0)
    shapes = {"matrix": (7, 5), "vector": (6,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    # Steps of very different length: some are clipped, some are not.
    gradients = [
        {name: (rng.normal(size=shape) * size).astype(np.float32) for name, shape in shapes.items()}
        for size in (1, 1e-3, 30, 0.05, 2)
    ]
    optimizer = build_optimizer(section, 8)
    ours, state = jax.tree.map(jnp.asarray, params), optimizer.init(params)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        for gradient in gradients:
            updates, state = optimizer.update(jax.tree.map(jnp.asarray, gradient), state, ours)
            ours = optax.apply_updates(ours, updates)
    for leaf in jax.tree.leaves(state):
        assert leaf.dtype in (jnp.float32, jnp.int32), "moments are FP32"
    expected = adamw(section, 8, params, gradients)
    for name in params:
        # Per step: the parameter rounds once; the update, at most about lr * 10, is off by some 50 roundings
        # (powers b^t among them).
        bound = 5 * (U_FP32 * np.abs(expected[name]).max() * 2 + 50 * U_FP32 * 1e-2 * 10)
        np.testing.assert_allclose(np.asarray(ours[name]), expected[name], rtol=0, atol=bound)


@functools.cache
def programs(preset: str, learning_rate: float) -> tuple[SmallPolicy, PolicyPrograms]:
    small = SmallPolicy(preset)
    # something for opt_state to hold
    momentum = optax.trace(0.9) if learning_rate == HUGE else optax.identity()
    optimizer = optax.chain(momentum, optax.scale(-learning_rate))
    return small, PolicyPrograms(small.model, small.plan, optimizer, temperature=1.0, chunk_tokens=64)


def fresh(preset: str, learning_rate: float) -> tuple[SmallPolicy, PolicyPrograms, TrainState]:
    small, made = programs(preset, learning_rate)
    return small, made, made.init(small.params)


def leaves(state: TrainState) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def test_fp32_masters_keep_small_updates() -> None:
    """w = 1.0, update -1e-6, 1000 steps: 0.999; a BF16 master stays at 1.0."""
    small, made, _ = fresh("bf16", 1.0)
    state = made.init(map_params(lambda _, value: jnp.ones_like(value), small.params))
    gradient = map_params(lambda _, value: jnp.full_like(value, 1e-6), small.params)
    for _ in range(1000):
        state, report = made.update(state, gradient)
    assert report.nonfinite == ()
    for path, value in named_params(state.params):
        # Each subtraction rounds to a spacing of 2**-24 below one.
        assert value.dtype == jnp.float32 and np.all(np.abs(np.asarray(value) - 0.999) <= 1000 * 2.0**-25), (
            path
        )
    lost = ml_dtypes.bfloat16(1.0)
    for _ in range(3):
        lost = ml_dtypes.bfloat16(np.float32(lost) - np.float32(1e-6))
    assert float(lost) == 1.0


def test_masters_of_any_dtype_become_fp32() -> None:
    small, made, _ = fresh("bf16", 1.0)
    state = made.init(map_params(lambda _, value: value.astype(jnp.bfloat16), small.params))
    assert {value.dtype for _, value in named_params(state.params)} == {jnp.dtype("float32")}


def broken(small: SmallPolicy, value: float) -> nnx.State:
    """A gradient of ones with one element of the down projection replaced."""

    def one(path: str, master: jax.Array) -> jax.Array:
        ones = jnp.ones_like(master)
        return ones.at[3, 7].set(value) if path == DOWN else ones

    return map_params(one, small.params)


# the last one's square is infinite, and so is the norm
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e19])
def test_nonfinite_gradient_changes_nothing_and_is_named(value: float) -> None:
    small, made, state = fresh("fp8_unified", HUGE)
    state, report = made.update(state, broken(small, 1.0))
    before = leaves(state)
    assert report.nonfinite == () and report.grad_norm == pytest.approx(
        math.sqrt(sum(v.size for _, v in named_params(small.params)))
    )
    state, report = made.update(state, broken(small, value))
    assert f"gradient {DOWN}" in report.nonfinite
    assert [name for name in report.nonfinite if name.startswith("gradient ")] == [f"gradient {DOWN}"]
    assert not math.isfinite(report.grad_norm)
    assert leaves(state) == before
    state, report = made.update(state, broken(small, 1.0))  # and the run goes on
    assert report.nonfinite == () and leaves(state) != before


def test_overflowing_parameter_or_scale_changes_nothing_and_is_named() -> None:
    small, made, state = fresh("fp8_unified", HUGE)
    before = leaves(state)
    # Finite as FP32, infinite once it is rounded to BF16: only the published scale shows it.
    state, report = made.update(state, broken(small, 3.4e8))
    assert report.nonfinite == (f"scale {DOWN}",)
    assert leaves(state) == before
    state, report = made.update(state, broken(small, 4e8))
    assert report.nonfinite == (f"parameter {DOWN}", f"scale {DOWN}")
    assert leaves(state) == before
