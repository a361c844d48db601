"""The environments in a worker process: the trainer asks for the next observation, this code holds the rest.

A request is a list of jobs, each with the whole history of its episode: key, seed and actions.

    no action              make an environment, reset(seed)
    actions a_1 .. a_n     step(a_n), if an environment with this key has taken a_1 .. a_{n-1}; else the
                           history is played again: reset(seed), step(a_1), ..., step(a_n)

So an environment whose worker was killed comes back by itself.  Environments of episodes that a request does
not name are closed.

Each answer has a digest of everything that the environment has answered so far.  A job brings the digest of
the answer before it, and an environment that answers its history otherwise fails as not repeatable.
Imports only the standard library.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetrl_jax.workers.worker import describe

LARGEST_CHARS = 1 << 20  # of an observation; the middle of a longer one is left out
COUNTS = ("tool_calls", "tool_errors")  # entries of info that are summed over an episode
_METHODS = ("reset", "step", "close")
_PAIR = "(observation, info)"
_FIVE = "(observation, reward, terminated, truncated, info)"


class BadEnvironment(Exception):
    """An environment broke its contract; this is its author's error, not the failure of an episode."""


@dataclass
class _Open:
    """An environment in play."""

    environment: Any
    actions: list[str] = field(default_factory=list)
    digest: str = ""
    answer: dict[str, Any] = field(default_factory=dict)


class Player:
    """Environments made by `factory(**options)`, by the key of their episode."""

    def __init__(self, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._factory = factory
        self._options = options
        self._open: dict[int, _Open] = {}

    def check(self) -> dict[str, Any]:
        """Plays one step; raises BadEnvironment for a missing method, another tuple or a reset that varies.

        Returns the answer to an empty action.
        """
        first, second = self._made(0), self._made(0)
        if first.digest != second.digest:
            raise BadEnvironment(
                f"reset(seed=0) gave two observations: got {_short(first.answer['observation'])} and "
                f"{_short(second.answer['observation'])}, expected the same, as every episode of a group "
                "begins alike"
            )
        self._step(first, "")
        for one in (first, second):
            one.environment.close()
        return first.answer

    def keep(self, keys: Sequence[int]) -> None:
        """Closes the environments of other episodes."""
        for key in [key for key in self._open if key not in keys]:
            self._close(key)

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to the last action of a job's history, or how the environment failed.

        Raises BadEnvironment.
        """
        key, actions = job["key"], job["actions"]
        try:
            one = self._open.get(key)
            if one is None or not actions or one.actions != actions[:-1]:
                one = self._replayed(key, job["seed"], actions[:-1])
            if actions:
                if job["digest"] != one.digest:
                    self._close(key)
                    message = (
                        f"after {len(actions) - 1} actions from seed {job['seed']} it answered otherwise"
                    )
                    return {"failed": "not repeatable", "message": message}
                self._step(one, actions[-1])
        except BadEnvironment:
            raise
        except BaseException as error:  # SystemExit too: an environment must not end its worker
            self._close(key)
            return {"failed": "exception", "message": describe(error)}
        return one.answer | {"digest": one.digest}

    def demonstration(self, seed: int) -> dict[str, Any]:
        """The actions that the environment recommends after reset(seed), with its answers to them."""
        try:
            one = self._made(seed)
            turns = []
            for action in list(one.environment.demonstration()):
                self._step(one, action)
                turns.append({"action": action, **one.answer})
            one.environment.close()
        except BadEnvironment:
            raise
        except BaseException as error:
            return {"failed": "exception", "message": describe(error)}
        return {"turns": turns}

    def _replayed(self, key: int, seed: int, actions: Sequence[str]) -> _Open:
        self._close(key)
        one = self._open[key] = self._made(seed)
        for action in actions:
            self._step(one, action)
        return one

    def _made(self, seed: int) -> _Open:
        environment = self._factory(**self._options)
        missing = [name for name in _METHODS if not callable(getattr(environment, name, None))]
        if missing:
            raise BadEnvironment(
                f"{type(environment).__name__} has no method {', '.join(missing)}, expected "
                f"{', '.join(_METHODS)}"
            )
        one = _Open(environment)
        parts = _parts("reset", environment.reset(seed=seed), _PAIR)
        self._note(one, {"observation": _observation("reset", parts[0])})
        return one

    def _step(self, one: _Open, action: str) -> None:
        observation, reward, terminated, truncated, info = _parts("step", one.environment.step(action), _FIVE)
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, bool) and getattr(value, "dtype", None) != "bool":
                raise BadEnvironment(f"step returned {name}={_short(value)}, expected True or False")
        try:
            number = float(reward)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise BadEnvironment(f"step returned reward={_short(reward)}, expected a finite number")
        answer = {
            "observation": _observation("step", observation),
            "reward": number,
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "counts": {name: int(info.get(name, 0)) for name in COUNTS} if isinstance(info, Mapping) else {},
        }
        one.actions.append(action)
        self._note(one, answer)

    def _note(self, one: _Open, answer: dict[str, Any]) -> None:
        text = json.dumps([one.digest, answer], sort_keys=True)
        one.digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
        one.answer = answer

    def _close(self, key: int) -> None:
        one = self._open.pop(key, None)
        if one is not None:
            try:
                one.environment.close()
            except Exception as error:
                print(f"close of an environment failed: {describe(error)}")


def serve(
    start: Mapping[str, Any], receive: Callable[[], bytes | None], reply: Callable[[dict[str, Any]], None]
) -> None:
    """Loads the environment, checks it if asked to, then answers requests until the other side closes."""
    try:
        player = Player(_factory(start["target"]), start["options"])
        ready = {"ready": True, "probe": player.check() if start["check"] else None}
    except BadEnvironment as error:
        return reply({"bad": [str(error)]})
    except BaseException as error:
        return reply({"bad": [f"cannot be played: {describe(error)}"]})
    reply(ready)
    while (frame := receive()) is not None:
        request = json.loads(frame)
        player.keep(request["keep"])
        for job in request["jobs"]:
            try:
                reply(player.demonstration(job["seed"]) if job["demonstrate"] else player.answer(job))
            except BadEnvironment as error:
                reply({"bad": [str(error)]})


def _factory(target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise BadEnvironment(f"is {type(found).__name__}, expected a class or a function that makes one")
    made: Callable[..., Any] = found
    return made


def _parts(method: str, returned: Any, expected: str) -> tuple[Any, ...]:
    count = expected.count(",") + 1
    if not isinstance(returned, tuple) or len(returned) != count:
        raise BadEnvironment(f"{method} returned {_short(returned)}, expected {expected}")
    return returned


def _observation(method: str, observation: Any) -> str | list[dict[str, str]]:
    """The observation, cut to `LARGEST_CHARS`."""
    if isinstance(observation, str):
        return _cut(observation)
    if isinstance(observation, list) and observation:
        if all(
            isinstance(message, dict)
            and message.keys() == {"role", "content"}
            and all(isinstance(value, str) for value in message.values())
            for message in observation
        ):
            return [message | {"content": _cut(message["content"])} for message in observation]
    raise BadEnvironment(
        f"{method} returned the observation {_short(observation)}, expected text or a list of "
        "{'role': ..., 'content': ...}"
    )


def _cut(text: str) -> str:
    # lone surrogates cannot be tokenised
    text = text.encode("utf-8", "replace").decode("utf-8")
    half = LARGEST_CHARS // 2
    return text if len(text) <= LARGEST_CHARS else text[:half] + text[-half:]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
