"""The reader against the safetensors library's writer, and against every way to damage a file."""

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
    ("header", "data", "reason"),
    [
        (b"", b"", "JSON"),
        (b"{", b"", "JSON"),
        (b"[]", b"", "JSON"),
        (b"\xff\xfe{}", b"", "UTF-8"),
        (b'{"a": 1, "a": 2}', b"", "JSON"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', b"", "duplicate field `dtype`"),
        (b"[" * 100_000, b"", "JSON"),
        ({"a": []}, b"", "JSON"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "missing field `data_offsets`"),
        ({"a": entry(dtype="F31")}, bytes(8), "unknown variant `F31`"),
        ({"a": entry(dtype=["F32"])}, bytes(8), "JSON"),
        ({"a": entry(shape=(-2,))}, bytes(8), "integer `-2`"),
        ({"a": entry(shape=(2.0,))}, bytes(8), "floating point"),
        ({"a": entry(shape=(2**62, 2**62))}, bytes(8), "overflow"),
        ({"a": entry(offsets=(0, 4))}, bytes(8), "invalid shape, data type, or offset"),
        ({"a": entry(offsets=(8, 0))}, bytes(8), "invalid offset for tensor `a`"),
        ({"a": entry(offsets=(0, 8, 8))}, bytes(8), "invalid length 3"),
        ({"a": entry(offsets=(-8, 0))}, bytes(8), "integer `-8`"),
        ({"a": entry(), "b": entry()}, bytes(8), "invalid offset for tensor"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "invalid offset for tensor `b`"),
        ({"a": entry(offsets=(8, 16))}, bytes(16), "invalid offset for tensor `a`"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), "invalid offset for tensor `b`"),
        ({"a": entry()}, bytes(7), "file not fully covered"),
        ({"a": entry()}, bytes(9), "file not fully covered"),
        ({"a": entry(offsets=(10**15, 10**15 + 8))}, bytes(8), "invalid offset for tensor `a`"),
    ],
)
def test_read_header_raises_on_damage(tmp_path, header, data, reason):
    """With the file's name and the library's reason."""
    with pytest.raises(UserError, match=rf"damaged safetensors file .*x\.safetensors: .*{reason}"):
        read_header(write_raw(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("length", [10**6, 2**63, 2**64 - 1])
def test_read_header_raises_on_a_wrong_header_length(tmp_path, length):
    with pytest.raises(UserError, match="truncated"):
        read_header(write_raw(tmp_path / "x.safetensors", {"a": entry()}, bytes(8), length=length))


def test_read_header_raises_on_short_files_and_pointers(tmp_path):
    (tmp_path / "a").write_bytes(b"1234567")
    with pytest.raises(UserError, match="header too small; it is truncated"):
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


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.float8_e4m3fn], ids=lambda d: np.dtype(d).name)
def test_read_raises_where_the_file_shrank(tmp_path, dtype):
    file = tmp_path / "x.safetensors"
    save_file({"a": np.ones(3, dtype)}, file)
    stored = read_header(file)["a"]
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"x\.safetensors: .*not fully covered; it is truncated"):
        stored.read()


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E8M0", "F4"])
def test_read_raises_on_a_dtype_that_numpy_lacks(tmp_path, dtype):
    header = {"a": entry(dtype, (8,), (0, 4 if dtype == "F4" else 8))}
    stored = read_header(write_raw(tmp_path / "x.safetensors", header, bytes(4 if dtype == "F4" else 8)))["a"]
    with pytest.raises(UserError, match=f"dtype that is not read: got {dtype} of a in "):
        stored.read()


def test_parse_json_names_the_file():
    with pytest.raises(UserError, match=r"config\.json is no valid JSON"):
        parse_json(b"{,}", "config.json")
