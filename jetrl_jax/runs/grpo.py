"""`GRPOTrainer`: everything a run is made of, put together; what `python -m jetrl_jax.train` uses and research code may.

    from jetrl_jax import GRPOTrainer, load_config
    GRPOTrainer(load_config("configs/tiny_cpu.yaml"), reward_functions=[my_reward]).train()

Several processes run this together (`jetrl_jax.devices.processes`): all do the same, and what the others than the first write goes
to a temporary directory.

What is built here is run by `jetrl_jax.runs.run`.  Everything a user can get wrong is checked before the run
directory is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jetrl_jax.collect.prompts import PromptStream
from jetrl_jax.config.load import dump_config, load_config
from jetrl_jax.config.rules.tables import rewarded_verifier
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.devices import processes
from jetrl_jax.devices.gpu_memory import check_device, share_gpu
from jetrl_jax.devices.layout import Layout
from jetrl_jax.errors import UserError
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.dense import dense_implementation
from jetrl_jax.models.flash_attention import attention_implementation
from jetrl_jax.models.fp8_producers import input_implementations
from jetrl_jax.models.linear import product_implementation
from jetrl_jax.record.checkpoint import CheckpointStore, CorruptCheckpoint
from jetrl_jax.record.console import Console
from jetrl_jax.record.metrics import MetricsWriter
from jetrl_jax.record.resume_rules import compare_data_for_resume, compare_for_resume
from jetrl_jax.record.run_directory import RunDirectory, collect_environment, flatten
from jetrl_jax.record.stop_signals import StopSignals
from jetrl_jax.rewards.functions import RewardFunctions, check_answers
from jetrl_jax.rl.algorithm import resolve_algorithm
from jetrl_jax.rollout.engine import RolloutEngine
from jetrl_jax.runs.engines import build_engine, unrecorded
from jetrl_jax.runs.policy import Policy, build_policy, policy_parts
from jetrl_jax.runs.run import Execution
from jetrl_jax.tasks.base import Task
from jetrl_jax.tasks.fingerprint import data_fingerprint
from jetrl_jax.tasks.registry import as_task, build_task
from jetrl_jax.text.tokenizer import Tokenizer
from jetrl_jax.training.evaluation import Evaluator
from jetrl_jax.training.programs import PolicyPrograms, TrainState, build_programs
from jetrl_jax.training.step import Trainer
from jetrl_jax.training.warm_start import SolutionSampler


class GRPOTrainer:
    """A run of the algorithm that `algorithm.name` names.

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
        self.config, self.reward_functions = config, reward_functions

        def inputs() -> tuple[Task, Tokenizer]:
            made = build_task(config.task, config.seed) if dataset is None else as_task(dataset, config.task)
            names = [section.name for section in config.rewards] if reward_functions is None else reward_functions
            named = [*(name for name in names if isinstance(name, str)), self._eval_verifier()]
            check_answers(list(dict.fromkeys(named)), made)
            return made, policy_parts(config, model, tokenizer)[0]

        # A mistake in them costs no device; but where several processes run, the others must hear of it.
        early = None if config.distributed.on else inputs()
        processes.start(config.distributed)
        self.config = config.model_copy(update={"distributed": config.distributed.model_copy(update={"process_id": None})})
        processes.check_same("config", dump_config(self.config))
        self.resume = resume
        self.console = console or Console(self.config.run.steps, stream=None if processes.is_first() else open(os.devnull, "w"))
        self.task, tokenizer = early or inputs()
        self.policy: Policy = build_policy(self.config, model=model, tokenizer=tokenizer)
        check_device(self.config, jax.default_backend() == "gpu")
        self.data = {"tokenizer": self.policy.tokenizer.fingerprint(), "data": data_fingerprint(self.task)}
        processes.check_same("task or tokenizer", "\n".join(f"{name}: {value}" for name, value in flatten(self.data).items()))
        processes.check_same("start policy", processes.fingerprint(self.policy.params))
        section = self.config.sharding
        many = section.devices > 1 or processes.count() > 1
        self.layout = Layout(section, self.policy.plan, self.policy.model) if many else None
        self.algorithm = resolve_algorithm(self.config.algorithm, self.config.rollout.max_completion_tokens, self.config.correction)
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
            self._check_data(run, store)
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
            return Execution(self, run, store, writer, rewards).execute()

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

    def _check_data(self, run: RunDirectory, store: CheckpointStore) -> None:
        """Refuses other data or another tokenizer than the newest checkpoint's, before anything of the run is written."""
        steps = store.steps() if run.resumed else []
        if steps:
            with contextlib.suppress(CorruptCheckpoint):  # left out when the state is restored, and named there
                compare_data_for_resume(store.read_metadata(steps[-1])["metadata"], self.data)

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
            engine.close()

    # Parts

    def new_programs(self, optimizer: Any = None) -> PolicyPrograms:
        """The compiled programs of this run's policy; `optimizer` None is that of the RL phase."""
        return build_programs(self.config, self.policy.model, self.policy.plan, self.layout, optimizer)

    def new_trainer(
        self, programs: PolicyPrograms, state: TrainState, reference: nnx.State | None, rewards: RewardFunctions, run: RunDirectory | None
    ) -> Trainer:
        """The loop over this run's parts; compiles the engine."""
        record, logs = (unrecorded, None) if run is None else (run.append_certificate, run.path)
        self._engine = engine = build_engine(
            self.policy, self.config.rollout, self.layout, record=record, warn=self.console.warn, log_directory=logs
        )
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
            verifier=self._eval_verifier(),
        )

    def _eval_verifier(self) -> str:
        """As `RunConfig.eval_verifier`, of the reward functions that this run was given."""
        if self.reward_functions is None or self.config.eval.verifier is not None:
            return self.config.eval_verifier
        return rewarded_verifier((function, 1.0) for function in self.reward_functions if isinstance(function, str))

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
                "eval_verifier": self._eval_verifier(),
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
