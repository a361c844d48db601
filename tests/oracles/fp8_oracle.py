"""Block-scaled FP8 in numpy with plain loops, independent of the package: what the codes, scales and products
must be.

Codes are the bytes of float8_e4m3fn. Two encoders are here, so that neither is trusted alone: `ml_dtypes`'
cast and a table of all 127 non-negative finite codes with rounding to the nearest, ties to the even code.
Dots are formed in int64 from codes in units of 2**-9: nothing rounds.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

LARGEST = np.float32(448)
FLOOR = np.float32(1e-10)
BLOCK = 128
NAN_CODE = 0x7F


def decode_table() -> np.ndarray:
    """Values of the codes 0 to 126 as float64, ascending, from the definition of the format."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.array(values)


TABLE = decode_table()


def encode_by_table(value: float) -> int:
    """Code of one float of magnitude up to 448 (or NaN): nearest table entry, a tie to the even code."""
    if math.isnan(value):
        return NAN_CODE
    magnitude = abs(value)
    lower = int(np.searchsorted(TABLE, magnitude, side="right")) - 1
    code = lower
    if TABLE[lower] != magnitude:
        below, above = magnitude - TABLE[lower], TABLE[lower + 1] - magnitude  # exact: short significands
        if above < below or (above == below and lower % 2 == 1):
            code = lower + 1
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


def encode_by_cast(values: np.ndarray) -> np.ndarray:
    """Codes of a float32 array through ml_dtypes, which does not saturate: clip first."""
    with np.errstate(invalid="ignore"):  # NaN is an input like any other
        return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def decode(codes: np.ndarray) -> np.ndarray:
    """float64 values of bytes."""
    magnitudes = np.concatenate([TABLE, [np.nan]])[codes & 0x7F]
    return np.where(codes & 0x80, -magnitudes, magnitudes)


def scale_of(amax: np.float32, scale_format: str) -> np.float32:
    """FP32 scale of a block, with numpy's IEEE division."""
    if not np.isfinite(amax):
        return amax
    if scale_format == "float32":
        return max(amax, FLOOR) / LARGEST
    fraction, exponent = math.frexp(float(max(amax / LARGEST, FLOOR)))  # fraction in [0.5, 1)
    return np.float32(math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent))


def blocks_of(
    shape: tuple[int, int], block_shape: tuple[int, int]
) -> list[tuple[tuple[int, int], tuple[slice, slice]]]:
    """((I, J), slices) of every block, edge blocks cut short."""
    rows, columns = block_shape
    return [
        ((i, j), (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)))
        for i in range(math.ceil(shape[0] / rows))
        for j in range(math.ceil(shape[1] / columns))
    ]


def quantize(
    x: np.ndarray, block_shape: tuple[int, int], scale_format: str = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """Codes (bytes) [R, C] and float32 scales of a matrix whose values are exact in FP32."""
    x = np.asarray(x, np.float32)
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros(
        (math.ceil(x.shape[0] / block_shape[0]), math.ceil(x.shape[1] / block_shape[1])), np.float32
    )
    for index, region in blocks_of(x.shape, block_shape):
        block = x[region]
        scale = scale_of(np.abs(block).max(), scale_format)
        with np.errstate(invalid="ignore"):
            codes[region] = encode_by_cast(np.clip(block / scale, -LARGEST, LARGEST))
        scales[index] = scale
    return codes, scales


def dequantize(codes: np.ndarray, scales: np.ndarray, block_shape: tuple[int, int]) -> np.ndarray:
    """Exact float64 values code * scale."""
    values = decode(codes)
    for index, region in blocks_of(codes.shape, block_shape):
        values[region] *= np.float64(scales[index])
    return values


def block_dots(a_codes: np.ndarray, b_codes: np.ndarray) -> np.ndarray:
    """Exact dots [Kb, M, N] of codes [M, K] and [N, K] as float64 (they are integers below 2**44 times
    2**-18).
    """
    a_units, b_units = ((decode(codes) * 512).astype(np.int64) for codes in (a_codes, b_codes))
    dots = []
    for start in range(0, a_codes.shape[1], BLOCK):
        k = slice(start, start + BLOCK)
        dots.append((a_units[:, k] @ b_units[:, k].T).astype(np.float64) * 2.0**-18)
    return np.stack(dots)


def row_scales(scales: np.ndarray, edge: int, rows: int) -> np.ndarray:
    """One scale per row and block of K: [rows, Kb]."""
    return np.stack([scales[row // edge] for row in range(rows)])


def matmul(
    a_codes: np.ndarray,
    a_scales: np.ndarray,
    a_edge: int,
    b_codes: np.ndarray,
    b_scales: np.ndarray,
    b_edge: int,
    order: str,
) -> np.ndarray:
    """FP32 accumulator [M, N] of a [M, K] times b [N, K] transposed; scales per (edge rows, 128 of K)."""
    sa = row_scales(a_scales, a_edge, a_codes.shape[0])
    sb = row_scales(b_scales, b_edge, b_codes.shape[0])
    accumulator = np.zeros((a_codes.shape[0], b_codes.shape[0]), np.float32)
    for block, exact_dot in enumerate(block_dots(a_codes, b_codes)):
        dot = exact_dot.astype(np.float32)
        left_scale, right_scale = sa[:, block, None], sb[None, :, block]
        if order == "deepgemm":
            product = dot.astype(np.float64) * (left_scale * right_scale).astype(np.float64)
        elif order == "triton":
            product = (dot * left_scale).astype(np.float64) * right_scale.astype(np.float64)
        else:
            raise ValueError(order)
        accumulator = (accumulator.astype(np.float64) + product).astype(np.float32)
    return accumulator
