"""vLLM as rollout engine: plugin, weight transfer, engine in this process or behind HTTP, and the parity
certificate.

`in_process` and `worker` import torch and vLLM and are loaded only where that engine is used; the others
import neither.
"""
