"""Rivals of the Pallas GEMMs through torch, for ``python -m pallas_kernels.bench --rivals``: cuBLASLt, and
DeepGEMM if installed.

Needs torch with CUDA and a Hopper GPU. Times of training sizes are CUDA events around back to back calls,
those of decode a captured CUDA graph of calls with weights of their own, so that neither counts launches from
Python.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from pallas_kernels.measure import Contender, Timing, copies_beyond_cache

BLOCK = 128
FP8 = torch.float8_e4m3fn


def gemm(m: int, n: int, k: int) -> dict[str, Contender]:
    """Contenders for [m, k] times [n, k] transposed."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    return {
        name: timed(call, prepare(x), prepare_weight(w))
        for name, (prepare, prepare_weight, call) in products().items()
    }


def decode(m: int, n: int, k: int) -> dict[str, Timing]:
    """Seconds per product with cold weights, kernels only."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    timings = {}
    for name, (prepare, prepare_weight, call) in products().items():
        nbytes = n * k * (2 if "bf16" in name else 1)
        weights = [
            prepare_weight(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
            for _ in range(copies_beyond_cache(nbytes))
        ]
        timings[name] = graphed(call, prepare(x), weights)
    return timings


def products() -> dict[str, tuple[Callable, Callable, Callable]]:
    """{name: (how activations are prepared, how weights are, the product)}."""
    found = {
        "torch bf16": (lambda x: x, lambda w: w, lambda x, w: x @ w.T),
        "cuBLASLt fp8, one scale": (whole, whole, scaled_mm_whole),
        "cuBLASLt fp8, 1x128 x 128x128": (rows, squares, scaled_mm_blocks),
    }
    fp8_gemm_nt = deepgemm_product()
    if fp8_gemm_nt is None:
        return found

    def deepgemm(x: Any, w: Any) -> torch.Tensor:
        out = torch.empty(x[0].shape[0], w[0].shape[0], device="cuda", dtype=torch.bfloat16)
        fp8_gemm_nt(x, w, out)
        return out

    return found | {"DeepGEMM": (rows, squares, deepgemm)}


def deepgemm_product() -> Callable | None:
    """DeepGEMM's product, of a package of its own or of the copy in vLLM; None, and a line of why, where
    there is neither.
    """
    problems = []
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            return importlib.import_module(name).fp8_gemm_nt
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            problems.append(f"{name}: {error}")
    print(f"kernel_rivals: DeepGEMM is not measured: {'; '.join(problems)}")
    return None


def whole(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and one scale."""
    scale = x.abs().max().float() / 448
    return (x / scale).to(FP8), scale


def rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and a scale [R, K / 128] for each 128 of a row, the scales contiguous along R as cuBLASLt wants
    them.
    """
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scale = blocks.abs().amax(2).clamp(min=1e-10) / 448
    return (blocks / scale[..., None]).flatten(1).to(FP8), scale.T.contiguous().T


def squares(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and a scale [N / 128, K / 128] for each block."""
    blocks = w.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-10) / 448
    return (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(FP8), scale


def scaled_mm_whole(x: Any, w: Any) -> torch.Tensor:
    """FP8 product with one scale for each operand."""
    return torch._scaled_mm(
        x[0], w[0].T, scale_a=x[1], scale_b=w[1], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def scaled_mm_blocks(x: Any, w: Any) -> torch.Tensor:
    """FP8 product with scales per (1, 128) and (128, 128): cuBLASLt, which rounds in the order "deepgemm"."""
    return torch._scaled_mm(x[0], w[0].T, scale_a=x[1], scale_b=w[1].T, out_dtype=torch.bfloat16)


def timed(call: Callable, x: Any, w: Any) -> Contender:
    """Back to back calls between two CUDA events."""

    def run(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call(x, w)
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            call(x, w)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    return run


def graphed(call: Callable, x: Any, weights: list[Any], repetitions: int = 7) -> Timing:
    """Seconds per call of a graph that multiplies by one weight after the other."""
    for weight in weights:
        call(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call(x, weight) for weight in weights]
    seconds = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000 / len(outs))
    return Timing(tuple(seconds))
