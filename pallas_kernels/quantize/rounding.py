"""The quantiser's arithmetic for kernels: correctly rounded results from the operations of a GPU kernel.

A Pallas kernel on a GPU has no correctly rounded division: its `/` is off by up to two units in the last
place, which flips codes. It may or may not contract `a * b + c` into one fused multiply-add, and so may a
CPU. The functions here still give the bits of `pallas_kernels.formats`, because each result depends only on
exact intermediate values:

  * A product of short significands (5 bits by 12) has no rounding error, so a contraction changes nothing.
  * The difference of two numbers within a factor of two of each other has no rounding error (Sterbenz).

Scale, s = RN(a / 448). A first q differs by a few units in the last place. r = a / 64 - 7 q is exact: 8 q and
q need no product. The quotient q + r / 7 is a multiple of a seventh of a unit and thus never within 1 / 28 of
a unit of a rounding midpoint, and the small correction r / 7 has a relative error of 2**-23: the sum rounds
as the exact quotient does.

Code, RN_e4m3(RN_fp32(x / s)). With y an approximation of 1 / s (any, within 2**-9), let m be x y rounded to 5
significant bits: m is a code, or the midpoint of two codes, and no other midpoint lies between m and x / s.
The remainder r = x - m s is exact, from s split in two halves of 12 bits. So the code follows from m and the
sign of r, with one exception: if |x / s - m| is at most half a unit in the last place of FP32, the rounding
to FP32 returns m itself, and a midpoint then goes to the even code. This is |r| <= s 2**(e - 24) with 2**e
the power of two in m; both sides are exact. The value m + 1.5 (r / s), or m if the test holds, is on the
right side of m, and the cast to FP8 rounds it to the code.

(tests/kernels/test_rounding.py: every FP32 significand for the scale, every BF16 value for the code, near
ties, and reciprocals that are wrong on purpose. The one place where m is a power of two and a midpoint is
2**-10, and there "below" and "tie" are both code 0, so the finer spacing under a power of two does not
matter.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import AMAX_FLOOR, E4M3, E4M3_MAX

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_HALF_SIGNIFICAND = 0xFFFFF000 - (1 << 32)  # sign, exponent and 11 mantissa bits
_FIVE_BITS = 0xFFF80000 - (1 << 32)  # sign, exponent and 4 mantissa bits
_FIVE_BITS_HALF = 0x00040000
_ROUND_UP_TO_POWER = 0x007FFFFF


def float_bits(x: jax.Array) -> jax.Array:
    """The bits of a float32 array as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of_bits(bits: jax.Array) -> jax.Array:
    """The float32 array with these int32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The bits of |x| as an integer of the same width, ordered like the magnitudes, then infinity, then NaN.

    A maximum over them keeps NaN, which a maximum over floats loses on a CPU, and 16-bit ones are compared in
    pairs.
    """
    integer: Any = jnp.int16 if x.dtype.itemsize == 2 else jnp.int32
    return lax.bitcast_convert_type(x, integer) & jnp.asarray(jnp.iinfo(integer).max, integer)


def magnitude_of_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The float32 magnitudes of the `magnitude_bits` of an array of `dtype`."""
    return lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def scale_of(amax: jax.Array, scale_format: str) -> jax.Array:
    """`formats.compute_scale` of float32 `amax`, bit for bit, without a division; `amax` if not finite."""
    if scale_format == "power_of_two":
        ratio = jnp.maximum(divide_by_448(amax), jnp.float32(AMAX_FLOOR))
        scale = float_of_bits((float_bits(ratio) + jnp.int32(_ROUND_UP_TO_POWER)) & jnp.int32(_INFINITY))
    else:
        scale = divide_by_448(jnp.maximum(amax, jnp.float32(AMAX_FLOOR)))
    return jnp.where(amax < jnp.float32(jnp.inf), scale, amax)


def divide_by_448(a: jax.Array) -> jax.Array:
    """RN(a / 448) for finite float32 a >= 2**-100; a tiny value for smaller ones."""
    quotient = a * jnp.float32(1 / E4M3_MAX)
    remainder = (a * jnp.float32(1 / 64) - quotient * jnp.float32(8)) + quotient
    return quotient + remainder * jnp.float32(1 / 7)


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A scale prepared for division; all float32, of one shape.

    reciprocal: about 1 / scale; step: 1.5 times that.
    high, low: the scale in two halves of 12 bits, zero if it is not finite.
    tie: scale * 2**-24.
    """

    reciprocal: jax.Array
    step: jax.Array
    high: jax.Array
    low: jax.Array
    tie: jax.Array

    @classmethod
    def of(cls, scale: jax.Array, reciprocal: jax.Array | None = None) -> Divisor:
        """From scales and, for tests, another approximation of their reciprocals (error below 2**-9)."""
        if reciprocal is None:
            reciprocal = jnp.float32(1) / scale
        finite = scale < jnp.float32(jnp.inf)
        zero = jnp.zeros_like(scale)
        high = float_of_bits(float_bits(scale) & jnp.int32(_HALF_SIGNIFICAND))
        low = jnp.where(finite, scale - high, zero)
        high = jnp.where(finite, high, zero)
        return cls(reciprocal, reciprocal * jnp.float32(1.5), high, low, scale * jnp.float32(2.0**-24))

    def along(self, axis: int, shape: tuple[int, int]) -> Divisor:
        """This divisor, of vectors along `axis`, broadcast to a matrix of `shape`."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Divisor(*(lax.broadcast_in_dim(field, shape, (axis,)) for field in fields))


def encode(x: jax.Array, divisor: Divisor) -> jax.Array:
    """The codes of `formats.encode` of float32 `x`, without a division, given |x| <= 448 scales.

    If the scale is infinite, a finite value has code 0 and an infinite one NaN; if it is NaN, all codes are
    NaN. The sign of a NaN code is not defined.
    """
    bits = (float_bits(x * divisor.reciprocal) + jnp.int32(_FIVE_BITS_HALF)) & jnp.int32(_FIVE_BITS)
    near = float_of_bits(bits)
    remainder = (x - near * divisor.high) - near * divisor.low
    power = float_of_bits(bits & jnp.int32(_INFINITY))
    tie = jnp.abs(remainder) <= divisor.tie * power
    return jnp.where(tie, near, near + remainder * divisor.step).astype(E4M3)
