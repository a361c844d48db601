"""Elementwise operations before a decoder's quantisers, with the engine's rounding points, for kernels.

Every function takes and returns float32 arrays of BF16 values, and has one defined result for every input, so
that a kernel agrees with the definition (`fused`) bit for bit without sharing its arithmetic:

  * SiLU in FP32 has a relative error below 2.5 * 2**-22 (two units in the last place each for `exp` and the
    division, half a unit for each other operation). For all gates except four, whose results are tabulated,
    the true value is further from every midpoint of two BF16 numbers than the error at that gate. A result
    below 2**-119 may become zero. (tests/kernels/test_producers.py: all 65,536 gates.)
  * The product of two BF16 numbers and the float64 square of one number are exact.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

SILU_NEAR_MIDPOINTS = {-(2.0**-8): -(2.0**-9), 2.0**-7: 2.0**-8, 5.9375: 5.90625, -3.046875: -0.138671875}
"""SiLU, rounded to FP32 and then to BF16, of the gates that FP32 arithmetic could round to the other side."""


def round_to_bfloat16(x: Float32[Array, "*S"]) -> Float32[Array, "*S"]:
    """float32 rounded to BF16 values, to nearest even, by the bits so that no compiler keeps more."""
    bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    return lax.bitcast_convert_type(bits, jnp.float32)


def silu(gate: Float32[Array, "*S"]) -> Float32[Array, "*S"]:
    """bf16(gate / (1 + exp(-gate))) of a float32 `gate` of BF16 values."""
    decay = jnp.exp(-jnp.abs(gate))
    numerator = jnp.where(gate >= jnp.float32(0), jnp.ones_like(decay), decay)
    result = round_to_bfloat16(gate * numerator / (jnp.float32(1) + decay))
    for value, rounded in SILU_NEAR_MIDPOINTS.items():
        result = jnp.where(gate == jnp.float32(value), jnp.full_like(result, rounded), result)
    return result


def silu_multiply(gate: Float32[Array, "*S"], up: Float32[Array, "*S"]) -> Float32[Array, "*S"]:
    """bf16(bf16(SiLU(gate)) * up) of float32 arrays of BF16 values."""
    return round_to_bfloat16(silu(gate) * up)


def silu_gradients(
    gate: Float32[Array, "*S"], up: Float32[Array, "*S"], dy: Float32[Array, "*S"]
) -> tuple[Float32[Array, "*S"], Float32[Array, "*S"]]:
    """The gradients (dgate, dup) of `silu_multiply` for the cotangent dy; all float32 arrays of BF16 values.

    They are rounded where autodiff of the operations in turn rounds: dy up, then dgate, and dup.  SiLU' and
    SiLU are FP32, so that a result may be another neighbour of a midpoint of two BF16 numbers.
    """
    decay = jnp.exp(-jnp.abs(gate))
    larger = jnp.float32(1) / (jnp.float32(1) + decay)
    smaller = decay * larger
    positive = gate >= jnp.float32(0)
    sigmoid, rest = jnp.where(positive, larger, smaller), jnp.where(positive, smaller, larger)
    silu = gate * sigmoid
    slope = sigmoid + silu * rest
    return round_to_bfloat16(round_to_bfloat16(dy * up) * slope), round_to_bfloat16(
        dy * round_to_bfloat16(silu)
    )
