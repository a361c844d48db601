"""The header parser against the safetensors library's writer, and against every way to damage a file."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from bridge.hf.safetensors_file import parse_json, read_header
from jetrl_jax.errors import UserError


def write_raw(path, header, data=b"", *, length=None):
    """A file with any header (dictionary or bytes) and any stated header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, ml_dtypes.float8_e4m3fn, np.int64, np.bool_],
    ids=lambda d: np.dtype(d).name,
)
def test_read_header_reads_what_the_library_writes(tmp_path, dtype):
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.normal(size=(3, 5)).astype(dtype),
        "scalar": np.asarray(1, dtype),
        "empty": np.zeros((0, 4), dtype),
        "vector": rng.normal(size=7).astype(dtype),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        got = found[name].read()
        assert got.dtype == array.dtype and got.shape == array.shape and got.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "JSON"),
        (b"{", b"", "JSON"),
        (b"[]", b"", "JSON object"),
        (b"\xff\xfe{}", b"", "JSON"),
        (b'{"a": 1, "a": 2}', b"", "duplicate keys"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', b"", "duplicate keys"),
        (b"[" * 100_000, b"", "JSON"),
        ({"a": []}, b"", "expected the keys"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "expected the keys"),
        ({"a": entry(dtype="F31")}, bytes(8), "unknown dtype"),
        ({"a": entry(dtype=["F32"])}, bytes(8), "unknown dtype"),
        ({"a": entry(shape=(-2,))}, bytes(8), "shape"),
        ({"a": entry(shape=(2.0,))}, bytes(8), "shape"),
        ({"a": entry(shape=(2**62, 2**62))}, bytes(8), "data_offsets"),
        ({"a": entry(offsets=(0, 4))}, bytes(8), "expected 8 bytes"),
        ({"a": entry(offsets=(8, 0))}, bytes(8), "expected 8 bytes"),
        ({"a": entry(offsets=(0, 8, 8))}, bytes(8), "two non-negative"),
        ({"a": entry(offsets=(-8, 0))}, bytes(8), "two non-negative"),
        ({"a": entry(), "b": entry()}, bytes(8), "overlaps"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "overlaps"),
        ({"a": entry(offsets=(8, 16))}, bytes(16), "hole"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), "hole"),
        ({"a": entry()}, bytes(7), "truncated"),
        ({"a": entry()}, bytes(9), "truncated"),
        ({"a": entry(offsets=(10**15, 10**15 + 8))}, bytes(8), "hole"),
    ],
)
def test_read_header_raises_on_damage(tmp_path, header, data, message):
    with pytest.raises(UserError, match=message):
        read_header(write_raw(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("length", [10**6, 2**63, 2**64 - 1])
def test_read_header_raises_on_a_wrong_header_length(tmp_path, length):
    with pytest.raises(UserError, match="truncated"):
        read_header(write_raw(tmp_path / "x.safetensors", {"a": entry()}, bytes(8), length=length))


def test_read_header_raises_on_short_files_and_pointers(tmp_path):
    (tmp_path / "a").write_bytes(b"1234567")
    with pytest.raises(UserError, match="at least 8"):
        read_header(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(UserError, match="git lfs pull"):
        read_header(tmp_path / "b")


def test_read_header_raises_at_every_truncation(tmp_path):
    save_file({"a": np.arange(3, dtype=np.float32)}, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "y.safetensors").write_bytes(whole[:size])
        with pytest.raises(UserError):
            read_header(tmp_path / "y.safetensors")


def test_read_raises_where_the_file_shrank(tmp_path):
    save_file({"a": np.arange(3, dtype=np.float32)}, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")["a"]
    whole = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(whole[:-2])
    with pytest.raises(UserError, match="shrank"):
        stored.read()


def test_parse_json_names_the_file():
    with pytest.raises(UserError, match=r"config\.json is no valid JSON"):
        parse_json(b"{,}", "config.json")
