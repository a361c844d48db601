"""The config sections of prompts, answers and rewards; imports no jax."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jetrl_jax.config.types import Options, PositiveFloat, Section, Text


class TaskSection(Section):
    """Where prompts, answers and worked solutions come from."""

    kind: Literal["arithmetic", "reasoning_gym", "jsonl", "parquet", "datasets", "gsm8k", "function"] = Field(
        "arithmetic",
        description="Kind of task: arithmetic and reasoning_gym are made, jsonl, parquet, datasets and gsm8k read; function is yours.",
    )
    name: Text | None = Field(
        None,
        description="arithmetic: sum, chain, reverse or sort, null takes sum; reasoning_gym: dataset name; datasets: path or hub name; "
        "function: module:function.",
    )
    path: Text | None = Field(
        None,
        description="jsonl and parquet: the training file (JSONL plain, .gz or .zst); gsm8k: its directory, null takes $GSM8K_DIR or "
        "the one beside the checkout.",
    )
    eval_path: Text | None = Field(None, description="jsonl and parquet: the held-out file; null holds out eval_fraction of path.")
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="Share of the items held out where no eval file or split is given."
    )
    prompt_field: Text = Field("prompt", description="Field of the prompt in a file or dataset.")
    answer_field: Text = Field("answer", description="Field of the answer in a file or dataset.")
    prompt_template: Text = Field("{prompt}", description="How a prompt is written; {prompt} stands for the task's text.")
    options: Options = Field(
        {}, description="Options of the task, by kind; an unknown one is an error that lists them. function: its keyword arguments."
    )


class RewardSection(Section):
    """One reward function."""

    name: Text = Field(
        "task", description="task: the task's own verifier; exact_match, gsm8k, boxed, last_number, math_verify; or module:function."
    )
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    timeout_s: PositiveFloat = Field(10.0, description="Time after which a call counts as failed and its sample is masked, in seconds.")
    separate_process: bool = Field(False, description="Whether it runs in worker processes; module:function always does.")
