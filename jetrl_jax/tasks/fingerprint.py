"""Hashes of a task's data, by which a resume on other data is refused and the differing part is named.

    {"name", "verifier", "train": {"examples", "prompts", "answers", "solutions", "metadata"}, "eval": {...}}

All examples of a list are hashed, in order.  Only a spread of examples is hashed in a split that is generated
on access (`LazyExamples`, a function of config and seed, which a resume compares too), and in a sequence of a
user's own class with more than `WHOLE` examples.  Values are hashed by type and content, never by address or
by the order of a set, so that the same data gives the same hash in every process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jetrl_jax.tasks.base import Example, LazyExamples, Task

SPREAD = 64  # number of examples hashed in a split that is generated on access
# a sequence of an unknown class is hashed whole up to this length
WHOLE = 100_000
_COLUMNS: dict[str, Callable[[Example], Any]] = {
    "prompts": lambda example: example.prompt,
    "answers": lambda example: example.answer,
    "solutions": lambda example: example.solution,
    "metadata": lambda example: example.metadata,
}


def data_fingerprint(task: Task) -> dict[str, Any]:
    """The hashes of a task, as described above, as JSON values."""
    splits = {name: _split(examples) for name, examples in (("train", task.train), ("eval", task.eval))}
    return {"name": task.name, "verifier": _verifier_name(task), **splits}


def sha256_of(file: Path) -> str:
    """The hash of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _split(examples: Sequence[Example]) -> dict[str, Any]:
    digests = {name: hashlib.sha256() for name in _COLUMNS}
    for example in _looked_at(examples):
        for name, read in _COLUMNS.items():
            part = _canonical(read(example))
            digests[name].update(b"%d:" % len(part) + part)
    return {"examples": len(examples), **{name: digest.hexdigest()[:32] for name, digest in digests.items()}}


def _looked_at(examples: Sequence[Example]) -> Iterator[Example]:
    count, listed = len(examples), isinstance(examples, list | tuple)
    if listed or (count <= WHOLE and not isinstance(examples, LazyExamples)):
        return (examples[index] for index in range(count))
    return (examples[int(index)] for index in np.unique(np.linspace(0, count - 1, SPREAD).astype(int)))


def _verifier_name(task: Task) -> str:
    """The name of the verifier, else of its class or function; its code is not hashed."""
    named = getattr(task, "verifier_name", None)
    if isinstance(named, str):
        return named
    maker = getattr(task, "verifier", None)
    verifier = maker() if callable(maker) else task.verify
    return str(getattr(verifier, "__qualname__", type(verifier).__qualname__))


def _canonical(value: Any) -> bytes:
    """Bytes that are the same in every process for equal values of a type."""
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes | bytearray | memoryview):
        return b"b" + bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"i{value:x}".encode()  # Python refuses to write decimal numbers of more than 4,300 digits
    if value is None or isinstance(value, bool | float):
        return f"{type(value).__name__} {value!r}".encode()
    if isinstance(value, Mapping):
        pairs = sorted((_canonical(key), _canonical(item)) for key, item in value.items())
        return b"d" + _joined(part for pair in pairs for part in pair)
    if isinstance(value, list | tuple):
        return b"l" + _joined(_canonical(item) for item in value)
    if isinstance(value, set | frozenset):
        return b"e" + _joined(sorted(_canonical(item) for item in value))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return b"a" + _canonical(value.tolist())
    if isinstance(value, np.ndarray | np.generic):
        return f"a{value.dtype.str}{value.shape}".encode() + value.tobytes()
    # Dates, decimals and dataclasses by their repr; addresses in the repr of other objects are removed.
    return f"o{type(value).__qualname__} {re.sub(r' at 0x[0-9a-f]+', '', repr(value))}".encode(
        "utf-8", "surrogatepass"
    )


def _joined(parts: Any) -> bytes:
    return b"".join(b"%d:" % len(part) + part for part in parts)
