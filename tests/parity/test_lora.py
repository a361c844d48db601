"""Adapters: their rounding points and gradients against float64, and a policy that trains nothing else."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from jetrl_jax.models.linear import activation, linear
from jetrl_jax.models.lora import Adapters, start
from jetrl_jax.precision.formats import is_adapter
from jetrl_jax.precision.parameters import jit, merge, named_params, select
from jetrl_jax.precision.trainable_weight import FrozenFp8Weight
from jetrl_jax.rl.algorithm import resolve_algorithm
from jetrl_jax.rl.batching import count_denominators, pack
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.types import Request, SamplingParams
from jetrl_jax.training.loss_scale import LossScale
from jetrl_jax.training.programs import PolicyPrograms
from pallas_kernels import ScaledArray, quantize
from tests.oracles.tolerances import U_BF16, gamma
from tests.parity.small_policy import SmallPolicy, resolved, trajectories
from tests.sections import algorithm_section

pytestmark = pytest.mark.compiled_quickly

ROWS, INPUTS, OUTPUTS, RANK, SCALE = 21, 160, 72, 5, 2.0
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = Adapters(4, 2.0, EVERY)


def rounded(x: np.ndarray) -> np.ndarray:
    """To FP32, then to BF16, as float64."""
    return np.asarray(x, np.float64).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


@functools.cache
def operands() -> tuple[np.ndarray, ...]:
    """x, W, A, B and dy with BF16 values, in float64; one row of x is zero, one of outliers."""
    rng = np.random.default_rng(0)
    shapes = (ROWS, INPUTS), (OUTPUTS, INPUTS), (RANK, INPUTS), (OUTPUTS, RANK), (ROWS, OUTPUTS)
    x, w, a, b, dy = (rounded(rng.normal(size=shape)) for shape in shapes)
    x[3], x[4] = 0, x[4] * 64
    return x, w, a, b, dy


def oracle(base: np.ndarray) -> dict[str, np.ndarray]:
    """y, and the gradients of A, B and the adapter's x, in float64 with the roundings of the formula.

    base: the base's rounded output.
    """
    x, _, a, b, dy = operands()
    t = rounded(x @ a.T)
    dt = rounded(dy @ (SCALE * b))
    return {
        "y": rounded(base + rounded(t @ (SCALE * b).T)),
        "t": t,
        "dt": dt,
        "A": dt.T @ x,
        "B": SCALE * dy.T @ t,
        "x": dt @ a,
    }


@pytest.mark.parametrize("form", ["bf16", "fp8", pytest.param("fp8_forward", marks=pytest.mark.long)])
def test_adapted_layer_is_the_float64_formula(form: str) -> None:
    """Values to the bit.  In gradients dt is a rounded FP32 sum, so that an ulp of it may be another."""
    x, w, a, b, dy = operands()
    numerics = resolved()
    value = jnp.asarray(x, jnp.bfloat16)
    kept = jnp.asarray(w, jnp.bfloat16)
    weight: Any = kept if form == "bf16" else FrozenFp8Weight(quantize(kept, (128, 128)), form == "fp8")

    def layer(value: jax.Array, a: Any, b: Any) -> jax.Array:
        adapter = None if a is None else (a, b, SCALE)
        return linear(activation(value, (weight,), numerics), weight, None, numerics, adapter=adapter)

    arrays = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    cotangent = jnp.asarray(dy, jnp.bfloat16)
    base, base_pullback = jax.vjp(lambda value: layer(value, None, None), value)
    y, pullback = jax.vjp(layer, value, *arrays)
    expected = oracle(np.asarray(base, np.float64))
    assert np.array_equal(np.asarray(y, np.float64), expected["y"])
    dx, da, db = pullback(cotangent)
    assert da.dtype == db.dtype == jnp.float32 and dx.dtype == jnp.bfloat16
    of_dt = (2 * U_BF16 + gamma(OUTPUTS)) * (np.abs(dy) @ np.abs(SCALE * b))
    assert np.all(
        np.abs(da - expected["A"]) <= of_dt.T @ np.abs(x) + gamma(ROWS) * np.abs(expected["dt"]).T @ np.abs(x)
    )
    assert np.all(np.abs(db - expected["B"]) <= gamma(ROWS) * SCALE * np.abs(dy).T @ np.abs(expected["t"]))
    (base_dx,) = base_pullback(cotangent)
    # the base's own gradient is rounded here before the sum, and there after it
    whole = np.asarray(base_dx, np.float64) + expected["x"]
    bound = U_BF16 * (np.abs(np.asarray(base_dx, np.float64)) + np.abs(whole)) + of_dt @ np.abs(a)
    assert np.all(np.abs(np.asarray(dx, np.float64) - whole) <= 1.1 * bound + 1e-6)
    assert np.any(dx.astype(jnp.float32) != base_dx.astype(jnp.float32))
    # the base's gradient is that of dY times the weight that it multiplies
    values = np.asarray(kept if form == "bf16" else weight.quantized.dequantize(), np.float64)
    noise = 2.0**-4 if form == "fp8" else 2 * U_BF16
    assert np.all(
        np.abs(np.asarray(base_dx, np.float64) - dy @ values) <= 2 * noise * np.abs(dy) @ np.abs(values)
    )


def test_products_of_an_adapter_do_not_depend_on_the_number_of_rows() -> None:
    x, w, a, b, _ = operands()
    numerics = resolved()
    weight = jnp.asarray(w, jnp.bfloat16)

    @jit
    def layer(value: jax.Array) -> jax.Array:
        adapter = jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16), SCALE
        return linear(activation(value, (weight,), numerics), weight, None, numerics, adapter=adapter)

    whole = layer(jnp.asarray(x, jnp.bfloat16))
    for rows in (1, 2, 5):
        assert np.array_equal(layer(jnp.asarray(x[:rows], jnp.bfloat16)), whole[:rows])


class Adapted:
    """A small policy with adapters and its programs; `base` has the same base and none."""

    def __init__(self, preset: str) -> None:
        self.small = SmallPolicy(preset, adapters=ADAPTERS)
        self.base = SmallPolicy(preset)
        self.programs = PolicyPrograms(
            self.small.model, self.small.plan, optax.adam(1e-2), temperature=0.8, chunk_tokens=1000
        )
        lengths = [(5, 20), (3, 14), (6, 9)]
        self.batches = pack(trajectories(lengths), [1.2, -0.7, 0.4], np.ones(3, bool), 48, 96)
        self.denominators = count_denominators(self.batches, 44)

    def first(self) -> Any:
        """The state in which a run begins: B is zero."""
        params = merge(
            select(self.small.params, lambda path: not is_adapter(path)), start(self.small.model, 0)
        )
        return self.programs.init(params)

    def gradient(self, state: Any) -> tuple[Any, np.ndarray]:
        algorithm = resolve_algorithm(algorithm_section(), 44)
        (batch,) = self.batches
        grads, _, logprobs = self.programs.policy_gradient(state, batch, self.denominators, algorithm)
        return grads, np.asarray(logprobs)


adapted = functools.cache(Adapted)


def bits(state: nnx.State) -> dict[str, bytes]:
    return {
        path: b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(value))
        for path, value in named_params(state)
    }


@pytest.mark.parametrize("preset", ["bf16", pytest.param("fp8_unified", marks=pytest.mark.long)])
def test_policy_starts_as_its_base_which_training_leaves_alone(preset: str) -> None:
    """Step 0 has the base's bits; adapters have the only masters, moments (8 bytes a parameter) and
    gradients; after 20 updates the base has every byte, and is still the reference.
    """
    policy = adapted(preset)
    programs, state = policy.programs, policy.first()
    (batch,) = policy.batches
    reference, before = programs.reference(state), bits(programs.plan.frozen_base(state.published))
    of_base = programs.logprobs(reference, batch)  # by the structure without adapters
    assert np.array_equal(policy.gradient(state)[1], of_base)

    names = [path for path, _ in named_params(state.params)]
    count = sum(value.size for _, value in named_params(state.params))
    assert all(map(is_adapter, names)) and len(names) == 2 * len(EVERY)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.nbytes for leaf in moments) == 8 * count

    kinds = {type(value) for path, value in named_params(state.published) if path.endswith("_proj.weight")}
    assert kinds == ({ScaledArray} if preset == "fp8_unified" else {type(jnp.zeros(1))})
    assert {row.site for row in programs.plan.rows} == {"rollout", "fprop", "dgrad", "value"}
    for _ in range(20):
        grads, _ = policy.gradient(state)
        state, report = programs.update(state, grads)
        assert not report.nonfinite and report.grad_norm > 0
    assert [path for path, _ in named_params(grads)] == names
    assert bits(programs.plan.frozen_base(state.published)) == before == bits(reference)
    assert np.abs(policy.gradient(state)[1] - of_base).max() > 0.1
    assert np.array_equal(programs.logprobs(reference, batch), of_base)
    published = dict(named_params(state.published))
    for path, master in named_params(state.params):
        assert np.array_equal(published[path], master.astype(published[path].dtype))


def test_every_adapter_gets_a_gradient_through_the_frozen_base() -> None:
    """Also that of the first layer, behind everything else; and a target left out has no adapter."""
    policy = adapted("bf16")
    state = policy.programs.init(policy.small.params)  # B is not zero
    grads, _ = policy.gradient(state)
    for path, value in named_params(grads):
        assert value.dtype == jnp.float32 and np.isfinite(value).all() and np.any(value != 0), path
    narrow = SmallPolicy("bf16", adapters=Adapters(4, 2.0, ("v_proj", "down_proj")))
    names = {path for path, _ in named_params(select(narrow.params, is_adapter))}
    assert names == {
        f"layers.0.{module}.lora_{side}.weight"
        for module in ("self_attn.v_proj", "mlp.down_proj")
        for side in "AB"
    }


def test_adapters_start_as_pefts_do_and_leave_the_base_as_without_them() -> None:
    policy = adapted("bf16")
    first, again, other = (dict(named_params(start(policy.small.model, seed))) for seed in (0, 0, 1))
    for path, value in first.items():
        assert np.array_equal(value, again[path])
        if ".lora_B." in path:
            assert not np.any(value)
            continue
        bound = 1 / np.sqrt(value.shape[1])
        assert 0.8 * bound < np.abs(value).max() <= bound and not np.array_equal(value, other[path])
    own = dict(named_params(nnx.state(policy.small.model, nnx.Param)))
    for path, value in named_params(nnx.state(policy.base.model, nnx.Param)):
        assert np.array_equal(value, own[path]), path
    drawn = {np.asarray(value).tobytes() for path, value in first.items() if ".lora_A." in path}
    assert len(drawn) == len(EVERY)


@pytest.mark.long
@pytest.mark.parametrize("preset", ["bf16", "fp16"])
def test_engine_has_the_bits_of_the_trainer_with_adapters(preset: str) -> None:
    """Before and after an update.  In FP16 a scale of the loss changes a gradient by FP16's roundings at most, and
    an overflow in an adapter's dt halves it and moves nothing.
    """
    small, scaled = SmallPolicy(preset, adapters=ADAPTERS), preset == "fp16"
    programs = PolicyPrograms(
        small.model,
        small.plan,
        optax.adam(1e-2),
        temperature=0.8,
        chunk_tokens=1000,
        loss_scale=scale_of(2.0**10) if scaled else None,
    )
    sizes = {"slots": 4, "prefill_rows": 4, "decode_chunk_tokens": 6}
    engine = JaxEngine(
        small.model, small.plan, max_prompt_tokens=8, max_completion_tokens=12, pad_id=0, **sizes
    )
    state, algorithm = programs.init(small.params), resolve_algorithm(algorithm_section(), 12)
    asked = [Request(i, [3 + i, 7, 9 + i][: 1 + i % 3], 100 + i) for i in range(8)]
    for version in range(2):
        engine.load(state.published, version)
        answers = engine.generate(asked, SamplingParams(0.8, 12, (1, 2), 5))
        (batch,) = pack(answers, np.linspace(-1, 1, 8), np.ones(8, bool), 160, 160)
        denominators = count_denominators([batch], 12)
        grads, _, logprobs = programs.policy_gradient(state, batch, denominators, algorithm)
        mask = np.asarray(batch.loss_mask)
        assert mask.sum() > 20
        assert np.array_equal(np.asarray(logprobs)[mask], np.asarray(batch.rollout_logprobs)[mask])
        if not scaled:
            state, report = programs.update(state, grads)
            assert not report.nonfinite
            continue
        unscaled = dataclasses.replace(state, loss_scale=scale_of(1.0))
        plain = dict(named_params(programs.policy_gradient(unscaled, batch, denominators, algorithm)[0]))
        for path, value in named_params(grads):
            error = np.linalg.norm(value / 2.0**10 - plain[path])
            assert 0 < error < 0.02 * np.linalg.norm(plain[path]), path
        state, report = programs.update(state, grads)
        expected = np.sqrt(sum(np.sum(np.square(value)) for value in plain.values()))
        assert not report.nonfinite and report.grad_norm == pytest.approx(expected, rel=0.02)
    if not scaled:
        return
    before = bits(state.params)
    state = dataclasses.replace(state, loss_scale=scale_of(2.0**24))
    grads = programs.policy_gradient(state, batch, denominators, algorithm)[0]
    state, report = programs.update(state, grads)
    assert report.nonfinite and bits(state.params) == before
    assert state.loss_scale is not None and state.loss_scale.factor == 2.0**23


def scale_of(factor: float) -> LossScale:
    return LossScale(jnp.float32(factor), jnp.int32(0), 100)
