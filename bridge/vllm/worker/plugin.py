"""The vLLM plugin: the entry point that vLLM calls in each of its processes (``vllm.general_plugins``).

It registers the weight transfer backend ``jetrl``.  On the CPU platform it also registers the block-FP8
linear kernel, for machines where vLLM has none, and mends vLLM's speculation.  On the CPU and CUDA platforms
it registers the exact operations for engines with this project's settings.  It changes nothing else, and
nothing on other platforms.
"""

from __future__ import annotations


def register() -> None:
    """Registers everything; vLLM may call it several times in a process, and later calls do nothing."""
    from bridge.vllm.worker import exact, fp8_kernel, speculation, transfer

    transfer.register_backend()
    fp8_kernel.register_kernel()
    exact.register_operations()
    speculation.mend()
