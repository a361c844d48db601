"""One step of RL: rollout -> reward -> advantage -> batch -> optimiser steps -> publish weights.

A step of policy version v samples with the published weights of v, computes rewards, packs the completions,
takes one or more optimiser steps while the engine may sleep, and publishes the new weights to the engine.
All randomness is derived from (seed, kind, step).  The state of a run is therefore its parameters, moments,
prompt cursor and counters, and a resumed run is identical to an uninterrupted one.

Nothing is learned in a step without signal, in which the rewards of every group are all equal.  Such steps
are counted; there is a warning after ten in a row, and the run ends after `run.max_steps_without_signal` in a
row.

An update that is not finite (rollout logprob, loss, gradient, master or scale) is skipped: the state stays as
it was, the tensor is reported and the batch is saved.  An update without a completion to train on is skipped
too.  After `run.max_skipped_steps` skipped updates in a row the run ends.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jetrl_jax.collect.batch import RolloutBatch, nonfinite_part, rollout_metrics
from jetrl_jax.collect.clock import StepClock
from jetrl_jax.collect.collector import Collector
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.devices.processes import fetch
from jetrl_jax.errors import RunStopped
from jetrl_jax.precision.kv_cache import KVUse
from jetrl_jax.record.console import Console
from jetrl_jax.rl import metrics as rl_metrics
from jetrl_jax.rl.algorithm import ResolvedAlgorithm
from jetrl_jax.rl.assemble import Minibatch, assemble
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.rollout.engine import RolloutEngine
from jetrl_jax.training.draft import DraftTrainer
from jetrl_jax.training.programs import KV_USE, PolicyPrograms, TrainState

WARN_WITHOUT_SIGNAL = 10  # steps in a row
WARN_CLIPPED = 1e-4  # share of keys and values


@dataclass
class Counters:
    """Counters of a run, saved with every checkpoint.

    policy_version: version of the current weights; updates: number of optimiser steps.
    skipped_in_a_row: number of updates skipped in a row, up to now.
    overflows: number of updates skipped because of FP16's loss scale.
    without_signal: number of steps in a row, up to now, without signal.
    """

    policy_version: int = 0
    updates: int = 0
    skipped_in_a_row: int = 0
    overflows: int = 0
    without_signal: int = 0

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Counters:
        """The counters in a checkpoint's metadata."""
        return cls(**{field.name: metadata[field.name] for field in dataclasses.fields(cls)})


@dataclass(kw_only=True)
class RLStep:
    """Takes the steps of a run; reads and writes no files.

    config: the run's config; algorithm: its algorithm with every null resolved.
    programs: the compiled programs; engine: an engine with the weights of `state`; collector: its rollouts.
    state: the current policy; reference: frozen weights for the KL term, or None.
    counters: where counting continues.
    drafter: trains a draft head, whose weights the engine gets too; None without one.
    console: shows phases and warnings.
    save_bad_batch: (step, tensor, arrays) -> file in which a batch that is not finite was saved, or None.
    """

    config: RunConfig
    algorithm: ResolvedAlgorithm
    programs: PolicyPrograms
    engine: RolloutEngine
    collector: Collector
    console: Console
    state: TrainState
    reference: nnx.State | None = None
    counters: Counters = field(default_factory=Counters)
    drafter: DraftTrainer | None = None
    save_bad_batch: Callable[[int, str, Mapping[str, Any]], Path | None] = lambda step, tensor, arrays: None

    def __call__(self, step: int) -> tuple[dict[str, float], RolloutBatch]:
        """Takes one step; returns its metrics and the rollout batch.

        Raises:
          RunStopped: too many updates in a row were skipped, or too many steps in a row had no signal.
        """
        clock, start = StepClock(), time.perf_counter()
        version, skipped_prompts = self.counters.policy_version, self.collector.prompts.skipped
        batch = self.collector.collect(step, clock)
        with clock.phase("publish"):
            self.engine.sleep()
        problem = nonfinite_part(batch)
        row = rollout_metrics(batch)
        if problem:
            self._skip(step, problem, batch, [])
            row["count/skipped_updates"] = 1
        else:
            row |= self._learn(step, batch, clock)
        with clock.phase("publish"):
            self.engine.load(self.state.published, self.counters.policy_version)
            if self.drafter is not None:
                self.engine.load_draft(self.drafter.head)
        row |= {f"time/{name}_s": seconds for name, seconds in clock.seconds.items()}
        row |= {"time/step_s": time.perf_counter() - start, "policy_version": version}
        row["count/skipped_prompts"] = self.collector.prompts.skipped - skipped_prompts
        row["rate/rollout_tokens_per_s"] = row["count/rollout_tokens"] / max(clock.seconds["rollout"], 1e-9)
        if "count/train_tokens" in row:
            row["rate/train_tokens_per_s"] = row["count/train_tokens"] / max(clock.seconds["train"], 1e-9)
        if self.counters.skipped_in_a_row >= self.config.run.max_skipped_steps:
            last = problem or "see the warnings"
            raise RunStopped(
                f"step {step}: {self.counters.skipped_in_a_row} updates in a row were not finite or had "
                "nothing to train on "
                f"(run.max_skipped_steps); the last: {last}"
            )
        row["count/steps_without_signal"] = self.counters.without_signal
        self._tell_of_no_signal(step)
        return row, batch

    def _tell_of_no_signal(self, step: int) -> None:
        """Warns after 10, 20, 40, ... steps in a row without signal; ends the run at its limit."""
        count, most = self.counters.without_signal, self.config.run.max_steps_without_signal
        text = (
            f"step {step}: in {count} steps in a row all rewards of each group were equal: nothing "
            "is learned from them"
        )
        hint = "Do the rewards see what the policy writes (samples.jsonl)?"
        if most and count >= most:
            raise RunStopped(f"{text} (run.max_steps_without_signal). {hint}")
        if count in {WARN_WITHOUT_SIGNAL << n for n in range(32)}:  # 10, 20, 40, ...
            self.console.warn(f"{text}. {hint} run.max_steps_without_signal ends such a run.")

    # Learning

    def _learn(self, step: int, batch: RolloutBatch, clock: StepClock) -> dict[str, float]:
        """Takes the optimiser steps on one batch; returns their metrics."""
        assembly = assemble(
            [group.trajectories for group in batch.groups],
            [group.rewards for group in batch.groups],
            self.algorithm,
            self.config.correction,
            functools.partial(self._score, clock),
            row_tokens=self.config.row_tokens,
            microbatch_tokens=self.config.microbatch_tokens,
            seed=(self.config.seed, step),
            segment_unit=self.programs.segment_unit,
            turn_rewards=self.collector.turn_rewards(batch),
        )
        if assembly.trained.any():
            self.counters.without_signal = 0 if assembly.signal else self.counters.without_signal + 1
        drafted: dict[str, float] = {}
        if self.drafter is not None:  # before the update consumes the weights
            with clock.phase("draft"):
                every = [part for minibatch in assembly.minibatches() for part in minibatch.microbatches]
                drafted = self.drafter(self.programs.frozen(self.state), every)
        sums: dict[str, float] = {}
        losses: list[float] = []
        norms: list[float | None] = []
        tokens = places = 0
        pairs, use = assembly.scored, None
        for minibatch in assembly.minibatches():
            micro = minibatch.microbatches
            with self.console.phase("train", len(micro), "microbatches") as progress, clock.phase("train"):
                loss, norm, logprobs, used = self._optimise(step, minibatch, batch, sums, progress)
            use = used if used is None else used.and_also(use)
            # the forward pass of the first update uses the weights that sampled the batch
            if not assembly.scored and not norms:
                pairs = list(zip(micro, logprobs, strict=True))
            losses.append(loss)
            norms.append(norm)
            tokens += int(sum(np.count_nonzero(b.segment_ids) for b in micro))
            places += int(sum(np.size(b.segment_ids) for b in micro))
        finite = [norm for norm in norms if norm is not None]
        if finite:
            self.counters.policy_version += 1
        row = drafted | assembly.metrics | rl_metrics.loss_metrics(sums) | _mismatch(pairs)
        row |= {"loss/total": float(np.mean(losses)), "count/skipped_updates": len(norms) - len(finite)}
        if self.state.loss_scale is not None:
            row |= {
                "optimizer/loss_scale": float(self.state.loss_scale.factor),
                "count/loss_scale_overflows": self.counters.overflows,
            }
        if use is not None:
            row |= self._kv_metrics(step, use)
        if finite:
            self.state = self.programs.recalibrated(self.state)
        row |= {"optimizer/grad_norm": float(np.mean(finite)) if finite else float("nan")}
        row |= {"count/train_tokens": tokens, "count/padding_fraction": 1 - tokens / places}
        return row

    def _score(
        self, clock: StepClock, micro: list[TrainBatch]
    ) -> tuple[list[np.ndarray] | None, list[np.ndarray] | None]:
        """Log-probabilities by the trainer's policy and by the reference; None for those the loss ignores."""

        def score(weights: nnx.State) -> list[np.ndarray]:
            return [self.programs.logprobs(weights, b) for b in micro]

        with self.console.phase("logprob", len(micro), "microbatches"), clock.phase("logprob"):
            old = score(self.programs.frozen(self.state)) if self.algorithm.needs_old else None
            return old, None if self.reference is None else score(self.reference)

    def _optimise(
        self, step: int, minibatch: Minibatch, batch: RolloutBatch, sums: dict[str, float], progress: Any
    ) -> tuple[float, float | None, list[np.ndarray], KVUse | None]:
        """One optimiser step: (loss, gradient norm or None if skipped, logprobs by microbatch, FP8 use)."""
        micro, denominators = minibatch.microbatches, minibatch.denominators
        grads, loss, logprobs = None, 0.0, []
        use: KVUse | None = None
        for part in micro:
            grads, stats, values = self.programs.next_gradient(
                grads, self.state, part, denominators, self.algorithm
            )
            host_stats, host_values = fetch((stats, values))
            loss += float(host_stats.pop("loss"))
            if KV_USE in host_stats:
                use = host_stats.pop(KV_USE).and_also(use)
            for name, value in host_stats.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            logprobs.append(host_values)
            progress.advance(1)
        if grads is None or denominators.tokens == 0:
            self.counters.skipped_in_a_row += 1
            self.console.warn(
                f"step {step}: no completion is trained (none has a reward, or all are masked or "
                "rejected); no update"
            )
            return 0.0, None, logprobs, use
        if not np.isfinite(loss):
            self._skip(step, "loss", batch, micro)
            return loss, None, logprobs, use
        self.state, report = self.programs.update(self.state, grads, None if use is None else use.largest)
        if report.overflow:
            self.counters.overflows += 1
            return loss, None, logprobs, use
        if report.nonfinite:
            self._skip(step, ", ".join(report.nonfinite[:3]), batch, micro)
            return loss, None, logprobs, use
        self.counters.updates += 1
        self.counters.skipped_in_a_row = 0
        return loss, report.grad_norm, logprobs, use

    def _kv_metrics(self, step: int, use: KVUse) -> dict[str, float]:
        """How keys and values used the FP8 range, with the scales of the step; warns if many were clipped."""
        assert self.state.kv is not None
        clipped = float(use.clipped.sum() / use.count.sum())
        if clipped > WARN_CLIPPED:
            self.console.warn(
                f"step {step}: {clipped:.1e} of the keys and values were clipped to the range of FP8 "
                f"(kv/clip_fraction), expected at most {WARN_CLIPPED:.0e}. They grow faster than the scales "
                "follow: a lower optimizer.learning_rate, or precision.kv_cache: bf16."
            )
        exponents = np.log2(fetch(self.state.kv.scales))
        row = {"kv/clip_fraction": clipped}
        for index, kind in enumerate(self.programs.plan.kinds):
            row |= {f"kv/{kind}_exponent_min": float(exponents[:, index].min())}
            row |= {f"kv/{kind}_exponent_max": float(exponents[:, index].max())}
        return row

    def _skip(self, step: int, tensor: str, batch: RolloutBatch, micro: list[TrainBatch]) -> None:
        """Reports the tensor that is not finite, saves the batch and counts the skipped update."""
        self.counters.skipped_in_a_row += 1
        arrays: dict[str, Any] = {"rewards": batch.rewards}
        arrays |= {f"reward_{name}": values for name, values in batch.parts.items()}
        for index, part in enumerate(micro):
            fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
            arrays |= {f"{name}_{index}": value for name, value in fields.items() if value is not None}
        if not micro:
            arrays |= {f"token_ids_{i}": t.token_ids for i, t in enumerate(batch.trajectories)}
            arrays |= {f"logprobs_{i}": t.logprobs for i, t in enumerate(batch.trajectories)}
        where = self.save_bad_batch(step, tensor, arrays)
        self.console.warn(
            f"step {step}: {tensor} is not finite; the update is skipped"
            + (f", its batch is in {where}" if where else "")
        )


def _mismatch(pairs: list[tuple[TrainBatch, np.ndarray]]) -> dict[str, float]:
    """Mismatch metrics of pairs (microbatch, the trainer's logprobs with the weights that sampled it)."""
    columns = [
        (np.asarray(logprobs), b.rollout_logprobs, b.loss_mask, b.sequence_index)
        for b, logprobs in pairs
        if np.any(b.loss_mask)
    ]
    if not columns:
        return {}
    return rl_metrics.mismatch_metrics(*(np.concatenate(column) for column in zip(*columns, strict=True)))
