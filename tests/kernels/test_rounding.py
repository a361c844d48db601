"""The kernels' arithmetic against numpy's IEEE division: all significands, all BF16 values, near ties, wrong
reciprocals.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import SCALE_FORMATS
from pallas_kernels.formats import compute_scale
from pallas_kernels.quantize.rounding import (
    Divisor,
    divide_by_448,
    encode,
    magnitude_bits,
    magnitude_of_bits,
    scale_of,
)
from tests.oracles import fp8_oracle

# relative errors of the reciprocal: 2 units in the last place, and the limit
WRONG = [0.0, 2.0**-22, -(2.0**-22), 2.0**-9, -(2.0**-9)]
MIDPOINTS = (fp8_oracle.TABLE[1:] + fp8_oracle.TABLE[:-1]) / 2
TIES = np.concatenate([MIDPOINTS, -MIDPOINTS, fp8_oracle.TABLE])


def as_float(bits: np.ndarray) -> np.ndarray:
    """float32 of integer bits."""
    return bits.astype(np.uint32).view(np.float32)


def reciprocal_of(scale: np.ndarray, wrong: float) -> np.ndarray:
    """1 / scale with a relative error."""
    return (1 / scale.astype(np.float64) * (1 + wrong)).astype(np.float32)


def codes_that_differ(x: np.ndarray, scale: np.ndarray, wrong: float, jit: bool = True) -> int:
    """Number of codes of `x` that are not numpy's cast(clip(x / scale)),
    given an approximation of 1 / scale.
    """

    def run(x: jax.Array, scale: jax.Array, reciprocal: jax.Array) -> jax.Array:
        return encode(x, Divisor.of(scale, reciprocal))

    with jax.disable_jit(not jit):
        codes = (jax.jit(run) if jit else run)(*map(jnp.asarray, (x, scale, reciprocal_of(scale, wrong))))
    expected = fp8_oracle.encode_by_cast(np.clip(x / scale, -448, 448))
    return int(np.count_nonzero(np.asarray(codes).view(np.uint8) != expected))


@pytest.mark.parametrize("exponent", [127, 128, 127 - 33, 254])
def test_division_by_448_is_correctly_rounded_for_every_significand(exponent: int) -> None:
    """Two binades of the quotient's grid; 254 is the last exponent, where 512 times the quotient would
    overflow.
    """
    a = as_float((exponent << 23) + np.arange(1 << 23))
    np.testing.assert_array_equal(np.asarray(jax.jit(divide_by_448)(a)), a / np.float32(448))
    with jax.disable_jit():  # operation by operation: nothing is contracted
        np.testing.assert_array_equal(
            np.asarray(divide_by_448(jnp.asarray(a[::64]))), a[::64] / np.float32(448)
        )


@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
def test_scale_of_matches_compute_scale_and_oracle(scale_format: str) -> None:
    rng = np.random.default_rng(0)
    amax = np.concatenate(
        [
            as_float(rng.integers(0, 0x7F800000, 4000)),
            np.float32(
                [
                    0,
                    1e-45,
                    1e-38,
                    1e-30,
                    9.9e-11,
                    1e-10,
                    1.1e-10,
                    448e-10,
                    448,
                    449,
                    1e30,
                    3.4e38,
                    np.inf,
                    np.nan,
                ]
            ),
            np.float32(448) * np.exp2(np.arange(-30, 100, dtype=np.float32)),
        ]
    ).astype(np.float32)
    scale = np.asarray(jax.jit(scale_of, static_argnums=1)(amax, scale_format))
    np.testing.assert_array_equal(scale, np.asarray(compute_scale(jnp.asarray(amax), scale_format)))
    np.testing.assert_array_equal(scale, np.array([fp8_oracle.scale_of(a, scale_format) for a in amax]))


@pytest.mark.parametrize("wrong", WRONG)
def test_codes_of_every_bf16_value_under_every_bf16_amax_match_numpy(wrong: float) -> None:
    """Scaling both by a power of two changes nothing, so one binade of amax and all values down to code 0 are
    all there is.
    """
    amax = as_float((127 << 23) + (np.arange(128) << 16))
    x = as_float((127 << 23) + ((np.arange(128 * 24) - 128 * 23) << 16))
    grid_x, grid_amax = (array.reshape(-1) for array in np.meshgrid(np.concatenate([x, -x]), amax))
    inside = np.abs(grid_x) <= grid_amax
    grid_x, grid_amax = grid_x[inside], grid_amax[inside]
    assert codes_that_differ(grid_x, grid_amax / np.float32(448), wrong) == 0
    assert (
        codes_that_differ(grid_x, np.exp2(np.ceil(np.log2(grid_amax / 448))).astype(np.float32), wrong) == 0
    )


def near_ties(shift: int, count: int = 1 << 18) -> tuple[np.ndarray, np.ndarray]:
    """(x, scale) float32: x is `shift` units in the last place from a code or midpoint times the scale."""
    rng = np.random.default_rng(shift + 10)
    amax = (rng.uniform(1, 2, count) * np.exp2(rng.integers(-30, 30, count))).astype(np.float32)
    scale = amax / np.float32(448)
    x = (rng.choice(TIES, count) * scale.astype(np.float64)).astype(np.float32)
    x = np.where(x == 0, x, (x.view(np.int32) + shift).view(np.float32))
    return np.clip(x, -amax, amax), scale


@pytest.mark.parametrize("wrong", WRONG)
def test_codes_near_ties_match_numpy(wrong: float) -> None:
    for shift in range(-3, 4):
        assert codes_that_differ(*near_ties(shift), wrong) == 0


def test_codes_without_contraction_match_numpy() -> None:
    for shift in (-1, 0, 1):
        assert codes_that_differ(*near_ties(shift), 2.0**-22, jit=False) == 0


def test_codes_of_values_of_all_magnitudes_match_numpy() -> None:
    rng = np.random.default_rng(1)
    amax = rng.uniform(1, 2, 1 << 20).astype(np.float32)
    x = np.clip(rng.normal(size=1 << 20) * np.exp2(rng.integers(-30, 1, 1 << 20)), -amax, amax).astype(
        np.float32
    )
    x[:4] = [0.0, -0.0, 1e-30, -1e-30]
    assert codes_that_differ(x, amax / np.float32(448), 0.0) == 0


def test_a_reciprocal_beyond_the_limit_is_found() -> None:
    """What the tests above count is not always zero: 2**-6 is four times the error that the formula bears."""
    rng = np.random.default_rng(2)
    amax = rng.uniform(1, 2, 1 << 16).astype(np.float32)
    assert (
        codes_that_differ(
            (rng.uniform(-1, 1, 1 << 16) * amax).astype(np.float32), amax / np.float32(448), 2.0**-6
        )
        > 0
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_magnitude_bits_order_like_magnitudes_and_keep_nan(dtype: type) -> None:
    x = np.array([[-3.0, 2.0, -0.0, 1e-6], [1.0, -np.inf, 2.0, 0.0], [np.inf, 1.0, np.nan, -5.0]]).astype(
        dtype
    )
    largest = magnitude_of_bits(jnp.max(magnitude_bits(jnp.asarray(x)), axis=1), jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(largest), np.float32([3.0, np.inf, np.nan]))
