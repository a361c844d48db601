"""Finds vLLM's own Triton kernel of the block-scaled product in the source of the installed vLLM.

vLLM is not imported, as it would bring torch and an engine along. `pallas_kernels.gemm.vllm_triton` compiles
the definition found here, and `kernel_problem` checks whether it exists.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

SOURCE, KERNEL = "model_executor/layers/quantization/utils/fp8_utils.py", "_w8a8_triton_block_scaled_mm"
"""The place of the kernel in vLLM (its source was read in 0.32)."""
PARAMETERS = (
    "A B C As Bs M N K group_n group_k stride_am stride_ak stride_bk stride_bn stride_cm stride_cn "
    "stride_As_m stride_As_k "
    "stride_Bs_k stride_Bs_n BLOCK_SIZE_M BLOCK_SIZE_N BLOCK_SIZE_K GROUP_SIZE_M"
).split()
"""The kernel's parameters, in order."""


def kernel_problem() -> str | None:
    """Why the installed vLLM's kernel cannot be called (`find_kernel` on `vllm_source`); None if it can."""
    try:
        find_kernel(vllm_source())
    except NotImplementedError as error:
        return str(error)
    return None


def vllm_source() -> Path:
    """The installed vLLM's file with the kernel; raises NotImplementedError if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise NotImplementedError(
            "vllm_source: no kernel: got no installed vllm, expected one: its Triton kernel is what "
            "runs here."
        )
    return Path(spec.origin).parent / SOURCE


@functools.cache
def find_kernel(path: Path) -> ast.FunctionDef:
    """The definition of the kernel in vLLM's file, which is read once.

    Raises:
      NotImplementedError: the file or the function does not exist, or has other parameters.
    """
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == KERNEL]
    parameters = [argument.arg for node in found for argument in node.args.args]
    if parameters != PARAMETERS:
        got = f"parameters {parameters}" if found else "none"
        raise NotImplementedError(
            f"find_kernel: not vLLM's kernel: got {got} in {path}, expected {KERNEL} with {PARAMETERS}."
        )
    return found[0]
