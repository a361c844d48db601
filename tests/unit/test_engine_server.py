"""The restart policy of the vLLM server's client, without a server: what is tried, how often, and when it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.engine.common import EngineFailed, EngineSettings
from bridge.engine.server import ServerEngine
from tests.parity.vllm_policy import QWEN3


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
