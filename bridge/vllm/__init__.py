"""vLLM as rollout engine, in this process or behind HTTP: plugin, weight transfer and parity certificate.

Only `in_process` and `worker` import torch and vLLM, and they are loaded only if that engine is used.
"""
