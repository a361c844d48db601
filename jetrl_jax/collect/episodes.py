"""Plays episodes: the policy and an environment take turns.

    p prompt (the first observation), c sampled by the policy, e written by the environment

    p p p   c c c   e e e e   c c   e e e   c c c c
            turn 1            turn 2        turn 3

Ids are only appended.  A turn's ids are the engine's, those of an observation come from
`Tokenizer.encode_observation`.  The history goes back to the engine as a prompt, never through a template.
Engine and trainer therefore see the same tokens, and only those that the policy sampled are trained.

    a turn ends         by a stop token or a stop text, or by its budget of tokens
    an episode ends     stop      the environment terminated it, or failed
                        turns     by the environment's limit (truncated), or after max_turns turns
                        length    a turn was cut by its budget, and half an action is not stepped; or there is
                                  no room for an observation and one more token

A last observation, or one without room, is not appended.  A token's noise depends on the seed of (episode,
turn) and its position, never on other episodes or on the time that an environment takes.  So an episode is
the same whether all take their turns in lockstep, or each goes on as soon as its environment has answered
(``rollout.turns: stream``, on engines that stream).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jetrl_jax.collect.clock import StepClock
from jetrl_jax.collect.prompts import Prompt
from jetrl_jax.config.rollout import RolloutSection
from jetrl_jax.config.task import EnvironmentSection
from jetrl_jax.errors import UserError
from jetrl_jax.rollout.engine import Replies, Reply, RolloutEngine
from jetrl_jax.rollout.types import FinishReason, Request, SamplingParams, Trajectory, Turn
from jetrl_jax.tasks.base import Example
from jetrl_jax.text.tokenizer import Message, Tokenizer
from jetrl_jax.workers.environments import Answer, Conversation, EnvironmentPool, Job, Observation

Seeds = Callable[[int], Sequence[int]]  # turn -> a seed for each prompt


@dataclass(frozen=True, eq=False)
class Episode:
    """A finished episode.

    example: with the sum of rewards in its metadata (``return``, None where the environment failed).
    rewards: of each turn that the environment took.
    counts: calls and errors of tools.
    failed: how the environment failed, in words; "" if it did not.
    """

    example: Example
    trajectory: Trajectory
    rewards: tuple[float, ...]
    counts: Mapping[str, int]
    failed: str = ""


@dataclass(eq=False)
class _Played:
    """An episode so far."""

    prompt: Prompt
    token_ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    turns: list[Turn]
    actions: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    digest: str = ""
    ended: FinishReason | None = None
    failed: str = ""

    @classmethod
    def begin(cls, prompt: Prompt) -> _Played:
        count = len(prompt.ids)
        return cls(prompt, list(prompt.ids), [False] * count, [0.0] * count, [Turn(0, count, "prompt")])

    @property
    def length(self) -> int:
        """The tokens after the prompt."""
        return len(self.token_ids) - len(self.prompt.ids)

    def append(self, ids: Sequence[int], turn: Trajectory | None = None) -> None:
        """Takes the ids of an observation, or of the policy's `turn`."""
        start = len(self.token_ids)
        self.token_ids += ids
        self.sampled += [turn is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if turn is None else turn.sampled_logprobs.tolist()
        reason = None if turn is None else turn.finish_reason
        self.turns.append(
            Turn(start, len(self.token_ids), "environment" if turn is None else "policy", reason)
        )

    def fail(self, answer: Answer) -> None:
        self.failed = f"{answer.failed}: {answer.message}"
        self.ended = "stop"

    def episode(self, request_id: int, version: int) -> Episode:
        total, start = len(self.token_ids), len(self.prompt.ids)
        assert self.ended is not None
        if self.turns[-1].role != "policy":  # the first reset failed, so nothing was sampled
            self.turns.append(Turn(total, total, "policy", self.ended))
        self.turns[-1] = Turn(self.turns[-1].start, total, "policy", self.ended)
        trajectory = Trajectory(
            request_id,
            np.array(self.token_ids, np.int32),
            np.array(self.sampled, bool),
            np.array(self.logprobs, np.float32),
            tuple(self.turns),
            ((start, total, version),),
        )
        value = None if self.failed else float(sum(self.rewards))
        example = self.prompt.example
        played = Example(
            example.prompt,
            example.answer,
            example.solution,
            example.id,
            {**example.metadata, "return": value, "turns": list(self.actions)},
        )
        return Episode(played, trajectory, tuple(self.rewards), dict(self.counts), self.failed)


class EpisodePlayer:
    """Plays the episodes of an environment.

    Args:
      section, rollout: the config's ``task`` and ``rollout``.
      pool: the environments; probe: an answer of one of them, whose observation is encoded as a check.

    Attributes:
      stop_ids: the tokens that end a turn.
      notes: for the record of a run.

    Raises:
      UserError: a stop text is not one token, or observations cannot be appended.
    """

    def __init__(
        self,
        section: EnvironmentSection,
        rollout: RolloutSection,
        tokenizer: Tokenizer,
        pool: EnvironmentPool,
        probe: Answer,
    ) -> None:
        self.section = section
        self.rollout = rollout
        self.tokenizer = tokenizer
        self.pool = pool
        self.stop_ids = tuple(dict.fromkeys([*tokenizer.eos_ids, *map(self._stop_id, section.stop_texts)]))
        self.notes = tuple(tokenizer.check_observations())
        self.encode(probe.observation, tokenizer.end_of_turn)

    def sampling(self, seed: int, temperature: float, *, greedy: bool = False) -> SamplingParams:
        """The sampling parameters of a turn."""
        return SamplingParams(temperature, self.rollout.turn_tokens, self.stop_ids, seed, greedy)

    def encode(self, observation: Observation, after: int) -> list[int]:
        """The ids of an observation after the token `after`; the middle of a long one is left out."""
        if isinstance(observation, str):
            text = self.section.observation_template.replace("{observation}", self._cut(observation))
            return self.tokenizer.encode_observation([{"role": "user", "content": text}], after)
        messages: list[Message] = [
            {"role": message["role"], "content": self._cut(message["content"])} for message in observation
        ]
        return self.tokenizer.encode_observation(messages, after)

    def play(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        seeds: Seeds,
        sampling: SamplingParams,
        clock: StepClock,
    ) -> tuple[list[Episode], dict[str, int]]:
        """One episode per prompt, and the sums of the engine's counts.

        Args:
          seeds: turn -> a seed for each prompt.
          clock: takes the seconds of ``rollout`` and ``environment``; of a stream ``environment`` is the
            resets, and the time in which the engine has nothing to do but wait for environments.
        """
        played = [_Played.begin(prompt) for prompt in prompts]
        counts: Counter[str] = Counter()
        clock.seconds.setdefault("rollout", 0.0)  # if no episode can begin
        with clock.phase("environment"):
            first = self.pool.play([self._job(index, one) for index, one in enumerate(played)])
        for one, answer in zip(played, first, strict=True):
            self._reset(one, answer)
        play = self._stream if self.rollout.turns == "stream" else self._lockstep
        play(engine, played, seeds, sampling, clock, counts)
        version = engine.policy_version
        return [one.episode(index, version) for index, one in enumerate(played)], dict(counts)

    def _lockstep(
        self,
        engine: RolloutEngine,
        played: Sequence[_Played],
        seeds: Seeds,
        sampling: SamplingParams,
        clock: StepClock,
        counts: Counter[str],
    ) -> None:
        """A turn of all, then an answer to all."""
        for turn in range(self.section.max_turns):
            live = [index for index, one in enumerate(played) if one.ended is None]
            if not live:
                break
            of_turn = seeds(turn)
            requests = [self._request(index, played[index], of_turn) for index in live]
            with clock.phase("rollout"):
                sampled = engine.generate(requests, sampling)
                counts.update(engine.counts())
            for index, trajectory in zip(live, sampled, strict=True):
                self._take(played[index], trajectory)
            live = [index for index in live if played[index].ended is None]
            with clock.phase("environment"):
                answers = self.pool.play([self._job(index, played[index]) for index in live])
                for index, answer in zip(live, answers, strict=True):
                    self._answer(played[index], answer)

    def _stream(
        self,
        engine: RolloutEngine,
        played: Sequence[_Played],
        seeds: Seeds,
        sampling: SamplingParams,
        clock: StepClock,
        counts: Counter[str],
    ) -> None:
        """Each episode goes on as soon as its environment has answered."""
        live, first = [index for index, one in enumerate(played) if one.ended is None], seeds(0)
        requests = [self._request(index, played[index], first) for index in live]
        start = time.perf_counter()
        with contextlib.closing(self.pool.conversation()) as conversation:
            conversation.begin(live)
            turns = _Turns(self, played, seeds, conversation)
            engine.submit(requests, sampling, turns)
            with contextlib.closing(engine.results()) as results:
                for trajectory in results:
                    turns.took(trajectory)
        counts.update(engine.counts())
        clock.seconds["environment"] += turns.waited_s
        clock.seconds["rollout"] += time.perf_counter() - start - turns.waited_s

    def demonstration(self, example: Example) -> tuple[list[int], list[bool]] | None:
        """The ids after the prompt of a recommended episode, and which of them are the policy's.

        None if the environment recommends nothing, fails, or goes beyond the budgets.
        """
        answer = self.pool.play([Job(0, example.metadata["seed"], demonstrate=True)])[0]
        ids: list[int] = []
        trained: list[bool] = []
        for place, (action, after) in enumerate(answer.turns[: self.section.max_turns]):
            turn = self.tokenizer.encode(action)
            if not turn or turn[-1] not in self.stop_ids:
                turn.append(self.tokenizer.end_of_turn)
            if len(turn) > self.rollout.turn_tokens:
                return None
            ids += turn
            trained += [True] * len(turn)
            if place + 1 < min(len(answer.turns), self.section.max_turns):
                observed = self.encode(after.observation, turn[-1])
                ids += observed
                trained += [False] * len(observed)
        return (ids, trained) if 0 < len(ids) <= self.rollout.max_completion_tokens else None

    # Parts of a turn

    def _stop_id(self, text: str) -> int:
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            raise UserError(
                f"environment {self.section.name}: a stop text is not one token: got {text!r} in "
                f"task.stop_texts with the ids {ids}, expected one id."
            )
        return ids[0]

    def _cut(self, text: str) -> str:
        most, ids = self.section.max_observation_tokens, self.tokenizer.encode(text)
        if len(ids) <= most:
            return text
        begin = most // 2
        return self.tokenizer.decode(ids[:begin]) + self.tokenizer.decode(ids[len(ids) - (most - begin) :])

    def _room(self, one: _Played) -> int:
        return min(self.rollout.turn_tokens, self.rollout.max_completion_tokens - one.length)

    def _request(self, index: int, one: _Played, seeds: Sequence[int]) -> Request:
        return Request(index, list(one.token_ids), seeds[index], self._room(one))

    def _job(self, key: int, one: _Played) -> Job:
        return Job(key, one.prompt.example.metadata["seed"], tuple(one.actions), one.digest)

    def _reset(self, one: _Played, answer: Answer) -> None:
        one.digest = answer.digest
        if answer.failed:
            one.fail(answer)
        elif answer.digest != one.prompt.example.metadata["digest"]:
            one.fail(Answer("not repeatable", "reset gave another observation than that of the prompt"))

    def _take(self, one: _Played, trajectory: Trajectory) -> None:
        ids = trajectory.completion_ids.tolist()
        one.append(ids, trajectory)
        if trajectory.finish_reason == "length":
            one.ended = "length"
        else:
            one.actions.append(self.tokenizer.decode(ids))

    def _answer(self, one: _Played, answer: Answer) -> None:
        if answer.failed:
            one.fail(answer)
            return
        one.digest = answer.digest
        one.rewards.append(answer.reward)
        one.counts.update(answer.counts or {})
        if answer.terminated or answer.truncated or len(one.actions) == self.section.max_turns:
            one.ended = "stop" if answer.terminated else "turns"
            return
        try:
            ids = self.encode(answer.observation, one.token_ids[-1])
        except UserError as error:  # a character that the tokenizer does not have
            one.fail(Answer("exception", f"its observation cannot be encoded: {error}"))
            return
        if one.length + len(ids) >= self.rollout.max_completion_tokens:
            one.ended = "length"
            return
        one.append(ids)


class _Turns(Replies):
    """The replies of a stream of episodes, from their environments.

    waited_s: seconds in which the engine waited for one.
    """

    def __init__(
        self, player: EpisodePlayer, played: Sequence[_Played], seeds: Seeds, conversation: Conversation
    ) -> None:
        self.waited_s = 0.0
        self._player = player
        self._played = played
        self._seeds = [seeds(turn) for turn in range(player.section.max_turns)]
        self._conversation = conversation
        self._over: list[Reply] = []

    def took(self, trajectory: Trajectory) -> None:
        """A turn of the policy, after which its environment is asked or the episode is over."""
        index = trajectory.request_id
        one = self._played[index]
        self._player._take(one, trajectory)
        if one.ended is None:
            self._conversation.ask(self._player._job(index, one))
        else:
            self._over.append(self._end(index))

    def take(self, *, wait: bool) -> list[Reply]:
        replies, self._over = self._over, []
        start = time.perf_counter()
        answers = self._conversation.answers(wait=wait and not replies)
        self.waited_s += time.perf_counter() - start if wait else 0.0
        for index, answer in answers:
            one = self._played[index]
            self._player._answer(one, answer)
            if one.ended is None:
                request = self._player._request(index, one, self._seeds[len(one.actions)])
                replies.append(Reply(index, request))
            else:
                replies.append(self._end(index))
        return replies

    def _end(self, index: int) -> Reply:
        self._conversation.end(index)
        return Reply(index)


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Turns, calls of tools, the share of calls that are errors, and the share of failed environments."""
    turns = [sum(turn.role == "policy" for turn in e.trajectory.turns) for e in episodes]
    calls, errors = (sum(e.counts.get(name, 0) for e in episodes) for name in ("tool_calls", "tool_errors"))
    return {
        "episode/turns_mean": float(np.mean(turns)),
        "episode/turns_max": float(np.max(turns)),
        "episode/tool_calls_mean": calls / len(episodes),
        "episode/tool_error_fraction": errors / calls if calls else 0.0,
        "episode/failed_fraction": float(np.mean([bool(e.failed) for e in episodes])),
    }


def episode_record(episode: Episode) -> dict[str, Any]:
    """For the record of a run: the reward of each turn, and how the environment failed, if it did."""
    record: dict[str, Any] = {"turn_rewards": list(episode.rewards)}
    return record | ({"failed": episode.failed} if episode.failed else {})
