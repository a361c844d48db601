"""A vLLM that computes nothing and holds a caller to the contract: what may be asked while what is asleep, in
which order.

As vLLM 0.32 has it (`Executor.sleep`, `Executor.wake_up`, the worker's weight update, the routes of
`entrypoints/serve`), but an error where vLLM itself would answer from memory that is not there.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from bridge.vllm.settings import EXACT, FP8_PRODUCTS
from jetrl_jax.rollout.manifest import Manifest

TOKEN, LOGPROB = 1, -0.5  # what it samples: one token, always
# what it says it runs
OPERATIONS = {name: f"Exact{name.title()}" for name in EXACT} | {"fp8_product": FP8_PRODUCTS["deepgemm"][0]}


class StubVllm:
    """`vllm.LLM` and the engine behind the routes; `calls` are those that change it, in order."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.calls = []
        self.asleep: set[str] = set()
        self.staged: Manifest | None = None
        self.weights: Manifest | None = None
        self.updating = self.stale = False
        self.queue: list[Any] = []
        self.count = 0
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")),
            has_unfinished_requests=lambda: bool(self.queue),
            step=self.step,
            abort_request=self.abort,
        )

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Nothing to agree on."""

    def sleep(self, level: int = 1) -> None:
        assert not self.asleep and level == 2
        self.calls.append("sleep 2")
        self.asleep = {"weights", "kv_cache"}
        self.weights = None
        self.stale = False

    def wake_up(self, tags: list[str]) -> bool:
        assert set(tags) <= self.asleep, f"{tags} are awake"
        self.calls += [f"wake {tag}" for tag in tags]
        self.asleep -= set(tags)
        return not self.asleep

    def start_weight_update(self) -> None:
        assert not self.updating
        self.updating = True
        self.calls.append("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        from pathlib import Path

        assert self.updating and "weights" not in self.asleep, "there is no memory to put weights in"
        info = request["update_info"]
        if "path" in info:
            self.staged = Manifest.from_json(Path(f"{info['path']}.json").read_text())
        else:
            from bridge.vllm.worker import transfer

            self.staged = transfer._handed_over.pop(info["ticket"])[0]
        self.calls.append("update")

    def finish_weight_update(self, weight_version: str) -> None:
        assert self.updating and self.staged is not None and "weights" not in self.asleep
        self.calls.append("finish")
        self.weights = self.staged
        self.staged = None
        self.updating = False
        self.stale = True

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        self.stale = False
        return True

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        if method == "jetrl_operations":
            return [OPERATIONS]
        assert self.weights is not None and not self.asleep
        return [self.weights.to_json()]

    def enqueue(
        self, prompts: list[Any], params: list[Any], use_tqdm: bool, lora_request: None = None
    ) -> list[str]:
        """An error where anything is asleep, dropped, or cached from older weights."""
        assert self.weights is not None and not self.asleep and not self.stale and not self.updating
        names = []
        for prompt in prompts:
            names.append(f"{self.count}-abcdef")
            self.queue.append((str(self.count), prompt))
            self.count += 1
        return names

    def step(self) -> list[Any]:
        """One answer, the newest request's first."""
        name, prompt = self.queue.pop()
        entry = SimpleNamespace(logprob=LOGPROB)
        completion = SimpleNamespace(token_ids=[TOKEN], logprobs=[{TOKEN: entry}], finish_reason="stop")
        of_prompt = [None, *({token: entry} for token in prompt["prompt_token_ids"][1:])]
        return [
            SimpleNamespace(request_id=name, finished=True, outputs=[completion], prompt_logprobs=of_prompt)
        ]

    def abort(self, names: list[str], internal: bool) -> None:
        assert internal and names == [f"{name}-abcdef" for name, _ in self.queue]
        self.queue.clear()

    def answer(self, url: str, body: dict[str, Any]) -> Any:
        """What the server says to one POST."""
        route, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        if route == "/sleep":
            return self.sleep(int(query["level"][0]))
        if route == "/wake_up":
            return {"status": "awake" if self.wake_up(query["tags"]) else "sleeping"}
        if route == "/finish_weight_update":
            return self.finish_weight_update(body["weight_version"])
        if route == "/update_weights":
            return self.update_weights(body)
        if route in ("/start_weight_update", "/reset_prefix_cache"):
            return {"done": getattr(self, route[1:])()}
        if route in ("/pause", "/resume"):
            self.calls.append(route[1:])
            return None
        if route == "/collective_rpc":
            return {"results": self.collective_rpc(body["method"])}
        assert route == "/inference/v1/generate"
        self.enqueue([], [], False)
        assert self.weights is not None
        choice = {
            "token_ids": [TOKEN],
            "logprobs": {"content": [{"logprob": LOGPROB}]},
            "finish_reason": "stop",
        }
        logprobs = [None, *({str(token): {"logprob": LOGPROB}} for token in body["token_ids"][1:])]
        return {
            "choices": [choice | {"weight_versions": [{"version": self.weights.policy_version}]}],
            "prompt_logprobs": logprobs,
        }


class StubServer:
    """A `StubVllm` behind HTTP on loopback; `with StubServer() as server`."""

    def __init__(self) -> None:
        self.engine = StubVllm()
        self.connections = 0
        self._closed = 0
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                stub.connections += 1
                super().setup()

            def finish(self) -> None:
                super().finish()
                stub._closed += 1

            def do_GET(self) -> None:
                self._send(200, {"version": "0.32.0"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    self._send(200, stub.engine.answer(self.path, body))
                except Exception as error:
                    self._send(500, {"error": f"{type(error).__name__}: {error}"})

            def _send(self, status: int, value: Any) -> None:
                data = b"" if value is None else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def open_connections(self) -> int:
        """Those that no side has closed."""
        return self.connections - self._closed

    def __enter__(self) -> StubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
