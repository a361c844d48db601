"""The list of matrices and norms of a decoder layer, and how devices can split them; imports no jax.

The decoder is built from this list; names, shapes, fused layers, split axes and rules are derived from it.  A
path is that of a module within its layer ("self_attn.q_proj"), with Hugging Face's name.  A matrix is
[outputs, inputs].
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, Protocol

from jetrl_jax.models.config import ModelConfig
from jetrl_jax.precision.formats import FP8_BLOCKS

EMBEDDING, HEAD, FINAL_NORM = "embed_tokens", "lm_head", "norm"  # the modules outside the layers
FEWEST_LAYERS = 4  # of a policy with a draft head: three different layers after the first
BLOCK = FP8_BLOCKS.weight[0]
Axis = Literal["hidden", "heads", "kv_heads", "inner"]


class _Sizes(Protocol):
    """The numbers that determine a layer's shapes, in a `ModelConfig` or a section of the config."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def features(axis: Axis, sizes: _Sizes) -> int:
    """The number of features along an axis of a matrix."""
    return {
        "hidden": sizes.hidden_size,
        "heads": sizes.num_heads * sizes.head_dim,
        "kv_heads": sizes.num_kv_heads * sizes.head_dim,
        "inner": sizes.intermediate_size,
    }[axis]


@dataclass(frozen=True)
class Matrix:
    """A linear layer y = x W^T + b.

    path: path of its module.
    outputs, inputs: the axes of W.
    reads: the modules that make x, feature by feature; matrices that read the same x share its codes.
    fused_as: the module of vLLM in which it is multiplied.
    bias: the field of the model's config that decides whether b exists; None: never.
    """

    path: str
    outputs: Axis
    inputs: Axis
    reads: tuple[str, ...]
    fused_as: str
    bias: Literal["attention_bias", "o_proj_bias"] | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit(".", 1)[-1]

    @property
    def split_input(self) -> bool:
        """Whether each device has only a part of x if devices split the layer (outputs of other matrices)."""
        return any(isinstance(PARTS[path], Matrix) for path in self.reads)

    def shape(self, sizes: _Sizes) -> tuple[int, int]:
        """The shape [outputs, inputs] in features."""
        return features(self.outputs, sizes), features(self.inputs, sizes)

    def has_bias(self, config: ModelConfig) -> bool:
        """Whether b exists in this model."""
        return {None: False, "attention_bias": config.attention_bias, "o_proj_bias": config.o_proj_bias}[
            self.bias
        ]

    def unit(self, head_dim: int, *, blocks: bool) -> int:
        """The number of outputs that stay on one device: a head and, with `blocks`, a block of scales."""
        return math.lcm(head_dim if self.outputs in ("heads", "kv_heads") else 1, BLOCK if blocks else 1)


@dataclass(frozen=True)
class Norm:
    """An RMSNorm with one weight per feature, whole on every device.

    of_heads: whether it norms each head, so that a device applies it only to its own heads.
    """

    path: str
    of_heads: bool = False


_PARTS: tuple[Matrix | Norm, ...] = (
    Norm("input_layernorm"),
    Matrix(
        "self_attn.q_proj", "heads", "hidden", ("input_layernorm",), "self_attn.qkv_proj", "attention_bias"
    ),
    Matrix(
        "self_attn.k_proj", "kv_heads", "hidden", ("input_layernorm",), "self_attn.qkv_proj", "attention_bias"
    ),
    Matrix(
        "self_attn.v_proj", "kv_heads", "hidden", ("input_layernorm",), "self_attn.qkv_proj", "attention_bias"
    ),
    Matrix("self_attn.o_proj", "hidden", "heads", ("self_attn.q_proj",), "self_attn.o_proj", "o_proj_bias"),
    Norm("self_attn.q_norm", of_heads=True),
    Norm("self_attn.k_norm", of_heads=True),
    Norm("post_attention_layernorm"),
    Matrix("mlp.gate_proj", "inner", "hidden", ("post_attention_layernorm",), "mlp.gate_up_proj"),
    Matrix("mlp.up_proj", "inner", "hidden", ("post_attention_layernorm",), "mlp.gate_up_proj"),
    Matrix("mlp.down_proj", "hidden", "inner", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
)
PARTS = {part.path: part for part in _PARTS}
MATRICES = tuple(part for part in _PARTS if isinstance(part, Matrix))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of one layer, by path within the layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in _PARTS:
        if isinstance(part, Matrix):
            shapes[f"{part.path}.weight"] = part.shape(config)
            if part.has_bias(config):
                shapes[f"{part.path}.bias"] = part.shape(config)[:1]
        elif config.qk_norm or not part.of_heads:
            shapes[f"{part.path}.weight"] = (config.head_dim if part.of_heads else config.hidden_size,)
    return shapes


def fused_groups() -> tuple[tuple[Matrix, ...], ...]:
    """The groups of matrices that vLLM multiplies as one, in order."""
    groups: dict[str, list[Matrix]] = {}
    for matrix in MATRICES:
        groups.setdefault(matrix.fused_as, []).append(matrix)
    return tuple(map(tuple, groups.values()))


def part_of(path: str) -> Matrix | Norm | None:
    """The part of a layer that has a parameter ('layers.0.self_attn.q_proj.weight'); None outside layers."""
    found = re.fullmatch(r"layers\.\d+\.(.+)\.(?:weight|bias)", path)
    return PARTS.get(found[1]) if found else None


def read_by(path: str) -> list[str]:
    """The weights of the matrices that read the outputs of this matrix, and are split like them."""
    part = part_of(path)
    if part is None:
        return []
    return [path.replace(part.path, matrix.path) for matrix in MATRICES if part.path in matrix.reads]


def shard_axis(shape: tuple[int, ...], degree: int, fp8: bool) -> int | None:
    """The first axis of a matrix that `degree` devices can split without cutting a block of its scales.

    None if there is none, for vectors, and at degree 1.
    """
    if degree == 1 or len(shape) != 2:
        return None
    unit = BLOCK if fp8 else 1
    return next((axis for axis, size in enumerate(shape) if size % (degree * unit) == 0), None)


def fitting_degrees(shape: tuple[int, ...], fp8: bool, most: int = 64) -> list[int]:
    """The degrees up to `most` that can split a matrix over "fsdp"."""
    return [
        degree for degree in range(1, most + 1) if degree == 1 or shard_axis(shape, degree, fp8) is not None
    ]


def fitting_tensor_degrees(features: int, unit: int, most: int = 64) -> list[int]:
    """The degrees up to `most` that split `features` outputs into whole units (heads, blocks, rows)."""
    return [degree for degree in range(1, most + 1) if features % (degree * unit) == 0 or degree == 1]
