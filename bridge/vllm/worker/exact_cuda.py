"""Exact attention on vLLM's CUDA platform, with FlashAttention's metadata and cache update.  Not run yet.

vLLM's cache update copies BF16 unchanged, in the layouts that `exact_torch.key_value_cache` knows.
"""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from bridge.vllm.worker.exact import ExactAttention


class ExactFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend with the implementation below."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """The class that vLLM instantiates for each layer."""
        return ExactFlashAttention


class ExactFlashAttention(ExactAttention, FlashAttentionImpl):
    """Exact attention in exact engines, FlashAttention in others."""
