"""The value of a weight in training: an FP32 master together with its published codes or value.

Training multiplies the published bytes, never the master: the update's program may compute a new master
twice, once to keep and once to publish it, and a compiler need not give both the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels import ScaledArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainableFp8Weight:
    """An FP8 weight in training: the FP32 master receives the gradient, the codes are multiplied.

    master: float32 [N, K]; quantized: its published `ScaledArray` in 128x128 blocks.
    fp8_backward: whether DGrad and WGrad run in FP8 (else in BF16 on the dequantised operands).
    total: float32 [N, K], a sum that WGrad adds the gradient to, so that the master's cotangent is the next
      sum; None: it is the gradient.
    """

    master: jax.Array
    quantized: ScaledArray
    fp8_backward: bool = field(metadata={"static": True})
    total: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FrozenFp8Weight:
    """The FP8 weight of a frozen base in training: gradients pass through it to its input, none goes to it.

    quantized: the published `ScaledArray` [N, K] in 128x128 blocks.
    fp8_backward: whether DGrad runs in FP8 (else in BF16 on the dequantised weight).
    """

    quantized: ScaledArray
    fp8_backward: bool = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainableMatrix:
    """An embedding or head in training: the FP32 master receives the gradient, `value` is read.

    master: float32 [V, D]; value: its published value.  They stay apart until rows are chosen, or in
    the head's product, so that no float32 copy of all of `value` exists.
    """

    master: jax.Array
    value: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[V, D], or a device's part."""
        return self.value.shape

    def __getitem__(self, rows: jax.Array) -> jax.Array:
        """Rows of the value in float32, with their gradient."""
        return published_value(self.master[rows], self.value[rows])

    def whole(self) -> jax.Array:
        """The value in float32, with its gradient."""
        return published_value(self.master, self.value)


@jax.custom_vjp
def published_value(master: jax.Array, published: jax.Array) -> jax.Array:
    """`published`, of any shape and dtype, as float32; its gradient goes to the FP32 master, not rounded."""
    return published.astype(jnp.float32)


published_value.defvjp(
    lambda master, published: (published_value(master, published), None), lambda _, gradient: (gradient, None)
)
