"""The client of the vLLM server against a stub of it: restarts, bad answers, and the order of sleep, weights
and requests.
"""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.vllm.client import Call, Client, Limit
from bridge.vllm.server import ServerEngine
from bridge.vllm.settings import EngineFailed, require_exact, speculation_counts
from jetrl_jax.config.load import config_from_dict, load_config
from jetrl_jax.errors import UserError
from jetrl_jax.rollout.types import Request, SamplingParams
from jetrl_jax.runs import engines
from tests.parity.small_policy import SmallPolicy
from tests.parity.vllm_policy import QWEN3
from tests.sections import changed, engine_settings
from tests.unit.stub_vllm import OPERATIONS, TOKEN, StubServer

pytest.importorskip("httpx", reason="httpx, the client of vLLM's server, is not installed")
REQUESTS, SAMPLING = [Request(0, [3, 4, 5], 0)], SamplingParams(1.0, 8, (TOKEN,), 0)


def engine_with(restarts: int = 0, url: str | None = None) -> ServerEngine:
    settings = (
        engine_settings("vllm_server", restarts=restarts)
        if url is None
        else engine_settings("vllm_external", url=url)
    )
    engine = ServerEngine(QWEN3, [], settings)
    engine._weights = (Path("staged"), 3)
    engine._ready = True
    engine._version = 3
    return engine


@pytest.mark.parametrize(
    ("restarts", "failing_pushes", "succeeds"),
    [(0, 0, False), (1, 0, True), (1, 1, False), (3, 2, True), (3, 3, False)],
)
def test_every_restart_is_used_also_by_a_server_that_fails_to_take_the_weights(
    restarts, failing_pushes, succeeds, monkeypatch, capsys
):
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
        assert (
            engine._with_restarts(call) == "answer" and len(calls) == 2 and len(pushes) == failing_pushes + 1
        )
        assert engine.restarts_left == restarts - failing_pushes - 1
    else:
        with pytest.raises(EngineFailed):
            engine._with_restarts(call)
        assert engine.restarts_left == 0 and len(pushes) == restarts
    assert capsys.readouterr().err.count("vLLM is restarted") == restarts - engine.restarts_left
    engine.close()


def test_a_server_of_somebody_else_is_not_restarted():
    engine = engine_with(url="http://127.0.0.1:9/")

    def call() -> str:
        raise EngineFailed("it died")

    with pytest.raises(EngineFailed):
        engine._with_restarts(call)
    assert engine.restarts_left == 0 and engine.url == "http://127.0.0.1:9"
    engine.close()


@pytest.mark.parametrize(
    ("order", "others", "message"),
    [
        ("deepgemm", {"fp8_product": "CutlassFp8BlockScaledMMKernel"}, None),
        ("triton", {"fp8_product": "TritonFp8BlockScaledMMKernel"}, None),
        (
            "triton",
            {"fp8_product": "CutlassFp8BlockScaledMMKernel"},
            "fp8_product by Cutlass.*, expected Reference.* or Triton",
        ),
        ("deepgemm", {"fp8_product": "DeepGemmFp8BlockScaledMMKernel"}, "fp8_product by DeepGemm"),
        ("deepgemm", {"attention": "FlashAttentionImpl"}, "attention by FlashAttentionImpl"),
        ("deepgemm", {"norm": "ExactRMSNorm+RMSNorm"}, "norm by ExactRMSNorm.RMSNorm"),
        ("deepgemm", {"rope": "NTKScalingRotaryEmbedding"}, "rope by NTKScalingRotaryEmbedding"),
        ("deepgemm", {"linear": "UnquantizedLinearMethod"}, "linear by UnquantizedLinearMethod"),
        ("deepgemm", {"logprobs": "Sampler"}, "logprobs by Sampler"),
    ],
)
def test_an_exact_engine_must_run_the_trainers_operations(order, others, message):
    settings = engine_settings("vllm", promotion_order=order)
    require_exact(OPERATIONS | others, changed(settings, exact=False), True)
    if message is None:
        require_exact(OPERATIONS | others, settings, True)
    else:
        with pytest.raises(EngineFailed, match=message):
            require_exact(OPERATIONS | others, settings, True)


def test_an_exact_engine_of_fp8_layers_must_say_what_multiplies_them():
    # linear layers in BF16: it has none
    silent = {name: by for name, by in OPERATIONS.items() if name not in ("fp8_product", "linear")}
    require_exact(silent, engine_settings("vllm"), False)
    with pytest.raises(EngineFailed, match="fp8_product by nothing, expected Reference"):
        require_exact(silent, engine_settings("vllm"), True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [([], 1e-6), (["numerics.exact=false"], 0.02), (["rollout.engine.probe_logprob_tolerance=0.5"], 0.5)],
)
def test_the_probe_of_an_exact_run_allows_roundoff_only(changes, expected):
    config = load_config(None, ["rollout.engine=vllm", *changes])
    assert engines._tolerance(config.rollout.engine, config.numerics.exact) == expected


def test_a_server_sleeps_until_new_weights_and_wakes_around_them():
    policy = SmallPolicy("fp8_unified", QWEN3)
    with StubServer() as server:
        engine = ServerEngine(QWEN3, [], engine_settings("vllm_external", url=server.url, sleep=True))
        push = ["start", "update", "pause", "finish", "reset", "resume"]
        engine.load(policy.published, 0)
        assert server.engine.calls == push
        assert len(engine.generate(REQUESTS, SAMPLING)) == len(engine.score([[3, 4, 5]])) == 1
        engine.sleep()
        engine.sleep()  # it does already
        for ask in (
            lambda: engine.generate(REQUESTS, SAMPLING),
            lambda: engine.score([[3, 4]]),
            lambda: engine.held([]),
        ):
            with pytest.raises(RuntimeError, match="the engine sleeps: got no load"):
                ask()
        manifest = engine.load(policy.published, 1).manifest
        assert server.engine.calls[len(push) :] == [
            "sleep 2", "wake weights", "start", "update", "pause", "finish", "wake kv_cache", "reset", "resume",
        ]  # fmt: skip
        assert engine.held(list(manifest.entries)) == manifest
        assert engine.generate(REQUESTS, SAMPLING)[0].oldest_version == 1 and engine.describe()["sleep"]
        engine.close()


def test_a_server_that_was_not_told_to_sleep_stays_awake():
    policy = SmallPolicy("fp8_unified", QWEN3)
    with StubServer() as server:
        engine = ServerEngine(QWEN3, [], engine_settings("vllm_external", url=server.url))
        engine.load(policy.published, 0)
        engine.sleep()
        engine.load(policy.published, 1)
        assert engine.generate(REQUESTS, SAMPLING) and not {"sleep 2", "wake weights"} & set(
            server.engine.calls
        )
        engine.close()


@pytest.mark.parametrize(
    "skipped", ["/wake_up?tags=weights", "/wake_up?tags=kv_cache", "/reset_prefix_cache"]
)
def test_the_stub_notices_a_step_that_is_left_out(skipped, monkeypatch):
    policy = SmallPolicy("fp8_unified", QWEN3)
    with StubServer() as server:
        engine = ServerEngine(QWEN3, [], engine_settings("vllm_external", url=server.url, sleep=True))
        engine.load(policy.published, 0)
        engine.sleep()
        post = engine._post
        monkeypatch.setattr(
            engine, "_post", lambda route, body, limit: route == skipped or post(route, body, limit)
        )
        with pytest.raises(EngineFailed, match="AssertionError"):
            engine.load(policy.published, 1)
            engine.generate(REQUESTS, SAMPLING)
        engine.close()


ANSWERS = {
    "silence": (b"", r"/sleep: it did not answer in time \(rollout\.engine\.sync_timeout_s: 1 s\)\."),
    "hang_up": (None, r"/sleep: RemoteProtocolError: .*[Dd]isconnected"),
    "cut_short": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        r"/sleep: RemoteProtocolError: peer closed connection",
    ),
    "refusal": (
        b"HTTP/1.1 503 Busy\r\nContent-Length: 8\r\n\r\nnot now!",
        r"/sleep failed with status 503: not now!",
    ),
    "redirection": (
        b"HTTP/1.1 302 Found\r\nLocation: http://a\r\nContent-Length: 0\r\n\r\n",
        r"/sleep failed with status 302",
    ),
    "no_json": (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nyes!", r"/sleep answered no JSON: b'yes!'"),
    "plain_text": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\nyes!",
        r"/sleep answered no JSON: b'yes!'",
    ),
    "no_http": (b"SSH-2.0-server\r\n", r"/sleep: RemoteProtocolError: "),
}


def assert_sleep_fails(answer: Callable[[socket.socket], None], message: str) -> None:
    """A call of a server that does this with its connection ends with one message, and the server is free
    again.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        engine = engine_with(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        engine.settings = changed(engine.settings, sleep=True, sync_timeout_s=1.0)
        with pytest.raises(EngineFailed, match=f"^vLLM: {message}"):
            engine.sleep()
        engine.close()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_server_that_does_not_answer_as_it_should_ends_the_call_with_one_message(kind):
    answer, message = ANSWERS[kind]

    def respond(connection: socket.socket) -> None:
        request = b""
        while not request.endswith(b"{}"):  # all of it: closing on what is unread would be a reset
            request += connection.recv(65536)
        if answer:
            connection.sendall(answer)
        while kind == "silence" and connection.recv(1):
            pass

    assert_sleep_fails(respond, message)


DRIPPED = {  # what comes at once, and what comes drop by drop: a whole answer, in the end
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-Padding: aaaaaaaaaaaaaaaa\r\nContent-Length: 2\r\n\r\n{}"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 32\r\n\r\n", b"{" + b" " * 30 + b"}"),
    "body that ends with the connection": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}", b" " * 30),
}


@pytest.mark.parametrize("kind", DRIPPED)
def test_a_server_that_drips_its_answer_is_given_the_limit_and_no_more(kind):
    """A byte every tenth of a second, for three seconds; the limit is one."""
    at_once, drops = DRIPPED[kind]

    def drip(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other side is gone, as it should be
            connection.sendall(at_once)
            for drop in drops:
                time.sleep(0.1)
                connection.sendall(bytes([drop]))

    assert_sleep_fails(drip, ANSWERS["silence"][1])


def test_the_limit_of_a_weight_sync_is_on_all_its_calls(monkeypatch):
    """Each is well within it; a server that was late is told to go on all the same."""
    policy = SmallPolicy("fp8_unified", QWEN3)
    with StubServer() as server:
        answer = server.engine.answer
        slow = ("/pause", "/finish_weight_update")
        monkeypatch.setattr(
            server.engine,
            "answer",
            lambda url, body: time.sleep(4.0 * url.startswith(slow)) or answer(url, body),
        )
        engine = ServerEngine(QWEN3, [], engine_settings("vllm_external", url=server.url, sync_timeout_s=6.0))
        with pytest.raises(
            EngineFailed,
            match=r"^vLLM: /finish_weight_update: it did not answer in time "
            r"\(rollout\.engine\.sync_timeout_s: 6 s\)\.",
        ):
            engine.load(policy.published, 0)
        assert "resume" in server.engine.calls
        engine.close()


def test_nobody_listening_is_one_message_with_the_reason():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        engine = engine_with(url=f"http://127.0.0.1:{free.getsockname()[1]}")
        engine.settings = changed(engine.settings, sleep=True, sync_timeout_s=5.0)
        with pytest.raises(EngineFailed, match=r"vLLM: /sleep: .*Connection refused\."):
            engine.sleep()
        engine.close()


def test_an_answer_of_another_form_is_one_message(monkeypatch):
    with StubServer() as server:  # each GET gets JSON
        engine = engine_with(url=server.url)
        with pytest.raises(EngineFailed, match=r"^vLLM: /metrics answered no plain text: b'{"):
            engine._metrics()
        engine._ready = False
        monkeypatch.setattr(engine._client, "call", lambda call: ["0.32.0"])
        with pytest.raises(EngineFailed, match=r"^vLLM: an answer cannot be read .AttributeError"):
            engine._ensure_ready()
        with pytest.raises(EngineFailed, match=r"^vLLM: an answer cannot be read .TypeError"):
            engine._of_worker("jetrl_operations", limit=engine._sync_limit())
        engine.close()


def test_no_connection_outlives_its_call():
    """vLLM closes a connection after an error: a call on one that was kept may meet the closing."""
    policy = SmallPolicy("fp8_unified", QWEN3)
    with StubServer() as server:
        engine = ServerEngine(QWEN3, [], engine_settings("vllm_external", url=server.url))
        engine.load(policy.published, 0)
        before = server.connections
        for _ in range(3):
            engine.score([[3, 4, 5]])
        assert server.connections == before + 3
        deadline = time.monotonic() + 10
        while server.open_connections() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.open_connections() == 0
        engine.close()


def test_the_calls_of_one_batch_go_to_several_servers_a_few_at_a_time(monkeypatch):
    """Four calls to the first of two servers end after eight to the second one, which end after the four began."""
    first_is_busy, second_is_done, under_way, most = threading.Event(), threading.Event(), set(), []
    with StubServer() as first, StubServer() as second:

        def answer(server: int, url: str, body: dict) -> dict:
            under_way.add(body["place"])
            most.append(len(under_way))
            if under_way >= {0, 1, 2, 3}:
                first_is_busy.set()
            assert (first_is_busy if server else second_is_done).wait(10)
            time.sleep(0.05 * server)  # others that come too early are here by then
            under_way.remove(body["place"])
            return {"server": server}

        for number, stub in enumerate((first, second)):
            monkeypatch.setattr(stub.engine, "answer", functools.partial(answer, number))
        client, limit = Client(), Limit.start("of this test", 20.0)
        urls = [first.url] * 4 + [second.url] * 8
        calls = {place: Call("POST", url, {"place": place}, limit) for place, url in enumerate(urls)}
        answers = client.at_once(calls, 5)
        early = [next(answers) for _ in range(8)]
        assert sorted(place for place, _ in early) == list(range(4, 12))
        second_is_done.set()
        assert dict([*early, *answers]) == {place: {"server": int(place > 3)} for place in calls}
        assert max(most) == 5
        client.close()


def test_a_missing_client_library_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="spoken to by httpx, which is not installed"):
        engine_with(url="http://127.0.0.1:9")


def test_counts_of_speculation_are_read_from_vllms_metrics() -> None:
    labels = 'engine="0",model_name="m"'
    text = "# TYPE vllm:spec_decode_num_drafts_total counter\n" + "".join(
        f"vllm:spec_decode_num_{name}_total{{{labels}{place}}} {value}\n"
        for name, place, value in (
            ("drafts", "", "5.0"),
            ("draft_tokens", "", "9.0"),
            ("accepted_tokens", "", "6.0"),
            ("accepted_tokens_per_pos", ',position="0"', "4.0"),
            ("accepted_tokens_per_pos", ',position="1"', "2.0"),
        )
    )
    expected = {"drafted": 9, "accepted": 6, "verified": 5, "asked": 10, "accepted_1": 4, "accepted_2": 2}
    assert speculation_counts(text, 2) == expected | {"drafted_1": 5, "drafted_2": 5}
    assert set(speculation_counts("", 1).values()) == {0}


LOST: dict[
    str, tuple[list[int | None], int, bool]
] = {  # counts before and after, processes between, whether kept
    "same process": ([3, 8], 0, True),
    "dead before": ([None, 8], 1, False),
    "dead after": ([3, None], 0, False),
    "restarted between": ([3, 8], 1, False),
    "restarted by somebody else": ([8, 3], 0, False),
}


@pytest.mark.parametrize("kind", LOST)
def test_a_server_that_dies_loses_counts_of_speculation_and_no_answer(kind, monkeypatch, capsys):
    told, started, kept = LOST[kind]
    engine, answered = engine_with(restarts=1), iter(told)
    draft = {"method": "ngram", "num_speculative_tokens": 1}
    engine.settings = changed(engine.settings, speculative_config=draft)

    def metrics() -> str:
        count = next(answered)
        if count is None:
            raise EngineFailed("vLLM: /metrics: Connection refused.")
        return f'vllm:spec_decode_num_drafts_total{{engine="0"}} {count}\n'

    def ask(asked):
        engine._process_number += started
        yield 0, None

    monkeypatch.setattr(engine, "_metrics", metrics)
    monkeypatch.setattr(engine, "_ask", ask)
    monkeypatch.setattr(engine, "_completion", lambda answer: ([TOKEN], [-0.5], "stop"))
    engine._counts = {"verified": 1}
    assert [one.token_ids.tolist() for one in engine._sample(REQUESTS, SAMPLING)] == [[3, 4, 5, TOKEN]]
    assert engine.counts().get("verified") == (5 if kept else None)
    assert ("are left out: vLLM: /metrics" in capsys.readouterr().err) == (None in told)
    engine.close()


def test_a_missing_draft_head_is_told_with_what_is_expected(monkeypatch, capsys):
    config = config_from_dict(
        {"model": {"num_layers": 4}, "rollout": {"engine": {"speculation": {"kind": "head"}}}}
    )
    policy: Any = SimpleNamespace(config=config, head=None)
    monkeypatch.setattr(engines, "published_weights", lambda policy: None)
    monkeypatch.setattr(engines, "build_engine", lambda *_, draft: SimpleNamespace(load=lambda *_: draft))
    engines.sampling_engine(policy)
    assert re.search(
        "no trained draft head .* got head_path: null .* expected .*head_path:", capsys.readouterr().err
    )
