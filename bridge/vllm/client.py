"""Calls of vLLM's servers, JSON over HTTP, each with a time limit that holds whatever the server does.

A limit covers a whole call.  httpx by itself limits connecting and each single read or write, so a server
that sends a byte now and then would hold a call for ever.  No connection is reused, because vLLM closes one
after an error, and the next call on it would look like a dead server.

The calls run on an event loop in a separate thread, so that they continue while earlier answers are read.
Each call names its server, and those of one batch may go to several.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
import time
from collections.abc import Coroutine, Generator, Mapping
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from typing import Any, Literal

from jetrl_jax.errors import UserError


class CallFailed(Exception):
    """A call got no usable answer; the message continues a sentence that begins with the route's name."""


@dataclass(frozen=True)
class Limit:
    """The time within which one or several calls must be answered.

    setting: the field of the config that sets it; seconds: its length; end: its end, by `time.monotonic`.
    """

    setting: str
    seconds: float
    end: float

    @classmethod
    def start(cls, setting: str, seconds: float) -> Limit:
        """A limit that starts now."""
        return cls(setting, seconds, time.monotonic() + seconds)

    def __str__(self) -> str:
        return f"{self.setting}: {self.seconds:g} s"


@dataclass(frozen=True)
class Call:
    """A request to a server, and the limit within which it must be answered.

    form: of the answer to a success: JSON, plain text, or text for people, which is dropped.
    """

    method: str
    url: str
    body: dict[str, Any] | None
    limit: Limit
    form: Literal["json", "text", "dropped"] = "json"


class Client:
    """Makes calls to servers; the caller closes it.

    Raises:
      UserError: httpx is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("httpx") is None:
            raise UserError(
                "rollout.engine: a server is spoken to by httpx, which is not installed: expected the "
                "extra vllm. See docs/vllm.md."
            )
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # no proxy: the servers are on this machine
        self._http = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="calls of vLLM", daemon=True)
        self._thread.start()

    def call(self, call: Call) -> Any:
        """The answer in the form of the call; {} if it is dropped, or is to be JSON and is empty.

        Raises:
          CallFailed: no connection, no answer in time, an error status, or an answer of another form.
        """
        return self._start(self._answer(call)).result()

    def at_once(self, calls: Mapping[int, Call], most: int) -> Generator[tuple[int, Any], None, None]:
        """Yields (key, answer) as the answers arrive; the first failure is raised.

        At most ``most`` calls run at the same time.  If the generator ends early, unfinished calls are
        cancelled.
        """
        turn = asyncio.Semaphore(most)

        async def in_turn(call: Call) -> Any:
            async with turn:
                return await self._answer(call)

        places = {self._start(in_turn(call)): place for place, call in calls.items()}
        try:
            for answer in as_completed(places):
                yield places[answer], answer.result()
        finally:
            for answer in places:
                answer.cancel()

    def close(self) -> None:
        """Ends the thread and drops unfinished calls."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._runner.run(self._http.aclose())
        self._runner.close()

    def _start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _answer(self, call: Call) -> Any:
        import httpx

        try:
            async with asyncio.timeout(call.limit.end - time.monotonic()):
                response = await self._http.request(call.method, call.url, json=call.body)
        except TimeoutError as error:
            raise CallFailed(f": it did not answer in time ({call.limit}).") from error
        except httpx.NetworkError as error:
            raise CallFailed(f": {_reason(error)}.") from error
        # such as a connection that ends in the middle of an answer
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CallFailed(f": {type(error).__name__}: {error}.") from error
        if not response.is_success:
            raise CallFailed(f" failed with status {response.status_code}: {response.text[:600]}")
        if call.form == "dropped":
            return {}
        if call.form == "text":
            if not response.headers.get("content-type", "").startswith("text/plain"):
                raise CallFailed(f" answered no plain text: {response.content[:100]!r}.")
            return response.text
        try:
            return response.json() if response.content.strip() else {}
        except ValueError as error:
            raise CallFailed(f" answered no JSON: {response.content[:100]!r}.") from error


def _reason(error: BaseException) -> str:
    """The system's message at the end of an error's chain of causes, such as "Connection refused"."""
    cause = error
    while inner := cause.__cause__ or cause.__context__:
        cause = inner
    return os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(error)
