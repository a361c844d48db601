"""The checkpoint reader: exact float32 masters from good directories,
one clear error from each damaged one.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from bridge import load_checkpoint
from bridge.hf.config import to_hf
from bridge.hf.names import parameter_shapes, to_hf_name
from jetrl_jax.errors import UserError
from jetrl_jax.models.config import ModelConfig, RopeScaling
from tests.small_model import MINUTE, small_model


def make_config(architecture: str = "qwen3", tied: bool = False) -> ModelConfig:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 32) if architecture == "llama" else None
    return small_model(
        architecture, **MINUTE, max_position_embeddings=64, rope_scaling=scaling, tie_word_embeddings=tied
    )


def make_tensors(config: ModelConfig, dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        to_hf_name(path): rng.normal(size=shape).astype(dtype)
        for path, shape in parameter_shapes(config).items()
    }


def write(root, config: ModelConfig, tensors, *, shards: int = 1):
    """A directory by the library's writer, in one file or in round-robin shards."""
    (root / "config.json").write_text(json.dumps(to_hf(config)))
    if shards == 1:
        save_file(tensors, root / "model.safetensors")
        return root
    names = list(tensors)
    groups = {f"model-{i + 1:05d}-of-{shards:05d}.safetensors": names[i::shards] for i in range(shards)}
    for file, group in groups.items():
        save_file({name: tensors[name] for name in group}, root / file)
    weight_map = {name: file for file, group in groups.items() for name in group}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


def edit_index(root, change):
    path = root / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_load_checkpoint_reads_every_tensor(tmp_path, architecture, tied, shards):
    config = make_config(architecture, tied)
    tensors = make_tensors(config)
    read_config, params = load_checkpoint(write(tmp_path, config, tensors, shards=shards))
    assert read_config == config
    assert {to_hf_name(path) for path in params} == set(tensors)
    for path, array in params.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, tensors[to_hf_name(path)])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_load_checkpoint_widens_exactly(tmp_path, dtype):
    config = make_config()
    tensors = make_tensors(config, dtype)
    every_finite = np.arange(2**16, dtype=np.uint16).view(dtype)
    every_finite = every_finite[np.isfinite(every_finite.astype(np.float32))]
    tensors["model.embed_tokens.weight"] = np.resize(every_finite[:: len(every_finite) // 88], (11, 8))
    _, params = load_checkpoint(write(tmp_path, config, tensors))
    for path, array in params.items():
        assert array.tobytes() == tensors[to_hf_name(path)].astype(np.float32).tobytes()


def test_load_checkpoint_lists_every_bad_tensor_in_one_error(tmp_path):
    config = make_config()
    tensors = make_tensors(config)
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.ascontiguousarray(
        tensors["model.layers.0.self_attn.q_proj.weight"].T
    )
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(12, np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].astype(
        np.float64
    )
    with pytest.raises(UserError) as caught:
        load_checkpoint(write(tmp_path, config, tensors))
    message = str(caught.value)
    for line in (
        "missing model.norm.weight: expected shape [8]",
        "missing lm_head.weight",
        "wrong shape model.layers.0.self_attn.q_proj.weight: got [8, 12], expected [12, 8]",
        "unmapped model.layers.0.self_attn.q_proj.bias",
        "wrong dtype model.layers.1.mlp.up_proj.weight: got F64",
    ):
        assert line in message
    assert message.count("\n") == 5


def test_load_checkpoint_raises_on_non_finite_weights(tmp_path):
    config = make_config()
    tensors = make_tensors(config)
    tensors["model.norm.weight"][3] = np.nan
    tensors["lm_head.weight"][0, 0] = np.inf
    with pytest.raises(UserError, match=r"non-finite.*model\.norm\.weight.*lm_head\.weight"):
        load_checkpoint(write(tmp_path, config, tensors))


def test_load_checkpoint_tied_with_a_stored_head(tmp_path):
    config = make_config(tied=True)
    tensors = make_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    _, params = load_checkpoint(write(tmp_path, config, tensors))
    assert "lm_head.weight" not in params
    tensors["lm_head.weight"][0, 0] += 1
    with pytest.raises(UserError, match="tied model with a head of its own"):
        load_checkpoint(write(tmp_path, config, tensors))


def test_load_checkpoint_drops_rotary_buffers(tmp_path):
    config = make_config("llama")
    tensors = make_tensors(config) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    _, params = load_checkpoint(write(tmp_path, config, tensors))
    assert set(params) == set(parameter_shapes(config))


def test_load_checkpoint_takes_eos_from_the_generation_config(tmp_path):
    config = make_config()
    write(tmp_path, config, make_tensors(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4], "temperature": 0.6}))
    assert load_checkpoint(tmp_path)[0].eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert load_checkpoint(tmp_path)[0].eos_token_ids == (1,)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        "x.bin",
        "C:\\x.safetensors",
        "a\0.safetensors",
        3,
        None,
    ],
    ids=repr,
)
def test_index_raises_on_file_names_that_leave_the_directory(tmp_path, name):
    config = make_config()
    root = tmp_path / "model"
    root.mkdir()
    write(root, config, make_tensors(config), shards=2)
    save_file({"lm_head.weight": np.zeros((11, 8), np.float32)}, tmp_path / "x.safetensors")
    edit_index(root, lambda weight_map: weight_map.update({"lm_head.weight": name}))
    with pytest.raises(UserError, match="damaged index"):
        load_checkpoint(root)


def test_index_raises_on_missing_shards(tmp_path):
    config = make_config()
    write(tmp_path, config, make_tensors(config), shards=3)
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"missing shards.*00001-of-00003.*00003-of-00003"):
        load_checkpoint(tmp_path)


def test_index_raises_where_shards_disagree(tmp_path):
    config = make_config()
    tensors = make_tensors(config)
    write(tmp_path, config, tensors, shards=2)
    shard = "model-00001-of-00002.safetensors"
    edit_index(tmp_path, lambda weight_map: weight_map.update({"model.extra": shard}))
    with pytest.raises(UserError, match=rf"model\.extra is not in {shard}"):
        load_checkpoint(tmp_path)
    write(tmp_path, config, tensors, shards=2)
    edit_index(tmp_path, lambda weight_map: weight_map.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"lm_head\.weight is stored in .* the index says None"):
        load_checkpoint(tmp_path)
    write(tmp_path, config, tensors, shards=2)
    save_file(tensors, tmp_path / shard)  # every tensor of the second shard is now stored twice
    with pytest.raises(UserError, match="shards disagree"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "{", '{"weight_map": {"a": "b", "a": "c"}}'],
)
def test_index_raises_on_damage(tmp_path, text):
    config = make_config()
    write(tmp_path, config, make_tensors(config), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="index"):
        load_checkpoint(tmp_path)


def test_load_checkpoint_raises_on_missing_pieces(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        load_checkpoint(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no config\.json"):
        load_checkpoint(tmp_path)
    config = make_config()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="no valid JSON"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"no weights: got \['pytorch_model\.bin'\]"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config) | {"mlp_bias": True}))
    with pytest.raises(UserError, match=r"config\.json: .*mlp_bias"):
        load_checkpoint(tmp_path)


def test_load_checkpoint_raises_on_two_sets_of_weights(tmp_path):
    config = make_config()
    write(tmp_path, config, make_tensors(config), shards=2)
    write(tmp_path, config, make_tensors(config))
    with pytest.raises(UserError, match="ambiguous weights"):
        load_checkpoint(tmp_path)
