"""vLLM's Triton kernel behind JAX, as far as no GPU is needed: its source, its call, its interpretation, its compilation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ScaledArray, matmul, quantize, vllm_source
from pallas_kernels.gemm import vllm_triton
from pallas_kernels.implementations import packages_problem
from tests.kernels import aot
from tests.oracles import fp8_oracle, tolerances

ROWS, SQUARE = (1, 128), (128, 128)
INTERPRETED = """
import sys
import numpy as np
import torch
import triton.language as tl
from pallas_kernels.gemm import vllm_triton
arrays = np.load(sys.argv[1])
a, b, sa, sb = (torch.from_numpy(arrays[name]) for name in ("a", "b", "sa", "sb"))
a, b = (codes.view(torch.float8_e4m3fn) for codes in (a, b))
(m, k), n = a.shape, b.shape[0]
out = torch.full((m, n), torch.nan)
grid = (-(-m // vllm_triton.TILE_M) * -(-n // vllm_triton.TILE_N),)
constants = {name: tl.constexpr(value) for name, value in vllm_triton.constants(m, n, k, int(sys.argv[2])).items()}
vllm_triton.outputs_last()[grid](a, b, sa, sb, out, **constants)
np.save(sys.argv[1], out.numpy())
"""


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips a test, with the reason, where one of these is not installed."""
    problem = packages_problem(*packages)
    return pytest.mark.skipif(problem is not None, reason=f"triton: {problem}")


def operands(m: int, n: int, k: int, block: tuple[int, int]) -> tuple[ScaledArray, ScaledArray]:
    """Quantised normal values, rows of different size."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(rows, k)) * np.exp2(rng.integers(-6, 6, (rows, 1))) for rows in (m, n))
    return quantize(jnp.asarray(a, jnp.float32), ROWS), quantize(jnp.asarray(b, jnp.float32), block)


@needs("vllm")
def test_installed_vllm_has_the_kernel_with_the_parameters_that_it_is_called_with() -> None:
    assert vllm_source.find_kernel(vllm_source.vllm_source()).name == vllm_source.KERNEL


@pytest.mark.parametrize(
    "text", [None, "x = 1\n", f"def {vllm_source.KERNEL}(A, B, M):\n    pass\n"], ids=["no file", "no function", "other"]
)
def test_a_vllm_with_another_kernel_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "fp8_utils.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(NotImplementedError, match=r"find_kernel: not vLLM's kernel: got .*fp8_utils\.py, expected _w8a8_triton"):
        vllm_source.find_kernel(path)


def test_the_other_order_and_sizes_beyond_int32_are_refused() -> None:
    a, b = operands(4, 128, 128, SQUARE)
    with pytest.raises(NotImplementedError, match=r"matmul: cannot run: .*'triton', but promotion_order='deepgemm', expected 'triton'"):
        matmul(a, b, implementation="triton")
    huge = ScaledArray(jax.ShapeDtypeStruct((1 << 16, 1 << 15), jnp.float8_e4m3fn), None, ROWS)
    assert "expected at most 2147483647 elements" in str(vllm_triton.call_problem(huge, b, "triton"))


@needs("triton", "torch", "vllm")
@pytest.mark.parametrize("block", [SQUARE, ROWS])
def test_interpreted_kernel_matches_float64(block: tuple[int, int], tmp_path: Path) -> None:
    """Triton's interpreter on the CPU: every pointer, stride and mask is the one that vLLM's kernel wants. Edges on all sides."""
    a, b = operands(70, 200, 300, block)
    path = tmp_path / "product.npy"
    codes = {name: np.asarray(x.qvalue).view(np.uint8) for name, x in (("a", a), ("b", b))}
    with path.open("wb") as file:
        np.savez(file, **codes, sa=np.asarray(a.scale), sb=np.asarray(b.scale))
    command = [sys.executable, "-c", INTERPRETED, str(path), str(block[0])]
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[2])
    values = [fp8_oracle.dequantize(codes[name], np.asarray(x.scale), x.block_shape) for name, x in (("a", a), ("b", b))]
    bound = tolerances.fp32_dot_gemm(3, np.abs(values[0]) @ np.abs(values[1]).T)
    assert np.all(np.abs(np.load(path) - values[0] @ values[1].T) <= bound)


@needs("triton", "jax_triton", "vllm")
@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
@pytest.mark.parametrize("block", [SQUARE, ROWS])
def test_kernel_compiles_for_an_h100(block: tuple[int, int]) -> None:
    """Whole and ragged sizes; the program holds the kernel and nothing that copies its operands."""
    for m, n, k in ((1024, 4096, 4096), (70, 200, 300)):
        shapes = [
            jax.eval_shape(lambda x, block=b: quantize(x, block), jax.ShapeDtypeStruct((rows, k), jnp.float32))
            for rows, b in ((m, ROWS), (n, block))
        ]
        text = aot.program_for_h100(lambda a, b: vllm_triton.matmul(a, b, jnp.dtype("bfloat16")), *shapes)
        assert "triton_kernel_call" in text and not re.search(r"= \S+ (copy|transpose|fusion)\(", text), text
