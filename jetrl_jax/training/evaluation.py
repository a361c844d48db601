"""Held-out evaluation by the run's verifier: accuracy at the rollout temperature, pass@k, greedy accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jetrl_jax.collect.clock import StepClock
from jetrl_jax.collect.episodes import Episode, EpisodePlayer, episode_metrics, episode_record
from jetrl_jax.collect.prompts import SEED_EVAL, Prompt, derived_seeds, fitting_prompts
from jetrl_jax.collect.samples import token_record
from jetrl_jax.config.task import RewardSection
from jetrl_jax.errors import UserError
from jetrl_jax.rewards.distributed import score
from jetrl_jax.rewards.functions import RewardFunctions
from jetrl_jax.rollout.engine import RolloutEngine
from jetrl_jax.rollout.types import Request, SamplingParams
from jetrl_jax.tasks.base import Task
from jetrl_jax.text.tokenizer import Tokenizer

SOLVED = 1.0  # the least verifier's score with which a completion solves its prompt


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: metrics by declared name, and one greedy sample per prompt."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


def pass_at_k(solved: np.ndarray, k: int) -> float:
    """Unbiased estimate of the chance that one of k completions or more solves (Chen et al. 2021).

    Args:
      solved: bool [P, n], n >= k.
    """
    n = solved.shape[1]
    misses = [1.0 - math.comb(n - int(c), k) / math.comb(n, k) for c in solved.sum(axis=1)]
    return float(np.mean(misses))


class Evaluator:
    """Evaluates an engine, each time on the same held-out prompts and with the same noise.

    Args:
      prompts: the largest number of held-out prompts to use.
      samples, temperature: number of completions of each prompt, and their temperature.
      max_prompt_tokens, max_completion_tokens: longer prompts are left out, longer completions are cut.
      seed: seed of the sampling noise.
      verifier: "task" (the task's own), or the name of one in `jetrl_jax.tasks.verify`.
      timeout_s: limit of a verifier's call if it runs in a worker process.
      player: plays the episodes of an environment, whose section says when one is solved; None if a prompt
        has one completion.

    Raises:
      UserError: no held-out prompt fits.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        *,
        prompts: int,
        samples: int,
        temperature: float,
        max_prompt_tokens: int,
        max_completion_tokens: int,
        seed: int,
        timeout_s: float = 10.0,
        verifier: str = "task",
        player: EpisodePlayer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.samples = samples
        self.seed = seed
        self.temperature = temperature
        self.max_completion_tokens = max_completion_tokens
        self.player = player
        self.solved = SOLVED if player is None else player.section.solved
        chosen = [task.eval[i] for i in range(min(prompts, len(task.eval)))]
        self.prompts: list[Prompt] = fitting_prompts(chosen, tokenizer, max_prompt_tokens)
        if not self.prompts:
            raise UserError(
                f"task {task.name}: no held-out prompt fits: got {len(chosen)} of them, expected one of "
                "at most "
                f"rollout.max_prompt_tokens={max_prompt_tokens} tokens."
            )
        self.verifier = RewardFunctions.from_config(
            (RewardSection(name=verifier, timeout_s=timeout_s),), task
        )

    def __call__(self, engine: RolloutEngine) -> Evaluation:
        """Runs the sampled and the greedy pass with the engine's present weights."""
        sampled, _, _, metrics = self._run(engine, self.samples, greedy=False)
        greedy, texts, episodes, _ = self._run(engine, 1, greedy=True)
        records = [
            token_record(self.tokenizer, episode.trajectory) | episode_record(episode) for episode in episodes
        ]
        solved = sampled >= self.solved
        metrics = {
            "eval/accuracy": float(solved.mean()),
            "eval/greedy_accuracy": float((greedy >= self.solved).mean()),
            "eval/reward_mean": float(sampled.mean()),
        } | metrics
        ks = sorted({1 << power for power in range(self.samples.bit_length())} | {self.samples})
        metrics |= {f"eval/pass_at_{k}": pass_at_k(solved, k) for k in ks if 1 < k <= self.samples}
        samples = [
            {
                "split": "eval",
                "prompt": p.example.prompt,
                "completion": text,
                "answer": p.example.answer,
                "reward": float(score),
                **record,
            }
            for p, text, score, record in zip(
                self.prompts, texts, greedy[:, 0], records or [{}] * len(texts), strict=True
            )
        ]
        return Evaluation(metrics, samples)

    def close(self) -> None:
        """Ends the verifier's worker process, if it has one."""
        self.verifier.close()

    def _run(
        self, engine: RolloutEngine, samples: int, *, greedy: bool
    ) -> tuple[np.ndarray, list[str], list[Episode], dict[str, float]]:
        """(scores [P, samples] with 0 for a failed verifier, texts, episodes if any, metrics of lengths)."""
        count = len(self.prompts) * samples
        examples = [self.prompts[i // samples].example for i in range(count)]
        metrics: dict[str, float] = {}
        episodes: list[Episode] = []
        if self.player is None:
            seeds = derived_seeds(count, self.seed, SEED_EVAL)
            requests = [Request(i, self.prompts[i // samples].ids, seed) for i, seed in enumerate(seeds)]
            sampling = SamplingParams(
                self.temperature, self.max_completion_tokens, tuple(self.tokenizer.eos_ids), self.seed, greedy
            )
            trajectories = engine.generate(requests, sampling)
        else:
            episodes, _ = self.player.play(
                engine,
                [self.prompts[i // samples] for i in range(count)],
                lambda turn: derived_seeds(count, self.seed, SEED_EVAL, turn),
                self.player.sampling(self.seed, self.temperature, greedy=greedy),
                StepClock(),
            )
            trajectories = [episode.trajectory for episode in episodes]
            examples = [episode.example for episode in episodes]
            metrics["eval/turns_mean"] = episode_metrics(episodes)["episode/turns_mean"]
        metrics["eval/completion_tokens_mean"] = float(np.mean([t.sampled_tokens for t in trajectories]))
        ids = [t.completion_ids.tolist() for t in trajectories]
        texts = [self.tokenizer.decode(one) for one in ids]
        prompts, reasons = [e.prompt for e in examples], [t.finish_reason for t in trajectories]
        opened = [prompt.opens_thought(self.tokenizer) for prompt in self.prompts for _ in range(samples)]
        result = score(self.verifier, samples, prompts, texts, examples, reasons, ids, opened)
        scores = np.nan_to_num(result.total, nan=0.0).reshape(-1, samples)
        return scores, texts, episodes, metrics
