"""Loss scaling of the FP16 flow: growth, backoff, what an overflow leaves alone,
and that scaling is exact.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jetrl_jax.config.precision import LossScaleSection
from jetrl_jax.precision.parameters import map_params, named_params
from jetrl_jax.training.loss_scale import LARGEST, SMALLEST, LossScale
from jetrl_jax.training.programs import PolicyPrograms, TrainState
from tests.parity.small_policy import SmallPolicy

pytestmark = pytest.mark.as_the_product


def section(initial: float = 1024.0, growth_interval: int = 3) -> LossScaleSection:
    return LossScaleSection(initial=initial, growth_interval=growth_interval)


def test_scale_follows_the_published_rule() -> None:
    """Micikevicius et al.: double after `growth_interval` good updates in a row, halve at an overflow."""
    scale, value, good = LossScale.start(section()), 1024.0, 0
    rng = np.random.default_rng(0)
    after = jax.jit(LossScale.after)
    for finite in rng.random(200) < 0.8:
        scale = after(scale, jnp.asarray(finite))
        good = good + 1 if finite else 0
        value = value if finite else value / 2
        if good == 3:
            value, good = value * 2, 0
        value = min(max(value, 1.0), 2.0**24)
        assert (float(scale.factor), int(scale.good_updates)) == (value, good)


@pytest.mark.parametrize(("start", "finite", "bound"), [(1.0, False, SMALLEST), (2.0**24, True, LARGEST)])
def test_scale_stays_between_its_bounds(start: float, finite: bool, bound: float) -> None:
    scale = LossScale.start(section(start, 1))
    for _ in range(3):
        scale = scale.after(jnp.asarray(finite))
    assert float(scale.factor) == bound


def made(initial: float, growth_interval: int = 3) -> tuple[SmallPolicy, PolicyPrograms, TrainState]:
    small = SmallPolicy("fp16")
    scale = LossScale.start(section(initial, growth_interval))
    programs = PolicyPrograms(
        small.model, small.plan, optax.sgd(0.5), temperature=1.0, chunk_tokens=64, loss_scale=scale
    )
    return small, programs, programs.init(small.params)


def test_update_divides_by_the_scale_exactly() -> None:
    small, programs, state = made(4096.0)
    gradient = map_params(lambda _, value: jnp.sin(value * 37.0), small.params)
    state, report = programs.update(state, map_params(lambda _, value: value * 4096.0, gradient))
    norm = np.sqrt(sum(np.sum(np.asarray(value, np.float64) ** 2) for _, value in named_params(gradient)))
    assert (
        report.grad_norm == pytest.approx(norm, rel=1e-5) and report.nonfinite == () and not report.overflow
    )
    start, slope = dict(named_params(small.params)), dict(named_params(gradient))
    for path, value in named_params(state.params):
        np.testing.assert_array_equal(
            np.asarray(value), np.asarray(start[path] - np.float32(0.5) * slope[path])
        )


def test_overflow_changes_nothing_but_the_scale() -> None:
    small, programs, state = made(4.0)
    before = jax.tree.map(np.array, (state.params, state.opt_state, state.published))
    bad = map_params(
        lambda path, value: jnp.full_like(value, np.inf if path == "norm.weight" else 1.0), small.params
    )
    for expected, overflow in ((2.0, True), (1.0, True), (1.0, False)):
        state, report = programs.update(state, bad)
        assert float(state.loss_scale.factor) == expected and report.nonfinite[0] == "gradient norm.weight"
        assert report.overflow == overflow, "an overflow of the unscaled loss is a fault"
    chex.assert_trees_all_equal(before, (state.params, state.opt_state, state.published))
