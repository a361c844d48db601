"""The client of the vLLM server against a stub of it: restarts, and the order of sleep, weights and requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.engine.common import EngineFailed, EngineSettings
from bridge.engine.server import ServerEngine
from jetrl_jax.rollout.engine import Request, SamplingParams
from tests.parity.small_policy import SmallPolicy
from tests.parity.vllm_policy import QWEN3
from tests.unit.stub_vllm import TOKEN, StubServer

REQUESTS, SAMPLING = [Request(0, [3, 4, 5], 0)], SamplingParams(1.0, 8, (TOKEN,), 0)


def engine_with(restarts: int, url: str | None = None) -> ServerEngine:
    engine = ServerEngine(QWEN3, [], EngineSettings(8, 8, restarts=restarts), url=url)
    engine._weights, engine._ready = (Path("staged"), 3), True
    return engine


@pytest.mark.parametrize(
    ("restarts", "failing_pushes", "succeeds"), [(0, 0, False), (1, 0, True), (1, 1, False), (3, 2, True), (3, 3, False)]
)
def test_every_restart_is_used_also_by_a_server_that_fails_to_take_the_weights(restarts, failing_pushes, succeeds, monkeypatch, capsys):
    engine, calls, pushes = engine_with(restarts), [], []

    def push() -> None:
        pushes.append(None)
        if len(pushes) <= failing_pushes:
            raise EngineFailed("it died while it took the weights")
        engine._ready = True

    def call() -> str:
        calls.append(None)
        if len(calls) == 1:
            raise EngineFailed("it died")
        return "answer"

    monkeypatch.setattr(engine, "_push", push)
    if succeeds:
        assert engine._with_restarts(call) == "answer" and len(calls) == 2 and len(pushes) == failing_pushes + 1
        assert engine.restarts_left == restarts - failing_pushes - 1
    else:
        with pytest.raises(EngineFailed):
            engine._with_restarts(call)
        assert engine.restarts_left == 0 and len(pushes) == restarts
    assert capsys.readouterr().err.count("vLLM is restarted") == restarts - engine.restarts_left
    engine.close()


def test_a_server_of_somebody_else_is_not_restarted():
    engine = engine_with(2, url="http://127.0.0.1:9/")

    def call() -> str:
        raise EngineFailed("it died")

    with pytest.raises(EngineFailed):
        engine._with_restarts(call)
    assert engine.restarts_left == 2 and engine.url == "http://127.0.0.1:9"
    engine.close()


def test_a_server_sleeps_until_new_weights_and_wakes_around_them():
    policy = SmallPolicy("fp8_unified", QWEN3)
    with StubServer() as server:
        engine = ServerEngine(QWEN3, [], EngineSettings(8, 8, sleep=True), url=server.url)
        push = ["start", "update", "pause", "finish", "reset", "resume"]
        engine.load_weights(policy.published, 0)
        assert server.engine.calls == push
        assert len(engine.generate(REQUESTS, SAMPLING)) == len(engine.score([[3, 4, 5]])) == 1
        engine.sleep()
        engine.sleep()  # it does already
        for ask in (lambda: engine.generate(REQUESTS, SAMPLING), lambda: engine.score([[3, 4]]), lambda: engine.held([])):
            with pytest.raises(RuntimeError, match="the engine sleeps and has no weights"):
                ask()
        manifest = engine.load_weights(policy.published, 1)
        assert server.engine.calls[len(push) :] == [
            "sleep 2", "wake weights", "start", "update", "pause", "finish", "wake kv_cache", "reset", "resume",
        ]  # fmt: skip
        assert engine.held(list(manifest.entries)) == manifest
        assert engine.generate(REQUESTS, SAMPLING)[0].policy_version == 1 and engine.description["sleep"]
        engine.close()


def test_a_server_that_was_not_told_to_sleep_stays_awake():
    policy = SmallPolicy("fp8_unified", QWEN3)
    with StubServer() as server:
        engine = ServerEngine(QWEN3, [], EngineSettings(8, 8), url=server.url)
        engine.load_weights(policy.published, 0)
        engine.sleep()
        assert engine.generate(REQUESTS, SAMPLING) and "sleep 2" not in server.engine.calls
        engine.close()


@pytest.mark.parametrize("skipped", ["/wake_up?tags=weights", "/wake_up?tags=kv_cache", "/reset_prefix_cache"])
def test_the_stub_notices_a_step_that_is_left_out(skipped, monkeypatch):
    policy = SmallPolicy("fp8_unified", QWEN3)
    with StubServer() as server:
        engine = ServerEngine(QWEN3, [], EngineSettings(8, 8, sleep=True), url=server.url)
        engine.load_weights(policy.published, 0)
        engine.sleep()
        post = engine._post
        monkeypatch.setattr(engine, "_post", lambda route, body, limit: route == skipped or post(route, body, limit))
        with pytest.raises(EngineFailed, match="AssertionError"):
            engine.load_weights(policy.published, 1)
            engine.generate(REQUESTS, SAMPLING)
        engine.close()
