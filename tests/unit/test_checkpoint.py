"""Checkpoints: bit-equal round trips, what is kept, damage of every file, kills during a save, refused
resumes.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings as standard_warnings
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jetrl_jax.errors import UserError
from jetrl_jax.record.checkpoint import CheckpointStore, CorruptCheckpoint
from jetrl_jax.record.resume_rules import compare_for_resume


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(3, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])


def state(seed: int = 0) -> dict[str, Any]:
    """A state with everything a trainer may hold: nnx parameters, optax state, narrow dtypes, keys, host
    arrays, numbers.
    """
    params = nnx.state(Model(nnx.Rngs(seed)), nnx.Param)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt_state = jax.tree.map(
        lambda leaf: jnp.asarray(np.full(leaf.shape, 3 + seed / 10, leaf.dtype)), optimizer.init(params)
    )
    special = jnp.array([0.0, -0.0, jnp.inf, jnp.nan, 1e-45, 3.4e38], jnp.float32)
    return {
        "params": params,
        "optimizer": opt_state,
        "narrow": {
            "bf16": jnp.array([[1.5, -2.25]], jnp.bfloat16),
            "fp8": jnp.array([448.0, -0.0, jnp.nan], jnp.float8_e4m3fn),
        },
        "special": special,
        "key": jax.random.key(seed + 7),
        "raw_key": jax.random.PRNGKey(seed + 8),
        "order": np.arange(5, dtype=np.int64) + 2**40,
        "epoch": 3 + seed,
        "loss_scale": 0.1 + seed,
    }


def as_bytes(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def assert_bit_equal(left: Any, right: Any) -> None:
    chex.assert_trees_all_equal_comparator(
        lambda a, b: type(a) is type(b) and as_bytes(a) == as_bytes(b),
        lambda a, b: f"{type(a)} {a} is not {type(b)} {b}",
        left,
        right,
    )


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, warnings: list[str]) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_best=1, warn=warnings.append)


def small(value: float) -> dict[str, Any]:
    return {"w": jnp.full((64, 8), value, jnp.float32), "b": jnp.arange(8, dtype=jnp.int32) + int(value)}


def test_checkpoint_round_trip_is_bit_equal(store: CheckpointStore) -> None:
    saved = state(0)
    metadata = {
        "policy_version": 12,
        "rng": {"state": 2**100 + 1},
        "losses": [0.1, float("inf")],
        "text": "ü✓",
    }
    assert store.save(12, saved, metadata, {"reward/mean": 0.5})
    restored = store.restore_latest(state(1))
    assert restored is not None
    assert restored.step == 12
    assert restored.metadata == metadata
    assert_bit_equal(restored.state, saved)


def test_checkpoint_restores_into_shapes_without_values(store: CheckpointStore) -> None:
    saved = small(1.0)
    store.save(1, saved, {})
    template = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)
    restored = store.restore_latest(template)
    assert restored is not None
    assert_bit_equal(restored.state, saved)


def test_checkpoint_restores_a_subset_by_name(store: CheckpointStore) -> None:
    saved = state(0)
    store.save(1, saved, {})
    restored = store.restore(1, {"params": state(1)["params"]}, subset=True)
    assert_bit_equal(restored.state, {"params": saved["params"]})
    # as a reader in another program would name it
    assert "params/layers/1/kernel" in store.read_metadata(1)["manifest"]


def test_checkpoint_keeps_the_last_and_the_best(store: CheckpointStore, tmp_path: Path) -> None:
    rewards = {1: 0.1, 2: 0.9, 3: 0.3, 4: float("nan"), 5: 0.2}
    for step, reward in rewards.items():
        store.save(step, small(step), {}, {"reward/mean": reward})
    assert store.steps() == [2, 4, 5]
    store.close()
    # scores are read back from disk
    reopened = CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_best=1)
    reopened.save(6, small(6), {}, None)
    assert reopened.steps() == [2, 5, 6]
    reopened.save(7, small(7), {}, {"reward/mean": 0.9})  # of equals the later
    reopened.save(8, small(8), {}, {"reward/mean": 0.0})
    reopened.save(9, small(9), {}, {"reward/mean": 0.0})
    assert reopened.steps() == [7, 8, 9]
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["7", "8", "9"]


def test_checkpoint_saves_a_step_once_and_in_order(store: CheckpointStore) -> None:
    assert store.save(5, small(1), {})
    assert not store.save(5, small(2), {})
    with pytest.raises(ValueError, match="got step=4, expected more than 5"):
        store.save(4, small(3), {})
    restored = store.restore_latest(small(0))
    assert restored is not None
    assert_bit_equal(restored.state, small(1))


def test_checkpoint_leaves_logging_warnings_and_hooks_as_they_were(store: CheckpointStore) -> None:
    def of_the_process() -> tuple[Any, ...]:
        loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
        of_loggers = [(logger.level, list(logger.filters)) for logger in loggers]
        return sys.unraisablehook, list(standard_warnings.filters), of_loggers

    before = of_the_process()
    assert store.save(1, state(), {})
    assert of_the_process() == before


def test_checkpoint_raises_on_what_it_cannot_save(store: CheckpointStore) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.save(1, small(1), {"bad": np.float32(1)})
    with pytest.raises(TypeError, match="got name of type str"):
        store.save(1, {"name": "text"}, {})
    with pytest.raises(TypeError, match="bad tree path"):
        store.save(1, {"a/b": jnp.zeros(1)}, {})
    assert store.steps() == []
    with pytest.raises(RuntimeError, match="read_only"):
        CheckpointStore(store.directory, read_only=True).save(1, small(1), {})


def test_restore_latest_returns_none_without_checkpoints(store: CheckpointStore) -> None:
    assert store.restore_latest(small(0)) is None


def test_restore_refuses_another_template_and_keeps_the_checkpoint(store: CheckpointStore) -> None:
    store.save(1, small(1), {})
    other = {"w": jnp.zeros((64, 9)), "b": jnp.zeros(8, jnp.int16), "extra": jnp.zeros(2)}
    with pytest.raises(UserError) as error:
        store.restore_latest(other)
    message = str(error.value)
    assert "w: saved float32[64, 8], now float32[64, 9]" in message
    assert "b: saved int32[8], now int16[8]" in message
    assert "extra: not in the checkpoint" in message
    with pytest.raises(UserError, match="b: only in the checkpoint"):
        store.restore_latest({"w": jnp.zeros((64, 8))})
    assert store.steps() == [1]


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "zeros":
        path.write_bytes(bytes(len(content)))
    else:
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)


# Orbax's, of the reads that it gives up
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["missing", "truncated", "zeros", "flipped"])
def test_no_damage_to_any_file_passes_unnoticed(tmp_path: Path, how: str) -> None:
    """Each file of the newest checkpoint in turn: either the values are intact or the one before it is
    restored, with a warning.
    """
    source = tmp_path / "source"
    with CheckpointStore(source) as store:
        for step in (1, 2):
            store.save(step, small(step), {"policy_version": step}, {"reward/mean": step / 10})
    names = [path.relative_to(source / "2") for path in files_of(source / "2")]
    outcomes = {}
    for index, name in enumerate(names):
        copy = tmp_path / f"copy{index}"
        shutil.copytree(source, copy)
        if (copy / "2" / name).stat().st_size == 0 and how != "missing":
            continue
        damage(copy / "2" / name, how)
        warnings: list[str] = []
        with CheckpointStore(copy, warn=warnings.append) as store:
            restored = store.restore_latest(small(0))
            assert restored is not None, name
            assert_bit_equal(restored.state, small(restored.step))
            assert restored.metadata == {"policy_version": restored.step}
            outcomes[str(name)] = restored.step
            if restored.step == 1:
                assert len(warnings) == 1
                assert str(copy / "2") in warnings[0]
                assert (copy / "2.corrupt").is_dir()
            # and the run goes on, whatever else was damaged
            assert store.save(3, small(3), {"policy_version": 3}, {})
        assert 3 in CheckpointStore(copy).steps()
    assert outcomes["metadata/metadata"] == 1
    assert 1 in [step for name, step in outcomes.items() if name.startswith("state/")]


def test_flipped_bit_in_array_bytes_is_found_by_the_hash(
    store: CheckpointStore, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Orbax itself would hand out without noticing."""
    store.save(1, small(1), {})
    store.save(2, small(2), {})
    from jetrl_jax.record import checkpoint

    look_up = checkpoint._look_up

    def flip(tree: Any, name: str) -> Any:
        array = np.array(look_up(tree, name))
        if name == "w" and array[0, 0] == 2:
            array.view(np.uint32)[3, 3] ^= 1
        return array

    monkeypatch.setattr(checkpoint, "_look_up", flip)
    with pytest.raises(
        CorruptCheckpoint, match=r"1 of 2 arrays are not what was saved \(SHA-256 differs\): w"
    ):
        store.restore(2, small(0))
    restored = store.restore_latest(small(0))
    assert restored is not None
    assert restored.step == 1
    assert len(warnings) == 1


def test_metadata_that_was_changed_is_found_by_its_hash(store: CheckpointStore, warnings: list[str]) -> None:
    for step in (1, 2):
        store.save(step, small(step), {"policy_version": step})
    path = store.directory / "2" / "metadata" / "metadata"
    path.write_text(path.read_text().replace('"policy_version": 2', '"policy_version": 3'))
    restored = store.restore_latest(small(0))
    assert restored is not None
    assert restored.step == 1
    assert "its metadata is not what was saved" in warnings[0]


def test_all_checkpoints_damaged_is_an_error_that_removes_nothing(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(step, small(step), {})
        damage(store.directory / str(step) / "metadata" / "metadata", "truncated")
    with pytest.raises(UserError, match=r"no checkpoint is whole.*steps \[1, 2\]"):
        store.restore_latest(small(0))
    assert store.steps() == [1, 2]


def test_half_written_and_half_deleted_checkpoints_are_cleaned_up(
    tmp_path: Path, warnings: list[str]
) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(1, small(1), {})
    for name in ("2.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-1234", ".deleted/0"):
        (tmp_path / name / "state").mkdir(parents=True)
    assert CheckpointStore(tmp_path, read_only=True, warn=warnings.append).steps() == [1]
    assert not warnings and (tmp_path / "2.orbax-checkpoint-tmp").exists()
    with CheckpointStore(tmp_path, warn=warnings.append) as store:
        assert [f"{tmp_path}/2.orbax-checkpoint-tmp" in warning for warning in warnings] == [True, True]
        assert store.save(2, small(2), {})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2"]


def test_read_only_store_reads_and_changes_nothing(tmp_path: Path, warnings: list[str]) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(1, small(1), {})
        store.save(2, small(2), {})
    damage(tmp_path / "2" / "metadata" / "metadata", "flipped")
    before = sorted(path.name for path in tmp_path.iterdir())
    restored = CheckpointStore(tmp_path, read_only=True, warn=warnings.append).restore_latest(small(0))
    assert restored is not None
    assert restored.step == 1
    assert len(warnings) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


SAVE_UNTIL_KILLED = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jetrl_jax.record.checkpoint import CheckpointStore
template = {"w": jnp.zeros((256, 256)), "b": jnp.zeros(8, jnp.int32)}
with CheckpointStore(Path(sys.argv[1]), keep_last=2, keep_best=1) as store:
    restored = store.restore_latest(template)
    step = restored.step if restored else 0
    print("ready", step, flush=True)
    while True:
        step += 1
        state = {"w": jnp.full((256, 256), step, jnp.float32), "b": jnp.arange(8, dtype=jnp.int32) + step}
        store.save(step, state, {"policy_version": step}, {"reward/mean": (step * 7919) % 13 / 13})
        print(step, flush=True)
"""


def save_until_killed(directory: Path, delay_s: float) -> int:
    """Start the loop above, SIGKILL it ``delay_s`` after it is ready;
    the last step whose save had returned.
    """
    command = [sys.executable, "-c", SAVE_UNTIL_KILLED, str(directory)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2]
    ) as process:
        assert process.stdout is not None
        step = int(process.stdout.readline().removeprefix("ready "))
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().splitlines()
    return int(lines[-1]) if lines else step


def test_kills_at_random_moments_lose_at_most_the_save_in_progress(tmp_path: Path) -> None:
    kills = int(os.environ.get("JETRL_TEST_KILLS", "2"))
    moments = random.Random(0)
    for _ in range(kills):
        last = save_until_killed(tmp_path, moments.uniform(0.05, 0.8))
        warnings: list[str] = []
        with CheckpointStore(tmp_path, read_only=True, warn=warnings.append) as store:
            restored = store.restore_latest({"w": jnp.zeros((256, 256)), "b": jnp.zeros(8, jnp.int32)})
            if restored is None:
                assert last == 0
                continue
            assert not warnings
            # the save whose message was on its way may have been done
            assert last <= restored.step <= last + 1
            assert restored.metadata == {"policy_version": restored.step}
            np.testing.assert_array_equal(restored.state["w"], restored.step)
            for step in store.steps():  # the earlier ones are whole too
                np.testing.assert_array_equal(store.restore(step, restored.state).state["w"], step)


def config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "seed": 0,
        "model": {"path": None, "hidden_size": 128},
        "rollout": {"prompts_per_step": 8},
        "rewards": ({"name": "task", "weight": 1.0},),
        "optimizer": {"schedule": "constant"},
        "task": {"options": {}},
        "eval": {"every_steps": 0, "prompts": 512},
        "checkpoint": {"every_steps": 20, "keep_last": 2},
        "run": {"steps": 100, "directory": "a", "tensorboard": True},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = base
        for parent in parents:
            node = node[parent]
        node[last] = value
    return base


def test_compare_for_resume_lists_every_differing_field() -> None:
    changed = config(
        model__hidden_size=256,
        rollout__prompts_per_step=4,
        rewards=[{"name": "task", "weight": 2.0}],
        seed=False,
    )
    with pytest.raises(UserError) as error:
        compare_for_resume(config(), changed)
    message = str(error.value)
    assert "model.hidden_size: saved 128, now 256" in message
    assert "rollout.prompts_per_step: saved 8, now 4" in message
    assert "rewards.0.weight: saved 1.0, now 2.0" in message
    assert "seed: saved 0, now False" in message
    assert message.count("saved") == 5  # the four, and the hint


def test_compare_for_resume_allows_what_does_not_change_the_run() -> None:
    allowed = config(
        run__steps=200,
        run__directory="b",
        run__tensorboard=False,
        eval__every_steps=5,
        checkpoint__every_steps=1,
    )
    compare_for_resume(config(), allowed)
    compare_for_resume(config(rewards=[{"name": "task", "weight": 1.0}]), config())  # YAML knows no tuples


@pytest.mark.parametrize(
    ("saved", "current", "message"),
    [
        (config(), config(eval__prompts=16), "eval.prompts: saved 512, now 16"),
        (config(), config(task__options={"n": 1}), "task.options.n: saved '(absent)', now 1"),
        (config(task__extra=[]), config(task__extra={}), "task.extra: saved [], now {}"),
        (config(), config(optimizer__schedule="cosine"), "optimizer.schedule"),
    ],
)
def test_compare_for_resume_raises_on(saved: dict[str, Any], current: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match="not that of the run") as error:
        compare_for_resume(saved, current)
    assert message in str(error.value)


def test_compare_for_resume_ties_run_steps_to_a_schedule_that_follows_it() -> None:
    with pytest.raises(
        UserError, match=r"run.steps: saved 100, now 200; the learning-rate schedule ends there"
    ):
        compare_for_resume(
            config(optimizer__schedule="cosine"), config(optimizer__schedule="cosine", run__steps=200)
        )
