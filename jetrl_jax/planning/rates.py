"""Rates of one H100 SXM at 700 W, from which `plan` and `count` predict seconds for bytes and FLOPs.

The measured rates are those of prototypes and of libraries, kernel by kernel, at 8,192 and 16,384 tokens of
Qwen3-8B's shapes.  The kernels of this repository follow those prototypes; their own measured rates are to
replace these.
"""

from __future__ import annotations

MEASURED, SHEET, ESTIMATE = "kernel measured on an H100", "data sheet", "estimate"
RATES = {
    "fprop": (1164e12, MEASURED),  # FLOP/s, (1, 128) x (128, 128) in FP8, BF16 out
    "wgrad": (900e12, MEASURED),  # (128, 1) x (128, 1), FP32 out
    "wgrad_block": (1083e12, MEASURED),  # (128, 1) x (128, 128), FP32 out
    "bf16": (688e12, MEASURED),
    "fp32": (50e12, ESTIMATE),  # CUDA cores, three quarters of the data sheet's peak
    "fp64": (34e12, SHEET),  # CUDA cores
    "attention": (500e12, ESTIMATE),  # BF16 flash kernels, FLOPs of the causal half, half of the peak
    "attention_backward": (450e12, ESTIMATE),
    "memory": (2.5e12, MEASURED),  # bytes/s of XLA's element-wise kernels; a plain copy reaches 3.0e12
    "nvlink": (450e9, SHEET),  # bytes/s in one direction
}
SHORTEST_S = 2e-6  # shortest time of a launch (estimate; 1 to 3 us were measured around small products)
