"""The order of the training prompts, fixed by the seed and one cursor, so that a run resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jetrl_jax.errors import UserError
from jetrl_jax.tasks.base import Example, Task
from jetrl_jax.text.answers import opens_thought
from jetrl_jax.text.tokenizer import Tokenizer

SEED_DATA, SEED_ROLLOUT, SEED_EVAL, SEED_WARM_START = range(4)  # first word of every derived seed


@dataclass(frozen=True)
class Prompt:
    """A task's example and the token ids of its prompt."""

    example: Example
    ids: list[int]

    def opens_thought(self, tokenizer: Tokenizer) -> bool:
        """Whether a completion of this prompt begins inside ``<think>``."""
        return opens_thought(tokenizer.decode(self.ids), self.example.prompt)


def derived_seeds(count: int, *words: int) -> list[int]:
    """`count` seeds in [0, 2^32) that depend on all `words` (run seed, kind, step, ...)."""
    return [int(word) for word in np.random.SeedSequence(words).generate_state(count, np.uint32)]


class PromptStream:
    """An endless stream of prompts over `task.train`, in a new order each epoch.

    `cursor` counts the examples drawn since the start; setting it moves the stream there.  `skipped` counts
    the examples whose prompt was empty or longer than `max_prompt_tokens`.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, *, max_prompt_tokens: int, seed: int) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.seed = seed
        self.restart()
        self._epoch = -1
        self._order = np.zeros(0, np.int64)

    def restart(self) -> None:
        """Moves the stream to its start."""
        self.cursor = self.skipped = 0

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts that fit.

        Raises:
          UserError: no prompt of a whole epoch fits.
        """
        taken: list[Prompt] = []
        misses = 0
        while len(taken) < count:
            example = self.task.train[self._next_index()]
            ids = _prompt_ids(example, self.tokenizer)
            if 0 < len(ids) <= self.max_prompt_tokens:
                taken.append(Prompt(example, ids))
                misses = 0
                continue
            self.skipped += 1
            misses += 1
            # this many misses in a row cover a whole epoch, wherever they began
            if misses >= 2 * len(self.task.train) - 1:
                raise UserError(
                    f"task {self.task.name}: no training prompt fits: got {len(ids)} tokens in the last "
                    "one, expected 1 to "
                    f"rollout.max_prompt_tokens={self.max_prompt_tokens}. Raise it, or choose shorter "
                    "prompts."
                )
        return taken

    def _next_index(self) -> int:
        epoch, place = divmod(self.cursor, len(self.task.train))
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, SEED_DATA, epoch)).permutation(
                len(self.task.train)
            )
            self._epoch = epoch
        self.cursor += 1
        return int(self._order[place])


def fitting_prompts(
    examples: Iterator[Example] | list[Example], tokenizer: Tokenizer, max_prompt_tokens: int
) -> list[Prompt]:
    """The tokenised prompts of `examples`, without those that are empty or too long."""
    prompts = (Prompt(example, _prompt_ids(example, tokenizer)) for example in examples)
    return [prompt for prompt in prompts if 0 < len(prompt.ids) <= max_prompt_tokens]


def _prompt_ids(example: Example, tokenizer: Tokenizer) -> list[int]:
    """The ids of an example's prompt; none if the task has none, as of an environment that failed."""
    return [] if "skipped" in example.metadata else tokenizer.encode_prompt(example.prompt)
