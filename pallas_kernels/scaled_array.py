"""`ScaledArray`: FP8 codes with one FP32 scale per block, and their invariants.

With codes `qvalue` [R, C], block shape (r, c) and scales [ceil(R / r), ceil(C / c)]

    value[i, j] = qvalue[i, j] * scale[i // r, j // c]

Invariants (`check` reports both shapes when one is broken):
  * `qvalue.dtype == float8_e4m3fn`, `scale.dtype == float32`, both two-dimensional
  * `scale.shape == (ceil(R / r), ceil(C / c))`: edge blocks may be partial, without padding
  * `block_shape` is static and one of (1, 128), (128, 128), (128, 1)

Multiplying by the scale dequantises. Block-FP8 checkpoints call it `weight_scale_inv`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32

from pallas_kernels.formats import BLOCK, E4M3, code_bits, widen_bits

BLOCK_SHAPES = ((1, BLOCK), (BLOCK, BLOCK), (BLOCK, 1))
"""Activations along the contraction, weights, WGrad operands along tokens."""


def grid_shape(shape: tuple[int, ...], block_shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales of an array of `shape` [R, C]: (ceil(R / r), ceil(C / c))."""
    rows, columns = shape
    return -(-rows // block_shape[0]), -(-columns // block_shape[1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledArray:
    """Codes, scales and block shape of one two-dimensional array.

    The constructor checks nothing, so that tree operations may put anything into the leaves; `create` checks.

    Attributes:
      qvalue: float8_e4m3fn [R, C].
      scale: float32 [ceil(R / r), ceil(C / c)].
      block_shape: (r, c), static.
    """

    qvalue: Any
    scale: Any
    block_shape: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls, qvalue: Float8e4m3fn[Array, "R C"], scale: Float32[Array, "I J"], block_shape: tuple[int, int]
    ) -> ScaledArray:
        """A checked ScaledArray. Raises ValueError as `check` does."""
        return cls(qvalue, scale, (int(block_shape[0]), int(block_shape[1]))).check()

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (R, C)."""
        return tuple(self.qvalue.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the codes, so that signatures can name axes: `Float8e4m3fn[ScaledArray, "R C"]`."""
        return self.qvalue.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of codes and scales."""
        return int(self.qvalue.size) + 4 * int(self.scale.size)

    def check(self) -> ScaledArray:
        """Returns self, or raises one ValueError that lists every broken invariant with both shapes."""
        problems = []
        qvalue, scale, block_shape = self.qvalue, self.scale, self.block_shape
        if block_shape not in BLOCK_SHAPES:
            problems.append(
                f"unknown block shape: got block_shape={block_shape}, expected one of {BLOCK_SHAPES}"
            )
        if qvalue.dtype != E4M3:
            problems.append(f"wrong code type: got qvalue.dtype={qvalue.dtype}, expected {jnp.dtype(E4M3)}")
        if scale.dtype != jnp.float32:
            problems.append(f"wrong scale type: got scale.dtype={scale.dtype}, expected float32")
        if qvalue.ndim != 2:
            problems.append(f"wrong rank: got qvalue.shape={qvalue.shape}, expected two dimensions")
        elif min(block_shape) > 0 and scale.shape != grid_shape(qvalue.shape, block_shape):
            problems.append(
                f"shapes disagree: got scale.shape={scale.shape} for qvalue.shape={qvalue.shape}, "
                f"expected {grid_shape(qvalue.shape, block_shape)} with block_shape={block_shape}"
            )
        if problems:
            raise ValueError("ScaledArray: " + "; ".join(problems) + ".")
        return self

    def dequantize(self, dtype: Any = jnp.float32) -> Float[Array, "R C"]:
        """The values: code * scale rounded to FP32, then to `dtype`."""
        return _dequantize(self.qvalue, self.scale, self.block_shape, jnp.dtype(dtype))

    def transpose(self) -> ScaledArray:
        """The exact transpose: codes and scales transposed, block shape swapped, nothing requantised."""
        return ScaledArray(self.qvalue.T, self.scale.T, (self.block_shape[1], self.block_shape[0]))


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _dequantize(qvalue: jax.Array, scale: jax.Array, block_shape: tuple[int, int], dtype: Any) -> jax.Array:
    """The values [R, C] of codes and scales."""
    return (widen_bits(code_bits(qvalue)) * expand_scale(scale, qvalue.shape, block_shape)).astype(dtype)


def expand_scale(
    scale: Float32[Array, "I J"], shape: tuple[int, ...], block_shape: tuple[int, int]
) -> Float32[Array, "R C"]:
    """Scales [ceil(R / r), ceil(C / c)], repeated to one per value of `shape` (R, C)."""
    for axis, edge in enumerate(block_shape):
        if edge > 1:
            scale = jnp.repeat(scale, edge, axis=axis)
    return scale[: shape[0], : shape[1]]
