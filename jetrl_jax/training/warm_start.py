"""Supervised training on worked solutions before RL, for a policy that begins with random weights.

Each step draws examples of the training split and takes the gradient of the mean cross-entropy of the
solution's tokens (stop token included), through the same precision flow as RL.  With probability `noise` each
solution token is replaced by another token that occurs in solutions.  The policy then knows the task but
spreads its probability, so that GRPO has something to improve.  Held-out prompts are never used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import optax

from jetrl_jax.collect.prompts import SEED_WARM_START
from jetrl_jax.config.learning import WarmStartSection
from jetrl_jax.devices.processes import fetch
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.tasks.base import Example, Task
from jetrl_jax.text.tokenizer import Tokenizer
from jetrl_jax.training.draft import DraftTrainer
from jetrl_jax.training.programs import PolicyPrograms, TrainState

WEIGHT_DECAY = 0.1
GRAD_CLIP = 1.0


@dataclass(frozen=True)
class Solution:
    """A prompt and its worked solution as token ids, the solution with a stop token at its end.

    trained: the tokens of the solution that the policy writes; None is all.
    """

    prompt_ids: list[int]
    solution_ids: list[int]
    trained: list[bool] | None = None

    @property
    def mask(self) -> np.ndarray:
        """`trained` as an array."""
        return np.array([True] * len(self.solution_ids) if self.trained is None else self.trained)


Demonstrate = Callable[[Example], tuple[list[int], list[bool]] | None]


def build_warm_start_optimizer(section: WarmStartSection) -> optax.GradientTransformation:
    """AdamW with ten per cent warm-up and cosine decay to a tenth of the peak."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        section.learning_rate,
        max(section.steps // 10, 1),
        max(section.steps, 2),
        end_value=section.learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(GRAD_CLIP), optax.adamw(schedule, b2=0.99, weight_decay=WEIGHT_DECAY)
    )


class SolutionSampler:
    """Draws noisy batches of a task's worked solutions; batch i is a function of the seed and i.

    demonstrate: an example -> the ids after its prompt, and which of them the policy writes (None: there are
      none); replaces the examples' own solutions.

    Raises:
      UserError: the task has no worked solutions, or they exceed the row.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        section: WarmStartSection,
        *,
        row_tokens: int,
        max_prompt_tokens: int,
        seed: int,
        demonstrate: Demonstrate | None = None,
    ) -> None:
        self.task = task
        self.demonstrate = demonstrate
        self.tokenizer = tokenizer
        self.section = section
        self.row_tokens = row_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self.seed = seed
        probe = [self._solution(index) for index in range(min(256, len(task.train)))]
        self.alphabet = np.unique(
            [
                token
                for s in probe
                if s
                for token, written in zip(s.solution_ids, s.mask, strict=True)
                if written and token not in tokenizer.eos_ids
            ]
        )
        if not any(probe):
            raise UserError(
                f"warm_start: no usable worked solution: got task {task.name} whose first {len(probe)} "
                "solutions are empty or exceed "
                f"{row_tokens} tokens with their prompts. Set warm_start: null or raise "
                "rollout.max_completion_tokens."
            )

    def batch(self, step: int) -> TrainBatch:
        """The examples of one step, one per row, int32 [batch_size, row_tokens]."""
        rng = np.random.default_rng((self.seed, SEED_WARM_START, step))
        rows: list[Solution] = []
        while len(rows) < self.section.batch_size:
            solution = self._solution(int(rng.integers(len(self.task.train))))
            if solution is not None:
                rows.append(self._noisy(solution, rng))
        return _one_per_row(rows, self.row_tokens)

    def _solution(self, index: int) -> Solution | None:
        example = self.task.train[index]
        trained = None
        if self.demonstrate is not None:
            shown = self.demonstrate(example)
            if shown is None:
                return None
            solution, trained = shown
        elif example.solution:
            solution = [*self.tokenizer.encode(example.solution), self.tokenizer.eos_ids[0]]
        else:
            return None
        prompt = self.tokenizer.encode_prompt(example.prompt)
        fits = len(prompt) <= self.max_prompt_tokens and len(prompt) + len(solution) <= self.row_tokens
        return Solution(prompt, solution, trained) if fits else None

    def _noisy(self, solution: Solution, rng: np.random.Generator) -> Solution:
        ids = np.array(solution.solution_ids)
        hit = rng.random(len(ids)) < self.section.noise
        hit[-1] = False  # the stop token stays, so that lengths are learned exactly
        hit &= solution.mask
        for place in np.flatnonzero(hit):
            others = self.alphabet[self.alphabet != ids[place]]
            ids[place] = rng.choice(others) if len(others) else ids[place]
        return Solution(solution.prompt_ids, [int(token) for token in ids], solution.trained)


def warm_start(
    programs: PolicyPrograms,
    state: TrainState,
    sampler: SolutionSampler,
    section: WarmStartSection,
    on_step: Callable[[int, float], None],
    drafter: DraftTrainer | None = None,
) -> tuple[TrainState, float]:
    """Runs `section.steps` supervised steps; returns (state, mean loss of the last tenth of them).

    `on_step(step, loss)` is called after each step.  A drafter's head is trained on the same batches.

    Raises:
      RunStopped: a step was not finite.
    """
    losses = []
    for step in range(section.steps):
        batch = sampler.batch(step)
        if drafter is not None:
            drafter(programs.frozen(state), [batch])
        grads, loss, use = programs.supervised_gradient(state, batch, float(np.sum(batch.loss_mask)))
        state, report = programs.update(state, grads, None if use is None else fetch(use).largest)
        state = programs.recalibrated(state)
        if report.nonfinite and not report.overflow:
            raise RunStopped(
                f"warm start: step {step + 1} is not finite: {', '.join(report.nonfinite[:3])}. Lower "
                "warm_start.learning_rate."
            )
        losses.append(float(loss))
        on_step(step + 1, losses[-1])
    return state, float(np.mean(losses[-max(section.steps // 10, 1) :]))


def _one_per_row(rows: list[Solution], row_tokens: int) -> TrainBatch:
    shape = (len(rows), row_tokens)
    token_ids, segment_ids, loss_mask = (
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, bool),
    )
    for index, row in enumerate(rows):
        ids = row.prompt_ids + row.solution_ids
        token_ids[index, : len(ids)] = ids
        segment_ids[index, : len(ids)] = 1
        loss_mask[index, len(row.prompt_ids) : len(ids)] = row.mask
    zeros = np.zeros(shape, np.float32)
    positions = np.tile(np.arange(row_tokens, dtype=np.int32), (len(rows), 1))
    sequence_index = np.where(segment_ids > 0, np.arange(len(rows), dtype=np.int32)[:, None], np.int32(-1))
    return TrainBatch(token_ids, positions, segment_ids, loss_mask, zeros, zeros, sequence_index, zeros)
