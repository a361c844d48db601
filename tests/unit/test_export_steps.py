"""Which checkpoint of a run is read, exported, evaluated: of a step, the last, the best on record; and what
is said of others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bridge import load_checkpoint
from jetrl_jax.commands import evaluate, export, generate
from jetrl_jax.config.load import config_from_dict, dump_config
from jetrl_jax.errors import UserError
from jetrl_jax.record.checkpoint import CheckpointStore
from jetrl_jax.runs.engines import engine_settings
from jetrl_jax.runs.policy import build_policy, load_policy
from tests.unit.test_tokenizer import write_files

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
}
CHECKPOINTS = (0, 2, 4, 6)
# that of step 3 has no checkpoint, step 6 was not evaluated
ACCURACY = {0: 0.1, 2: 0.5, 3: 0.9, 4: 0.5, 6: None}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory whose final norm is the step's number."""
    path = tmp_path_factory.mktemp("run")
    config = config_from_dict({"model": SIZES, "precision": {"preset": "bf16"}})
    (path / "config.yaml").write_text(dump_config(config))
    params = build_policy(config).params
    with CheckpointStore(path / "checkpoints", keep_last=len(CHECKPOINTS)) as store:
        for step in CHECKPOINTS:
            store.save(
                step, {"params": jax.tree.map(lambda value, step=step: np.full_like(value, step), params)}, {}
            )
    rows = [
        {"step": step} | ({} if value is None else {"eval/accuracy": value})
        for step, value in ACCURACY.items()
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("step", "expected"), [("0", 0), ("2", 2), ("best", 4), ("last", 6)])
def test_export_takes_the_step_that_is_asked_for(
    run: Path, step: str, expected: int, tmp_path: Path, capsys: Any
) -> None:
    export.main(["--run", str(run), "--out", str(tmp_path / "out"), "--format", "fp32", "--step", step])
    assert f"fp32 checkpoint of step {expected} in" in capsys.readouterr().out
    np.testing.assert_array_equal(
        load_checkpoint(tmp_path / "out")[1]["norm.weight"], np.full(32, expected, np.float32)
    )


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("3", r"no checkpoint of that step: got step=3 of .*, expected one of \[0, 2, 4, 6\]"),
        ("-1", "no step: got '-1', expected a number, best or last"),
        ("newest", "no step: got 'newest'"),
    ],
)
def test_export_raises_on_a_step_that_is_not_there(
    run: Path, step: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        export.main(["--run", str(run), "--out", str(tmp_path / "out"), f"--step={step}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [evaluate, generate])
@pytest.mark.parametrize(("step", "message"), [("3", "got step=3 of"), ("newest", "no step: got 'newest'")])
def test_evaluate_and_generate_take_a_step(run: Path, command: Any, step: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        command.main(["--checkpoint", str(run), f"--step={step}"])


@pytest.mark.parametrize("sleep", ["null", "true", "false"])
def test_vllm_of_a_policy_that_was_read_stays_awake(run: Path, sleep: str) -> None:
    """Nothing learns from it; vLLM's sleep mode costs memory and serves one engine a process."""
    config = load_policy(run, ["rollout.engine=vllm", f"rollout.engine.sleep={sleep}"]).config
    assert not engine_settings(config, on_gpu=True).sleep


def test_load_policy_raises_on_no_best_a_damaged_one_and_a_directory_without_steps(
    run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "run"
    (other / "checkpoints").mkdir(parents=True)
    (other / "checkpoints" / "6").symlink_to(run / "checkpoints" / "6")
    (other / "checkpoints" / "7").mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (other / name).write_bytes((run / name).read_bytes())
    with pytest.raises(
        UserError,
        match=r"got none of the steps \[6, 7\] .*It is on record for \[0, 2, 3, 4\] \(eval\.every_steps\)",
    ):
        load_policy(other, step="best")
    (other / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"got none of the steps \[6, 7\] .*It is on record for \[\]"):
        load_policy(other, step="best")
    with pytest.raises(UserError, match=r"the checkpoint is damaged: got step=7 .*There are \[6, 7\]"):
        load_policy(other, step=7)
    export.main(["--run", str(run), "--out", str(tmp_path / "hf"), "--step", "2"])
    with pytest.raises(UserError, match="only a run has steps: got step=best"):
        load_policy(tmp_path / "hf", step="best")


def test_an_export_stops_where_the_run_did(tmp_path: Path) -> None:
    """The tokenizer's directory names other stop tokens than the model's: the run samples with the
    tokenizer's, and exports them.
    """
    files = write_files(tmp_path / "tokenizer", generation={"eos_token_id": [3, 2]})
    fields = {"tokenizer": {"kind": "huggingface", "path": str(files)}, "precision": {"preset": "bf16"}}
    build_policy(config_from_dict(fields | {"model": SIZES})).save(tmp_path / "model")
    stated = tmp_path / "model" / "generation_config.json"
    stated.write_text(json.dumps({"eos_token_id": 1}))
    policy = build_policy(config_from_dict(fields | {"model": {"path": str(tmp_path / "model")}}))
    policy.save(tmp_path / "saved")
    for name in ("config.json", "generation_config.json"):
        assert (
            json.loads((tmp_path / "saved" / name).read_text())["eos_token_id"]
            == list(policy.tokenizer.eos_ids)
            == [3, 2, 1]
        )
    assert load_policy(tmp_path / "saved").tokenizer.eos_ids == policy.tokenizer.eos_ids
