"""Public quantiser: checks its arguments and calls the implementation that the caller named.

    scale[I, J] = compute_scale(max |x| over block (I, J))        code = encode(x, scale)

Source of the formula and of every number: `pallas_kernels.formats`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import SCALE_FORMATS
from pallas_kernels.quantize import reference
from pallas_kernels.scaled_array import BLOCK_SHAPES, ScaledArray

IMPLEMENTATIONS = {"xla": reference.quantize}
"""Quantisers by name; all of them give the same bits."""

INPUT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def quantize(x: jax.Array, block_shape: tuple[int, int], *, scale_format: str = "float32", implementation: str = "xla") -> ScaledArray:
    """Quantises `x` [R, C] in blocks of `block_shape`; edge blocks may be partial.

    Args:
      x: float32, bfloat16 or float16 [R, C], neither dimension zero.
      block_shape: (1, 128) activations and output gradients, (128, 128) weights, (128, 1) WGrad operands.
      scale_format: "float32" or "power_of_two".
      implementation: "xla".
    Returns:
      ScaledArray: codes float8_e4m3fn [R, C], scales float32 [ceil(R / r), ceil(C / c)]. A block of zeros has codes 0
      and a positive scale. A block with a NaN or an infinity has a non-finite scale (count: `nonfinite_blocks`) and
      poisons every product that reads it. Bit-exact against tests/oracles/fp8_oracle.py (tests/kernels/test_quantize.py).
    Raises:
      ValueError: shape, dtype, block shape, scale format or implementation is not one of the above.
    """
    block_shape = (block_shape[0], block_shape[1])
    problems = []
    if x.ndim != 2 or 0 in x.shape:
        problems.append(f"wrong shape: got x.shape={tuple(x.shape)}, expected two non-zero dimensions")
    if x.dtype not in INPUT_DTYPES:
        problems.append(f"wrong dtype: got x.dtype={x.dtype}, expected float32, bfloat16 or float16")
    if block_shape not in BLOCK_SHAPES:
        problems.append(f"unknown block shape: got block_shape={block_shape}, expected one of {BLOCK_SHAPES}")
    if scale_format not in SCALE_FORMATS:
        problems.append(f"unknown scale format: got scale_format={scale_format!r}, expected one of {SCALE_FORMATS}")
    if implementation not in IMPLEMENTATIONS:
        problems.append(f"unknown name: got implementation={implementation!r}, expected one of {tuple(IMPLEMENTATIONS)}")
    if problems:
        raise ValueError("quantize: " + "; ".join(problems) + ".")
    return IMPLEMENTATIONS[implementation](x, block_shape, scale_format)


def nonfinite_blocks(array: ScaledArray) -> jax.Array:
    """Number of blocks (int32 scalar) whose scale is not finite, i.e. that held a NaN or an infinity."""
    return jnp.sum(~jnp.isfinite(array.scale), dtype=jnp.int32)
