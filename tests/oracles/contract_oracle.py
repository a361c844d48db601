"""Golden vectors of the quantiser contract, made by the numpy oracle alone.

`python -m tests.oracles.contract_oracle > bridge/contract.json` writes them.

Arrays are hex strings of little-endian bytes. Inputs are BF16 bits [R, K] (uint16), codes float8_e4m3fn bytes, scales float32
bits, products BF16 bits.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np

from tests.oracles import fp8_oracle

SEED = 20250102
ROW_BLOCK = (1, 128)
WEIGHT_BLOCK = (128, 128)


def _hex(array: np.ndarray) -> str:
    return np.ascontiguousarray(array).tobytes().hex()


def _bf16(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)


def _quantizer_inputs() -> dict[str, tuple[np.ndarray, str]]:
    """{case: (BF16 rows, the rule it pins)}."""
    rng = np.random.default_rng(SEED)
    normal = rng.normal(size=(4, 256))
    ties = np.zeros((2, 128))
    midpoints = [368.0, 400.0, 432.0, 17.0, 19.0, 21.0, 23.0, 2.0**-10, 3 * 2.0**-10, 5 * 2.0**-10]
    ties[0, : len(midpoints) + 1] = [448.0, *midpoints]
    ties[1] = -ties[0]
    tiny = rng.normal(size=(4, 128)) * np.array([[1e-12], [1e-10], [1e-7], [1e-3]])
    clamp = np.full((3, 128), 1.0) * np.array([[3e38], [1e30], [447.0]])
    zero = normal.copy()
    zero[1, :128], zero[2] = 0.0, 0.0
    return {
        "division": (_bf16(normal * np.exp(rng.normal(size=(4, 256)))), "scale = amax / 448 and x / scale are IEEE divisions"),
        "floor": (_bf16(tiny), "amax is raised to 1e-10, the scale is not raised further"),
        "ties": (_bf16(ties), "round to nearest, ties to the even code: 368 becomes 384"),
        "clamp": (_bf16(clamp), "values are clipped to 448 before the cast"),
        "zero_block": (_bf16(zero), "a block of zeros has codes 0 and a positive scale"),
        "partial_block": (_bf16(rng.normal(size=(3, 200))), "the last block is shorter, padding does not count"),
    }


def _gemm_case(exact: bool) -> dict[str, object]:
    """Codes a [8, 384], b [160, 384] with their scales; `exact`: sums that any tensor core forms exactly, so the order alone decides.

    The two promotion orders agree on 99.99 % of BF16 outputs: the eight rows are those of 4096 on which they differ most.
    """
    rng = np.random.default_rng(SEED + exact)
    a, b = (rng.integers(-2, 3, size) if exact else rng.normal(size=size) * 60 for size in ((4096, 384), (160, 384)))
    a_codes, b_codes = (fp8_oracle.encode_by_cast(np.asarray(x, np.float32)) for x in (a, b))
    a_scales = np.exp(rng.normal(size=(4096, 3))).astype(np.float32)
    b_scales = np.exp(rng.normal(size=(2, 3))).astype(np.float32)
    outputs = {
        order: _bf16(fp8_oracle.matmul(a_codes, a_scales, 1, b_codes, b_scales, 128, order)).view(np.uint16)
        for order in ("deepgemm", "triton")
    }
    told_apart = np.count_nonzero(outputs["deepgemm"] != outputs["triton"], axis=1)
    kept = np.sort(np.argsort(-told_apart, kind="stable")[:8])
    a_codes, a_scales = a_codes[kept], a_scales[kept]
    case: dict[str, object] = {
        "a_shape": [8, 384],
        "b_shape": [160, 384],
        "a_codes": _hex(a_codes),
        "b_codes": _hex(b_codes),
        "a_scales": _hex(a_scales),
        "b_scales": _hex(b_scales),
    }
    return case | {order: _hex(output[kept]) for order, output in outputs.items()}


def contract() -> dict[str, object]:
    """The whole data file."""
    quantizer = {}
    for name, (rows, rule) in _quantizer_inputs().items():
        case: dict[str, object] = {"rule": rule, "shape": list(rows.shape), "x_bf16": _hex(rows.view(np.uint16))}
        for scale_format in ("float32", "power_of_two"):
            codes, scales = fp8_oracle.quantize(rows.astype(np.float32), ROW_BLOCK, scale_format)
            case[scale_format] = {"codes": _hex(codes), "scales": _hex(scales)}
        quantizer[name] = case
    master = np.random.default_rng(SEED + 7).normal(size=(130, 140)).astype(np.float32)[:, :136]
    codes, scales = fp8_oracle.quantize(_bf16(master).astype(np.float32), WEIGHT_BLOCK)
    source = {
        "rule": "a weight is quantised from its FP32 master rounded to BF16",
        "shape": list(master.shape),
        "master_float32": _hex(master),
        "codes": _hex(codes),
        "scales": _hex(scales),
    }
    gemm = {"exact_sums": _gemm_case(True), "random_codes": _gemm_case(False)}
    return {"quantizer": quantizer, "source_bits": source, "gemm": gemm}


if __name__ == "__main__":
    print(json.dumps(contract(), indent=1))
