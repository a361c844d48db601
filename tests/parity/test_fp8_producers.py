"""Norm and SiLU fused with the quantiser against the same operations in turn: one decoder layer, forward and
gradients.

The products are the same both ways (XLA's, for time), so every bit of the layer's outputs must be equal; so
must the gradients up to SiLU's, which the kernel computes in an FP32 of its own; those behind it are close.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetrl_jax.models import fp8_producers, linear, ops
from jetrl_jax.models.choices import resolve
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import jit, map_params, named_params
from jetrl_jax.precision.plan import PrecisionPlan
from tests.kernels.runnable import runnable
from tests.parity.small_policy import CONFIG

SIZES = dataclasses.replace(
    CONFIG, hidden_size=1024, intermediate_size=256, num_heads=2, num_kv_heads=1, head_dim=128
)
TOKENS = 9  # no multiple of 8
CLOSE = 1e-3  # of a gradient's norm: a BF16 neighbour in a few of SiLU's gradients
Overrides = tuple[tuple[str, str], ...]
QUANTISERS = {
    linear: ("quantize", "quantize_dual", "requantize", "silu_gradients_quantize"),
    fp8_producers: ("rms_norm_quantize", "silu_multiply_quantize"),
}


class Layer:
    """One layer with its weights as training binds them, its inputs and the cotangents of its outputs."""

    def __init__(self, overrides: Overrides = (), sizes: Any = SIZES, **options: Any) -> None:
        model = Decoder(sizes, Numerics(**options), rngs=nnx.Rngs(0))
        self.sizes = sizes
        self.numerics = model.numerics
        self.graphdef, params = nnx.split(model)
        rng = np.random.default_rng(1)
        self.params = map_params(
            lambda _, v: v if v.ndim == 2 else v + np.asarray(rng.normal(size=v.shape) * 0.2, np.float32),
            params,
        )
        paths = [path for path, _ in named_params(params)]
        self.plan = PrecisionPlan(paths, "fp8_unified", overrides, wgrad_operand=self.numerics.wgrad_operand)
        shape = (1, TOKENS, sizes.hidden_size)
        # x, residual, two cotangents
        self.arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(4)]

    def forward(self, weights: Any, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(branch, new residual)."""
        table = ops.rope_table(jnp.arange(TOKENS, dtype=jnp.int32)[None], self.sizes, self.numerics)
        mask = jnp.tril(jnp.ones((1, TOKENS, TOKENS), bool))
        return nnx.merge(self.graphdef, weights).layers[0](x, residual, table, mask)[:2]

    def with_gradients(self, params: Any, x: jax.Array, residual: jax.Array, *cotangents: jax.Array) -> Any:
        """The outputs, and the gradients of (x, residual, parameters)."""

        def forward(x: jax.Array, residual: jax.Array, params: Any) -> Any:
            return self.forward(self.plan.training_weights(params, published), x, residual)

        published = self.plan.publish(params)
        outputs, pullback = jax.vjp(forward, x, residual, params)
        return outputs, pullback(cotangents)

    def run(self) -> dict[str, np.ndarray]:
        """Outputs, and gradients of inputs and of the layer's parameters, by name."""
        outputs, (dx, dresidual, grads) = jit(self.with_gradients)(self.params, *self.arrays)
        named = {"branch": outputs[0], "residual": outputs[1], "dx": dx, "dresidual": dresidual}
        named |= {path: value for path, value in named_params(grads) if path.startswith("layers.")}
        return {name: np.asarray(value).astype(np.float32) for name, value in named.items()}

    def launches(self, *, training: bool) -> Counter[str]:
        """How often each quantiser is called in a forward, or in forward and backward: 'name' by XLA, 'name*'
        by a kernel.
        """
        counts: Counter[str] = Counter()

        def counted(name: str, function: Any) -> Any:
            def call(*args: Any, implementation: str, **options: Any) -> Any:
                counts[name + ("*" if implementation.startswith("mosaic") else "")] += 1
                return function(*args, implementation=implementation, **options)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for module, names in QUANTISERS.items():
                for name in names:
                    patch.setattr(module, name, counted(name, getattr(module, name)))
            if training:
                jax.eval_shape(self.with_gradients, self.params, *self.arrays)
            else:
                jax.eval_shape(self.forward, jax.eval_shape(self.plan.publish, self.params), *self.arrays[:2])
        return counts


interpreted = pytest.mark.parametrize("kernels", runnable("mosaic_interpret"))


@pytest.mark.newest
@pytest.mark.long
@interpreted
def test_fused_layer_has_the_bits_of_the_operations_in_turn(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fprop", "dgrad", "wgrad"):
        product = getattr(linear, name)
        monkeypatch.setattr(
            linear,
            name,
            lambda *args, f=product, **options: f(*args, **options | {"implementation": "xla_fast"}),
        )
    layer = Layer(kernels=kernels)
    fused = layer.run()
    for problem in ("norm_problem", "silu_problem"):
        monkeypatch.setattr(fp8_producers, problem, lambda *_: "turned off")
    in_turn = Layer(kernels=kernels).run()
    assert sum(path.startswith("layers.") for path in fused) == 11
    for name, value in fused.items():
        assert np.any(value != 0), name
        if name in ("branch", "residual", "layers.0.mlp.down_proj.weight"):
            np.testing.assert_array_equal(value, in_turn[name], err_msg=name)
        difference = np.linalg.norm(value - in_turn[name]) / np.linalg.norm(in_turn[name])
        assert difference < CLOSE, (name, difference)


def test_every_input_is_quantised_once() -> None:
    """By XLA: q, k, v share one, gate and up share one; the output gradients of seven layers are quantised
    both ways.
    """
    assert Layer(kernels="xla").launches(training=False) == {"quantize": 4}
    # WGrad's operand is made again in each layer's backward; equal ones are one operation once XLA has merged
    # them.
    assert Layer(kernels="xla").launches(training=True) == {
        "quantize": 4,
        "requantize": 7,
        "quantize_dual": 7,
    }
    for operand in ("dual", "block"):
        assert Layer(kernels="xla", wgrad_operand=operand).launches(training=True) == {"quantize_dual": 4 + 7}


@interpreted
def test_kernels_take_the_operation_in_front_where_they_can(kernels: str) -> None:
    fused = {"rms_norm_quantize*": 2, "quantize*": 1, "silu_multiply_quantize*": 1}
    assert Layer(kernels=kernels).launches(training=False) == fused
    backward = {"quantize_dual*": 5, "silu_gradients_quantize*": 1, "requantize*": 7}
    assert Layer(kernels=kernels).launches(training=True) == fused | backward
    dual = Layer(kernels=kernels, wgrad_operand="dual")  # the norm's kernel has no second output
    both = {"silu_multiply_quantize*": 1, "silu_gradients_quantize*": 1}
    assert dual.launches(training=True) == {"quantize_dual*": 2 + 1 + 5} | both
    assert dual.launches(training=False) == fused


@interpreted
def test_a_reader_that_is_not_fp8_or_another_width_takes_the_operations_in_turn(kernels: str) -> None:
    mixed = Layer((("*.k_proj.weight", "bf16"), ("*.down_proj.weight", "bf16")), kernels=kernels)
    # norm -> gate, up; norm | q, v; attention
    assert mixed.launches(training=False) == {"rms_norm_quantize*": 1, "quantize*": 2}
    narrow = Layer(sizes=dataclasses.replace(SIZES, hidden_size=384), kernels=kernels)
    assert narrow.launches(training=False) == {"quantize*": 3, "silu_multiply_quantize*": 1}
    ragged = Layer(sizes=dataclasses.replace(SIZES, intermediate_size=160), kernels=kernels)
    assert ragged.launches(training=False) == {"rms_norm_quantize*": 2, "quantize*": 1, "quantize": 1}


def inputs(sizes: Any, part: str = "name", **options: Any) -> dict[str, str]:
    """What makes the codes of inputs, as the run's record has it."""
    record = resolve(Numerics(**options), sizes).choices.record()
    return {name: choice[part] for name, choice in record["fp8_inputs"].items()}


def test_record_says_what_makes_the_codes() -> None:
    assert set(inputs(SIZES, kernels="xla_fast", wgrad_operand="dual").values()) == {"xla"}


@interpreted
def test_record_says_why_a_kernel_is_not_taken(kernels: str) -> None:
    sizes = dataclasses.replace(SIZES, hidden_size=384, intermediate_size=160)
    assert inputs(sizes, kernels=kernels) == {
        "norm": "xla",
        "norm_in_training": "xla",
        "silu": "xla",
        "quantize": kernels,
        "quantize_partial": "xla",
    }
    why = inputs(sizes, "reason", kernels=kernels)
    assert (
        "expected a width of (" in why["norm"]
        and "multiple of 128" in why["silu"]
        and "is partial" in why["quantize_partial"]
    )
    dual = {"kernels": kernels, "wgrad_operand": "dual"}
    assert (
        inputs(SIZES, **dual)["norm"] == kernels
        and "takes the value" in inputs(SIZES, "reason", **dual)["norm_in_training"]
    )
