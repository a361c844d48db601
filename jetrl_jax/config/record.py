"""The config sections of what a run measures, keeps and writes; imports no jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from jetrl_jax.config.rule import Rule
from jetrl_jax.config.types import NonNegativeInt, PositiveInt, Section, Text, UserPath


class EvalSection(Section):
    """Held-out evaluation."""

    every_steps: NonNegativeInt = Field(
        0, description="RL steps between evaluations during training; 0: only before and after."
    )
    prompts: PositiveInt = Field(512, description="Number of held-out prompts of one evaluation.")
    samples: PositiveInt = Field(
        4, description="Completions of one prompt at the rollout temperature (k of pass@k)."
    )
    verifier: Literal["task", "exact_match", "gsm8k", "boxed", "last_number", "math_verify"] | None = Field(
        None,
        description="What says whether a held-out completion is right; null: the verifier that rewards "
        "name (task, where it is among "
        "them or none is), so that accuracy and --step best measure what is trained.",
    )


class CheckpointSection(Section):
    """What is kept for resuming."""

    every_steps: PositiveInt = Field(
        20, description="RL steps between checkpoints; the last step always has one."
    )
    keep_last: PositiveInt = Field(2, description="Number of most recent checkpoints kept.")
    keep_best: NonNegativeInt = Field(
        1, description="Number of best checkpoints, by mean reward, kept besides."
    )


class RunSection(Section):
    """Where a run writes and how long it goes."""

    directory: UserPath = Field("runs/run", description="Directory that the run writes to.")
    steps: PositiveInt = Field(100, description="Number of RL steps.")
    samples_per_step: NonNegativeInt = Field(4, description="Completions written to samples.jsonl each step.")
    max_skipped_steps: PositiveInt = Field(
        5,
        description="Updates in a row that are not finite, or have nothing to train on, after which "
        "the run stops with an error.",
    )
    max_steps_without_signal: NonNegativeInt = Field(
        0,
        description="Steps in a row in which all rewards of each group are equal, after which the run "
        "stops with an error; 0: a warning.",
    )
    tensorboard: bool = Field(True, description="Whether TensorBoard events are written.")
    wandb_project: Text | None = Field(
        None, description="Weights & Biases project; null: off. Its failures never stop a run."
    )
    profile_steps: NonNegativeInt = Field(
        0, description="RL steps traced by jax.profiler, from the third on; 0 is off, --profile sets 3."
    )

    def _rules(self) -> Iterator[Rule]:
        if self.steps < 3:
            yield from self.idle("the trace begins at the third step of the run", "profile_steps")
