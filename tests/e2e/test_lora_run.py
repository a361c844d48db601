"""Whole runs with adapters: exact in every step, resumed to the bit beside their base, exported and read again."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tiny import rows, run_here, shorter, tiny_config

from bridge.hf.read import load_checkpoint
from jetrl_jax.commands import evaluate, export
from jetrl_jax.config.load import dump_config
from jetrl_jax.errors import UserError
from jetrl_jax.precision.formats import is_adapter
from jetrl_jax.precision.parameters import named_params, select
from jetrl_jax.record.checkpoint import CheckpointStore
from jetrl_jax.record.run_directory import METRICS_FILE
from jetrl_jax.rollout.embedded.score import Scorer
from jetrl_jax.runs.grpo import GRPOTrainer
from jetrl_jax.runs.policy import Policy, base_files, build_policy, load_policy, published_weights, with_base
from jetrl_jax.runs.run import Run
from jetrl_jax.runs.sampler import PolicySampler
from tests.oracles import fp8_oracle
from tests.parity.small_policy import with_adapters

FIELDS: dict[str, Any] = {
    "model": {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 4},  # layers that vLLM holds in FP8
    "lora": {"rank": 4, "alpha": 8.0},
    "algorithm": {"kl_coef": 0.1, "minibatches": 2},
    "optimizer": {"learning_rate": 0.02},
}
IN_BF16 = FIELDS | {"precision": {"preset": "bf16"}}


def logits_of(weights: Any, policy: Any) -> np.ndarray:
    return Scorer(policy.model)(weights, [5, 6, 7, 8, 9])


@pytest.mark.long
def test_run_with_adapters_is_exact_resumes_and_is_read_again(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    GRPOTrainer(tiny_config(whole, **FIELDS), reward_functions=[shorter]).train()
    expected = rows(whole)
    assert [row["mismatch/logprob_abs_max"] for row in expected[1:]] == [0.0] * 4
    # the reference is the base: before the first update they are one policy
    assert expected[1]["policy/reference_kl"] < expected[4]["policy/reference_kl"]
    again = tmp_path / "run"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "4")
    GRPOTrainer(tiny_config(again, **FIELDS), reward_functions=[shorter], resume=True).train()
    assert rows(again) == expected
    for file in ("adapter/adapter_model.safetensors", "base/model.safetensors"):
        assert (again / file).read_bytes() == (whole / file).read_bytes()

    policy = load_policy(whole)
    params = dict(named_params(policy.params))
    assert any(np.any(value) for path, value in params.items() if ".lora_B." in path)
    weights = published_weights(policy)
    adapter = load_policy(whole / "adapter", ["precision.preset=fp8_unified"])
    assert np.array_equal(logits_of(published_weights(adapter), adapter), logits_of(weights, policy))
    assert len(PolicySampler(policy)("abc=", 2, seed=1)) == 2

    out = tmp_path / "out"
    done = run_here("jetrl_jax.commands.export", "--run", str(whole), "--out", str(out), "--format", "fp8")
    assert done.returncode == 0, done.stderr
    exported = load_policy(out / "adapter", ["precision.preset=bf16"])
    assert {path for path, _ in named_params(exported.params)} == set(params)
    for path, value in named_params(exported.params):
        if is_adapter(path):
            assert np.array_equal(value, params[path])
    done = run_here(
        "jetrl_jax.commands.export", "--run", str(whole), "--out", str(tmp_path / "merged"), "--merge"
    )
    assert done.returncode == 0, done.stderr
    merged = load_checkpoint(tmp_path / "merged")[1]
    assert not any(map(is_adapter, merged))
    base = np.asarray(dict(named_params(weights))["layers.0.mlp.up_proj.weight"].dequantize(), np.float64)
    a, b = (np.asarray(params[f"layers.0.mlp.up_proj.lora_{side}.weight"], np.float64) for side in "AB")
    whole_weight = base + 2.0 * b @ a
    bound = 2.0**-8 * (np.abs(whole_weight) + 3 * 2 * np.abs(b) @ np.abs(a))
    assert np.all(np.abs(merged["layers.0.mlp.up_proj.weight"] - whole_weight) <= bound)
    done = run_here(
        "jetrl_jax.commands.export", "--run", str(whole), "--out", str(out), "--format", "fp8", "--merge"
    )
    assert done.returncode != 0 and "cannot merge" in done.stderr


def test_adapters_of_a_directory_must_be_those_of_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path / "run", **FIELDS)
    policy = build_policy(config)
    policy.save_adapter(tmp_path / "adapter", "/nowhere")
    lora = {"rank": 4, "alpha": 8.0, "path": str(tmp_path / "adapter")}
    fields = FIELDS | {"lora": lora, "warm_start": None}
    capsys.readouterr()
    given = build_policy(tiny_config(tmp_path / "run", **fields))
    assert "base_model_name_or_path='/nowhere', expected model.path = None" in capsys.readouterr().err
    ours, theirs = (dict(named_params(one.params)) for one in (policy, given))
    assert all(np.array_equal(ours[path], theirs[path]) for path in ours)
    with pytest.raises(UserError, match=r"lora\.path: .* got alpha=8\.0, expected lora\.alpha = 4\.0"):
        build_policy(tiny_config(tmp_path / "run", **fields | {"lora": lora | {"alpha": 4.0}}))
    with pytest.raises(UserError, match="the base is not there: got base_model_name_or_path='/nowhere'"):
        load_policy(tmp_path / "adapter")


@pytest.mark.parametrize("evaluated", [False, pytest.param(True, marks=pytest.mark.long)])
def test_directory_of_peft_is_read_with_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], evaluated: bool
) -> None:
    """The config gives task, tokenizer and formats; the directory gives the base and the adapters."""
    policy = build_policy(tiny_config(tmp_path / "run", **IN_BF16))
    policy.save_base(tmp_path / "base")
    policy.save_adapter(tmp_path / "adapter", str(tmp_path / "base"))
    file = tmp_path / "other.yaml"
    file.write_text(dump_config(tiny_config(tmp_path / "run", **IN_BF16 | {"lora": {"rank": 2}})))
    if evaluated:
        assert evaluate.main(["--checkpoint", str(tmp_path / "adapter"), "--config", str(file)]) == 0
        assert json.loads(capsys.readouterr().out)["prompts"] == 8
        return
    read = load_policy(tmp_path / "adapter", config=file)
    assert read.config.lora is not None and read.config.lora.rank == 4
    ours, theirs = (jax.tree.leaves(published_weights(one)) for one in (policy, read))
    assert all(map(np.array_equal, ours, theirs)) and len(ours) == len(theirs)

    # base and adapter in another place; and another base in the place of theirs
    (tmp_path / "moved").mkdir()
    for name in ("base", "adapter"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    moved = load_policy(tmp_path / "moved" / "adapter", config=file)
    assert moved.config.model_path == str(tmp_path / "moved" / "base")
    assert "names another base" not in capsys.readouterr().err
    build_policy(policy.config.model_copy(update={"seed": 1})).save_base(tmp_path / "moved" / "base")
    load_policy(tmp_path / "moved" / "adapter", config=file)
    assert "names another base" in capsys.readouterr().err
    (tmp_path / "moved").rename(tmp_path / "base.d")
    (tmp_path / "base.d" / "base").rename(tmp_path / "base")
    with pytest.raises(UserError, match=r"was replaced: .*model\.safetensors: got \w{64}, expected \w{64}"):
        load_policy(tmp_path / "base.d" / "adapter", config=file)


def saved(run: Path, **fields: Any) -> Policy:
    """The policy of a run of no steps, saved as one."""
    config = tiny_config(run, **IN_BF16 | fields)
    policy = build_policy(config)
    policy.save_base(run / "base")
    (run / "config.yaml").write_text(dump_config(config))
    with CheckpointStore(run / "checkpoints") as store:
        store.save(0, {"params": select(policy.params, is_adapter)}, {"base": base_files(run / "base")})
    return policy


def test_load_policy_refuses_another_base(tmp_path: Path) -> None:
    """Of weights, or of the architecture that config.json has."""
    run = tmp_path / "run"
    policy = saved(run)
    file = run / "base" / "config.json"
    kept = file.read_text()
    file.write_text(json.dumps(json.loads(kept) | {"rms_norm_eps": 0.1}))
    with pytest.raises(UserError, match=r"not the base .*: config\.json: got \w{64}, expected \w{64}\."):
        load_policy(run)
    file.write_text(kept)
    build_policy(policy.config.model_copy(update={"seed": 1})).save_base(run / "base")
    with pytest.raises(UserError, match=r"not the base .*: model\.safetensors: got \w{64}"):
        load_policy(run)


def test_export_writes_base_and_adapter_or_neither(tmp_path: Path) -> None:
    """And not over the base of a run, even where it may overwrite."""
    run, out = tmp_path / "run", tmp_path / "out"
    saved(run)
    files = base_files(run / "base")
    for place in (["--out", str(run)], ["--out", str(run / "base"), "--merge"]):
        with pytest.raises(UserError, match=r"would mix with other files: .* beside \[.*'config\.yaml'"):
            export.main(["--run", str(run), "--overwrite", *place])
    assert base_files(run / "base") == files
    (out / "adapter").mkdir(parents=True)
    (out / "adapter" / "mine.txt").touch()
    for more in ([], ["--overwrite"]):
        with pytest.raises(UserError, match=r"the place is taken|it also holds \['mine\.txt'\]"):
            export.main(["--run", str(run), "--out", str(out), *more])
    assert [path.name for path in out.iterdir()] == ["adapter"]


def test_base_that_is_read_again_keeps_its_format(tmp_path: Path) -> None:
    """Not FP32, in a policy that is loaded or resumed after a warm start too."""
    policy = saved(tmp_path / "run")
    read = load_policy(tmp_path / "run")
    for params in (read.params, with_base(policy, tmp_path / "run" / "base")):
        for path, value in named_params(params):
            assert value.dtype == ("float32" if is_adapter(path) else "bfloat16"), path
    weights = dict(named_params(published_weights(read)))
    for path, value in named_params(policy.params):
        assert np.array_equal(weights[path], value.astype("bfloat16")), path


def test_adapters_to_start_from_are_not_read_beside_a_checkpoint(tmp_path: Path) -> None:
    given, run = tmp_path / "given", tmp_path / "run"
    build_policy(tiny_config(run, **IN_BF16)).save_adapter(given, "/nowhere")
    policy = saved(run, lora={"rank": 4, "alpha": 8.0, "path": str(given)}, warm_start=None)
    shutil.rmtree(given)
    ours, theirs = (dict(named_params(one.params)) for one in (policy, load_policy(run)))
    assert all(np.array_equal(ours[path], theirs[path]) for path in ours if is_adapter(path))
    GRPOTrainer(policy.config, reward_functions=[shorter], resume=True)
    with pytest.raises(UserError, match=r"no adapter_config\.json"):
        GRPOTrainer(policy.config, reward_functions=[shorter])


def test_run_without_a_checkpoint_makes_its_base_again(tmp_path: Path) -> None:
    """Else it would train beside the base of a start that was cut short, and keep another one."""
    run = tmp_path / "run"
    config = saved(run, warm_start=None).config
    build_policy(config.model_copy(update={"seed": 1})).save_base(run / "base")
    shutil.rmtree(run / "checkpoints")
    (run / METRICS_FILE).touch()
    trainer = GRPOTrainer(config, reward_functions=[shorter], resume=True)
    with contextlib.ExitStack() as stack:
        published = Run(trainer.parts, stack, resume=True).step.state.published
    on_disk = load_checkpoint(run / "base")[1]
    trained_beside = {path: value for path, value in named_params(published) if not is_adapter(path)}
    assert trained_beside.keys() == on_disk.keys()
    assert all(np.array_equal(value, on_disk[path]) for path, value in trained_beside.items())


@pytest.mark.parametrize("preset", ["bf16", "fp8_unified"])
def test_merged_policy_has_the_values_that_were_multiplied(tmp_path: Path, preset: str) -> None:
    """Of an FP8 base its codes times their scales, which differ from the weights that were rounded to codes."""
    policy = build_policy(tiny_config(tmp_path / "run", **FIELDS | {"precision": {"preset": preset}}))
    nnx.update(policy.model, with_adapters(policy.params, 0))
    merged, weights = policy.merged(), dict(named_params(published_weights(policy)))
    assert not any(map(is_adapter, merged)) and merged.keys() == {
        *filter(lambda p: not is_adapter(p), weights)
    }
    for path, value in merged.items():
        held = weights[path]
        if preset == "fp8_unified" and path.endswith("_proj.weight"):
            codes = np.asarray(held.qvalue).view(np.uint8)
            held = fp8_oracle.dequantize(codes, np.asarray(held.scale), held.block_shape)
        expected = np.asarray(held, np.float64)
        if path.endswith("_proj.weight"):
            a, b = (
                np.asarray(weights[path.removesuffix("weight") + f"lora_{side}.weight"], np.float64)
                for side in "AB"
            )
            expected = expected + 2.0 * b @ a
        assert np.abs(value - expected).max() <= 4 * 2.0**-24 * np.abs(expected).max(), path
