"""vLLM's operations on its CPU platform with reductions in float64, as the trainer's `numerics.exact` has them.

vLLM's own kernels there sum in another order than the trainer, and now and then a BF16 rounding goes the other way.  These
compute in float64 and round once, where `jetrl_jax.models.ops` rounds (`bridge.engine.torch_exact`), so both sides get the
same bits whatever the order: attention over the paged cache, RMSNorm, the table of RoPE.  vLLM's other operations there
agree as they are (SiLU for every BF16 input down to -88); the FP32 head differs by roundoff.  They serve engines whose
`additional_config` has ``jetrl`` with ``exact`` (its default); all others keep vLLM's operations.  Slow, like all of the
reference flow on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from bridge.engine import torch_exact
from bridge.engine.vllm_kernel import engine_settings
from jetrl_jax.models.ops import inverse_frequencies


def register_operations() -> None:
    """Puts these operations in the place of vLLM's on the CPU platform, once."""
    if not current_platform.is_cpu() or "RMSNorm" in op_registry_oot:
        return
    for name, operation in (("RMSNorm", ExactRMSNorm), ("RotaryEmbedding", ExactRotaryEmbedding)):
        CustomOp.register_oot(operation, name=name)
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ExactAttentionBackend.__qualname__}")


class ExactRMSNorm(RMSNorm):
    """RMSNorm with its mean in float64 and the rounding points of the settings' `engine_variant`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exact = engine_settings().exact and self.has_weight and self.variance_size_override is None
        self.engine_variant = engine_settings().engine_variant

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """vLLM's call: the normed values, and with a residual also the new residual."""
        if not self.exact:
            return super().forward_native(x, residual)
        normed, total = torch_exact.rms_norm(x, self.weight, self.variance_epsilon, self.engine_variant, residual)
        return normed if residual is None else (normed, total)


class ExactRotaryEmbedding(RotaryEmbedding):
    """RoPE with the trainer's frequencies and a table made in float64 of the FP32 angles.

    vLLM's frequencies, torch's FP32 powers, are a unit in the last place away in places: much, at far positions.  RoPE with
    scaling is another class of vLLM and keeps its table.
    """

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        if not engine_settings().exact:
            return super()._compute_cos_sin_cache()
        frequencies = torch.from_numpy(inverse_frequencies(self.rotary_dim, self.base))
        return torch_exact.rope_table(frequencies, self.max_position_embeddings)


class ExactAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU attention backend with the implementation below."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """What vLLM makes one of for each layer."""
        return ExactAttention


class ExactAttention(CPUAttentionBackendImpl):
    """Softmax attention over the paged cache in float64, one rounding at the end; the cache is kept in plain order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exact = engine_settings().exact and self.attn_type == AttentionType.DECODER
        if self.exact and (self.sliding_window != -1 or self.logits_soft_cap or self.alibi_slopes is not None or self.sinks is not None):
            raise NotImplementedError("exact attention: sliding windows, soft caps, ALiBi and sinks are not there.")

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes keys and values [T, K, H] at their slots of the cache [blocks, K, block size, 2 H]."""
        if not self.exact:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        count = slot_mapping.shape[0]
        used, size = slot_mapping >= 0, kv_cache.shape[2]
        slots = slot_mapping[used].long()
        kv_cache[slots // size, :, slots % size] = torch.cat((key[:count][used], value[:count][used]), dim=-1).to(kv_cache.dtype)
        return None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """vLLM's call: queries [T, N, H] of several requests, one after the other, against the cache; fills `output`."""
        if not self.exact or attn_metadata is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        keys, values = torch_exact.key_value_cache(kv_cache, self.head_size)
        starts, lengths = attn_metadata.query_start_loc, attn_metadata.seq_lens
        torch_exact.paged_attention(query, keys, values, attn_metadata.block_table, starts, lengths, self.scale, output)
        return output
