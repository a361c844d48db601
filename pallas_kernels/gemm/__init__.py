"""Block-scaled FP8 matrix products: see `api` for use, `reference` for the definition."""

from pallas_kernels.gemm.api import dgrad, fprop, wgrad

__all__ = ["dgrad", "fprop", "wgrad"]
