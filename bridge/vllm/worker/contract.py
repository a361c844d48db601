"""The installed vLLM's quantisers and block-FP8 products as functions of numpy arrays, for `check-engine`.

On CPU: this project's plugin (used by runs) and vLLM's own quantiser.  On CUDA: the CUDA quantiser with FP32
and with power-of-two scales, and the CUTLASS, DeepGEMM and Triton products.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform

from pallas_kernels.formats import BLOCK

# BF16 bits [R, K] -> codes (bytes) [R, K], float32 scales [R, ceil(K / 128)]
Quantizer = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
# codes a, scales a, codes b, scales b -> BF16 bits [M, N]
Product = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation: its name, the settings that select it, and its function."""

    name: str
    settings: str
    run: Any
    promotion_order: str = ""


def backends() -> tuple[list[Backend], list[Backend]]:
    """(quantisers, products) of the installed vLLM on this machine."""
    return (
        (_cpu_quantizers(), _cpu_products())
        if current_platform.is_cpu()
        else (_cuda_quantizers(), _cuda_products())
    )


def _cpu_quantizers() -> list[Backend]:
    from bridge.vllm.worker.fp8_kernel import SCALE_FORMATS, quantize_rows

    found = [
        Backend(
            f"plugin/{name}",
            f"precision.scale_format={name}",
            _quantizer(functools.partial(quantize_rows, scale_format=name)),
        )
        for name in SCALE_FORMATS
    ]
    return [
        *found,
        Backend("vllm/cpu_native", "vLLM's QuantFP8 without the plugin", _quantizer(_native_quantizer())),
    ]


def _native_quantizer() -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with set_current_vllm_config(VllmConfig()):
        return QuantFP8(static=False, group_shape=GroupShape(1, BLOCK), compile_native=False).forward_native


def _cpu_products() -> list[Backend]:
    from bridge.vllm.worker.fp8_kernel import PROMOTION_ORDERS, block_scaled_matmul

    return [
        Backend(
            f"plugin/{order}",
            f"precision.promotion_order={order}",
            _product(functools.partial(block_scaled_matmul, promotion_order=order)),
            order,
        )
        for order in PROMOTION_ORDERS
    ]


def _cuda_quantizers() -> list[Backend]:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    return [
        Backend(
            "vllm/cuda/float32",
            "VLLM_USE_DEEP_GEMM_E8M0=0",
            _quantizer(lambda x: per_token_group_quant_fp8(x, BLOCK, use_ue8m0=False)),
        ),
        Backend(
            "vllm/cuda/power_of_two",
            "VLLM_USE_DEEP_GEMM_E8M0=1",
            _quantizer(lambda x: per_token_group_quant_fp8(x, BLOCK, use_ue8m0=True)),
        ),
    ]


def _cuda_products() -> list[Backend]:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm
    from vllm.utils.deep_gemm import fp8_gemm_nt

    def cutlass(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        column_major = sa.t().contiguous().t()
        return ops.cutlass_scaled_mm(a, b.T, scale_a=column_major, scale_b=sb.T, out_dtype=torch.bfloat16)

    def deepgemm(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
        fp8_gemm_nt((a, sa), (b, sb), out, is_deep_gemm_e8m0_used=False)
        return out

    def triton(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        return w8a8_triton_block_scaled_mm(a, b, sa, sb, [BLOCK, BLOCK], torch.bfloat16)

    return [
        Backend("vllm/cutlass", "VLLM_USE_DEEP_GEMM=0", _product(cutlass), "deepgemm"),
        Backend(
            "vllm/deepgemm", "VLLM_USE_DEEP_GEMM=1 VLLM_USE_DEEP_GEMM_E8M0=0", _product(deepgemm), "deepgemm"
        ),
        Backend("vllm/triton", "linear_backend=triton", _product(triton), "triton"),
    ]


def _device() -> str:
    return "cpu" if current_platform.is_cpu() else "cuda"


def _codes(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy()).view(torch.float8_e4m3fn).to(_device())


def _quantizer(function: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Quantizer:
    def run(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).to(_device())
        codes, scales = function(x)[:2]
        return codes.contiguous().view(torch.uint8).cpu().numpy(), scales.contiguous().float().cpu().numpy()

    return run


def _product(function: Callable[..., torch.Tensor]) -> Product:
    def run(a: np.ndarray, sa: np.ndarray, b: np.ndarray, sb: np.ndarray) -> np.ndarray:
        scales = [torch.from_numpy(scale.copy()).to(_device()) for scale in (sa, sb)]
        out = function(_codes(a), _codes(b), *scales).bfloat16().contiguous()
        return out.view(torch.int16).cpu().numpy().view(np.uint16)

    return run
