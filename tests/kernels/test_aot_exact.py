"""What `numerics.exact` hangs on where a GPU runs it: a policy's forward as trainer and as engine, compiled
for an H100 without one.

A logprob has the same bits in both where every sum over features, tokens or vocabulary has one order for all
shapes, or is carried in float64.  This is read off the optimised programs, fusions included; the kernels' own
order is tests/kernels/test_dense.py's and test_gemm.py's to show.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jetrl_jax.models import vocabulary
from jetrl_jax.models.cache import empty_cache
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.logprobs import completion_logprobs
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import compiler_options, named_params
from jetrl_jax.precision.plan import PrecisionPlan
from pallas_kernels import implementations
from tests.kernels import aot
from tests.parity.small_policy import CONFIG

pytestmark = [pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))]

# A scale of attention that is no power of two, and biases: roundings that a fusion could move.
SIZES = dataclasses.replace(
    CONFIG,
    vocab_size=512,
    hidden_size=256,
    intermediate_size=256,
    num_heads=2,
    num_kv_heads=1,
    head_dim=128,
    attention_bias=True,
)
INEXACT = "exponential|exponential-minus-one|log|log-plus-one|rsqrt|sqrt|cosine|sine|tanh|logistic|power|divide|dot|reduce|reduce-window"
ROWS, TOKENS, SLOTS = 2, 96, 4


def programs(preset: str, attention: str) -> dict[str, str]:
    """The optimised HLO of the trainer's logprobs and of a decoded token's."""
    dtype = "float16" if preset == "fp16" else "bfloat16"
    numerics = Numerics(compute_dtype=dtype, stored_dtype=dtype, attention=attention)
    model = nnx.eval_shape(lambda: Decoder(SIZES, numerics, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    plan = PrecisionPlan([path for path, _ in named_params(params)], preset)
    published = jax.eval_shape(plan.publish, params)

    def trainer(params: Any, published: Any, *batch: jax.Array) -> jax.Array:
        bound = nnx.merge(graphdef, plan.training_weights(params, published))
        return completion_logprobs(bound, *batch, temperature=0.7, chunk_tokens=64)[0]

    def engine(
        published: Any, ids: jax.Array, positions: jax.Array, cache: Any, temperature: jax.Array
    ) -> Any:
        bound = nnx.merge(graphdef, published)
        hidden, cache = bound.extend(ids[:, None], positions[:, None], cache)
        logits = vocabulary.scale_logits(bound.logits(hidden[:, 0]), temperature, exact=numerics.exact)
        return vocabulary.token_logprobs(logits, ids, exact=numerics.exact), cache

    row, slot = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((ROWS, TOKENS), (SLOTS,)))
    cache, temperature = (
        jax.eval_shape(lambda: empty_cache(SIZES, model.numerics, SLOTS, 128)),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    arguments = {
        "trainer": (params, published, row, row, row),
        "engine": (published, slot, slot, cache, temperature),
    }
    with implementations.hopper_elsewhere():
        options = compiler_options()
    return {
        name: aot.program_for_h100(program, *arguments[name], compiler_options=options)
        for name, program in (("trainer", trainer), ("engine", engine))
    }


LONG = [pytest.mark.long, pytest.mark.newest]


@pytest.mark.parametrize(
    ("preset", "attention"),
    [
        ("bf16", "auto"),
        pytest.param("bf16", "xla", marks=LONG),
        pytest.param("fp16", "auto", marks=LONG),
        pytest.param("fp8_unified", "auto", marks=LONG),
    ],
)
def test_every_sum_is_a_kernels_or_in_float64(
    preset: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is a kernel's: no product is left in float64."""
    monkeypatch.setattr(implementations, "gpu_problem", lambda: None)
    monkeypatch.setattr("jetrl_jax.models.linear.gpu_problem", lambda: None)
    for name, program in programs(preset, attention).items():
        found = set(re.findall(rf"= (?:\()?([a-z]+\d+)\[[^=]*? ({INEXACT})\(", program))
        narrow = {
            (dtype, operation)
            for dtype, operation in found
            if dtype != "f64" and not dtype.startswith(("s", "u", "pred"))
        }
        assert not narrow, f"{name}: {narrow}"
        assert (("f64", "dot") in found) == (attention == "xla"), f"{name}: {found}"
        targets = set(re.findall(r'custom_call_target="([^"]*)"', program))
        assert targets == {"mosaic_gpu_v2"}, f"{name}: {targets}"
        kernels = (12 if preset == "fp8_unified" else 8) + (attention != "xla")  # the head is one of them
        assert program.count('custom_call_target="mosaic_gpu_v2"') == kernels
