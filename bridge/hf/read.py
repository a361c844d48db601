"""Reads a Hugging Face checkpoint directory into float32 master weights, one tensor at a time, without torch.

    config.json · [generation_config.json] · model.safetensors | model.safetensors.index.json + its shards

BF16, FP16 and FP32 tensors become float32 exactly.  A block-FP8 weight (``X.weight`` E4M3 with
``X.weight_scale_inv``, the form of Qwen3-8B-FP8) becomes its product with its scales, rounded once to
float32, or stays codes and scales (`Checkpoint.quantized`).  The end-of-sequence ids are those of
``generation_config.json`` if it has them, as in transformers and vLLM, else those of ``config.json``.

One error lists every missing, unmapped, wrong-shaped, wrongly typed or non-finite tensor; nothing is guessed
or silently skipped.  Two leftovers of old checkpoints are accepted because they contain no information:
``rotary_emb.inv_freq`` buffers, and a stored head of a tied model that equals the embedding bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bridge.hf.config import from_hf
from bridge.hf.names import mismatches, name_map
from bridge.hf.safetensors_file import StoredTensor, parse_json, read_header
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.precision.formats import FP8_BLOCKS
from pallas_kernels import ScaledArray

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MASTER_DTYPES = ("BF16", "F16", "F32")
SCALE_SUFFIX = "_scale_inv"
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(FP8_BLOCKS.weight),
}
_FIELDS_THAT_MAY_DIFFER = ("max_position_embeddings", "eos_token_ids", "bos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory with valid names, shapes and dtypes; no tensor is read yet."""

    directory: Path
    config: ModelConfig
    tensors: dict[str, StoredTensor]  # by parameter path
    # by parameter path, for block-FP8 weights
    scales: dict[str, StoredTensor] = field(default_factory=dict)

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (parameter path, float32 array); raises UserError at the end if any is not finite."""
        non_finite = []
        for path, stored in self.tensors.items():
            array = stored.read().astype(np.float32)
            if path in self.scales:
                array *= _spread(self._scale(path), array.shape)
            if not np.isfinite(array).all():
                non_finite.append(stored.name)
            yield path, array
        if non_finite:
            raise UserError(
                f"Checkpoint.arrays: non-finite weights: got {non_finite} in {self.directory}, expected "
                "finite values"
            )

    def quantized(self, path: str) -> ScaledArray:
        """The stored codes and scales of a block-FP8 weight.

        Raises KeyError if ``path`` is not such a weight, UserError for a code that is NaN or a scale that is
        not positive and finite.
        """
        codes, scale = self.tensors[path].read(), self._scale(path)
        if not (np.isfinite(codes.astype(np.float32)).all() and np.isfinite(scale).all()):
            raise UserError(
                f"Checkpoint.quantized: non-finite weights: got {self.tensors[path].name} in {self.directory}"
            )
        return ScaledArray(jnp.asarray(codes), jnp.asarray(scale), FP8_BLOCKS.weight)

    def _scale(self, path: str) -> np.ndarray:
        scale = self.scales[path].read().astype(np.float32)
        if (scale <= 0).any():
            raise UserError(
                f"Checkpoint: bad scales: got {self.scales[path].name} with {scale.min():g}, expected "
                "positive numbers"
            )
        return scale


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Checks a checkpoint directory without reading its weights.

    Raises UserError for a damaged file, for an unsupported architecture, and for tensors that do not fit the
    model, all in one message.
    """
    root = user_path(directory)
    if not root.is_dir():
        raise UserError(
            f"open_checkpoint: no such directory: got {str(root)!r}, expected a Hugging Face checkpoint "
            "directory"
        )
    config, quantized = _read_config(root)
    found = _stored_tensors(root)
    found = {name: tensor for name, tensor in found.items() if not name.endswith(".rotary_emb.inv_freq")}
    head = found.get("lm_head.weight")
    if config.tie_word_embeddings and head is not None and "model.embed_tokens.weight" in found:
        if _same_values(head, found["model.embed_tokens.weight"]):
            del found["lm_head.weight"]
        else:
            raise UserError(
                f"open_checkpoint: tied model with a head of its own: got lm_head.weight in {head.file} "
                "that differs from "
                "model.embed_tokens.weight while config.json says tie_word_embeddings: true, expected "
                "one of the two to hold"
            )
    scales = {
        name.removesuffix(SCALE_SUFFIX): tensor
        for name, tensor in found.items()
        if name.endswith(SCALE_SUFFIX)
    }
    found = {name: tensor for name, tensor in found.items() if not name.endswith(SCALE_SUFFIX)}
    problems = mismatches(config, {name: tensor.shape for name, tensor in found.items()}, hf_names=True)
    problems += [
        problem
        for name, tensor in found.items()
        if (problem := _dtype_problem(name, tensor, scales.get(name), quantized))
    ]
    problems += [
        f"unmapped {name}{SCALE_SUFFIX}: it scales no tensor of the checkpoint"
        for name in scales
        if name not in found
    ]
    if problems:
        raise UserError(
            f"open_checkpoint: {root} does not hold the model that its config.json describes:\n  "
            + "\n  ".join(problems)
        )
    names = name_map(config)
    stored_scales = {path: scales[name] for path, name in names.items() if name in scales}
    return Checkpoint(root, config, {path: found[name] for path, name in names.items()}, stored_scales)


def _dtype_problem(
    name: str, tensor: StoredTensor, scale: StoredTensor | None, quantized: bool
) -> str | None:
    """The problem with a tensor's dtype or its scales, or None."""
    if tensor.dtype != "F8_E4M3":
        if scale is not None:
            return f"wrong dtype {name}: got {tensor.dtype} with scales, expected F8_E4M3"
        return (
            None
            if tensor.dtype in _MASTER_DTYPES
            else f"wrong dtype {name}: got {tensor.dtype}, expected one of {list(_MASTER_DTYPES)}"
        )
    if not quantized:
        return f"wrong dtype {name}: got F8_E4M3, but config.json has no quantization_config"
    if len(tensor.shape) != len(FP8_BLOCKS.weight):
        return (
            f"wrong dtype {name}: got F8_E4M3 of shape {list(tensor.shape)}, expected a matrix: "
            f"blocks are {list(FP8_BLOCKS.weight)}"
        )
    grid = tuple(-(-size // block) for size, block in zip(tensor.shape, FP8_BLOCKS.weight, strict=False))
    if scale is None:
        return f"missing {name}{SCALE_SUFFIX}: expected shape {list(grid)}"
    if scale.shape != grid or scale.dtype not in ("F32", "BF16"):
        return (
            f"wrong scales {name}{SCALE_SUFFIX}: got {scale.dtype} {list(scale.shape)}, expected F32 "
            f"or BF16 {list(grid)}"
        )
    return None


def _spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The scale of each element of a weight of this shape."""
    rows, columns = (np.arange(size) // block for size, block in zip(shape, FP8_BLOCKS.weight, strict=True))
    return scale[rows[:, None], columns[None, :]]


def read_config(directory: str | Path) -> ModelConfig:
    """The architecture in a directory's ``config.json``, with the EOS ids of ``generation_config.json``."""
    return _read_config(user_path(directory))[0]


def _read_config(root: Path) -> tuple[ModelConfig, bool]:
    """(configuration, whether weights are block FP8)."""
    if not (root / "config.json").is_file():
        raise UserError(
            f"read_config: no config.json: got {str(root)!r}, expected a Hugging Face checkpoint directory"
        )
    values = parse_json((root / "config.json").read_bytes(), str(root / "config.json"))
    generation = root / "generation_config.json"
    if generation.is_file():
        eos = parse_json(generation.read_bytes(), str(generation)).get("eos_token_id")
        if eos is not None:
            values["eos_token_id"] = eos
    quantization = values.pop("quantization_config", None)
    if quantization is not None:
        stated = quantization if isinstance(quantization, dict) else {}
        # Qwen's own files have no fmt, since there is only one.
        wrong = [
            f"{key}={stated.get(key)!r}, expected {value!r}"
            for key, value in _FP8.items()
            if stated.get(key, _FP8["fmt"]) != value
        ]
        if wrong:
            raise UserError(
                f"{root / 'config.json'}: quantization_config of a kind that is not read: got "
                f"{'; '.join(wrong)}"
            )
    try:
        return from_hf(values), quantization is not None
    except UserError as error:
        raise UserError(f"{root / 'config.json'}: {error}") from error


def load_checkpoint(directory: str | Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """The model's configuration and {parameter path: float32 numpy array}.

    Raises UserError as ``open_checkpoint`` and ``Checkpoint.arrays`` do.
    """
    checkpoint = open_checkpoint(directory)
    return checkpoint.config, dict(checkpoint.arrays())


def read_into(decoder: nnx.Module, directory: str | Path, on_host: Any = None) -> ModelConfig:
    """Fills a decoder's float32 parameters in place from a checkpoint directory, each on its own devices.

    on_host: a dtype in which they stay on the host, as numpy arrays, for a base that is published once.

    Only one tensor is in host memory at a time.  Returns the checkpoint's configuration.  Raises UserError if
    the directory is damaged or describes another model than ``decoder.config`` (no parameter has changed
    then), or if weights are non-finite (the decoder then contains them).
    """
    checkpoint = open_checkpoint(directory)
    config: ModelConfig = decoder.config  # type: ignore[attr-defined]
    wanted, found = (
        replace(c, **{name: getattr(config, name) for name in _FIELDS_THAT_MAY_DIFFER})
        for c in (config, checkpoint.config)
    )
    differing = [
        f"{f.name}: got {getattr(found, f.name)!r}, expected {getattr(wanted, f.name)!r}"
        for f in fields(ModelConfig)
        if getattr(found, f.name) != getattr(wanted, f.name)
    ]
    if differing:
        raise UserError(
            f"read_into: {directory} holds another model than the decoder: " + "; ".join(differing)
        )
    parameters = parameters_by_path(decoder)
    for path, array in checkpoint.arrays():
        value = parameters[path].get_value()
        if on_host is not None:
            parameters[path].set_value(array.astype(on_host))
            continue
        placed = isinstance(value, jax.Array) and value.committed
        parameters[path].set_value(jax.device_put(array, value.sharding if placed else None))
    return checkpoint.config


def parameters_by_path(decoder: nnx.Module) -> dict[str, Any]:
    """{parameter path: nnx.Param} of a decoder; the values are the decoder's own variables, not copies."""
    return {
        ".".join(map(str, path)): variable
        for path, variable in nnx.iter_graph(decoder)
        if isinstance(variable, nnx.Param)
    }


def _stored_tensors(root: Path) -> dict[str, StoredTensor]:
    """{Hugging Face name: StoredTensor} of the single file or of all shards of the index."""
    single, index = root / SINGLE_FILE, root / INDEX_FILE
    if single.is_file() and index.is_file():
        raise UserError(
            f"open_checkpoint: ambiguous weights: got both {SINGLE_FILE} and {INDEX_FILE} in {root}, "
            "expected one of them"
        )
    if single.is_file():
        return read_header(single)
    if index.is_file():
        return _sharded_tensors(root, index)
    others = sorted(
        p.name for p in root.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors")
    )
    raise UserError(
        f"open_checkpoint: no weights: got {others} in {root}, expected {SINGLE_FILE} or {INDEX_FILE}"
    )


def _sharded_tensors(root: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = parse_json(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(
            f"open_checkpoint: damaged index {index}: got weight_map {weight_map!r}, expected tensor "
            "names with file names"
        )
    bad = sorted({repr(f) for f in weight_map.values() if not _is_plain_file_name(f)})
    if bad:
        raise UserError(
            f"open_checkpoint: damaged index {index}: got file names {', '.join(bad)}, expected plain "
            "*.safetensors names"
        )
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (root / shard).is_file()]
    if absent:
        raise UserError(f"open_checkpoint: missing shards: {root} lacks {absent}, which {INDEX_FILE} names")
    found: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for shard in shards:
        for name, tensor in read_header(root / shard).items():
            if weight_map.get(name) != shard:
                problems.append(f"{name} is stored in {shard}, but the index says {weight_map.get(name)}")
            else:
                found[name] = tensor
    problems += [
        f"{name} is not in {shard}, where the index says it is"
        for name, shard in weight_map.items()
        if name not in found
    ]
    if problems:
        raise UserError(f"open_checkpoint: {index} and its shards disagree:\n  " + "\n  ".join(problems))
    return found


def _is_plain_file_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not any(c in name for c in "/\\:\0")


def _same_values(a: StoredTensor, b: StoredTensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bool(np.array_equal(a.read().view(np.uint8), b.read().view(np.uint8)))
    )
