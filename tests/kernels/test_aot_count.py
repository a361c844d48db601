"""The count of a small model compiled for an H100 that is not there, against formulas written out by hand."""

from __future__ import annotations

import math

import pytest

from jetrl_jax.config.load import load_config
from jetrl_jax.models.anatomy import MATRICES
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.planning.count import Count, StepCount, total
from tests.kernels import aot

pytestmark = [
    pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing())),
    pytest.mark.long,
    pytest.mark.newest,
]
SIZES = ModelConfig("qwen3", 1024, 512, 768, 5, 4, 2, 128, 4096, 1e6, None, 1e-6, False, False, True, (1,))
TOKENS = 512
SETTINGS = [
    "model.path=nowhere", "numerics.exact=false", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "rollout.max_prompt_tokens=128", "rollout.max_completion_tokens=128", "rollout.engine.slots=16",
    "rollout.engine.prefill_rows=4", f"batch.microbatch_tokens={TOKENS}", "batch.logprob_chunk_tokens=256",
]  # fmt: skip
LINEAR = sum(math.prod(matrix.shape(SIZES)) for matrix in MATRICES)


def kinds(count: Count) -> dict[str, tuple[int, float]]:
    """(launches, FLOPs) of the products."""
    return {kind: (round(one.launches), one.flops) for kind, one in count.items() if one.flops > 0}


def test_products_of_a_training_step_are_all_counted() -> None:
    gradient = StepCount(load_config(None, [*SETTINGS, "precision.preset=fp8_unified"]), SIZES).program(
        "gradient"
    )
    linear, head = 2.0 * LINEAR * TOKENS, 2.0 * SIZES.vocab_size * SIZES.hidden_size * TOKENS
    attention = 2.0 * TOKENS * 256 * SIZES.num_heads * SIZES.head_dim / 2
    layer = {
        "FP8 FProp, DGrad": (14, 2 * linear),
        "FP8 WGrad by rows": (7, linear),
        "attention": (2, 7 * attention),
    }
    assert kinds(gradient.layer) == layer
    # forward twice, and both gradients in three parts
    assert sum(one.flops for one in gradient.rest.values()) == 8 * head
    assert gradient.layer["quantisers"].launches == 14 and gradient.layer["turned codes"].launches == 7
    assert total(gradient.whole).flops == SIZES.num_layers * (3 * linear + 7 * attention) + 8 * head


def test_a_decode_step_reads_every_weight_once() -> None:
    step = StepCount(load_config(None, [*SETTINGS, "precision.preset=fp8_unified"]), SIZES)
    layer = step.program("decode").layer
    assert kinds(layer)["FP8 FProp, DGrad"] == (7, 2.0 * LINEAR * 16)
    shapes = [matrix.shape(SIZES) for matrix in MATRICES]
    activations = sum(16 * (inputs * (1 + 4 / 128) + 2 * outputs) for outputs, inputs in shapes)  # 16 tokens
    assert layer["FP8 FProp, DGrad"].bytes == LINEAR * (1 + 4 / 128**2) + activations
    cache = 2 * 16 * SIZES.num_kv_heads * SIZES.head_dim * 2 * step.context_tokens
    ends = 4 * 16 * SIZES.num_heads * SIZES.head_dim + 8 * 16 * SIZES.num_kv_heads  # q, out; visible keys
    assert layer["attention"].bytes == cache + ends
    assert list(step.phases()) == ["rollout", "training", "end to end"]
