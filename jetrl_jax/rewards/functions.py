"""The rewards of a batch of completions, a weighted sum of several functions.

    total_i = sum over k of weight_k * reward_k(i)

Each function is logged separately, and a failing sample does not stop the run.  A sample has no reward if a
function raises, exceeds its time limit, or returns None or NaN.  Its total is then NaN, the advantages leave
it out of its group, and it is counted by cause.  A function of weight 0 is only logged and masks nothing.
Three results are the author's error and raise `UserError` naming the function and the sample: a value that is
not a number, a value (or weighted sum) that is infinite in FP32, and the wrong number of values.

A user's function is called once per batch, by keyword.  It gets those of these columns that its parameters
name, or all of them with ``**kwargs``:

    def reward(prompts, completions, answers, *, solutions, completion_ids, finish_reasons, metadata):
        ...  # -> list[float | None]

A parameter ``thought_opened`` gets, for each prompt, whether it ends inside ``<think>``, so that the
completion begins there.  A verifier sees such a completion with ``<think>`` put before it.

If the call for the whole batch fails, each completion is scored by its own call, so that a bad sample masks
only itself.  A function that compares completions with each other then sees one at a time.

A function given as ``module:function`` runs in a worker process, where it may hang, crash, fork, set signals
or print.  ``timeout_s`` limits each call.  After eight time-outs in a batch its remaining samples are given
up, so time-outs cost a batch at most nine limits.  A worker sees no accelerator (JAX_PLATFORMS=cpu).  A
Python callable runs in the trainer's process, where a hang cannot be interrupted, so it has no time limit
unless ``separate_process`` is set.
"""

from __future__ import annotations

import importlib.util
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jetrl_jax.config.task import RewardSection
from jetrl_jax.errors import UserError, missing_extra
from jetrl_jax.tasks import verify
from jetrl_jax.tasks.base import Example, Task, raise_broken
from jetrl_jax.text.answers import with_opening
from jetrl_jax.workers import worker
from jetrl_jax.workers.process import RewardProcess, Scores

FAILURES = ("exception", "timeout", "none", "nan")
_MESSAGES = 5  # distinct messages kept per function and batch


@dataclass
class RewardResult:
    """The rewards of N completions.

    total: float64 [N], NaN where masked.
    parts: function -> its rewards, float64 [N], NaN where it failed.
    failures: function -> cause (`FAILURES`) -> number of samples.
    messages: descriptions of the failures, for the log.
    """

    total: np.ndarray
    parts: dict[str, np.ndarray]
    failures: dict[str, dict[str, int]]
    messages: list[str] = field(default_factory=list)

    @property
    def masked(self) -> np.ndarray:
        """The samples without a reward, bool [N]."""
        return np.isnan(self.total)


class _Scorer(Protocol):
    def start(self) -> None: ...
    def score(self, columns: Mapping[str, Sequence[Any]], count: int) -> Scores: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Reward:
    name: str
    weight: float
    scorer: _Scorer
    verifies: bool = False  # a verifier ``(completion, example)``, not a function over columns


class _InProcess:
    """A function called in this process: once for the batch, one by one if that raises; no time limit."""

    def __init__(self, name: str, function: Callable[..., Any]):
        self._name = name
        self._function = function
        try:
            self._columns = worker.accepted_columns(function)
        except worker.BadReward as error:
            raise UserError(f"reward {name}: {error.sentence()}") from None

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to end."""

    def score(self, columns: Mapping[str, Sequence[Any]], count: int) -> Scores:
        scores = Scores([None] * count)
        if not isinstance(self._function, worker.PerSample):
            values, failed = self._call(columns, range(count), scores)
            if values is not None:
                scores.values = values
                return scores
            if count == 1:
                scores.failed[0] = failed
                return scores
        for index in range(count):
            values, failed = self._call(columns, [index], scores)
            if values is None:
                scores.failed[index] = failed
            else:
                scores.values[index] = values[0]
        return scores

    def _call(
        self, columns: Mapping[str, Sequence[Any]], indices: Sequence[int], scores: Scores
    ) -> tuple[list[float | None] | None, str]:
        chosen = {key: [columns[key][i] for i in indices] for key in self._columns}
        try:
            return worker.call(self._function, chosen, len(indices)), ""
        except UserError:
            raise
        except worker.BadReward as error:
            raise UserError(f"reward {self._name}: {error.sentence(columns, indices)}") from None
        except Exception as error:
            scores.messages.append(worker.describe(error))
            return None, "timeout" if isinstance(error, TimeoutError) else "exception"


class RewardFunctions:
    """The reward functions of a run; also a context manager.

    Workers start with the first batch (or with ``start``) and live until ``close``.  Their output goes to
    ``reward-<name>.log`` in ``log_directory``, if given.
    """

    def __init__(self, rewards: Sequence[_Reward]):
        if not rewards:
            raise UserError("RewardFunctions: no reward function: got an empty list, expected at least one.")
        names = [reward.name for reward in rewards]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(
                f"RewardFunctions: two rewards of one name: got {', '.join(twice)} more than once, "
                "expected distinct functions."
            )
        self._rewards = tuple(rewards)

    @classmethod
    def from_config(
        cls, sections: Sequence[RewardSection], task: Task, *, log_directory: str | Path | None = None
    ) -> RewardFunctions:
        """The rewards of a config, each named ``task``, by a verifier or as ``module:function``."""
        check_answers([s.name for s in sections], task)
        return cls(
            [_named(s.name, s.weight, s.timeout_s, s.separate_process, task, log_directory) for s in sections]
        )

    @classmethod
    def from_functions(
        cls,
        functions: Sequence[Callable[..., Any] | str],
        task: Task,
        *,
        weights: Sequence[float] | None = None,
        timeout_s: float = 10.0,
        separate_process: bool = False,
        log_directory: str | Path | None = None,
    ) -> RewardFunctions:
        """Rewards given in Python: callables and names, with one weight each (1 by default)."""
        weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(weights) != len(functions) or not all(math.isfinite(w) for w in weights):
            raise UserError(
                f"RewardFunctions: bad weights: got {weights} for {len(functions)} functions, expected "
                "one finite number each."
            )
        check_answers([function for function in functions if isinstance(function, str)], task)
        rewards = []
        for function, weight in zip(functions, weights, strict=True):
            if isinstance(function, str):
                rewards.append(_named(function, weight, timeout_s, separate_process, task, log_directory))
                continue
            if not callable(function):
                raise UserError(
                    f"RewardFunctions: not a function: got {type(function).__name__}, expected a "
                    "callable or a name."
                )
            # <lambda>, in a metric's name
            name = re.sub(r"[^\w.-]+", "", getattr(function, "__name__", type(function).__name__))
            if separate_process:
                scorer: _Scorer = RewardProcess(
                    name,
                    target=_import_path(name, function),
                    pickled=None,
                    timeout_s=timeout_s,
                    log_directory=log_directory,
                )
            else:
                scorer = _InProcess(name, function)
            rewards.append(_Reward(name, weight, scorer))
        return cls(rewards)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions, in order."""
        return tuple(reward.name for reward in self._rewards)

    @property
    def weights(self) -> dict[str, float]:
        """Name -> weight in the total."""
        return {reward.name: reward.weight for reward in self._rewards}

    def start(self) -> None:
        """Starts every worker and imports its function, so that a wrong name is a `UserError` early."""
        for reward in self._rewards:
            reward.scorer.start()

    def close(self) -> None:
        """Ends the workers."""
        for reward in self._rewards:
            reward.scorer.close()

    def __enter__(self) -> RewardFunctions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        examples: Sequence[Example],
        finish_reasons: Sequence[str],
        completion_ids: Sequence[Any],
        thought_opened: Sequence[bool] | None = None,
    ) -> RewardResult:
        """Scores N completions; ``completion_ids`` are their token ids, one sequence each.

        ``thought_opened``: whether each prompt ends inside ``<think>``; None means that none does.

        Raises `UserError` if a function breaks its contract, and ValueError if the lists differ in length.
        """
        count = len(completions)
        opened = [False] * count if thought_opened is None else [bool(one) for one in thought_opened]
        lengths = {
            "prompts": len(prompts),
            "examples": len(examples),
            "finish_reasons": len(finish_reasons),
            "completion_ids": len(completion_ids),
            "thought_opened": len(opened),
        }
        if any(length != count for length in lengths.values()):
            raise ValueError(
                f"RewardFunctions: lists differ in length: got {lengths}, expected {count} each, as "
                "completions."
            )
        result = RewardResult(np.zeros(count, np.float64), {}, {})
        if count == 0:
            result.parts = {name: np.zeros(0, np.float64) for name in self.names}
            result.failures = {name: dict.fromkeys(FAILURES, 0) for name in self.names}
            return result
        columns: dict[str, Sequence[Any]] = {
            "prompts": list(prompts),
            "completions": list(completions),
            "examples": list(examples),
            "finish_reasons": list(finish_reasons),
            "answers": [e.answer for e in examples],
            "solutions": [e.solution for e in examples],
            "metadata": [e.metadata for e in examples],
            "completion_ids": [[int(token) for token in ids] for ids in completion_ids],
            "thought_opened": opened,
        }
        graded = columns | {
            "completions": [with_opening(text, one) for text, one in zip(completions, opened, strict=True)]
        }
        for reward in self._rewards:
            scores = reward.scorer.score(graded if reward.verifies else columns, count)
            part, failures = _part(scores)
            result.parts[reward.name] = part
            result.failures[reward.name] = failures
            result.messages += [
                f"reward {reward.name}: {message}"
                for message in list(dict.fromkeys(scores.messages))[:_MESSAGES]
            ]
            if reward.weight != 0.0:
                with np.errstate(over="ignore"):
                    result.total += reward.weight * part
        self._check_total(result, prompts, completions)
        return result

    def _check_total(self, result: RewardResult, prompts: Sequence[str], completions: Sequence[str]) -> None:
        """Raises `UserError` if the weighted sum of a sample is infinite in FP32."""
        too_large = np.flatnonzero(np.abs(result.total) > worker.LARGEST)
        if len(too_large):
            i = int(too_large[0])
            terms = " + ".join(
                f"{reward.weight:g} * {result.parts[reward.name][i]:g} ({reward.name})"
                for reward in self._rewards
            )
            bad = worker.BadReward(
                f"the weighted sum is not finite in FP32: got {terms}", "smaller rewards or weights", i
            )
            raise UserError(
                "RewardFunctions: "
                f"{bad.sentence({'prompts': prompts, 'completions': completions}, range(len(prompts)))}"
            )


def _part(scores: Scores) -> tuple[np.ndarray, dict[str, int]]:
    """The values as float64, with NaN for every failure, and the number of failures per cause."""
    failed = dict(scores.failed)
    for index, value in enumerate(scores.values):
        if value is None:
            failed.setdefault(index, "none")
        elif math.isnan(value):
            failed[index] = "nan"
    part = np.array(
        [np.nan if index in failed else value for index, value in enumerate(scores.values)], np.float64
    )
    counts = dict.fromkeys(FAILURES, 0)
    for cause in failed.values():
        counts[cause] += 1
    return part, counts


def _named(
    name: str,
    weight: float,
    timeout_s: float,
    separate_process: bool,
    task: Task,
    log_directory: str | Path | None,
) -> _Reward:
    """A reward by name: the task's verifier, one of `verify.VERIFIERS`, or an import path."""
    if ":" in name:
        module, _, function = name.partition(":")
        if not module or not function:
            raise UserError(f"RewardFunctions: bad name: got {name!r}, expected module:function.")
        return _Reward(
            name,
            weight,
            RewardProcess(name, target=name, pickled=None, timeout_s=timeout_s, log_directory=log_directory),
        )
    if name == "task":
        maker = getattr(task, "verifier", None)
        verifier = maker() if callable(maker) else task.verify
        separate_process = separate_process or bool(getattr(task, "separate_process", False))
    elif name in verify.VERIFIERS:
        verifier = verify.VERIFIERS[name]
        separate_process = separate_process or name in verify.NEEDS_PROCESS
    else:
        raise UserError(
            f"RewardFunctions: unknown reward: got {name!r}, expected task, "
            f"{', '.join(verify.VERIFIERS)} or module:function."
        )
    if isinstance(verifier, verify.MathVerify) and importlib.util.find_spec("math_verify") is None:
        raise missing_extra("RewardFunctions", "math-verify", "tasks")
    if not separate_process:
        return _Reward(name, weight, _InProcess(name, worker.PerSample(verifier)), verifies=True)
    try:
        pickled = pickle.dumps(verifier)
    except Exception as error:
        raise UserError(
            f"reward {name}: its verifier cannot be sent to a worker process: {type(error).__name__}: "
            f"{error}. "
            "Give the task a picklable verifier()."
        ) from error
    process = RewardProcess(
        name, target=None, pickled=pickled, timeout_s=timeout_s, log_directory=log_directory
    )
    return _Reward(name, weight, process, verifies=True)


def check_answers(names: Sequence[str], task: Task) -> None:
    """Checks, before a run starts, that the verifiers among its rewards can compare with the task's answers.

    Checks all examples of a list, and the first of generated ones; the task's own verifier has checked the
    records when it read them.  Raises `UserError` naming the places of the first ten bad answers.
    """
    for name in names:
        verifier = getattr(task, "verifier_name", "") if name == "task" else name
        problems = []
        for split, examples in (
            (("train", task.train), ("eval", task.eval)) if verifier in verify.VERIFIERS else ()
        ):
            listed = (
                examples if isinstance(examples, list | tuple) else [examples[0]] if len(examples) else []
            )
            for index, example in enumerate(listed):
                source = getattr(example, "source", "")
                problem = (
                    None if name == "task" and source else verify.answer_problem(verifier, example.answer)
                )
                if problem:
                    problems.append(
                        f"{source or f'{task.name}:{split}[{index}]'}: {verifier} cannot compare with "
                        f"the answer: {problem}"
                    )
        raise_broken(f"reward {name}", problems)


def _import_path(name: str, function: Callable[..., Any]) -> str:
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module in (None, "__main__") or "<" in qualified:
        raise UserError(
            f"reward {name}: cannot be imported by a worker process: got {module}:{qualified}, "
            "expected a function at the top level of a module other than the script."
        )
    return f"{module}:{qualified}"
