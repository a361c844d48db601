"""The quantiser against the numpy oracle, bit for bit: layouts, edges, formats, types, programs; poisoning
and errors.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import SCALE_FORMATS, ScaledArray, nonfinite_blocks, quantize
from pallas_kernels.scaled_array import BLOCK_SHAPES
from tests.oracles import fp8_oracle, tolerances

SHAPES = [(256, 384), (1, 128), (3, 130), (129, 257), (1, 1)]


def hard_matrix(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """float32 [R, C] of distinct values with every kind of trouble where the shape has room for it."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-8, 8, (shape[0], 1)))
    if shape[0] >= 16:
        x[1] = rng.normal(size=shape[1]) * 1e4  # a row of outliers
        x[2] = 0.0
        x[3] = 1e-30 * rng.normal(size=shape[1])
        x[4] = 1e30 * rng.normal(size=shape[1])
        x[5] = np.exp2(rng.integers(-20, 1, shape[1])) * 448  # the subnormal codes and their ties
        # scale 464 / 448 or 1
        x[6] = np.resize([448, 464, 368, -368, 336, -(2.0**-10), 3 * 2.0**-10, 447.9], shape[1])
        # scale 1: ties
        x[7] = np.resize([448, -432, 368, -400, 26, -(2.0**-10), 3 * 2.0**-10, 5 * 2.0**-10], shape[1])
        x[8] = -0.0
    if shape[0] >= 256 and shape[1] >= 256:
        x[128:, :128] = 0.0  # an all-zero (128, 128) block, a tiny one and a huge one
        x[128:, 128:256] = 1e-30 * rng.normal(size=x[128:, 128:256].shape)
        x[128:, 256:] *= 1e30
    return x.astype(np.float32)


def assert_same_bits(array: ScaledArray, codes: np.ndarray, scales: np.ndarray) -> None:
    """Codes byte by byte, scales number by number."""
    np.testing.assert_array_equal(np.asarray(array.scale), scales)
    np.testing.assert_array_equal(np.asarray(array.qvalue).view(np.uint8), codes)


@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize("block_shape", BLOCK_SHAPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_matches_oracle(
    scale_format: str, block_shape: tuple[int, int], shape: tuple[int, int]
) -> None:
    x = hard_matrix(shape)
    run = functools.partial(quantize, block_shape=block_shape, scale_format=scale_format)
    codes, scales = fp8_oracle.quantize(x, block_shape, scale_format)
    array = run(jnp.asarray(x)).check()
    assert_same_bits(array, codes, scales)
    assert array.shape == shape and int(nonfinite_blocks(array)) == 0
    if shape == SHAPES[0]:
        assert_same_bits(jax.jit(run)(jnp.asarray(x)), codes, scales)


def test_quantize_without_any_jit_matches_oracle() -> None:
    x = hard_matrix((130, 200))
    codes, scales = fp8_oracle.quantize(x, (1, 128))
    with jax.disable_jit():
        assert_same_bits(quantize(jnp.asarray(x), (1, 128)), codes, scales)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("block_shape", BLOCK_SHAPES)
def test_quantize_of_short_floats_matches_oracle(dtype: jnp.dtype, block_shape: tuple[int, int]) -> None:
    x = np.clip(hard_matrix((130, 300)), -6e4, 6e4)
    short = jnp.asarray(x).astype(dtype)
    codes, scales = fp8_oracle.quantize(np.asarray(short.astype(jnp.float32)), block_shape)
    assert_same_bits(jax.jit(quantize, static_argnums=1)(short, block_shape), codes, scales)


def test_quantize_of_every_bf16_magnitude_matches_oracle() -> None:
    x = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    x = np.random.default_rng(0).permutation(x[np.isfinite(x)])[:65024].reshape(-1, 256)
    x = np.where(np.abs(x) > 3e38, np.float32(1), x)
    codes, scales = fp8_oracle.quantize(x, (1, 128))
    assert_same_bits(quantize(jnp.asarray(x, jnp.bfloat16), (1, 128)), codes, scales)


@pytest.mark.parametrize("block_shape", BLOCK_SHAPES)
def test_quantize_of_a_million_near_ties_matches_oracle(block_shape: tuple[int, int]) -> None:
    """Values whose quotient by the block's scale is a midpoint of two codes, to the last bit of FP32."""
    rng = np.random.default_rng(1)
    rows, columns = block_shape
    amax = rng.uniform(1, 2, (1024 // rows, 1, 1024 // columns, 1)).astype(np.float32)
    midpoints = (fp8_oracle.TABLE[1:] + fp8_oracle.TABLE[:-1]) / 2
    scale = (amax / np.float32(448)).astype(np.float64)
    signed = rng.choice(
        np.concatenate([midpoints, -midpoints]), (1024 // rows, rows, 1024 // columns, columns)
    )
    x = (signed * scale).astype(np.float32)
    x[:, :1, :, :1] = amax
    x = x.reshape(1024, 1024)
    assert_same_bits(quantize(jnp.asarray(x), block_shape), *fp8_oracle.quantize(x, block_shape))


def producer(x: jax.Array) -> jax.Array:
    """What stands before a quantiser in a model: FP32 arithmetic with roundings to BF16 in between."""
    gate = (x * 1.1).astype(jnp.bfloat16)
    return (jax.nn.silu(gate.astype(jnp.float32)).astype(jnp.bfloat16)) * (x * 0.3).astype(jnp.bfloat16)


@pytest.mark.parametrize("block_shape", BLOCK_SHAPES)
def test_quantize_inside_a_fusion_sees_the_rounded_bf16_values(block_shape: tuple[int, int]) -> None:
    """XLA drops BF16 roundings inside a fusion; the fused program must still quantise the values that it
    hands out.
    """
    x = jnp.asarray(np.random.default_rng(2).normal(size=(256, 384)), jnp.float32)

    @jax.jit
    def fused(x: jax.Array) -> tuple[ScaledArray, ScaledArray, jax.Array]:
        y = producer(x)
        bits = jax.lax.bitcast_convert_type(y, jnp.uint16)
        consumer = quantize(y, block_shape).dequantize().sum()
        return (
            quantize(y, block_shape),
            quantize(y, block_shape, scale_format="power_of_two"),
            (bits, consumer),
        )

    first, second, (bits, _) = fused(x)
    values = (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
    assert_same_bits(first, *fp8_oracle.quantize(values, block_shape))
    assert_same_bits(second, *fp8_oracle.quantize(values, block_shape, "power_of_two"))


def test_quantize_under_vmap_scan_and_remat_gives_the_same_bits() -> None:
    x = jnp.asarray(hard_matrix((256, 384)))
    pieces = x.reshape(2, 128, 384)
    for block_shape in BLOCK_SHAPES:
        codes, scales = fp8_oracle.quantize(np.asarray(x), block_shape)

        def run(piece: jax.Array, block_shape: tuple[int, int] = block_shape) -> ScaledArray:
            return quantize(piece, block_shape)

        for batched in (
            jax.vmap(run)(pieces),
            jax.jit(jax.vmap(jax.jit(run)))(pieces),
            jax.lax.scan(lambda carry, piece, run=run: (carry, run(piece)), 0, pieces)[1],
            jax.jit(jax.vmap(jax.checkpoint(run)))(pieces),
        ):
            joined = ScaledArray(
                batched.qvalue.reshape(256, 384), batched.scale.reshape(scales.shape), block_shape
            )
            assert_same_bits(joined, codes, scales)


@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize("block_shape", BLOCK_SHAPES)
def test_quantize_error_is_within_the_derived_bound(block_shape: tuple[int, int], scale_format: str) -> None:
    x = hard_matrix((256, 384), seed=3)
    array = quantize(jnp.asarray(x), block_shape, scale_format=scale_format)
    scales = np.asarray(array.scale)
    values = fp8_oracle.dequantize(np.asarray(array.qvalue).view(np.uint8), scales, block_shape)
    scale = np.repeat(np.repeat(scales, block_shape[0], 0), block_shape[1], 1)[:256, :384]
    assert np.all(np.abs(values - x) <= tolerances.quantized(x, scale))


def test_zero_block_has_zero_codes_and_a_positive_scale() -> None:
    for scale_format in SCALE_FORMATS:
        array = quantize(jnp.zeros((3, 200), jnp.bfloat16), (1, 128), scale_format=scale_format)
        assert np.all(np.asarray(array.scale) > 0) and np.all(np.isfinite(np.asarray(array.scale)))
        assert not np.asarray(array.qvalue).view(np.uint8).any()
        assert not np.asarray(array.dequantize()).any()


def test_quantize_matches_oracle_where_a_reciprocal_would_not() -> None:
    """amax 448 c and a value 368 c: the quotient is the tie 368, which goes to 384; a rounded reciprocal
    gives 352 for some c.
    """
    c = np.random.default_rng(4).integers(2**17, 2**18, 512).astype(np.float32)  # 448 c and 368 c exact
    x = np.zeros((512, 128), np.float32)
    x[:, 0] = 448 * c
    x[:, 1] = 368 * c
    array = jax.jit(quantize, static_argnums=1)(x, (1, 128))
    np.testing.assert_array_equal(np.asarray(array.scale)[:, 0], c)
    np.testing.assert_array_equal(
        np.asarray(array.qvalue.astype(jnp.float32))[:, :2], np.broadcast_to([448.0, 384.0], (512, 2))
    )


@pytest.mark.parametrize(
    ("dtype", "scale_format"), [("float32", "float32"), ("bfloat16", "float32"), ("float16", "power_of_two")]
)
@pytest.mark.parametrize("block_shape", BLOCK_SHAPES)
def test_nonfinite_value_poisons_its_block_alone(
    block_shape: tuple[int, int], dtype: str, scale_format: str
) -> None:
    """One block with a NaN, one with an infinity, one with minus infinity: their scales say so, all else
    stays as it was.
    """
    places = {(150, 290): np.nan, (20, 150): np.inf, (199, 3): -np.inf}
    clean = np.random.default_rng(5).normal(size=(200, 300)).astype(jnp.dtype(dtype))
    bad = clean.copy()
    for place, value in places.items():
        bad[place] = value
    run = jax.jit(functools.partial(quantize, block_shape=block_shape, scale_format=scale_format))
    array, untouched = run(bad), run(clean)
    assert nonfinite_blocks(array).dtype == jnp.int32 and int(nonfinite_blocks(array)) == len(places)
    finite = np.isfinite(np.asarray(array.scale))
    values, expected = np.array(array.dequantize()), np.array(untouched.dequantize())
    for place in places:
        block = tuple(i // edge for i, edge in zip(place, block_shape, strict=True))
        region = tuple(slice(i * edge, (i + 1) * edge) for i, edge in zip(block, block_shape, strict=True))
        assert not finite[block] and not np.isfinite(values[region]).any()
        values[region] = expected[region] = 0
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"x": jnp.zeros((2, 3, 4))},
            r"quantize: wrong shape: got x.shape=\(2, 3, 4\), expected two non-zero dimensions",
        ),
        ({"x": jnp.zeros((0, 4))}, r"got x.shape=\(0, 4\)"),
        ({"x": jnp.zeros((2, 4), jnp.int32)}, r"got x.dtype=int32, expected float32, bfloat16 or float16"),
        (
            {"block_shape": (64, 128)},
            r"got block_shape=\(64, 128\), expected one of \(\(1, 128\), \(128, 128\), \(128, 1\)\)",
        ),
        ({"scale_format": "e8m0"}, r"got scale_format='e8m0', expected one of \('float32', 'power_of_two'\)"),
        ({"implementation": "cuda"}, r"got implementation='cuda', expected one of"),
    ],
)
def test_quantize_raises_on_bad_arguments(arguments: dict, message: str) -> None:
    good = {
        "x": jnp.zeros((2, 4)),
        "block_shape": (1, 128),
        "scale_format": "float32",
        "implementation": "xla",
    }
    with pytest.raises(ValueError, match=message):
        quantize(**(good | arguments))
