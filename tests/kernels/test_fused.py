"""The fused producers, one body for every implementation, against numpy and against the model's operations in
turn.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetrl_jax.models import ops
from jetrl_jax.precision.numerics import Numerics
from pallas_kernels import (
    ScaledArray,
    nonfinite_blocks,
    quantize,
    rms_norm_quantize,
    silu_gradients_quantize,
    silu_multiply_quantize,
)
from tests.kernels.runnable import runnable
from tests.oracles import fp8_oracle

EPS = 1e-6
ROW, SQUARE, COLUMN = (1, 128), (128, 128), (128, 1)
implementations = pytest.mark.parametrize("implementation", runnable("xla", "mosaic_interpret", "mosaic_gpu"))


def bf16(x: np.ndarray) -> np.ndarray:
    """float64 rounded to FP32 and then to BF16, as float32."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def matrix(rows: int, columns: int, seed: int) -> np.ndarray:
    """BF16 values as float32 [R, C]: rows of many magnitudes, a zero row, outliers, 1e-30 and 1e18."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)) * np.exp2(rng.integers(-4, 4, (rows, 1)))
    if rows > 8:
        x[2] = 0.0
        x[3] *= 1e-30
        x[4] *= 1e18
        x[5, ::37] *= 1e4
    return bf16(x)


def assert_oracle(array: ScaledArray, values: np.ndarray, block_shape: tuple[int, int]) -> None:
    """The array is the oracle's quantisation of `values`, bit for bit;
    the sign of a NaN code is not defined.
    """
    codes, scales = fp8_oracle.quantize(values, block_shape)
    array.check()
    np.testing.assert_array_equal(np.asarray(array.scale), scales)
    ours = np.asarray(array.qvalue).view(np.uint8)
    np.testing.assert_array_equal(*(np.where(c & 0x7F == 0x7F, 0x7F, c) for c in (ours, codes)))


def oracle_silu_multiply(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SiLU in float64, rounded, times up, rounded."""
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return bf16(bf16(wide / (1 + np.exp(-wide))).astype(np.float64) * up)


def oracle_rms_norm(
    x: np.ndarray, weight: np.ndarray, residual: np.ndarray | None, variant: str
) -> tuple[np.ndarray, np.ndarray]:
    """(RMSNorm, new residual) with exact sums of squares."""
    h = x if residual is None else x + residual
    total = bf16(h)
    h = total if variant == "cuda" else h
    wide = h.astype(np.float64)
    means = np.array([math.fsum(row * row) / row.size for row in wide])
    normed = (wide / np.sqrt(means + EPS)[:, None]).astype(np.float32)
    if variant == "native":
        normed = bf16(normed)
    return bf16(normed * bf16(weight)), total


@implementations
@pytest.mark.parametrize(
    ("shape", "token_block_shape"),
    [((130, 256), None), ((130, 256), COLUMN), ((48, 128), SQUARE), ((1, 384), None)],
)
def test_silu_multiply_quantize_matches_oracle(
    implementation: str, shape: tuple[int, int], token_block_shape: tuple[int, int] | None
) -> None:
    gate, up = matrix(*shape, 0), matrix(*shape, 1)
    if shape[0] > 8:
        gate[:8, :4] = [-(2.0**-8), 2.0**-7, 5.9375, -3.046875]  # the gates that lie near a midpoint
    rows, second = silu_multiply_quantize(
        jnp.asarray(gate, jnp.bfloat16),
        jnp.asarray(up, jnp.bfloat16),
        token_block_shape=token_block_shape,
        implementation=implementation,
    )
    values = oracle_silu_multiply(gate, up)
    assert_oracle(rows, values, ROW)
    if token_block_shape is None:
        assert second is None
    else:
        assert_oracle(second, values, token_block_shape)


@implementations
def test_silu_multiply_quantize_flags_nonfinite_values(implementation: str) -> None:
    gate, up = matrix(40, 256, 2), matrix(40, 256, 3)
    gate[7, 200] = np.nan
    up[20, 3] = np.inf
    gate[30, 130] = -np.inf
    rows, _ = silu_multiply_quantize(
        jnp.asarray(gate, jnp.bfloat16), jnp.asarray(up, jnp.bfloat16), implementation=implementation
    )
    assert_oracle(rows, oracle_silu_multiply(gate, up), ROW)
    assert int(nonfinite_blocks(rows)) == 3


def oracle_silu_gradients(
    gate: np.ndarray, up: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ds, slope, dup): bf16(dy up), SiLU'(gate) in float64, and dy times the rounded SiLU, not rounded."""
    wide = gate.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-wide))
    return bf16(dy * up), sigmoid * (1 + wide * (1 - sigmoid)), dy.astype(np.float64) * bf16(wide * sigmoid)


@implementations
@pytest.mark.parametrize(
    "shape", [(130, 128), pytest.param((40, 256), marks=[pytest.mark.long, pytest.mark.newest])]
)
def test_silu_gradients_are_those_of_float64_quantised_both_ways(
    implementation: str, shape: tuple[int, int]
) -> None:
    """Both arrays of a gradient hold one BF16 value, which a rounding of SiLU or of its slope may move."""
    gate, up, dy = (np.random.default_rng(seed).normal(size=shape).astype(np.float32) for seed in range(3))
    gate[1] *= 20
    dy[2], dy[3], up[4] = 0.0, dy[3] * 1e-30, up[4] * 1e9
    gate, up, dy = bf16(gate), bf16(up), bf16(dy)
    found = silu_gradients_quantize(
        *(jnp.asarray(x, jnp.bfloat16) for x in (gate, up, dy)), implementation=implementation
    )
    ds, slope, dup = oracle_silu_gradients(gate, up, dy)
    # SiLU' has a root: near it the error is that of its two terms, each at most 1
    bounds = (
        2.0**-8 * np.abs(ds * slope) + 2.0**-21 * np.abs(ds),
        2.0**-7 * np.abs(dup) + 2.0**-21 * np.abs(dy),
    )
    for (rows, tokens), expected, bound in zip(found, (ds * slope, dup), bounds, strict=True):
        for array, block in ((rows, ROW), (tokens, COLUMN)):
            array.check()
            assert array.block_shape == block
            blocks = np.repeat(np.repeat(np.asarray(array.scale), block[0], 0), block[1], 1)
            scale = blocks[: shape[0], : shape[1]].astype(np.float64)
            codes = np.asarray(array.qvalue).astype(np.float64)
            rounding = np.maximum(2.0**-4 * np.abs(codes), 2.0**-10) * scale
            assert np.all(np.abs(codes * scale - expected) <= bound + rounding * (1 + 2.0**-7)), block
            assert np.any(codes != 0)


@implementations
@pytest.mark.parametrize(
    ("shape", "variant", "has_residual"),
    [
        ((19, 1024), "native", True),
        ((19, 1024), "cuda", True),
        ((9, 2048), "native", False),
        ((5, 4096), "cuda", False),
        ((2, 8192), "native", True),
        ((19, 896), "native", True),
        ((9, 1536), "cuda", True),
        ((5, 2560), "native", True),
        ((5, 3072), "cuda", False),
        ((7, 3584), "cuda", True),
        ((4, 5120), "native", False),
    ],
)
def test_rms_norm_quantize_matches_oracle(
    implementation: str, shape: tuple[int, int], variant: str, has_residual: bool
) -> None:
    x, residual = matrix(*shape, 4), matrix(*shape, 5) if has_residual else None
    weight = (1 + np.random.default_rng(6).normal(size=shape[1])).astype(np.float32)
    arguments = [None if a is None else jnp.asarray(a, jnp.bfloat16) for a in (x, residual)]
    quantized, total = rms_norm_quantize(
        arguments[0],
        jnp.asarray(weight),
        arguments[1],
        eps=EPS,
        engine_variant=variant,
        implementation=implementation,
    )
    values, expected_total = oracle_rms_norm(x, weight, residual, variant)
    np.testing.assert_array_equal(np.asarray(total.astype(jnp.float32)), expected_total)
    assert_oracle(quantized, values, ROW)


@implementations
def test_rms_norm_quantize_of_a_nonfinite_token_poisons_it_alone(implementation: str) -> None:
    x = matrix(9, 1024, 7)
    x[1, 5] = np.nan
    x[6, 1000] = np.inf
    weight = jnp.ones(1024, jnp.bfloat16)
    quantized, _ = rms_norm_quantize(
        jnp.asarray(x, jnp.bfloat16), weight, eps=EPS, implementation=implementation
    )
    finite = np.isfinite(np.asarray(quantized.scale))
    assert not finite[1].any() and not finite[6, 7] and finite[[0, 2, 3, 4, 5, 7, 8]].all()


@pytest.mark.parametrize("variant", ["native", "cuda"])
def test_fused_definitions_match_the_models_operations_in_turn(variant: str) -> None:
    numerics = Numerics(engine_variant=variant)
    x, residual, gate, up = (jnp.asarray(matrix(33, 384, seed), jnp.bfloat16) for seed in range(8, 12))
    weight = jnp.asarray(np.random.default_rng(12).normal(size=384), jnp.float32)

    def in_turn() -> list[ScaledArray]:
        normed, total = ops.add_rms_norm(x, residual, weight, EPS, numerics)
        return [
            quantize(normed, ROW),
            quantize(ops.rms_norm(x, weight, EPS, numerics), ROW),
            quantize(ops.silu_multiply(gate, up, numerics), ROW),
        ], total

    def fused() -> list[ScaledArray]:
        normed, total = rms_norm_quantize(x, weight, residual, eps=EPS, engine_variant=variant)
        alone, _ = rms_norm_quantize(x, weight, eps=EPS, engine_variant=variant)
        return [normed, alone, silu_multiply_quantize(gate, up)[0]], total

    expected, expected_total = jax.jit(in_turn)()
    arrays, total = jax.jit(fused)()
    np.testing.assert_array_equal(
        np.asarray(total.astype(jnp.float32)), np.asarray(expected_total.astype(jnp.float32))
    )
    for ours, theirs in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours.scale), np.asarray(theirs.scale))
        np.testing.assert_array_equal(
            np.asarray(ours.qvalue).view(np.uint8), np.asarray(theirs.qvalue).view(np.uint8)
        )


def test_fused_operations_raise_on_bad_arguments() -> None:
    x = jnp.zeros((4, 256), jnp.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"silu_multiply_quantize: wrong shape: got .*; wrong dtype: got up.dtype=float32, "
        r"expected bfloat16",
    ):
        silu_multiply_quantize(x, jnp.zeros((4, 128)))
    with pytest.raises(ValueError, match=r"unknown block shape: got token_block_shape=\(1, 128\)"):
        silu_multiply_quantize(x, x, token_block_shape=ROW)
    with pytest.raises(
        ValueError,
        match=r"rms_norm_quantize: wrong weight: got weight float32\[128\].*; unknown variant: .*'CUDA'",
    ):
        rms_norm_quantize(x, jnp.zeros(128), eps=EPS, engine_variant="CUDA")
    with pytest.raises(
        NotImplementedError,
        match=r"rms_norm_quantize: cannot run: .* x.shape is \(4, 256\), expected a width of \(896,",
    ):
        rms_norm_quantize(x, jnp.zeros(256), eps=EPS, implementation="mosaic_interpret")
    with pytest.raises(
        NotImplementedError,
        match=r"gate.shape is \(4, 100\), expected a second dimension that is a multiple of 128",
    ):
        silu_multiply_quantize(x[:, :100], x[:, :100], implementation="mosaic_gpu")
