"""`GRPOTrainer`: a run from Python, for research code; `python -m jetrl_jax.train` uses it too.

    from jetrl_jax import GRPOTrainer, load_config
    GRPOTrainer(load_config("configs/tiny_cpu.yaml"), reward_functions=[my_reward]).train()

    GRPOTrainer   checks all user input and makes the parts, before a file is written
    Run           (`runs.run`) opens files, restores or starts, loops over the steps, exports
    RLStep        (`training.step`) one step

If a run has several processes (`jetrl_jax.devices.processes`), all execute this code, and processes other
than the first write to a temporary directory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jetrl_jax.collect.episodes import EpisodePlayer
from jetrl_jax.collect.prompts import PromptStream
from jetrl_jax.config.arithmetic import build_plan
from jetrl_jax.config.load import dump_config, load_config
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.task import rewarded_verifier
from jetrl_jax.devices import processes
from jetrl_jax.devices.gpu_memory import check_device, share_gpu
from jetrl_jax.devices.layout import Layout
from jetrl_jax.errors import UserError
from jetrl_jax.models.decoder import Decoder, without_adapters
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.record.console import Console
from jetrl_jax.record.run_directory import flatten
from jetrl_jax.record.stop_signals import StopSignals
from jetrl_jax.rewards.functions import check_answers
from jetrl_jax.rl.algorithm import resolve_algorithm
from jetrl_jax.runs.parts import Parts
from jetrl_jax.runs.policy import Policy, build_policy, has_checkpoint, policy_parts
from jetrl_jax.runs.run import Run
from jetrl_jax.tasks.base import Task
from jetrl_jax.tasks.environment import EnvironmentTask
from jetrl_jax.tasks.fingerprint import data_fingerprint
from jetrl_jax.tasks.registry import as_task, build_task
from jetrl_jax.text.tokenizer import Tokenizer
from jetrl_jax.training.evaluation import Evaluator
from jetrl_jax.training.programs import build_programs
from jetrl_jax.training.warm_start import SolutionSampler, build_warm_start_optimizer

RewardFunction = Callable[..., Any] | str


class GRPOTrainer:
    """A training run with the config's algorithm (GRPO or a relative).

    Args:
      config: a `RunConfig`, or the path of a YAML file.
      model: a `Decoder` (its parameters are copied), a Hugging Face directory, or None for the config's
        model.
      tokenizer: replaces the config's.
      reward_functions: callables `f(prompts, completions, answers, **kwargs) -> list[float | None]` or names,
        weight 1 each; replace the config's `rewards`.
      dataset: a `Task`, or records with `prompt` and `answer` (a list, or a `datasets.Dataset`); replaces
        the config's `task`.
      resume: continue from the latest checkpoint of `config.run.directory`, if it has one.

    Attributes:
      parts: the parts of the run.

    Raises:
      UserError: an argument that cannot work; nothing has been written.
    """

    def __init__(
        self,
        config: RunConfig | str | Path,
        *,
        model: Decoder | str | Path | None = None,
        tokenizer: Tokenizer | None = None,
        reward_functions: Sequence[RewardFunction] | None = None,
        dataset: Task | Sequence[Mapping[str, Any]] | None = None,
        resume: bool = False,
        console: Console | None = None,
    ) -> None:
        config = config if isinstance(config, RunConfig) else load_config(config)
        share_gpu(config)
        verifier = _eval_verifier(config, reward_functions)
        if dataset is not None and config.environment is not None:
            raise UserError(
                f"GRPOTrainer: a dataset has no turns: got dataset={type(dataset).__name__} with task.kind: "
                "environment, expected one of the two."
            )
        if config.algorithm.credit == "turn" and "task" not in (reward_functions or ["task"]):
            raise UserError(
                "GRPOTrainer: no turn has a reward of its own: got reward_functions without 'task' with "
                "algorithm.credit: turn, expected the name 'task' among them, or credit: episode."
            )

        def inputs() -> tuple[Task, Tokenizer]:
            made = build_task(config.task, config.seed) if dataset is None else as_task(dataset, config.task)
            names = (
                [section.name for section in config.rewards] if reward_functions is None else reward_functions
            )
            named = [*(name for name in names if isinstance(name, str)), verifier]
            check_answers(list(dict.fromkeys(named)), made)
            return made, policy_parts(config, model, tokenizer)[0]

        # Check the inputs before a device is used.  With several processes the others must hear of a mistake,
        # so they join first.
        early = None if config.distributed.on else inputs()
        processes.start(config.distributed)
        self.config = config.model_copy(
            update={"distributed": config.distributed.model_copy(update={"process_id": None})}
        )
        processes.check_same("config", dump_config(self.config))
        self.resume = resume
        self.console = console or Console(
            self.config.run.steps, stream=None if processes.is_first() else open(os.devnull, "w")
        )
        self.task, tokenizer = early or inputs()
        restored = resume and has_checkpoint(self.config.run.directory)
        self.policy: Policy = build_policy(self.config, model=model, tokenizer=tokenizer, restored=restored)
        check_device(self.config, jax.default_backend() == "gpu")
        self.parts = self._new_parts(reward_functions, verifier)

    def _new_parts(self, reward_functions: Sequence[RewardFunction] | None, verifier: str) -> Parts:
        config, task, policy = self.config, self.task, self.policy
        fingerprints = {"tokenizer": policy.tokenizer.fingerprint(), "data": data_fingerprint(task)}
        processes.check_same(
            "task or tokenizer",
            "\n".join(f"{name}: {value}" for name, value in flatten(fingerprints).items()),
        )
        processes.check_same("start policy", processes.fingerprint(policy.params))
        many = config.sharding.devices > 1 or processes.count() > 1
        layout = Layout(config.sharding, policy.plan, policy.model) if many else None
        new_programs = functools.partial(build_programs, config, policy.model, policy.plan, layout)
        whole = (
            new_programs
            if config.lora is None
            else functools.partial(build_programs, config, *_base(policy, many))
        )
        warm, lengths = (
            config.warm_start,
            {"max_prompt_tokens": config.rollout.max_prompt_tokens, "seed": config.seed},
        )
        player = build_player(config, task, policy.tokenizer)
        return Parts(
            config=config,
            policy=policy,
            task=task,
            fingerprints=fingerprints,
            layout=layout,
            algorithm=resolve_algorithm(
                config.algorithm, config.rollout.max_completion_tokens, config.correction
            ),
            programs=new_programs(),
            prompts=PromptStream(task, policy.tokenizer, **lengths),
            evaluator=Evaluator(
                task,
                policy.tokenizer,
                prompts=config.eval.prompts,
                samples=config.eval.samples,
                temperature=config.rollout.temperature,
                max_completion_tokens=config.rollout.max_completion_tokens,
                timeout_s=max(section.timeout_s for section in config.rewards),
                verifier=verifier,
                player=player,
                **lengths,
            ),
            player=player,
            sampler=SolutionSampler(
                task,
                policy.tokenizer,
                warm,
                row_tokens=config.row_tokens,
                demonstrate=player.demonstration if player else None,
                **lengths,
            )
            if warm
            else None,
            warm_programs=whole(optimizer=build_warm_start_optimizer(warm)) if warm else None,
            eval_verifier=verifier,
            reward_functions=reward_functions,
            console=self.console,
            stop_signals=StopSignals(self.console.warn),
        )

    def train(self) -> dict[str, Any]:
        """Trains until `run.steps` or a stop signal.

        Returns:
          {"steps", "stopped_by", "before", "after", "directory"}; `before` and `after` are the metrics of the
          evaluations, and `after` is None if a signal stopped the run.

        Raises:
          UserError: the run directory is taken, or is resumed with another config.
          RunStopped: too many non-finite steps.
        """
        with contextlib.ExitStack() as stack:
            return Run(self.parts, stack, resume=self.resume).execute()

    def dry_run(self) -> dict[str, Any]:
        """Compiles and runs one step without a run directory; returns {"seconds", "metrics"}."""
        start, parts = time.perf_counter(), self.parts
        parts.prompts.restart()
        with contextlib.closing(parts.evaluator), self.console, parts.new_rewards() as rewards:
            state = parts.programs.init(self.policy.params)
            drafter = parts.new_drafter()
            with contextlib.closing(parts.new_engine(drafter=drafter)) as engine:
                row, _ = parts.new_step(engine, rewards, state, parts.reference(state), drafter=drafter)(1)
        return {"seconds": time.perf_counter() - start, "metrics": row}


def _base(policy: Policy, sharded: bool) -> tuple[Decoder, PrecisionPlan, Layout | None]:
    """Structure, plan and layout of a policy without its adapters, whose weights a warm start trains."""
    model = without_adapters(policy.model)
    paths = [path for path, _ in named_params(nnx.state(model, nnx.Param))]
    plan = build_plan(paths, policy.config.precision)
    return model, plan, Layout(policy.config.sharding, plan, model) if sharded else None


def build_player(config: RunConfig, task: Task, tokenizer: Tokenizer) -> EpisodePlayer | None:
    """What plays the episodes of a config's environment; None if its task is of another kind.

    Raises:
      UserError: as `EpisodePlayer`.
    """
    if config.environment is None:
        return None
    assert isinstance(task, EnvironmentTask)
    return EpisodePlayer(config.environment, config.rollout, tokenizer, task.pool, task.probe)


def _eval_verifier(config: RunConfig, reward_functions: Sequence[RewardFunction] | None) -> str:
    """`RunConfig.eval_verifier`, but for the reward functions given to this run."""
    if reward_functions is None or config.eval.verifier is not None:
        return config.eval_verifier
    return rewarded_verifier((function, 1.0) for function in reward_functions if isinstance(function, str))
