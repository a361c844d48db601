"""Block-scaled FP8 matrix products: `api` to call, `reference` as the definition, `mosaic` for Hopper."""

from pallas_kernels.gemm.api import dgrad, fprop, matmul, wgrad

__all__ = ["dgrad", "fprop", "matmul", "wgrad"]
