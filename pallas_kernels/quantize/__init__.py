"""Quantisation of a matrix into FP8 codes with one scale per block: see `api` for use, `reference` for the definition."""

from pallas_kernels.quantize.api import choose, nonfinite_blocks, quantize, quantize_dual, quantize_weight

__all__ = ["choose", "nonfinite_blocks", "quantize", "quantize_dual", "quantize_weight"]
