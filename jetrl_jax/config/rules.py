"""What the sections of a config demand of each other; what a section demands of itself stands in its class.

Run by `jetrl_jax.config.load` once every field is valid by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jetrl_jax.config.model import HuggingFaceSection, NewModelSection
from jetrl_jax.config.precision import Fp8Section
from jetrl_jax.config.rollout import VllmSection
from jetrl_jax.config.rule import Problem, Rule
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.task import UNTIMED_REWARDS, FunctionSection, ReasoningGymSection, RowsSection
from jetrl_jax.config.types import VLLM_TEMPERATURES, Section, show, value_at
from jetrl_jax.models.anatomy import MATRICES, Matrix, fitting_degrees, fitting_tensor_degrees, shard_axis

LENGTHS = ("rollout.max_prompt_tokens", "rollout.max_completion_tokens")


def find_problems(config: RunConfig) -> list[Problem]:
    """Every violation of the rules by a config whose fields are valid one by one."""
    return [
        Problem(
            rule.field, rule.what, show(value_at(config, rule.field)), rule.expected, rule.hint, rule.involves
        )
        for rule in all_rules(config)
        if not rule.holds
    ]


def all_rules(config: RunConfig) -> Iterator[Rule]:
    """Every rule, kept or broken, with dotted paths from the config's root."""
    yield from _own_rules(config, "")
    for rules in (_policy, _engine, _batch, _devices, _rewards):
        yield from rules(config)


def _own_rules(section: Section, path: str) -> Iterator[Rule]:
    for rule in section.rules():
        involves = tuple(path + other for other in rule.involves)
        yield dataclasses.replace(rule, field=path + rule.field, involves=involves)
    for name in type(section).model_fields:
        value = getattr(section, name)
        parts = (
            {f"{name}.{i}": part for i, part in enumerate(value)}
            if isinstance(value, tuple)
            else {name: value}
        )
        for inner, part in parts.items():
            if isinstance(part, Section):
                yield from _own_rules(part, f"{path}{inner}.")


def _policy(config: RunConfig) -> Iterator[Rule]:
    if isinstance(config.model, NewModelSection):
        yield Rule(
            config.max_sequence_tokens <= config.model.max_position_embeddings,
            "model.max_position_embeddings",
            "the model is too short for the sequences of the run",
            f"at least {' + '.join(LENGTHS)} = {config.max_sequence_tokens}",
            involves=LENGTHS,
        )
    if isinstance(config.tokenizer, HuggingFaceSection):
        holds = (config.tokenizer.path or config.model_path) is not None
        expected = "a directory or a tokenizer.json, here or by model.path"
        yield Rule(
            holds,
            "tokenizer.path",
            "tokenizer.kind: huggingface needs files",
            expected,
            involves=("tokenizer.kind", "model.path"),
        )
    preset = ("precision.preset",)
    if not isinstance(config.precision, Fp8Section):
        for rule in config.numerics.idle("no layer is in FP8", "kernels"):
            yield dataclasses.replace(rule, field=f"numerics.{rule.field}", involves=preset)
    yield Rule(
        not (config.precision.preset == "fp32" and config.numerics.attention == "cudnn"),
        "numerics.attention",
        "cuDNN's attention takes BF16 and FP16 only",
        "auto or xla, or another preset than fp32",
        involves=preset,
    )
    yield Rule(
        config.precision.preset not in ("fp32", "fp16") or config.numerics.head_gradient in ("auto", "fp32"),
        "numerics.head_gradient",
        "parts are BF16, and so must the head's operands be",
        "auto or fp32, or another preset than fp32 and fp16",
        involves=preset,
    )


def _engine(config: RunConfig) -> Iterator[Rule]:
    engine, kind = config.rollout.engine, ("rollout.engine.kind",)
    if not isinstance(engine, VllmSection):
        return
    yield Rule(
        config.precision.preset not in ("fp32", "fp16"),
        "rollout.engine.kind",
        "vLLM runs in BF16 and FP8 here",
        "jax, or another preset",
        involves=("precision.preset",),
    )
    yield Rule(
        VLLM_TEMPERATURES[0] <= config.rollout.temperature <= VLLM_TEMPERATURES[1],
        "rollout.temperature",
        "vLLM samples at another temperature than the trainer scores at, or refuses it",
        "a number from {} to {}, or rollout.engine: jax".format(*map(show, VLLM_TEMPERATURES)),
        involves=kind,
    )
    if config.shared_vllm is not None:
        yield Rule(
            config.shared_vllm.enforce_eager or not config.numerics.exact,
            "rollout.engine.enforce_eager",
            "what torch compiles rounds elsewhere, and no CUDA graph holds the exact operations",
            "true, or numerics.exact: false",
            involves=("numerics.exact",),
        )
    yield Rule(
        config.sharding.devices == 1,
        "sharding.data",
        "vLLM samples beside a trainer on one device only",
        "1, or rollout.engine: jax",
        involves=("sharding.fsdp", "sharding.tensor", *kind),
    )
    yield Rule(
        not config.distributed.on,
        "distributed.processes",
        "vLLM samples beside a trainer of one process only",
        "1, or rollout.engine: jax",
        involves=kind,
    )


def _batch(config: RunConfig) -> Iterator[Rule]:
    longest, algorithm, rollout = config.max_sequence_tokens, config.algorithm, config.rollout
    yield Rule(
        config.row_tokens >= longest,
        "batch.row_tokens",
        "a packed row is shorter than the longest sequence",
        f"at least {' + '.join(LENGTHS)} = {longest}, or null for exactly that",
        involves=LENGTHS,
    )
    yield Rule(
        config.batch.microbatch_tokens >= config.row_tokens,
        "batch.microbatch_tokens",
        "a microbatch does not hold one row",
        f"at least the length of a row, {config.row_tokens} tokens",
        "a row is batch.row_tokens long; where that is null, as long as the longest prompt plus the "
        "longest completion",
        involves=("batch.row_tokens", *LENGTHS),
    )
    yield Rule(
        config.optimizer.warmup_steps < config.total_updates,
        "optimizer.warmup_steps",
        "the warm-up lasts as long as the run: the learning rate never reaches optimizer.learning_rate",
        f"less than run.steps * algorithm.epochs * algorithm.minibatches = {config.total_updates}",
        involves=("run.steps", "algorithm.epochs", "algorithm.minibatches"),
    )
    yield Rule(
        algorithm.minibatches <= rollout.prompts_per_step,
        "algorithm.minibatches",
        "more minibatches than prompts",
        f"at most rollout.prompts_per_step = {rollout.prompts_per_step}",
        involves=("rollout.prompts_per_step",),
    )
    yield Rule(
        algorithm.overlong_tokens(rollout.max_completion_tokens) <= rollout.max_completion_tokens,
        "algorithm.overlong_buffer_tokens",
        "the soft penalty zone is longer than a completion",
        f"at most rollout.max_completion_tokens = {rollout.max_completion_tokens}",
        involves=("rollout.max_completion_tokens",),
    )


def _devices(config: RunConfig) -> Iterator[Rule]:
    shards, product = config.sharding.row_shards, "sharding.data * sharding.fsdp"
    sizes = (
        "model.num_kv_heads",
        "model.head_dim",
        "model.hidden_size",
        "model.intermediate_size",
        "precision.preset",
    )
    if isinstance(config.model, NewModelSection):
        fits = _tensor_misfits(config, config.model)
        yield Rule(
            not fits,
            "sharding.tensor",
            "shards would cut a head or a 128x128 block of a matrix's scales",
            f"a degree that fits {'; '.join(fits)}",
            involves=sizes,
        )
        cut = [] if fits else _cut(config, config.model)
        yield Rule(
            not cut,
            "sharding.fsdp",
            "shards would cut a matrix inside a row or a 128x128 block of its scales",
            f"a degree that fits {'; '.join(cut)}",
            involves=("sharding.tensor", *sizes),
        )
    if config.warm_start is not None:
        yield Rule(
            config.warm_start.batch_size % shards == 0,
            "warm_start.batch_size",
            "the examples of a supervised step are not shared evenly among the devices",
            f"a multiple of {product} = {shards}",
            involves=("sharding.data", "sharding.fsdp"),
        )
    yield Rule(
        shards % (config.distributed.processes or 1) == 0,
        "distributed.processes",
        "the devices of the mesh are not shared evenly among the processes",
        f"a divisor of {product} = {shards}",
        "every process brings the same number of devices, and all that share a layer",
        involves=("sharding.data", "sharding.fsdp"),
    )


def _matrices() -> dict[str, Matrix]:
    """Name -> one of each kind of linear layer of a new model:
    those of one shape and unit share a line of a message.
    """
    kinds: dict[tuple[str, str], list[Matrix]] = {}
    for matrix in MATRICES:
        kinds.setdefault((matrix.outputs, matrix.inputs), []).append(matrix)
    return {" and ".join(matrix.name for matrix in kind): kind[0] for kind in kinds.values()}


def _tensor_misfits(config: RunConfig, model: NewModelSection) -> list[str]:
    """The kinds of matrices that `sharding.tensor` cannot split, each with the degrees that can;
    the vocabulary is the tokenizer's.
    """
    told, fp8 = [], isinstance(config.precision, Fp8Section)
    for name, matrix in _matrices().items():
        outputs = matrix.shape(model)[0]
        degrees = fitting_tensor_degrees(outputs, matrix.unit(model.head_dim, blocks=fp8))
        if config.sharding.tensor not in degrees:
            told.append(f"{name} ({outputs} outputs): {', '.join(map(str, degrees))}")
    return told


def _cut(config: RunConfig, model: NewModelSection) -> list[str]:
    """The same of `sharding.fsdp`, which splits what `sharding.tensor` has left."""
    told, degree, fp8 = [], config.sharding.fsdp, isinstance(config.precision, Fp8Section)
    for name, matrix in _matrices().items():
        outputs, inputs = matrix.shape(model)
        shape = (outputs // config.sharding.tensor, inputs)
        if degree > 1 and shard_axis(shape, degree, fp8) is None:
            told.append(f"{name} {list(shape)}: {', '.join(map(str, fitting_degrees(shape, fp8)))}")
    return told


def _rewards(config: RunConfig) -> Iterator[Rule]:
    names = [reward.name for reward in config.rewards]
    for i, reward in enumerate(config.rewards):
        first = names.index(reward.name)
        yield Rule(
            first == i,
            f"rewards.{i}.name",
            "a reward stands twice",
            "each name once, since rewards are logged by name",
            "add the weights",
            (f"rewards.{first}.name",),
        )
        separate, idle = _separate_process(config, reward.name), list[Rule]()
        if separate is False and not reward.separate_process:
            idle += reward.idle(
                f"{reward.name} runs in the trainer's process, where nothing can end it", "timeout_s"
            )
        if separate is True:
            idle += reward.idle(f"{reward.name} always runs in processes of its own", "separate_process")
        for rule in idle:
            involves = (f"rewards.{i}.name", f"rewards.{i}.separate_process", "task.kind")
            yield dataclasses.replace(rule, field=f"rewards.{i}.{rule.field}", involves=involves)
    weights = tuple(f"rewards.{i}.weight" for i in range(len(names)))
    counts = any(reward.weight != 0 for reward in config.rewards)
    yield Rule(counts, weights[0], "no reward counts", "one weight that is not 0", involves=weights[1:])


def _separate_process(config: RunConfig, name: str) -> bool | None:
    """Whether a reward runs in processes of its own by itself; None where only the user's task knows."""
    if name == "task":
        if isinstance(config.task, ReasoningGymSection):
            return True
        if isinstance(config.task, FunctionSection):
            return None
        name = (
            config.task.options.get("verifier", "exact_match")
            if isinstance(config.task, RowsSection)
            else "exact_match"
        )
    return name not in UNTIMED_REWARDS
