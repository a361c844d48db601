"""vLLM's operations with reductions in float64, as the trainer's `numerics.exact` has them, on its CPU and
its CUDA platform.

vLLM's own kernels sum in other orders than the trainer and round in other places, and both change with the
machine: its AVX2 library truncates RoPE to BF16 where its AVX-512 libraries round, oneDNN's BF16 sums differ
by instruction set.  So an exact engine takes nothing that rounds from vLLM, oneDNN or torch.  These compute
in float64 and round where `jetrl_jax.models.ops` rounds (`bridge.vllm.worker.exact_torch`); both sides get
the same bits whatever the order of a sum:

    attention over the paged cache     in the place of CPU_ATTN (`exact_cpu`) and of FLASH_ATTN (`exact_cuda`)
    RMSNorm                            both rounding variants (`numerics.engine_variant`)
    RoPE                               the table with each scaling of `RopeScaling`, and the rotation
    SiLU times gate
    linear layers that are not FP8     one rounding behind sum and bias
    logits and log-probabilities       FP32

The block-FP8 products are `bridge.vllm.worker.fp8_kernel` on a CPU, on CUDA vLLM's own kernel of the
promotion order, CUTLASS or Triton.  The exact operations serve eager engines whose `additional_config` has
``jetrl`` with ``exact`` (its default); all others keep vLLM's.  Slow, for checks: float64, and temporaries
that no CUDA graph holds.  On CUDA not run yet.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from bridge.vllm.worker import exact_torch
from bridge.vllm.worker.fp8_kernel import engine_settings
from jetrl_jax.models.config import RopeScaling
from jetrl_jax.models.ops import rope_frequencies

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
    for base, operation in STAND_INS.items():
        _stand_in(base, operation)
    WEIGHT_LOADER_V2_SUPPORTED.append(ExactLinearMethod.__name__)  # vLLM asks by name how a layer loads
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "bridge.vllm.worker.exact_cpu.ExactCpuBackend")
    else:
        register_backend(AttentionBackendEnum.FLASH_ATTN, "bridge.vllm.worker.exact_cuda.ExactFlashBackend")


def _stand_in(base: type, operation: type) -> None:
    """Makes an `operation` of each `base(...)` that an exact engine asks for:
    for what vLLM lets no plugin replace by name.
    """

    def new(cls: type, *_: Any, **__: Any) -> Any:
        return object.__new__(operation if cls is base and engine_settings().exact else cls)

    base.__new__ = staticmethod(new)  # type: ignore[assignment]


def operations(model: torch.nn.Module, sampler: torch.nn.Module | None = None) -> dict[str, str]:
    """What computes what in a model that vLLM has built, by class: attention, norm, rope, silu, linear,
    logits, fp8_product.

    sampler: of the model's runner; its parts are the operation logprobs.
    """
    found: dict[str, set[str]] = {}

    def add(operation: str, part: Any) -> None:
        own = next(
            kind
            for kind in type(part).__mro__
            if getattr(part, "exact", True) or not kind.__module__.startswith("bridge.")
        )
        found.setdefault(operation, set()).add(own.__name__)

    kinds = {RMSNorm: "norm", RotaryEmbedding: "rope", SiluAndMul: "silu", LogitsProcessor: "logits"}
    for module in model.modules():
        for base, operation in kinds.items():
            if isinstance(module, base):
                add(operation, module)
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod):
            add("linear", method)
        for operation, part in (
            ("attention", getattr(module, "impl", None)),
            ("fp8_product", getattr(method, "fp8_linear", None)),
        ):
            if part is not None:
                add(operation, part)
    for part in () if sampler is None else (sampler, getattr(sampler, "topk_topp_sampler", sampler)):
        add("logprobs", part)
    return {operation: "+".join(sorted(names)) for operation, names in sorted(found.items())}


class ExactOperation(CustomOp):
    """An operation of vLLM whose `compute` serves an exact engine, by whatever name the platform calls it;
    else vLLM's.
    """

    exact: bool

    def compute(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's call, in float64."""
        raise NotImplementedError

    def forward_native(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's name for plain torch."""
        return (self.compute if self.exact else super().forward_native)(*arguments, **options)

    def forward_cpu(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's name on its CPU platform."""
        return (self.compute if self.exact else super().forward_cpu)(*arguments, **options)

    def forward_cuda(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's name on its CUDA platform."""
        return (self.compute if self.exact else super().forward_cuda)(*arguments, **options)


class ExactRMSNorm(ExactOperation, RMSNorm):
    """RMSNorm with its mean in float64 and the rounding points of the settings' `engine_variant`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exact = engine_settings().exact and self.has_weight and self.variance_size_override is None
        self.engine_variant = engine_settings().engine_variant

    def compute(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The normed values, and with a residual also the new residual."""
        normed, total = exact_torch.rms_norm(
            x, self.weight.data, self.variance_epsilon, self.engine_variant, residual
        )
        return normed if residual is None else (normed, total)


class ExactRotaryEmbedding(ExactOperation, RotaryEmbedding):
    """RoPE with the trainer's frequencies, a table made in float64 of the FP32 angles, and one rounding
    behind the rotation.

    vLLM's frequencies, torch's FP32 powers, are a unit in the last place away in places: much, at far
    positions.
    """

    exact = False  # vLLM's constructor computes the table

    def scaling(self) -> tuple[RopeScaling | None, int]:
        """How the frequencies are stretched, and how many positions the table has."""
        return None, self.max_position_embeddings

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        self.exact = engine_settings().exact and self.rotary_dim == self.head_size and self.is_neox_style
        if not self.exact:
            return super()._compute_cos_sin_cache()
        scaling, positions = self.scaling()
        frequencies = torch.from_numpy(rope_frequencies(self.rotary_dim, self.base, scaling))
        table = exact_torch.rope_table(
            frequencies, positions, 1.0 if scaling is None else scaling.attention_scaling
        )
        return table.to(torch.empty(0).device)  # the default device

    def compute(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        """Rotated queries and keys [T, N * H] of the tokens at `positions`."""
        cos, sin = (
            self._match_cos_sin_cache_dtype(query).index_select(0, positions.flatten()).chunk(2, dim=-1)
        )

        def rotated(x: torch.Tensor) -> torch.Tensor:
            return exact_torch.rotate(x.reshape(len(cos), -1, self.head_size), cos, sin).view(x.shape)

        return rotated(query), None if key is None else rotated(key)


class ExactLinearScalingRotaryEmbedding(ExactRotaryEmbedding, LinearScalingRotaryEmbedding):
    """With every frequency divided by a factor."""

    def scaling(self) -> tuple[RopeScaling | None, int]:
        """Of one factor, as configs have it."""
        (factor,) = self.scaling_factors
        return RopeScaling("linear", factor), int(self.max_position_embeddings * factor)


class ExactLlama3RotaryEmbedding(ExactRotaryEmbedding, Llama3RotaryEmbedding):
    """With the low frequencies stretched as Llama 3's."""

    def scaling(self) -> tuple[RopeScaling | None, int]:
        """Llama 3's factor and wavelengths."""
        wavelengths = (self.low_freq_factor, self.high_freq_factor, self.orig_max_position)
        return RopeScaling("llama3", self.scaling_factor, *wavelengths), self.max_position_embeddings


class ExactYaRNScalingRotaryEmbedding(ExactRotaryEmbedding, YaRNScalingRotaryEmbedding):
    """With YaRN's ramp and factor; its `max_position_embeddings` is the original length."""

    def scaling(self) -> tuple[RopeScaling | None, int]:
        """YaRN's rule, whose factor vLLM has worked out."""
        rule = RopeScaling(
            "yarn",
            self.scaling_factor,
            original_max_position_embeddings=self.max_position_embeddings,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            attention_factor=self.mscale,
            truncate=self.truncate,
        )
        return rule, int(self.max_position_embeddings * self.scaling_factor)


class ExactSiluAndMul(ExactOperation, SiluAndMul):
    """SiLU in float64, rounded before and after it is multiplied."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exact = engine_settings().exact

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Of gate and up side by side."""
        return exact_torch.silu_multiply(x)


class ExactLinearMethod(UnquantizedLinearMethod):
    """A linear layer in BF16 by float64 products, its weight kept as it was loaded:
    nothing is packed for a kernel.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to do."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to [..., N]: the bias joins the FP32 sums, which are rounded once."""
        return exact_torch.linear(x, layer.weight, bias).to(x.dtype)


class ExactSampler(Sampler):
    """Log-probabilities with the trainer's normaliser."""

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        """Of logits [R, V], float32."""
        return exact_torch.log_softmax(logits)


class ExactTopKTopPSampler(TopKTopPSampler):
    """vLLM's draw, with the trainer's log-probabilities of what it is drawn from."""

    def forward_native(
        self, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        """(token ids, log-probabilities) of logits [R, V] after the temperature;
        vLLM's name for plain torch.
        """
        return self._drawn(super().forward_native, logits, generators, k, p)

    def forward_cpu(
        self, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        """As `forward_native`; vLLM's name on its CPU platform."""
        return self._drawn(super().forward_cpu, logits, generators, k, p)

    def _drawn(
        self, draw: Any, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        if self.logprobs_mode != "processed_logprobs":
            return draw(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        logprobs = exact_torch.log_softmax(logits)  # first: a draw may write into the logits
        return draw(logits, generators, None, None)[0], logprobs


class ExactLogitsProcessor(LogitsProcessor):
    """FP32 logits of float64 products.  Elsewhere vLLM's, but that 0.24 and 0.25,
    deaf to a decoder's `head_dtype`, heed it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exact = engine_settings().exact
        model = get_current_vllm_config().model_config
        self.float32 = model is not None and getattr(model.hf_config, "head_dtype", None) in (
            "float32",
            torch.float32,
        )

    def _apply_head(
        self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.exact:
            return exact_torch.linear(hidden_states, lm_head.weight, embedding_bias)
        if HAS_HEAD_METHOD:
            return super()._apply_head(lm_head, hidden_states, embedding_bias)
        if self.float32:
            return _float32_head(hidden_states, lm_head.weight, embedding_bias)
        return lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)

    def _get_logits(
        self, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: torch.Tensor | None, *options: Any
    ) -> Any:
        if HAS_HEAD_METHOD or (HEAD_DTYPE_HEEDED and not self.exact):
            return super()._get_logits(hidden_states, lm_head, embedding_bias, *options)
        logits = self._gather_logits(self._apply_head(lm_head, hidden_states, embedding_bias))
        return None if logits is None else logits[..., : self.org_vocab_size]


def _float32_head(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """FP32 sums of products of 16-bit numbers; torch has a kernel for it on CUDA alone."""
    if not hidden_states.is_cuda:
        return torch.nn.functional.linear(
            hidden_states.float(), weight.float(), None if bias is None else bias.float()
        )
    out = torch.mm(hidden_states, weight.t(), out_dtype=torch.float32)
    return out if bias is None else out + bias.float()


LAYERS: dict[Any, Any] = {
    RMSNorm: ExactRMSNorm,
    RotaryEmbedding: ExactRotaryEmbedding,
    LinearScalingRotaryEmbedding: ExactLinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding: ExactLlama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding: ExactYaRNScalingRotaryEmbedding,
    SiluAndMul: ExactSiluAndMul,
    LogitsProcessor: ExactLogitsProcessor,
}
STAND_INS: dict[Any, Any] = {
    UnquantizedLinearMethod: ExactLinearMethod,
    Sampler: ExactSampler,
    TopKTopPSampler: ExactTopKTopPSampler,
}


class ExactAttention(AttentionImpl):
    """Softmax attention over the paged cache in float64, one rounding at the end; stands before vLLM's
    implementation.

    Raises:
      NotImplementedError: an exact engine whose attention is more than causal, or whose cache is not BF16.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exact = engine_settings().exact and self.attn_type == AttentionType.DECODER
        special = (
            self.sliding_window not in NO_WINDOW
            or self.logits_soft_cap
            or self.alibi_slopes is not None
            or self.sinks is not None
        )
        if self.exact and special:
            raise NotImplementedError(
                "exact attention: sliding windows, soft caps, ALiBi and sinks are not there."
            )
        if self.exact and self.kv_cache_dtype not in PLAIN_CACHE:
            raise NotImplementedError(
                f"exact attention: got a KV cache in {self.kv_cache_dtype}, expected one of {PLAIN_CACHE}."
            )

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
        """vLLM's call: queries [T, N, H] of several requests, one after the other, against the cache;
        fills `output`.
        """
        if not self.exact or attn_metadata is None:  # without metadata vLLM measures its memory
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        keys, values = exact_torch.key_value_cache(kv_cache, self.head_size)
        starts, lengths = attn_metadata.query_start_loc, attn_metadata.seq_lens
        exact_torch.paged_attention(
            query, keys, values, attn_metadata.block_table, starts, lengths, self.scale, output
        )
        return output
