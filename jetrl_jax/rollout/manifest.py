"""The manifest of a policy version: name, shape, dtype and hash of every tensor.

    sha256 of the tensor's contiguous little-endian bytes, one per tensor

Both sides of a weight sync compute it.  The trainer sends a manifest with the weights, and the engine checks
the weights against it before it applies them.  Afterwards the engine reports a manifest of the tensors that
it holds, which the trainer compares with its own (the parity certificate).  Imports neither jax nor torch,
since engine processes import it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its shape, numpy's name of the dtype (such as float8_e4m3fn), and the hash of its bytes."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    size_bytes: int

    @classmethod
    def of(cls, shape: Iterable[int], dtype: str, data: Any) -> TensorEntry:
        """The entry of a tensor whose contiguous bytes are `data` (anything with the buffer protocol)."""
        view = memoryview(data)
        return cls(tuple(int(n) for n in shape), dtype, hashlib.sha256(view).hexdigest(), view.nbytes)


@dataclass(frozen=True)
class Manifest:
    """The tensors of one policy version, by checkpoint name."""

    policy_version: int
    entries: Mapping[str, TensorEntry]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Any]], version: int) -> Manifest:
        """The manifest of (name, array) pairs; an array is anything that `numpy.asarray` takes.

        Raises:
          ValueError: a name occurs twice.
        """
        entries: dict[str, TensorEntry] = {}
        for name, array in tensors:
            if name in entries:
                raise ValueError(
                    f"Manifest.of: a tensor stands twice: got name={name!r}, expected each once."
                )
            host = np.ascontiguousarray(np.asarray(array))
            entries[name] = TensorEntry.of(np.shape(array), host.dtype.name, host.reshape(-1).view(np.uint8))
        return cls(version, entries)

    @property
    def total_bytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(entry.size_bytes for entry in self.entries.values())

    def differences(self, other: Manifest) -> list[str]:
        """One line for each tensor that is missing in `other`, differs there, or is only there."""
        lines = [f"{name}: missing" for name in self.entries if name not in other.entries]
        lines += [f"{name}: not expected" for name in other.entries if name not in self.entries]
        for name in self.entries.keys() & other.entries.keys():
            mine, theirs = self.entries[name], other.entries[name]
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                lines.append(
                    f"{name}: got {theirs.dtype} {list(theirs.shape)}, expected {mine.dtype} "
                    f"{list(mine.shape)}"
                )
            elif mine.sha256 != theirs.sha256:
                lines.append(
                    f"{name}: other bytes, got sha256 {theirs.sha256[:12]}, expected {mine.sha256[:12]}"
                )
        return sorted(lines)

    def to_json(self) -> str:
        """The manifest as one JSON object; `from_json` reads it."""
        entries = {name: [list(e.shape), e.dtype, e.sha256, e.size_bytes] for name, e in self.entries.items()}
        return json.dumps({"policy_version": self.policy_version, "tensors": entries})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest in a text of `to_json`.

        Raises:
          ValueError: the text is not a manifest.
        """
        try:
            data = json.loads(text)
            entries = {
                name: TensorEntry(tuple(shape), dtype, sha256, size)
                for name, (shape, dtype, sha256, size) in data["tensors"].items()
            }
            return cls(int(data["policy_version"]), entries)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"Manifest.from_json: no manifest: {error}") from error
