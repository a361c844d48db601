"""The configuration of a run: every field, its meaning, unit and default, in one typed schema.

    RunConfig
      model  tokenizer  precision  loss_scale  numerics     the policy and its arithmetic
      sharding  distributed                                 the devices and the processes that hold them
      task  rewards  rollout  vllm                          what is generated, by which engine
      algorithm  correction                                 what is learned from it
      optimizer  batch  warm_start                          how the weights move
      eval  checkpoint  run                                 what is measured, kept and written

Types and ranges are stated by the fields and checked by pydantic: unknown keys are forbidden and nothing is
converted silently.  What one field demands of another, and which fields have no effect together, is
the table of `jetrl_jax.config.rules.tables`.  Reading YAML and ``--set``, and turning every mistake into one
message, is `jetrl_jax.config.load`.  None of these modules imports jax: a mistake costs no device.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from jetrl_jax.config.devices import DistributedSection, ShardingSection
from jetrl_jax.config.learning import AlgorithmSection, BatchSection, CorrectionSection, OptimizerSection, WarmStartSection
from jetrl_jax.config.model import ModelSection, TokenizerSection
from jetrl_jax.config.precision import LossScaleSection, NumericsSection, PrecisionSection
from jetrl_jax.config.record import CheckpointSection, EvalSection, RunSection
from jetrl_jax.config.rollout import RolloutSection, VllmSection
from jetrl_jax.config.rules.tables import find_problems, rewarded_verifier
from jetrl_jax.config.task import RewardSection, TaskSection
from jetrl_jax.config.types import NonNegativeInt, Section, value_at


class RunConfig(Section):
    """The whole config of a run."""

    seed: NonNegativeInt = Field(0, description="Seed of initialisation, data order and sampling.")
    model: ModelSection = Field(
        default_factory=ModelSection, description="The policy: a checkpoint to start from, or the sizes of a new model."
    )
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection, description="How text becomes token ids.")
    precision: PrecisionSection = Field(default_factory=PrecisionSection, description="Which matrix multiplication runs in which format.")
    loss_scale: LossScaleSection = Field(default_factory=LossScaleSection, description="Dynamic loss scaling of the FP16 flow.")
    numerics: NumericsSection = Field(default_factory=NumericsSection, description="Rounding points and exactness of the forward pass.")
    sharding: ShardingSection = Field(default_factory=ShardingSection, description="The mesh of devices of a run.")
    distributed: DistributedSection = Field(
        default_factory=DistributedSection, description="The processes that a run is shared by; see docs/scaling.md."
    )
    task: TaskSection = Field(default_factory=TaskSection, description="Where prompts, answers and worked solutions come from.")
    rewards: tuple[RewardSection, ...] = Field((RewardSection(),), min_length=1, description="Reward functions, summed by weight.")
    rollout: RolloutSection = Field(default_factory=RolloutSection, description="What is generated in a step and how.")
    vllm: VllmSection = Field(default_factory=VllmSection, description="vLLM as rollout engine.")
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection, description="Advantage, loss and the rules around them.")
    correction: CorrectionSection = Field(
        default_factory=CorrectionSection, description="What is done about tokens whose rollout and trainer logprobs differ."
    )
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="AdamW of the RL phase.")
    batch: BatchSection = Field(default_factory=BatchSection, description="Shapes of the training batch.")
    warm_start: WarmStartSection = Field(default_factory=WarmStartSection, description="Supervised steps before RL.")
    eval: EvalSection = Field(default_factory=EvalSection, description="Held-out evaluation.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="What is kept for resuming.")
    run: RunSection = Field(default_factory=RunSection, description="Where a run writes and how long it goes.")

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence of the run, prompt and completion, in tokens."""
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def row_tokens(self) -> int:
        """Length of a packed training row, in tokens."""
        return self.batch.row_tokens or self.max_sequence_tokens

    @property
    def microbatch_tokens(self) -> int:
        """Size of one forward and backward pass over all devices, in tokens: whole rows, equally many on each."""
        return self.batch.microbatch_tokens // self.row_tokens * self.row_tokens * self.sharding.row_shards

    @property
    def total_updates(self) -> int:
        """Optimiser steps of the run."""
        return self.run.steps * self.algorithm.epochs * self.algorithm.minibatches

    @property
    def eval_verifier(self) -> str:
        """What judges held-out completions: `eval.verifier`, where it is null what the rewards say."""
        return self.eval.verifier or rewarded_verifier((reward.name, reward.weight) for reward in self.rewards)

    @property
    def dynamic_sampling(self) -> bool:
        """Whether groups with equal rewards are replaced by new ones."""
        return bool(self.algorithm.resolved("dynamic_sampling", self.rollout.max_completion_tokens))

    def resolved_nulls(self) -> dict[str, Any]:
        """What a null stands for, by dotted path, for every field that is null and stands for a value."""
        names = ("loss_aggregation", "clip_low", "clip_high", "dynamic_sampling", "overlong_buffer_tokens")
        resolved = {f"algorithm.{name}": self.algorithm.resolved(name, self.rollout.max_completion_tokens) for name in names}
        resolved |= {"correction.reject_high": self.correction.resolved_reject_high, "batch.row_tokens": self.row_tokens}
        resolved["eval.verifier"] = self.eval_verifier
        return {path: value for path, value in resolved.items() if value_at(self, path) is None}

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        problems = find_problems(self)
        if problems:
            report = "; ".join(f"{problem.path}: {problem.what}: got {problem.got}, expected {problem.expected}" for problem in problems)
            raise PydanticCustomError("config_rules", "{report}", {"report": report, "problems": problems})
        return self
