"""The bijection between this project's parameter paths and Hugging Face's tensor names, with every shape.

A parameter path is the '.'-joined path of an ``nnx.Param`` in the decoder, ``layers.0.mlp.up_proj.weight``.
The decoder keeps Hugging Face's own names and its ``[out, in]`` layout, so an invertible rename suffices:

    hf_name = "model." + path        for every path except lm_head.weight, which keeps its name

No tensor is transposed, split or merged. A tied model has no ``lm_head.weight`` on either side.
"""

from __future__ import annotations

from collections.abc import Mapping

from jetrl_jax.models import anatomy
from jetrl_jax.models.config import ModelConfig

Shape = tuple[int, ...]

_PREFIX = "model."
_HEAD = f"{anatomy.HEAD}.weight"


def to_hf_name(path: str) -> str:
    """The Hugging Face tensor name of a parameter path."""
    return path if path == _HEAD else _PREFIX + path


def from_hf_name(hf_name: str) -> str | None:
    """The parameter path of a Hugging Face tensor name; None if no parameter has this name."""
    if hf_name == _HEAD:
        return hf_name
    path = hf_name.removeprefix(_PREFIX)
    return None if path in (hf_name, _HEAD) else path


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter path of the model with its shape, embedding first, head last.

    Weights are [out, in]; V = vocab_size, D = hidden_size, F = intermediate_size, H = head_dim.
    """
    shapes: dict[str, Shape] = {f"{anatomy.EMBEDDING}.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {
            f"layers.{layer}.{name}": shape for name, shape in anatomy.parameter_shapes(config).items()
        }
    shapes[f"{anatomy.FINAL_NORM}.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def name_map(config: ModelConfig) -> dict[str, str]:
    """{parameter path: Hugging Face name} of the whole model, in the order of ``parameter_shapes``."""
    return {path: to_hf_name(path) for path in parameter_shapes(config)}


def mismatches(config: ModelConfig, found: Mapping[str, Shape], *, hf_names: bool) -> list[str]:
    """One line for each difference between ``found`` (name -> shape) and the model's tensors.

    ``hf_names``: whether ``found`` has Hugging Face's names (else parameter paths).  An empty list means that
    ``found`` is exactly the model.
    """
    expected = {
        to_hf_name(path) if hf_names else path: shape for path, shape in parameter_shapes(config).items()
    }
    lines = [
        f"missing {name}: expected shape {list(shape)}"
        for name, shape in expected.items()
        if name not in found
    ]
    for name, shape in found.items():
        if name not in expected:
            lines.append(f"unmapped {name}: got shape {list(shape)}, the model has no such parameter")
        elif tuple(shape) != expected[name]:
            lines.append(f"wrong shape {name}: got {list(shape)}, expected {list(expected[name])}")
    return lines
