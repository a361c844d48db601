"""The benchmark against other trainers: its statistics and its clock, without any of the trainers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PEERS = Path(__file__).resolve().parents[1] / "benchmarks" / "peers"


def load(name: str) -> ModuleType:
    """A file of the benchmark as a module."""
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


compare, job = load("compare"), load("job")


def test_ratio_interval_covers_a_known_ratio() -> None:
    """Of 40 experiments with a true ratio of medians of 1.5, at least 36 intervals of 95 % hold it."""
    covered = 0
    for seed in range(40):
        noise = np.random.default_rng(seed)
        _, low, high = compare.ratio_interval(
            1.5 * noise.lognormal(0, 0.2, 30), noise.lognormal(0, 0.2, 30), seed
        )
        covered += low <= 1.5 <= high
    assert covered >= 36


def test_ratio_interval_shrinks_where_both_share_the_noise() -> None:
    """Rounds are resampled in pairs, so that a slow minute that hits both does not widen the interval of a
    mean-like ratio.
    """
    machine = np.random.default_rng(0).lognormal(0, 0.5, 400)
    _, low, high = compare.ratio_interval(2 * machine, machine)
    assert low == pytest.approx(2) and high == pytest.approx(2)


def test_verdict_claims_only_what_excludes_one() -> None:
    assert "no difference" in compare.verdict((1.1, 0.9, 1.3))
    assert "no difference" not in compare.verdict((1.2, 1.1, 1.3))
    assert "no difference" not in compare.verdict((0.8, 0.7, 0.9))


def test_tables_say_how_much_longer_the_others_took() -> None:
    ours = compare.Contender("jetrl:bf16", None, step_s=[0.1, 0.1, 0.1], tokens_per_s=[300.0] * 3)
    theirs = compare.Contender("trl:float32", None, step_s=[0.2, 0.2, 0.2], tokens_per_s=[100.0] * 3)
    text = compare.tables([ours, theirs])
    assert "| jetrl:bf16 | 100 (100 to 100) | 300 (300 to 300) |" in text
    assert "| jetrl:bf16 | 2.00 [2.00, 2.00] |" in text
    assert "| jetrl:bf16 | 3.00 [3.00, 3.00] |" in text and "train" not in text
    ours.train_tokens_per_s = [50.0] * 3
    torch = compare.Contender("torch:float32", None, step_s=[0.2] * 3, train_tokens_per_s=[25.0] * 3)
    text = compare.tables([ours, theirs, torch])
    assert (
        "| train tokens/s, ours / theirs | torch:float32 |\n|---|---|\n| jetrl:bf16 | 2.00 [2.00, 2.00] |"
        in text
    )


def test_prompts_fill_their_length_and_hold_no_stop() -> None:
    for name in ("tiny", "small"):
        setting = job.SETTINGS[name]
        tokenizer = job.build_tokenizer(setting)
        word = next(job.words(setting))
        ids = tokenizer.encode(job.prompt_of(word)).ids
        assert len(ids) == setting.prompt_tokens and max(ids) < job.VOCAB
        assert tokenizer.decode(ids, skip_special_tokens=True) == job.prompt_of(word)
        assert [tokenizer.token_to_id(name) for name in (job.PAD, job.EOS)] == [job.VOCAB, job.VOCAB + 1]


def test_prompts_of_the_real_model_fill_their_length_and_its_stop_is_no_token() -> None:
    setting = job.SETTINGS["real"]
    if not Path(setting.model, "tokenizer.json").is_file():
        pytest.skip("needs `make real-model`")
    tokenizer = job.build_tokenizer(setting)
    ids = tokenizer.encode(job.prompt_of(next(job.words(setting)))).ids
    assert len(ids) == setting.prompt_tokens
    assert [tokenizer.token_to_id(name) for name in (job.PAD, job.EOS)] == [49_152, 49_153]


def test_reward_counts_places() -> None:
    assert [job.reward_of(text, "abcd") for text in ("abcd", "abxxzz", "", "bcda")] == [1.0, 0.5, 0.0, 0.0]


def test_gate_times_exactly_the_steps_of_a_burst(tmp_path: Path) -> None:
    """A loop of 50 ms steps with 200 ms of pending work at the end of a burst: 3 steps are 350 ms, whatever
    the pauses.
    """
    worker = tmp_path / "worker.py"
    worker.write_text(
        textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(PEERS)!r})
        import job
        channel = job.Channel()
        print("noise of a library")
        gate = job.StepGate(channel, job.SETTINGS["tiny"], lambda: time.sleep(0.2), lambda: 7)
        job.introduce(channel, 1, {{}}, job.SETTINGS["tiny"])
        while True:
            gate.between_steps()
            time.sleep(0.05)
        """)
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, str(worker)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    contender = compare.Contender("toy", process)
    assert contender.answer()["ready"]
    compare.measure([contender], rounds=4, burst=3, rollouts=2, warmup=1)
    assert contender.ask(command="decode", count=2)["tokens"] == 14
    process.stdin.close()
    assert process.wait(timeout=10) == 0
    assert "noise of a library" in process.stderr.read()
    assert len(contender.step_s) == 4 and min(contender.step_s) >= 0.35 / 3
    assert min(contender.step_s) < 0.2  # with the pause between bursts it would be 0.217
