"""Reads the tensors of a safetensors file, one at a time, as numpy arrays without torch.

The library checks a file's whole header before it gives a tensor.  Its numpy reader (0.8) knows bfloat16 but
not float8, so FP8 codes are read here, at the place given by the checked header.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jetrl_jax.errors import UserError


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: the file, the safetensors name of the dtype, and the shape."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """Reads the tensor into a new array of ``shape``, in its stored dtype.

        Raises UserError if the file was damaged after its header was read, or if numpy lacks the dtype.
        """
        with _opened(self.file) as tensors:
            if self.dtype == "F8_E4M3":
                return self._read_codes()
            try:
                return tensors.get_tensor(self.name)
            except AttributeError as error:  # numpy has no such dtype
                raise UserError(
                    f"StoredTensor.read: dtype that is not read: got {self.dtype} of {self.name} in "
                    f"{self.file}, expected F8_E4M3, BF16 or one of numpy's"
                ) from error

    def _read_codes(self) -> np.ndarray:
        with self.file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            begin, _ = json.loads(stream.read(length))[self.name]["data_offsets"]
        codes = np.fromfile(self.file, np.uint8, prod(self.shape), offset=8 + length + begin)
        return codes.view(ml_dtypes.float8_e4m3fn).reshape(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """{name: StoredTensor} of a safetensors file, in file order; reads the header only.

    Raises UserError naming the file and the broken rule.
    """
    with _opened(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.offset_keys()}
        return {
            name: StoredTensor(name, file, part.get_dtype(), tuple(part.get_shape()))
            for name, part in slices.items()
        }


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The library's view of a file, which is not mapped, as a mapped file that shrinks ends the process."""
    try:
        with safe_open(file, "numpy", backend="pread") as tensors:
            yield tensors
    except SafetensorError as error:
        with file.open("rb") as stream:
            is_pointer = stream.read(8) == b"version "
        hint = "it is truncated, damaged or no safetensors file"
        if is_pointer:
            hint = "it is a Git LFS pointer instead of the data. Fetch it with `git lfs pull`"
        raise UserError(f"read_header: damaged safetensors file {file}: {error}; {hint}") from error


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object without duplicate keys at any depth; raises UserError naming ``what``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"duplicate keys {sorted({key for key in keys if keys.count(key) > 1})}")
        return result

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"parse_json: {what} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"parse_json: {what} is no JSON object: got {type(value).__name__}")
    return value
