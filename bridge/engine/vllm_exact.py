"""vLLM's operations with reductions in float64, as the trainer's `numerics.exact` has them, on its CPU and its CUDA platform.

vLLM's own kernels sum in another order than the trainer, and now and then a BF16 rounding goes the other way.  These
compute in float64 and round where `jetrl_jax.models.ops` rounds (`bridge.engine.torch_exact`), so both sides get the same
bits whatever the order:

    attention over the paged cache     in the place of CPU_ATTN (`vllm_exact_cpu`) and of FLASH_ATTN (`vllm_exact_cuda`)
    RMSNorm                            both rounding variants (`numerics.engine_variant`)
    the table of RoPE                  its application agrees as it is: FP32 over a BF16 table, one rounding
    SiLU times gate
    logits                             in FP32; the trainer's FP32 sums differ from them by roundoff

The block-FP8 products are not among them: on a CPU `bridge.engine.vllm_kernel`, on CUDA vLLM's own kernel of the promotion
order, CUTLASS or Triton.  Linear layers in BF16 stay vLLM's too: their sums are the BF16 floor.  They serve eager engines
whose `additional_config` has ``jetrl`` with ``exact`` (its default); all others keep vLLM's operations.  Slow, for checks:
float64, and temporaries that no CUDA graph holds.  On CUDA not run yet.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from bridge.engine import torch_exact
from bridge.engine.vllm_kernel import engine_settings
from jetrl_jax.models.ops import inverse_frequencies

NO_WINDOW = (-1, (-1, -1))  # how vLLM's CPU backend and its FlashAttention say so
PLAIN_CACHE = ("auto", "bfloat16")
HAS_HEAD_METHOD = hasattr(LogitsProcessor, "_apply_head")  # the head's product in a method of its own
HEAD_DTYPE_HEEDED = "head_dtype" in inspect.getsource(LogitsProcessor)  # not so in vLLM 0.24 and 0.25


def register_operations() -> None:
    """Puts these operations in the place of vLLM's on its CPU and CUDA platforms, once; on others nothing."""
    if "RMSNorm" in op_registry_oot or not (current_platform.is_cpu() or current_platform.is_cuda()):
        return
    for base, operation in LAYERS.items():
        CustomOp.register_oot(operation, name=base.__name__)
        operation.name = base.name  # by which `custom_ops` of a compiled engine turns it on or off
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "bridge.engine.vllm_exact_cpu.ExactCpuBackend")
    else:
        register_backend(AttentionBackendEnum.FLASH_ATTN, "bridge.engine.vllm_exact_cuda.ExactFlashBackend")


def operations(model: torch.nn.Module) -> dict[str, str]:
    """What computes what in a model that vLLM has built, by class: attention, norm, rope, silu, logits, fp8_product."""
    found: dict[str, set[str]] = {}

    def add(operation: str, part: Any) -> None:
        own = next(kind for kind in type(part).__mro__ if getattr(part, "exact", True) or not kind.__module__.startswith("bridge."))
        found.setdefault(operation, set()).add(own.__name__)

    for module in model.modules():
        for base, operation in ((RMSNorm, "norm"), (RotaryEmbedding, "rope"), (SiluAndMul, "silu"), (LogitsProcessor, "logits")):
            if isinstance(module, base):
                add(operation, module)
        for operation, part in (("attention", getattr(module, "impl", None)), ("fp8_product", _fp8_kernel(module))):
            if part is not None:
                add(operation, part)
    return {operation: "+".join(sorted(names)) for operation, names in sorted(found.items())}


def _fp8_kernel(module: torch.nn.Module) -> Any:
    return getattr(getattr(module, "quant_method", None), "fp8_linear", None)


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
        normed, total = torch_exact.rms_norm(x, self.weight.data, self.variance_epsilon, self.engine_variant, residual)
        return normed if residual is None else (normed, total)

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """As `forward_native`; vLLM's where not exact."""
        return self.forward_native(x, residual) if self.exact else super().forward_cuda(x, residual)


class ExactRotaryEmbedding(RotaryEmbedding):
    """RoPE with the trainer's frequencies and a table made in float64 of the FP32 angles.

    vLLM's frequencies, torch's FP32 powers, are a unit in the last place away in places: much, at far positions.  RoPE with
    scaling is another class of vLLM and keeps its table.
    """

    exact = False  # vLLM's constructor computes the table

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        self.exact = engine_settings().exact
        if not self.exact:
            return super()._compute_cos_sin_cache()
        frequencies = torch.from_numpy(inverse_frequencies(self.rotary_dim, self.base))
        return torch_exact.rope_table(frequencies, self.max_position_embeddings).to(torch.empty(0).device)  # the default device


class ExactSiluAndMul(SiluAndMul):
    """SiLU in float64, rounded before and after it is multiplied."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exact = engine_settings().exact

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """vLLM's call: gate and up side by side."""
        return torch_exact.silu_multiply(x) if self.exact else super().forward_native(x)

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward_native`; vLLM's where not exact."""
        return self.forward_native(x) if self.exact else super().forward_cuda(x)


class ExactLogitsProcessor(LogitsProcessor):
    """FP32 logits of float64 products.  Elsewhere vLLM's, but that 0.24 and 0.25, deaf to a decoder's `head_dtype`, heed it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exact = engine_settings().exact
        model = get_current_vllm_config().model_config
        self.float32 = model is not None and getattr(model.hf_config, "head_dtype", None) in ("float32", torch.float32)

    def _apply_head(self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None) -> torch.Tensor:
        if self.exact:
            return torch_exact.linear(hidden_states, lm_head.weight, embedding_bias)
        if HAS_HEAD_METHOD:
            return super()._apply_head(lm_head, hidden_states, embedding_bias)
        if self.float32:
            return _float32_head(hidden_states, lm_head.weight, embedding_bias)
        return lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)

    def _get_logits(self, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: torch.Tensor | None, *options: Any) -> Any:
        if HAS_HEAD_METHOD or (HEAD_DTYPE_HEEDED and not self.exact):
            return super()._get_logits(hidden_states, lm_head, embedding_bias, *options)
        logits = self._gather_logits(self._apply_head(lm_head, hidden_states, embedding_bias))
        return None if logits is None else logits[..., : self.org_vocab_size]


def _float32_head(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """FP32 sums of products of 16-bit numbers; torch has a kernel for it on CUDA alone."""
    if not hidden_states.is_cuda:
        return torch.nn.functional.linear(hidden_states.float(), weight.float(), None if bias is None else bias.float())
    out = torch.mm(hidden_states, weight.t(), out_dtype=torch.float32)
    return out if bias is None else out + bias.float()


LAYERS: dict[Any, Any] = {
    RMSNorm: ExactRMSNorm,
    RotaryEmbedding: ExactRotaryEmbedding,
    SiluAndMul: ExactSiluAndMul,
    LogitsProcessor: ExactLogitsProcessor,
}


class ExactAttention(AttentionImpl):
    """Softmax attention over the paged cache in float64, one rounding at the end; stands before vLLM's implementation.

    Raises:
      NotImplementedError: an exact engine whose attention is more than causal, or whose cache is not BF16.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exact = engine_settings().exact and self.attn_type == AttentionType.DECODER
        special = self.sliding_window not in NO_WINDOW or self.logits_soft_cap or self.alibi_slopes is not None or self.sinks is not None
        if self.exact and special:
            raise NotImplementedError("exact attention: sliding windows, soft caps, ALiBi and sinks are not there.")
        if self.exact and self.kv_cache_dtype not in PLAIN_CACHE:
            raise NotImplementedError(f"exact attention: got a KV cache in {self.kv_cache_dtype}, expected one of {PLAIN_CACHE}.")

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
        if not self.exact or attn_metadata is None:  # without metadata vLLM measures its memory
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        keys, values = torch_exact.key_value_cache(kv_cache, self.head_size)
        starts, lengths = attn_metadata.query_start_loc, attn_metadata.seq_lens
        torch_exact.paged_attention(query, keys, values, attn_metadata.block_table, starts, lengths, self.scale, output)
        return output
