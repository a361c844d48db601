"""THE definition of the quantiser, in plain XLA; every other implementation must give its bits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import E4M3, code_bits, compute_scale, encode
from pallas_kernels.scaled_array import ScaledArray, grid_shape


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)  # compiled if the caller does not compile
def quantize(x: jax.Array, block_shape: tuple[int, int], scale_format: str) -> ScaledArray:
    """The codes and scales of `x` [R, C]; arguments are checked by the caller."""
    rows, columns = x.shape
    grid_rows, grid_columns = grid_shape(x.shape, block_shape)
    padding = (grid_rows * block_shape[0] - rows, grid_columns * block_shape[1] - columns)
    padded = jnp.pad(x, ((0, padding[0]), (0, padding[1]))) if any(padding) else x  # zeros never raise amax
    blocks = _widen(padded).reshape(grid_rows, block_shape[0], grid_columns, block_shape[1])
    amax = _max_magnitude(blocks)
    scale = compute_scale(amax, scale_format)
    codes = encode(blocks, scale[:, None, :, None]).reshape(padded.shape)
    # Codes are made once and read, where the barrier outlives fusion (`precision.parameters.jit`). Without it
    # XLA's CPU backend quantises again in the loop of each reader, along that reader's axes. Two barriers, so
    # that who reads only the scales makes no codes.
    bits, scale = map(lax.optimization_barrier, (code_bits(codes[:rows, :columns]), scale))
    return ScaledArray(lax.bitcast_convert_type(bits, E4M3), scale, block_shape)


def _widen(x: jax.Array) -> jax.Array:
    """`x` as float32, exactly.

    BF16 is converted by its bits. After a plain convert XLA may drop the caller's rounding to BF16
    (`xla_allow_excess_precision`), and a fused quantiser would give other codes than a separate one.
    """
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _max_magnitude(blocks: jax.Array) -> jax.Array:
    """Largest magnitude per block, float32 [I, J] of float32 [I, r, J, c]; NaN and infinity propagate.

    The maximum is taken over the bits.  Without the sign they order like the magnitudes, with NaN above
    infinity, whereas XLA's own maximum over a float axis loses NaN on CPU (seen in jax 0.10.2 and 0.12.0).
    Halving the last axis first lets XLA use vector instructions.
    """
    bits = lax.bitcast_convert_type(blocks, jnp.int32) & jnp.int32(0x7FFFFFFF)
    while bits.shape[-1] > 16:
        half = bits.shape[-1] // 2
        bits = jnp.maximum(bits[..., :half], bits[..., half:])
    return lax.bitcast_convert_type(jnp.max(bits, axis=(1, 3)), jnp.float32)
