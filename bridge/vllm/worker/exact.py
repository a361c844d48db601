"""vLLM's operations with reductions in float64, like the trainer's `numerics.exact`, on CPU and CUDA.

vLLM's own kernels sum in other orders than the trainer and round at other places, and both change with the
machine.  Its libraries for AVX2 and for AVX-512 without BF16 truncate RoPE to BF16 where the one for AVX-512
with BF16 rounds, and oneDNN's BF16 sums differ by instruction set.  So an exact engine uses no rounding
operation of vLLM, oneDNN or torch.  The operations here compute in float64 and round where
`jetrl_jax.models.ops` rounds (`bridge.vllm.worker.exact_torch`), so that both sides get the same bits
whatever the order of a sum:

    attention over the paged cache     replaces CPU_ATTN (`exact_cpu`) and FLASH_ATTN (`exact_cuda`)
    RMSNorm                            both rounding variants (`numerics.engine_variant`)
    RoPE                               the table with each scaling of `RopeScaling`, and the rotation
    SiLU times gate
    linear layers that are not FP8     one rounding after sum and bias
    adapters                           one rounding of t, of the product and of the sum (`models.lora`)
    logits and log-probabilities       FP32

Block-FP8 products use `bridge.vllm.worker.fp8_kernel` on a CPU, and on CUDA vLLM's kernel for the promotion
order, CUTLASS or Triton.  The exact operations serve eager engines whose `additional_config` has ``jetrl``
with ``exact`` (its default); all other engines keep vLLM's.  They are slow and meant for checks: they use
float64, and temporaries that no CUDA graph holds.  Not run on CUDA yet.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
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

NO_WINDOW = (-1, (-1, -1))  # in vLLM's CPU backend and in its FlashAttention
PLAIN_CACHE, FP8_CACHE = ("auto", "bfloat16"), ("fp8", "fp8_e4m3")
HAS_HEAD_METHOD = hasattr(LogitsProcessor, "_apply_head")  # the head's product is a separate method
HEAD_DTYPE_HEEDED = "head_dtype" in inspect.getsource(LogitsProcessor)  # false in vLLM 0.24 and 0.25


def register_operations() -> None:
    """Replaces vLLM's operations by these, once, on its CPU and CUDA platforms; does nothing on others."""
    if "RMSNorm" in op_registry_oot or not (current_platform.is_cpu() or current_platform.is_cuda()):
        return
    for base, operation in LAYERS.items():
        CustomOp.register_oot(operation, name=base.__name__)
        operation.name = base.name  # the name that `custom_ops` of a compiled engine uses
    for base, operation in (STAND_INS | _punica()).items():
        _stand_in(base, operation)
    WEIGHT_LOADER_V2_SUPPORTED.append(ExactLinearMethod.__name__)  # vLLM chooses a layer's loader by name
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "bridge.vllm.worker.exact_cpu.ExactCpuBackend")
    else:
        register_backend(AttentionBackendEnum.FLASH_ATTN, "bridge.vllm.worker.exact_cuda.ExactFlashBackend")


def _stand_in(base: type, operation: type) -> None:
    """Makes `base(...)` an `operation` in exact engines, if a plugin cannot replace the class by name."""

    def new(cls: type, *_: Any, **__: Any) -> Any:
        return object.__new__(operation if cls is base and engine_settings().exact else cls)

    base.__new__ = staticmethod(new)  # type: ignore[assignment]


def operations(model: torch.nn.Module, sampler: torch.nn.Module | None = None) -> dict[str, str]:
    """The classes that compute each operation of a model built by vLLM.

    Operations are attention, norm, rope, silu, linear, logits, fp8_product, adapters and, from the
    runner's `sampler`, logprobs.
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
            ("adapters", getattr(module, "punica_wrapper", None)),
            ("attention", getattr(module, "impl", None)),
            ("fp8_product", getattr(method, "fp8_linear", None)),
        ):
            if part is not None:
                add(operation, part)
    for part in () if sampler is None else (sampler, getattr(sampler, "topk_topp_sampler", sampler)):
        add("logprobs", part)
    return {operation: "+".join(sorted(names)) for operation, names in sorted(found.items())}


class ExactOperation(CustomOp):
    """An operation of vLLM that calls `compute` in exact engines, on any platform, and vLLM's in others."""

    exact: bool

    def compute(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's call, in float64."""
        raise NotImplementedError

    def forward_native(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's method for plain torch."""
        return (self.compute if self.exact else super().forward_native)(*arguments, **options)

    def forward_cpu(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's method for its CPU platform."""
        return (self.compute if self.exact else super().forward_cpu)(*arguments, **options)

    def forward_cuda(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's method for its CUDA platform."""
        return (self.compute if self.exact else super().forward_cuda)(*arguments, **options)


class ExactRMSNorm(ExactOperation, RMSNorm):
    """RMSNorm with its mean in float64 and the rounding points of the settings' `engine_variant`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exact = engine_settings().exact and self.has_weight and self.variance_size_override is None
        self.engine_variant = engine_settings().engine_variant

    def compute(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The normed values and, if a residual is given, the new residual."""
        normed, total = exact_torch.rms_norm(
            x, self.weight.data, self.variance_epsilon, self.engine_variant, residual
        )
        return normed if residual is None else (normed, total)


class ExactRotaryEmbedding(ExactOperation, RotaryEmbedding):
    """RoPE with the trainer's frequencies, a float64 table of the FP32 angles, and one rounding at the end.

    Some of vLLM's frequencies (torch's FP32 powers) differ by a unit in the last place, which is much at far
    positions.
    """

    exact = False  # vLLM's constructor computes the table

    def scaling(self) -> tuple[RopeScaling | None, int]:
        """The scaling of the frequencies, and the number of positions in the table."""
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
    """RoPE with every frequency divided by a factor."""

    def scaling(self) -> tuple[RopeScaling | None, int]:
        """A linear scaling by one factor."""
        (factor,) = self.scaling_factors
        return RopeScaling("linear", factor), int(self.max_position_embeddings * factor)


class ExactLlama3RotaryEmbedding(ExactRotaryEmbedding, Llama3RotaryEmbedding):
    """RoPE with the low frequencies stretched like Llama 3's."""

    def scaling(self) -> tuple[RopeScaling | None, int]:
        """Llama 3's factor and wavelengths."""
        wavelengths = (self.low_freq_factor, self.high_freq_factor, self.orig_max_position)
        return RopeScaling("llama3", self.scaling_factor, *wavelengths), self.max_position_embeddings


class ExactYaRNScalingRotaryEmbedding(ExactRotaryEmbedding, YaRNScalingRotaryEmbedding):
    """RoPE with YaRN's ramp and factor; its `max_position_embeddings` is the original length."""

    def scaling(self) -> tuple[RopeScaling | None, int]:
        """YaRN's scaling, with the factor that vLLM has computed."""
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
        """SiLU(gate) * up of x [..., 2 F], gate and up side by side."""
        return exact_torch.silu_multiply(x)


class ExactLinearMethod(UnquantizedLinearMethod):
    """A BF16 linear layer with float64 products; its weight is not packed for a kernel after loading."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to do."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to [..., N]; the bias is added to the FP32 sums, which are rounded once."""
        return exact_torch.linear(x, layer.weight, bias).to(x.dtype)


class ExactPunica:
    """Adapters with float64 products; a mix-in before vLLM's wrapper for a platform.

    vLLM has multiplied B by alpha / r when it loaded the adapter.
    """

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **options: Any,
    ) -> None:
        """vLLM's call: adds to y [T, N] what the adapter of each token makes of x [T, K].

        Raises:
          ValueError: a scale that is not 1, which a vLLM that multiplies t in place of B would give.
        """
        if scale != 1.0:
            raise ValueError(f"exact adapters: got scale={scale}, expected 1.0, as B is multiplied already.")
        indices = self.token_lora_indices[: len(x)]  # type: ignore[attr-defined]
        flat, start = y.view(-1, y.shape[-1]), 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            part = flat[:, start : start + size]
            for slot in indices.unique().tolist():
                if slot >= 0:  # other tokens have no adapter
                    of_slot = indices == slot
                    part[of_slot] = exact_torch.adapted(part[of_slot], x[of_slot], a[slot, 0], b[slot, 0])
            start += size


def _punica() -> dict[Any, Any]:
    """vLLM's wrapper of adapters for this platform, and ours."""
    if current_platform.is_cpu():
        return {PunicaWrapperCPU: ExactPunicaCpu}
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    return {PunicaWrapperGPU: type("ExactPunicaGpu", (ExactPunica, PunicaWrapperGPU), {})}


class ExactPunicaCpu(ExactPunica, PunicaWrapperCPU):
    """`ExactPunica` on the CPU platform."""


class ExactSampler(Sampler):
    """Log-probabilities with the trainer's normaliser.

    A rejection sampler asks for logits, of which it makes the log-probabilities itself.  vLLM gives it
    log-probabilities all the same, which, normalised twice, would differ in their last bits.
    """

    logprobs_mode: Any

    def forward(self, *arguments: Any, logprobs_mode_override: Any = None, **named: Any) -> Any:
        """vLLM's sampling, with what `logprobs_mode_override` asks for, if anything."""
        own: Any = self.topk_topp_sampler.logprobs_mode
        self._ask_for(logprobs_mode_override or own)
        try:
            return super().forward(*arguments, **named)
        finally:
            self._ask_for(own)

    def _ask_for(self, mode: Any) -> None:
        self.logprobs_mode = mode
        self.topk_topp_sampler.logprobs_mode = mode

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        """The log-probabilities of float32 logits [R, V]."""
        return exact_torch.log_softmax(logits)


class ExactTopKTopPSampler(TopKTopPSampler):
    """vLLM's sampling, with the trainer's log-probabilities of the distribution that it samples from."""

    def forward_native(
        self, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        """(token ids, log-probabilities) of logits [R, V] after the temperature."""
        return self._drawn(super().forward_native, logits, generators, k, p)

    def forward_cpu(
        self, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        """As `forward_native`; vLLM's method for its CPU platform."""
        return self._drawn(super().forward_cpu, logits, generators, k, p)

    def _drawn(
        self, draw: Any, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        if self.logprobs_mode not in ("processed_logprobs", "processed_logits"):
            return draw(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        # first: a draw may write into the logits
        kept = logits.clone() if self.logprobs_mode == "processed_logits" else exact_torch.log_softmax(logits)
        return draw(logits, generators, None, None)[0], kept


class ExactLogitsProcessor(LogitsProcessor):
    """FP32 logits with float64 products in exact engines, and vLLM's logits in others.

    vLLM 0.24 and 0.25 ignore a decoder's `head_dtype`; here it applies to them too.
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
    """FP32 sums of products of 16-bit numbers, for which torch has a kernel only on CUDA."""
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
    """Softmax attention over the paged cache in float64, with one rounding at the end.

    A mix-in before vLLM's implementation, which serves engines that are not exact.  A cache in FP8 has the
    codes of `jetrl_jax.precision.kv_cache`; queries are not quantised.

    Raises:
      NotImplementedError: an exact engine's attention is more than causal, or its cache is neither BF16 nor
        E4M3.
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
                "exact attention: sliding windows, soft caps, ALiBi and sinks are not implemented."
            )
        known = (*PLAIN_CACHE, *FP8_CACHE)
        if self.exact and self.kv_cache_dtype not in known:
            raise NotImplementedError(
                f"exact attention: got a KV cache in {self.kv_cache_dtype}, expected one of {known}."
            )
        if self.exact:
            self.supports_quant_query_input = False

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
        """vLLM's call: attention of the requests' queries [T, N, H] to the cache; fills `output`."""
        if not self.exact or attn_metadata is None:  # vLLM calls without metadata to measure memory
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        keys, values = exact_torch.key_value_cache(kv_cache, self.head_size)
        starts, lengths = attn_metadata.query_start_loc, attn_metadata.seq_lens
        scales = (layer._k_scale, layer._v_scale) if self.kv_cache_dtype in FP8_CACHE else None
        exact_torch.paged_attention(
            query, keys, values, attn_metadata.block_table, starts, lengths, self.scale, output, scales
        )
        return output
