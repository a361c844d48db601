"""The vLLM plugin: the entry point that vLLM calls in each of its processes (``vllm.general_plugins``).

It registers the weight transfer backend ``jetrl``.  On the CPU platform it also registers the block-FP8
linear kernel, for machines where vLLM has none, and on the CPU and CUDA platforms the exact operations for
engines with this project's settings.  It changes nothing else, and nothing on other platforms.
"""

from __future__ import annotations


def register() -> None:
    """Registers everything; vLLM may call it several times in a process, and later calls do nothing."""
    from bridge.vllm.worker import exact, fp8_kernel, transfer

    transfer.register_backend()
    fp8_kernel.register_kernel()
    exact.register_operations()
