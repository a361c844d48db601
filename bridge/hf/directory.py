"""Directories whose files appear together or not at all, so that a kill leaves no half of one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError


@dataclass(frozen=True)
class Kind:
    """A kind of directory.

    files: patterns of the only files that an earlier one may have to be replaced; marker: the one that it
      must have.
    """

    files: tuple[str, ...]
    marker: str


@contextlib.contextmanager
def written_directory(directory: str | Path, kind: Kind, overwrite: bool) -> Iterator[Path]:
    """An empty directory whose files come to `directory` together, at the end, or not at all."""
    target = Path(os.path.abspath(user_path(directory)))
    check_place(target, kind, overwrite)
    partial = _sibling(target, "partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        _flush(partial)
        _move_into_place(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file with sorted keys."""
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sibling(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}")


def check_place(target: Path, kind: Kind, overwrite: bool) -> None:
    """Raises UserError if a directory cannot be written there."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir() or not overwrite:
        raise UserError(
            f"save_checkpoint: the place is taken: got directory={str(target)!r}, expected an empty "
            "directory, or overwrite"
        )
    foreign = sorted(
        p.name for p in target.iterdir() if p.is_dir() or not any(p.match(pattern) for pattern in kind.files)
    )
    if foreign or not (target / kind.marker).is_file():
        why = f"it also holds {foreign}" if foreign else f"it has no {kind.marker}"
        raise UserError(
            f"save_checkpoint: will not replace {str(target)!r}: {why}, expected only a checkpoint's files"
        )


def _flush(directory: Path) -> None:
    """Flushes files and directory entries to disk before the rename makes them visible."""
    for path in [*(p for p in directory.rglob("*")), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _move_into_place(partial: Path, target: Path) -> None:
    """Renames the new directory to its place.

    An earlier checkpoint is moved aside first.  It is deleted afterwards, or moved back if the rename fails.
    """
    old = _sibling(target, "old")
    if target.exists():
        if old.exists():
            shutil.rmtree(old)
        target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    _flush_directory(target.parent)
    if old.exists():
        shutil.rmtree(old)


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
