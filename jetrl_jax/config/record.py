"""The config sections of what a run measures, keeps and writes; imports no jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jetrl_jax.config.types import NonNegativeInt, PositiveInt, Rule, Section, Text, UserPath, option


class EvalSection(Section):
    """Held-out evaluation."""

    every_steps: NonNegativeInt = option(0, "RL steps between evaluations; 0: only before and after.")
    prompts: PositiveInt = option(512, "Number of held-out prompts of one evaluation.")
    samples: PositiveInt = option(4, "Completions of one prompt at the rollout temperature (k of pass@k).")
    verifier: Literal["task", "exact_match", "gsm8k", "boxed", "last_number", "math_verify"] | None = option(
        None,
        "What judges held-out completions; null: the verifier that rewards name (task if it is one of them "
        "or none is), so that accuracy and --step best measure what is trained.",
    )


class CheckpointSection(Section):
    """What is kept for resuming."""

    every_steps: PositiveInt = option(20, "RL steps between checkpoints; the last step always has one.")
    keep_last: PositiveInt = option(2, "Number of most recent checkpoints kept.")
    keep_best: NonNegativeInt = option(1, "Number of best checkpoints, by mean reward, kept besides.")


class RunSection(Section):
    """Where a run writes and how long it goes."""

    directory: UserPath = option("runs/run", "Directory that the run writes to.")
    steps: PositiveInt = option(100, "Number of RL steps.")
    samples_per_step: NonNegativeInt = option(4, "Completions written to samples.jsonl each step.")
    max_skipped_steps: PositiveInt = option(
        5, "Updates in a row, not finite or with nothing to train on, after which the run stops."
    )
    max_steps_without_signal: NonNegativeInt = option(
        0, "Steps in a row, in each group all rewards equal, after which the run stops; 0: a warning."
    )
    tensorboard: bool = option(True, "Whether TensorBoard events are written.")
    wandb_project: Text | None = option(None, "Weights & Biases project, which never stops a run; null: off.")
    profile_steps: NonNegativeInt = option(
        0, "Steps traced by jax.profiler from the third on; --profile sets 3."
    )

    def _rules(self) -> Iterator[Rule]:
        if self.steps < 3:
            yield from self.idle("the trace begins at the third step, after run.steps", "profile_steps")
