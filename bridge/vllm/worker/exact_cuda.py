"""Exact attention on vLLM's CUDA platform: FlashAttention's backend, metadata and cache update, our
attention.  Not run yet.

vLLM's cache update copies BF16 as it is, in the layouts that `exact_torch.key_value_cache` knows.
"""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from bridge.vllm.worker.exact import ExactAttention


class ExactFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend with the implementation below."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """What vLLM makes one of for each layer."""
        return ExactFlashAttention


class ExactFlashAttention(ExactAttention, FlashAttentionImpl):
    """Exact attention where an engine asks for it, FlashAttention elsewhere."""
