"""Batch-invariant products of BF16 or FP16 matrices: see `api` for use, `reference` for the definition,
`mosaic` for Hopper.
"""

from pallas_kernels.dense.api import dense_matmul

__all__ = ["dense_matmul"]
