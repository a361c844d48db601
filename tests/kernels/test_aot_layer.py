"""A whole decoder layer on the kernels, compiled for an H100 that is not there: which kernels run, and how often."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jetrl_jax.models import ops
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision import Numerics, PrecisionPlan, named_params
from pallas_kernels import implementations
from tests.kernels import aot
from tests.parity.small_policy import CONFIG

pytestmark = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))

# All matrices square, so that each kind of kernel is compiled once; 192 tokens, a number that no feature axis has.
SIZES = dataclasses.replace(CONFIG, hidden_size=1024, intermediate_size=1024, num_heads=8, num_kv_heads=8, head_dim=128)
TOKENS = 192


def launches(program: str) -> Counter[str]:
    """How often each function of `pallas_kernels` is a kernel of the program, those of the backward under 'backward NAME'."""
    calls = [line for line in program.splitlines() if "custom-call(" in line and "mosaic_gpu" in line]
    names = [re.search(r'op_name="[^"]*?(transpose\()?(?:jvp\()?jit\((rms_norm_quantize|quantize|matmul)\)', line) for line in calls]
    assert all(names), calls
    return Counter(("backward " if name.group(1) else "") + name.group(2) for name in names if name)


@pytest.fixture
def forward_and_both(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(forward as rollout runs it, forward and backward as training does), each with its abstract arguments."""
    monkeypatch.setattr(implementations, "gpu_problem", lambda: None)
    numerics = Numerics(kernels="mosaic_gpu")
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(SIZES, numerics, rngs=nnx.Rngs(0))))
    plan = PrecisionPlan([path for path, _ in named_params(params)], "fp8_unified")
    published = jax.eval_shape(plan.publish, params)
    x = jax.ShapeDtypeStruct((1, TOKENS, SIZES.hidden_size), jnp.bfloat16)

    def forward(weights: Any, x: jax.Array, residual: jax.Array) -> Any:
        table = ops.rope_table(jnp.arange(TOKENS, dtype=jnp.int32)[None], SIZES, numerics)
        mask = jnp.tril(jnp.ones((1, TOKENS, TOKENS), bool))
        return nnx.merge(graphdef, weights).layers[0](x, residual, table, mask)[:2]

    def both(params: Any, published: Any, x: jax.Array, residual: jax.Array, *cotangents: jax.Array) -> Any:
        outputs, pullback = jax.vjp(lambda p, x, r: forward(plan.training_weights(p, published), x, r), params, x, residual)
        return outputs, pullback(cotangents)

    return (forward, (published, x, x)), (both, (params, published, x, x, x, x))


def test_layer_runs_on_the_kernels_and_quantises_every_input_once(forward_and_both: Any) -> None:
    (forward, arguments), (both, all_arguments) = forward_and_both
    once = {"rms_norm_quantize": 2, "quantize": 2, "matmul": 7}  # the quantisers: of attention, and of SiLU with its product
    program, reports = aot.program_and_reports(both, *all_arguments)
    assert all(report.clean for report in reports), [report.text for report in reports if not report.clean]
    assert launches(program) == once | {"backward quantize": 7, "backward matmul": 14}
    # WGrad's operands, quantised again along tokens: that of q, k, v once, of o, of gate and up once, of down.
    operands = re.findall(r"= f32\S+ custom-call\(\S+ (%[\w.]+),[^\n]*mosaic_gpu", program)  # the second one of each WGrad
    assert len(operands) == 7 and len(set(operands)) == 4  # q, k, v multiply one; o; gate and up one; down

    program = aot.program_for_h100(forward, *arguments)
    assert launches(program) == once
    # The norm and SiLU beside the kernels are gone: nothing in float64 is as large as a token's features.
    assert not re.findall(rf"f64\[(?:\d+,)*{TOKENS},{SIZES.hidden_size}\]", program)
