"""Exact attention on vLLM's CPU platform: vLLM's metadata, this project's cache update and attention."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from bridge.vllm.worker.exact import ExactAttention


class ExactCpuBackend(CPUAttentionBackend):
    """vLLM's CPU attention backend with the implementation below."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The class that vLLM instantiates for each layer."""
        return ExactCpuAttention


class ExactCpuAttention(ExactAttention, CPUAttentionBackendImpl):
    """Exact attention over a cache in plain order; vLLM's own kernels for CPUs reorder it."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes keys and values [T, K, H] at their slots of the cache [blocks, K, block size, 2 H]."""
        if not self.exact:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        count = slot_mapping.shape[0]
        used, size = slot_mapping >= 0, kv_cache.shape[2]
        slots = slot_mapping[used].long()
        kv_cache[slots // size, :, slots % size] = torch.cat(
            (key[:count][used], value[:count][used]), dim=-1
        ).to(kv_cache.dtype)
        return None
