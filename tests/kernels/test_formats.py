"""The numbers and roundings of the format, bit for bit: division, scales and codes against numpy, in every
kind of program.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats
from tests.oracles import fp8_oracle

ROOT = Path(__file__).resolve().parents[2]


def random_floats(seed: int, count: int, low: float = -60, high: float = 60) -> np.ndarray:
    """float32 of random sign and significand with exponents between 2**low and 2**high."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(1, 2, count) * 2.0 ** rng.integers(low, high, count) * rng.choice([-1, 1], count)
    return values.astype(np.float32)


def hard_quotients() -> tuple[np.ndarray, np.ndarray]:
    """Dividends and divisors whose quotient lies as close to a midpoint of two FP32 numbers as any can.

    With 24-bit significands X and S and an odd 25-bit M, the midpoint is M / 2**24 (where X >= S) or M /
    2**25 (where not), and X * 2**shift - M * S = +-1 is the nearest miss: X = +-(2**shift)**-1 modulo S.
    """
    rng = np.random.default_rng(5)
    dividends, divisors = [], []
    while len(dividends) < 2000:
        divisor = int(rng.integers(2**22, 2**23)) * 2 + 1
        miss = int(rng.choice([-1, 1]))
        for shift, multiple in ((24, 1), (25, 0)):
            dividend = miss * pow(2, -shift, divisor) % divisor + multiple * divisor
            if 2**23 <= dividend < 2**24 and (dividend * 2**shift - miss) // divisor % 2 == 1:
                dividends.append(dividend)
                divisors.append(divisor)
    return np.array(dividends, np.float32), np.array(divisors, np.float32)


def in_fusion(function):
    """`function` in the middle of a larger elementwise program."""
    return jax.jit(lambda a, b: (function(a * 1.0 + 0.0, jnp.where(b > 1e38, 1.0, b)), jnp.tanh(a).sum())[0])


def in_scan(function):
    """`function` as the body of a scan over 16 pieces."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        pieces = tuple(x.reshape(16, -1, *x.shape[1:]) for x in (a, b))
        return jax.lax.scan(lambda carry, piece: (carry, function(*piece)), 0, pieces)[1].reshape(a.shape)

    return jax.jit(run)


PROGRAMS = {
    "eager": lambda function: function,
    "jit": jax.jit,
    "fusion": in_fusion,
    "vmap": lambda function: jax.jit(jax.vmap(function)),
    "scan": in_scan,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_divide_equals_ieee_division(program: str) -> None:
    a, b = random_floats(0, 1 << 18), random_floats(1, 1 << 18)
    hard = hard_quotients()
    a, b = np.concatenate([a, hard[0]]), np.concatenate([b, hard[1]])
    a, b = a[: a.size // 16 * 16], b[: b.size // 16 * 16]
    np.testing.assert_array_equal(np.asarray(PROGRAMS[program](formats.divide)(a, b)), a / b)


def test_hard_quotients_are_hard() -> None:
    """The cases above lie within 2**-47 of a midpoint, relatively, on either side; the theory's limit is
    2**-49.
    """
    a, b = hard_quotients()
    quotient = [Fraction(int(x)) / int(y) for x, y in zip(a, b, strict=True)]
    rounded = (a / b).astype(np.float64)
    spacing = np.spacing(np.float32(a / b)).astype(np.float64)
    for exact, near, step in zip(quotient, rounded, spacing, strict=True):
        distance = min(abs(exact - Fraction(near + sign * step / 2)) for sign in (-1, 1)) / exact
        assert 2.0**-49 < distance < 2.0**-47


def test_divide_with_zero_and_nonfinite_operands() -> None:
    a = np.array([1, -1, 0, np.inf, np.nan, 1, np.inf], np.float32)
    b = np.array([0, 0, 0, 2, 1, np.nan, np.inf], np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(np.asarray(jax.jit(formats.divide)(a, b)), a / b)


def test_divide_by_a_constant_is_not_a_reciprocal() -> None:
    """The rewrite that this package avoids is real: the plain form under jit is off, ours is not."""
    a = np.abs(random_floats(2, 1 << 16))
    right = a / np.float32(448)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(lambda x: formats.divide(x, formats.E4M3_MAX))(a)), right
    )
    np.testing.assert_array_equal(
        np.asarray(jax.jit(formats.compute_scale)(a)), np.maximum(a, np.float32(1e-10)) / np.float32(448)
    )
    differing = np.mean(np.asarray(jax.jit(lambda x: x / 448.0)(a)) != right)
    print(f"plain division under jit differs in {differing:.1%} of scales")


@pytest.mark.parametrize("scale_format", formats.SCALE_FORMATS)
@pytest.mark.parametrize("jit", [False, True])
def test_compute_scale_matches_oracle(scale_format: str, jit: bool) -> None:
    powers = np.float32(448) * 2.0 ** np.arange(-45, 60, dtype=np.float32)
    edges = np.concatenate(
        [powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))]
    )
    special = np.array(
        [0, 1e-45, 1e-38, 1e-30, 1e-10, 9.99e-11, 4.48e-8, 1, 448, 464, 1e30, 3.4e38, np.inf], np.float32
    )
    amax = np.concatenate([edges, special, np.abs(random_floats(3, 20000))]).astype(np.float32)
    compute = jax.jit(formats.compute_scale, static_argnums=1) if jit else formats.compute_scale
    expected = np.array([fp8_oracle.scale_of(value, scale_format) for value in amax], np.float32)
    np.testing.assert_array_equal(np.asarray(compute(amax, scale_format)), expected)
    assert np.isnan(compute(np.float32(np.nan), scale_format))


def test_power_of_two_scale_rounds_up() -> None:
    amax = np.abs(random_floats(4, 4096, -24, 60))  # above the floor
    scale = np.asarray(formats.compute_scale(amax, "power_of_two"))
    assert np.all(np.frexp(scale)[0] == 0.5)
    assert np.all(amax <= scale.astype(np.float64) * 448 * (1 + 2.0**-24))
    assert np.all(amax.astype(np.float64) * 2 * (1 + 2.0**-24) > scale.astype(np.float64) * 448)


def test_compute_scale_raises_on_unknown_format() -> None:
    with pytest.raises(
        ValueError, match="compute_scale: unknown format: got scale_format='ue8m0', expected one of"
    ):
        formats.compute_scale(jnp.ones(3), "ue8m0")


def all_inputs_of_the_cast() -> np.ndarray:
    """Every BF16 number, every code, every midpoint with its FP32 neighbours, and random ones, up to 448 in
    magnitude.
    """
    bf16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    midpoints = ((fp8_oracle.TABLE[1:] + fp8_oracle.TABLE[:-1]) / 2).astype(np.float32)
    points = np.concatenate([fp8_oracle.TABLE.astype(np.float32), midpoints])
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(-1)), np.nextafter(points, np.float32(500))]
    )
    values = np.concatenate([bf16, points, -points, random_floats(6, 1 << 18, -12, 9)])
    return values[~(np.abs(values) > 448)]


def codes_of(array: jax.Array) -> np.ndarray:
    """Bytes of an e4m3 array, with one NaN."""
    codes = np.asarray(array).view(np.uint8)
    return np.where(codes & 0x7F == 0x7F, 0x7F, codes)


@pytest.mark.parametrize("jit", [False, True])
def test_round_to_e4m3_matches_ml_dtypes_and_xla(jit: bool) -> None:
    values = all_inputs_of_the_cast()
    rounded = codes_of((jax.jit(formats.round_to_e4m3) if jit else formats.round_to_e4m3)(values))
    np.testing.assert_array_equal(rounded, codes_of(fp8_oracle.encode_by_cast(values)))
    np.testing.assert_array_equal(rounded, codes_of(jnp.asarray(values).astype(jnp.float8_e4m3fn)))


def test_round_to_e4m3_matches_table() -> None:
    values = all_inputs_of_the_cast()
    values = np.concatenate([values[::17], values[(1 << 16) - 300 : (1 << 16) + 1600], [np.float32(np.nan)]])
    expected = np.array([fp8_oracle.encode_by_table(float(value)) for value in values], np.uint8)
    np.testing.assert_array_equal(
        codes_of(formats.round_to_e4m3(values)), np.where(expected & 0x7F == 0x7F, 0x7F, expected)
    )


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_byte_is_widened_exactly(dtype: Any, jit: bool) -> None:
    codes = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    widen = functools.partial(formats.widen_bits, dtype=dtype)
    wide = np.asarray((jax.jit(widen) if jit else widen)(formats.code_bits(jnp.asarray(codes))))
    expected = codes.astype(dtype)
    assert wide.dtype == expected.dtype
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(wide.astype(np.float32)), nan)
    assert nan.sum() == 2 and wide[~nan].tobytes() == expected[~nan].tobytes()  # with the sign of zero


def test_round_to_e4m3_gives_nan_beyond_its_range() -> None:
    values = np.array([448.1, -449, 464, 1e30, np.inf, -np.inf, np.nan], np.float32)
    assert np.all(codes_of(formats.round_to_e4m3(values)) == 0x7F)


def near_ties(scale: np.ndarray, count: int) -> np.ndarray:
    """float32 [rows, count] with x / scale [rows, 1] at a midpoint of two codes or one FP32 number beside
    it.
    """
    rng = np.random.default_rng(9)
    midpoints = rng.choice((fp8_oracle.TABLE[1:] + fp8_oracle.TABLE[:-1]) / 2, (scale.size, count))
    x = (midpoints * scale.astype(np.float64)).astype(np.float32)
    return np.where(
        rng.random(x.shape) < 0.5, x, np.nextafter(x, rng.choice([0, np.inf], x.shape).astype(np.float32))
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_encode_matches_oracle_on_a_million_values(program: str) -> None:
    """Half random, half where the last bit of the quotient decides; one scale for a row, which is what XLA
    would invert.
    """
    scale = np.abs(random_floats(8, 4096, -2, 2))[:, None]
    x = np.concatenate([random_floats(7, 1 << 19, -14, 10).reshape(4096, 128), near_ties(scale, 128)], axis=1)
    with np.errstate(under="ignore"):
        expected = fp8_oracle.encode_by_cast(np.clip(x / scale, np.float32(-448), np.float32(448)))
    np.testing.assert_array_equal(codes_of(PROGRAMS[program](formats.encode)(x, scale)), codes_of(expected))


def test_encode_ties_and_clip() -> None:
    """368 is the tie of 352 and 384 and goes to the even 384; a quotient above 448 is clipped, not NaN."""
    x = np.array([368, -368, 336, 448, 464, 465, 1e9, -1e9, 2.0**-10, 3 * 2.0**-10, 0.0, -0.0], np.float32)
    expected = np.array([384, -384, 320, 448, 448, 448, 448, -448, 0, 2.0**-8, 0.0, 0.0])
    for scale in (1.0, 3.0, 0.1):
        values = (x.astype(np.float64) * np.float64(np.float32(scale))).astype(np.float32)
        if scale != 1.0:  # the products must be exact, or they are no longer ties
            keep = values.astype(np.float64) == x.astype(np.float64) * np.float64(np.float32(scale))
        else:
            keep = np.ones(x.shape, bool)
        coded = jax.jit(formats.encode)(values, np.full(x.shape, scale, np.float32)).astype(jnp.float32)
        np.testing.assert_array_equal(np.asarray(coded)[keep], expected[keep])


def test_encode_clips_an_infinity_and_a_scale_of_its_own_shows_it() -> None:
    """As the docstring says: the code alone does not tell."""
    infinite = np.array([np.inf, -np.inf, 1.0], np.float32)
    assert np.asarray(formats.encode(infinite, np.ones(3, np.float32)), np.float32).tolist() == [448, -448, 1]
    scale = np.asarray(formats.compute_scale(np.float32(np.inf)))
    codes = np.asarray(formats.encode(infinite, np.full(3, scale)), np.float32)
    assert np.isinf(scale) and np.isnan(codes[:2]).all() and codes[2] == 0


def numbers_in(path: Path) -> list[tuple[int, float]]:
    """(line, value) of every number in the code of a file; docstrings and comments do not count."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NUMBER:
            value = ast.literal_eval(token.string)
            if not isinstance(value, complex):
                found.append((token.start[0], float(value)))
    return found


def test_format_numbers_are_spelled_in_one_file() -> None:
    """448, its reciprocal and the floor appear in formats.py and nowhere else in the three packages."""
    owner = ROOT / "pallas_kernels" / "formats.py"
    spelled = (formats.E4M3_MAX, 1 / formats.E4M3_MAX, formats.AMAX_FLOOR)
    assert {value for _, value in numbers_in(owner)} >= {formats.E4M3_MAX, formats.AMAX_FLOOR}
    files = [
        path
        for package in ("jetrl_jax", "bridge", "pallas_kernels")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    assert owner in files
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {value}"
        for path in files
        if path != owner
        for line, value in numbers_in(path)
        if value in spelled
    ]
    assert not offenders, f"write pallas_kernels.formats.E4M3_MAX or AMAX_FLOOR: {offenders}"
