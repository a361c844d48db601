"""The entry point that vLLM calls in each of its processes (group ``vllm.general_plugins``).

It registers the weight transfer backend ``jetrl`` and, on the CPU platform, the block-FP8 linear kernel that
runs this project's flow where vLLM has no kernel of its own; on the CPU and CUDA platforms also the exact
operations that engines with this project's settings take.  It changes nothing else, and nothing on other
platforms.
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM once or more per process; a second call does nothing."""
    from bridge.vllm.worker import exact, fp8_kernel, transfer

    transfer.register_backend()
    fp8_kernel.register_kernel()
    exact.register_operations()
