"""The FP8 format and its rounding; its numbers are defined only here.

`float8_e4m3fn` has 1 sign, 4 exponent and 3 mantissa bits, no infinity and one NaN: largest value 448,
smallest normal 2**-6, smallest subnormal 2**-9. A block of values shares one FP32 scale:

    scale = max(amax(block), AMAX_FLOOR) / E4M3_MAX          (scale_format "float32")
    scale = 2 ** ceil(log2(max(amax(block) / E4M3_MAX, AMAX_FLOOR)))     (scale_format "power_of_two")
    code  = cast(clip(x / scale, -E4M3_MAX, E4M3_MAX))

all in FP32 with IEEE division and rounding to nearest, ties to even. The value is `code * scale`. The first
formula is that of vLLM's CUDA operation `per_token_group_quant_fp8`; the floor keeps a zero block's scale
positive. In the second formula the power is exact (found from the bits of the ratio, not by a rounded
`log2`).

Division. XLA rewrites `a / b` with a constant or broadcast `b` into `a * (1 / b)`, which is off by one unit
in the last place for about half of all values, and can flip a code. Everything here divides in float64 and
rounds once to FP32. That equals IEEE FP32 division even if XLA rewrites the float64 division: for 24-bit
significands the exact quotient is never a midpoint of two normal FP32 numbers, and its relative distance from
every midpoint is more than 2**-49, while a float64 reciprocal and product are off by at most about 2**-52. So
`encode` deliberately multiplies by a float64 reciprocal, which gives the same bits with one division per
block instead of one per value. (tests/kernels/test_formats.py compares bit for bit with numpy: jitted, fused,
under vmap and scan.)

Non-finite values make their block's scale non-finite (`compute_scale`), so that `quantize` shows them;
`encode` by itself clips an infinity under a finite scale.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Float64, Shaped, UInt8

E4M3 = jnp.float8_e4m3fn
"""Storage type of the codes."""
E4M3_MAX = 448.0
"""Largest finite code."""
AMAX_FLOOR = 1e-10
"""Lower limit of amax ("float32") or of amax / 448 ("power_of_two"), so that scales stay positive."""
BLOCK = 128
"""Edge of a block along every axis that a block spans."""
E4M3_ROUNDOFF = 2.0**-4
"""Largest relative rounding error of a normal code."""
E4M3_MIN_SUBNORMAL = 2.0**-9
"""Distance of neighbouring codes below 2**-6."""
BF16_ROUNDOFF = 2.0**-8
"""Largest relative rounding error of bfloat16."""
FP32_ROUNDOFF = 2.0**-24
"""Largest relative rounding error of FP32."""
SCALE_FORMATS = ("float32", "power_of_two")
"""Names of the scale formats."""

_FP32_MANTISSA_MASK = 0x007FFFFF
_FP32_EXPONENT_MASK = 0xFF800000
_E4M3_MAX_BITS = int(np.float32(E4M3_MAX).view(np.uint32))
_MIN_NORMAL_BITS = int(np.float32(E4M3_MIN_SUBNORMAL * 8).view(np.uint32))
_NAN_BITS = int(np.float32(np.nan).view(np.uint32))
_SUBNORMAL_SHIFT = E4M3_MIN_SUBNORMAL * 2.0**23


def to_float64(x: Shaped[Array, "*S"]) -> Float64[Array, "*S"]:
    """`x` as float64, whatever the global x64 flag; inside jit only as an intermediate."""
    with jax.enable_x64(True):
        return lax.convert_element_type(x, jnp.float64)


def round_to_float32(x: Float64[Array, "*S"]) -> Float32[Array, "*S"]:
    """Rounds float64 to FP32, to nearest even, so that XLA cannot drop the rounding.

    A plain convert may be deleted if the result is widened again (`xla_allow_excess_precision`, on by
    default), so the 29 bits that FP32 lacks are first rounded away by integer operations. Infinities and NaN
    are kept; a result below the smallest normal FP32 number may be rounded twice or flushed to zero.
    """
    with jax.enable_x64(True):
        bits = lax.bitcast_convert_type(x, jnp.uint64)
        to_even = (bits >> jnp.uint64(29)) & jnp.uint64(1)
        bits = (bits + jnp.uint64((1 << 28) - 1) + to_even) & jnp.uint64(-(1 << 29) % (1 << 64))
        return lax.convert_element_type(lax.bitcast_convert_type(bits, jnp.float64), jnp.float32)


def round_output(accumulator: Float32[Array, "*S"], out_dtype: Any) -> Float[Array, "*S"]:
    """FP32 to `out_dtype`; `reduce_precision` keeps XLA from dropping a BF16 rounding that is widened again.

    This is a precaution: jax 0.10.2 and 0.12.0 on CPU keep this rounding anyway, but drop similar ones.
    """
    if out_dtype == jnp.bfloat16:
        accumulator = lax.reduce_precision(accumulator, exponent_bits=8, mantissa_bits=7)
    return accumulator.astype(out_dtype)


def add_finished(accumulator: Float32[Array, "*S"], product: Float32[Array, "*S"]) -> Float32[Array, "*S"]:
    """accumulator + product, added to the rounded product so that XLA cannot fuse a multiply-add."""
    return accumulator + round_to_float32(to_float64(product))


def divide(a: jax.Array | float, b: jax.Array | float) -> Float32[Array, ...]:
    """The IEEE FP32 quotient of two numbers or arrays (broadcast), in spite of XLA's rewrite to a reciprocal.

    Args:
      a: dividend, any float type exact in FP32.
      b: divisor, the same.
    Returns:
      The quotient rounded to nearest even if it is normal; a subnormal one becomes zero. Division by zero,
      infinities and NaN follow IEEE. Not meant to be differentiated.
    """
    a = jnp.asarray(a, jnp.float32)
    b = jnp.asarray(b, jnp.float32)
    with jax.enable_x64(True):
        return round_to_float32(to_float64(a) / to_float64(b))


def compute_scale(amax: Float[Array, "*S"], scale_format: str = "float32") -> Float32[Array, "*S"]:
    """The FP32 scale of blocks with the largest magnitude `amax`.

    Args:
      amax: non-negative; non-finite if the block contains a non-finite value.
      scale_format: "float32" or "power_of_two" (rounded up before any value is divided by it).
    Returns:
      Positive if `amax` is finite, else non-finite.
    Raises:
      ValueError: unknown `scale_format`.
    """
    amax = jnp.asarray(amax, jnp.float32)
    if scale_format == "float32":
        return divide(jnp.maximum(amax, jnp.float32(AMAX_FLOOR)), E4M3_MAX)
    if scale_format == "power_of_two":
        return _next_power_of_two(jnp.maximum(divide(amax, E4M3_MAX), jnp.float32(AMAX_FLOOR)))
    raise ValueError(
        f"compute_scale: unknown format: got scale_format={scale_format!r}, expected one of {SCALE_FORMATS}."
    )


def encode(x: Float[Array, "*S"], scale: Float32[Array, "*#S"]) -> Float8e4m3fn[Array, "*S"]:
    """Codes of `x` under `scale`: cast(clip(x / scale, -448, 448)), round to nearest even.

    Args:
      x: float32, bfloat16 or float16.
      scale: positive, from `compute_scale`.
    Returns:
      The codes. `x / scale` is the IEEE FP32 quotient; a NaN, such as infinity / infinity, stays NaN. A
      quotient outside -448 .. 448 is clipped, which the code does not show: encode(inf, 1.0) is 448. With
      `compute_scale` of the values' own amax this cannot happen: no finite value is clipped by more than a
      rounding, and an infinite one has an infinite scale, which `nonfinite_blocks` counts.
    """
    with jax.enable_x64(True):
        reciprocal = 1.0 / to_float64(scale)
        quotient = lax.convert_element_type(to_float64(x) * reciprocal, jnp.float32)
    return round_to_e4m3(jnp.clip(quotient, -E4M3_MAX, E4M3_MAX))


def round_to_e4m3(x: Float32[Array, "*S"]) -> Float8e4m3fn[Array, "*S"]:
    """FP32 to float8_e4m3fn, rounded to nearest even, for |x| <= 448; all other values become NaN.

    It works on the bits, because XLA's own cast takes three times as long on CPU; the codes are the same
    (tests/kernels/test_formats.py).
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = (bits >> 24) & jnp.uint32(0x80)
    magnitude = bits & jnp.uint32(0x7FFFFFFF)
    # Normal codes: round away the 20 lower mantissa bits, then change the exponent's bias from 127 to 7.
    normal = ((magnitude + jnp.uint32(0x7FFFF) + ((magnitude >> 20) & jnp.uint32(1))) >> 20) - jnp.uint32(
        (127 - 7) << 3
    )
    # Subnormal codes: at 2**14 the spacing of FP32 is 2**-9, so the addition itself rounds.
    shifted = lax.bitcast_convert_type(magnitude, jnp.float32) + jnp.float32(_SUBNORMAL_SHIFT)
    subnormal = lax.bitcast_convert_type(shifted, jnp.uint32) & jnp.uint32(0xFF)
    code = jnp.where(magnitude < jnp.uint32(_MIN_NORMAL_BITS), subnormal, normal)
    code = jnp.where(magnitude > jnp.uint32(_E4M3_MAX_BITS), jnp.uint32(0x7F), code)
    return lax.bitcast_convert_type((sign | code).astype(jnp.uint8), E4M3)


def code_bits(codes: Float8e4m3fn[Array, "*S"]) -> UInt8[Array, "*S"]:
    """The codes as bytes.

    XLA's CPU backend carries an E4M3 array through a slice, a transpose or a loop as FP16 and rounds it to
    E4M3 again behind each; bytes stay as they are.
    """
    return lax.bitcast_convert_type(codes, jnp.uint8)


def widen_bits(bits: UInt8[Array, "*S"], dtype: Any = jnp.float32) -> Float[Array, "*S"]:
    """The codes with these bytes as `dtype`, bfloat16, float16 or float32: exact, as each holds every code;
    a NaN stays NaN.
    """
    wide = bits.astype(jnp.uint32)
    magnitude = (wide & jnp.uint32(0x7F)) << 20  # exponent and mantissa where FP32 has them, with a bias of 7
    normal = magnitude + jnp.uint32((127 - 7) << 23)
    # Subnormal codes: with the exponent of the smallest normal number, which is subtracted again.
    smallest = jnp.float32(E4M3_MIN_SUBNORMAL * 8)
    shifted = lax.bitcast_convert_type(magnitude + jnp.uint32(_MIN_NORMAL_BITS), jnp.float32) - smallest
    subnormal = lax.bitcast_convert_type(shifted, jnp.uint32)
    value = jnp.where(magnitude < jnp.uint32(1 << 23), subnormal, normal)
    value = jnp.where(magnitude == jnp.uint32(0x7F << 20), jnp.uint32(_NAN_BITS), value)
    value = value | ((wide & jnp.uint32(0x80)) << 24)
    if dtype == jnp.bfloat16:  # its bits are the upper ones: a cast would round
        return lax.bitcast_convert_type((value >> 16).astype(jnp.uint16), jnp.bfloat16)
    return lax.bitcast_convert_type(value, jnp.float32).astype(dtype)


def _next_power_of_two(x: jax.Array) -> jax.Array:
    """The smallest power of two >= x for positive normal FP32 `x`; non-finite values are kept."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + jnp.uint32(_FP32_MANTISSA_MASK)) & jnp.uint32(_FP32_EXPONENT_MASK)
    return jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(bits, jnp.float32), x)
