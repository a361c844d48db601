"""vLLM's Triton kernel interpreted on a CPU, without vLLM's package and without torch, in a process of its
own.

Triton decides while it is imported whether it interprets, so that a process which compiles cannot also
interpret. The kernel's text is read from the vLLM of this environment or of `.venv` beside it: Python 3.12
with the newer JAX has none.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ScaledArray
from pallas_kernels.gemm import vllm_triton
from pallas_kernels.implementations import packages_problem
from pallas_kernels.vllm_source import SOURCE, find_kernel, vllm_source

ROOT = Path(__file__).resolve().parents[2]
TRITON_NAMES = {"uint8": "float8_e4m3fn"}  # codes are bytes here


def kernel_file() -> Path:
    """The file of vLLM whose kernel is tested. Raises NotImplementedError where no vLLM is installed."""
    beside = sorted(ROOT.glob(f".venv/lib/python3*/site-packages/vllm/{SOURCE}"))
    return beside[0] if beside and importlib.util.find_spec("vllm") is None else vllm_source()


def missing(*packages: str) -> str | None:
    """Why the kernel cannot be had as a function of Triton here, None where it can; `packages`: needed
    besides.
    """
    try:
        find_kernel(kernel_file())
    except NotImplementedError as error:
        return str(error)
    return packages_problem("triton", *packages)


def matmul(a: ScaledArray, b: ScaledArray, out_dtype: Any) -> jax.Array:
    """`vllm_triton.matmul`, interpreted."""
    shape = jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), out_dtype)
    codes = (jax.lax.bitcast_convert_type(x.qvalue, jnp.uint8) for x in (a, b))
    return jax.pure_callback(
        functools.partial(_ask, b.block_shape[0], jnp.dtype(out_dtype)), shape, *codes, a.scale, b.scale
    )


def _ask(group_n: int, out_dtype: np.dtype, *arrays: Any) -> np.ndarray:
    process = _interpreter()
    assert process.stdin is not None and process.stdout is not None
    pickle.dump((group_n, out_dtype, [np.asarray(array) for array in arrays]), process.stdin)
    process.stdin.flush()
    answer = pickle.load(process.stdout)
    if isinstance(answer, str):
        raise RuntimeError(f"vllm_interpreter: the kernel failed:\n{answer}")
    return answer


@functools.cache
def _interpreter() -> subprocess.Popen[bytes]:
    """It ends when this process closes its input."""
    command = [sys.executable, "-m", "tests.kernels.vllm_interpreter"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT)


class Tensor:
    """A numpy array behind as much of `torch.Tensor` as Triton's interpreter calls; it is its own storage, on
    its own device.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)
        self.dtype = TRITON_NAMES.get(self.array.dtype.name, self.array.dtype.name)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Tensor:
        return self

    cpu = untyped_storage

    def new_empty(self, size: int, device: str) -> Tensor:
        return self

    def storage_offset(self) -> int:
        return 0

    size = stride = storage_offset

    def set_(self, storage: Tensor, *view: int) -> None:
        assert storage is self

    copy_ = set_


def _serve() -> None:
    """Answers each question until the input ends, with the product or with the text of what went wrong."""
    vllm_triton.vllm_source = kernel_file
    while sys.stdin.buffer.peek(1):
        question = pickle.load(sys.stdin.buffer)
        try:
            answer: Any = _product(*question)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _product(group_n: int, out_dtype: np.dtype, arrays: list[np.ndarray]) -> np.ndarray:
    """The kernel on every program of its grid, one after the other, into an output full of NaN."""
    import triton.language as tl

    (m, k) = arrays[0].shape
    n = arrays[1].shape[0]
    out = Tensor(np.full((m, n), np.nan, out_dtype))
    grid = (-(-m // vllm_triton.TILE_M) * -(-n // vllm_triton.TILE_N),)
    constants = {name: tl.constexpr(value) for name, value in vllm_triton.constants(m, n, k, group_n).items()}
    vllm_triton.outputs_last()[grid](*map(Tensor, arrays), out, **constants)
    return out.array


if __name__ == "__main__":
    _serve()
