"""One execution of `GRPOTrainer.train`: its files, its counters and the loop over steps.

Order of a run: policy (new or read) -> warm start -> evaluation -> steps (checkpoint, evaluation on the way)
-> evaluation -> Hugging Face export.  A resumed one starts at its latest checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jetrl_jax.collect.batch import RolloutBatch
from jetrl_jax.devices import processes
from jetrl_jax.record.checkpoint import CheckpointStore
from jetrl_jax.record.metrics import MetricsWriter
from jetrl_jax.record.resume_rules import compare_data_for_resume
from jetrl_jax.record.run_directory import RunDirectory
from jetrl_jax.rewards.functions import RewardFunctions
from jetrl_jax.training.optimizer import learning_rate_schedule
from jetrl_jax.training.programs import TrainState
from jetrl_jax.training.step import WARN_WITHOUT_SIGNAL
from jetrl_jax.training.warm_start import build_warm_start_optimizer, warm_start

if TYPE_CHECKING:
    from jetrl_jax.runs.grpo import GRPOTrainer

EXPORT_DIRECTORY = "export"


class Execution:
    """The run that `owner` describes, in an open run directory: restored or warm-started when it is made, run by `execute`."""

    def __init__(
        self, owner: GRPOTrainer, run: RunDirectory, store: CheckpointStore, writer: MetricsWriter, rewards: RewardFunctions
    ) -> None:
        self.owner, self.config, self.console = owner, owner.config, owner.console
        self.run, self.store, self.writer = run, store, writer
        self.programs = owner.new_programs()
        self.schedule = learning_rate_schedule(self.config.optimizer, self.config.total_updates)
        state = self.programs.init(owner.policy.params)
        restored = store.restore_latest(self._saved(state, owner.reference(self.programs, state))) if run.resumed else None
        self.before: dict[str, float] | None = None
        self.warm_start_loss: float | None = None
        self.done = 0
        self.profiling = False
        if restored is None:
            if writer.last_step:
                self.console.warn(f"no checkpoint: the run begins again; its rows up to step {writer.last_step} are dropped")
            state = self._warm_start(state)
            reference = owner.reference(self.programs, state)
        else:
            compare_data_for_resume(restored.metadata, owner.data)
            state = self._rebuild(restored.state)
            reference = restored.state.get("reference")
        self.trainer = owner.new_trainer(self.programs, state, reference, rewards, run)
        if restored is not None:
            self._restore_counters(restored.metadata)
        writer.truncate_after(self.done if restored is not None else -1)
        run.truncate_after(self.done if restored is not None else -1)

    def execute(self) -> dict[str, Any]:
        """Steps until the end or a signal; evaluation before, on the way and after; export."""
        if self.before is None:
            self.before = self._evaluate(0)
            start = dict(self.before) | {"policy_version": 0}
            if self.warm_start_loss is not None:
                start["warm_start/loss"] = self.warm_start_loss
            self.writer.write(0, start)
            self._save(0, start)
        row: dict[str, float] = {}
        after: dict[str, float] | None = dict(self.before) if self.done == 0 else None
        stopped = self.owner.stop_signals.agreed()
        while self.done < self.config.run.steps and stopped is None:
            step = self.done + 1
            with self._profiled(step):
                row, batch = self.trainer.step(step)
            row["optimizer/learning_rate"] = float(self.schedule(max(self.trainer.updates - 1, 0)))
            every = self.config.eval.every_steps
            if step == self.config.run.steps or (every and step % every == 0):
                after = self._evaluate(step)
                row |= after
            self.done = step
            self.writer.write(step, row)
            self.run.append_samples(step, self._samples(batch))
            self.console.step(row | {"step": step})
            stopped = self.owner.stop_signals.agreed()
            last = step == self.config.run.steps or stopped is not None
            if step % self.config.checkpoint.every_steps == 0 or last:
                self._save(step, row)
        if stopped is not None:
            name = signal.Signals(stopped).name
            self.console.message(f"stopped by {name} after step {self.done}; go on with --resume")
            return self._summary(name, None)
        if self.trainer.without_signal >= min(self.done, WARN_WITHOUT_SIGNAL) > 0:
            self.console.warn(
                f"in the last {self.trainer.without_signal} of the run's {self.done} steps all rewards of each group were equal: nothing "
                "was learned from them. Do the rewards see what the policy writes (samples.jsonl)?"
            )
        if after is None:  # resumed after its last step, whose evaluation is on record
            after = self._evaluate(self.done, record=False)
        params = processes.gather_to_first(self.trainer.state.params)
        if params is not None:
            self.owner.policy.save(self.run.path / EXPORT_DIRECTORY, params)
        processes.barrier()
        self.console.message(f"policy written to {self.run.path / EXPORT_DIRECTORY}")
        return self._summary(None, after)

    def _summary(self, stopped_by: str | None, after: dict[str, float] | None) -> dict[str, Any]:
        return {"steps": self.done, "stopped_by": stopped_by, "before": self.before, "after": after, "directory": str(self.run.path)}

    def _warm_start(self, state: TrainState) -> TrainState:
        section, sampler = self.config.warm_start, self.owner._sampler
        if sampler is None:
            return state
        programs = self.owner.new_programs(build_warm_start_optimizer(section))
        with self.console.phase("warm start", section.steps, "steps") as progress:
            start = programs.init(state.params)
            warm, self.warm_start_loss = warm_start(programs, start, sampler, section, lambda step, loss: progress.advance(1))
        return self.programs.init(warm.params)

    def _evaluate(self, step: int, *, record: bool = True) -> dict[str, float]:
        start = time.perf_counter()
        with self.console.phase("eval"):
            evaluation = self.owner._evaluator(self.trainer.engine)
        metrics = evaluation.metrics | {"time/eval_s": time.perf_counter() - start}
        shown = ", ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in evaluation.metrics.items())
        self.console.message(f"step {step} held-out ({len(self.owner._evaluator.prompts)} prompts): {shown}")
        if record:
            self.run.append_samples(step, evaluation.samples[: self.config.run.samples_per_step])
        return metrics

    def _samples(self, batch: RolloutBatch) -> list[dict[str, Any]]:
        """The first completions of the step, one of each of the first groups."""
        return [
            {
                "split": "train",
                "prompt": group.prompt.example.prompt,
                "completion": group.texts[0],
                "answer": group.prompt.example.answer,
                "reward": float(group.rewards[0]),
                "finish_reason": group.trajectories[0].finish_reason,
                "policy_version": group.trajectories[0].oldest_version,
            }
            for group in batch.groups[: self.config.run.samples_per_step]
        ]

    @contextlib.contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        """Traces `run.profile_steps` steps, from the third on (the first two compile)."""
        first = 3
        count = self.config.run.profile_steps
        if count and step == first:
            jax.profiler.start_trace(str(self.run.path / "profile"))
            self.profiling = True
        yield
        last = step == self.config.run.steps or self.owner.stop_signals.received is not None
        if self.profiling and (last or step == first + count - 1):
            jax.profiler.stop_trace()
            self.profiling = False
            self.console.message(f"profile written to {self.run.path / 'profile'}")

    # Checkpoints

    @staticmethod
    def _saved(state: TrainState, reference: nnx.State | None) -> dict[str, Any]:
        """What a checkpoint holds; published weights are made again from the masters, bit for bit."""
        optional = {"reference": reference, "loss_scale": state.loss_scale}
        return {"params": state.params, "opt_state": state.opt_state} | {k: v for k, v in optional.items() if v is not None}

    def _rebuild(self, saved: Mapping[str, Any]) -> TrainState:
        published = self.programs.init(saved["params"]).published
        return TrainState(saved["params"], saved["opt_state"], published, saved.get("loss_scale"))

    def _save(self, step: int, row: Mapping[str, float]) -> None:
        trainer = self.trainer
        metadata = {
            "policy_version": trainer.policy_version,
            "updates": trainer.updates,
            "skipped_in_a_row": trainer.skipped_in_a_row,
            "overflows": trainer.overflows,
            "without_signal": trainer.without_signal,
            "prompt_cursor": trainer.prompts.cursor,
            "prompts_skipped": trainer.prompts.skipped,
            "before": self.before,
            **self.owner.data,
        }
        self.writer.sync()
        with self.console.phase("checkpoint"):
            self.store.save(step, self._saved(trainer.state, trainer.reference), metadata, row)

    def _restore_counters(self, metadata: Mapping[str, Any]) -> None:
        trainer = self.trainer
        trainer.policy_version, trainer.updates = metadata["policy_version"], metadata["updates"]
        trainer.skipped_in_a_row, trainer.overflows = metadata["skipped_in_a_row"], metadata["overflows"]
        trainer.without_signal = metadata["without_signal"]
        trainer.prompts.cursor, trainer.prompts.skipped = metadata["prompt_cursor"], metadata["prompts_skipped"]
        trainer.engine.load(trainer.state.published, trainer.policy_version)
        self.before = metadata["before"]
        self.done = self.store.steps()[-1]
        self.console.message(f"resumed from step {self.done}")
