"""The metrics of a run: declared once, written as one row per step, read by the report.

`METRICS` is the only list of metrics: name ``group/name_stat``, unit, meaning, and which direction is better.
A name with ``*`` declares a family: ``reward/*_mean`` stands for the mean of each reward function.  A row
with an undeclared name is an error, so that every chart finds its metric.

`MetricsWriter` appends rows to ``metrics.jsonl`` (and TensorBoard, and Weights & Biases).  A row leaves the
process with the call that writes it, and is on disk after `MetricsWriter.sync`.  The trainer calls that
before it saves a checkpoint, so rows up to a checkpoint are never lost.  When a run resumes,
`MetricsWriter.truncate_after` drops the rows after the checkpoint, and the run writes them again.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from jetrl_jax.record.console import print_warning
from jetrl_jax.record.run_directory import json_value, read_jsonl, truncate_jsonl
from jetrl_jax.rl.metrics import METRICS as RL_METRICS

Better = Literal["higher", "lower", "zero", "neither"]


@dataclass(frozen=True)
class Metric:
    """The declaration of one metric, or of a family if ``name`` contains a ``*``."""

    name: str
    unit: str
    description: str
    better: Better = "neither"

    @property
    def is_clock(self) -> bool:
        """Whether the metric depends on a clock, so that equal runs may differ in it.

        The lengths of drafts do, by which no token and no other metric changes.
        """
        return self.name.startswith(("time/", "rate/", "speculation/"))


_PHASES = {
    "rollout": "generating completions",
    "environment": "resets and steps of environments, of the whole batch",
    "reward": "scoring completions",
    "logprob": "recomputing the logprobs of the behaviour version",
    "train": "forward, backward and update",
    "draft": "training a draft head",
    "publish": "putting the engine to sleep, quantising the weights and handing them to it",
    "eval": "held-out evaluation",
    "checkpoint": "saving a checkpoint",
    "step": "the whole step, without evaluation and checkpoint",
}

# `jetrl_jax.rl.metrics` declares the metrics that it computes; only their direction is added here.
_RL_BETTER: dict[str, Better] = {
    "mismatch/k1": "zero",
    "mismatch/k3": "lower",
    "mismatch/logprob_abs_mean": "lower",
    "mismatch/logprob_abs_max": "lower",
    "mismatch/chi2_token": "zero",
    "mismatch/chi2_sequence": "zero",
    "mismatch/ess": "higher",
    "mismatch/token_mult_prob_error": "lower",
    "clip/positive_fraction": "lower",
    "clip/negative_fraction": "lower",
    "clip/dual_negative_fraction": "lower",
    "reward/mean": "higher",
    "reward/equal_group_fraction": "lower",
    "reward/masked_fraction": "lower",
    "length/truncated_fraction": "lower",
}

METRICS: tuple[Metric, ...] = (
    Metric("step", "step", "RL steps done; the row of step 0 is the policy before RL."),
    Metric("policy_version", "version", "Version of the weights that generated the step's completions."),
    *(
        Metric(name, metric.unit, metric.meaning, _RL_BETTER.get(name, "neither"))
        for name, metric in RL_METRICS.items()
    ),
    Metric("reward/*_mean", "reward", "mean of one reward function, before its weight", "higher"),
    Metric(
        "eval/accuracy",
        "fraction",
        "held-out completions at the rollout temperature that solve their prompt",
        "higher",
    ),
    Metric("eval/greedy_accuracy", "fraction", "held-out prompts solved by greedy decoding", "higher"),
    Metric(
        "eval/pass_at_*",
        "fraction",
        "held-out prompts solved by at least one of k completions, estimated without bias",
        "higher",
    ),
    Metric(
        "eval/reward_mean",
        "reward",
        "mean reward of the held-out completions at the rollout temperature",
        "higher",
    ),
    Metric(
        "eval/completion_tokens_mean",
        "tokens",
        "mean length of the held-out completions at the rollout temperature",
    ),
    Metric("eval/turns_mean", "turns", "mean number of turns of the held-out episodes", "lower"),
    Metric("loss/total", "loss", "the loss that is differentiated"),
    *(Metric(f"time/{phase}_s", "s", f"seconds of {what}", "lower") for phase, what in _PHASES.items()),
    Metric(
        "rate/rollout_tokens_per_s", "tokens/s", "generated tokens per second of the rollout phase", "higher"
    ),
    Metric("rate/train_tokens_per_s", "tokens/s", "count/train_tokens per second of training", "higher"),
    Metric("count/prompts", "prompts", "prompts of the step"),
    Metric("count/completions", "completions", "completions of the step"),
    Metric("count/rollout_tokens", "tokens", "generated tokens"),
    Metric(
        "count/train_tokens",
        "tokens",
        "tokens that forward and backward went over, prompts and every epoch included, no padding",
    ),
    Metric(
        "count/padding_fraction",
        "fraction",
        "share of the places in the training batches that is padding",
        "lower",
    ),
    Metric(
        "count/skipped_prompts",
        "prompts",
        "prompts longer than max_prompt_tokens; episodes that cannot begin",
        "lower",
    ),
    Metric(
        "count/masked_samples",
        "completions",
        "completions without a reward, or masked as truncated: out of the loss",
        "lower",
    ),
    Metric(
        "count/generation_rounds",
        "rounds",
        "rounds of generation; dynamic sampling may take more than one",
        "lower",
    ),
    Metric("episode/turns_mean", "turns", "mean number of the policy's turns in an episode"),
    Metric("episode/turns_max", "turns", "most turns of the policy in an episode"),
    Metric("episode/tool_calls_mean", "calls", "mean number of calls of tools in an episode"),
    Metric(
        "episode/tool_error_fraction", "fraction", "calls of tools that were answered by an error", "lower"
    ),
    Metric(
        "episode/failed_fraction", "fraction", "episodes whose environment failed: out of the loss", "lower"
    ),
    Metric(
        "draft/loss",
        "nats",
        "cross-entropy of a draft head's guesses with the policy's distributions",
        "lower",
    ),
    Metric(
        "draft/overlap",
        "fraction",
        "sum of min(policy, head) over the vocabulary, of a head's first guess, before the update",
        "higher",
    ),
    Metric(
        "draft/skipped_updates",
        "updates",
        "updates of a draft head left out for a non-finite loss or gradient",
        "lower",
    ),
    Metric("speculation/drafted_tokens", "tokens", "tokens that drafts guessed in the step's rollout"),
    Metric(
        "speculation/accepted_tokens",
        "tokens",
        "guessed tokens that became part of a completion; generated tokens without a forward of their own",
        "higher",
    ),
    Metric(
        "speculation/length_mean",
        "tokens",
        "mean number of tokens for which a draft was asked in a forward of a sequence, chosen by the time",
    ),
    Metric(
        "speculation/tokens_per_step",
        "tokens",
        "mean number of tokens of a sequence from one forward: the one that it samples and the guesses kept",
        "higher",
    ),
    Metric(
        "speculation/accepted_fraction",
        "fraction",
        "guessed tokens that became part of a completion",
        "higher",
    ),
    Metric(
        "speculation/accepted_*_fraction",
        "fraction",
        "first, second, ... guesses of a forward that became part of a completion",
        "higher",
    ),
    Metric(
        "kv/clip_fraction",
        "fraction",
        "keys and values (and FP8 queries) of the training batches beyond the range of the step's scales",
        "lower",
    ),
    Metric("kv/*_exponent_min", "1", "smallest exponent of a layer's scale of keys, values or queries"),
    Metric("kv/*_exponent_max", "1", "largest exponent of a layer's scale of keys, values or queries"),
    Metric(
        "count/steps_without_signal",
        "steps",
        "steps in a row, up to this one, in which all rewards of each group were equal",
        "lower",
    ),
    Metric("count/skipped_updates", "updates", "updates skipped for a non-finite value", "lower"),
    Metric(
        "count/reward_*_exception", "completions", "completions on which one reward function raised", "lower"
    ),
    Metric(
        "count/reward_*_timeout",
        "completions",
        "completions on which one reward function ran out of time",
        "lower",
    ),
    Metric(
        "count/reward_*_none",
        "completions",
        "completions for which one reward function returned None",
        "lower",
    ),
    Metric(
        "count/reward_*_nan", "completions", "completions for which one reward function returned NaN", "lower"
    ),
    Metric("advantage/abs_mean", "advantage", "mean magnitude of the advantages of the trained completions"),
    Metric("optimizer/grad_norm", "norm", "global norm of the gradient before clipping"),
    Metric("optimizer/loss_scale", "1", "factor of the loss in the next update of the FP16 flow"),
    Metric(
        "count/loss_scale_overflows",
        "updates",
        "updates of the run so far that the FP16 flow skipped for an overflow",
        "lower",
    ),
    Metric("optimizer/learning_rate", "1", "learning rate of the step's last update"),
    Metric("warm_start/loss", "nats/token", "cross-entropy of the supervised warm start", "lower"),
)

_EXACT = {metric.name: metric for metric in METRICS if "*" not in metric.name}
_FAMILIES = [
    (re.compile(re.escape(metric.name).replace(r"\*", r"[\w.:-]+")), metric)
    for metric in METRICS
    if "*" in metric.name
]


@functools.cache
def find_metric(name: str) -> Metric:
    """The declaration of ``name``, exact before family; raises ``ValueError`` if it is undeclared."""
    if name in _EXACT:
        return _EXACT[name]
    for pattern, metric in _FAMILIES:
        if pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=2)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(
        f"find_metric: undeclared metric: got name={name!r}, expected one of "
        f"jetrl_jax.record.metrics.METRICS.{hint}"
    )


def without_clocks(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` without times and rates; the rest is equal in runs of the same config and seed."""
    return {name: value for name, value in row.items() if not find_metric(name).is_clock}


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.jsonl``, read by `read_jsonl`, with NaN for values that were not finite."""
    return [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row in read_jsonl(path)
    ]


class MetricsWriter:
    """Appends one row per step to ``metrics.jsonl``, and passes it to TensorBoard and Weights & Biases.

    Opening an existing file removes an incomplete line at its end; on resume call `truncate_after` before the
    first `write`.  An error of ``metrics.jsonl`` stops the run; one of Weights & Biases becomes a warning.
    """

    def __init__(
        self,
        path: Path,
        *,
        events: Path | None = None,
        wandb_project: str | None = None,
        wandb_config: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = print_warning,
    ) -> None:
        """``path``: the file; ``events``: directory of TensorBoard events; None switches a sink off."""
        self._path = path
        self._warn = warn
        self.last_step = truncate_jsonl(path, after_step=2**62)
        self._file = open(path, "ab", buffering=0)  # one row is one write call
        self._events_path = events
        self._events: Any = None
        self._wandb = (
            _Wandb(wandb_project, path.parent, dict(wandb_config or {}), warn) if wandb_project else None
        )

    def truncate_after(self, step: int) -> None:
        """Drops the rows after ``step`` (-1: all), in TensorBoard too; warns if rows up to it are missing."""
        if self._events is not None:
            raise RuntimeError(
                "MetricsWriter.truncate_after: rows were written already: expected the call before the "
                "first write"
            )
        self.last_step = truncate_jsonl(self._path, step)
        if step > 0 and (self.last_step or 0) < step:
            self._warn(
                f"{self._path} ends at step {self.last_step}, the checkpoint is of step {step}: the "
                "rows between are lost"
            )
        self._open_events(purge_step=step + 1)

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Writes the row of ``step``; a value that is not finite is written as null.

        Raises ``ValueError`` if a metric is undeclared, a value is neither a number nor a 0-d array, or
        ``step`` is not after the last one.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(
                f"MetricsWriter.write: one row a step: got step={step}, expected more than {self.last_step}"
            )
        numbers = {name: _number(name, value) for name, value in row.items() if name != "step"}
        line = json.dumps(
            {"step": step, **{name: json_value(value) for name, value in numbers.items()}}, allow_nan=False
        )
        self._file.write(line.encode() + b"\n")
        self.last_step = step
        self._open_events(purge_step=None)
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(re.sub(r"[^\w/.-]", "_", name), value, step)
        if self._wandb is not None:
            self._wandb.log(step, numbers)

    def sync(self) -> None:
        """Returns when every row is on disk, and the TensorBoard events are with the operating system."""
        os.fsync(self._file.fileno())
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Writes everything out and closes; may be called twice."""
        if self._file.closed:
            return
        self.sync()
        self._file.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _open_events(self, purge_step: int | None) -> None:
        if self._events is None and self._events_path is not None:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(self._events_path), purge_step=purge_step, flush_secs=10)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(name: str, value: Any) -> int | float:
    """``value`` as int or float, for a declared ``name``."""
    find_metric(name)
    scalar = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    if isinstance(scalar, bool) or not isinstance(scalar, int | float):
        raise ValueError(
            f"MetricsWriter.write: no number: got {name}={value!r} ({type(value).__name__}), expected a "
            "number or a 0-d array"
        )
    return scalar


class _Wandb:
    """Wraps Weights & Biases: its first error is reported and switches it off, but never stops the run."""

    def __init__(
        self, project: str, directory: Path, config: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._run: Any = None
        self._guard(lambda: self._start(project, directory, config))

    def _start(self, project: str, directory: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise RuntimeError("wandb is not installed: pip install jetrl-jax[wandb]") from error
        id_file = directory / "wandb_id.txt"  # a resumed run continues the same W&B run
        run_id = id_file.read_text().strip() if id_file.exists() else None
        # without an API key, init must raise instead of waiting for one to be typed
        with open(os.devnull) as nobody:
            stdin = sys.stdin
            sys.stdin = nobody
            try:
                settings = wandb.Settings(init_timeout=30)
                self._run = wandb.init(
                    project=project,
                    name=directory.name,
                    dir=str(directory),
                    config=config,
                    id=run_id,
                    resume="allow",
                    settings=settings,
                )
            finally:
                sys.stdin = stdin
        if run_id is None:
            id_file.write_text(f"{self._run.id}\n")

    def log(self, step: int, row: Mapping[str, float]) -> None:
        if self._run is not None:
            run = self._run
            self._guard(lambda: run.log(dict(row), step=step))

    def finish(self, timeout_s: float = 60.0) -> None:
        """Ends the W&B run; gives up on a hanging upload after ``timeout_s``."""
        run = self._run
        self._run = None
        if run is None:
            return
        thread = threading.Thread(target=lambda: self._guard(run.finish), daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            self._warn(
                f"Weights & Biases did not finish within {timeout_s:.0f} s; the run goes on without it"
            )

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # an optional service must not stop a run
            self._run = None
            self._warn(f"Weights & Biases is off for this run: {type(error).__name__}: {error}")
