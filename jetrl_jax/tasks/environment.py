"""Environments: tasks whose answer comes in several turns, played in worker processes.

An environment has the methods of gymnasium's, with text in place of arrays:

    reset(*, seed) -> (observation, info)
    step(text)     -> (observation, reward, terminated, truncated, info)
    close()
    demonstration() -> list of texts; optional, after reset, for a supervised warm start

An observation is text or a list of ``{"role": ..., "content": ...}``.  The first one is text, or one message
of the user, and is the prompt.  `info` may count ``tool_calls`` and ``tool_errors``.  After reset with equal
seeds, equal actions must get equal observations: the members of a group begin alike, and an environment whose
worker was killed is played again.

A training episode is a seed below 2**30 that depends on the run's seed and an index.  Held-out episodes have
the seeds from 2**30 on, in every run.  An environment with few different episodes therefore shows the policy
the same ones in both splits (guess_number: 16 of them).
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

from jetrl_jax.config.task import BUILTIN_ENVIRONMENTS, EnvironmentSection
from jetrl_jax.errors import UserError
from jetrl_jax.tasks.base import Example, LazyExamples, format_prompt
from jetrl_jax.workers.environments import EnvironmentPool, Job, Observation

_HELD_OUT = 1 << 30
_ATTEMPTS = 3  # resets of one episode before it counts as failed


class Environment(Protocol):
    """The interface of an environment, as described above."""

    def reset(self, *, seed: int | None = None) -> tuple[Observation, dict[str, Any]]:
        """Begins an episode."""
        ...

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Takes a turn of the policy, without special tokens."""
        ...

    def close(self) -> None:
        """Frees resources."""
        ...


class EnvironmentTask:
    """Episodes of an environment as examples; an example's metadata has its seed.

    A reward named task is the sum of the episode's rewards, which the collector puts into the metadata.
    """

    separate_process = False
    verifier_name = "return"
    notes: tuple[str, ...] = ()

    def __init__(self, section: EnvironmentSection, seed: int) -> None:
        self.name = section.name
        self._template = section.prompt_template
        self._seed = seed
        target = BUILTIN_ENVIRONMENTS.get(section.name, section.name)
        self.pool = EnvironmentPool(
            section.name, target, section.options, workers=section.workers, timeout_s=section.timeout_s
        )
        self.probe = self.pool.check()
        self.train = LazyExamples(section.train_size, self._train_example)
        self.eval = LazyExamples(section.eval_size, lambda index: self._example(_HELD_OUT + index, index))

    def verify(self, completion: str, example: Example) -> float | None:
        """The sum of the episode's rewards; None if the environment failed."""
        return episode_return(completion, example)

    def verifier(self) -> Any:
        """The verifier without the task."""
        return episode_return

    def close(self) -> None:
        """Ends the worker processes; a later use starts others."""
        self.pool.close()

    def _train_example(self, index: int) -> Example:
        digest = hashlib.sha256(f"episode/{self._seed}/{index}".encode()).digest()
        return self._example(int.from_bytes(digest[:4], "big") % _HELD_OUT, index)

    def _example(self, seed: int, index: int) -> Example:
        """The episode of a seed; without a prompt, so that it is skipped, if its reset fails."""
        answer = self.pool.play([Job(index, seed)])[0]
        for _ in range(_ATTEMPTS - 1):
            if answer.failed:
                answer = self.pool.play([Job(index, seed)])[0]
        if answer.failed:
            return Example("", None, "", index, {"seed": seed, "skipped": answer.message})
        prompt = format_prompt(self._template, self._text(answer.observation))
        return Example(prompt, None, "", index, {"seed": seed, "digest": answer.digest})

    def _text(self, observation: Observation) -> str:
        if isinstance(observation, str):
            return observation
        if len(observation) == 1 and observation[0]["role"] == "user":
            return observation[0]["content"]
        raise UserError(
            f"environment {self.name}: bad first observation: got messages of "
            f"{', '.join(message['role'] for message in observation)}, expected text or one message of the "
            "user. The system's text is tokenizer.system_prompt."
        )


def episode_return(completion: str, example: Example) -> float | None:
    """The sum of the rewards of the episode that ended with this completion."""
    value: float | None = example.metadata["return"]
    return value
