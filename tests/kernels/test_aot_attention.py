"""Attention compiled for an H100 that is not there: nothing spilled, no wgmma that waits for another, one order of sums."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import causal_attention
from tests.kernels import aot

pytestmark = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))

SIZES = {
    "qwen3_8b": (128, 32, 8, "bfloat16"),
    "qwen2_500m": (64, 14, 2, "bfloat16"),
    "fp16": (128, 8, 8, "float16"),
}
"""(head_dim, query heads, key/value heads, dtype)"""
NAMES = ["qwen3_8b", "qwen2_500m", pytest.param("fp16", marks=[pytest.mark.long, pytest.mark.newest])]


@functools.cache
def reports(name: str) -> tuple[aot.KernelReport, aot.KernelReport]:
    """Of whole sequences and of a cache."""
    from pallas_kernels.attention import mosaic

    width, heads, kv_heads, dtype = SIZES[name]
    q, kv, cache = (1, 4096, heads, width), (1, 4096, kv_heads, width), (64, kv_heads, 2048, width)
    whole = [jax.ShapeDtypeStruct(shape, dtype) for shape in (q, kv, kv)] + [
        jax.ShapeDtypeStruct((1, 32), jnp.int32)
    ]
    token = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 1, heads, width), cache, cache)]
    token.append(jax.ShapeDtypeStruct((64, 1), jnp.int32))
    (training,) = aot.compile_for_h100(lambda *arrays: mosaic.causal_attention(*arrays)[0], *whole)
    (decode,) = aot.compile_for_h100(lambda *arrays: mosaic.cached_attention(*arrays), *token)
    return training, decode


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_cleanly(name: str) -> None:
    for report in reports(name):
        assert report.clean, report.text


@functools.cache
def codes_report(name: str) -> aot.KernelReport:
    """Of a cache of codes."""
    from pallas_kernels.attention import mosaic

    width, heads, kv_heads, dtype = SIZES[name]
    cache = jax.ShapeDtypeStruct((64, kv_heads, 2048, width), jnp.float8_e4m3fn)
    queries, positions, scales = (
        jax.ShapeDtypeStruct(*one)
        for one in (((64, 1, heads, width), dtype), ((64, 1), jnp.int32), ((2,), jnp.float32))
    )
    (report,) = aot.compile_for_h100(
        lambda q, k, v, p, s: mosaic.cached_attention(q, k, v, p, False, s),
        queries,
        cache,
        cache,
        positions,
        scales,
    )
    return report


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_of_codes_compiles_cleanly_to_the_same_products(name: str) -> None:
    """The products, exponentials and sums of a cache of values, in their order; besides, codes are widened."""
    report, plain = codes_report(name), reports(name)[1]
    assert report.clean, report.text
    operation = r"\b(?:(?:add|sub|max|div|ex2|lg2|neg)(?:\.\w+)*\.f32|wgmma\.mma_async\S*)(?=\s)"
    assert re.findall(operation, report.ptx) == re.findall(operation, plain.ptx)


@pytest.mark.parametrize("name", NAMES)
def test_training_and_decode_are_one_sequence_of_operations(name: str) -> None:
    """Of FP32 arithmetic, in the order of the text, and of tensor-core products; training also takes two logarithms."""
    operation = r"\b(?:(?:mul|add|sub|fma|max|div|ex2|lg2|neg)(?:\.\w+)*\.f32|cvt(?:\.\w+)*\.f32|wgmma\.mma_async\S*)(?=\s)"
    training, decode = (re.findall(operation, report.ptx) for report in reports(name))
    logarithm = next(index for index, one in enumerate(training) if one.startswith("lg2"))
    assert [one.partition(".")[0] for one in training[logarithm : logarithm + 4]] == [
        "lg2",
        "lg2",
        "add",
        "add",
    ]
    assert training[:logarithm] + training[logarithm + 4 :] == decode
    width, group = (
        SIZES[name][0],
        2 * 64,
    )  # sums of a thread: 64 scores, and half a row's width of outputs, twice
    fused = [one for one in decode if one.startswith("fma")]
    assert (
        len(fused) == group + width + 4
    )  # weights, outputs and the two rows' totals: in the loop and in the last block


@pytest.mark.parametrize("name", NAMES)
def test_backward_kernels_compile_cleanly(name: str) -> None:
    """In a program that keeps nothing else of the forward than its result and one number of a row."""
    from pallas_kernels.attention import mosaic_backward

    width, heads, kv_heads, dtype = SIZES[name]
    q, kv = (jax.ShapeDtypeStruct((1, 4000, count, width), dtype) for count in (heads, kv_heads))
    blocks, sums = (
        jax.ShapeDtypeStruct((1, 32), jnp.int32),
        jax.ShapeDtypeStruct((1, heads, 4000), jnp.float32),
    )
    kernels = aot.compile_for_h100(
        lambda *arrays: mosaic_backward.causal_gradients(*arrays), q, kv, kv, blocks, q, sums, q
    )
    assert len(kernels) == 2
    for report in kernels:
        assert report.clean, report.text


@pytest.mark.newest
@pytest.mark.long
def test_kernels_compile_inside_remat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward once more in the backward, and its two kernels."""
    monkeypatch.setattr("pallas_kernels.implementations.gpu_problem", lambda: None)

    @jax.checkpoint
    def layer(x: jax.Array) -> jax.Array:
        return jnp.sin(causal_attention(jnp.cos(x), x, x, implementation="mosaic_gpu"))

    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    program = aot.program_for_h100(jax.value_and_grad(lambda x: layer(x).astype(jnp.float32).sum()), x)
    assert sum("custom-call(" in line and "mosaic_gpu" in line for line in program.splitlines()) == 4
