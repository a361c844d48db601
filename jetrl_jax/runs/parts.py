"""The parts of a run, all built and checked before it writes its first file.

GRPOTrainer -> Parts -> Run -> RLStep
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from jetrl_jax.collect.collector import Collector
from jetrl_jax.collect.episodes import EpisodePlayer
from jetrl_jax.collect.prompts import PromptStream
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.devices import processes
from jetrl_jax.devices.layout import Layout
from jetrl_jax.record.console import Console
from jetrl_jax.record.run_directory import RunDirectory
from jetrl_jax.record.stop_signals import StopSignals
from jetrl_jax.rewards.functions import RewardFunctions
from jetrl_jax.rl.algorithm import ResolvedAlgorithm
from jetrl_jax.rl.batching import padded_rows
from jetrl_jax.rollout.engine import RolloutEngine
from jetrl_jax.runs.drafter import build_drafter
from jetrl_jax.runs.engines import build_engine, unrecorded
from jetrl_jax.runs.policy import Policy
from jetrl_jax.tasks.base import Task
from jetrl_jax.training.draft import DraftTrainer
from jetrl_jax.training.evaluation import Evaluator
from jetrl_jax.training.programs import PolicyPrograms, TrainState
from jetrl_jax.training.step import RLStep
from jetrl_jax.training.warm_start import SolutionSampler


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a run.

    policy: the policy to start from; task: the problems; fingerprints: hashes of task and tokenizer.
    layout: the mesh; None is one device.
    algorithm: the config's, with every null resolved; programs: the compiled programs of the RL phase.
    sampler, warm_programs: data and programs of the warm start; None without one.
    prompts: the stream of training prompts.
    player: plays the episodes of an environment; None without one.
    evaluator: evaluates on held-out prompts, with the verifier `eval_verifier`.
    reward_functions: replace the config's rewards; None keeps those.
    console: shows the run; stop_signals: end it early.
    """

    config: RunConfig
    policy: Policy
    task: Task
    fingerprints: Mapping[str, Any]
    layout: Layout | None
    algorithm: ResolvedAlgorithm
    programs: PolicyPrograms
    sampler: SolutionSampler | None
    warm_programs: PolicyPrograms | None
    prompts: PromptStream
    player: EpisodePlayer | None
    evaluator: Evaluator
    eval_verifier: str
    reward_functions: Sequence[Callable[..., Any] | str] | None
    console: Console
    stop_signals: StopSignals

    def new_rewards(self, log_directory: Path | None = None) -> RewardFunctions:
        """The reward functions, already started; the caller closes them."""
        if self.reward_functions is not None:
            rewards = RewardFunctions.from_functions(
                self.reward_functions, self.task, log_directory=log_directory
            )
        else:
            rewards = RewardFunctions.from_config(self.config.rewards, self.task, log_directory=log_directory)
        rewards.start()
        return rewards

    def new_drafter(self) -> DraftTrainer | None:
        """The trainer of the draft head as the run begins; None without one."""
        return build_drafter(self.policy, self.programs, self.console.warn)

    def new_engine(
        self, directory: RunDirectory | None = None, drafter: DraftTrainer | None = None
    ) -> RolloutEngine:
        """The rollout engine without weights, with logs in `directory`; the caller closes it."""
        record, logs = (
            (unrecorded, None) if directory is None else (directory.append_certificate, directory.path)
        )
        return build_engine(
            self.policy,
            self.config.rollout,
            self.layout,
            draft=None if drafter is None else drafter.draft,
            record=record,
            warn=self.console.warn,
            log_directory=logs,
        )

    def reference(self, state: TrainState) -> nnx.State | None:
        """The frozen start policy, or the base of adapters, for the KL term; None without such a term."""
        return self.programs.reference(state) if self.algorithm.needs_reference else None

    def calibrated(self, state: TrainState, programs: PolicyPrograms | None = None) -> TrainState:
        """The state with scales of keys and values from a forward over the first step's prompts.

        programs: those of the state; None takes `programs`.
        """
        if state.kv is None:
            return state
        first = PromptStream(
            self.task,
            self.policy.tokenizer,
            max_prompt_tokens=self.config.rollout.max_prompt_tokens,
            seed=self.config.seed,
        ).take(self.config.rollout.prompts_per_step)
        rows = self.config.microbatch_tokens // self.config.row_tokens
        batches = padded_rows([prompt.ids for prompt in first], rows, self.config.rollout.max_prompt_tokens)
        return (programs or self.programs).calibrate(state, batches)

    def new_step(
        self,
        engine: RolloutEngine,
        rewards: RewardFunctions,
        state: TrainState,
        reference: nnx.State | None,
        **others: Any,
    ) -> RLStep:
        """An `RLStep` that starts from `state`; loads its weights into the engine.  `others`: as `RLStep`."""
        collector = Collector(
            config=self.config,
            algorithm=self.algorithm,
            engine=engine,
            rewards=rewards,
            tokenizer=self.policy.tokenizer,
            prompts=self.prompts,
            console=self.console,
            player=self.player,
        )
        step = RLStep(
            config=self.config,
            algorithm=self.algorithm,
            programs=self.programs,
            engine=engine,
            collector=collector,
            console=self.console,
            state=state,
            reference=reference,
            **others,
        )
        engine.load(state.published, step.counters.policy_version)
        if step.drafter is not None:
            engine.load_draft(step.drafter.head)
        return step

    def record(self) -> dict[str, Any]:
        """The resolved choices of a run, for its record."""
        return {
            "algorithm": self.algorithm.record(),
            "engine": self.config.rollout.engine.kind,
            "eval_verifier": self.eval_verifier,
            "sharding": None if self.layout is None else self.layout.record(),
            "processes": processes.count(),
            **self.policy.model.numerics.choices.record(),
            "task_notes": [*getattr(self.task, "notes", ()), *(self.player.notes if self.player else ())],
            "tokenizer": self.policy.tokenizer.fingerprint(),
        }
