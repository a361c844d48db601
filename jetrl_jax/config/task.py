"""The config sections of prompts, answers and rewards; imports no jax."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field

from jetrl_jax.config.types import (
    Options,
    PositiveFloat,
    PositiveInt,
    Rule,
    Section,
    Text,
    UserPath,
    must,
    option,
)

UNTIMED_REWARDS = ("exact_match", "gsm8k", "boxed", "last_number")  # cheap and safe: in the trainer's process
BUILTIN_REWARDS = ("task", "math_verify", *UNTIMED_REWARDS)
_DOTTED_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_FUNCTION = re.compile(f"{_DOTTED_NAME}:{_DOTTED_NAME}")
_FUNCTION_FORM = "module:function of an installed package or of the current directory, such as rewards:short"

_NO_PLACE = "the prompt has no place in the template"
Template = Annotated[Text, must(lambda text: "{prompt}" in text, _NO_PLACE, "text with {prompt} in it")]
Share = Annotated[float, Field(gt=0, lt=1)]
_NO_OBSERVATION = "the observation has no place in the template"
ObservationTemplate = Annotated[
    Text, must(lambda text: "{observation}" in text, _NO_OBSERVATION, "text with {observation} in it")
]
FunctionName = Annotated[Text, must(_FUNCTION.fullmatch, "no Python function", _FUNCTION_FORM)]
_REWARDS = f"one of {', '.join(BUILTIN_REWARDS)}, or {_FUNCTION_FORM}"


def _is_reward(name: str) -> bool:
    return name in BUILTIN_REWARDS or _FUNCTION.fullmatch(name) is not None


BUILTIN_ENVIRONMENTS = {
    "guess_number": "jetrl_jax.tasks.environments.guess_number:GuessNumber",
    "calculator": "jetrl_jax.tasks.environments.calculator:Calculator",
    "reasoning_gym": "jetrl_jax.tasks.environments.retries:Retries",
}
_ENVIRONMENTS = f"one of {', '.join(BUILTIN_ENVIRONMENTS)}, or {_FUNCTION_FORM}"


def _is_environment(name: str) -> bool:
    return name in BUILTIN_ENVIRONMENTS or _FUNCTION.fullmatch(name) is not None


EnvironmentName = Annotated[Text, must(_is_environment, "unknown environment", _ENVIRONMENTS)]
RewardName = Annotated[Text, must(_is_reward, "unknown reward", _REWARDS)]


class _Task(Section):
    kind: str
    prompt_template: Template = option("{prompt}", "How a prompt is written; {prompt} is the task's text.")
    options: Options = option({}, "Options of the task, by kind; of a function its keyword arguments.")


class _SplitTask(_Task):
    eval_fraction: Share = option(0.1, "Share of the items held out where no eval file or split is given.")


class ArithmeticSection(_SplitTask):
    """Built-in problems."""

    kind: Literal["arithmetic"] = option(
        "arithmetic",
        "Kind of task: arithmetic and reasoning_gym are made, jsonl, parquet, datasets and gsm8k read; "
        "function is yours; environment has episodes of several turns.",
    )
    name: Literal["sum", "chain", "reverse", "sort", "repeat"] = option("sum", "Family of problems.")


class ReasoningGymSection(_Task):
    """Any dataset of reasoning-gym."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: Text = Field(description="Name of a reasoning-gym dataset, such as basic_arithmetic.")


class RowsSection(_SplitTask):
    """Rows with a prompt and an answer."""

    prompt_field: Text = option("prompt", "Field of the prompt in a row.")
    answer_field: Text = option("answer", "Field of the answer in a row.")


class FileSection(RowsSection):
    """A file of rows: JSONL (plain, .gz or .zst) or Parquet."""

    kind: Literal["jsonl", "parquet"] = "jsonl"
    path: UserPath = Field(description="Path of the training file.")
    eval_path: UserPath | None = option(None, "The held-out file; null holds out eval_fraction of path.")

    def _rules(self) -> Iterator[Rule]:
        if self.eval_path is not None:
            yield from self.idle("task.eval_path gives the held-out items", "eval_fraction")


class DatasetsSection(RowsSection):
    """A Hugging Face dataset."""

    kind: Literal["datasets"] = "datasets"
    name: Text = Field(description="A hub name or a local directory.")

    def _rules(self) -> Iterator[Rule]:
        if "eval_split" in self.options:
            yield from self.idle("task.options.eval_split gives the held-out items", "eval_fraction")


class Gsm8kSection(_Task):
    """Grade school word problems."""

    kind: Literal["gsm8k"] = "gsm8k"
    path: UserPath | None = option(None, "A directory; null takes $GSM8K_DIR or the one beside the checkout.")


class FunctionSection(RowsSection):
    """A function of yours that returns a task or rows."""

    kind: Literal["function"] = "function"
    name: FunctionName = Field(description="The function, as module:function.")


class EnvironmentSection(_Task):
    """An environment that answers the policy's turns."""

    kind: Literal["environment"] = "environment"
    name: EnvironmentName = Field(
        description="The environment: guess_number, calculator, or yours as module:Class; task.options are "
        "its keyword arguments."
    )
    max_turns: PositiveInt = option(8, "Most turns of the policy in one episode.")
    max_observation_tokens: PositiveInt = option(
        256, "Longest observation, in tokens; the middle of a longer one is left out."
    )
    stop_texts: tuple[Text, ...] = option(
        (), "Texts of one token each that end a turn, beside the tokenizer's stop tokens."
    )
    observation_template: ObservationTemplate = option(
        "{observation}", "How an observation is written; a chat template writes it itself."
    )
    timeout_s: PositiveFloat = option(10.0, "Time for one reset or step of the environment, in seconds.")
    workers: PositiveInt = option(2, "Number of worker processes that hold the environments.")
    solved: float = option(1.0, "Least sum of an episode's rewards that counts as solved in an evaluation.")
    train_size: PositiveInt = option(131072, "Number of different episodes to train on.")
    eval_size: PositiveInt = option(512, "Number of held-out episodes, which no run trains on.")


TaskSection = Annotated[
    ArithmeticSection
    | ReasoningGymSection
    | FileSection
    | DatasetsSection
    | Gsm8kSection
    | FunctionSection
    | EnvironmentSection,
    Field(discriminator="kind"),
]


class RewardSection(Section):
    """One reward function."""

    name: RewardName = option(
        "task",
        "task: its own verifier; exact_match, gsm8k, boxed, last_number, math_verify; or module:function.",
    )
    weight: float = option(1.0, "Factor of this reward in the sum.")
    timeout_s: PositiveFloat = option(10.0, "Time until a sample counts as failed and is masked, in seconds.")
    separate_process: bool = option(False, "Whether it runs in worker processes, as module:function does.")


def rewarded_verifier(rewards: Iterable[tuple[str, float]]) -> str:
    """The verifier among rewards (name, weight): task if one is or none is, else the first of weight > 0."""
    named = [name for name, weight in rewards if weight > 0 and name in BUILTIN_REWARDS]
    return named[0] if named and "task" not in named else "task"
