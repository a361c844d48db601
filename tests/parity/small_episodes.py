"""Episodes of up to four turns on a real engine, against environments that answer in this process."""

from __future__ import annotations

import numpy as np

from jetrl_jax.collect.clock import StepClock
from jetrl_jax.collect.episodes import EpisodePlayer
from jetrl_jax.collect.prompts import Prompt
from jetrl_jax.config.rollout import RolloutSection
from jetrl_jax.config.task import EnvironmentSection
from jetrl_jax.rollout.engine import RolloutEngine
from jetrl_jax.rollout.types import Trajectory
from jetrl_jax.tasks.base import Example
from jetrl_jax.text.tokenizer import CharacterTokenizer
from jetrl_jax.workers.environments import Answer, Job
from tests.stand_in_environments import StandInEnvironments


class Game(StandInEnvironments):
    """Answers by a function of the actions; an episode ends after one to four of them.

    timing: of a conversation, which jobs are answered when, in any order.
    letters: how many of A to Z it writes.
    """

    def __init__(self, timing: int = 0, letters: int = 26) -> None:
        super().__init__()
        self.letters = letters
        self.timing = np.random.default_rng(timing)

    def answers(self, *, wait: bool) -> list[tuple[int, Answer]]:
        late = [job for job in self.asked if self.timing.random() < 0.6]
        if wait and self.asked and len(late) == len(self.asked):
            late = late[1:]
        ready = [job for job in self.asked if job not in late]
        self.asked = late
        return [
            (job.key, self.answer(job)) for job in (ready[i] for i in self.timing.permutation(len(ready)))
        ]

    def answer(self, job: Job) -> Answer:
        said = "".join(job.actions)
        text = "".join(chr(65 + (ord(c) + job.seed) % self.letters) for c in said[-1 - job.seed % 3 :])
        done = len(job.actions) > job.seed % 4
        return Answer(observation=text, reward=float(len(said)), terminated=done, digest="same")


def episodes_of(
    engine: RolloutEngine,
    vocab_size: int,
    temperature: float,
    count: int,
    *,
    turns: str = "lockstep",
    timing: int = 0,
) -> list[Trajectory]:
    """Prompts of one to four tokens, turns of one to three, half of whose ids end a turn; at most 16 tokens."""
    letters = "".join(chr(33 + i) for i in range(vocab_size - 2))
    section = EnvironmentSection(
        name="guess_number", max_turns=4, stop_texts=tuple(letters[: vocab_size // 2])
    )
    rollout = RolloutSection(max_prompt_tokens=4, max_turn_tokens=3, max_completion_tokens=12, turns=turns)
    game = Game(timing, min(26, len(letters) - (ord("A") - 33)))
    player = EpisodePlayer(section, rollout, CharacterTokenizer(letters), game, Answer(observation="A"))
    rng = np.random.default_rng(3)
    prompts = [
        Prompt(
            Example("", None, "", i, {"seed": i, "digest": "same"}),
            rng.integers(2, vocab_size, rng.integers(1, 5)).tolist(),
        )
        for i in range(count)
    ]
    played, _ = player.play(
        engine,
        prompts,
        lambda turn: [1000 * turn + i for i in range(count)],
        player.sampling(5, temperature),
        StepClock(),
    )
    assert not any(episode.failed for episode in played)
    return [episode.trajectory for episode in played]
