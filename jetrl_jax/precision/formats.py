"""The number formats, and the flows made of them: the format of each product of a linear layer; imports no
jax.

`FORMATS` is an open set: readers of a plan ask a format for its blocks, or whether it has any, and not for
  its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Blocks(NamedTuple):
    """Shapes of the blocks of a quantised format that share a scale, as [rows,
    columns] of a product's operand.
    """

    activation: tuple[int, int]  # X, and dY in DGrad: along the contraction
    weight: tuple[int, int]
    token: tuple[int, int]  # WGrad's operands: along tokens, which it contracts


@dataclass(frozen=True)
class Format:
    """How numbers are stored: as values of `dtype`, or, with `blocks`,
    as codes of it with one scale for each block.
    """

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

    value: of activations between operations, of parameters that no linear layer multiplies, and of keys and
        values: in the trainer's attention and in the cache alike, since exactness needs both rounded in the
          same way.  Never quantised.
    """

    rollout: Format
    fprop: Format
    dgrad: Format
    wgrad: Format
    value: Format = BF16

    @property
    def products(self) -> dict[str, Format]:
        """Site -> format of each product."""
        return {site: fmt for site, fmt in self._asdict().items() if site != "value"}

    @property
    def quantized(self) -> bool:
        """Whether any product multiplies codes."""
        return any(fmt.quantized for fmt in self)

    def uniform(self, fmt: Format) -> Flow:
        """Every product in one format, the values as here."""
        return Flow(fmt, fmt, fmt, fmt, self.value)


PRESETS: dict[str, Flow] = {
    "fp32": Flow(FP32, FP32, FP32, FP32, FP32),
    "bf16": Flow(BF16, BF16, BF16, BF16),
    "fp16": Flow(FP16, FP16, FP16, FP16, FP16),
    "fp8_unified": Flow(FP8, FP8, FP8, FP8),
    "fp8_forward": Flow(FP8, FP8, BF16, BF16),
    "fp8_rollout_only": Flow(FP8, BF16, BF16, BF16),
}
# how the path of a linear layer's weight ends, and no other path: `models.anatomy` has the names
LINEAR = "_proj.weight"
