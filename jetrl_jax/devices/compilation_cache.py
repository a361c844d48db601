"""Compiled programs are kept in the user's cache folder, so that a second run starts without compiling.

    $XDG_CACHE_HOME/jetrl-jax/programs/KEY     (~/.cache if XDG_CACHE_HOME is not set)

KEY stands for the versions of Python, JAX and jaxlib, the CPU's instructions and the variables that steer
XLA: a program for a CPU is machine code, which another CPU may not have.  JAX itself keys a file by the
program, the compiler's options and the devices.

A cache that the user has chosen (JAX_COMPILATION_CACHE_DIR) is left alone, and JAX's own
JAX_ENABLE_COMPILATION_CACHE=false turns this one off.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax
import jaxlib.version
from jax.experimental.compilation_cache import compilation_cache

MOST_BYTES = 1 << 30  # of all programs that are kept; beyond it the oldest go
QUICK_S = 0.2  # programs that compile faster are not kept
STEERING = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DISABLE_MOST_OPTIMIZATIONS")


def keep_programs() -> Path | None:
    """Lets JAX keep what it compiles from now on; returns the folder.

    None, and nothing is changed, if JAX has a cache already, if the user has turned it off, or if the folder
    cannot be written.
    """
    chosen = jax.config.values
    if chosen["jax_compilation_cache_dir"] or not chosen["jax_enable_compilation_cache"]:
        return None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    programs = Path(base) / "jetrl-jax" / "programs"
    folder = programs / hashlib.sha256("\n".join(_key()).encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _drop_oldest(programs)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", QUICK_S)
    compilation_cache.reset_cache()  # JAX looks for a folder only once, when it first compiles
    return folder


def _key() -> list[str]:
    """All that a program depends on besides itself, one text each."""
    variables = [f"{name}={os.environ.get(name, '')}" for name in STEERING]
    versions = [platform.python_version(), jax.__version__, jaxlib.version.__version__]
    return [*versions, _instructions(), *variables]


def _instructions() -> str:
    """The names of the CPU's instruction sets; the CPU's name if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _drop_oldest(programs: Path) -> None:
    """Deletes the programs written first, of every key, until the others have at most `MOST_BYTES`."""
    files = sorted(
        ((file.stat().st_mtime, file.stat().st_size, file) for file in programs.glob("*/*-cache")),
        key=lambda entry: entry[:2],
    )
    total = sum(size for _, size, _ in files)
    for _, size, file in files:
        if total <= MOST_BYTES:
            return
        file.unlink(missing_ok=True)
        total -= size
