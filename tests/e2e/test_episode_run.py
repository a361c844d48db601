"""Whole runs of episodes: exact, masked, independent of the time that environments take, and resumable."""

from __future__ import annotations

import copy
import json
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import pytest
from faulty_environment import FAULTY_TURN, KILLED, KINDS, NEVER, kind_of
from tiny import ROOT, TINY, command_environment, manifest, rows, train_command, write_config

from jetrl_jax.collect.batch import RolloutBatch
from jetrl_jax.collect.clock import StepClock
from jetrl_jax.collect.collector import Collector
from jetrl_jax.collect.prompts import SEED_DATA
from jetrl_jax.config.load import config_from_dict
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.errors import UserError
from jetrl_jax.rl.batching import count_denominators, pack
from jetrl_jax.rollout.types import Trajectory, Turn
from jetrl_jax.runs.grpo import GRPOTrainer
from jetrl_jax.tasks.environments.guess_number import GuessNumber


class Slow(GuessNumber):
    """Takes a random time for each turn."""

    def step(self, text: str) -> Any:
        time.sleep(random.SystemRandom().random() / 50)
        return super().step(text)


CHARACTERS = "?<>!01234567"
SEED = 352  # in four steps every fault of `KINDS`, in each step fewer hangs than a worker gives up after
MESSAGES = {
    "": "",
    "raises": "exception: RuntimeError: by the schedule",
    "hangs": "timeout: no answer within 5 s",
    "dies": "exception: its process ended: exit status 7",
}


def config(
    directory: Any,
    turns: str = "lockstep",
    sections: Mapping[str, Any] = MappingProxyType({}),
    **task: Any,
) -> RunConfig:
    """Guess one of eight in three turns of one token; `sections` replace others, `task` changes its own."""
    data = copy.deepcopy(TINY) | {
        "tokenizer": {"characters": CHARACTERS},
        "task": {
            "kind": "environment",
            "name": "guess_number",
            "options": {"numbers": 8},
            "max_turns": 3,
            "stop_texts": list(CHARACTERS),
            "solved": 0.5,
            "train_size": 32,
            "eval_size": 8,
        }
        | task,
        "rewards": [{}],
        "warm_start": None,
        "checkpoint": {"every_steps": 1, "keep_last": 5},
    }
    data["model"] |= {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    data["rollout"] |= {
        "turns": turns,
        "max_prompt_tokens": 1,
        "max_turn_tokens": 1,
        "max_completion_tokens": 6,
    }
    data["rollout"]["engine"] |= {"decode_chunk_tokens": 1}
    data["run"] |= {"directory": str(directory), "steps": 2, "samples_per_step": 2}
    return config_from_dict(data | sections)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run whose episodes stream; that lockstep is the same is a long test's claim."""
    directory = tmp_path_factory.mktemp("episodes") / "run"
    trainer = GRPOTrainer(config(directory, "stream"))
    outcome = trainer.train()
    return directory, outcome, trainer


def test_credit_per_turn_needs_the_reward_of_the_environment(tmp_path):
    """Also among functions given in Python, which replace the config's."""
    plain = config(tmp_path / "run")
    turn = plain.model_copy(update={"algorithm": plain.algorithm.model_copy(update={"credit": "turn"})})
    with pytest.raises(UserError, match="got reward_functions without 'task'"):
        GRPOTrainer(turn, reward_functions=[lambda completions, **columns: [0.0] * len(completions)])
    assert not (tmp_path / "run").exists()


def test_a_run_of_episodes_is_exact_and_leaves_its_record(finished):
    directory, outcome, _ = finished
    for row in rows(directory)[1:]:
        assert (
            row["mismatch/logprob_abs_max"] == 0
            and row["policy/trained_tokens"] == row["count/rollout_tokens"]
        )
        assert 1 <= row["episode/turns_mean"] <= 3 and row["episode/failed_fraction"] == 0
    assert outcome["after"]["eval/turns_mean"] > 1
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    for split in ("train", "eval"):
        episode = next(one for one in samples if one["split"] == split and len(one["turn_rewards"]) > 1)
        observed = [
            token
            for token, logprob in zip(episode["tokens"], episode["logprobs"], strict=True)
            if logprob is None
        ]
        assert set(observed) <= {"<", ">", "!"} and len(observed) == episode["logprobs"].count(None) > 0


def test_a_warm_start_learns_the_turns_of_demonstrations_only(tmp_path):
    parts = GRPOTrainer(config(tmp_path / "run", sections={"warm_start": {"steps": 1}})).parts
    assert parts.sampler is not None
    batch, decode = parts.sampler.batch(0), parts.policy.tokenizer.decode
    parts.task.close()
    assert set(decode(batch.token_ids[batch.loss_mask].tolist())) == set("01234567")
    assert set("?<>") <= set(decode(batch.token_ids[~batch.loss_mask].tolist()))


def test_unmasking_one_observation_token_changes_the_gradient(finished):
    """The log-probabilities stay as they were: an observation is context either way."""
    _, _, trainer = finished
    parts = trainer.parts
    programs, state = parts.programs, parts.programs.init(parts.policy.params)
    engine = parts.new_engine()
    with parts.new_rewards() as rewards:
        batch = parts.new_step(engine, rewards, state, None).collector.collect(1, StepClock())
    trajectories = batch.trajectories
    chosen = next(i for i, t in enumerate(trajectories) if len(t.turns) > 2)
    one, turn = trajectories[chosen], trajectories[chosen].turns[2]
    sampled = one.sampled.copy()
    sampled[turn.start] = True
    roles = tuple(Turn(t.start, t.stop, "policy", "stop") if t == turn else t for t in one.turns)
    unmasked = Trajectory(one.request_id, one.token_ids, sampled, one.logprobs, roles, one.versions)

    def gradient(members: list[Trajectory]) -> tuple[Any, list[np.ndarray]]:
        ones = np.linspace(-1, 1, len(members))
        micro = pack(members, ones, np.ones(len(members), bool), 7, 112)
        total, logprobs = None, []
        for part in micro:
            counts = count_denominators(micro, 6)
            total, _, values = programs.next_gradient(total, state, part, counts, parts.algorithm)
            logprobs.append(np.asarray(values))
        return jax.tree.map(np.asarray, jax.tree.leaves(total)), logprobs

    masked, before = gradient(trajectories)
    again, _ = gradient(trajectories)
    other, after = gradient([*trajectories[:chosen], unmasked, *trajectories[chosen + 1 :]])
    assert all(np.array_equal(a, b) for a, b in zip(masked, again, strict=True))
    assert sum(not np.array_equal(a, b) for a, b in zip(masked, other, strict=True)) > len(masked) // 2
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("turns", ["lockstep", "stream"])
def test_the_time_of_environments_and_their_workers_change_nothing(turns, finished, tmp_path):
    slow = config(tmp_path / "run", turns, name="test_episode_run:Slow", workers=3)
    GRPOTrainer(slow).train()
    assert rows(tmp_path / "run") == rows(finished[0])
    assert exported_weights(tmp_path / "run") == exported_weights(finished[0])


@pytest.mark.long
@pytest.mark.parametrize("turns", ["lockstep", "stream"])
def test_a_resumed_run_of_episodes_equals_an_uninterrupted_one(turns, finished, tmp_path):
    """In lockstep too, after steps in a stream."""
    directory = tmp_path / "run"
    shutil.copytree(finished[0], directory)
    shutil.rmtree(next((directory / "checkpoints").glob("*2")))
    GRPOTrainer(config(directory, turns), resume=True).train()
    assert rows(directory) == rows(finished[0])
    assert exported_weights(directory) == exported_weights(finished[0])


@pytest.mark.long
def test_a_run_with_faults_killed_in_a_step_resumes_bit_for_bit(tmp_path, compilation_cache, monkeypatch):
    """Environments raise, hang and die in `reset` and `step`; the record counts what the schedule says.

    The trainer is killed in its third step, by an environment, and goes on in lockstep and as a stream.
    """

    def run(name: str, turns: str = "lockstep") -> RunConfig:
        shown = "".join(KINDS)
        sections = {
            "seed": SEED,
            "tokenizer": {"characters": CHARACTERS + shown},
            "run": {"directory": str(tmp_path / name), "steps": 4, "tensorboard": False},
        }
        faulty = {"name": "faulty_environment:Faulty", "workers": 2, "timeout_s": 5.0, "train_size": 64}
        stops = list(CHARACTERS + shown)
        return config(tmp_path / name, turns, sections, **faulty, stop_texts=stops)

    batches: list[RolloutBatch] = []
    collect = Collector.collect
    with monkeypatch.context() as patch:
        patch.setattr(Collector, "collect", lambda *given: batches.append(collect(*given)) or batches[-1])
        trainer = GRPOTrainer(run("whole"))
        trainer.train()

    met, whole = Counter[str](), rows(tmp_path / "whole")
    for row, batch in zip(whole[1:], batches, strict=True):
        failed = []
        for group in batch.groups:
            kind = KINDS[group.prompt.example.prompt]
            for place, episode in enumerate(group.episodes):
                begins = not kind.startswith("again") or place < 2  # of a group, each worker resets two
                turns = len(episode.example.metadata["turns"])
                fault = kind if not begins or (kind.startswith("step") and turns >= FAULTY_TURN) else ""
                assert episode.trajectory.sampled.any() == begins and bool(episode.failed) == bool(fault), (
                    episode
                )
                assert MESSAGES[fault.rpartition(" ")[2]] in episode.failed
                failed.append(bool(fault))
                met[fault] += 1
        assert row["episode/failed_fraction"] * 16 == row["count/reward_task_none"] == sum(failed) > 0
        sampled = [t.sampled.sum() for t, out in zip(batch.trajectories, failed, strict=True) if not out]
        assert row["policy/trained_tokens"] == sum(sampled) and row["mismatch/logprob_abs_max"] == 0
    assert met.keys() == set(KINDS.values())
    taken = [group.prompt.example for batch in batches for group in batch.groups]
    order = np.random.default_rng((SEED, SEED_DATA, 0)).permutation(64).tolist()
    drawn = order[: order.index(taken[-1].id) + 1]
    skipped = [trainer.parts.task.train[i] for i in sorted({*drawn} - {example.id for example in taken})]
    trainer.parts.task.close()
    assert all(kind_of(example.metadata["seed"]) == NEVER for example in skipped)
    assert sum(row["count/skipped_prompts"] for row in whole[1:]) == len(skipped) > 0

    seed = next(
        g.prompt.example.metadata["seed"] for g in batches[2].groups if g.prompt.example.prompt == "a"
    )
    command = train_command(write_config(run("killed"), tmp_path / "killed.yaml"))
    environment = command_environment(compilation_cache) | {KILLED: str(seed)}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert rows(tmp_path / "killed") == whole[:3]
    for turns in ("lockstep", "stream"):
        shutil.copytree(tmp_path / "killed", tmp_path / turns)
        GRPOTrainer(run(turns, turns), resume=True).train()
        assert rows(tmp_path / turns) == whole
        assert manifest(tmp_path / turns) == manifest(tmp_path / "whole")
        for file in ("samples.jsonl", "export/model.safetensors"):
            assert (tmp_path / turns / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.long
def test_the_environment_of_the_front_page_runs(tmp_path, compilation_cache):
    """Its file and its command as they stand, but for two steps."""
    page = (ROOT / "README.md").read_text(encoding="utf-8").split("### An environment of your own")[1]
    code, command = re.findall(r"```(?:python|bash)\n(.*?)```", page, flags=re.DOTALL)[:2]
    (tmp_path / "higher.py").write_text(code)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    words = shlex.split(command.replace("\\\n", " ").replace("run.steps=20", "run.steps=2"))
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=tmp_path,
        env=command_environment(compilation_cache),
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "runs" / "higher")[-1]["episode/turns_mean"] > 1


def exported_weights(directory: Path) -> bytes:
    return (directory / "export" / "model.safetensors").read_bytes()
