"""The header of a safetensors file, checked in full, and its tensors one at a time, as numpy without torch.

    file = u64 header length (little endian) · JSON header · data
    header = {name: {dtype, shape, data_offsets}}

The library's numpy reader knows neither bfloat16 nor float8, so the header is parsed here; writing is left to
the library. Every rule of the format is checked before a byte of data is used: length, JSON, duplicate names,
known dtypes, sizes, and offsets that cover the data exactly once. Source: the format section of the
safetensors README.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jetrl_jax.errors import UserError

_HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
# dtype -> (bytes an element, numpy dtype where this project reads it)
_DTYPES: dict[str, tuple[int, Any]] = {
    "BOOL": (1, np.dtype(np.bool_)),
    "U8": (1, np.dtype(np.uint8)),
    "I8": (1, np.dtype(np.int8)),
    "U16": (2, np.dtype("<u2")),
    "I16": (2, np.dtype("<i2")),
    "U32": (4, np.dtype("<u4")),
    "I32": (4, np.dtype("<i4")),
    "U64": (8, np.dtype("<u8")),
    "I64": (8, np.dtype("<i8")),
    "F8_E4M3": (1, np.dtype(ml_dtypes.float8_e4m3fn)),
    "F8_E5M2": (1, np.dtype(ml_dtypes.float8_e5m2)),
    "F16": (2, np.dtype("<f2")),
    "BF16": (2, np.dtype(ml_dtypes.bfloat16)),
    "F32": (4, np.dtype("<f4")),
    "F64": (8, np.dtype("<f8")),
}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: its file, safetensors dtype name, shape, and absolute byte range in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin_byte: int
    end_byte: int

    def read(self) -> np.ndarray:
        """The tensor in its stored dtype, a fresh array of ``shape``.
        Raises UserError if the file shrank since.
        """
        raw = np.fromfile(self.file, np.uint8, self.end_byte - self.begin_byte, offset=self.begin_byte)
        if raw.size != self.end_byte - self.begin_byte:
            raise UserError(
                f"StoredTensor.read: file shrank while it was read: got {raw.size} bytes of {self.name} "
                f"in {self.file}"
            )
        return raw.view(_DTYPES[self.dtype][1]).reshape(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """{name: StoredTensor} of a safetensors file, in file order; reads the header only.

    Raises UserError naming the file and the broken rule.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length_bytes = stream.read(8)
        if len(length_bytes) < 8:
            raise _broken(file, f"got {size} bytes, expected at least 8")
        length = int.from_bytes(length_bytes, "little")
        if length_bytes == b"version ":
            raise _broken(file, "got a Git LFS pointer instead of the data. Fetch it with `git lfs pull`")
        if length > min(_HEADER_LIMIT_BYTES, size - 8):
            raise _broken(
                file,
                f"got a header of {length} bytes in a file of {size} bytes; it is truncated or no "
                "safetensors file",
            )
        text = stream.read(length)
    header = parse_json(text, f"header of {file}")
    header.pop("__metadata__", None)
    data_start = 8 + length
    tensors = [_stored(file, name, entry, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.begin_byte, tensor.end_byte))
    position = data_start
    for tensor in tensors:
        if tensor.begin_byte != position:
            kind = (
                "overlaps the tensor before it" if tensor.begin_byte < position else "leaves a hole before it"
            )
            begin, expected = tensor.begin_byte - data_start, position - data_start
            raise _broken(
                file, f"{tensor.name} {kind}: got data_offsets that begin at {begin}, expected {expected}"
            )
        position = tensor.end_byte
    if position != size:
        raise _broken(
            file, f"the header describes {position} bytes, the file has {size}; it is truncated or damaged"
        )
    return {tensor.name: tensor for tensor in tensors}


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object, refusing duplicate keys at any depth. Raises UserError naming ``what``."""

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


def _stored(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _broken(file, f"{name}: got entry {entry!r}, expected the keys dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _broken(file, f"{name}: got unknown dtype {dtype!r}, expected one of {list(_DTYPES)}")
    if not _are_counts(shape):
        raise _broken(file, f"{name}: got shape {shape!r}, expected a list of non-negative integers")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _broken(file, f"{name}: got data_offsets {offsets!r}, expected two non-negative integers")
    needed = prod(shape) * _DTYPES[dtype][0]
    if offsets[1] - offsets[0] != needed:
        raise _broken(
            file, f"{name}: got data_offsets {offsets}, expected {needed} bytes for {dtype} of shape {shape}"
        )
    return StoredTensor(name, file, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value
    )


def _broken(file: Path, why: str) -> UserError:
    return UserError(f"read_header: damaged safetensors file {os.fspath(file)}: {why}")
