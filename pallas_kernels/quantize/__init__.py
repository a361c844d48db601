"""Quantisation into FP8 codes with one scale per block, alone (`api`) and fused with what stands before it (`fused`).

`reference` is the definition, `mosaic` and `mosaic_norm` are the kernels for Hopper.
"""

from pallas_kernels.quantize.api import choose, nonfinite_blocks, quantize, quantize_dual, quantize_weight
from pallas_kernels.quantize.fused import rms_norm_quantize, silu_multiply_quantize

__all__ = ["choose", "nonfinite_blocks", "quantize", "quantize_dual", "quantize_weight", "rms_norm_quantize", "silu_multiply_quantize"]
