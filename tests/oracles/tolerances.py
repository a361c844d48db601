"""Every tolerance of the FP8 tests, derived from unit roundoffs; no number here was fitted to a result.

u is the largest relative error of one rounding, and gamma(n) = n u / (1 - n u) bounds n of them in a row
(Higham, "Accuracy and Stability of Numerical Algorithms", lemma 3.1). All bounds are elementwise.
"""

from __future__ import annotations

import numpy as np

U_E4M3 = 2.0**-4
U_BF16 = 2.0**-8
U_FP16 = 2.0**-11
U_FP32 = 2.0**-24
E4M3_SUBNORMAL_HALF_STEP = 2.0**-10
BLOCK = 128


def gamma(n: int, u: float = U_FP32) -> float:
    """Relative error of n roundings in a row."""
    return n * u / (1 - n * u)


def quantized(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """|code * scale - x|: the code's own rounding (normal or subnormal), and the FP32 rounding of x / scale.

    A value pushed past 448 by that last rounding is clipped back by no more than it, hence 2 u.
    """
    magnitude = np.abs(np.asarray(x, np.float64))
    code = np.maximum(U_E4M3 * magnitude, E4M3_SUBNORMAL_HALF_STEP * np.asarray(scale, np.float64))
    return code * (1 + 2 * U_FP32) + 2 * U_FP32 * magnitude


def exact_dot_gemm(blocks: int, magnitude: np.ndarray) -> np.ndarray:
    """FP32 accumulator with exact dots against float64; `magnitude`: sum over blocks of |dot * sa * sb|.

    One block: the dot rounds to FP32, one scale product rounds (either order), and the accumulator rounds
    once per block from its own on, `blocks` times at most. One more covers the float64 sums under the FP32
    rounding.
    """
    return gamma(blocks + 3) * magnitude


def fp32_dot_gemm(blocks: int, magnitude: np.ndarray) -> np.ndarray:
    """FP32 accumulator with FP32 dots in any order against float64; `magnitude`: sum over K of |a * b|
    dequantised.

    The dot: products of two codes are exact in FP32, 128 sums round. Then as above with one rounding more for
    the product that is not fused.
    """
    return gamma(BLOCK + blocks + 4) * magnitude


def hopper_gemm(blocks: int, magnitude: np.ndarray) -> np.ndarray:
    """Hopper's FP8 tensor core against float64; `magnitude` as in `fp32_dot_gemm`.

    An instruction adds 32 products and the accumulator. It aligns them to the largest and cuts 13 bits below
    its leading one (DeepSeek-V3 technical report, arXiv:2412.19437, section 3.5.2: "around 14 bits"), so each
    of 33 terms loses less than 2**-13 of what is at most `magnitude`; four instructions make a dot of 128.
    Then FP32 as in `fp32_dot_gemm`.
    """
    return (4 * 33 * 2.0**-13 + gamma(blocks + 4)) * magnitude


def fp32_dot(k: int, magnitude: np.ndarray) -> np.ndarray:
    """FP32 sum of `k` exact products in any order against float64; `magnitude`: sum over K of |a * b|."""
    return gamma(k) * magnitude


def hopper_dot(k: int, magnitude: np.ndarray) -> np.ndarray:
    """A tensor core's FP32 sum of `k` BF16 or FP16 products against float64; `magnitude` as in `fp32_dot`.

    An instruction adds 16 exact products and the accumulator. It aligns them to the largest and cuts, to 24
    significant bits at least (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor
    cores", PeerJ Computer Science 7:e330, 2021, for V100 to A100; taken to hold for Hopper), so each of 17
    terms loses less than 2**-23 of what is at most `magnitude`.
    """
    return gamma(17 * -(-k // 16), 2 * U_FP32) * magnitude


def output_rounding(value: np.ndarray, error: np.ndarray, u: float) -> np.ndarray:
    """`error` of an accumulator near `value`, and then one rounding to a type of unit roundoff `u`."""
    return error + u * (np.abs(value) + error)


def attention(keys: int, width: int, spread: float, weights: float = 0.0) -> float:
    """FP32 attention and its gradients against float64, relative to sums of magnitudes
    (tests/oracles/attention_oracle.py).

    A score, `width` products and a scale, is off by at most gamma(width + 2) * `spread`, and the exponential
    turns that into a relative error of each weight and of their sum.  `weights`: unit roundoff of the type
    that weights are rounded to, once in each of the three sums that the gradients go through.  Then three
    sums over up to `keys` terms and two over `width`.
    """
    scores = np.expm1(4 * gamma(width + 2) * spread)
    return float(scores + gamma(3, weights) + gamma(3 * keys + 2 * width + 16))
