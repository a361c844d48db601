"""What one field of the config demands of another, as two tables.

`RULES` are sizes and choices that must fit together.  `NO_EFFECT` are fields that do nothing under
certain switches: setting one of them then is an error, since its author believes in an effect that does not
exist.  A new rule is one entry.  `find_problems` reads both tables and the few rules that run over a list.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from jetrl_jax.config.rules.devices import DISTRIBUTED_NO_EFFECT, DISTRIBUTED_RULES, SHARDING_RULES, any_fp8
from jetrl_jax.config.rules.types import NoEffect, Problem, Rule
from jetrl_jax.config.rules.vllm import VLLM_NO_EFFECT, VLLM_RULES
from jetrl_jax.config.types import TEMPERATURES, show, value_at

if TYPE_CHECKING:
    from jetrl_jax.config.run_config import RunConfig

ARITHMETIC_FAMILIES = ("sum", "chain", "reverse", "sort")
UNTIMED_REWARDS = ("exact_match", "gsm8k", "boxed", "last_number")  # cheap and safe: they run in the trainer's process
BUILTIN_REWARDS = ("task", "math_verify", *UNTIMED_REWARDS)
_DOTTED_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
FUNCTION = re.compile(f"{_DOTTED_NAME}:{_DOTTED_NAME}")
FUNCTION_FORM = "module:function, such as my_package.rewards:short_answer"


def _tokens(config: RunConfig) -> int:
    return config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens


def _home_rule(path: str) -> Rule:
    def known(config: RunConfig) -> bool:
        value = value_at(config, path)
        return value is None or not os.path.expanduser(value).startswith("~")

    return Rule((path,), known, "there is no such home directory", lambda c: "~ or the name of a user after it")


def _fp8_wgrad(config: RunConfig) -> bool:
    return config.precision.preset in ("bf16", "fp8_unified") and any_fp8(config)


_LENGTHS = ("rollout.max_prompt_tokens", "rollout.max_completion_tokens")
_SUM = "rollout.max_prompt_tokens + rollout.max_completion_tokens"

RULES: tuple[Rule, ...] = (
    *VLLM_RULES,
    *SHARDING_RULES,
    *DISTRIBUTED_RULES,
    Rule(
        ("numerics.kernels", "numerics.exact"),
        lambda c: not (c.numerics.exact and c.numerics.kernels == "xla_fast"),
        "bits of xla_fast depend on the number of rows",
        lambda c: "auto, xla or a mosaic kernel, or numerics.exact: false",
    ),
    Rule(
        ("numerics.attention", "numerics.exact"),
        lambda c: not (c.numerics.exact and c.numerics.attention == "cudnn"),
        "bits of cuDNN's attention depend on shapes",
        lambda c: "auto or xla, or numerics.exact: false",
    ),
    Rule(
        ("numerics.attention", "precision.preset"),
        lambda c: not (c.precision.preset == "fp32" and c.numerics.attention == "cudnn"),
        "cuDNN's attention takes BF16 and FP16 alone",
        lambda c: "auto or xla, or another preset than fp32",
    ),
    Rule(
        ("model.num_kv_heads", "model.num_heads", "model.path"),
        lambda c: c.model.path is not None or c.model.num_heads % c.model.num_kv_heads == 0,
        "query heads cannot be shared evenly among key/value heads",
        lambda c: f"a divisor of model.num_heads = {c.model.num_heads}",
    ),
    Rule(
        ("model.head_dim", "model.path"),
        lambda c: c.model.path is not None or c.model.head_dim % 2 == 0,
        "a head of odd width",
        lambda c: "an even number",
        "RoPE turns pairs of channels",
    ),
    Rule(
        ("model.hidden_size", "model.num_heads", "model.architecture", "model.path"),
        lambda c: c.model.path is not None or c.model.architecture != "llama" or c.model.hidden_size % c.model.num_heads == 0,
        "the width of a llama model is not shared evenly among its heads",
        lambda c: f"a multiple of model.num_heads = {c.model.num_heads}",
    ),
    Rule(
        ("model.max_position_embeddings", *_LENGTHS, "model.path"),
        lambda c: c.model.path is not None or _tokens(c) <= c.model.max_position_embeddings,
        "the model is too short for the sequences of the run",
        lambda c: f"at least {_SUM} = {_tokens(c)}",
    ),
    Rule(
        ("rollout.temperature",),
        lambda c: TEMPERATURES[0] <= c.rollout.temperature <= TEMPERATURES[1],
        "FP32 cannot sample at such a temperature",
        lambda c: "a number from {} to {}".format(*map(show, TEMPERATURES)),
        "below, the roundoff of the logits decides; greedy decoding is measured by every evaluation, and generate has --temperature 0",
    ),
    Rule(
        ("rollout.top_p",),
        lambda c: c.rollout.top_p == 1.0,
        "training rollouts cannot be truncated",
        lambda c: "1",
        "a truncated distribution is not the policy that is trained; remove the line",
    ),
    Rule(
        ("rollout.top_k",),
        lambda c: c.rollout.top_k == 0,
        "training rollouts cannot be truncated",
        lambda c: "0 (off)",
        "a truncated distribution is not the policy that is trained; remove the line",
    ),
    Rule(
        ("batch.row_tokens", *_LENGTHS),
        lambda c: c.row_tokens >= _tokens(c),
        "a packed row is shorter than the longest sequence",
        lambda c: f"at least {_SUM} = {_tokens(c)}, or null for exactly that",
    ),
    Rule(
        ("batch.microbatch_tokens", "batch.row_tokens", *_LENGTHS),
        lambda c: c.batch.microbatch_tokens >= c.row_tokens,
        "a microbatch does not hold one row",
        lambda c: f"at least the length of a row, {c.row_tokens} tokens",
        "a row is batch.row_tokens long; where that is null, as long as the longest prompt plus the longest completion",
    ),
    Rule(
        ("precision.overrides", "precision.preset"),
        lambda c: c.precision.preset not in ("fp32", "fp16") or not c.precision.overrides,
        "fp32 and fp16 take no exceptions",
        lambda c: "no overrides, or another preset",
        "FP8 operands are quantised from BF16, which these presets do not have",
    ),
    Rule(
        ("optimizer.warmup_steps", "run.steps", "algorithm.epochs", "algorithm.minibatches"),
        lambda c: c.optimizer.warmup_steps < c.total_updates,
        "the warm-up lasts as long as the run: the learning rate never reaches optimizer.learning_rate",
        lambda c: f"less than run.steps * algorithm.epochs * algorithm.minibatches = {c.total_updates}",
    ),
    Rule(
        ("algorithm.minibatches", "rollout.prompts_per_step"),
        lambda c: c.algorithm.minibatches <= c.rollout.prompts_per_step,
        "more minibatches than prompts",
        lambda c: f"at most rollout.prompts_per_step = {c.rollout.prompts_per_step}",
    ),
    Rule(
        ("algorithm.overlong_buffer_tokens", "rollout.max_completion_tokens"),
        lambda c: (c.algorithm.overlong_buffer_tokens or 0) <= c.rollout.max_completion_tokens,
        "the soft penalty zone is longer than a completion",
        lambda c: f"at most rollout.max_completion_tokens = {c.rollout.max_completion_tokens}",
    ),
    Rule(
        ("correction.mode", "correction.weight", "correction.reject", "correction.veto"),
        lambda c: c.correction.mode != "bypass" or not c.correction.recomputes,
        "bypass recomputes no log-probabilities, so nothing can be weighted or rejected by them",
        lambda c: "decoupled, or no weight, reject and veto",
    ),
    Rule(
        ("correction.low", "correction.high", "correction.weight"),
        lambda c: not c.correction.weight.endswith("mask") or c.correction.low <= c.correction.high,
        "no ratio lies between the bounds of the mask",
        lambda c: f"at most correction.high = {show(c.correction.high)}",
    ),
    Rule(
        ("correction.reject_low", "correction.reject_high", "correction.reject"),
        lambda c: c.correction.reject != "k1" or c.correction.reject_low <= c.correction.resolved_reject_high,
        "no ratio lies between the bounds of the rejection",
        lambda c: f"at most correction.reject_high = {show(c.correction.resolved_reject_high)}",
    ),
    *(_home_rule(path) for path in ("model.path", "tokenizer.path", "task.path", "task.eval_path", "run.directory")),
    Rule(
        ("tokenizer.path", "tokenizer.kind", "model.path"),
        lambda c: c.tokenizer.kind != "huggingface" or c.tokenizer.path is not None or c.model.path is not None,
        "tokenizer.kind: huggingface needs files",
        lambda c: "a directory or a tokenizer.json, here or by model.path",
    ),
    Rule(
        ("tokenizer.characters", "tokenizer.kind"),
        lambda c: c.tokenizer.kind != "character" or len(set(c.tokenizer.characters)) == len(c.tokenizer.characters),
        "a character stands twice in the alphabet",
        lambda c: (
            f"each once; twice: {json.dumps(''.join(sorted({x for x in c.tokenizer.characters if c.tokenizer.characters.count(x) > 1})))}"
        ),
    ),
    Rule(
        ("tokenizer.chat_template", "tokenizer.kind"),
        lambda c: not c.tokenizer.chat_template or c.tokenizer.kind == "huggingface",
        "the built-in tokenizers have no chat template",
        lambda c: "false, or tokenizer.kind: huggingface",
    ),
    Rule(
        ("task.name", "task.kind"),
        lambda c: c.task.kind != "arithmetic" or c.task.name in (None, *ARITHMETIC_FAMILIES),
        "unknown family of arithmetic problems",
        lambda c: f"one of {', '.join(ARITHMETIC_FAMILIES)}",
    ),
    Rule(
        ("task.name", "task.kind"),
        lambda c: c.task.kind not in ("reasoning_gym", "datasets") or c.task.name is not None,
        "this kind of task needs a name",
        lambda c: (
            "name of a reasoning-gym dataset, such as basic_arithmetic"
            if c.task.kind == "reasoning_gym"
            else "a hub name or a local directory"
        ),
    ),
    Rule(
        ("task.name", "task.kind"),
        lambda c: c.task.kind != "function" or FUNCTION.fullmatch(c.task.name or "") is not None,
        "this kind of task needs a Python function",
        lambda c: FUNCTION_FORM,
        "the module is imported from the current directory or from the installed packages",
    ),
    Rule(
        ("task.path", "task.kind"),
        lambda c: c.task.kind not in ("jsonl", "parquet") or c.task.path is not None,
        "this kind of task needs a file",
        lambda c: "path of the training file",
    ),
    Rule(
        ("task.prompt_template",),
        lambda c: "{prompt}" in c.task.prompt_template,
        "the prompt has no place in the template",
        lambda c: "text with {prompt} in it",
    ),
)

_NEW_MODEL = (
    "architecture",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
    "tie_word_embeddings",
)


def _task_kinds(field: str, *kinds: str) -> NoEffect:
    listed = ", ".join(kinds[:-1]) + (" and " if len(kinds) > 1 else "") + kinds[-1]
    return NoEffect((f"task.{field}",), ("task.kind",), lambda c: c.task.kind not in kinds, f"only the task kinds {listed} read it")


NO_EFFECT: tuple[NoEffect, ...] = (
    *VLLM_NO_EFFECT,
    *DISTRIBUTED_NO_EFFECT,
    NoEffect(
        tuple(f"model.{name}" for name in _NEW_MODEL),
        ("model.path",),
        lambda c: c.model.path is not None,
        "model.path is set, and the sizes come from its config.json",
    ),
    NoEffect(
        ("tokenizer.characters",), ("tokenizer.kind",), lambda c: c.tokenizer.kind != "character", "only the character tokenizer reads it"
    ),
    NoEffect(
        ("tokenizer.path",), ("tokenizer.kind",), lambda c: c.tokenizer.kind != "huggingface", "only a huggingface tokenizer has files"
    ),
    NoEffect(
        ("tokenizer.chat_template_kwargs", "tokenizer.system_prompt"),
        ("tokenizer.chat_template", "tokenizer.kind"),
        lambda c: not c.tokenizer.chat_template,
        "tokenizer.chat_template is false",
    ),
    NoEffect(("numerics.kernels",), ("precision.preset",), lambda c: not any_fp8(c), "no layer is in FP8"),
    NoEffect(
        ("precision.overrides",),
        ("precision.preset",),
        lambda c: not any_fp8(c),
        "precision.preset has no FP8, and no exception puts a layer into it",
    ),
    NoEffect(
        ("precision.scale_format", "precision.promotion_order"),
        ("precision.preset", "precision.overrides"),
        lambda c: not any_fp8(c),
        "nothing runs in FP8",
    ),
    NoEffect(
        ("precision.wgrad_operand",),
        ("precision.preset", "precision.overrides"),
        lambda c: not _fp8_wgrad(c),
        "WGrad does not run in FP8",
    ),
    NoEffect(
        ("loss_scale.initial", "loss_scale.growth_interval"),
        ("precision.preset",),
        lambda c: c.precision.preset != "fp16",
        "only the preset fp16 scales its loss",
    ),
    _task_kinds("name", "arithmetic", "reasoning_gym", "datasets", "function"),
    _task_kinds("path", "jsonl", "parquet", "gsm8k"),
    _task_kinds("eval_path", "jsonl", "parquet"),
    _task_kinds("prompt_field", "jsonl", "parquet", "datasets", "function"),
    _task_kinds("answer_field", "jsonl", "parquet", "datasets", "function"),
    _task_kinds("eval_fraction", "arithmetic", "jsonl", "parquet", "datasets", "function"),
    NoEffect(
        ("task.eval_fraction",), ("task.eval_path",), lambda c: c.task.eval_path is not None, "task.eval_path gives the held-out items"
    ),
    NoEffect(
        ("task.eval_fraction",),
        ("task.options",),
        lambda c: c.task.kind == "datasets" and "eval_split" in c.task.options,
        "task.options.eval_split gives the held-out items",
    ),
    NoEffect(
        ("algorithm.max_generation_rounds",),
        ("algorithm.dynamic_sampling", "algorithm.name"),
        lambda c: not c.dynamic_sampling,
        "dynamic sampling is off",
    ),
    NoEffect(("algorithm.dual_clip",), ("algorithm.name",), lambda c: c.algorithm.name == "cispo", "CISPO clips no loss"),
    NoEffect(
        ("correction.high", "correction.normalize"),
        ("correction.weight",),
        lambda c: c.correction.weight == "none",
        "correction.weight is none",
    ),
    NoEffect(
        ("correction.low",),
        ("correction.weight",),
        lambda c: not c.correction.weight.endswith("mask"),
        "only the weights token_mask and sequence_mask have a lower bound",
    ),
    NoEffect(
        ("correction.reject_level", "correction.reject_high"),
        ("correction.reject",),
        lambda c: c.correction.reject == "none",
        "correction.reject is none",
    ),
    NoEffect(("correction.reject_low",), ("correction.reject",), lambda c: c.correction.reject != "k1", "only k1 has a lower bound"),
    NoEffect(("run.profile_steps",), ("run.steps",), lambda c: c.run.steps < 3, "the trace begins at the third step of the run"),
    NoEffect(
        ("warm_start.batch_size", "warm_start.learning_rate", "warm_start.noise"),
        ("warm_start.steps",),
        lambda c: c.warm_start.steps == 0,
        "warm_start.steps is 0",
    ),
)


def rewarded_verifier(rewards: Iterable[tuple[str, float]]) -> str:
    """The verifier among rewards, given by name and weight: task where it is one or none is, else the first of positive weight."""
    named = [name for name, weight in rewards if weight > 0 and name in BUILTIN_REWARDS]
    return named[0] if named and "task" not in named else "task"


def find_problems(config: RunConfig) -> list[Problem]:
    """Every violation of the rules by a config whose fields are valid one by one."""
    broken = [
        Problem(rule.fields[0], rule.what, show(value_at(config, rule.fields[0])), rule.expected(config), rule.hint, rule.fields[1:])
        for rule in RULES
        if not rule.holds(config)
    ]
    return [*broken, *_idle_problems(config), *_reward_problems(config)]


def no_effects(config: RunConfig) -> Iterator[tuple[str, NoEffect]]:
    """Dotted path and reason of each field that does nothing in this config."""
    for entry in NO_EFFECT:
        if entry.idle(config):
            yield from ((path, entry) for path in entry.fields)
    for i, reward in enumerate(config.rewards):
        separate = _separate_process(config, reward.name)
        if separate is False and not reward.separate_process:
            switches = (f"rewards.{i}.separate_process", f"rewards.{i}.name")
            because = f"{reward.name} runs in the trainer's process, where nothing can end it"
            yield f"rewards.{i}.timeout_s", NoEffect((f"rewards.{i}.timeout_s",), switches, lambda c: True, because)
        if separate is True:
            because = f"{reward.name} always runs in processes of its own"
            entry = NoEffect((f"rewards.{i}.separate_process",), (f"rewards.{i}.name",), lambda c: True, because)
            yield f"rewards.{i}.separate_process", entry


def _separate_process(config: RunConfig, name: str) -> bool | None:
    """Whether a reward runs in processes of its own by itself; None where only the user's task knows."""
    if name == "task":
        kind = config.task.kind
        if kind == "reasoning_gym":
            return True
        if kind == "function":
            return None
        name = config.task.options.get("verifier", "exact_match") if kind in ("jsonl", "parquet", "datasets") else "exact_match"
    return name not in UNTIMED_REWARDS


def _idle_problems(config: RunConfig) -> Iterator[Problem]:
    for path, entry in no_effects(config):
        section, name = path.rsplit(".", 1)
        part, value = value_at(config, section), value_at(config, path)
        says_off = not value and value == type(part).model_fields[name].default  # null, false, 0 or empty: true and harmless
        if name in part.model_fields_set and not says_off:
            hint = f"{entry.because}; remove it"
            yield Problem(path, "has no effect here", show(value), "the field left out", hint, entry.switches, no_effect=True)


def _reward_problems(config: RunConfig) -> Iterator[Problem]:
    names = [reward.name for reward in config.rewards]
    for i, name in enumerate(names):
        path = f"rewards.{i}.name"
        if name not in BUILTIN_REWARDS and FUNCTION.fullmatch(name) is None:
            yield Problem(path, "unknown reward", show(name), f"one of {', '.join(BUILTIN_REWARDS)}, or {FUNCTION_FORM}")
        elif name in names[:i]:
            first = f"rewards.{names.index(name)}.name"
            yield Problem(
                path, "a reward stands twice", show(name), "each name once, since rewards are logged by name", "add the weights", (first,)
            )
    if all(reward.weight == 0 for reward in config.rewards):
        weights = tuple(f"rewards.{i}.weight" for i in range(len(names)))
        yield Problem(weights[0], "no reward counts", "0 in every entry", "one weight that is not 0", involves=weights[1:])
