"""Makes every library of a process take the kernels of another CPU: imported by Python at its start, in each
process.

`make test-avx2` puts this folder on PYTHONPATH and names the instruction set in JETRL_TEST_ISA: "AVX2", or
"AVX512" for AVX-512 without BF16.  XLA, oneDNN, MKL and torch read a variable, but XLA's matrix products
(YNNPACK) ask the CPU and stay as they are.  vLLM picks one of three libraries by asking `torch.cpu`, so that
is patched as it is imported; `tests/parity/test_instruction_set.py` checks that all of it took effect.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

# torch's kernels, oneDNN's, MKL's and XLA's for an instruction set, and what `torch.cpu` is to say no to.
AVX512_BF16 = (
    "_is_avx512_bf16_supported",
    "_is_amx_tile_supported",
    "_is_amx_fp16_supported",
    "_init_amx",
    "_is_vnni_supported",
)
VARIABLES = {
    "AVX2": ("avx2", "AVX2", "AVX2", "AVX2", ("_is_avx512_supported", *AVX512_BF16)),
    "AVX512": ("avx512", "AVX512_CORE", "AVX512", "AVX512", AVX512_BF16),
}


class _Patched(importlib.abc.MetaPathFinder):
    """Finds `torch.cpu` once and patches it when it has run."""

    def __init__(self, refused: tuple[str, ...]) -> None:
        self.refused = refused

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def patched(module: ModuleType) -> None:
            run(module)
            for question in self.refused:
                if hasattr(module, question):
                    setattr(module, question, lambda: False)

        spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec


def force(isa: str) -> None:
    """Sets the variables of `isa` and patches `torch.cpu` when it comes."""
    aten, onednn, mkl, xla, refused = VARIABLES[isa]
    os.environ |= {
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "DNNL_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
    }
    flag = f"--xla_cpu_max_isa={xla}"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    sys.meta_path.insert(0, _Patched(refused))


if asked := os.environ.get("JETRL_TEST_ISA"):
    force(asked)
