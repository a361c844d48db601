"""`GRPOTrainer`: everything a run is made of, put together; what `python -m jetrl_jax.train` uses and research code may.

    from jetrl_jax import GRPOTrainer, load_config
    GRPOTrainer(load_config("configs/tiny_cpu.yaml"), reward_functions=[my_reward]).train()

Several processes run this together (`jetrl_jax.processes`): all do the same, and what the others than the first write goes
to a temporary directory.

Order of a run: policy (new or read) -> warm start -> evaluation -> steps (checkpoint, evaluation on the way)
-> evaluation -> Hugging Face export.  Everything a user can get wrong is checked before the run directory is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from bridge.engine.certificate import CertifiedEngine
from jetrl_jax import processes
from jetrl_jax.config import RunConfig
from jetrl_jax.config_io import dump_config, load_config
from jetrl_jax.errors import UserError
from jetrl_jax.gpu_memory import check_device, share_gpu
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.dense import dense_implementation
from jetrl_jax.models.flash_attention import attention_implementation
from jetrl_jax.models.fp8_linear import product_implementation
from jetrl_jax.models.fp8_producers import input_implementations
from jetrl_jax.policy import Policy, build_engine, build_policy, close_engine
from jetrl_jax.rl.algorithm import resolve_algorithm
from jetrl_jax.rollout.engine import RolloutEngine
from jetrl_jax.sharding import Layout
from jetrl_jax.tasks.rewards import RewardFunctions
from jetrl_jax.tasks.task import Task, as_task, build_task
from jetrl_jax.tasks.tokenizer import Tokenizer
from jetrl_jax.training.build_programs import build_programs, total_updates
from jetrl_jax.training.checkpoint import CheckpointStore, compare_for_resume
from jetrl_jax.training.collect import RolloutBatch
from jetrl_jax.training.console import Console
from jetrl_jax.training.evaluation import Evaluator
from jetrl_jax.training.metrics import MetricsWriter
from jetrl_jax.training.optimizer import learning_rate_schedule
from jetrl_jax.training.prompts import PromptStream, data_fingerprint
from jetrl_jax.training.run_directory import RunDirectory, collect_environment
from jetrl_jax.training.step import PolicyPrograms, TrainState
from jetrl_jax.training.stop_signals import StopSignals
from jetrl_jax.training.trainer import Trainer
from jetrl_jax.training.warm_start import SolutionSampler, build_warm_start_optimizer, warm_start

EXPORT_DIRECTORY = "export"


class GRPOTrainer:
    """A GRPO (DAPO, Dr.GRPO, RLOO) run.

    Args:
      config: a `RunConfig`, or the path of a YAML file.
      model: a `Decoder` (its parameters are copied), a Hugging Face directory, or None for the config's model.
      tokenizer: in place of the config's.
      reward_functions: callables `f(prompts, completions, answers, **kwargs) -> list[float | None]` or names, weight
        1 each, in place of the config's `rewards`.
      dataset: a `Task`, or records with `prompt` and `answer` (a list, or a `datasets.Dataset`), in place of `task`.
      resume: go on from the latest checkpoint of `config.run.directory` where there is one.

    Raises:
      UserError: anything in the arguments that cannot work; nothing has been written then.
    """

    def __init__(
        self,
        config: RunConfig | str | Path,
        *,
        model: Decoder | str | Path | None = None,
        tokenizer: Tokenizer | None = None,
        reward_functions: Sequence[Callable[..., Any] | str] | None = None,
        dataset: Task | Sequence[Mapping[str, Any]] | None = None,
        resume: bool = False,
        console: Console | None = None,
    ) -> None:
        config = config if isinstance(config, RunConfig) else load_config(config)
        share_gpu(config)
        processes.start(config.distributed)
        self.config = config.model_copy(update={"distributed": config.distributed.model_copy(update={"process_id": None})})
        processes.check_same("config", dump_config(self.config))
        self.resume = resume
        self.console = console or Console(self.config.run.steps, stream=None if processes.is_first() else open(os.devnull, "w"))
        self.task = build_task(self.config.task, self.config.seed) if dataset is None else as_task(dataset, self.config.task)
        self.policy: Policy = build_policy(self.config, model=model, tokenizer=tokenizer)
        check_device(self.config, jax.default_backend() == "gpu")
        processes.check_same("task or tokenizer", f"{data_fingerprint(self.task)}\n{self.policy.tokenizer.fingerprint()}")
        processes.check_same("start policy", processes.fingerprint(self.policy.params))
        section = self.config.sharding
        many = section.devices > 1 or processes.count() > 1
        self.layout = Layout(section, self.policy.plan, self.policy.model) if many else None
        self.algorithm = resolve_algorithm(self.config.algorithm, self.config.rollout.max_completion_tokens, self.config.correction)
        self.reward_functions = reward_functions
        self.stop_signals = StopSignals(self.console.warn)
        self._engine: RolloutEngine | None = None
        self._prompts = self._new_prompts()
        self._evaluator = self._new_evaluator()
        self._sampler = self._new_sampler() if self.config.warm_start.steps else None

    def train(self) -> dict[str, Any]:
        """Runs to `run.steps`, or to a stop signal; returns {"steps", "stopped_by", "before", "after", "directory"}.

        `before` and `after` are the evaluations' metrics (`after` is None when a signal stopped the run).

        Raises:
          UserError: the run directory is taken, or a resume with another config.
          RunStopped: too many non-finite steps.
        """
        with contextlib.ExitStack() as stack:
            run, checkpoints = self._open_run(stack)
            stack.enter_context(self.console)
            rewards = stack.enter_context(self._new_rewards(run.path))
            stack.callback(self._evaluator.close)
            stack.callback(self._close_engine)
            store = stack.enter_context(
                CheckpointStore(
                    checkpoints,
                    keep_last=self.config.checkpoint.keep_last,
                    keep_best=self.config.checkpoint.keep_best,
                    warn=self.console.warn,
                )
            )
            self._record(run)
            section = self.config.run
            writer = stack.enter_context(
                MetricsWriter(
                    run.metrics_path,
                    events=run.events if section.tensorboard and processes.is_first() else None,
                    wandb_project=section.wandb_project if processes.is_first() else None,
                    wandb_config=self.config.model_dump(),
                    warn=self.console.warn,
                )
            )
            stack.enter_context(self.stop_signals.listening())
            return _Run(self, run, store, writer, rewards).execute()

    def _open_run(self, stack: contextlib.ExitStack) -> tuple[RunDirectory, Path]:
        """The run directory, and where the checkpoints of all processes lie; the others than the first get a directory of their own."""
        own = self.config.run.directory if processes.is_first() else stack.enter_context(tempfile.TemporaryDirectory())
        run = stack.enter_context(RunDirectory.create(own, resume=self.resume, warn=self.console.warn))
        if run.resumed:
            compare_for_resume(load_config(run.config_path).model_dump(), self.config.model_dump())
        shared = processes.exchange_json({"resumed": run.resumed, "checkpoints": str(run.checkpoints)})[0]
        run.resumed = shared["resumed"]
        if not Path(shared["checkpoints"]).is_dir():
            raise UserError(
                f"run directory: is not shared: got no {shared['checkpoints']} in process {processes.index()}, expected a "
                "run.directory on a file system that every process sees."
            )
        return run, Path(shared["checkpoints"])

    def dry_run(self) -> dict[str, Any]:
        """Builds everything and compiles and runs one step, without a run directory; returns {"seconds", "metrics"}."""
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.console)
            stack.callback(self._evaluator.close)
            stack.callback(self._close_engine)
            rewards = stack.enter_context(self._new_rewards(None))
            programs = self.new_programs()
            state = programs.init(self.policy.params)
            trainer = self.new_trainer(programs, state, self.reference(programs, state), rewards, None)
            row, _ = trainer.step(1)
        return {"seconds": time.perf_counter() - start, "metrics": row}

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            close_engine(engine)

    # Parts

    def new_programs(self, optimizer: Any = None) -> PolicyPrograms:
        """The compiled programs of this run's policy; `optimizer` None is that of the RL phase."""
        return build_programs(self.config, self.policy.model, self.policy.plan, self.layout, optimizer)

    def new_trainer(
        self, programs: PolicyPrograms, state: TrainState, reference: nnx.State | None, rewards: RewardFunctions, run: RunDirectory | None
    ) -> Trainer:
        """The loop over this run's parts; compiles the engine."""
        self._engine = engine = build_engine(self.policy, self.config.rollout, self.layout)
        if isinstance(engine, CertifiedEngine):
            engine.attach(run.append_certificate if run else lambda row: None, self.console.warn, run.path if run else None)
        return Trainer(
            self.config,
            self.algorithm,
            programs,
            state,
            reference,
            engine,
            rewards,
            self.policy.tokenizer,
            self._prompts,
            run,
            self.console,
        )

    def reference(self, programs: PolicyPrograms, state: TrainState) -> nnx.State | None:
        """The frozen start policy of the KL term; None where there is no such term."""
        return programs.frozen(state) if self.algorithm.needs_reference else None

    def _new_prompts(self) -> PromptStream:
        return PromptStream(
            self.task, self.policy.tokenizer, max_prompt_tokens=self.config.rollout.max_prompt_tokens, seed=self.config.seed
        )

    def _new_evaluator(self) -> Evaluator:
        rollout = self.config.rollout
        return Evaluator(
            self.task,
            self.policy.tokenizer,
            prompts=self.config.eval.prompts,
            samples=self.config.eval.samples,
            temperature=rollout.temperature,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_completion_tokens=rollout.max_completion_tokens,
            seed=self.config.seed,
            timeout_s=max(section.timeout_s for section in self.config.rewards),
        )

    def _new_sampler(self) -> SolutionSampler:
        return SolutionSampler(
            self.task,
            self.policy.tokenizer,
            self.config.warm_start,
            row_tokens=self.config.row_tokens,
            max_prompt_tokens=self.config.rollout.max_prompt_tokens,
            seed=self.config.seed,
        )

    def _new_rewards(self, log_directory: Path | None) -> RewardFunctions:
        if self.reward_functions is not None:
            rewards = RewardFunctions.from_functions(self.reward_functions, self.task, log_directory=log_directory)
        else:
            rewards = RewardFunctions.from_config(self.config.rewards, self.task, log_directory=log_directory)
        rewards.start()
        return rewards

    def _record(self, run: RunDirectory) -> None:
        """What makes the run repeatable: config, environment, precision table and the resolved algorithm."""
        run.write_config(dump_config(self.config))
        run.write_precision(self.policy.plan.table())
        run.write_environment(
            collect_environment()
            | {
                "algorithm": self.algorithm.record(),
                "engine": self.config.rollout.engine,
                "sharding": None if self.layout is None else self.layout.record(),
                "processes": processes.count(),
                "fp8_products": {
                    name: dataclasses.asdict(product_implementation(self.policy.model.numerics, forward=name == "forward"))
                    for name in ("forward", "backward")
                },
                "fp8_inputs": {
                    name: dataclasses.asdict(choice)
                    for name, choice in input_implementations(self.policy.model.config, self.policy.model.numerics).items()
                },
                "dense_products": dataclasses.asdict(dense_implementation(self.policy.model.numerics)),
                "attention": dataclasses.asdict(attention_implementation(self.policy.model.numerics, self.policy.model.config.head_dim)),
                "task_notes": list(getattr(self.task, "notes", ())),
                "tokenizer": self.policy.tokenizer.fingerprint(),
            }
        )
        for note in (*self.algorithm.notes, *getattr(self.task, "notes", ())):
            self.console.warn(note)


class _Run:
    """One execution of `GRPOTrainer.train`: its files, its counters and the loop over steps."""

    def __init__(
        self, owner: GRPOTrainer, run: RunDirectory, store: CheckpointStore, writer: MetricsWriter, rewards: RewardFunctions
    ) -> None:
        self.owner, self.config, self.console = owner, owner.config, owner.console
        self.run, self.store, self.writer = run, store, writer
        self.programs = owner.new_programs()
        self.schedule = learning_rate_schedule(self.config.optimizer, total_updates(self.config))
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
        group = self.config.rollout.group_size
        chosen = range(0, min(len(batch.trajectories), self.config.run.samples_per_step * group), group)
        return [
            {
                "split": "train",
                "prompt": batch.prompts[i // group].example.prompt,
                "completion": batch.texts[i],
                "answer": batch.prompts[i // group].example.answer,
                "reward": float(batch.rewards.total[i]),
                "finish_reason": batch.trajectories[i].finish_reason,
                "policy_version": batch.trajectories[i].policy_version,
            }
            for i in chosen
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
            "prompt_cursor": trainer.prompts.cursor,
            "prompts_skipped": trainer.prompts.skipped,
            "before": self.before,
            "tokenizer": self.owner.policy.tokenizer.fingerprint(),
            "data": data_fingerprint(self.owner.task),
        }
        self.writer.sync()
        with self.console.phase("checkpoint"):
            self.store.save(step, self._saved(trainer.state, trainer.reference), metadata, row)

    def _restore_counters(self, metadata: Mapping[str, Any]) -> None:
        current = {"tokenizer": self.owner.policy.tokenizer.fingerprint(), "data": data_fingerprint(self.owner.task)}
        compare_for_resume({name: metadata[name] for name in current}, current)
        trainer = self.trainer
        trainer.policy_version, trainer.updates = metadata["policy_version"], metadata["updates"]
        trainer.skipped_in_a_row, trainer.overflows = metadata["skipped_in_a_row"], metadata["overflows"]
        trainer.prompts.cursor, trainer.prompts.skipped = metadata["prompt_cursor"], metadata["prompts_skipped"]
        trainer.engine.load_weights(trainer.state.published, trainer.policy_version)
        self.before = metadata["before"]
        self.done = self.store.steps()[-1]
        self.console.message(f"resumed from step {self.done}")
