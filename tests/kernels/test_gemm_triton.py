"""vLLM's Triton kernel behind JAX: its source, its call, its compilation. What it computes is a case of
`test_gemm.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ScaledArray, matmul, quantize, vllm_source
from pallas_kernels.gemm import vllm_triton
from pallas_kernels.implementations import packages_problem
from tests.kernels import aot, vllm_interpreter

ROWS, SQUARE = (1, 128), (128, 128)
MISSING = vllm_interpreter.missing("jax_triton") or aot.missing()


def operands(m: int, n: int, k: int, block: tuple[int, int]) -> tuple[ScaledArray, ScaledArray]:
    """Quantised normal values, rows of different size."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(rows, k)) * np.exp2(rng.integers(-6, 6, (rows, 1))) for rows in (m, n))
    return quantize(jnp.asarray(a, jnp.float32), ROWS), quantize(jnp.asarray(b, jnp.float32), block)


@pytest.mark.skipif(packages_problem("vllm") is not None, reason=f"triton: {packages_problem('vllm')}")
def test_installed_vllm_has_the_kernel_with_the_parameters_that_it_is_called_with() -> None:
    assert vllm_source.find_kernel(vllm_source.vllm_source()).name == vllm_source.KERNEL


@pytest.mark.parametrize(
    "text",
    [None, "x = 1\n", f"def {vllm_source.KERNEL}(A, B, M):\n    pass\n"],
    ids=["no file", "no function", "other"],
)
def test_a_vllm_with_another_kernel_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "fp8_utils.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        NotImplementedError,
        match=r"find_kernel: not vLLM's kernel: got .*fp8_utils\.py, expected _w8a8_triton",
    ):
        vllm_source.find_kernel(path)


def test_the_other_order_and_sizes_beyond_int32_are_refused() -> None:
    a, b = operands(4, 128, 128, SQUARE)
    with pytest.raises(
        NotImplementedError,
        match=r"matmul: cannot run: .*'triton', but promotion_order='deepgemm', expected 'triton'",
    ):
        matmul(a, b, implementation="triton")
    huge = ScaledArray(jax.ShapeDtypeStruct((1 << 16, 1 << 15), jnp.float8_e4m3fn), None, ROWS)
    assert "expected at most 2147483647 elements" in str(vllm_triton.call_problem(huge, b, "triton"))


@pytest.mark.skipif(MISSING is not None, reason=f"triton: {MISSING}")
@pytest.mark.parametrize("block", [SQUARE, ROWS])
@pytest.mark.parametrize(("m", "n", "k"), [(1024, 4096, 4096), (70, 200, 300)])
def test_kernel_compiles_for_an_h100(
    m: int, n: int, k: int, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whole and ragged sizes; the program holds the kernel and nothing that copies its operands.

    A thread holds 64 sums: four tensor core products give one FP32 sum of 128, which a scale multiplies
    before a fused multiply-add takes the other scale. That is the order "triton", and the rounding to BF16 is
    to the nearest.
    """
    monkeypatch.setattr("jax_triton.triton_lib._JAX_TRITON_DUMP_DIR", str(tmp_path))
    monkeypatch.setattr(vllm_triton, "vllm_source", vllm_interpreter.kernel_file)
    shapes = aot.scaled(m, k, ROWS), aot.scaled(n, k, block)
    text = aot.program_for_h100(lambda a, b: vllm_triton.matmul(a, b, jnp.dtype("bfloat16")), *shapes)
    assert "triton_kernel_call" in text and not re.search(r"= \S+ (copy|transpose|fusion)\(", text), text
    (path,) = tmp_path.glob("*/*.ptx")
    ptx = path.read_text(encoding="utf-8")
    assert aot.float_operations(ptx) == {"mul": 64, "add": 0, "fma": 64}
    assert len(re.findall(r"wgmma\.mma_async\S*\.m64n128k32\.f32\.e4m3\.e4m3", ptx)) == 4
    assert len(re.findall(r"cvt\.rn\.bf16x2\.f32", ptx)) == 32
