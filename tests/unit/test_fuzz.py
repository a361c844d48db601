"""The fuzzer itself, for a few seconds: its valid files are read, its damaged ones end as documented, a bug
is found.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"
spec = importlib.util.spec_from_file_location("fuzz", FILE)
assert spec is not None and spec.loader is not None
fuzz = importlib.util.module_from_spec(spec)
sys.modules["fuzz"] = fuzz
spec.loader.exec_module(fuzz)


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_damaged_files_are_read_or_refused(target: str) -> None:
    counts = fuzz.fuzz(target, 0.1, derandomize=True)
    assert counts["refused"] > 100 and counts["read"] > 0


def test_a_reader_that_trips_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(file: Path) -> None:
        if b"null" in file.read_bytes():
            raise KeyError("null")

    monkeypatch.setitem(fuzz.TARGETS, "jsonl", careless)
    with pytest.raises(KeyError):
        fuzz.fuzz("jsonl", 20, derandomize=True)
