"""Episodes on a scripted engine: whose tokens are whose, how turns and episodes end, and faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jetrl_jax.collect.batch import Group
from jetrl_jax.collect.clock import StepClock
from jetrl_jax.collect.collector import Collector
from jetrl_jax.collect.episodes import EpisodePlayer, episode_metrics
from jetrl_jax.collect.prompts import Prompt
from jetrl_jax.config.load import config_from_dict
from jetrl_jax.config.task import RewardSection
from jetrl_jax.errors import UserError
from jetrl_jax.record.console import Console
from jetrl_jax.rewards.functions import RewardFunctions
from jetrl_jax.rl.advantages import grpo
from jetrl_jax.rl.batching import pack, sample_masks
from jetrl_jax.rollout.engine import RolloutEngine
from jetrl_jax.rollout.types import Trajectory
from jetrl_jax.tasks.base import Example
from jetrl_jax.tasks.environment import episode_return
from jetrl_jax.text.tokenizer import CharacterTokenizer
from jetrl_jax.workers.environments import Answer, Job
from tests.stand_in_environments import StandInEnvironments

TOKENIZER = CharacterTokenizer("?<>!.=abcdefghijklmnopqrstuvwxyz0123456789")
END = "|"  # in a script: the stop token


class ScriptedEngine(RolloutEngine):
    """Says the next turn of each episode's script, cut to the request's limit; log-probabilities count down."""

    def __init__(self, scripts: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.scripts = [list(script) for script in scripts]
        self.asked: list[Any] = []
        self.load(None, 4)

    def check(self, requests: Any, sampling: Any) -> None:
        """Takes everything."""

    def describe(self) -> dict[str, Any]:
        return {}

    def _load(self, published: Any, version: int) -> None:
        """Needs none."""

    def _score(self, sequences: Any) -> Any:
        raise AssertionError

    streams = True

    def _converse(self, requests: Any, sampling: Any, replies: Any) -> Any:
        unanswered = 0
        while requests or unanswered:
            if requests:
                (trajectory,) = self._sample([requests.pop()], sampling)
                unanswered += 1
                yield trajectory
            taken = replies.take(wait=not requests)
            unanswered -= len(taken)
            requests += [reply.request for reply in taken if reply.request]

    def _sample(self, requests: Any, sampling: Any) -> Any:
        self.asked.append([(r.id, list(r.prompt_ids), r.seed, r.max_tokens) for r in requests])
        for request in reversed(requests):
            text = self.scripts[request.id].pop(0)
            ids = [1 if c == END else TOKENIZER.encode(c)[0] for c in text]
            ends = [place for place, one in enumerate(ids) if one in sampling.stop_token_ids]
            ids = ids[: min(ends[0] + 1 if ends else len(ids), request.limit(sampling))]
            reason = "stop" if ids[-1] in sampling.stop_token_ids else "length"
            logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
            yield Trajectory.of_completion(
                request.id, request.prompt_ids, ids, logprobs, reason, self.policy_version
            )


class Pool(StandInEnvironments):
    """Answers by a table: (episode, number of actions) -> Answer; by default goes on with "ok"."""

    def __init__(self, answers: dict[tuple[int, int], Answer] | None = None) -> None:
        super().__init__()
        self.table = answers or {}
        self.jobs: list[list[Job]] = []

    def answers(self, *, wait: bool) -> list[tuple[int, Answer]]:
        if not wait:  # an environment is slow
            return []
        job = self.asked.pop()
        return [(job.key, *self.play([job]))]

    def play(self, jobs: Sequence[Job]) -> list[Answer]:
        self.jobs.append(list(jobs))
        return super().play(jobs)

    def answer(self, job: Job) -> Answer:
        return self.table.get((job.key, len(job.actions)), Answer(observation="ok", digest="d"))


def player_of(
    pool: Any, tokenizer: Any = TOKENIZER, *, turn=4, total=20, turns="lockstep", **section: Any
) -> EpisodePlayer:
    data = {
        "task": {"kind": "environment", "name": "guess_number", **section},
        "rollout": {
            "max_turn_tokens": turn,
            "max_completion_tokens": total,
            "max_prompt_tokens": 4,
            "turns": turns,
        },
    }
    config = config_from_dict(data)
    return EpisodePlayer(config.environment, config.rollout, tokenizer, pool, Answer(observation="?"))


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(Example("?", None, "", i, {"seed": 100 + i, "digest": "d"}), TOKENIZER.encode("?"))
        for i in range(count)
    ]


def play(scripts: Sequence[Sequence[str]], answers: Any = None, **options: Any) -> Any:
    pool, engine = Pool(answers), ScriptedEngine(scripts)
    player = player_of(pool, **options)
    sampling = player.sampling(7, 1.0)
    episodes, _ = player.play(
        engine,
        prompts(len(scripts)),
        lambda turn: [10 * turn + i for i in range(len(scripts))],
        sampling,
        StepClock(),
    )
    return episodes, engine, pool


def shown(trajectory: Trajectory) -> list[tuple[str, str, bool]]:
    """(role, text, whether all of it is sampled) of each turn."""
    rows = []
    for turn in trajectory.turns:
        sampled = trajectory.sampled[turn.start : turn.stop]
        assert sampled.all() or not sampled.any()
        text = "".join(
            END if i == 1 else TOKENIZER.decode([i])
            for i in trajectory.token_ids[turn.start : turn.stop].tolist()
        )
        rows.append((turn.role, text, bool(sampled.any())))
    return rows


def test_turns_and_observations_alternate_and_only_turns_are_sampled():
    end = Answer(
        observation="bye", reward=1.0, terminated=True, digest="d", counts={"tool_calls": 2, "tool_errors": 1}
    )
    (one, two), engine, pool = play(
        [["ab|", "c|"], ["d|", "ef|", "g|"]],
        {(0, 2): end, (1, 1): Answer(observation="<", reward=0.25, digest="e"), (1, 3): end},
    )
    assert shown(one.trajectory) == [
        ("prompt", "?", False), ("policy", "ab|", True), ("environment", "ok", False), ("policy", "c|", True)
    ]  # fmt: skip
    assert [text for _, text, _ in shown(two.trajectory)] == ["?", "d|", "<", "ef|", "ok", "g|"]
    assert one.trajectory.sampled_logprobs.tolist() == [-1, -2, -3, -1, -2]
    assert one.trajectory.versions == ((1, 8, 4),) and one.trajectory.finish_reason == "stop"
    assert (one.rewards, two.rewards) == ((0.0, 1.0), (0.25, 0.0, 1.0))
    assert episode_return("", two.example) == 1.25 and two.example.metadata["turns"] == ["d", "ef", "g"]
    # the history is the engine's own ids, each turn has its seed, and ended episodes are not asked
    assert [[row[0] for row in asked] for asked in engine.asked] == [[0, 1], [0, 1], [1]]
    assert engine.asked[1][0][1] == one.trajectory.token_ids[:6].tolist()
    assert [[row[2] for row in asked] for asked in engine.asked] == [[0, 1], [10, 11], [21]]
    assert [job.actions for job in pool.jobs[-1]] == [("d", "ef", "g")]
    assert [job.digest for job in pool.jobs[2]] == ["d", "e"]
    metrics = episode_metrics([one, two])
    assert metrics["episode/turns_mean"] == 2.5 and metrics["episode/turns_max"] == 3
    assert metrics["episode/tool_calls_mean"] == 2 and metrics["episode/tool_error_fraction"] == 0.5


def test_a_stream_plays_the_same_episodes():
    """Of every end: terminated, truncated, all turns, no room, a cut turn, a failure in step and in reset."""
    scripts = [["ab|", "c|"], ["d|", "ef|", "g|"], ["abcdef|"], ["a|", "bc|", "d|"], ["a|", "b|"], []]
    answers = {
        (0, 2): Answer(reward=1.0, terminated=True, digest="d"),
        (1, 1): Answer(observation="<", reward=0.25, digest="e"),
        (3, 2): Answer(observation="0123456789", digest="d"),
        (4, 1): Answer("exception", "RuntimeError: broken"),
        (5, 0): Answer("timeout", "no answer"),
    }
    options = {"max_turns": 3, "total": 12}
    lockstep, *_ = play(scripts, answers, **options)
    stream, engine, pool = play(scripts, answers, turns="stream", **options)
    assert [e.trajectory.finish_reason for e in stream] == [
        "stop",
        "turns",
        "length",
        "length",
        "stop",
        "stop",
    ]
    for a, b in zip(lockstep, stream, strict=True):
        assert shown(a.trajectory) == shown(b.trajectory) and a.trajectory.turns == b.trajectory.turns
        assert np.array_equal(a.trajectory.logprobs, b.trajectory.logprobs)
        assert (a.example, a.rewards, a.counts, a.failed) == (b.example, b.rewards, b.counts, b.failed)
    # each turn has the seed, history and room of lockstep; the environments were slow and answered one by one
    assert sorted(row for asked in engine.asked for row in asked)[:2] == [
        (0, [2], 0, 4),
        (0, [*lockstep[0].trajectory.token_ids[:6].tolist()], 10, 4),
    ]
    assert all(len(jobs) == 1 for jobs in pool.jobs[1:])


def test_a_turn_cut_by_its_budget_is_never_stepped():
    (one,), _, pool = play([["abcdef|"]])
    assert shown(one.trajectory)[-1] == ("policy", "abcd", True) and one.trajectory.finish_reason == "length"
    assert one.rewards == () and pool.jobs[1] == [] and one.example.metadata["return"] == 0.0


def test_max_turns_ends_by_turns_which_mask_truncated_leaves_alone():
    (one, two, three), *_ = play(
        [["a|", "b|"], ["a|"], ["abcdef|"]],
        {(1, 1): Answer(observation="x", truncated=True, digest="d")},
        max_turns=2,
    )
    assert [e.trajectory.finish_reason for e in (one, two, three)] == ["turns", "turns", "length"]
    assert shown(one.trajectory)[-1][0] == "policy", "a last observation is not appended"
    reasons = [e.trajectory.finish_reason for e in (one, two, three)]
    _, trained = sample_masks(np.zeros(3), reasons, mask_truncated=True)
    assert trained.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("total", "text", "reason"), [(7, "ab|okcd", "length"), (5, "ab|", "length"), (6, "ab|okc", "length")]
)
def test_the_episodes_budget_counts_observations(total, text, reason):
    (one,), engine, _ = play([["ab|", "cdef|"]], total=total)
    assert "".join(part for _, part, _ in shown(one.trajectory)[1:]) == text
    assert one.trajectory.finish_reason == reason and len(one.trajectory.completion_ids) <= total
    if len(engine.asked) > 1:
        assert engine.asked[1][0][3] == total - 5


def test_stop_texts_end_a_turn_and_must_be_one_token():
    (one,), *_ = play([["a=", "bc="]], {(0, 2): Answer(terminated=True, digest="d")}, stop_texts=["="])
    assert [text for _, text, _ in shown(one.trajectory)] == ["?", "a=", "ok", "bc="]
    assert one.example.metadata["turns"] == ["a=", "bc="]
    with pytest.raises(UserError, match=r"a stop text is not one token: got 'ab' in task.stop_texts"):
        player_of(Pool(), stop_texts=["ab"])


def test_observations_are_written_by_the_template_and_lose_their_middle():
    (one,), *_ = play(
        [["a|", "b|"]],
        {(0, 1): Answer(observation="0123456789", digest="d"), (0, 2): Answer(terminated=True, digest="d")},
        max_observation_tokens=5,
        observation_template=".{observation}.",
    )
    assert shown(one.trajectory)[2] == ("environment", ".01789.", False)


def test_an_observation_that_cannot_be_encoded_fails_its_episode():
    (one, two), *_ = play(
        [["a|"], ["a|", "b|"]],
        {(0, 1): Answer(observation="%", digest="d"), (1, 2): Answer(terminated=True, digest="d")},
    )
    assert "its observation cannot be encoded: CharacterTokenizer: character '%'" in one.failed
    assert one.example.metadata["return"] is None and not two.failed


def test_a_failed_environment_masks_its_sample_only():
    failed = Answer("exception", "RuntimeError: broken")
    episodes, *_ = play(
        [["a|"], ["a|", "b|"], [], ["x|"], []],
        {
            (0, 1): Answer(observation="", reward=1.0, terminated=True, digest="d"),
            (1, 2): failed,
            (2, 0): failed,
            (3, 1): Answer(reward=0.5, terminated=True, digest="d"),
            (4, 0): Answer(observation="other", digest="z"),
        },
    )
    assert [e.example.metadata["return"] for e in episodes] == [1.0, None, None, 0.5, None]
    assert [text for _, text, _ in shown(episodes[1].trajectory)] == ["?", "a|", "ok", "b|"]
    assert shown(episodes[2].trajectory) == [("prompt", "?", False), ("policy", "", False)]
    assert "broken" in episodes[2].failed and "not repeatable" in episodes[4].failed
    assert episode_metrics(episodes)["episode/failed_fraction"] == 0.6
    rewards = RewardFunctions.from_config((RewardSection(),), Task())
    result = rewards(
        [e.example.prompt for e in episodes],
        [""] * 5,
        [e.example for e in episodes],
        ["stop"] * 5,
        [[]] * 5,
        [False] * 5,
    )
    assert np.array_equal(result.total, [1.0, np.nan, np.nan, 0.5, np.nan], equal_nan=True)
    assert result.failures["task"]["none"] == 3
    counted, trained = sample_masks(
        result.total, [e.trajectory.finish_reason for e in episodes], mask_truncated=False
    )
    (batch,) = pack([e.trajectory for e in episodes], np.ones(5), trained, 21, 63)
    assert counted.tolist() == trained.tolist() == [True, False, False, True, False]
    # the trained tokens are the sampled ones of the two episodes
    assert sorted(TOKENIZER.decode(batch.token_ids[batch.loss_mask].tolist())) == ["a", "x"]


class Task:
    name = "episodes"
    train = eval = (Example("?", None),)

    def verify(self, completion: str, example: Example) -> float | None:
        return episode_return(completion, example)


def test_group_advantages_are_over_returns():
    # by hand: mean .475, std (n - 1) .411298, eps 1e-6
    values = grpo(np.array([[1, 0.5, 0, 0.4]]), np.ones((1, 4), bool))[0]
    np.testing.assert_allclose(values, [1.276441312, 0.060782920, -1.154875472, -0.182348759], atol=2e-6)


def test_demonstrations_have_the_turns_as_trained_tokens():
    turns = (("ab", Answer(observation="<")), ("c=", Answer(observation="?")), ("d", Answer(terminated=True)))
    pool = Pool({(0, 0): Answer(turns=turns)})
    player = player_of(pool, stop_texts=["="])
    ids, trained = player.demonstration(prompts(1)[0].example)
    text = "".join(END if i == 1 else TOKENIZER.decode([i]) for i in ids)
    assert text == "ab|<c=?d|" and "".join("xo"[one] for one in trained) == "oooxooxoo"
    assert player_of(pool, turn=2).demonstration(prompts(1)[0].example) is None, "a turn beyond its budget"
    assert player_of(Pool()).demonstration(prompts(1)[0].example) is None, "nothing recommended"


def test_collector_puts_episodes_into_groups_and_says_what_failed(capsys):
    data = {
        "task": {"kind": "environment", "name": "guess_number"},
        "rollout": {
            "max_turn_tokens": 4,
            "max_completion_tokens": 20,
            "prompts_per_step": 2,
            "group_size": 2,
        },
        "rewards": [{"weight": 7.0}],  # replaced by functions with weights of their own
    }
    config = config_from_dict(data)

    def ten(prompts: Any, completions: Any, answers: Any) -> list[float]:
        return [10.0] * len(completions)

    pool = Pool(
        {(2, 1): Answer("timeout", "no answer within 1 s")}
        | {(i, 1): Answer(reward=i, terminated=True, digest="d") for i in (0, 1, 3)}
    )

    class Stream:
        skipped = 0

        def take(self, count: int) -> list[Prompt]:
            return prompts(count)

    collector = Collector(
        config=config,
        algorithm=type("Algorithm", (), {"dynamic_sampling": False, "credit": "turn"})(),
        engine=ScriptedEngine([["a|"]] * 4),
        rewards=RewardFunctions.from_functions(["task", ten], Task(), weights=[2.0, 1.0]),
        tokenizer=TOKENIZER,
        prompts=Stream(),
        console=Console(1),
        player=player_of(pool),
    )
    clock = StepClock()
    batch = collector.collect(1, clock)
    assert [len(group.episodes) for group in batch.groups] == [2, 2] and {
        "rollout",
        "environment",
    } <= clock.seconds.keys()
    assert np.array_equal(batch.rewards, [10, 12, np.nan, 16], equal_nan=True)
    turns = [r.tolist() for r in collector.turn_rewards(batch)]
    assert turns[:2] == [[10.0], [12.0]] and turns[3] == [16.0]
    assert "environment: timeout: no answer within 1 s" in capsys.readouterr().out


def test_rewards_of_turns_add_up_to_the_total_where_a_function_of_weight_0_fails():
    episodes, _, _ = play(
        [["a|", "b|", "c|"], ["d|"]],
        {
            (0, 1): Answer(observation="<", reward=0.25, digest="d"),
            (0, 2): Answer(observation="<", reward=-0.5, digest="d"),
            (0, 3): Answer(reward=1.0, terminated=True),
            (1, 1): Answer(reward=0.125, terminated=True),
        },
    )

    def finished(prompts: Any, completions: Any, answers: Any) -> list[float]:
        return [0.5, 0.75]

    def fails(prompts: Any, completions: Any, answers: Any) -> list[float | None]:
        return [None, 3.0]

    functions = RewardFunctions.from_functions(["task", finished, fails], Task(), weights=[2, -1, 0])
    examples, ids = [e.example for e in episodes], [e.trajectory.completion_ids for e in episodes]
    result = functions(["?"] * 2, [""] * 2, examples, ["stop"] * 2, ids)
    assert np.isnan(result.parts["fails"][0])
    trajectories = [e.trajectory for e in episodes]
    group = Group(prompts(1)[0], trajectories, [""] * 2, result.total, result.parts, episodes)
    turns = group.turn_rewards(functions.weights)
    assert [r.tolist() for r in turns] == [[0.5, -1.0, 1.5], [-0.5]]
    assert [r.sum() for r in turns] == result.total.tolist() == [1.0, -0.5]
