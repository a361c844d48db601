"""The config sections of prompts, answers and rewards; imports no jax."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field

from jetrl_jax.config.rule import Rule
from jetrl_jax.config.types import Options, PositiveFloat, Section, Text, UserPath

# cheap and safe: they run in the trainer's process
UNTIMED_REWARDS = ("exact_match", "gsm8k", "boxed", "last_number")
BUILTIN_REWARDS = ("task", "math_verify", *UNTIMED_REWARDS)
_DOTTED_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
FUNCTION = re.compile(f"{_DOTTED_NAME}:{_DOTTED_NAME}")
FUNCTION_FORM = "module:function, such as my_package.rewards:short_answer"


class _Task(Section):
    kind: str = Field(
        description="Kind of task: arithmetic and reasoning_gym are made, jsonl, parquet, datasets and "
        "gsm8k read; function is yours."
    )
    prompt_template: Text = Field(
        "{prompt}", description="How a prompt is written; {prompt} stands for the task's text."
    )
    options: Options = Field(
        {},
        description="Options of the task, by kind; an unknown one is an error that lists them. "
        "function: its keyword arguments.",
    )

    def _rules(self) -> Iterator[Rule]:
        holds = "{prompt}" in self.prompt_template
        yield Rule(
            holds, "prompt_template", "the prompt has no place in the template", "text with {prompt} in it"
        )


class _SplitTask(_Task):
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="Share of the items held out where no eval file or split is given."
    )


class ArithmeticSection(_SplitTask):
    """Built-in problems."""

    kind: Literal["arithmetic"] = "arithmetic"
    name: Literal["sum", "chain", "reverse", "sort"] = Field("sum", description="Family of problems.")


class ReasoningGymSection(_Task):
    """Any dataset of reasoning-gym."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: Text = Field(description="Name of a reasoning-gym dataset, such as basic_arithmetic.")


class RowsSection(_SplitTask):
    """Rows with a prompt and an answer."""

    prompt_field: Text = Field("prompt", description="Field of the prompt in a row.")
    answer_field: Text = Field("answer", description="Field of the answer in a row.")


class FileSection(RowsSection):
    """A file of rows: JSONL (plain, .gz or .zst) or Parquet."""

    kind: Literal["jsonl", "parquet"] = "jsonl"
    path: UserPath = Field(description="Path of the training file.")
    eval_path: UserPath | None = Field(
        None, description="The held-out file; null holds out eval_fraction of path."
    )

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        if self.eval_path is not None:
            yield from self.idle("task.eval_path gives the held-out items", "eval_fraction")


class DatasetsSection(RowsSection):
    """A Hugging Face dataset."""

    kind: Literal["datasets"] = "datasets"
    name: Text = Field(description="A hub name or a local directory.")

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        if "eval_split" in self.options:
            yield from self.idle("task.options.eval_split gives the held-out items", "eval_fraction")


class Gsm8kSection(_Task):
    """Grade school word problems."""

    kind: Literal["gsm8k"] = "gsm8k"
    path: UserPath | None = Field(
        None, description="Directory of the files; null takes $GSM8K_DIR or the one beside the checkout."
    )


class FunctionSection(RowsSection):
    """A function of yours that returns a task or rows."""

    kind: Literal["function"] = "function"
    name: Text = Field(description="The function, as module:function.")

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        hint = "the module is imported from the current directory or from the installed packages"
        yield Rule(
            FUNCTION.fullmatch(self.name) is not None, "name", "no Python function", FUNCTION_FORM, hint
        )


TaskSection = Annotated[
    ArithmeticSection | ReasoningGymSection | FileSection | DatasetsSection | Gsm8kSection | FunctionSection,
    Field(discriminator="kind"),
]


class RewardSection(Section):
    """One reward function."""

    name: Text = Field(
        "task",
        description="task: the task's own verifier; exact_match, gsm8k, boxed, last_number, "
        "math_verify; or module:function.",
    )
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    timeout_s: PositiveFloat = Field(
        10.0, description="Time after which a call counts as failed and its sample is masked, in seconds."
    )
    separate_process: bool = Field(
        False, description="Whether it runs in worker processes; module:function always does."
    )

    def _rules(self) -> Iterator[Rule]:
        known = self.name in BUILTIN_REWARDS or FUNCTION.fullmatch(self.name) is not None
        yield Rule(
            known, "name", "unknown reward", f"one of {', '.join(BUILTIN_REWARDS)}, or {FUNCTION_FORM}"
        )


def rewarded_verifier(rewards: Iterable[tuple[str, float]]) -> str:
    """The verifier among rewards, given by name and weight: task where it is one or none is,
    else the first of positive weight.
    """
    named = [name for name, weight in rewards if weight > 0 and name in BUILTIN_REWARDS]
    return named[0] if named and "task" not in named else "task"
