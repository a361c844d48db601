"""Quantisation into FP8 codes with one scale per block, by itself (`api`) or fused (`fused`).

`reference` is the definition; `mosaic`, `mosaic_norm`, `mosaic_requantize` and `mosaic_silu` are the kernels
for Hopper.
"""

from pallas_kernels.quantize.api import (
    choose,
    nonfinite_blocks,
    quantize,
    quantize_dual,
    quantize_weight,
    requantize,
)
from pallas_kernels.quantize.fused import (
    rms_norm_quantize,
    silu_gradients_quantize,
    silu_multiply_quantize,
)

__all__ = [
    "choose",
    "nonfinite_blocks",
    "quantize",
    "quantize_dual",
    "quantize_weight",
    "requantize",
    "rms_norm_quantize",
    "silu_gradients_quantize",
    "silu_multiply_quantize",
]
