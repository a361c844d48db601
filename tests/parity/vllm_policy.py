"""Policies for the tests with the real vLLM on CPU, in shapes that it holds in block FP8, and the gap of two
sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from bridge.vllm.settings import EngineSettings
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.rollout.embedded import score
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from tests.parity.small_policy import CONFIG, SmallPolicy
from tests.sections import engine_settings

QWEN3 = dataclasses.replace(
    CONFIG,
    vocab_size=128,
    hidden_size=256,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
QWEN2 = dataclasses.replace(
    QWEN3, architecture="qwen2", qk_norm=False, attention_bias=True, tie_word_embeddings=False
)
PROMPT, COMPLETION = 24, 40
LENGTHS = {"max_prompt_tokens": PROMPT, "max_completion_tokens": COMPLETION}
LIMITS = {"max_num_seqs": 32, "kv_cache_memory_mb": 64}
SETTINGS = engine_settings(**LENGTHS, **LIMITS)
SAMPLING = SamplingParams(1.0, COMPLETION, (1,), 0)


def sampled_policy(preset: str, config: ModelConfig, **options: Any) -> SmallPolicy:
    """A policy whose engine is vLLM: the trainer's products that are not FP8 are float64, as a run's are
    then.
    """
    return SmallPolicy(preset, config, **{"dense": "float64", **options})


def fp8_paths(policy: SmallPolicy) -> list[str]:
    """Parameter paths that the policy publishes in FP8."""
    return [path for path in policy.plan.paths if policy.plan.flow(path).rollout.quantized]


def requests(count: int, seed: int = 0) -> list[Request]:
    """Prompts of 2 to 23 random tokens."""
    rng = np.random.default_rng(seed)
    return [
        Request(i, rng.integers(3, CONFIG.vocab_size, int(rng.integers(2, PROMPT))).tolist(), seed + i)
        for i in range(count)
    ]


class Scorer:
    """The trainer's log-probabilities of trajectories, with any published weights of one policy."""

    def __init__(self, policy: SmallPolicy, settings: EngineSettings = SETTINGS) -> None:
        self._score = score.Scorer(policy.rollout_model())
        self._length = settings.longest

    def __call__(self, published: nnx.State, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Logprobs of all completion tokens, one after the other, at temperature 1."""
        return np.concatenate([self.whole(published, t)[len(t.prompt_ids) :] for t in trajectories])

    def whole(self, published: nnx.State, trajectory: Trajectory) -> np.ndarray:
        """Logprobs of prompt and completion; entry 0 is meaningless."""
        ids = [*trajectory.prompt_ids.tolist(), *trajectory.completion_ids.tolist()]
        return self._score(published, ids, self._length)


@dataclasses.dataclass(frozen=True)
class Gap:
    """trainer - engine over tokens: how many, the share within 1e-5, mean and largest magnitude, k3."""

    tokens: int
    equal: float
    mean: float
    largest: float
    k3: float

    @classmethod
    def of(cls, trainer: Any, engine: Any) -> Gap:
        """The gap of two arrays of log-probabilities."""
        difference = np.asarray(trainer, np.float64) - np.asarray(engine, np.float64)
        size, k3 = np.abs(difference), np.expm1(difference) - difference
        return cls(
            difference.size,
            float(np.mean(size <= 1e-5)),
            float(size.mean()),
            float(size.max()),
            float(k3.mean()),
        )

    @property
    def exact(self) -> bool:
        """Whether both sides have the same 32 bits."""
        return self.largest == 0

    def within_budget(self, floor: Gap) -> bool:
        """Whether this is one policy on both sides, but for single BF16 roundings that vLLM's own operations
        take otherwise.

        `floor`: BF16 training beside the same FP8 rollout.
        """
        return self.equal >= 0.9 and self.k3 <= floor.k3 / 100 and self.mean <= floor.mean / 20


def children(parent: int) -> list[int]:
    """All living descendants of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != "Z" and int(fields[1]) == parent:
                found += [int(entry.name), *children(int(entry.name))]
    return found


def alive(pids: list[int]) -> list[int]:
    """Those that still run."""
    return [
        pid
        for pid in pids
        if Path(f"/proc/{pid}/stat").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    ]
