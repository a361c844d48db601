"""What holds for every test: the CPU unless told otherwise, no network, strict JAX types, and a reason for every skip."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Runs that a test starts, kills and resumes compile the same programs again and again: once a session is enough.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jetrl_jax_tests_")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

import jax
import pytest

# A silent promotion of bfloat16 or of a rank is how precision and shapes go wrong unseen.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)  # for meshes; everything else takes the first


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Turn a skip that gives no reason into a failure."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped:").strip()
        if reason in ("", "unconditional skip"):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped without a reason"
    return report
