"""vLLM behind HTTP: a server that the trainer starts and ends, or one that already runs on this machine.

    start     loopback only, a free port, its output in vllm.log of the run; ready when /health answers
    sync      safetensors on tmpfs with a manifest beside it; staged and verified by the worker, then applied
    adapters  beside a base that is synced once; each version is a PEFT directory on tmpfs with its own name
    sleep     weights and cache are dropped until the next sync, which wakes the weights, then the cache
    generate  token ids in, token ids and logprobs out, one request per completion; every answer names the
              version of its weights
    end       with the trainer, however that ends (`server_process`)

Every call has a time limit (`client`).  A server that died, hangs or answers nonsense ends the call with
`EngineFailed`.  If `rollout.engine.restarts` allows it, the trainer's own server is restarted instead, gets
the present weights, and gets the unanswered requests again.  vLLM's control routes have no authentication, so
the server listens only on loopback.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from safetensors.numpy import save_file

from bridge.hf.tensors import adapter_tensors, to_host
from bridge.vllm import server_process
from bridge.vllm.client import Call, CallFailed, Client, Limit
from bridge.vllm.engine import Answers, Asked, VllmEngine
from bridge.vllm.settings import (
    EngineFailed,
    EngineSettings,
    as_flags,
    check_version,
    environment,
    require_exact,
    write_model_directory,
)
from jetrl_jax.config.rollout import ExternalVllmSection, ServedVllmSection, VllmServerSection
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.rollout.manifest import Manifest

T = TypeVar("T")
LOG_FILE = "vllm.log"
GENERATE = "/inference/v1/generate"
AT_ONCE = 256  # concurrent requests to a server whose own limit is not known
POLL_S = 0.2
STOP_S = RESUME_S = 20.0


class ServerEngine(VllmEngine):
    """A `VllmEngine` that uses vLLM's HTTP routes; its own server starts with the first `load`.

    Args:
      model, fp8_paths, settings: as `VllmEngine`.  The engine's section is `vllm_server`, which is started
        here, or `vllm_external`, which already runs, with this package's plugin, backend ``jetrl`` and
        VLLM_SERVER_DEV_MODE=1.
      command: replaces the command of vLLM's server (its flags are appended).
      log_directory: directory of an own server's output; None: a temporary one.

    Raises:
      UserError: httpx is not installed.
    """

    def __init__(
        self,
        model: ModelConfig,
        fp8_paths: Sequence[str],
        settings: EngineSettings,
        *,
        command: Sequence[str] = (sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        log_directory: Path | None = None,
    ) -> None:
        super().__init__(model, fp8_paths, settings)
        self.command = list(command)
        self.url = self.limits.url.rstrip("/") if isinstance(self.limits, ExternalVllmSection) else None
        self.owned = self.url is None
        self.restarts_left = self.limits.restarts if isinstance(self.limits, VllmServerSection) else 0
        self.log_directory = log_directory
        self._vllm = ""
        self._client = Client()
        self._process: subprocess.Popen | None = None
        self._weights: tuple[Path, int] | None = None
        self._pushed = False  # whether the server has them
        self._adapter: tuple[str, Path] | None = None  # its name and directory
        self._draft: Path | None = None  # the weights of a draft that was handed over
        self._ready = False
        # tmpfs, so that weights are not written to disk
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._directory = Path(tempfile.mkdtemp(prefix="jetrl-vllm-", dir=root))
        if self.owned:
            write_model_directory(self._directory / "model", model, fp8_paths)
        atexit.register(self.close)

    @property
    def limits(self) -> ServedVllmSection:
        """The section of the server, with its time limits."""
        assert isinstance(self.settings.rollout.engine, ServedVllmSection)
        return self.settings.rollout.engine

    def _identity(self) -> dict[str, Any]:
        return {"mode": "server" if self.owned else "external", "vllm": self._vllm, "url": self.url}

    def _hand_over(self, published: Any, version: int) -> Manifest:
        tensors = {name: to_host(array) for name, array in self._to_send(published)}
        manifest = Manifest.of(tensors.items(), version)
        path = self._directory / f"{version}.safetensors"
        before, old = self._weights, self._adapter
        if tensors:
            save_file(tensors, path)
            Path(f"{path}.json").write_text(manifest.to_json(), encoding="utf-8")
            self._weights = (path, version)
            self._pushed = False
        if self.settings.lora is not None:
            name, _, directory = self._next_adapter(published, self._directory)
            self._adapter = name, directory
            own = Manifest.of(adapter_tensors(published, self.settings.lora.scale), version)
            manifest = Manifest(version, {**manifest.entries, **own.entries})
        self._draft = None
        self._with_restarts(self._push)
        if tensors:
            self._now_held(published)
        if tensors and before is not None and before[0] != path:
            for file in (before[0], Path(f"{before[0]}.json")):
                file.unlink(missing_ok=True)
        if old is not None:
            shutil.rmtree(old[1], ignore_errors=True)
            with contextlib.suppress(EngineFailed):  # only the server's list of names would grow
                self._post("/v1/unload_lora_adapter", {"lora_name": old[0]}, self._sync_limit())
        return manifest

    def _hand_over_draft(self, tensors: Mapping[str, np.ndarray]) -> None:
        path = self._directory / "draft.safetensors"
        save_file(dict(tensors), path)
        manifest = Manifest.of(tensors.items(), self._version)
        Path(f"{path}.json").write_text(manifest.to_json(), encoding="utf-8")

        def push() -> None:
            self._push_draft(path, self._sync_limit())
            self._draft = path

        self._with_restarts(push)

    def _drop(self) -> None:
        self._with_restarts(
            lambda: self._post(f"/sleep?level={self.settings.sleep_level}", {}, self._sync_limit())
        )

    def _held(self, names: list[str]) -> str:
        method = "jetrl_held_manifest"
        return self._with_restarts(
            lambda: self._of_worker(method, names, self._version, limit=self._sync_limit())
        )

    def _completion(self, answer: Any) -> tuple[Sequence[int], Sequence[float], str | None]:
        """As the base class; tokens of other weights are an error."""
        with _reading(answer):
            (choice,) = answer["choices"]
            versions = {str(span["version"]) for span in choice.get("weight_versions") or []}
            content = (choice.get("logprobs") or {}).get("content") or []
            logprobs = [entry["logprob"] for entry in content]
            completion = choice["token_ids"], logprobs, choice.get("finish_reason")
        version = self._version if self._weights is None or self._adapter is None else self._weights[1]
        if versions - {str(version)}:
            raise EngineFailed(
                f"vLLM: an answer has tokens of weights {sorted(versions)}, expected {version} only."
            )
        if self._adapter is not None and answer.get("model", self._adapter[0]) != self._adapter[0]:
            raise EngineFailed(
                f"vLLM: an answer is of the adapter {answer['model']}, expected {self._adapter[0]}."
            )
        return completion

    def _metrics(self) -> str:
        return self._request("GET", "/metrics", self._sync_limit(), form="text")

    def _of_prompt(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        with _reading(answer):
            return [
                entry[str(token)]["logprob"]
                for entry, token in zip(answer["prompt_logprobs"][1:], tokens, strict=True)
            ]

    def _close(self) -> None:
        """Ends an own server, closes the connections and removes the files written for it."""
        self._stop()
        self._client.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        atexit.unregister(self.close)

    # Calls

    def _ask(self, asked: Asked) -> Answers:
        """Yields answers as they arrive; a restarted server gets the unanswered requests again."""
        waiting = dict(enumerate(asked))
        while waiting:
            try:
                self._push_again()
                with contextlib.closing(self._at_once(waiting)) as answers:
                    for place, answer in answers:
                        del waiting[place]
                        yield place, answer
            except EngineFailed as error:
                self._after_failure(error)

    def _at_once(self, asked: Mapping[int, tuple[Sequence[int], dict[str, Any]]]) -> Answers:
        """Makes one call per request, as many at the same time as vLLM decodes."""
        limit = Limit.start("rollout.engine.request_timeout_s", self.limits.request_timeout_s)
        calls = {}
        for place, (ids, fields) in asked.items():
            body = {"token_ids": list(ids), "sampling_params": fields, "return_token_ids": True}
            if self._adapter is not None:
                body["model"] = self._adapter[0]
            calls[place] = Call("POST", f"{self.url}{GENERATE}", body, limit)
        most = self.settings.started.max_num_seqs if self.owned else AT_ONCE
        with self._failing(GENERATE), contextlib.closing(self._client.at_once(calls, most)) as answers:
            yield from answers

    def _push(self) -> None:
        """Loads the staged file into the server, which verifies it first; empties the prefix cache after."""
        self._ensure_ready()
        assert self._weights is not None
        path, version = self._weights
        limit = self._sync_limit()
        if self._asleep:
            self._post("/wake_up?tags=weights", {}, limit)
        if not self._pushed:
            self._stage(path, limit)
        self._post("/pause?mode=abort&clear_cache=true", {}, limit)  # no request may see both versions
        try:
            if not self._pushed:
                self._post("/finish_weight_update", {"weight_version": str(version)}, limit)
                self._pushed = self.settings.lora is not None  # else the next version is others
            if self._adapter is not None:
                name, directory = self._adapter
                named = {"lora_name": name, "lora_path": str(directory), "load_inplace": True}
                self._post("/v1/load_lora_adapter", named, limit)
            if self._asleep:
                self._post("/wake_up?tags=kv_cache", {}, limit)
            self._post("/reset_prefix_cache", {}, limit)
        except EngineFailed:
            with contextlib.suppress(EngineFailed):  # the first error is the one to report
                self._resume(limit)
            raise
        self._resume(limit)
        self._asleep = False
        if self._draft is not None:
            self._push_draft(self._draft, limit)

    def _push_draft(self, path: Path, limit: Limit) -> None:
        """Loads the weights of a draft; no request is in flight."""
        self._post("/start_draft_weight_update", {}, limit)
        self._post("/update_weights", {"update_info": {"path": str(path)}}, limit)
        self._post("/finish_weight_update", {"weight_version": str(self._version)}, limit)

    def _stage(self, path: Path, limit: Limit) -> None:
        """Makes the server read and verify a file of weights."""
        start = {"is_checkpoint_format": False}  # read only by vLLM 0.24, see `worker.transfer`
        try:
            self._post("/start_weight_update", start, limit)
        # a killed trainer may have left an update open, which this empty update ends
        except EngineFailed:
            with contextlib.suppress(EngineFailed):
                self._post("/update_weights", {"update_info": {}}, limit)
            self._post("/start_weight_update", start, limit)
        self._post("/update_weights", {"update_info": {"path": str(path)}}, limit)

    def _resume(self, limit: Limit) -> None:
        """Lets the server continue, with enough time even if the limit has passed."""
        self._post(
            "/resume", {}, Limit(limit.setting, limit.seconds, max(limit.end, time.monotonic() + RESUME_S))
        )

    def _with_restarts(self, call: Callable[[], T]) -> T:
        """Runs `call()`; repeats it on a restarted server with the present weights, if restarts are left."""
        while True:
            try:
                if call != self._push:
                    self._push_again()
                return call()
            except EngineFailed as error:
                self._after_failure(error)

    def _push_again(self) -> None:
        """Gives a restarted server the present weights."""
        if not self._ready and self._weights is not None:
            self._push()

    def _after_failure(self, error: EngineFailed) -> None:
        """Ends an own server that failed; raises the error if it may not be restarted."""
        if self.owned:
            self._stop()
        if not self.owned or self.restarts_left == 0:
            raise error
        self.restarts_left -= 1
        print(f"vLLM is restarted ({self.restarts_left} restarts left): {error}", file=sys.stderr, flush=True)

    def _sync_limit(self) -> Limit:
        return Limit.start("rollout.engine.sync_timeout_s", self.limits.sync_timeout_s)

    def _post(self, route: str, body: dict[str, Any], limit: Limit) -> Any:
        return self._request("POST", route, limit, body)

    def _of_worker(self, method: str, *arguments: Any, limit: Limit) -> Any:
        """The result of a method of this project's worker extension (`worker.transfer`)."""
        body = {"method": method, "args": arguments, "timeout": self.limits.sync_timeout_s}
        answer = self._post("/collective_rpc", body, limit)
        with _reading(answer):
            return answer["results"][0]

    def _request(
        self,
        method: str,
        route: str,
        limit: Limit,
        body: dict[str, Any] | None = None,
        form: Literal["json", "text"] = "json",
    ) -> Any:
        """The answer of a route; {} if it is empty, or words for people."""
        with self._failing(route):
            call = Call(
                method, f"{self.url}{route}", body, limit, "dropped" if route.startswith("/v1/") else form
            )
            return self._client.call(call)

    @contextlib.contextmanager
    def _failing(self, route: str) -> Iterator[None]:
        """Turns a failed call into `EngineFailed`, with the route's name and the place of the log."""
        try:
            yield
        except CallFailed as error:
            raise EngineFailed(f"vLLM: {route.split('?')[0]}{error}{self._log_hint()}") from error

    # The process

    @property
    def _log(self) -> Path:
        return (self.log_directory or self._directory) / LOG_FILE

    def _log_hint(self) -> str:
        return f" Its output: {self._log}." if self.owned else ""

    def _ensure_ready(self) -> None:
        if self._ready:
            return
        if self.owned:
            self._start()
        limit = self._sync_limit()
        answer = self._request("GET", "/version", limit)
        with _reading(answer):
            self._vllm = answer.get("version", "?")
        check_version(self._vllm)
        self.operations = self._of_worker("jetrl_operations", limit=limit)
        if self.owned:
            require_exact(self.operations, self.settings, bool(self.fp8_paths))
        self._ready = True

    def _start(self) -> None:
        """Starts the server and waits until it answers."""
        self._process_number += 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        on_cpu = jax.default_backend() == "cpu"
        flags = as_flags(self.settings.arguments(self._directory / "model", self.model, on_cpu))
        command = [*self.command, *flags, "--host", "127.0.0.1", "--port", str(port), "--tokens-only"]
        variables = os.environ | environment(on_cpu, self.settings.started.enforce_eager)
        variables["VLLM_SERVER_DEV_MODE"] = "1"
        if self.settings.lora is not None:
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        variables.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(server_process.__file__), *command],
                stdin=subprocess.PIPE,  # the server ends when this pipe closes
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        assert isinstance(self.limits, VllmServerSection)
        limit_s = self.limits.startup_timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            status = self._process.poll()
            if status is not None:
                raise EngineFailed(
                    f"vLLM: the server ended with status {status} before it was ready.{self._log_hint()}"
                )
            with contextlib.suppress(EngineFailed):
                self._request("GET", "/health", Limit.start("of one question", 2.0))
                return
            if time.monotonic() > deadline:
                raise EngineFailed(
                    f"vLLM: the server is not ready after {limit_s:g} s "
                    f"(rollout.engine.startup_timeout_s).{self._log_hint()}"
                )
            time.sleep(POLL_S)

    def _stop(self) -> None:
        """Ends an own server, by force if necessary."""
        self._ready = not self.owned and self._ready
        self._asleep = False  # a new server is awake
        self._pushed = False  # and empty
        process = self._process
        self._process = None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _reading(answer: Any) -> Iterator[None]:
    """Turns missing or malformed parts of an answer into `EngineFailed`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineFailed(
            f"vLLM: an answer cannot be read ({type(error).__name__}: {error}): {str(answer)[:200]}"
        ) from error
