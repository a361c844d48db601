"""Calls of vLLM's server, JSON over HTTP, each with a time limit that holds whatever the server does.

httpx limits connecting and each single read or write, but not a whole call: a server that sends a byte now
and then would hold it for ever.  So the connection itself is closed when the time is up.  No connection is
reused, because vLLM closes one after an error, and the next call on it would look like a dead server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetrl_jax.errors import UserError

if TYPE_CHECKING:
    import httpx

# events of httpx's extension "trace"
CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


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
        """From now on."""
        return cls(setting, seconds, time.monotonic() + seconds)

    def __str__(self) -> str:
        return f"{self.setting}: {self.seconds:g} s"


class ServerClient:
    """A client of vLLM's server that several threads may use.

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
        self._client = httpx.Client(limits=limits, trust_env=False)  # no proxy to this machine

    def call(self, method: str, url: str, body: dict[str, Any] | None, limit: Limit) -> Any:
        """The JSON of the answer; {} if it is empty.

        Raises:
          CallFailed: no connection, no answer in time, an error status, or an answer that is not JSON.
        """
        response = self._response(method, url, body, limit)
        if not response.is_success:
            raise CallFailed(f" failed with status {response.status_code}: {response.text[:600]}")
        try:
            return response.json() if response.content.strip() else {}
        except ValueError as error:
            raise CallFailed(f" answered no JSON: {response.content[:100]!r}.") from error

    def _response(self, method: str, url: str, body: dict[str, Any] | None, limit: Limit) -> httpx.Response:
        import httpx

        with _Ending(limit) as ending:
            try:
                left = max(limit.end - time.monotonic(), 1e-3)
                response = self._client.request(
                    method, url, json=body, timeout=left, extensions={"trace": ending.trace}
                )
                problem: httpx.HTTPError | httpx.InvalidURL | None = None
            # such as a connection that ends in the middle of an answer
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = error
        if ending.passed or isinstance(problem, httpx.TimeoutException):
            raise CallFailed(f": it did not answer in time ({limit}).") from problem
        if problem is not None:
            kind = "" if isinstance(problem, httpx.NetworkError) else f"{type(problem).__name__}: "
            raise CallFailed(f": {kind}{problem}.") from problem
        return response

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


class _Ending:
    """Closes a call's connection when its limit ends; httpx reports connections to `trace`."""

    def __init__(self, limit: Limit) -> None:
        self.passed = False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(limit.end - time.monotonic(), self._end)
        self._timer.daemon = True

    def __enter__(self) -> _Ending:
        self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()

    def trace(self, event: str, info: dict[str, Any]) -> None:
        if event in CONNECTED:
            self._socket = info["return_value"].get_extra_info("socket")
            if self.passed:
                self._end()

    def _end(self) -> None:
        self.passed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)
