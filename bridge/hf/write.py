"""Writes a policy as a Hugging Face checkpoint directory, with rounded masters or published FP8 codes.

    config.json · generation_config.json · model.safetensors (or shards and their index) · the tokenizer's
    files

The files are written to a hidden sibling directory, flushed, read back and compared bit by bit.  Only then
are they renamed to their place, so that a kill at any moment leaves either no directory or a complete one.
Only one process may write a directory.  ``transformers.AutoModelForCausalLM.from_pretrained`` (4 and 5) and
vLLM can read the result.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from bridge.hf.config import to_hf
from bridge.hf.directory import Kind, write_json, written_directory
from bridge.hf.names import mismatches, name_map
from bridge.hf.read import INDEX_FILE, SINGLE_FILE, open_checkpoint, parameters_by_path
from bridge.hf.tensors import hf_tensors, quantization_config
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.precision.parameters import named_params
from pallas_kernels import ScaledArray

Tensor = tuple[str, Any, np.dtype]  # Hugging Face name, array (numpy or JAX), stored dtype

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
CHECKPOINT = Kind(
    (
        "config.json",
        "generation_config.json",
        "model*.safetensors",
        INDEX_FILE,
        "*token*.json",
        "vocab.*",
        "merges.txt",
        "*.model",
        "chat_template.*",
    ),
    "config.json",
)


class SavableTokenizer(Protocol):
    """A tokenizer that can write the files which transformers' AutoTokenizer reads."""

    def save(self, directory: str | Path) -> Any:
        """Writes the tokenizer's files into an existing directory."""


def decoder_parameters(decoder: nnx.Module) -> dict[str, Any]:
    """{parameter path: array} of a decoder, for ``save_checkpoint``; the arrays stay on their devices."""
    return {path: variable.get_value() for path, variable in parameters_by_path(decoder).items()}


def save_checkpoint(
    directory: str | Path,
    model_config: ModelConfig,
    params: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    tokenizer: SavableTokenizer | None = None,
    max_shard_bytes: int | float = 5e9,
    overwrite: bool = False,
) -> Path:
    """Writes ``params`` ({parameter path: numpy or JAX array}) as a checkpoint; returns the directory.

    Weights are rounded once, to nearest even, to ``dtype`` (bfloat16, float16 or float32).  They go into one
    file if all fit into ``max_shard_bytes``, else into shards of at most that size (a larger tensor gets its
    own shard).  ``overwrite`` replaces an earlier checkpoint as a whole; a directory with any other files is
    never replaced.

    Raises ValueError, listing all, if ``params`` are not exactly the model's or are non-finite in ``dtype``;
    UserError if the place is taken; RuntimeError if the files read back differently.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"save_checkpoint: unknown dtype: got dtype={dtype!r}, expected one of {list(DTYPES)}"
        )
    problems = mismatches(
        model_config, {path: tuple(np.shape(array)) for path, array in params.items()}, hf_names=False
    )
    if problems:
        raise ValueError("save_checkpoint: the parameters are not the model's:\n  " + "\n  ".join(problems))
    names = name_map(model_config)
    tensors = [(name, params[path], DTYPES[dtype]) for path, name in names.items()]
    return _save(
        directory,
        model_config,
        to_hf(model_config, dtype=dtype),
        tensors,
        tokenizer,
        max_shard_bytes,
        overwrite,
    )


def save_published(
    directory: str | Path,
    model_config: ModelConfig,
    published: nnx.State,
    *,
    tokenizer: SavableTokenizer | None = None,
    max_shard_bytes: int | float = 5e9,
    overwrite: bool = False,
) -> Path:
    """Writes published weights (`PrecisionPlan.publish`) as a block-FP8 checkpoint.

    vLLM, SGLang and transformers can read it.  Codes and scales are the trainer's own bytes
    (`bridge.hf.tensors`); every other tensor is BF16.  Arguments, files and errors as in `save_checkpoint`;
    also raises UserError if nothing is FP8, or if vLLM could not load the model's layers.
    """
    fp8 = [path for path, value in named_params(published) if isinstance(value, ScaledArray)]
    quantization = quantization_config(model_config, fp8)
    if quantization is None:
        raise UserError(
            "save_published: nothing to write in FP8: got a precision plan without an FP8 layer. "
            "Choose precision.preset."
        )
    tensors = [(name, array, np.dtype(array.dtype)) for name, array in hf_tensors(model_config, published)]
    config = to_hf(model_config, dtype="bfloat16") | {"quantization_config": quantization}
    return _save(directory, model_config, config, tensors, tokenizer, max_shard_bytes, overwrite)


def _save(
    directory: str | Path,
    model_config: ModelConfig,
    config: Mapping[str, Any],
    tensors: Sequence[Tensor],
    tokenizer: SavableTokenizer | None,
    max_shard_bytes: int | float,
    overwrite: bool,
) -> Path:
    if not max_shard_bytes > 0:
        raise ValueError(
            f"save_checkpoint: bad size: got max_shard_bytes={max_shard_bytes!r}, expected a positive number"
        )
    with written_directory(directory, CHECKPOINT, overwrite) as partial:
        write_json(partial / "config.json", config)
        write_json(partial / "generation_config.json", _generation_config(model_config))
        _write_weights(partial, tensors, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(partial)
        _verify(partial, model_config, tensors)
    return Path(os.path.abspath(user_path(directory)))


def _cast(array: Any, dtype: np.dtype) -> np.ndarray:
    """A contiguous host copy in ``dtype``; the library would ignore a strided array's strides."""
    host = np.asarray(array)
    if host.dtype != dtype:
        with np.errstate(over="ignore"):  # an overflow becomes inf and is reported with its name
            host = host.astype(np.float32).astype(dtype)
    return np.ascontiguousarray(host)


def _write_weights(directory: Path, tensors: Sequence[Tensor], max_shard_bytes: float) -> None:
    sizes = {name: int(np.prod(np.shape(array))) * dtype.itemsize for name, array, dtype in tensors}
    shards = _plan_shards(sizes, max_shard_bytes)
    by_name = {name: (array, dtype) for name, array, dtype in tensors}
    weight_map: dict[str, str] = {}
    non_finite: list[str] = []
    for number, names in enumerate(shards, start=1):
        file_name = (
            SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        arrays = {name: _cast(*by_name[name]) for name in names}
        non_finite += [
            name for name, array in arrays.items() if not np.isfinite(array.astype(np.float32)).all()
        ]
        if not non_finite:
            save_file(arrays, directory / file_name, metadata={"format": "pt"})
            # the library creates files that others cannot read
            shutil.copymode(directory / "config.json", directory / file_name)
        weight_map |= dict.fromkeys(arrays, file_name)
    if non_finite:
        raise ValueError(
            f"save_checkpoint: non-finite weights as they are stored: got {non_finite}, expected finite "
            "values"
        )
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(directory / INDEX_FILE, index)


def _plan_shards(sizes_bytes: Mapping[str, int], limit_bytes: float) -> list[list[str]]:
    """Consecutive groups of paths, each within the limit or with a single larger tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for path, size in sizes_bytes.items():
        if shards[-1] and filled + size > limit_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(path)
        filled += size
    return shards


def _verify(directory: Path, config: ModelConfig, tensors: Sequence[Tensor]) -> None:
    """Reads the directory back and compares configuration and bits."""
    written = open_checkpoint(directory)
    wrong = ["config.json"] if written.config != config else []
    stored = {tensor.name: tensor for tensor in (*written.tensors.values(), *written.scales.values())}
    for name, array, dtype in tensors:
        expected, got = _cast(array, dtype), stored[name].read()
        if got.dtype != expected.dtype or not np.array_equal(got.view(np.uint8), expected.view(np.uint8)):
            wrong.append(name)
    if wrong or len(stored) != len(tensors):
        raise RuntimeError(f"save_checkpoint: {directory} reads back differently: {wrong}")


def _generation_config(config: ModelConfig) -> dict[str, Any]:
    values = to_hf(config)
    return {
        key: values[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if values[key] is not None
    }
