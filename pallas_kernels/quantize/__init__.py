"""Quantisation of a matrix into FP8 codes with one scale per block: see `api` for use, `reference` for the definition."""

from pallas_kernels.quantize.api import nonfinite_blocks, quantize

__all__ = ["nonfinite_blocks", "quantize"]
