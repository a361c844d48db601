"""Block-scaled FP8 matrix products: see `api` for use, `reference` for the definition,
`mosaic` for Hopper.
"""

from pallas_kernels.gemm.api import dgrad, fprop, matmul, wgrad

__all__ = ["dgrad", "fprop", "matmul", "wgrad"]
