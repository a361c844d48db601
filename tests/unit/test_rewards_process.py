"""Rewards in worker processes: hangs, crashes, forks, noise and signals cost the sample at fault and nothing
else.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jetrl_jax.config.task import RewardSection
from jetrl_jax.errors import UserError
from jetrl_jax.rewards.functions import FAILURES, RewardFunctions
from jetrl_jax.tasks.base import Example
from jetrl_jax.tasks.registry import as_task, build_task
from jetrl_jax.workers import process
from tests.sections import task_section

TASK = as_task([{"prompt": str(i), "answer": str(i)} for i in range(9)], task_section())

MODULE = r"""
import ctypes, os, signal, subprocess, sys, time

def on_bad(action):
    def reward(completions, **kwargs):
        if "bad" in completions:
            action()
        return [float(len(c)) for c in completions]
    return reward

def close_everything():
    os.closerange(3, 256)

def fork_and_return():
    os.fork()

def fork_and_die():
    if os.fork() == 0:
        time.sleep(60)
    os._exit(3)

def alarm():
    def ring(*_):
        raise RuntimeError("rang")
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(30)

def noise():
    os.write(1, bytes(range(256)) * 5000)
    sys.stdout.write("text without end" * 1000)
    sys.stderr.buffer.write(b"\xff\xfe\x00" * 1000)
    subprocess.run([sys.executable, "-c", "print('child')"])
    print(sys.stdin.read(), end="")

hang = on_bad(lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(600)))
spin = on_bad(lambda: [None for _ in iter(int, 1)])
leave = on_bad(lambda: os._exit(7))
leave_politely = on_bad(lambda: sys.exit(0))
segfault = on_bad(lambda: ctypes.string_at(0))
kill = on_bad(lambda: os.kill(os.getpid(), signal.SIGKILL))
interrupt = on_bad(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
closes = on_bad(close_everything)
forks = on_bad(fork_and_return)
forks_and_dies = on_bad(fork_and_die)
alarms = on_bad(alarm)
noisy = on_bad(noise)
recursion = on_bad(lambda: (lambda f: f(f))(lambda f: f(f)))
memory = on_bad(lambda: bytearray(1 << 62))

def length(completions, **kwargs):
    return [float(len(c)) for c in completions]

def pid(completions, **kwargs):
    return [os.getpid()] * len(completions)

def facts(completions, **kwargs):
    jax = any(name.partition(".")[0] in ("jax", "numpy", "jetrl_jax") for name in sys.modules)
    return [jax, os.environ["JAX_PLATFORMS"] == "cpu", os.getpgrp() == os.getpid()]

def spawns(completions, **kwargs):
    return [subprocess.Popen(["sleep", "600"]).pid] * len(completions)

def wrong_alone(completions, **kwargs):
    if len(completions) > 1:
        raise ValueError
    return ["text"] if completions == ["bad"] else [float(len(completions[0]))]

def wrong(completions, **kwargs):
    return ["1"] * len(completions)

def infinite_alone(completions, **kwargs):
    if len(completions) > 1:
        raise ValueError("one by one")
    return [float("inf") if completions == ["zzz"] else 1.0]


def returns_nan(completions, **kwargs):
    return [float("nan"), None, 1.0]

def columns(prompts, answers, completion_ids, finish_reasons, metadata):
    return [len(p) + int(a) + sum(i) + len(f) + m["x"] for p, a, i, f, m in zip(prompts, answers, completion_ids, finish_reasons, metadata)]

NUMBER = 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "user_rewards.py").write_text(MODULE)
    (tmp_path / "user_broken.py").write_text("raise SystemExit('no')")
    (tmp_path / "user_dies.py").write_text("import os; print('last words', flush=True); os._exit(9)")
    monkeypatch.syspath_prepend(str(tmp_path))


def build(*names: str, timeout_s: float = 2.0, **kwargs) -> RewardFunctions:
    return RewardFunctions.from_config(
        tuple(
            RewardSection(name=f"user_rewards:{n}" if ":" not in n else n, timeout_s=timeout_s) for n in names
        ),
        TASK,
        **kwargs,
    )


def run(rewards: RewardFunctions, completions: list[str]):
    examples = [Example("p" * i, str(i), id=i, metadata={"x": 100 * i}) for i in range(len(completions))]
    return rewards(
        [e.prompt for e in examples],
        completions,
        examples,
        ["stop"] * len(completions),
        [np.arange(i + 1) for i in range(len(completions))],
    )


def only(result) -> tuple[list[float], dict[str, int]]:
    (counts,) = result.failures.values()
    return result.total.tolist(), {cause: n for cause, n in counts.items() if n}


BATCH = ["a", "bb", "bad", "dddd"]


@pytest.mark.parametrize(
    ("name", "cause", "message"),
    [
        ("hang", "timeout", "no answer within 2 s"),
        ("spin", "timeout", "no answer within 2 s"),
        ("leave", "exception", "its process ended: exit status 7"),
        ("leave_politely", "exception", "SystemExit: 0"),
        ("segfault", "exception", "its process ended: signal 11.*Segmentation fault.*in reward"),
        ("kill", "exception", "its process ended: signal 9"),
        ("interrupt", "exception", "KeyboardInterrupt"),
        ("closes", "exception", "its process ended"),
        ("forks_and_dies", "exception", "its process ended: exit status 3"),
        ("alarms", "exception", "RuntimeError: rang"),
        ("recursion", "exception", "RecursionError"),
        ("memory", "exception", "MemoryError|OverflowError"),
    ],
)
def test_worker_failure_costs_its_sample_alone(module, name, cause, message):
    with build(name) as rewards:
        result = run(rewards, BATCH)
        np.testing.assert_array_equal(result.total, [1, 2, np.nan, 4])
        assert only(result)[1] == {cause: 1}
        assert result.messages[0].startswith(f"reward user_rewards:{name}: ")
        assert re.search(message, "\n".join(result.messages)), result.messages
        np.testing.assert_array_equal(run(rewards, ["x", "yy"]).total, [1, 2])


@pytest.mark.parametrize("name", ["noisy", "forks"])
def test_worker_noise_and_forks_do_not_disturb(module, name, capfd):
    with build(name, timeout_s=20) as rewards:
        for batch in (BATCH, ["bad", "x", "yy"], ["z"]):
            result = run(rewards, batch)
            assert only(result) == ([float(len(c)) for c in batch], {}) and not result.messages
            time.sleep(0.1)  # a second reply of a fork would answer the next batch
    printed = "".join(capfd.readouterr())
    assert not [text for text in ("text without end", "child", "\x01\x02\x03") if text in printed]


def test_worker_is_light_isolated_and_reused(module):
    with build("facts", "pid", timeout_s=20) as rewards:
        first, second = run(rewards, ["a", "b", "c"]), run(rewards, ["a", "b", "c"])
        np.testing.assert_array_equal(first.parts["user_rewards:facts"], [0, 1, 1])
        np.testing.assert_array_equal(first.parts["user_rewards:pid"], second.parts["user_rewards:pid"])
        assert first.parts["user_rewards:pid"][0] != os.getpid()


def test_worker_starts_with_the_first_batch_and_closes(module):
    rewards = build("pid", timeout_s=20)
    assert rewards._rewards[0].scorer._process is None
    pid = int(run(rewards, ["a"]).total[0])
    os.kill(pid, 0)
    rewards.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert int(run(rewards, ["a"]).total[0]) != pid
    rewards.close()


def test_worker_that_died_between_batches_is_replaced(module):
    with build("pid", timeout_s=20) as rewards:
        pid = int(run(rewards, ["a"]).total[0])
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        result = run(rewards, ["a", "b"])
        assert only(result)[1] == {} and not result.messages and int(result.total[0]) != pid


def gone(pid: int, limit_s: float = 10.0) -> bool:
    """Whether a process ends (a zombie counts as ended) within the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_worker_takes_its_children_along(module):
    with build("spawns", timeout_s=20) as rewards:
        child = int(run(rewards, ["a"]).total[0])
        assert not gone(child, 0.2)
    assert gone(child)


def test_worker_ends_with_a_killed_trainer(module, tmp_path):
    program = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from jetrl_jax.config.task import ArithmeticSection; from jetrl_jax.rewards.functions import RewardFunctions
from jetrl_jax.tasks.base import Example; from jetrl_jax.tasks.registry import build_task
names = ["user_rewards:pid", "user_rewards:spawns", "user_rewards:hang"]
rewards = RewardFunctions.from_functions(names, build_task(ArithmeticSection(), 0), timeout_s=600)
call = lambda text: rewards(["p"], [text], [Example("p", "1")], ["stop"], [[1]])
parts = call("a").parts
print(int(parts[names[0]][0]), int(parts[names[1]][0]), rewards._rewards[2].scorer._process.pid, flush=True)
call("bad")
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    time.sleep(0.5)  # until the last one hangs
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert [gone(pid) for pid in pids] == [True, True, True]


def test_worker_hangs_are_bounded_in_number(module, monkeypatch):
    monkeypatch.setattr(process, "MAX_HANGS", 2)
    with build("hang", timeout_s=2.0) as rewards:
        started = time.monotonic()
        result = run(rewards, ["a"] + ["bad"] * 30 + ["c"])
        assert time.monotonic() - started < 30
        assert only(result)[1] == {"timeout": 31} and result.total[0] == 1
        assert "gave up on 29 completions after 2 time-outs and 0 crashes" in "\n".join(result.messages)


def test_worker_crashes_are_bounded_in_number(module, monkeypatch):
    monkeypatch.setattr(process, "MAX_CRASHES", 2)
    with build("leave") as rewards:
        result = run(rewards, ["bad"] * 5)
        assert only(result)[1] == {"exception": 5}


def test_worker_slow_batch_is_scored_one_by_one(module, tmp_path):
    (tmp_path / "user_slow.py").write_text(
        "import time\ndef slow(completions):\n    time.sleep(0.4 * len(completions))\n    return "
        "[1.0] * len(completions)"
    )
    with build("user_slow:slow", timeout_s=2.0) as rewards:
        result = run(rewards, ["a"] * 8)
        assert only(result) == ([1.0] * 8, {})
        assert result.messages == ["reward user_slow:slow: no answer for 8 completions within 2 s"]


def test_worker_nan_and_none(module):
    with build("returns_nan", timeout_s=20) as rewards:
        result = run(rewards, ["a", "b", "c"])
        np.testing.assert_array_equal(result.total, [np.nan, np.nan, 1])
        assert only(result)[1] == {"none": 1, "nan": 1}
        assert set(result.failures["user_rewards:returns_nan"]) == set(FAILURES)


def test_worker_gets_the_columns_and_large_batches(module):
    with build("columns", timeout_s=20) as rewards:
        np.testing.assert_array_equal(
            run(rewards, ["a", "b", "c"]).total, [4 + 0, 1 + 1 + 1 + 4 + 100, 2 + 2 + 3 + 4 + 200]
        )
    with build("length", timeout_s=60) as rewards:
        result = run(rewards, ["x" * 1_000_000] * 20)
        assert only(result) == ([1e6] * 20, {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("user_rewards:no", "cannot be loaded: AttributeError"),
        ("no_such_module:f", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("user_broken:f", "cannot be loaded: SystemExit: no"),
        (
            "user_dies:f",
            "its process ended while it was loaded: exit status 9; its last output: 'last words'",
        ),
        ("user_rewards:NUMBER", "is int, expected a function"),
    ],
)
def test_worker_raises_on_a_function_that_cannot_be_loaded(module, name, message):
    with build(name) as rewards, pytest.raises(UserError, match=rf"^reward {name}: {message}"):
        rewards.start()


def test_worker_raises_naming_a_function_that_returns_no_numbers(module):
    with build("wrong", timeout_s=20) as rewards:
        for _ in range(2):
            with pytest.raises(
                UserError,
                match=r"^reward user_rewards:wrong: returned str '1' for completion 0 \('a' after the "
                r"prompt ''\)",
            ):
                run(rewards, ["a", "b"])
    # the batch's call fails, those of single samples follow
    with build("infinite_alone", timeout_s=20) as rewards:
        with pytest.raises(
            UserError,
            match=r"infinite_alone: returned inf for completion 2 \('zzz' after the prompt 'pp'\), expected",
        ):
            run(rewards, ["x", "yy", "zzz"])


def test_worker_has_no_stale_replies_after_an_error(module):
    with build("wrong_alone", timeout_s=20) as rewards:
        with pytest.raises(UserError, match="wrong_alone: returned str 'text'"):
            run(rewards, ["bad", "a", "a"])
        assert only(run(rewards, ["xxx", "yy"])) == ([3, 2], {})


def test_worker_log_goes_to_the_run_directory(module, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_LOG_BYTES", 1000)
    log = tmp_path / "reward-user_rewards_noisy.log"
    with build("noisy", timeout_s=20, log_directory=tmp_path) as rewards:
        run(rewards, BATCH)
        assert log.stat().st_size > 1_280_000 and b"child" in log.read_bytes()
        run(rewards, ["a"])
        assert log.stat().st_size == 0


def test_callable_in_a_separate_process(module):
    import importlib

    user = importlib.import_module("user_rewards")
    with RewardFunctions.from_functions([user.length], TASK, separate_process=True, timeout_s=20) as rewards:
        np.testing.assert_array_equal(run(rewards, ["a", "bb"]).total, [1, 2])


def test_task_verifier_in_a_process_survives_an_answer_that_never_ends():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym (extra tasks) is not installed")
    section = task_section(kind="reasoning_gym", name="countdown", options={"train_size": 4, "eval_size": 4})
    task = build_task(section, 0)
    examples = task.train[:3]
    texts = [examples[0].solution, "1", "9**9**9**9**9"]
    with RewardFunctions.from_config((RewardSection(timeout_s=6.0),), task) as rewards:
        rewards.start()
        result = rewards([e.prompt for e in examples], texts, examples, ["stop"] * 3, [[1]] * 3)
    values, causes = only(result)
    assert values[0] == 1 and values[1] < 1
    assert causes == {"timeout": 1} and np.isnan(values[2])


def test_math_verify_runs_in_a_process_under_its_own_signals():
    pytest.importorskip("math_verify", reason="math-verify (extra tasks) is not installed")
    examples = [Example("p", "1/2"), Example("p", "1/2"), Example("p", "")]
    handler = signal.getsignal(signal.SIGALRM)
    with RewardFunctions.from_config((RewardSection(name="math_verify", timeout_s=30),), TASK) as rewards:
        result = rewards(["p"] * 3, ["\\boxed{0.5}", "\\boxed{2}", "4"], examples, ["stop"] * 3, [[1]] * 3)
    np.testing.assert_array_equal(result.total, [1, 0, np.nan])
    assert result.failures["math_verify"]["none"] == 1
    assert signal.getsignal(signal.SIGALRM) is handler


def test_task_that_cannot_be_pickled_is_named():
    class Local:
        name, train, eval = "local", (Example("a", "1"),), (Example("b", "1"),)

        def verify(self, completion, example):
            return 1.0

    with pytest.raises(UserError, match=r"reward task: its verifier cannot be sent .*picklable verifier"):
        RewardFunctions.from_config((RewardSection(separate_process=True),), Local())
