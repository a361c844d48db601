"""Block-FP8 (W8A8) linear layers for vLLM's CPU platform, bit for bit as `pallas_kernels.gemm.reference`.

    activations   per row and group of 128: s = max(amax, 1e-10) / 448, q = e4m3(clip(x / s, -448, 448))
                  (vLLM's CUDA op)
    product       per 128 of K: dot exact in float64 and rounded to FP32, promoted into an FP32 accumulator,
                  BF16 out

vLLM 0.32 has block-FP8 kernels only for CPUs with AMX.  This one is appended to vLLM's list, so that vLLM
takes a native kernel if it has one.  Promotion order and scale format come with the engine's settings, under
``jetrl`` in `VllmConfig.additional_config`; the defaults are the contract's ("deepgemm", "float32").
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.platforms import PlatformEnum, current_platform

from pallas_kernels.formats import AMAX_FLOOR, BLOCK, E4M3_MAX
from pallas_kernels.quantize.fused import ENGINE_VARIANTS

SETTINGS_KEY = "jetrl"
PROMOTION_ORDERS = ("deepgemm", "triton")
SCALE_FORMATS = ("float32", "power_of_two")


def quantize_rows(x: torch.Tensor, scale_format: str = "float32") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises activations [M, K], of which the last group of 128 may be partial.

    Returns codes float8_e4m3fn [M, K] and scales float32 [M, ceil(K / 128)].
    """
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % BLOCK)).float().view(rows, -1, BLOCK)
    amax = padded.abs().amax(-1, keepdim=True)
    if scale_format == "power_of_two":
        mantissa, exponent = torch.frexp((amax / E4M3_MAX).clamp(min=AMAX_FLOOR))
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    else:
        scale = amax.clamp(min=AMAX_FLOOR) / E4M3_MAX
    codes = (padded / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(rows, -1)
    return codes[:, :columns], scale.squeeze(-1)


def block_scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    promotion_order: str = "deepgemm",
) -> torch.Tensor:
    """The product of codes a [M, K] and b [N, K], as the FP32 accumulator [M, N].

    Scales are [M, K / 128] and [N / 128, K / 128]; blocks of K are added in ascending order.  A row does not
    depend on the other rows, since the dot of 128 products of codes is exact in float64.
    """
    b_rows = b_scale.repeat_interleave(BLOCK, dim=0)[: b.shape[0]]
    a64, b64 = a.double(), b.double()
    accumulator = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32)
    for block in range(a_scale.shape[1]):
        k = slice(block * BLOCK, (block + 1) * BLOCK)
        dot = (a64[:, k] @ b64[:, k].t()).float()
        sa, sb = a_scale[:, block, None], b_rows[None, :, block]
        left, right = (dot, sa * sb) if promotion_order == "deepgemm" else (dot * sa, sb)
        accumulator = (accumulator.double() + left.double() * right.double()).float()
    return accumulator


@dataclass(frozen=True)
class PluginSettings:
    """The settings that an engine got under ``jetrl``.

    exact: whether it uses the operations of `bridge.vllm.worker.exact`; engine_variant: their rounding points
      in norms.
    """

    promotion_order: str = PROMOTION_ORDERS[0]
    scale_format: str = SCALE_FORMATS[0]
    exact: bool = True
    engine_variant: str = ENGINE_VARIANTS[0]

    def __post_init__(self) -> None:
        known = (
            self.promotion_order in PROMOTION_ORDERS
            and self.scale_format in SCALE_FORMATS
            and self.engine_variant in ENGINE_VARIANTS
        )
        if not known or not isinstance(self.exact, bool):
            raise ValueError(
                f"additional_config.{SETTINGS_KEY}: unknown value: got {dataclasses.asdict(self)}, "
                "expected promotion_order in "
                f"{PROMOTION_ORDERS}, scale_format in {SCALE_FORMATS}, exact true or false and "
                f"engine_variant in {ENGINE_VARIANTS}."
            )


def engine_settings() -> PluginSettings:
    """The settings of the engine being built; without an engine or settings, those of vLLM's own operations.

    Raises:
      ValueError: unknown values, or exact operations without `enforce_eager`, which torch would fuse.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:
        return PluginSettings(exact=False)
    given: Any = (config.additional_config or {}).get(SETTINGS_KEY)
    settings = PluginSettings(exact=False) if given is None else PluginSettings(**given)
    if settings.exact and config.model_config is not None and not config.model_config.enforce_eager:
        raise ValueError(
            f"additional_config.{SETTINGS_KEY}: exact operations in an engine that is compiled: got "
            "enforce_eager=False, expected "
            'True, or {"exact": false}.'
        )
    return settings


class ReferenceFp8BlockScaledMMKernel(Fp8BlockScaledMMLinearKernel):
    """vLLM's interface to `quantize_rows` and `block_scaled_matmul`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.promotion_order = engine_settings().promotion_order
        self.scale_format = engine_settings().scale_format
        # vLLM's quantiser for CPU has another floor (1 / (448 * 512) on the scale) than its CUDA op.
        self.quant_fp8 = self._quantize

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether vLLM may use the kernel: only on the CPU platform."""
        return (True, None) if current_platform.is_cpu() else (False, "is for CPUs.")

    def _quantize(
        self, x: torch.Tensor, scale: Any = None, scale_ub: Any = None, use_triton: bool = False
    ) -> Any:
        return quantize_rows(x, self.scale_format)

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        """vLLM's call: the product [M, N] of codes and scales, in the layer's dtype."""
        return block_scaled_matmul(A, B, As, Bs, self.promotion_order).to(self.config.out_dtype)


def register_kernel() -> None:
    """Appends the kernel to vLLM's list for the CPU platform, once."""
    kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if current_platform.is_cpu() and ReferenceFp8BlockScaledMMKernel not in kernels:
        kernels.append(ReferenceFp8BlockScaledMMKernel)
        _avoid_amx_attention()


def _avoid_amx_attention() -> None:
    """Makes engines with this project's settings use AVX-512 attention; others keep vLLM's choice.

    On CPUs with AMX, vLLM 0.32 uses its AMX attention, which rounds the probabilities to BF16; the model here
    does not.  It also dies of an illegal instruction unless another AMX kernel has requested the tiles from
    the operating system before, which does not happen with the FP8 kernel above.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    choose = Builder._set_isa_to_layers

    def without_amx(self: Any, layer_names: list[str]) -> None:
        if self.isa == "amx" and SETTINGS_KEY in (self.vllm_config.additional_config or {}):
            self.isa = "vec"
        choose(self, layer_names)

    Builder._set_isa_to_layers = without_amx
