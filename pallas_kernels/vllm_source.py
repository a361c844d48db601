"""vLLM's own Triton kernel of the block-scaled product, as text in the file of the vLLM that is installed.

Nothing of vLLM is imported, which would bring torch and an engine along. Who runs the kernel compiles the
definition found here (`pallas_kernels.gemm.vllm_triton`); who asks whether it can run looks for it first
(`kernel_problem`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

SOURCE, KERNEL = "model_executor/layers/quantization/utils/fp8_utils.py", "_w8a8_triton_block_scaled_mm"
"""Where vLLM has its kernel (its source was read in 0.32)."""
PARAMETERS = (
    "A B C As Bs M N K group_n group_k stride_am stride_ak stride_bk stride_bn stride_cm stride_cn "
    "stride_As_m stride_As_k "
    "stride_Bs_k stride_Bs_n BLOCK_SIZE_M BLOCK_SIZE_N BLOCK_SIZE_K GROUP_SIZE_M"
).split()
"""What it is called with, in this order."""


def kernel_problem() -> str | None:
    """Why the installed vLLM's kernel cannot be called, None where it can: `find_kernel` on `vllm_source`."""
    try:
        find_kernel(vllm_source())
    except NotImplementedError as error:
        return str(error)
    return None


def vllm_source() -> Path:
    """The file of the installed vLLM that holds the kernel.
    Raises NotImplementedError where vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise NotImplementedError(
            "vllm_source: no kernel: got no installed vllm, expected one: its Triton kernel is what "
            "runs here."
        )
    return Path(spec.origin).parent / SOURCE


@functools.cache
def find_kernel(path: Path) -> ast.FunctionDef:
    """The kernel's definition in vLLM's file; read once.

    Raises:
      NotImplementedError: no such file, no such function in it, or one with other parameters.
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
