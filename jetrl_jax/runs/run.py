"""One run: its files, its counters and the loop over steps.

Order of a run: policy (new or read) -> warm start -> evaluation -> steps (with checkpoints and evaluations)
-> evaluation -> Hugging Face export.  A resumed run starts at its latest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from bridge.hf.draft import save_draft_head
from jetrl_jax.collect.batch import RolloutBatch
from jetrl_jax.collect.episodes import episode_record
from jetrl_jax.collect.samples import token_record
from jetrl_jax.config.load import dump_config, load_config
from jetrl_jax.devices import processes
from jetrl_jax.errors import UserError
from jetrl_jax.models.choices import slow_exactness
from jetrl_jax.precision.formats import is_adapter, is_kv_scale
from jetrl_jax.precision.parameters import merge, select
from jetrl_jax.record.checkpoint import CheckpointStore, CorruptCheckpoint, Restored
from jetrl_jax.record.metrics import MetricsWriter
from jetrl_jax.record.resume_rules import (
    compare_data_for_resume,
    compare_for_resume,
    compare_implementations_for_resume,
)
from jetrl_jax.record.run_directory import RunDirectory, collect_environment
from jetrl_jax.runs.parts import Parts
from jetrl_jax.runs.policy import HEAD_DIRECTORY, base_files, with_base
from jetrl_jax.runs.policy_config import ADAPTER_DIRECTORY, BASE_DIRECTORY
from jetrl_jax.training.optimizer import learning_rate_schedule
from jetrl_jax.training.programs import TrainState
from jetrl_jax.training.step import WARN_WITHOUT_SIGNAL, Counters
from jetrl_jax.training.warm_start import warm_start

EXPORT_DIRECTORY = "export"


class Run:
    """A run of `parts`.

    The constructor opens the files and restores or warm-starts the policy; `execute` does the steps.

    Args:
      stack: closes everything that the run opens.
      resume: continue from the latest checkpoint, if there is one.

    Raises:
      UserError: the run directory is taken, or is resumed with another config or other data; or, before
        it is opened, the draft head is not one of this policy.
    """

    def __init__(self, parts: Parts, stack: contextlib.ExitStack, *, resume: bool) -> None:
        self.parts = parts
        self.config = parts.config
        self.console = parts.console
        self.drafter = parts.new_drafter()  # before a file is written, since a head may be refused
        self.directory, checkpoints = self._open_directory(stack, resume)
        stack.enter_context(self.console)
        rewards = stack.enter_context(parts.new_rewards(self.directory.path))
        stack.callback(parts.evaluator.close)
        if parts.player is not None:
            stack.callback(parts.player.pool.close)
        kept = self.config.checkpoint
        self.store = stack.enter_context(
            CheckpointStore(
                checkpoints, keep_last=kept.keep_last, keep_best=kept.keep_best, warn=self.console.warn
            )
        )
        self._check_data()
        self._record()
        self.writer = stack.enter_context(self._new_writer())
        stack.enter_context(parts.stop_signals.listening())
        self.schedule = learning_rate_schedule(self.config.optimizer, self.config.total_updates)
        self.before: dict[str, float] | None = None
        self.warm_start_loss: float | None = None
        self.done = 0
        self.profiling = False
        state = parts.programs.init(self._start_params())
        restored = self._restored(state)
        if restored is None:
            counters, state = Counters(), parts.calibrated(self._warm_start(state))
            reference = parts.reference(state)
        else:
            counters, state = Counters.of(restored.metadata), self._rebuild(restored.state, state)
            reference = self._reference(state, restored.state.get("reference"))
            if self.drafter is not None:
                self.drafter.restore(restored.state["draft"])
        engine = stack.enter_context(contextlib.closing(parts.new_engine(self.directory, self.drafter)))
        save = self.directory.save_bad_batch
        more = {"counters": counters, "save_bad_batch": save, "drafter": self.drafter}
        self.step = parts.new_step(engine, rewards, state, reference, **more)
        self.directory.add_to_environment({"rollout_engine": dict(engine.describe())})
        if restored is not None:
            self.console.message(f"resumed from step {self.done}")
        kept_steps = self.done if restored is not None else -1
        self.writer.truncate_after(kept_steps)
        self.directory.truncate_after(kept_steps)

    # Files

    def _open_directory(self, stack: contextlib.ExitStack, resume: bool) -> tuple[RunDirectory, Path]:
        """The run directory, and the directory of the checkpoints of all processes.

        Processes other than the first get a temporary run directory.
        """
        own = (
            self.config.run.directory
            if processes.is_first()
            else stack.enter_context(tempfile.TemporaryDirectory())
        )
        directory = stack.enter_context(RunDirectory.create(own, resume=resume, warn=self.console.warn))
        if directory.resumed:
            compare_for_resume(load_config(directory.config_path).model_dump(), self.config.model_dump())
        shared = processes.exchange_json(
            {"resumed": directory.resumed, "checkpoints": str(directory.checkpoints)}
        )[0]
        directory.resumed = shared["resumed"]
        if not Path(shared["checkpoints"]).is_dir():
            raise UserError(
                f"run directory: is not shared: got no {shared['checkpoints']} in process "
                f"{processes.index()}, expected a "
                "run.directory on a file system that every process sees."
            )
        return directory, Path(shared["checkpoints"])

    def _check_data(self) -> None:
        """Raises, before anything is written, if data, tokenizer or implementations differ from the newest
        checkpoint's.
        """
        steps = self.store.steps() if self.directory.resumed else []
        if steps:
            # a damaged checkpoint is skipped, with a warning, when the state is restored
            with contextlib.suppress(CorruptCheckpoint):
                self._compare(self.store.read_metadata(steps[-1])["metadata"])

    def _compare(self, metadata: Mapping[str, Any]) -> None:
        """Raises if a checkpoint was made with other data or implementations."""
        compare_data_for_resume(metadata, self._fingerprints)
        compare_implementations_for_resume(metadata, self._implementations)

    @functools.cached_property
    def _fingerprints(self) -> dict[str, Any]:
        """Hashes of tokenizer and data, and of the files of the base of adapters."""
        found = dict(self.parts.fingerprints)
        if self.config.lora is not None:
            found["base"] = base_files(self.base_path)
        return found

    @property
    def _implementations(self) -> dict[str, str]:
        return self.parts.policy.model.numerics.choices.names()

    def _record(self) -> None:
        """Writes config, environment, precision table and resolved choices, so that a run is repeatable."""
        record = self.parts.record()
        self.directory.write_config(dump_config(self.config))
        self.directory.write_precision(self.parts.policy.plan.table())
        self.directory.write_environment(collect_environment() | record)
        slow = slow_exactness(self.parts.policy.model.numerics)
        for note in (*self.parts.algorithm.notes, *record["task_notes"], *filter(None, [slow])):
            self.console.warn(note)

    def _new_writer(self) -> MetricsWriter:
        section, first = self.config.run, processes.is_first()
        return MetricsWriter(
            self.directory.metrics_path,
            events=self.directory.events if section.tensorboard and first else None,
            wandb_project=section.wandb_project if first else None,
            wandb_config=self.config.model_dump(),
            warn=self.console.warn,
        )

    # Steps

    def execute(self) -> dict[str, Any]:
        """Runs the steps until the end or a signal, with evaluations and checkpoints, then exports."""
        if self.before is None:
            self.before = self._evaluate(0)
            start = dict(self.before) | {"policy_version": 0}
            if self.warm_start_loss is not None:
                start["warm_start/loss"] = self.warm_start_loss
            self.writer.write(0, start)
            self._save(0, start)
        row: dict[str, float] = {}
        after: dict[str, float] | None = dict(self.before) if self.done == 0 else None
        stopped = self.parts.stop_signals.agreed()
        while self.done < self.config.run.steps and stopped is None:
            step = self.done + 1
            with self._profiled(step):
                row, batch = self.step(step)
            row["optimizer/learning_rate"] = float(self.schedule(max(self.step.counters.updates - 1, 0)))
            every = self.config.eval.every_steps
            if step == self.config.run.steps or (every and step % every == 0):
                after = self._evaluate(step)
                row |= after
            self.done = step
            self.writer.write(step, row)
            self.directory.append_samples(step, self._samples(batch))
            self.console.step(row | {"step": step})
            stopped = self.parts.stop_signals.agreed()
            last = step == self.config.run.steps or stopped is not None
            if step % self.config.checkpoint.every_steps == 0 or last:
                self._save(step, row)
        if stopped is not None:
            name = signal.Signals(stopped).name
            self.console.message(f"stopped by {name} after step {self.done}; continue with --resume")
            return self._summary(name, None)
        count = self.step.counters.without_signal
        if count >= min(self.done, WARN_WITHOUT_SIGNAL) > 0:
            self.console.warn(
                f"in the last {count} of the run's {self.done} steps all rewards of each group were "
                "equal: nothing "
                "was learned from them. Do the rewards see what the policy writes (samples.jsonl)?"
            )
        if after is None:  # resumed after its last step, whose evaluation is already recorded
            after = self._evaluate(self.done, record=False)
        params = processes.gather_to_first(self.step.state.params)
        written = self.directory.path / (EXPORT_DIRECTORY if self.config.lora is None else ADAPTER_DIRECTORY)
        if params is not None:
            if self.config.lora is None:
                self.parts.policy.save(written, params)
            else:
                self.parts.policy.save_adapter(written, str(self.base_path), params, overwrite=True)
            if self.drafter is not None:
                save_draft_head(self.directory.path / HEAD_DIRECTORY, self.drafter.head)
        processes.barrier()
        self.console.message(f"policy written to {written}")
        return self._summary(None, after)

    def _summary(self, stopped_by: str | None, after: dict[str, float] | None) -> dict[str, Any]:
        return {
            "steps": self.done,
            "stopped_by": stopped_by,
            "before": self.before,
            "after": after,
            "directory": str(self.directory.path),
        }

    def _warm_start(self, state: TrainState) -> TrainState:
        """The policy after the warm start; unchanged if the config has none."""
        section, sampler, programs = self.config.warm_start, self.parts.sampler, self.parts.warm_programs
        params = self.parts.policy.params
        if section is None or sampler is None or programs is None:
            self._save_base(params)
            return state
        with self.console.phase("warm start", section.steps, "steps") as progress:
            before = (
                state.params
                if self.config.lora is None
                else select(params, lambda path: not is_adapter(path))
            )
            start = self.parts.calibrated(programs.init(before), programs)
            warm, self.warm_start_loss = warm_start(
                programs, start, sampler, section, lambda step, loss: progress.advance(1), self.drafter
            )
        if self.config.lora is None:
            return self.parts.programs.init(warm.params)
        trained = processes.fetch(warm.params)
        self._save_base(trained)
        return self.parts.programs.init(merge(params, trained))

    def _evaluate(self, step: int, *, record: bool = True) -> dict[str, float]:
        start = time.perf_counter()
        with self.console.phase("eval"):
            evaluation = self.parts.evaluator(self.step.engine)
        metrics = evaluation.metrics | {"time/eval_s": time.perf_counter() - start}
        shown = ", ".join(
            f"{name.removeprefix('eval/')} {value:.3f}" for name, value in evaluation.metrics.items()
        )
        self.console.message(f"step {step} held-out ({len(self.parts.evaluator.prompts)} prompts): {shown}")
        if record:
            self.directory.append_samples(step, evaluation.samples[: self.config.run.samples_per_step])
        return metrics

    def _samples(self, batch: RolloutBatch) -> list[dict[str, Any]]:
        """The record of one completion from each of the step's first groups."""
        return [
            {
                "split": "train",
                "prompt": group.prompt.example.prompt,
                "completion": group.texts[0],
                "answer": group.prompt.example.answer,
                "reward": float(group.rewards[0]),
                "finish_reason": group.trajectories[0].finish_reason,
                "policy_version": group.trajectories[0].oldest_version,
                **token_record(self.parts.policy.tokenizer, group.trajectories[0]),
                **(episode_record(group.episodes[0]) if group.episodes else {}),
            }
            for group in batch.groups[: self.config.run.samples_per_step]
        ]

    @contextlib.contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        """Traces `run.profile_steps` steps, beginning with the third (the first two compile)."""
        first = 3
        count = self.config.run.profile_steps
        if count and step == first:
            jax.profiler.start_trace(str(self.directory.path / "profile"))
            self.profiling = True
        yield
        last = step == self.config.run.steps or self.parts.stop_signals.received is not None
        if self.profiling and (last or step == first + count - 1):
            jax.profiler.stop_trace()
            self.profiling = False
            self.console.message(f"profile written to {self.directory.path / 'profile'}")

    # The frozen base of adapters

    @property
    def base_path(self) -> Path:
        """The directory of the base of a run with adapters, which all processes read."""
        return self.store.directory.parent / BASE_DIRECTORY

    def _start_params(self) -> nnx.State:
        """The masters that the run begins with; beside a checkpoint of adapters those of the run's own base.

        A base without a checkpoint is of a start that was cut short, and is made again.
        """
        policy = self.parts.policy
        kept = self.config.lora is not None and self.directory.resumed and bool(self.store.steps())
        kept = processes.exchange_json(kept)[0]
        return with_base(policy, self.base_path) if kept else policy.params

    def _save_base(self, params: nnx.State) -> None:
        """Writes the base of adapters, once; nothing in a run without."""
        if self.config.lora is None:
            return
        whole = processes.gather_to_first(params)
        if whole is not None:
            self.parts.policy.save_base(self.base_path, whole)
        processes.barrier()

    def _reference(self, state: TrainState, saved: nnx.State | None) -> nnx.State | None:
        """The reference of a resumed run; of a base only the scales of keys and values were saved."""
        if self.config.lora is None or not self.parts.algorithm.needs_reference:
            return saved
        base = self.parts.programs.reference(state)
        return base if saved is None else merge(base, saved)

    # Checkpoints

    def _saved(self, state: TrainState, reference: nnx.State | None) -> dict[str, Any]:
        """The arrays of a checkpoint; published weights are made again from the masters, bit for bit."""
        if self.config.lora is not None and reference is not None:  # the rest is in the base's directory
            reference = select(reference, is_kv_scale) if self.parts.policy.plan.kinds else None
        optional: dict[str, Any] = {"reference": reference, "loss_scale": state.loss_scale, "kv": state.kv}
        optional["draft"] = None if self.drafter is None else self.drafter.saved
        return {"params": state.params, "opt_state": state.opt_state} | {
            k: v for k, v in optional.items() if v is not None
        }

    def _save(self, step: int, row: Mapping[str, float]) -> None:
        prompts = self.parts.prompts
        metadata = {
            **dataclasses.asdict(self.step.counters),
            "prompt_cursor": prompts.cursor,
            "prompts_skipped": prompts.skipped,
            "before": self.before,
            **self._fingerprints,
            "implementations": self._implementations,
        }
        self.writer.sync()
        with self.console.phase("checkpoint"):
            self.store.save(step, self._saved(self.step.state, self.step.reference), metadata, row)

    def _restored(self, state: TrainState) -> Restored | None:
        """The latest checkpoint, or None if the run begins; takes over everything except its state."""
        restored = None
        if self.directory.resumed:
            restored = self.store.restore_latest(self._saved(state, self.parts.reference(state)))
        if restored is None:
            if self.writer.last_step:
                self.console.warn(
                    f"no checkpoint: the run begins again; its rows up to step {self.writer.last_step} "
                    "are dropped"
                )
            self.parts.prompts.restart()  # an earlier run of the same parts may have drawn prompts
            return None
        self._compare(restored.metadata)
        prompts = self.parts.prompts
        prompts.cursor = restored.metadata["prompt_cursor"]
        prompts.skipped = restored.metadata["prompts_skipped"]
        self.before = restored.metadata["before"]
        self.done = restored.step
        return restored

    def _rebuild(self, saved: Mapping[str, Any], start: TrainState) -> TrainState:
        kv, programs = saved.get("kv"), self.parts.programs
        base = None if self.config.lora is None else self.parts.policy.plan.frozen_base(start.published)
        published = programs.init(saved["params"], kv, base).published
        return TrainState(saved["params"], saved["opt_state"], published, saved.get("loss_scale"), kv)
