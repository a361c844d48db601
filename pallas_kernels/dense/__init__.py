"""Batch-invariant products of BF16 or FP16: `api` to call, `reference` defines, `mosaic` for Hopper."""

from pallas_kernels.dense.api import dense_matmul

__all__ = ["dense_matmul"]
