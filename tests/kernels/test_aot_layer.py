"""A whole decoder layer on the kernels, compiled for an H100 that is not there: which kernels run, and how
often.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jetrl_jax.config.devices import ShardingSection
from jetrl_jax.devices.layout import WHOLE, Layout, placed
from jetrl_jax.models import ops
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.precision.plan import PrecisionPlan
from pallas_kernels import implementations
from tests.kernels import aot
from tests.parity.small_policy import CONFIG

pytestmark = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))

# All matrices square, so that each kind of kernel is compiled once; 192 tokens, a number that no feature axis
# has.
SIZES = dataclasses.replace(
    CONFIG, hidden_size=1024, intermediate_size=1024, num_heads=8, num_kv_heads=8, head_dim=128
)
TOKENS = 192
# the quantisers of attention, and of SiLU with its product
FORWARD = {"rms_norm_quantize": 2, "quantize": 2, "matmul": 7, "causal_attention": 1}
# q, k, v share an operand; so do gate and up
# of all but gate and up, whose quantisers are one kernel with SiLU's gradient
BACKWARD = {"backward silu_gradients_quantize": 1, "backward quantize": 5}
BACKWARD |= {"backward requantize": 4, "backward matmul": 14}
ATTENTION_BACKWARD = {"backward causal_gradients": 2}  # of queries, of keys and values
BACKWARD |= ATTENTION_BACKWARD
BF16 = {"dense_matmul": 7, "causal_attention": 1} | ATTENTION_BACKWARD


def launches(program: str) -> Counter[str]:
    """How often each function of `pallas_kernels` is a kernel of the program, those of the backward under
    'backward NAME'.
    """
    calls = [line for line in program.splitlines() if "custom-call(" in line and "mosaic_gpu" in line]
    ours = "(rms_norm_quantize|silu_gradients_quantize|requantize|quantize|dense_matmul|matmul|causal_attention|causal_gradients)"
    names = [re.search(rf'op_name="[^"]*?(transpose\()?(?:jvp\()?jit\({ours}\)', line) for line in calls]
    assert all(names), calls
    return Counter(("backward " if name.group(1) else "") + name.group(2) for name in names if name)


class Layer:
    """A decoder layer as rollout and as training run it,
    on one device or split over the mesh of `sharding`.
    """

    def __init__(self, sharding: ShardingSection | None = None, preset: str = "fp8_unified") -> None:
        model = nnx.eval_shape(lambda: Decoder(SIZES, Numerics(kernels="mosaic_gpu"), rngs=nnx.Rngs(0)))
        self.numerics = model.numerics
        self.graphdef, params = nnx.split(model)
        self.plan = PrecisionPlan([path for path, _ in named_params(params)], preset)
        published = jax.eval_shape(self.plan.publish, params)
        x = jax.ShapeDtypeStruct((1, TOKENS, SIZES.hidden_size), jnp.bfloat16)
        self.layout = None
        if sharding is not None:
            devices = list(aot.h100_mesh(sharding.devices).devices.flat)
            self.layout = Layout(sharding, self.plan, model, devices)
            weights, whole = self.layout.shardings(params), self.layout.replicated
            params, published, x = placed(weights, params), placed(weights, published), placed(whole, x)
        self.rollout_arguments = (published, x, x)
        self.training_arguments = (params, published, x, x, x, x)

    def rollout(self, weights: Any, x: jax.Array, residual: jax.Array) -> Any:
        """(branch, new residual)."""
        table = ops.rope_table(jnp.arange(TOKENS, dtype=jnp.int32)[None], SIZES, self.numerics)
        model = nnx.merge(self.graphdef, weights if self.layout is None else self.layout.shards(weights))
        return model.layers[0](x, residual, table, None)[:2]

    def training(
        self, params: Any, published: Any, x: jax.Array, residual: jax.Array, *cotangents: jax.Array
    ) -> Any:
        """The outputs, and the gradients of parameters and inputs."""
        outputs, pullback = jax.vjp(
            lambda p, x, r: self.rollout(self.plan.training_weights(p, published), x, r), params, x, residual
        )
        return outputs, pullback(cotangents)


@pytest.fixture(autouse=True)
def _with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "gpu_problem", lambda: None)


def test_training_runs_on_the_kernels_and_quantises_every_input_once() -> None:
    layer = Layer()
    program, reports = aot.program_and_reports(layer.training, *layer.training_arguments)
    assert all(report.clean for report in reports), [report.text for report in reports if not report.clean]
    assert launches(program) == FORWARD | BACKWARD
    # the second one of each WGrad
    operands = re.findall(r"= f32\S+ custom-call\(\S+ (%[\w.]+),[^\n]*mosaic_gpu", program)
    assert len(operands) == 7 and len(set(operands)) == 4  # q, k, v multiply one; o; gate and up one; down


@pytest.mark.newest
@pytest.mark.long
def test_rollout_computes_nothing_beside_the_fused_kernels() -> None:
    layer = Layer()
    program = aot.program_for_h100(layer.rollout, *layer.rollout_arguments)
    assert launches(program) == FORWARD
    # The norm and SiLU in turn, which carry the gradient, are gone: nothing in float64 has a token's
    # features.
    assert not re.findall(rf"f64\[(?:\d+,)*{TOKENS},{SIZES.hidden_size}\]", program)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("bf16", BF16),
        pytest.param(
            "fp8_forward", FORWARD | ATTENTION_BACKWARD, marks=[pytest.mark.long, pytest.mark.newest]
        ),
    ],
)
def test_a_bf16_backward_runs_attentions_kernels_and_no_forward_again(
    preset: str, expected: dict[str, int]
) -> None:
    layer = Layer(preset=preset)
    assert launches(aot.program_for_h100(layer.training, *layer.training_arguments)) == expected


@pytest.mark.newest
@pytest.mark.long
@pytest.mark.parametrize(("preset", "expected"), [("fp8_unified", FORWARD | BACKWARD), ("bf16", BF16)])
def test_split_layers_run_on_the_same_kernels(preset: str, expected: dict[str, int]) -> None:
    """Two H100 that share the layer: codes are made from the values of the dtype between operations and
    gathered.
    """
    layer = Layer(ShardingSection(tensor=2), preset)
    assert layer.layout is not None
    weights = layer.layout.specs(layer.training_arguments[0])
    mapped = layer.layout.map(
        layer.training, (weights, weights, WHOLE, WHOLE, WHOLE, WHOLE), (WHOLE, (weights, WHOLE, WHOLE))
    )
    program = str(jax.jit(mapped).lower(*layer.training_arguments).compile().as_text())
    assert launches(program) == expected
    gathers = [line for line in program.splitlines() if " all-gather-start(" in line]
    # the inputs of o and down
    assert sum("f8e4m3fn" in line for line in gathers) == (2 if preset == "fp8_unified" else 0)
