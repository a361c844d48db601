"""Number formats, and flows: the formats of the products of a linear layer; imports no jax.

`FORMATS` is an open set.  Code that reads a plan asks a format for its blocks, not for its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Blocks(NamedTuple):
    """Shapes of the blocks that share a scale in a quantised format, as [rows, columns] of an operand."""

    activation: tuple[int, int]  # X, and dY in DGrad: along the contraction
    weight: tuple[int, int]
    token: tuple[int, int]  # operands of WGrad: along tokens, the axis it contracts


@dataclass(frozen=True)
class Format:
    """How numbers are stored: values of `dtype` or, with `blocks`, codes of `dtype` and one scale a block."""

    name: str
    dtype: str
    blocks: Blocks | None = None

    @property
    def quantized(self) -> bool:
        """Whether values are codes with scales."""
        return self.blocks is not None


FP8_BLOCKS = Blocks(activation=(1, 128), weight=(128, 128), token=(128, 1))
FP32, BF16, FP16 = Format("fp32", "float32"), Format("bf16", "bfloat16"), Format("fp16", "float16")
FP8 = Format("fp8", "float8_e4m3fn", FP8_BLOCKS)
FORMATS: dict[str, Format] = {known.name: known for known in (FP32, BF16, FP16, FP8)}


class Flow(NamedTuple):
    """The format of each product of a linear layer, and of everything between the products.

    value: the format of activations between operations, of parameters that no linear layer multiplies, and of
        keys and values.  The trainer's attention and the cache both use it, since exactness needs keys and
        values rounded alike.  Never quantised.
    """

    rollout: Format
    fprop: Format
    dgrad: Format
    wgrad: Format
    value: Format = BF16

    @property
    def products(self) -> dict[str, Format]:
        """The format of each product, by site."""
        return {site: fmt for site, fmt in self._asdict().items() if site != "value"}

    @property
    def quantized(self) -> bool:
        """Whether any product multiplies codes."""
        return any(fmt.quantized for fmt in self)

    def uniform(self, fmt: Format) -> Flow:
        """This flow with every product in one format; `value` is kept."""
        return Flow(fmt, fmt, fmt, fmt, self.value)


PRESETS: dict[str, Flow] = {
    "fp32": Flow(FP32, FP32, FP32, FP32, FP32),
    "bf16": Flow(BF16, BF16, BF16, BF16),
    "fp16": Flow(FP16, FP16, FP16, FP16, FP16),
    "fp8_unified": Flow(FP8, FP8, FP8, FP8),
    "fp8_forward": Flow(FP8, FP8, BF16, BF16),
    "fp8_rollout_only": Flow(FP8, BF16, BF16, BF16),
}
# Exactly the paths of linear layers' weights end so; `models.anatomy` has the names.
LINEAR = "_proj.weight"


ADAPTER = (".lora_A.weight", ".lora_B.weight")


def is_adapter(path: str) -> bool:
    """Whether a path, or a tensor's name in PEFT, is that of one of an adapter's two matrices."""
    return path.endswith(ADAPTER)


def is_kv_scale(path: str) -> bool:
    """Whether a path, or Hugging Face's name, is that of a scale of keys, values or queries."""
    return path.endswith(("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale"))
