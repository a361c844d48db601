"""The checkpoint writer: bits, shards, atomicity, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import bridge.hf.directory
import bridge.hf.write
from bridge import load_checkpoint, save_checkpoint
from bridge.hf.names import parameter_shapes, to_hf_name
from jetrl_jax.errors import UserError
from tests.small_model import MINUTE, small_model

CONFIG = small_model(
    **MINUTE, max_position_embeddings=64, tie_word_embeddings=False, eos_token_ids=(1, 2), pad_token_id=0
)
NUMPY_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def make_params(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        path: rng.normal(size=shape).astype(np.float32) for path, shape in parameter_shapes(CONFIG).items()
    }


@pytest.mark.parametrize("max_shard_bytes", [5e9, 700], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", list(NUMPY_DTYPES))
def test_save_checkpoint_rounds_once_and_reads_back(tmp_path, dtype, max_shard_bytes):
    params = make_params()
    target = save_checkpoint(tmp_path / "out", CONFIG, params, dtype=dtype, max_shard_bytes=max_shard_bytes)
    config, got = load_checkpoint(target)
    assert config == CONFIG and list(got) == list(params)
    for path, array in params.items():
        np.testing.assert_array_equal(got[path], array.astype(NUMPY_DTYPES[dtype]).astype(np.float32))
    stored = json.loads((target / "config.json").read_text())
    assert stored["torch_dtype"] == stored["dtype"] == dtype
    assert json.loads((target / "generation_config.json").read_text()) == {
        "eos_token_id": [1, 2],
        "pad_token_id": 0,
    }
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_save_checkpoint_index_is_right(tmp_path):
    params = make_params()
    target = save_checkpoint(tmp_path / "out", CONFIG, params, dtype="bfloat16", max_shard_bytes=700)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * array.size for array in params.values())
    assert set(index["weight_map"]) == {to_hf_name(path) for path in params}
    shards = sorted(set(index["weight_map"].values()))
    assert sorted(f for f in os.listdir(target) if f.endswith(".safetensors")) == shards
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert len(shards) >= 3 and not (target / "model.safetensors").exists()
    for shard in shards:
        # the library's own reader, for names and metadata
        with safe_open(target / shard, framework="numpy") as file:
            assert set(file.keys()) == {name for name, where in index["weight_map"].items() if where == shard}
            assert file.metadata() == {"format": "pt"}
            sizes = [2 * int(np.prod(file.get_slice(name).get_shape())) for name in file.keys()]
            assert sum(sizes) <= 700 or len(sizes) == 1


def test_save_checkpoint_takes_strided_and_device_arrays(tmp_path):
    params = make_params()
    strided = {
        path: np.asfortranarray(array) if array.ndim == 2 else np.repeat(array, 2)[::2]
        for path, array in params.items()
    }
    assert not strided["lm_head.weight"].flags.c_contiguous
    on_device = {path: jnp.asarray(array).astype(jnp.bfloat16) for path, array in params.items()}
    for number, values in enumerate((strided, on_device)):
        _, got = load_checkpoint(save_checkpoint(tmp_path / str(number), CONFIG, values))
        for path, array in params.items():
            np.testing.assert_array_equal(got[path], array.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_save_checkpoint_rounds_to_nearest_even_like_jax(tmp_path):
    params = make_params()
    # every other one is a tie in bfloat16
    ties = np.float32(1) + np.arange(88, dtype=np.float32) * np.float32(2**-8)
    params["lm_head.weight"] = ties.reshape(11, 8)
    _, got = load_checkpoint(save_checkpoint(tmp_path / "out", CONFIG, params))
    np.testing.assert_array_equal(
        got["lm_head.weight"], np.asarray(jax.lax.reduce_precision(params["lm_head.weight"], 8, 7))
    )


def test_save_checkpoint_lists_every_bad_parameter(tmp_path):
    params = make_params()
    del params["norm.weight"]
    params["lm_head.weight"] = params["lm_head.weight"].T
    params["model.norm.weight"] = np.zeros(8, np.float32)
    with pytest.raises(ValueError) as caught:
        save_checkpoint(tmp_path / "out", CONFIG, params)
    for line in (
        "missing norm.weight",
        "unmapped model.norm.weight",
        "wrong shape lm_head.weight: got [8, 11]",
    ):
        assert line in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", np.nan), ("bfloat16", 3.4e38), ("float16", 70000.0)]
)
def test_save_checkpoint_raises_on_non_finite_after_rounding(tmp_path, dtype, value):
    params = make_params()
    params["norm.weight"][2] = value
    params["layers.1.mlp.up_proj.weight"][0, 0] = -value
    with pytest.raises(ValueError, match=r"non-finite.*layers\.1\.mlp\.up_proj.*model\.norm"):
        save_checkpoint(tmp_path / "out", CONFIG, params, dtype=dtype)
    assert os.listdir(tmp_path) == []


def test_save_checkpoint_raises_on_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="dtype='float8'"):
        save_checkpoint(tmp_path / "out", CONFIG, make_params(), dtype="float8")
    with pytest.raises(ValueError, match="max_shard_bytes"):
        save_checkpoint(tmp_path / "out", CONFIG, make_params(), max_shard_bytes=0)


def test_save_checkpoint_replaces_only_a_checkpoint_and_only_on_request(tmp_path):
    target = tmp_path / "out"
    target.mkdir()  # an empty directory is a free place
    save_checkpoint(target, CONFIG, make_params(0))
    with pytest.raises(UserError, match="place is taken"):
        save_checkpoint(target, CONFIG, make_params(1))
    save_checkpoint(target, CONFIG, make_params(1), dtype="float32", max_shard_bytes=700, overwrite=True)
    np.testing.assert_array_equal(load_checkpoint(target)[1]["norm.weight"], make_params(1)["norm.weight"])
    assert sorted(os.listdir(tmp_path)) == ["out"]
    (target / "README.md").write_text("x")
    with pytest.raises(UserError, match=r"will not replace.*README\.md"):
        save_checkpoint(target, CONFIG, make_params(2), overwrite=True)
    (target / "README.md").unlink()
    (target / "notes").mkdir()
    with pytest.raises(UserError, match=r"will not replace.*notes"):
        save_checkpoint(target, CONFIG, make_params(2), overwrite=True)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"will not replace.*no config\.json"):
        save_checkpoint(tmp_path / "tokens", CONFIG, make_params(2), overwrite=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"will not replace.*thesis"):
        save_checkpoint(tmp_path / "home", CONFIG, make_params(), overwrite=True)


class Crash(Exception):
    pass


@pytest.mark.parametrize("step", ["_write_weights", "_verify", "_flush", "_move_into_place"])
def test_save_checkpoint_leaves_the_old_one_whole_when_it_fails(tmp_path, monkeypatch, step):
    save_checkpoint(tmp_path / "out", CONFIG, make_params(0), dtype="float32")

    def crash(*_):
        raise Crash

    monkeypatch.setattr(
        bridge.hf.write if hasattr(bridge.hf.write, step) else bridge.hf.directory, step, crash
    )
    with pytest.raises(Crash):
        save_checkpoint(tmp_path / "out", CONFIG, make_params(1), dtype="float32", overwrite=True)
    assert os.listdir(tmp_path) == ["out"]
    np.testing.assert_array_equal(
        load_checkpoint(tmp_path / "out")[1]["norm.weight"], make_params(0)["norm.weight"]
    )


def test_save_checkpoint_brings_the_old_one_back_when_the_new_one_cannot_be_renamed(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "out", CONFIG, make_params(0), dtype="float32")
    rename = Path.rename

    def rename_all_but_the_new_one(path, target):
        if path.name == ".out.partial":
            raise OSError(errno.EIO, "the disk is tired")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_all_but_the_new_one)
    with pytest.raises(OSError, match="the disk is tired"):
        save_checkpoint(tmp_path / "out", CONFIG, make_params(1), dtype="float32", overwrite=True)
    assert os.listdir(tmp_path) == ["out"]
    np.testing.assert_array_equal(
        load_checkpoint(tmp_path / "out")[1]["norm.weight"], make_params(0)["norm.weight"]
    )


def test_save_checkpoint_starts_over_after_a_kill(tmp_path):
    leftover = tmp_path / ".out.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    save_checkpoint(tmp_path / "out", CONFIG, make_params())
    assert os.listdir(tmp_path) == ["out"]


def test_save_checkpoint_verifies_what_it_wrote(tmp_path, monkeypatch):
    def save_wrongly(arrays, file, metadata):
        arrays["model.norm.weight"] = arrays["model.norm.weight"][::-1].copy()
        save_file(arrays, file, metadata=metadata)

    save_file = bridge.hf.write.save_file
    monkeypatch.setattr(bridge.hf.write, "save_file", save_wrongly)
    with pytest.raises(RuntimeError, match=r"reads back differently: \['model\.norm\.weight'\]"):
        save_checkpoint(tmp_path / "out", CONFIG, make_params())
    assert os.listdir(tmp_path) == []


def test_save_checkpoint_saves_the_tokenizer_beside(tmp_path):
    class Tokenizer:
        def save(self, directory):
            (directory / "tokenizer.json").write_text("{}")

    target = save_checkpoint(tmp_path / "out", CONFIG, make_params(), tokenizer=Tokenizer())
    assert (target / "tokenizer.json").read_text() == "{}"
