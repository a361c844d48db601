"""FP8 numerics for reinforcement learning in JAX: a block-scaled format, its quantiser and its three GEMMs.

The format in one minute. An FP8 number (e4m3: 4 exponent, 3 mantissa bits) has about one decimal digit and a
range of 2**-9 to 448. A tensor fits only after scaling, and one scale per tensor would let a single outlier
push everything else below the smallest code. So a tensor is cut into blocks of 128 along the axis that a
matrix product sums over, and each block has its own FP32 scale that brings its largest magnitude to 448:

    scale = max(amax, floor) / 448      code = cast(clip(x / scale, -448, 448))      value = code * scale

A product sums 128 products of codes, multiplies by the two scales and adds to an FP32 accumulator, block
after block:

    out[m, n] = sum_kb (sum_{k in kb} A[m, k] B[n, k]) * sa[m, kb] * sb[n, kb]

A linear layer y = x Wᵀ has three products, each of which contracts another axis, so their blocks differ:

    site    product      left operand             right operand                         contracted over
    fprop   y = x Wᵀ     x   [M, K] (1, 128)      W [N, K] (128, 128)                   K, input features
    dgrad   dx = dy W    dy  [M, N] (1, 128)      W [N, K] (128, 128), same codes       N, output features
    wgrad   dW = dyᵀ x   dy  [M, N] (128, 1)      x [M, K] (128, 1) or (128, 128)       M, tokens

Weights are blocked (128, 128) because such a block transposes exactly: one quantisation serves fprop and
dgrad.

    x8 = quantize(x, (1, 128));  w8 = quantize(w, (128, 128));  y = fprop(x8, w8)        # y: bfloat16 [M, N]

`dense_matmul` is a product for BF16 and FP16 matrices in which the bits of a row do not depend on other rows.

All rounding is defined in `formats`, so that a trainer, a rollout engine and an exported checkpoint can hold
the same bits. This package imports only jax, jaxtyping and numpy, and is independent of models and
reinforcement learning.
"""

from pallas_kernels.dense import dense_matmul
from pallas_kernels.formats import (
    AMAX_FLOOR,
    BF16_ROUNDOFF,
    BLOCK,
    E4M3,
    E4M3_MAX,
    E4M3_ROUNDOFF,
    FP32_ROUNDOFF,
    SCALE_FORMATS,
    compute_scale,
    divide,
    encode,
)
from pallas_kernels.gemm import dgrad, fprop, matmul, wgrad
from pallas_kernels.implementations import Choice, resolve
from pallas_kernels.quantize import (
    nonfinite_blocks,
    quantize,
    quantize_dual,
    quantize_weight,
    requantize,
    rms_norm_quantize,
    silu_gradients_quantize,
    silu_multiply_quantize,
)
from pallas_kernels.scaled_array import ScaledArray

__all__ = [
    "AMAX_FLOOR",
    "BF16_ROUNDOFF",
    "BLOCK",
    "E4M3",
    "E4M3_MAX",
    "E4M3_ROUNDOFF",
    "FP32_ROUNDOFF",
    "SCALE_FORMATS",
    "Choice",
    "ScaledArray",
    "compute_scale",
    "dense_matmul",
    "dgrad",
    "divide",
    "encode",
    "fprop",
    "matmul",
    "nonfinite_blocks",
    "quantize",
    "quantize_dual",
    "quantize_weight",
    "requantize",
    "resolve",
    "rms_norm_quantize",
    "silu_gradients_quantize",
    "silu_multiply_quantize",
    "wgrad",
]
