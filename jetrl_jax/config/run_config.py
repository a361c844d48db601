"""The configuration of a run: every field, its meaning, unit and default, in one typed schema.

    RunConfig
      model  tokenizer  precision  numerics     the policy and its arithmetic
      sharding  distributed                     the devices and the processes that hold them
      task  rewards  rollout                    what is generated, by which engine
      algorithm  correction                     what is learned from it
      optimizer  lora  batch  warm_start        how the weights move
      eval  checkpoint  run                     what is measured, kept and written

A section of several kinds has a class for each kind, with its own fields and defaults; its field `kind` (or
`name`, `preset`, `mode`) selects the class.  pydantic checks types and ranges.  `jetrl_jax.config.load` reads
YAML and ``--set``, checks the rules between fields and reports all mistakes in one message.  Only
`jetrl_jax.config.arithmetic` imports jax, so mistakes are found before a device is initialised.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from jetrl_jax.config.devices import DistributedSection, ShardingSection
from jetrl_jax.config.learning import (
    AlgorithmSection,
    BatchSection,
    CorrectionSection,
    DecoupledSection,
    GrpoSection,
    LoraSection,
    OptimizerSection,
    WarmStartSection,
)
from jetrl_jax.config.model import (
    CharacterSection,
    ModelSection,
    NewModelSection,
    SavedModelSection,
    TokenizerSection,
)
from jetrl_jax.config.precision import Fp8UnifiedSection, NumericsSection, PrecisionSection
from jetrl_jax.config.record import CheckpointSection, EvalSection, RunSection
from jetrl_jax.config.rollout import HeadSection, RolloutSection, StartedVllmSection, VllmSection
from jetrl_jax.config.task import (
    ArithmeticSection,
    EnvironmentSection,
    RewardSection,
    TaskSection,
    rewarded_verifier,
)
from jetrl_jax.config.types import NonNegativeInt, Section, option, value_at


class RunConfig(Section):
    """The whole config of a run."""

    seed: NonNegativeInt = option(0, "Seed of initialisation, data order and sampling.")
    model: ModelSection = option(NewModelSection(), "The policy: a checkpoint, or the sizes of a new model.")
    tokenizer: TokenizerSection = option(CharacterSection(), "How text becomes token ids.")
    precision: PrecisionSection = option(Fp8UnifiedSection(), "Which matrix product runs in which format.")
    numerics: NumericsSection = NumericsSection()
    sharding: ShardingSection = ShardingSection()
    distributed: DistributedSection = DistributedSection()
    task: TaskSection = option(ArithmeticSection(), "Where prompts, answers and worked solutions come from.")
    rewards: Annotated[tuple[RewardSection, ...], Field(min_length=1)] = option(
        (RewardSection(),), "Reward functions, summed by weight."
    )
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = option(GrpoSection(), "Advantage, loss and the rules around them.")
    correction: CorrectionSection = option(
        DecoupledSection(), "What is done about tokens whose rollout and trainer logprobs differ."
    )
    optimizer: OptimizerSection = OptimizerSection()
    lora: LoraSection | None = option(None, "Adapters, beside which all weights are frozen; null: none.")
    batch: BatchSection = BatchSection()
    warm_start: WarmStartSection | None = option(None, "Supervised steps on solutions before RL; null: none.")
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    run: RunSection = RunSection()

    @property
    def model_path(self) -> str | None:
        """The checkpoint that the policy starts from; None for a new model."""
        return self.model.path if isinstance(self.model, SavedModelSection) else None

    @property
    def environment(self) -> EnvironmentSection | None:
        """The section of the environment in which episodes are played; None if there is none."""
        return self.task if isinstance(self.task, EnvironmentSection) else None

    @property
    def samples_by_vllm(self) -> bool:
        """Whether vLLM is the rollout engine."""
        return isinstance(self.rollout.engine, VllmSection)

    @property
    def shared_vllm(self) -> StartedVllmSection | None:
        """The section of the vLLM that is started on the trainer's device; None if there is none."""
        engine = self.rollout.engine
        return engine if isinstance(engine, StartedVllmSection) else None

    @property
    def draft_head(self) -> HeadSection | None:
        """The section of the draft head that is trained beside the policy; None if there is none."""
        if self.shared_vllm is not None:
            return self.shared_vllm.trained_draft
        speculation = getattr(self.rollout.engine, "speculation", None)
        return speculation if isinstance(speculation, HeadSection) else None

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence of the run, prompt and completion, in tokens."""
        return self.rollout.longest_tokens

    @property
    def row_tokens(self) -> int:
        """Length of a packed training row, in tokens."""
        return self.batch.row_tokens or self.max_sequence_tokens

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of one forward and backward pass over all devices: the same number of whole rows on each."""
        return self.batch.microbatch_tokens // self.row_tokens * self.row_tokens * self.sharding.row_shards

    @property
    def total_updates(self) -> int:
        """Optimiser steps of the run."""
        return self.run.steps * self.algorithm.epochs * self.algorithm.minibatches

    @property
    def eval_verifier(self) -> str:
        """The verifier of held-out completions: `eval.verifier`, or that of the rewards if it is null."""
        return self.eval.verifier or rewarded_verifier(
            (reward.name, reward.weight) for reward in self.rewards
        )

    def resolved_nulls(self) -> dict[str, Any]:
        """Dotted path -> value, for every null field that stands for a value."""
        overlong = self.algorithm.overlong_tokens(self.rollout.max_completion_tokens)
        resolved = {
            "algorithm.overlong_buffer_tokens": overlong,
            "batch.row_tokens": self.row_tokens,
            "eval.verifier": self.eval_verifier,
        }
        return {path: value for path, value in resolved.items() if value_at(self, path) is None}
