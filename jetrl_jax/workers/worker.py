"""The worker process of a reward function or of environments, and the call that worker and trainer share.

It runs as a file, not as a module, so that it starts in tens of milliseconds.  It imports only the standard
library, and this package only if the reward does or for environments (`jetrl_jax.workers.playing`).  It
communicates over one socket (argument 1) in frames of an 8-byte length and a payload: pickles in (JSON for
environments), JSON out.  The protocol does not use standard input, output or error, so a reward may print
anything.

A reward's fork that returns into this file exits at once.  If the trainer has gone, the worker ends itself
and its children.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import itertools
import json
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from decimal import Decimal
from numbers import Real
from typing import Any

LARGEST = 3.4028234663852886e38  # the largest finite FP32 number
A_NUMBER = "a number that is finite in FP32, or None or NaN to leave the sample out"
COLUMNS = ("prompts", "completions", "answers", "solutions", "completion_ids", "finish_reasons", "metadata")
NAMED_COLUMNS = (*COLUMNS, "thought_opened")  # the last is given only to functions that name it


class BadReward(Exception):
    """A reward function broke its contract; this is its author's error, not the failure of a sample.

    index: of the completion at fault within the call, or None.
    """

    def __init__(self, what: str, expected: str = "", index: int | None = None):
        super().__init__(what, expected, index)
        self.what = what
        self.expected = expected
        self.index = index

    def sentence(
        self, columns: Mapping[str, Sequence[Any]] | None = None, indices: Sequence[int] = ()
    ) -> str:
        """The error as a sentence.

        It names the completion if `columns` (of the batch) and `indices` (those in the call) are given.
        """
        place = ""
        if self.index is not None and columns is not None:
            i = indices[self.index]
            place = (
                f" for completion {i} ({_short(columns['completions'][i])} after the prompt "
                f"{_short(columns['prompts'][i])})"
            )
        return f"{self.what}{place}{f', expected {self.expected}' if self.expected else ''}"


class PerSample:
    """A verifier ``(completion, example) -> number`` as a reward function over lists."""

    per_sample = True

    def __init__(self, verifier: Callable[[str, Any], Any]):
        self._verifier = verifier

    def __call__(self, completions: list[str], examples: list[Any]) -> list[Any]:
        return [
            self._verifier(completion, example)
            for completion, example in zip(completions, examples, strict=True)
        ]


def accepted_columns(function: Callable[..., Any]) -> tuple[str, ...]:
    """The columns that a function's parameters name; raises BadReward for a parameter that is no column."""
    if isinstance(function, PerSample):
        return ("completions", "examples")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return COLUMNS
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise BadReward(
                f"takes {parameter.name!r} by position only",
                "def reward(prompts, completions, answers, **kwargs)",
            )
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and parameter.name not in NAMED_COLUMNS:
            raise BadReward(
                f"needs an argument {parameter.name!r} that is not given; there are "
                f"{', '.join(NAMED_COLUMNS)}"
            )
    named = tuple(parameter.name for parameter in parameters if parameter.name in NAMED_COLUMNS)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(dict.fromkeys((*COLUMNS, *named)))
    return named


def to_numbers(values: Sequence[Any], count: int) -> list[float | None]:
    """The rewards as floats; None and NaN are kept, and leave their sample out.

    Booleans, numpy values and zero-dimensional arrays count as numbers.  Raises BadReward for anything else,
    and for numbers that are infinite in FP32, in which the trainer computes.
    """
    if len(values) != count:
        raise BadReward(
            f"returned {'more than ' * (len(values) > count)}{min(len(values), count)} rewards for "
            f"{count} completions"
        )
    return [_to_number(value, index) for index, value in enumerate(values)]


def _to_number(value: Any, index: int) -> float | None:
    if not isinstance(value, Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except Exception:
            raise BadReward(
                f"returned {type(value).__name__} of more than one value", A_NUMBER, index
            ) from None
    if value is None:
        return None
    if not isinstance(value, Real | Decimal):
        raise BadReward(f"returned {type(value).__name__} {_short(value)}", A_NUMBER, index)
    if isinstance(value, Decimal) and value.is_nan():  # float() refuses a signalling NaN
        return math.nan
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond float64
        number = math.inf
    if abs(number) > LARGEST:
        raise BadReward(f"returned {_short(value)}", A_NUMBER, index)
    return number


def call(
    function: Callable[..., Any], columns: Mapping[str, Sequence[Any]], count: int
) -> list[float | None]:
    """Calls a reward function once.  Its exceptions pass through; a broken contract raises BadReward."""
    returned = function(**columns)
    if isinstance(returned, str | bytes | Mapping | Set) or not hasattr(returned, "__iter__"):
        raise BadReward(
            f"returned {type(returned).__name__} {_short(returned)}", f"a list of {count} numbers or None"
        )
    return to_numbers(list(itertools.islice(returned, count + 1)), count)


def describe(error: BaseException) -> str:
    """Type, text and place of an exception, even if its __str__ raises."""
    try:
        text = str(error)
    except Exception:
        text = "(no text)"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text[:500]}{place}"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "(no text)"
    return text if len(text) <= 60 else text[:57] + "..."


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """Writes one frame."""
    connection.sendall(len(payload).to_bytes(8, "big") + payload)


def _receive_frame(connection: socket.socket) -> bytes | None:
    """The next frame, or None if the other side has gone."""
    with connection.makefile("rb", buffering=0) as stream:

        def read(count: int) -> bytes | None:
            parts = bytearray()
            while len(parts) < count:
                piece = stream.read(min(count - len(parts), 1 << 20))
                if not piece:
                    return None
                parts += piece
            return bytes(parts)

        header = read(8)
        return None if header is None else read(int.from_bytes(header, "big"))


def _load(start: Mapping[str, Any]) -> Callable[..., Any]:
    """The reward function: imported from ``module:function``, or a pickled verifier after its ``prepare``."""
    sys.path[:] = start["sys_path"]
    if start["pickled"] is not None:
        verifier = pickle.loads(start["pickled"])
        getattr(verifier, "prepare", lambda: None)()
        return PerSample(verifier)
    module_name, _, attribute = start["target"].partition(":")
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise BadReward(f"is {type(found).__name__}", "a function")
    return found


def _outcome(
    function: Callable[..., Any], columns: Mapping[str, Sequence[Any]], count: int
) -> dict[str, Any]:
    try:
        return {"values": call(function, columns, count)}
    except BadReward as error:
        return {"bad": error.args}
    except TimeoutError as error:
        return {"failed": "timeout", "message": describe(error)}
    except BaseException as error:  # SystemExit too: a reward must not end its worker
        errors = sys.modules.get("jetrl_jax.errors")
        if errors is not None and isinstance(error, errors.UserError):
            return {"bad": [str(error)]}
        return {"failed": "exception", "message": describe(error)}


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(descriptor: int) -> None:
    """Loads the function, reports that, then answers requests until the other side closes."""
    faulthandler.enable()  # prints the place of a crash to the log
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    pid, parent = os.getpid(), os.getppid()

    def reply(message: dict[str, Any]) -> None:
        if os.getpid() != pid:
            os._exit(0)
        send_frame(connection, json.dumps(message).encode())

    first = _receive_frame(connection)
    if first is None:
        return
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    start = pickle.loads(first)
    if "environment" in start:
        sys.path[:] = start["sys_path"]
        serve = importlib.import_module(start["served_by"]).serve
        serve(start["environment"], lambda: _receive_frame(connection), reply)
        return
    try:
        function = _load(start)
        accepted = accepted_columns(function)
    except BadReward as error:
        return reply({"bad": error.args})
    except BaseException as error:
        return reply({"bad": [f"cannot be loaded: {describe(error)}"]})
    reply({"ready": True, "columns": accepted, "per_sample": isinstance(function, PerSample)})
    while (frame := _receive_frame(connection)) is not None:
        request = pickle.loads(frame)
        columns, count, step = request["columns"], request["count"], request["step"]
        for start in range(0, count, step):
            stop = min(start + step, count)
            reply(
                _outcome(function, {key: values[start:stop] for key, values in columns.items()}, stop - start)
            )


if __name__ == "__main__":
    main(int(sys.argv[1]))
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # with any children and threads that a reward left behind
