"""Held-out evaluation with a stub engine: pass@k against counting, metrics against the plan, failures,
determinism.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jetrl_jax.collect.clock import StepClock
from jetrl_jax.collect.collector import Collector
from jetrl_jax.collect.prompts import PromptStream
from jetrl_jax.config.load import config_from_dict
from jetrl_jax.config.task import RewardSection
from jetrl_jax.errors import UserError
from jetrl_jax.record.console import Console
from jetrl_jax.rewards.functions import RewardFunctions
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from jetrl_jax.tasks.base import Example
from jetrl_jax.tasks.records import ListTask
from jetrl_jax.text.tokenizer import ByteTokenizer, CharacterTokenizer
from jetrl_jax.training.evaluation import Evaluator, pass_at_k

TOKENIZER = CharacterTokenizer("=abcdefghijklmnopqrstuvwxyz0123456789")


def counted(solved: np.ndarray, k: int) -> float:
    """The share of all k-subsets of a prompt's samples with a solved one in it, averaged over prompts."""
    shares = []
    for row in solved:
        subsets = list(itertools.combinations(row, k))
        shares.append(sum(any(subset) for subset in subsets) / len(subsets))
    return float(np.mean(shares))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_counts_subsets(n: int) -> None:
    solved = np.random.default_rng(n).random((12, n)) < 0.3
    solved[0] = True
    solved[1] = False
    for k in range(1, n + 1):
        assert pass_at_k(solved, k) == pytest.approx(counted(solved, k), abs=1e-12)
    assert pass_at_k(solved, 1) == pytest.approx(solved.mean())
    assert pass_at_k(solved, n) == pytest.approx(solved.any(axis=1).mean())


class StubEngine:
    """Answers from a table: prompt -> completions of its samples, and the greedy one."""

    def __init__(self, sampled: dict[str, list[str]], greedy: dict[str, str]) -> None:
        self.sampled = sampled
        self.greedy = greedy
        self.calls: list[tuple[list[Request], SamplingParams]] = []

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Trajectory]:
        self.calls.append((list(requests), sampling))
        counts: dict[str, int] = {}
        found = []
        for request in requests:
            prompt = TOKENIZER.decode(request.prompt_ids)
            place = counts[prompt] = counts.get(prompt, -1) + 1
            text = self.greedy[prompt] if sampling.greedy else self.sampled[prompt][place]
            ids = np.array([*TOKENIZER.encode(text), TOKENIZER.eos_ids[0]], np.int32)
            found.append(
                Trajectory.of_completion(
                    request.id, np.array(request.prompt_ids), ids, np.zeros(len(ids), np.float32), "stop", 0
                )
            )
        return found


EXAMPLES = [
    Example("ab=", "ba", id=0),
    Example("cd=", "dc", id=1),
    Example("ef=", "fe", id=2),
    Example("toolong=", "gnoloot", id=3),
]
SAMPLED = {"ab=": ["ba", "ba", "ba", "ba"], "cd=": ["dc", "d", "cc", "xyz"], "ef=": ["e", "e", "ff", "f"]}
GREEDY = {"ab=": "ba", "cd=": "cd", "ef=": "fe"}


def evaluator(
    examples: list[Example] = EXAMPLES,
    *,
    samples: int = 4,
    prompts: int = 10,
    seed: int = 5,
    max_prompt_tokens: int = 4,
) -> Evaluator:
    task = ListTask("reverse", [], examples)
    return Evaluator(
        task,
        TOKENIZER,
        prompts=prompts,
        samples=samples,
        temperature=0.6,
        max_prompt_tokens=max_prompt_tokens,
        max_completion_tokens=9,
        seed=seed,
    )


def test_metrics_of_a_known_table() -> None:
    one = evaluator()
    result = one(StubEngine(SAMPLED, GREEDY))
    one.close()
    solved = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
    lengths = [len(text) + 1 for texts in SAMPLED.values() for text in texts]
    assert result.metrics == pytest.approx(
        {
            "eval/accuracy": 5 / 12,
            "eval/greedy_accuracy": 2 / 3,
            "eval/reward_mean": 5 / 12,
            "eval/completion_tokens_mean": np.mean(lengths),
            "eval/pass_at_2": counted(solved, 2),
            "eval/pass_at_4": 2 / 3,
        }
    )
    assert result.samples == [
        {"split": "eval", "prompt": "ab=", "completion": "ba", "answer": "ba", "reward": 1.0},
        {"split": "eval", "prompt": "cd=", "completion": "cd", "answer": "dc", "reward": 0.0},
        {"split": "eval", "prompt": "ef=", "completion": "fe", "answer": "fe", "reward": 1.0},
    ]


@pytest.mark.parametrize(("samples", "ks"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4])])
def test_pass_at_k_is_reported_for_powers_of_two_and_all(samples: int, ks: list[int]) -> None:
    metrics = evaluator(samples=samples)(StubEngine(SAMPLED, GREEDY)).metrics
    assert [name for name in metrics if "pass_at" in name] == [f"eval/pass_at_{k}" for k in ks]


def test_requests_are_the_same_each_time_and_differ_in_their_seeds() -> None:
    engine, one = StubEngine(SAMPLED, GREEDY), evaluator()
    one(engine)
    one(engine)
    (first, sampling), (greedy, greedy_sampling), (again, _), _ = engine.calls
    assert first == again, "the noise of two evaluations must be the same"
    assert [r.id for r in first] == list(range(12)) and len({r.seed for r in first}) == 12
    assert [tuple(r.prompt_ids) for r in first] == [
        tuple(TOKENIZER.encode(p)) for p in SAMPLED for _ in range(4)
    ]
    assert (sampling.temperature, sampling.max_tokens, sampling.stop_token_ids, sampling.greedy) == (
        0.6,
        9,
        TOKENIZER.eos_ids,
        False,
    )
    assert greedy_sampling.greedy and len(greedy) == 3
    other = StubEngine(SAMPLED, GREEDY)
    evaluator(seed=6)(other)
    assert {r.seed for r in other.calls[0][0]}.isdisjoint(r.seed for r in first)


def test_prompts_limit_is_of_the_held_out_split() -> None:
    engine = StubEngine(SAMPLED, GREEDY)
    evaluator(prompts=2)(engine)
    assert len(engine.calls[1][0]) == 2
    with pytest.raises(UserError, match=r"no held-out prompt fits.*max_prompt_tokens=2"):
        evaluator(max_prompt_tokens=2)
    with pytest.raises(UserError, match="got 0 of them"):
        evaluator([])


@pytest.mark.parametrize("verifier", ["task", "exact_match", "last_number", "boxed"])
def test_the_verifier_that_is_asked_for_judges(verifier: str) -> None:
    answers = {"ab=": "7", "cd=": "it is 7", "ef=": "\\boxed{7}"}
    task = ListTask("t", [], [Example(prompt, "7", id=i) for i, prompt in enumerate(answers)])
    sizes = {
        "prompts": 3,
        "samples": 1,
        "temperature": 1.0,
        "max_prompt_tokens": 4,
        "max_completion_tokens": 9,
        "seed": 0,
    }
    metrics = Evaluator(task, ByteTokenizer(), **sizes, verifier=verifier)(Same(answers)).metrics
    assert metrics["eval/accuracy"] == pytest.approx(
        {"task": 1, "exact_match": 1, "last_number": 3, "boxed": 1}[verifier] / 3
    )


class Same:
    """Answers each prompt with one text."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers

    def generate(self, requests: Any, sampling: Any) -> list[Trajectory]:
        tokenizer, found = ByteTokenizer(), []
        for request in requests:
            ids = np.array(tokenizer.encode(self.answers[tokenizer.decode(request.prompt_ids)]), np.int32)
            found.append(
                Trajectory.of_completion(
                    request.id, np.array(request.prompt_ids), ids, np.zeros(len(ids), np.float32), "length", 0
                )
            )
        return found


def test_an_answer_that_cannot_be_judged_counts_as_unsolved() -> None:
    class Unsure(ListTask):
        def verifier(self):
            return lambda completion, example: None if completion == "cc" else 1.0

    task = Unsure("unsure", [], EXAMPLES[:3])
    sizes = {
        "prompts": 3,
        "samples": 4,
        "temperature": 1.0,
        "max_prompt_tokens": 4,
        "max_completion_tokens": 9,
        "seed": 0,
    }
    metrics = Evaluator(task, TOKENIZER, **sizes)(StubEngine(SAMPLED, GREEDY)).metrics
    assert metrics["eval/accuracy"] == pytest.approx(11 / 12) and metrics["eval/greedy_accuracy"] == 1.0


@pytest.mark.parametrize(
    ("template", "texts", "accuracy"),
    [("<think>\n", ["5", "6</think>5", "5</think>"], 1 / 3), ("", ["5", "</think>5", "<think>5"], 2 / 3)],
)
def test_a_completion_that_ends_inside_the_thought_its_prompt_opened_is_not_solved(
    template, texts, accuracy
) -> None:
    tokenizer = ByteTokenizer()

    class Engine:
        def counts(self) -> dict[str, int]:
            return {}

        def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Trajectory]:
            ids = [np.array(tokenizer.encode(texts[i % len(texts)]), np.int32) for i in range(len(requests))]
            return [
                Trajectory.of_completion(
                    r.id, np.array(r.prompt_ids), one, np.zeros(len(one), np.float32), "length", 0
                )
                for r, one in zip(requests, ids, strict=True)
            ]

    for answers, verifier in ((["5"] * 2, "exact_match"), ([5, 5.0], "last_number")):
        examples = [Example(f"q{i}{template}", answer) for i, answer in enumerate(answers)]
        evaluate = Evaluator(
            ListTask("t", examples, examples, verifier), tokenizer, prompts=2, samples=3, temperature=1.0, max_prompt_tokens=40,
            max_completion_tokens=40, seed=0,
        )  # fmt: skip
        assert evaluate(Engine()).metrics["eval/accuracy"] == pytest.approx(accuracy)  # type: ignore[arg-type]
        task, config = (
            ListTask("t", examples, examples, verifier),
            config_from_dict({"rollout": {"prompts_per_step": 2, "group_size": 3}}),
        )
        rewards, prompts = (
            RewardFunctions.from_config((RewardSection(),), task),
            PromptStream(task, tokenizer, max_prompt_tokens=40, seed=0),
        )
        parts: dict[str, Any] = {
            "algorithm": SimpleNamespace(dynamic_sampling=False),
            "engine": Engine(),
            "rewards": rewards,
        }
        parts |= {"tokenizer": tokenizer, "prompts": prompts, "console": Console(1, stream=io.StringIO())}
        assert Collector(config=config, **parts).collect(1, StepClock()).rewards.mean() == pytest.approx(
            accuracy
        )
