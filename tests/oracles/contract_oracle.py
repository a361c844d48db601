"""Golden vectors of the contract, made by numpy oracles only: quantisers, FP8 products, and every other
operator of a decoder.

`python -m tests.oracles.contract_oracle > bridge/vllm/contract.json` writes them.

Arrays are hex strings of little-endian bytes; those of operators come with dtype and shape. Other inputs are
BF16 bits [R, K] (uint16), codes float8_e4m3fn bytes, scales float32 bits, products BF16 bits.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np

from tests.oracles import attention_oracle, decoder_oracle, fp8_oracle

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
    zero[1, :128] = 0.0
    zero[2] = 0.0
    return {
        "division": (
            _bf16(normal * np.exp(rng.normal(size=(4, 256)))),
            "scale = amax / 448 and x / scale are IEEE divisions",
        ),
        "floor": (_bf16(tiny), "amax is raised to 1e-10, the scale is not raised further"),
        "ties": (_bf16(ties), "round to nearest, ties to the even code: 368 becomes 384"),
        "clamp": (_bf16(clamp), "values are clipped to 448 before the cast"),
        "zero_block": (_bf16(zero), "a block of zeros has codes 0 and a positive scale"),
        "partial_block": (
            _bf16(rng.normal(size=(3, 200))),
            "the last block is shorter, padding does not count",
        ),
    }


def _gemm_case(exact: bool) -> dict[str, object]:
    """Codes a [8, 384], b [160, 384] with their scales; `exact`: sums that any tensor core forms exactly, so
    the order alone decides.

    The two promotion orders agree on 99.99 % of BF16 outputs: the eight rows are those of 4096 on which they
    differ most.
    """
    rng = np.random.default_rng(SEED + exact)
    a, b = (
        rng.integers(-2, 3, size) if exact else rng.normal(size=size) * 60
        for size in ((4096, 384), (160, 384))
    )
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


def _round(x: np.ndarray) -> np.ndarray:
    """float64 rounded to FP32 and then to BF16, as every operator's result is."""
    return _bf16(np.asarray(x, np.float64).astype(np.float32))


def _wide(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64)


def _norm(variant: str) -> tuple[dict[str, object], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """RMSNorm of a residual sum: "native" norms the unrounded sum and rounds before the weight, "cuda" norms
    the rounded sum.
    """
    rng, eps = np.random.default_rng(SEED + 11), 1e-6
    x, residual, weight = (_bf16(rng.normal(size=size)) for size in ((16, 64), (16, 64), (64,)))
    total = _bf16(x.astype(np.float32) + residual.astype(np.float32))
    h = _wide(total) if variant == "cuda" else _wide(x) + _wide(residual)
    normed = (h / np.sqrt((h * h).mean(-1, keepdims=True) + eps)).astype(np.float32)
    if variant == "native":
        normed = _bf16(normed).astype(np.float32)
    outputs = {"normed": _bf16(normed * weight.astype(np.float32)), "total": total}
    return {"eps": eps, "engine_variant": variant}, {"x": x, "residual": residual, "weight": weight}, outputs


def _rope(
    scaling: dict[str, object] | None,
) -> tuple[dict[str, object], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """cos and sin of the FP32 angle rounded to BF16, the rotation in FP32 and rounded to nearest."""
    rng, width, theta = np.random.default_rng(SEED + 12), 64, 1e6
    positions = np.array([0, 1, 37, 1000, 8191], np.int32)
    x = _bf16(rng.normal(size=(5, 2, width)))
    frequencies = np.array(decoder_oracle.frequencies(width, theta, scaling)).astype(np.float32)
    angle = _wide(positions.astype(np.float32)[:, None] * frequencies)[:, None]
    cos, sin = (_wide(_round(table)) for table in (np.cos(angle), np.sin(angle)))
    first, second = _wide(x[..., : width // 2]), _wide(x[..., width // 2 :])
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return (
        {"theta": theta, "scaling": scaling},
        {"x": x, "positions": positions},
        {"rotated": _round(rotated)},
    )


def _attention() -> tuple[dict[str, object], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Softmax in float64, one rounding; 2 key/value heads of 4 query heads,
    the width's root a power of two.
    """
    rng, tokens, width = np.random.default_rng(SEED + 13), 24, 64
    q, k, v = (_bf16(rng.normal(size=(tokens, heads, width))) for heads in (4, 2, 2))
    visible = np.tril(np.ones((tokens, tokens), bool))
    out = attention_oracle.attention(q[None], k[None], v[None], visible[None], np.zeros_like(q)[None]).values[
        0
    ][0]
    return {}, {"q": q, "k": k, "v": v}, {"attended": _round(out.reshape(tokens, -1))}


def _silu() -> tuple[dict[str, object], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """SiLU rounded, then times the other half and rounded again."""
    gate, up = (_bf16(np.random.default_rng(SEED + 14 + i).normal(size=(8, 64)) * 4) for i in range(2))
    silu = _round(_wide(gate) / (1 + np.exp(-_wide(gate))))
    return {}, {"gate": gate, "up": up}, {"product": _bf16(silu.astype(np.float32) * up.astype(np.float32))}


def _linear(with_bias: bool) -> tuple[dict[str, object], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Sums in float64 rounded to FP32, the bias added in FP32, one more rounding."""
    rng = np.random.default_rng(SEED + 16)
    x, weight, bias = (_bf16(rng.normal(size=size)) for size in ((7, 96), (80, 96), (80,)))
    sums = (_wide(x) @ _wide(weight).T).astype(np.float32)
    inputs = {"x": x, "weight": weight} | ({"bias": bias} if with_bias else {})
    return {}, inputs, {"out": _bf16(sums + bias.astype(np.float32) if with_bias else sums)}


def _head() -> tuple[dict[str, object], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """FP32 logits of float64 sums; minus a normaliser that is rounded to FP32."""
    rng = np.random.default_rng(SEED + 17)
    x, weight = (_bf16(rng.normal(size=size)) for size in ((6, 64), (128, 64)))
    logits = (_wide(x) @ _wide(weight).T).astype(np.float32)
    top = _wide(logits).max(-1, keepdims=True)
    normalizer = (np.log(np.exp(_wide(logits) - top).sum(-1, keepdims=True)) + top).astype(np.float32)
    return {}, {"x": x, "weight": weight}, {"logits": logits, "logprobs": logits - normalizer}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def _operators() -> dict[str, object]:
    cases = {
        "norm native": _norm("native"),
        "norm cuda": _norm("cuda"),
        "rope": _rope(None),
        "rope linear": _rope(LINEAR),
        "rope llama3": _rope(LLAMA3),
        "attention": _attention(),
        "silu": _silu(),
        "linear": _linear(False),
        "linear with bias": _linear(True),
        "head": _head(),
    }

    def array(x: np.ndarray) -> dict[str, object]:
        return {"dtype": str(x.dtype), "shape": list(x.shape), "bytes": _hex(x)}

    return {
        name: {
            "parameters": parameters,
            "inputs": {part: array(x) for part, x in inputs.items()},
            "outputs": {part: array(x) for part, x in outputs.items()},
        }
        for name, (parameters, inputs, outputs) in cases.items()
    }


def contract() -> dict[str, object]:
    """The whole data file."""
    quantizer = {}
    for name, (rows, rule) in _quantizer_inputs().items():
        case: dict[str, object] = {
            "rule": rule,
            "shape": list(rows.shape),
            "x_bf16": _hex(rows.view(np.uint16)),
        }
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
    return {"quantizer": quantizer, "source_bits": source, "gemm": gemm, "operators": _operators()}


if __name__ == "__main__":
    print(json.dumps(contract(), indent=1))
