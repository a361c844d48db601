"""The format of FP8 keys and values: bytes and values against float64 loops and torch's cast; scales; gradient."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetrl_jax.models import attention
from jetrl_jax.precision.kv_cache import (
    EXPONENTS,
    HISTORY,
    KVCalibration,
    KVUse,
    from_codes,
    scales_for,
    stored,
    to_codes,
)
from jetrl_jax.precision.parameters import jit
from tests.oracles import attention_oracle, fp8_oracle
from tests.oracles.tolerances import U_BF16
from tests.parity.small_policy import resolved

pytestmark = pytest.mark.as_the_product

RANGE = range(-12, 5)


def all_values(dtype: str) -> np.ndarray:
    """Every value of a 16-bit dtype, without NaN."""
    values = np.arange(1 << 16, dtype=np.uint16).view(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    )
    return values[~np.isnan(values.astype(np.float32))]


def nearest_codes(quotients: np.ndarray) -> np.ndarray:
    """The bytes of float64 values, from the table of the format: nearest, ties to the even code."""
    table, size = fp8_oracle.TABLE, np.minimum(np.abs(quotients), 448.0)
    upper = np.minimum(np.searchsorted(table, size), len(table) - 1)
    lower = np.maximum(upper - 1, 0)
    below, above = size - table[lower], table[upper] - size
    code = np.where((below < above) | ((below == above) & (lower % 2 == 0)), lower, upper)
    return (code | np.where(np.signbit(quotients), 0x80, 0)).astype(np.uint8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_codes_of_all_values_are_the_nearest_and_values_are_exact(dtype: str) -> None:
    """Every value of the dtype over the exponents; with infinities, which clip like other large values."""
    values = all_values(dtype)
    exponents = [e for e in RANGE if EXPONENTS[dtype][0] <= e <= EXPONENTS[dtype][1]]
    codes = jit(lambda x, s: (to_codes(x, s), stored(x, s)))
    for exponent in exponents:
        scale = 2.0**exponent
        got, back = codes(values, np.float32(scale))
        expected = nearest_codes(values.astype(np.float64) / scale)
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), expected)
        exact = fp8_oracle.decode(expected) * scale
        np.testing.assert_array_equal(np.asarray(back).astype(np.float64), exact)
        again = to_codes(back, np.float32(scale))  # a cache that is written with what attention read
        np.testing.assert_array_equal(np.asarray(again).view(np.uint8), expected)
        np.testing.assert_array_equal(np.asarray(from_codes(got, np.float32(scale), jnp.float32)), exact)


def test_loops_agree_with_the_table_search() -> None:
    """The oracle above against one value at a time, at and beside every code and every tie."""
    middles = (fp8_oracle.TABLE[1:] + fp8_oracle.TABLE[:-1]) / 2
    near = np.concatenate([fp8_oracle.TABLE, middles, np.nextafter(middles, 0), np.nextafter(middles, 500)])
    near = np.concatenate([near, -near])
    assert nearest_codes(near).tolist() == [fp8_oracle.encode_by_table(float(value)) for value in near]


def test_bytes_are_those_of_torchs_cast() -> None:
    torch = pytest.importorskip("torch", reason="torch's cast is the reference: pip install jetrl-jax[torch]")
    values = all_values("bfloat16")
    codes = jit(to_codes)
    x = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).float()
    for exponent in RANGE:
        for quotient in (x / 2.0**exponent, x * 2.0**-exponent):  # as CUDA's and as the CPU's kernels
            theirs = quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            ours = np.asarray(codes(values, np.float32(2.0**exponent))).view(np.uint8)
            np.testing.assert_array_equal(ours, theirs)


def scale_by_loop(largest: float, dtype: str) -> float:
    """2^e of the smallest e in range with 1.05 A <= 448 2^e."""
    least, most = EXPONENTS[dtype]
    bound = np.float64(np.float32(largest) * np.float32(1.05 / 448))
    return next((2.0**e for e in range(least, most) if bound <= 2.0**e), 2.0**most)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_are_the_smallest_powers_of_two_with_the_margin(dtype: str) -> None:
    powers = 448 / 1.05 * 2.0 ** np.arange(-40, 20)
    largest = np.concatenate([powers * f for f in (1 - 2.0**-20, 1, 1 + 2.0**-20, 1.5)]).astype(np.float32)
    got = np.asarray(jit(lambda a: scales_for(a, dtype))(largest))
    assert got.tolist() == [scale_by_loop(a, dtype) for a in largest]
    assert all(math.frexp(scale)[0] == 0.5 for scale in got)


def test_codes_and_values_keep_nan() -> None:
    assert np.isnan(np.asarray(stored(jnp.asarray([np.nan, 1], jnp.bfloat16), np.float32(0.5)))[0])


def test_history_holds_the_maximum_of_the_last_updates() -> None:
    """Scales change only when they are recalibrated, and an outlier counts for as many updates as stated."""
    calibration = KVCalibration.start(jnp.ones((1, 2), jnp.float32))
    for update in range(HISTORY + 1):
        calibration = calibration.after(
            jnp.asarray([[400.0, 3.0] if update == 0 else [1.0, 3.0]], jnp.float32)
        )
        assert np.asarray(calibration.scales).tolist() == [[1.0, 1.0]]
        scales = np.asarray(calibration.recalibrated("bfloat16").scales)
        expected = scale_by_loop(400.0 if update < HISTORY else 1.0, "bfloat16")
        assert scales.tolist() == [[expected, scale_by_loop(3.0, "bfloat16")]]


def test_use_counts_tokens_that_are_no_padding() -> None:
    keys = np.zeros((2, 3, 2, 4), np.float32)
    keys[0, 0, 1, 2], keys[0, 1, 0, 0], keys[1, 2, 1, 3] = -900.0, 448.5, 9e9
    values, counted = np.ones_like(keys), np.array([[True, True, False], [True, False, False]])
    scales = {"k": np.float32(1), "v": np.float32(2.0**-9)}
    use = KVUse.total([KVUse.of({"k": keys, "v": values, "q": keys}, scales)] * 2, jnp.asarray(counted))
    assert np.asarray(use.largest).tolist() == [[900.0, 1.0]] * 2
    assert (
        np.asarray(use.clipped).tolist() == [[2.0, 24.0]] * 2
        and np.asarray(use.count).tolist() == [[24.0] * 2] * 2
    )


def test_gradient_is_attentions_at_the_rounded_keys_and_values_also_where_they_are_clipped() -> None:
    """Against the float64 oracle, elementwise, within the BF16 roundings of results and cotangents."""
    rng, numerics = np.random.default_rng(0), resolved(kv_cache="fp8")
    q, k, v = (rng.normal(size=(1, 7, heads, 16)).astype(ml_dtypes.bfloat16) for heads in (4, 2, 2))
    cotangent = rng.normal(size=(1, 7, 64)).astype(np.float32)
    scale = np.float32(2.0**-8)  # clips values beyond 1.75

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = attention.attend(q, stored(k, scale), stored(v, scale), None, numerics)
        return jnp.sum(out.astype(jnp.float32) * cotangent)

    grads = jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    rounded = [np.asarray(stored(jnp.asarray(x), scale)).astype(np.float64) for x in (k, v)]
    assert all((np.abs(x.astype(np.float32)) > 448 * scale).any() for x in (k, v)), "nothing is clipped"
    visible = np.tril(np.ones((7, 7), bool))[None]
    oracle = attention_oracle.attention(q, *rounded, visible, cotangent.reshape(1, 7, 4, 16))
    plain = attention_oracle.attention(q, k, v, visible, cotangent.reshape(1, 7, 4, 16))
    for got, expected, size, other in zip(
        grads, oracle.values[1:], oracle.magnitudes[1:], plain.values[1:], strict=True
    ):
        bound = 4 * U_BF16 * size
        assert (np.abs(np.asarray(got).astype(np.float64) - expected) <= bound).all()
        assert (np.abs(other - expected) > bound).any(), (
            "the gradient at the values before rounding is another"
        )
