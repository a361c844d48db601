"""Calls of vLLM's servers: JSON over HTTP, each ended when its time is up, whatever the server does.

A limit is on all of a call.  httpx by itself limits connecting and each single read or write, and a server
that drips a byte now and then would hold a call for ever.  No connection is kept after its call: vLLM closes
one after an error, and the next call on it would look like a dead server.

The calls run on an event loop in a thread of its own, so they go on while earlier answers are read.  A call
says which server it is for: those of one batch may go to several.
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
from typing import Any

from jetrl_jax.errors import UserError


class CallFailed(Exception):
    """A call got no usable answer; the message continues a sentence that begins with the route's name."""


@dataclass(frozen=True)
class Limit:
    """A time within which one or several calls must be answered.

    setting: the field of the config that says so; seconds: how long; end: when, of `time.monotonic`.
    """

    setting: str
    seconds: float
    end: float

    @classmethod
    def start(cls, setting: str, seconds: float) -> Limit:
        """From now on."""
        return cls(setting, seconds, time.monotonic() + seconds)

    def __str__(self) -> str:
        return f"{self.setting}: {self.seconds:g} s"


@dataclass(frozen=True)
class Call:
    """What is asked of a server, and by when it must have answered."""

    method: str
    url: str
    body: dict[str, Any] | None
    limit: Limit


class Client:
    """Asks servers; `close` it.

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
        """The JSON of the answer; {} if it is empty.

        Raises:
          CallFailed: no connection, no answer in time, an error status, or an answer that is not JSON.
        """
        return self._start(self._answer(call)).result()

    def at_once(self, calls: Mapping[int, Call], most: int) -> Generator[tuple[int, Any], None, None]:
        """The answers as they arrive, ``most`` calls under way at a time; the first failure is raised.

        Calls under way when it ends early are given up, not waited for.
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
        """Ends the thread and gives up what is under way."""
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
        try:
            return response.json() if response.content.strip() else {}
        except ValueError as error:
            raise CallFailed(f" answered no JSON: {response.content[:100]!r}.") from error


def _reason(error: BaseException) -> str:
    """What the system said, which stands at the end of the causes: "Connection refused"."""
    cause = error
    while inner := cause.__cause__ or cause.__context__:
        cause = inner
    return os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(error)
