"""Products that are not FP8: what forms them where, their values and gradients by each form, and decode
against a whole forward.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetrl_jax.errors import UserError
from jetrl_jax.models import choices
from jetrl_jax.models.cache import empty_cache
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.dense import (
    dense,
    dense_backward_implementation,
    dense_implementation,
    head_backward_implementation,
)
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import jit
from pallas_kernels.implementations import Choice, interpreter_problem
from tests.kernels.test_implementations import pretend
from tests.oracles import tolerances
from tests.parity.small_policy import CONFIG, SmallPolicy, resolved

interpreted = pytest.mark.skipif(
    interpreter_problem() is not None, reason=f"mosaic_interpret: {interpreter_problem()}"
)
FORMS = ["xla_fast", "xla_direct", "xla", pytest.param("mosaic_interpret", marks=interpreted)]


def take(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes `dense` of numerics that are resolved from now on run on this form, as on a device that it is
    for.
    """
    monkeypatch.setattr(
        choices, "dense_implementation", lambda numerics, **_: Choice(name, "asked for by a test")
    )


@pytest.mark.parametrize(
    ("platform", "capability", "version", "options", "name", "reason"),
    [
        (
            "cpu",
            "",
            (0, 12, 0),
            {},
            "xla_fast",
            "the platform is 'cpu', whose sums do not depend on the number of rows from 8 on",
        ),
        ("gpu", "9.0", (0, 12, 0), {}, "mosaic_gpu", "auto: a GPU of compute capability 9.0"),
        (
            "gpu",
            "9.0",
            (0, 12, 0),
            {"compute_dtype": "float16"},
            "mosaic_gpu",
            "auto: a GPU of compute capability 9.0",
        ),
        ("gpu", "9.0", (0, 12, 0), {"compute_dtype": "float32"}, "xla_fast", "operands are float32"),
        ("cpu", "", (0, 12, 0), {"exact": False}, "xla_fast", "numerics.exact is false"),
        (
            "gpu",
            "9.0",
            (0, 12, 0),
            {"exact": False},
            "xla_direct",
            "numerics.exact is false: .* rounds itself",
        ),
        ("gpu", "8.0", (0, 12, 0), {"exact": False}, "xla_direct", "numerics.exact is false"),
        ("gpu", "9.0", (0, 10, 2), {}, "xla", "JAX is .*, expected 0.11 or newer"),
        ("gpu", "8.0", (0, 12, 0), {}, "xla", "the compute capability of Pretended GPU is 8.0, expected 9.0"),
        ("tpu", "", (0, 12, 0), {}, "xla", "the platform is 'tpu', expected 'gpu'"),
    ],
)
def test_choice_follows_device_and_numerics(
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    capability: str,
    version: tuple[int, ...],
    options: dict[str, Any],
    name: str,
    reason: str,
) -> None:
    pretend(monkeypatch, platform, capability, version)
    choice = dense_implementation(Numerics(**options))
    assert choice.name == name
    assert re.search(reason, choice.reason), choice.reason


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "bias"), [("bfloat16", "float32", False), ("float16", "float16", True)]
)
def test_values_match_float64_and_gradients_do_not_depend_on_the_form(
    monkeypatch: pytest.MonkeyPatch, dtype: str, out_dtype: str, bias: bool, form: str
) -> None:
    """Under jit, and checkpoint but for the interpreter, whose callbacks it refuses.  The backward is XLA's
    product in each form.
    """
    rng = np.random.default_rng(0)
    m, n, k = 3, 40, 72
    x, w = jnp.asarray(rng.normal(size=(m, k)), dtype), jnp.asarray(rng.normal(size=(n, k)), jnp.float32)
    b = jnp.asarray(rng.normal(size=n), jnp.float32) if bias else None
    dy = jnp.asarray(rng.normal(size=(m, n)), out_dtype)

    def run() -> Any:
        numerics = resolved(compute_dtype=dtype)

        def layer(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
            return dense(x, w, jnp.dtype(out_dtype), numerics, b)

        run_layer = layer if form == "mosaic_interpret" else jax.checkpoint(layer)
        return jax.jit(lambda *a: (run_layer(*a), jax.vjp(run_layer, *a)[1](dy)))(x, w, b)

    expected = run()[1]
    take(monkeypatch, form)
    assert resolved(compute_dtype=dtype).choices.dense.name == form
    out, gradients = run()
    wide_x, wide_w = np.asarray(x, np.float64), np.asarray(w.astype(dtype), np.float64)
    exact, magnitude = wide_x @ wide_w.T, np.abs(wide_x) @ np.abs(wide_w).T
    if b is not None:
        wide_b = np.asarray(b.astype(dtype), np.float64)
        exact, magnitude = exact + wide_b, magnitude + np.abs(wide_b)
    bound = tolerances.output_rounding(
        exact, tolerances.fp32_dot(k + 1, magnitude), tolerances.U_FP16 if out_dtype == "float16" else 0.0
    )
    assert out.dtype == out_dtype and np.all(np.abs(np.asarray(out, np.float64) - exact) <= bound)
    chex.assert_trees_all_equal(gradients, expected)


@pytest.mark.parametrize(
    ("platform", "options", "backward", "head"),
    [
        ("cpu", {}, "xla_fast", "fp32"),
        ("cpu", {"head_gradient": "bf16"}, "xla_fast", "bf16"),
        ("gpu", {}, "xla_direct", "bf16x3"),
        ("gpu", {"exact": False}, "xla_direct", "bf16x3"),
        ("gpu", {"head_gradient": "fp32"}, "xla_direct", "fp32"),
        ("gpu", {"compute_dtype": "float16"}, "xla_direct", "fp32"),
        ("gpu", {"compute_dtype": "float32"}, "xla_fast", "fp32"),
    ],
)
def test_a_gpu_multiplies_gradients_on_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, platform: str, options: dict[str, Any], backward: str, head: str
) -> None:
    pretend(monkeypatch, platform)
    numerics = Numerics(**options)
    assert (dense_backward_implementation(numerics).name, head_backward_implementation(numerics).name) == (
        backward,
        head,
    )


def test_parts_need_bf16() -> None:
    with pytest.raises(
        UserError, match=r"numerics\.head_gradient: cannot run: got 'bf16x2' with operands in float16"
    ):
        head_backward_implementation(Numerics(compute_dtype="float16", head_gradient="bf16x2"))


@pytest.mark.parametrize(
    ("parts", "error"), [("fp32", 0.0), ("bf16x3", 0.0), ("bf16x2", 2.0**-15), ("bf16", 2.0**-8)]
)
def test_the_heads_gradients_match_float64(parts: str, error: float) -> None:
    """dy of a softmax: a few large values among many that are 2^-20 of them, each split with its own exponent."""
    rng = np.random.default_rng(1)
    m, n, k = 24, 300, 40
    numerics = resolved(head_gradient=parts)
    x, w = (
        jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16),
        jnp.asarray(rng.normal(size=(n, k)), jnp.float32),
    )
    dy = jnp.asarray(rng.normal(size=(m, n)) * 2.0 ** rng.integers(-20, 1, size=(m, n)), jnp.float32)
    pullback = jax.vjp(lambda x, w: dense(x.astype(jnp.float32), w, jnp.dtype("float32"), numerics), x, w)[1]
    dx, dw = (np.asarray(value, np.float64) for value in jax.jit(pullback)(dy))
    wide_x, wide_w, wide_dy = (np.asarray(value, np.float64) for value in (x, w.astype(jnp.bfloat16), dy))
    for found, left, right, depth in ((dx, wide_dy, wide_w, n), (dw, wide_dy.T, wide_x, m)):
        exact, magnitude = left @ right, np.abs(left) @ np.abs(right)
        bound = tolerances.fp32_dot(3 * depth + 3, magnitude) + error * magnitude
        if found is dx:
            bound = tolerances.output_rounding(exact, bound, tolerances.U_BF16)
        assert np.all(np.abs(found - exact) <= bound)
        assert error == 0 or found is dx or np.any(np.abs(found - exact) > error * magnitude / 64)


@pytest.mark.parametrize(("parts", "error"), [("fp32", 0.0), ("bf16x3", 0.0), ("bf16x2", 2.0**-15)])
def test_parts_of_a_gradient_add_up_to_it(parts: str, error: float) -> None:
    """Against the unit matrix: every significand's pattern, exponents of 2^-90 to 2^90, both signs."""
    rng = np.random.default_rng(2)
    size = 64
    bits = rng.integers(1 << 23, size=(size, size)) | rng.integers(37, 217, size=(size, size)) << 23
    dy = (bits | rng.integers(2, size=(size, size)) << 31).astype(np.uint32).view(np.float32)
    unit, numerics = jnp.eye(size, dtype=jnp.float32), resolved(head_gradient=parts)
    dx, dw = jax.vjp(lambda x, w: dense(x, w, jnp.dtype("float32"), numerics), unit, unit)[1](jnp.asarray(dy))
    for found, expected in ((dx, dy), (dw, dy.T)):
        missing = np.abs(np.asarray(found, np.float64) - expected)
        assert np.all(missing <= error * np.abs(expected.astype(np.float64)))
        assert np.any(missing) == (error > 0)


@pytest.mark.parametrize(
    ("preset", "form"),
    [
        ("bf16", "xla"),
        ("fp16", "xla"),
        pytest.param("bf16", "mosaic_interpret", marks=[interpreted, pytest.mark.long, pytest.mark.newest]),
    ],
)
def test_decode_gives_the_bits_of_a_whole_forward(
    monkeypatch: pytest.MonkeyPatch, preset: str, form: str
) -> None:
    """Each token of three rows decoded alone, against all of them at once: 3 rows of products, and 21."""
    take(monkeypatch, form)
    policy = SmallPolicy(preset, dataclasses.replace(CONFIG, attention_bias=True))
    model = policy.rollout_model()
    ids = jnp.asarray(np.random.default_rng(4).integers(0, CONFIG.vocab_size, (3, 7)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(7, dtype=jnp.int32)[None], ids.shape)
    graphdef, weights = nnx.split(model)

    def bind(weights: Any) -> Decoder:
        return nnx.merge(graphdef, weights)

    whole = jit(lambda weights: bind(weights).logits(bind(weights)(ids, positions, jnp.ones_like(ids))))(
        weights
    )

    def step(weights: Any, ids: jax.Array, positions: jax.Array, cache: Any) -> Any:
        hidden, cache = bind(weights).extend(ids[:, None], positions[:, None], cache)
        return bind(weights).logits(hidden[:, 0]), cache

    decode, cache = jit(step), empty_cache(model.config, policy.numerics, 3, 16)
    for position in range(7):
        logits, cache = decode(weights, ids[:, position], positions[:, position], cache)
        np.testing.assert_array_equal(
            np.asarray(logits), np.asarray(whole[:, position]), err_msg=str(position)
        )
