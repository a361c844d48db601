"""Adapters as a directory of PEFT, which PEFT and vLLM load, and the other way round; without torch.

    adapter_config.json        rank, alpha, target modules, the base's directory
    adapter_model.safetensors  base_model.model.<Hugging Face's name>.lora_A.weight [r, in], .lora_B.weight
    jetrl_base.json            the SHA-256 of the base's files; PEFT and vLLM do not read it

The matrices are the FP32 masters.  A reader refuses everything but plain
LoRA of whole layers, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bridge.hf.directory import Kind, write_json, written_directory
from bridge.hf.names import to_hf_name
from bridge.hf.safetensors_file import parse_json, read_header
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.models.anatomy import MATRICES
from jetrl_jax.models.config import ModelConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_FILE = "jetrl_base.json"
ADAPTER = Kind((CONFIG_FILE, WEIGHTS_FILE, BASE_FILE, "README.md"), CONFIG_FILE)
PREFIX = "base_model.model."
_READ = ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "base_model_name_or_path")
# These describe the past of an adapter, or the settings of a feature that another key turns on.  Dropout was
# of its training: nothing here drops inputs, and a run that goes on from the adapter does not either.
_IGNORED = (
    "auto_mapping",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
)
# With another value of init_lora_weights PEFT changes the base when it loads an adapter, or reads settings of
# its own (eva).
_STARTS = (True, False, None, "gaussian", "orthogonal")
_OFF: tuple[Any, ...] = (None, False, "none", {}, [])
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class PeftAdapter:
    """Adapters of a policy.

    alpha, rslora: as `lora` in a run's config; targets: last names of the layers.
    base: the directory of the base, as the adapter's config names it.
    arrays: parameter path -> float32.
    base_files: the SHA-256 of each of the base's files; None if not known, as in a directory of PEFT.
    """

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...]
    base: str | None
    arrays: Mapping[str, np.ndarray]
    base_files: Mapping[str, str] | None = None


def peft_name(path: str) -> str:
    """PEFT's name of an adapter's matrix."""
    return PREFIX + to_hf_name(path)


def adapter_shapes(model: ModelConfig, rank: int, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """The shape of every adapter matrix of a model, by parameter path."""
    shapes = {}
    for layer in range(model.num_layers):
        for matrix in MATRICES:
            if matrix.name in targets:
                outputs, inputs = matrix.shape(model)
                shapes[f"layers.{layer}.{matrix.path}.lora_A.weight"] = (rank, inputs)
                shapes[f"layers.{layer}.{matrix.path}.lora_B.weight"] = (outputs, rank)
    return shapes


def adapter_config(adapter: PeftAdapter) -> dict[str, Any]:
    """The dictionary of an adapter's `adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha,
        "use_rslora": adapter.rslora,
        "target_modules": sorted(adapter.targets),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        "base_model_name_or_path": adapter.base,
    }


def save_adapter(directory: str | Path, adapter: PeftAdapter, *, overwrite: bool = False) -> Path:
    """Writes adapters as a directory of PEFT, whole or not at all; returns it.

    Raises:
      UserError: the place is taken.
      ValueError: a value is not finite.
    """
    tensors = {peft_name(path): np.ascontiguousarray(array) for path, array in adapter.arrays.items()}
    bad = [name for name, array in tensors.items() if not np.isfinite(array).all()]
    if bad:
        raise ValueError(f"save_adapter: non-finite values: got {bad}, expected finite ones.")
    with written_directory(directory, ADAPTER, overwrite) as partial:
        write_json(partial / CONFIG_FILE, adapter_config(adapter))
        if adapter.base_files is not None:
            write_json(partial / BASE_FILE, adapter.base_files)
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        (partial / WEIGHTS_FILE).chmod((partial / CONFIG_FILE).stat().st_mode)
    return user_path(directory)


def read_adapter_config(directory: str | Path) -> dict[str, Any]:
    """The config of a PEFT directory.

    Raises:
      UserError: there is none, or it describes another adapter than plain LoRA; every feature is named.
    """
    file = user_path(directory) / CONFIG_FILE
    if not file.is_file():
        raise UserError(
            f"read_adapter: no {CONFIG_FILE}: got {str(directory)!r}, expected a directory of PEFT."
        )
    values = parse_json(file.read_bytes(), str(file))
    problems = [
        f"{name}={values.get(name)!r}, expected {expected}"
        for name, holds, expected in (
            ("peft_type", values.get("peft_type") == "LORA", "LORA"),
            ("r", isinstance(values.get("r"), int) and values["r"] > 0, "a whole number from 1 on"),
            (
                "lora_alpha",
                isinstance(values.get("lora_alpha"), int | float) and values["lora_alpha"] > 0,
                "a number above 0",
            ),
            ("init_lora_weights", values.get("init_lora_weights") in _STARTS, "a start that leaves the base"),
        )
        if not holds
    ]
    problems += [
        f"{name}={value!r}, expected it off"
        for name, value in values.items()
        if name not in (*_READ, *_IGNORED, "init_lora_weights") and not any(value == off for off in _OFF)
    ]
    if problems:
        raise UserError(f"read_adapter: {file} is no plain LoRA: got {'; '.join(problems)}.")
    return values


def read_adapter(directory: str | Path, model: ModelConfig) -> PeftAdapter:
    """The adapters in a PEFT directory, for a model.

    Raises:
      UserError: as `read_adapter_config`; or the tensors are not those of whole layers of this model; all
        are listed.
    """
    values, root = read_adapter_config(directory), user_path(directory)
    if not (root / WEIGHTS_FILE).is_file():
        raise UserError(
            f"read_adapter: no {WEIGHTS_FILE}: got {str(root)!r}, expected them beside {CONFIG_FILE}."
        )
    found = read_header(root / WEIGHTS_FILE)
    names, known = values.get("target_modules"), [matrix.name for matrix in MATRICES]
    if not isinstance(names, list):  # a pattern: the tensors tell
        names = [name for name in known if any(f".{name}.lora_" in tensor for tensor in found)]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UserError(f"read_adapter: {root}: got target_modules={names}, expected some of {known}.")
    targets = tuple(name for name in known if name in names)
    shapes = adapter_shapes(model, values["r"], targets)
    expected = {peft_name(path): shape for path, shape in shapes.items()}
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    problems += [f"unmapped {name} {list(found[name].shape)}" for name in found if name not in expected]
    problems += [
        f"wrong shape {name}: got {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    problems += [
        f"wrong dtype {name}: got {tensor.dtype}, expected one of {list(_FLOATS)}"
        for name, tensor in found.items()
        if name in expected and tensor.dtype not in _FLOATS
    ]
    if problems:
        raise UserError(f"read_adapter: {root} does not fit the model:\n  " + "\n  ".join(problems))
    arrays = {path: found[peft_name(path)].read().astype(np.float32) for path in shapes}
    bad = [peft_name(path) for path, array in arrays.items() if not np.isfinite(array).all()]
    if bad:
        raise UserError(f"read_adapter: {root}: non-finite values: got {bad}, expected finite ones.")
    base = values.get("base_model_name_or_path")
    rslora = bool(values.get("use_rslora", False))
    of_base = root / BASE_FILE
    files = parse_json(of_base.read_bytes(), str(of_base)) if of_base.is_file() else None
    return PeftAdapter(values["r"], float(values["lora_alpha"]), rslora, targets, base, arrays, files)
