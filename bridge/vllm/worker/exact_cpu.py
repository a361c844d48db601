"""Exact attention on vLLM's CPU platform: vLLM's metadata, this project's cache update and attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from bridge.vllm.worker.exact import FP8_CACHE, ExactAttention
from bridge.vllm.worker.exact_torch import to_codes
from bridge.vllm.worker.fp8_kernel import SETTINGS_KEY


class ExactCpuBackend(CPUAttentionBackend):
    """vLLM's CPU attention backend with the implementation below."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The class that vLLM instantiates for each layer."""
        return ExactCpuAttention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """The class that makes the metadata."""
        return ExactCpuBuilder


class ExactCpuBuilder(CPUAttentionMetadataBuilder):
    """vLLM's metadata, which exact attention reads only in part.

    vLLM refuses an FP8 cache on a CPU without AVX-512, because its own kernel needs that.  The metadata of an
    exact engine are therefore made as for a plain cache.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        settings = vllm_config.additional_config.get(SETTINGS_KEY)
        if settings is not None and settings.get("exact", True):
            vllm_config = copy.copy(vllm_config)
            vllm_config.cache_config = copy.copy(vllm_config.cache_config)
            vllm_config.cache_config.cache_dtype = "auto"
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)


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
        new = [key[:count][used], value[:count][used]]
        if self.kv_cache_dtype in FP8_CACHE:
            new = [to_codes(x, s) for x, s in zip(new, (layer._k_scale, layer._v_scale), strict=True)]
        # an FP8 cache has bytes
        kv_cache[slots // size, :, slots % size] = torch.cat(new, dim=-1).to(kv_cache.dtype)
        return None
