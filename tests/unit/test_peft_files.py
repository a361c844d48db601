"""PEFT directories: the reader takes what the writer wrote, and refuses by name what is no plain LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bridge.hf.peft import PeftAdapter, adapter_shapes, read_adapter, save_adapter
from jetrl_jax.errors import UserError
from jetrl_jax.runs.policy_config import adapter_sections, policy_config
from tests.small_model import MINUTE, small_model

MODEL = small_model(**MINUTE)
TARGETS = ("q_proj", "down_proj")


def made(**changes: Any) -> PeftAdapter:
    rng = np.random.default_rng(0)
    shapes = adapter_shapes(MODEL, 3, TARGETS)
    arrays = {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    return PeftAdapter(
        **{"rank": 3, "alpha": 6.0, "rslora": False, "targets": TARGETS, "base": "/base", "arrays": arrays}
        | changes
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", made())


def edit(directory: Path, **values: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_read_adapter_gives_back_what_was_written(directory: Path, tmp_path: Path) -> None:
    found, given = read_adapter(directory, MODEL), made()
    assert (found.rank, found.alpha, found.rslora, found.targets, found.base) == (
        3,
        6.0,
        False,
        TARGETS,
        "/base",
    )
    assert found.arrays.keys() == given.arrays.keys()
    assert all(np.array_equal(found.arrays[path], array) for path, array in given.arrays.items())
    names = load_file(directory / "adapter_model.safetensors")
    assert names["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (
        3,
        MODEL.hidden_size,
    )
    assert names["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (
        MODEL.hidden_size,
        3,
    )
    assert len(names) == 2 * 2 * MODEL.num_layers
    with pytest.raises(UserError, match="the place is taken"):
        save_adapter(directory, given)
    save_adapter(directory, made(alpha=3.0), overwrite=True)
    assert read_adapter(directory, MODEL).alpha == 3.0 and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "LOHA"},
        {"r": 0},
        {"lora_alpha": "16"},
        {"use_dora": True},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"layers_to_transform": [0]},
        {"layer_replication": [[0, 1]]},
        {"trainable_token_indices": [3]},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "eva"},
        {"fan_in_fan_out": True},
        {"something_new": 1},
    ],
    ids=str,
)
def test_read_adapter_refuses_other_kinds_by_name(directory: Path, changes: dict[str, Any]) -> None:
    edit(directory, **changes)
    ((name, value),) = changes.items()
    with pytest.raises(UserError, match="no plain LoRA") as refused:
        read_adapter(directory, MODEL)
    assert f"{name}={value!r}" in str(refused.value)


def test_read_adapter_names_every_tensor_that_does_not_fit(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    prefix = "base_model.model.model.layers.0"
    del tensors[f"{prefix}.self_attn.q_proj.lora_B.weight"]  # half a pair
    tensors[f"{prefix}.mlp.down_proj.lora_A.weight"] = np.zeros((4, 5), np.float32)
    tensors[f"{prefix}.mlp.up_proj.lora_A.weight"] = np.zeros((3, 8), np.float32)
    name = f"{prefix}.mlp.down_proj.lora_B.weight"
    tensors[name] = tensors[name].astype(np.int32)
    save_file(tensors, file)
    with pytest.raises(UserError, match="does not fit the model") as refused:
        read_adapter(directory, MODEL)
    lines = str(refused.value).splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [
        ["missing", f"{prefix}.self_attn.q_proj.lora_B.weight"],
        ["unmapped", f"{prefix}.mlp.up_proj.lora_A.weight"],
        ["wrong", "shape"],
        ["wrong", "dtype"],
    ]
    edit(directory, target_modules=["lm_head"])
    with pytest.raises(UserError, match=r"target_modules=\['lm_head'\]"):
        read_adapter(directory, MODEL)


def test_adapters_that_are_not_finite_are_neither_written_nor_read(directory: Path, tmp_path: Path) -> None:
    bad = {path: np.full_like(array, np.nan) for path, array in made().arrays.items()}
    with pytest.raises(ValueError, match="non-finite"):
        save_adapter(tmp_path / "bad", made(arrays=bad))
    assert not (tmp_path / "bad").exists()
    file = directory / "adapter_model.safetensors"
    save_file({name: np.full_like(array, np.inf) for name, array in load_file(file).items()}, file)
    with pytest.raises(UserError, match="non-finite"):
        read_adapter(directory, MODEL)
    with pytest.raises(UserError, match=r"no adapter_config\.json"):
        read_adapter(tmp_path, MODEL)
    file.unlink()
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors: got .*, expected"):
        read_adapter(directory, MODEL)


def test_adapter_sections_needs_a_list_of_layers(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    edit(directory, base_model_name_or_path=str(tmp_path))
    assert adapter_sections(directory)["lora"]["targets"] == sorted(TARGETS)
    (tmp_path / "run.yaml").write_text("run: {steps: 1}")
    edit(directory, lora_alpha=5.0)
    with pytest.raises(
        UserError, match=r"lora\.alpha: .* no power of two(.*\n)*.* are of .*adapter_config\.json"
    ):
        policy_config(directory, config=tmp_path / "run.yaml")
    file = directory / "adapter_config.json"
    values = json.loads(file.read_text())
    del values["target_modules"]
    file.write_text(json.dumps(values))
    with pytest.raises(UserError, match="target_modules=None, expected a list"):
        adapter_sections(directory)
