"""Every implementation of the quantisers on the inputs that the kernels take: one body each, bit for bit the
numpy oracle.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    SCALE_FORMATS,
    ScaledArray,
    nonfinite_blocks,
    quantize,
    quantize_dual,
    quantize_weight,
    requantize,
)
from pallas_kernels.quantize import choose
from pallas_kernels.scaled_array import BLOCK_SHAPES
from tests.kernels.runnable import runnable
from tests.oracles import fp8_oracle

ROW, SQUARE, COLUMN = (1, 128), (128, 128), (128, 1)
SHAPES = [(256, 256), (130, 128), (1, 256), (48, 384)]
implementations = pytest.mark.parametrize("implementation", runnable("xla", "mosaic_interpret", "mosaic_gpu"))


def trouble(shape: tuple[int, int], dtype: str = "bfloat16") -> jax.Array:
    """[R, C] of distinct values of all magnitudes, with outliers, zeros, ties and numbers at both ends of the
    range.
    """
    rng = np.random.default_rng(shape[0] * 1000 + shape[1])
    x = rng.normal(size=shape) * np.exp2(rng.integers(-8, 8, (shape[0], 1)))
    if shape[0] >= 16:
        x[1] = rng.normal(size=shape[1]) * 1e4
        x[2] = 0.0
        x[3] = 1e-30 * rng.normal(size=shape[1])
        x[4] = 1e30 * rng.normal(size=shape[1])
        x[5] = np.exp2(rng.integers(-20, 1, shape[1])) * 448
        x[6] = np.resize([448, 464, 368, -368, 336, -(2.0**-10), 3 * 2.0**-10, 447.9], shape[1])
        x[7] = np.resize([448, -432, 368, -400, 26, -(2.0**-10), 3 * 2.0**-10, 5 * 2.0**-10], shape[1])
        x[8] = -0.0
        x[9] = 1e-39
    if shape[0] >= 256:
        x[128:, :128] = 0.0
        x[128:, 128:] = 1e-30 * rng.normal(size=(shape[0] - 128, shape[1] - 128))
    return jnp.asarray(np.clip(x, -6e4, 6e4) if dtype == "float16" else x, jnp.dtype(dtype))


def canonical(codes: np.ndarray) -> np.ndarray:
    """Codes as bytes; the sign of a NaN is not defined."""
    codes = codes.view(np.uint8)
    return np.where(codes & 0x7F == 0x7F, 0x7F, codes)


def assert_same_bits(
    array: ScaledArray,
    x: jax.Array,
    block_shape: tuple[int, int],
    scale_format: str,
    transposed: bool = False,
) -> None:
    """Codes and scales are the oracle's, byte by byte, and the array is a valid ScaledArray."""
    codes, scales = fp8_oracle.quantize(np.asarray(x.astype(jnp.float32)), block_shape, scale_format)
    if transposed:
        codes, scales = codes.T, scales.T
    array.check()
    np.testing.assert_array_equal(np.asarray(array.scale), scales)
    np.testing.assert_array_equal(canonical(np.asarray(array.qvalue)), canonical(codes))


@implementations
@pytest.mark.parametrize("block_shape", BLOCK_SHAPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_matches_oracle_in_every_implementation(
    implementation: str, block_shape: tuple[int, int], shape: tuple[int, int]
) -> None:
    x = trouble(shape)
    array = quantize(x, block_shape, implementation=implementation)
    assert_same_bits(array, x, block_shape, "float32")
    assert int(nonfinite_blocks(array)) == 0


@implementations
@pytest.mark.parametrize("token_block_shape", [COLUMN, SQUARE])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_dual_matches_oracle(
    implementation: str, token_block_shape: tuple[int, int], shape: tuple[int, int]
) -> None:
    x = trouble(shape)
    straight, tokens = jax.jit(lambda x: quantize_dual(x, token_block_shape, implementation=implementation))(
        x
    )
    assert_same_bits(straight, x, ROW, "float32")
    assert_same_bits(tokens, x, token_block_shape, "float32")


@implementations
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_weight_matches_oracle_and_its_transpose(
    implementation: str, shape: tuple[int, int]
) -> None:
    w = trouble(shape)
    weight, transposed = quantize_weight(w, implementation=implementation)
    assert_same_bits(weight, w, SQUARE, "float32")
    assert_same_bits(transposed, w, SQUARE, "float32", transposed=True)


@implementations
@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize("shape", [*SHAPES, (389, 512)])
def test_requantize_matches_oracle_on_what_the_codes_stand_for(
    implementation: str, shape: tuple[int, int], scale_format: str
) -> None:
    saved = quantize(trouble(shape), ROW, scale_format=scale_format)
    again = jax.jit(
        lambda array: requantize(array, scale_format=scale_format, implementation=implementation)
    )(saved)
    values = np.asarray(saved.qvalue).astype(np.float32) * np.repeat(np.asarray(saved.scale), 128, axis=1)
    assert_same_bits(again, jnp.asarray(values), COLUMN, scale_format)


@implementations
def test_requantize_keeps_what_is_not_finite(implementation: str) -> None:
    x = np.random.default_rng(6).normal(size=(200, 256)).astype(np.float32)
    x[150, 200] = np.nan
    x[20, 150] = np.inf
    x[199, 3] = -np.inf
    saved = quantize(jnp.asarray(x, jnp.bfloat16), ROW)
    again = requantize(saved, implementation=implementation)
    # a token's whole block: 0 times its scale is NaN
    spoiled = np.isnan(np.asarray(saved.dequantize())).reshape(200, 2, 128)
    blocks = np.stack([spoiled[:128].any(0), spoiled[128:].any(0)]).reshape(2, 256)
    np.testing.assert_array_equal(~np.isfinite(np.asarray(again.scale)), blocks)
    assert blocks.sum() == 3 * 128


def test_requantize_takes_the_codes_of_rows_alone() -> None:
    with pytest.raises(
        ValueError,
        match=r"requantize: unknown block shape: got array.block_shape=\(128, 128\), expected one of",
    ):
        requantize(quantize(trouble((256, 256)), SQUARE))
    with pytest.raises(NotImplementedError, match=r"array.shape is \(16, 100\), expected a second dimension"):
        requantize(quantize(trouble((16, 100)), ROW), implementation="mosaic_interpret")


@implementations
@pytest.mark.parametrize(("dtype", "scale_format"), [("float16", "float32"), ("bfloat16", "power_of_two")])
def test_other_types_and_scale_formats_match_oracle(
    implementation: str, dtype: str, scale_format: str
) -> None:
    x = trouble((130, 256), dtype)
    for block_shape in (COLUMN, SQUARE):
        straight, tokens = quantize_dual(
            x, block_shape, scale_format=scale_format, implementation=implementation
        )
        assert_same_bits(straight, x, ROW, scale_format)
        assert_same_bits(tokens, x, block_shape, scale_format)


@implementations
@pytest.mark.parametrize("token_block_shape", [COLUMN, SQUARE])
def test_nonfinite_values_poison_their_blocks_alone(
    implementation: str, token_block_shape: tuple[int, int]
) -> None:
    x = np.random.default_rng(5).normal(size=(200, 256)).astype(np.float32)
    x[150, 200] = np.nan
    x[20, 150] = np.inf
    x[199, 3] = -np.inf
    short = jnp.asarray(x, jnp.bfloat16)
    for array, block_shape in zip(
        quantize_dual(short, token_block_shape, implementation=implementation),
        (ROW, token_block_shape),
        strict=True,
    ):
        assert_same_bits(array, short, block_shape, "float32")
        assert int(nonfinite_blocks(array)) == 3


@implementations
def test_every_bf16_value_matches_oracle(implementation: str) -> None:
    """65,280 finite values in blocks of 128, in random order and sorted by magnitude."""
    x = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    x = x[np.isfinite(x)]
    for values in (np.random.default_rng(0).permutation(x), x[np.argsort(np.abs(x), kind="stable")]):
        array = quantize(
            jnp.asarray(values.reshape(-1, 640), jnp.bfloat16), ROW, implementation=implementation
        )
        assert_same_bits(array, jnp.asarray(values.reshape(-1, 640)), ROW, "float32")


@pytest.mark.parametrize("implementation", runnable("mosaic_interpret"))
@pytest.mark.parametrize("broken", ["fence", "exchange"])
def test_interpreter_finds_what_is_missing(
    implementation: str, broken: str, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """The race check is on: TMA stores that start before the codes are written, a warpgroup that does not
    wait for the other's maxima.

    JAX 0.12 raises where it finds a race, 0.11 prints it.
    """
    from pallas_kernels.quantize import mosaic

    if broken == "fence":
        monkeypatch.setattr(mosaic.plgpu, "commit_smem", lambda: None)
    else:
        monkeypatch.setattr(mosaic, "wait_for_both", lambda barrier: None)
    try:
        quantize_weight(trouble((144, 128)), implementation=implementation)
        report = capfd.readouterr().out
    except jax.errors.JaxRuntimeError as error:
        report = str(error)
    assert "RACE DETECTED" in report


def test_choose_says_what_runs_and_why() -> None:
    assert choose(jnp.zeros((8, 128), jnp.bfloat16), "xla").reason == "asked for by name"
    choice = choose(jnp.zeros((8, 130), jnp.bfloat16))
    assert (
        choice.name == "xla"
        and "x.shape is (8, 130), expected a second dimension that is a multiple of 128" in choice.reason
    )
    assert (
        choose(jnp.zeros((8, 128))).name == "xla"
        and "x.dtype is float32" in choose(jnp.zeros((8, 128))).reason
    )


@pytest.mark.parametrize("implementation", ["mosaic_interpret", "mosaic_gpu"])
def test_kernels_raise_on_what_they_cannot_take(implementation: str) -> None:
    with pytest.raises(
        NotImplementedError,
        match=r"quantize: cannot run: got implementation='\w+', but x.shape is \(8, 100\)",
    ):
        quantize(jnp.zeros((8, 100), jnp.bfloat16), ROW, implementation=implementation)
    with pytest.raises(
        NotImplementedError, match=r"quantize_weight: .* but w.dtype is float32, expected bfloat16 or float16"
    ):
        quantize_weight(jnp.zeros((8, 128)), implementation=implementation)


def test_new_quantisers_raise_on_bad_arguments() -> None:
    with pytest.raises(
        ValueError,
        match=r"quantize_dual: unknown block shape: got token_block_shape=\(1, 128\), expected one of",
    ):
        quantize_dual(jnp.zeros((2, 128)), (1, 128))
    with pytest.raises(
        ValueError, match=r"quantize_weight: wrong shape: got w.shape=\(2,\).*; .*got implementation='cuda'"
    ):
        quantize_weight(jnp.zeros(2), implementation="cuda")
