"""Environments in worker processes: the contract, replay, and faults that cost the episode at fault only."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from jetrl_jax.config.load import config_from_dict
from jetrl_jax.errors import UserError
from jetrl_jax.tasks.environment import EnvironmentTask
from jetrl_jax.tasks.environments.calculator import calculate
from jetrl_jax.tasks.environments.guess_number import GuessNumber
from jetrl_jax.workers import environments
from jetrl_jax.workers.environments import EnvironmentPool, Job

MODULE = r"""
import os, sys, time

class Echo:
    "Answers each action by the seed and all actions so far; some words do something else."
    def __init__(self, bad_seed=None, fault=""):
        self.bad_seed, self.fault, self.said = bad_seed, fault, []

    def do(self, fault):
        if fault == "raises":
            raise RuntimeError("broken")
        if fault == "exits":
            sys.exit(0)
        if fault == "dies":
            os._exit(7)
        if fault == "hangs":
            time.sleep(600)

    def reset(self, *, seed=None, options=None):
        self.said = [str(seed)]
        if seed == self.bad_seed:
            self.do(self.fault)
        return self.said[0], {}

    def step(self, text):
        self.do(text)
        self.said.append(text)
        answer = "x" * 3_000_000 if text == "floods" else str(time.time()) if text == "clock" else " ".join(self.said)
        if text == "surrogate":
            answer = "\ud800"
        return answer, float(len(self.said)), text == "end", text == "cut", {"tool_calls": 1}

    def close(self):
        pass

class NoClose:
    reset = step = lambda self: None

class Varies(Echo):
    def reset(self, *, seed=None, options=None):
        return str(time.perf_counter_ns()), {}

class OldStep(Echo):
    def step(self, text):
        return "observation", 0.0, True, {}

class NoText(Echo):
    def reset(self, *, seed=None, options=None):
        return {"board": 1}, {}

class OddReward(Echo):
    def step(self, text):
        return "", float("nan"), False, False, {}

class LateBreach(Echo):
    def step(self, text):
        return ("", 0.0, False, False, {}) if not text else ("", 0.0, "no", False, {})

def not_an_environment():
    return 3
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    directory = tmp_path_factory.mktemp("environments")
    (directory / "probe_environments.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        yield "probe_environments"


def pool_of(module, name="Echo", workers=1, timeout_s=30.0, **options):
    return EnvironmentPool(name, f"{module}:{name}", options, workers=workers, timeout_s=timeout_s)


def played(pool, actions):
    """The answers to actions of several episodes, one turn after the other; an episode ends where it failed."""
    answers = pool.play([Job(key, 10 + key) for key in range(len(actions))])
    rows = [[answer] for answer in answers]
    for turn in range(max(map(len, actions))):
        live = [key for key, row in enumerate(rows) if turn < len(actions[key]) and not row[-1].failed]
        jobs = [Job(key, 10 + key, tuple(actions[key][: turn + 1]), rows[key][-1].digest) for key in live]
        for key, answer in zip(live, pool.play(jobs), strict=True):
            rows[key].append(answer)
    return rows


def test_episodes_keep_their_state_and_workers_change_nothing(module):
    actions = [["a", "b"], ["c"], ["d", "e", "end"], ["cut"]]
    results = []
    for workers in (1, 3):
        pool = pool_of(module, workers=workers)
        results.append(played(pool, actions))
        pool.close()
    assert results[0] == results[1]
    assert [a.observation for a in results[0][2]] == ["12", "12 d", "12 d e", "12 d e end"]
    last = results[0][2][-1]
    assert (last.reward, last.terminated, last.truncated) == (4.0, True, False) and last.counts[
        "tool_calls"
    ] == 1
    assert results[0][3][-1].truncated


@pytest.mark.parametrize("fault", ["raises", "exits", "dies", "hangs"])
def test_a_fault_in_a_step_costs_one_episode(module, fault):
    pool = pool_of(module, timeout_s=3.0)
    whole = played(pool, [["a", "b", "c"], ["a", "b", "c"], ["d", "e"]])
    with_fault = played(pool, [["a", "b", "c"], ["a", fault, "c"], ["d", "e"]])
    pool.close()
    assert with_fault[0] == whole[0] and with_fault[2] == whole[2]
    failed = with_fault[1][-1]
    assert failed.failed == ("timeout" if fault == "hangs" else "exception"), failed
    expected = {"raises": "broken", "exits": "SystemExit", "dies": "exit status 7", "hangs": "within 3 s"}
    assert expected[fault] in failed.message


@pytest.mark.parametrize("fault", ["raises", "dies", "hangs"])
def test_a_fault_in_reset_costs_one_episode(module, fault):
    pool = pool_of(module, timeout_s=3.0, bad_seed=11, fault=fault)
    rows = played(pool, [["a"], ["a"], ["b"]])
    pool.close()
    assert [row[-1].observation for row in rows] == ["10 a", "", "12 b"]
    assert rows[1][0].failed and len(rows[1]) == 1


def test_workers_give_up_after_many_hangs(module, monkeypatch):
    monkeypatch.setattr(environments, "MAX_HANGS", 2)
    pool = pool_of(module, timeout_s=2.0)
    rows = played(pool, [["hangs"]] * 4)
    pool.close()
    assert ["given up" in row[-1].message for row in rows] == [False, False, True, True]
    assert {row[-1].failed for row in rows} == {"timeout"}


def test_an_environment_that_answers_its_history_otherwise_fails(module):
    pool = pool_of(module)
    first = pool.play([Job(0, 10), Job(1, 11)])
    second = pool.play([Job(0, 10, ("clock",), first[0].digest), Job(1, 11, ("dies",), first[1].digest)])
    (third,) = pool.play([Job(0, 10, ("clock", "b"), second[0].digest)])
    pool.close()
    assert second[1].failed == "exception" and third.failed == "not repeatable", third


def conversed(pool, actions):
    """As `played`, each episode as soon as it is answered; the time of each answer."""
    rows = [[answer] for answer in pool.play([Job(key, 10 + key) for key in range(len(actions))])]
    conversation, open_, times = pool.conversation(), len(actions), {}
    conversation.begin(range(len(actions)))

    def ask(key):
        if len(rows[key]) > len(actions[key]) or rows[key][-1].failed:
            conversation.end(key)
            return 1
        job = Job(key, 10 + key, tuple(actions[key][: len(rows[key])]), rows[key][-1].digest)
        conversation.ask(job)
        return 0

    open_ -= sum(ask(key) for key in range(len(actions)))
    while open_:
        for key, answer in conversation.answers(wait=True):
            times[key, len(rows[key])] = time.monotonic()
            rows[key].append(answer)
            open_ -= ask(key)
    conversation.close()
    return rows, times


@pytest.mark.parametrize("fault", ["", "raises", "dies", "hangs"])
def test_a_conversation_has_the_answers_of_play(module, fault):
    """A fault costs its own episode; the others of a killed worker are played again."""
    actions = [["a", "b", "c"], ["a", fault or "b", "c"], ["d", "e", "end"], ["x"], ["y", "z"]]
    pool, other = pool_of(module, timeout_s=3.0), pool_of(module, workers=2, timeout_s=3.0)
    expected = played(pool, actions)
    for one in (pool, other):
        rows, times = conversed(one, actions)
        for got, want in zip(rows, expected, strict=True):
            assert got == want or (got[-1].failed == want[-1].failed != "" and got[:-1] == want[:-1])
        one.close()
    if fault == "hangs":  # with two workers, the episodes of the other one do not wait
        assert times[0, 3] < times[1, 2] and times[4, 2] < times[1, 2]


@pytest.mark.parametrize(("limit", "fault"), [("MAX_HANGS", "hangs"), ("MAX_CRASHES", "dies")])
def test_a_conversation_that_gave_up_leaves_no_answer_to_play(module, monkeypatch, limit, fault):
    """Jobs after the limit are asked in a batch of their own, which `begin` must not send."""
    monkeypatch.setattr(environments, limit, 1)
    pool = pool_of(module, timeout_s=3.0)
    first, second = pool.play([Job(0, 10), Job(1, 11)])
    conversation, messages = pool.conversation(), []
    conversation.begin([0, 1])
    for job in (Job(0, 10, (fault,), first.digest), Job(1, 11, ("a",), second.digest)):
        conversation.ask(job)
        ((key, answer),) = conversation.answers(wait=True)
        assert key == job.key
        messages.append(answer.message)
    conversation.close()
    assert "given up" not in messages[0] and "given up" in messages[1]
    assert [answer.observation for answer in pool.play([Job(0, 20), Job(1, 21)])] == ["20", "21"]
    pool.close()


def test_a_conversation_raises_on_a_broken_contract(module):
    pool = pool_of(module, "LateBreach")
    with pytest.raises(UserError, match="terminated='no', expected True or False"):
        conversed(pool, [["a"]])
    pool.close()


def test_a_flood_and_a_broken_text_are_cut_and_replaced(module):
    pool = pool_of(module)
    rows = played(pool, [["floods"], ["surrogate"]])
    pool.close()
    assert len(rows[0][-1].observation) == 1 << 20 and rows[1][-1].observation == "?"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoClose", "no method close, expected reset, step, close"),
        ("Varies", "two observations"),
        ("OldStep", r"expected \(observation, reward, terminated, truncated, info\)"),
        ("NoText", "expected text or a list"),
        ("OddReward", "reward=nan, expected a finite number"),
        ("not_an_environment", "int has no method reset"),
        ("missing", "cannot be played: AttributeError"),
    ],
)
def test_check_raises_on_a_broken_contract(module, name, message):
    pool = pool_of(module, name)
    with pytest.raises(UserError, match=rf"environment {name}: .*{message}.*\. docs/environments.md has the"):
        pool.check()
    pool.close()


def test_play_raises_on_a_contract_broken_later(module):
    pool = pool_of(module, "LateBreach")
    pool.check()
    with pytest.raises(UserError, match="terminated='no', expected True or False"):
        played(pool, [["a"]])
    pool.close()


def task_of(**section):
    data = {"task": {"kind": "environment", **section}, "rollout": {"max_turn_tokens": 1}}
    return EnvironmentTask(config_from_dict(data).environment, 3)


def test_task_splits_seeds_and_skips_an_episode_that_cannot_begin(module):
    task = task_of(name="guess_number", train_size=100, eval_size=8)
    train, held_out = ({e.metadata["seed"] for e in split} for split in (task.train, task.eval))
    assert len(train) == 100 and max(train) < 1 << 30 == min(held_out)
    other = task_of(name="guess_number", train_size=100, eval_size=8)
    assert list(task.train) == list(other.train)
    seed = task.train[4].metadata["seed"]
    broken = task_of(name=f"{module}:Echo", options={"bad_seed": seed, "fault": "raises"}, train_size=5)
    assert "RuntimeError: broken" in broken.train[4].metadata["skipped"] and broken.train[3].prompt != ""
    for one in (task, other, broken):
        one.close()


def test_guess_number_demonstrations_follow_the_answers_and_are_not_the_best():
    turns = []
    for seed in range(400):
        game = GuessNumber()
        game.reset(seed=seed)
        low, high = 0, 16
        guesses = game.demonstration()
        for guess in guesses[:-1]:
            value = int(guess, 16)
            assert low <= value < high
            answer, reward, *ended, _ = game.step(guess)
            low, high = (value + 1, high) if answer == ">" else (low, value)
            assert reward == 0.0 and ended == [False, False]
        assert game.step(guesses[-1])[1:4] == (1 - 0.05 * (len(guesses) - 1), True, False)
        turns.append(len(guesses))
    # a random search tree of 16 numbers: 2 (1 + 1/16) H_16 - 3 = 4.18 turns
    assert abs(np.mean(turns) - 4.18) < 0.3
    assert game.step("??")[0] == "!" and game.step("g")[0] == "!"


def test_calculate_matches_python_and_refuses_the_rest():
    rng = random.Random(0)
    for _ in range(200):
        text = str(rng.randrange(100)) + "".join(
            rng.choice(["+", "-", "*", "//", "%"]) + str(rng.randrange(1, 99)) for _ in range(3)
        )
        assert calculate(text) == eval(text)
    assert calculate("-(2**10) / 4") == -256.0
    for text in (
        "9**9**9",
        "2**101",
        "1/0",
        "__import__('os')",
        "x",
        "1;2",
        "(" * 150,
        "1" * 300,
        "True",
        "'a'*3",
        "(-8)**0.5",
    ):
        with pytest.raises(ValueError):
            calculate(text)
