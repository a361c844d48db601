"""The rules between sections of a config; rules within one section are in its class."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jetrl_jax.config.model import HuggingFaceSection, NewModelSection
from jetrl_jax.config.precision import Fp8Section
from jetrl_jax.config.rollout import JaxEngineSection, VllmSection
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.task import UNTIMED_REWARDS, FunctionSection, ReasoningGymSection, RowsSection
from jetrl_jax.config.types import VLLM_TEMPERATURES, Problem, Rule, Section, show, value_at
from jetrl_jax.models.anatomy import FEWEST_LAYERS, MATRICES, fitting_degrees, fitting_tensor_degrees

VLLM_LORA_RANK = 512  # the largest `max_lora_rank`
LONGEST = "rollout.max_prompt_tokens + rollout.max_completion_tokens"
SIZES = (
    "the sizes follow from model.num_heads, model.num_kv_heads, model.head_dim, model.hidden_size and "
    "model.intermediate_size; precision.preset says whether there are blocks"
)
SHARDS = "sharding.data * sharding.fsdp"


def find_problems(config: RunConfig) -> list[Problem]:
    """Every violation of the rules by a config whose fields are valid one by one."""
    broken = {rule: show(value_at(config, rule.field)) for rule in all_rules(config) if not rule.holds}
    return [Problem(rule.field, rule.what, got, rule.expected, rule.hint) for rule, got in broken.items()]


def all_rules(config: RunConfig) -> Iterator[Rule]:
    """Every rule, kept or broken, with dotted paths from the config's root."""
    yield from _own_rules(config)
    for rules in (_policy, _lora, _engine, _batch, _devices, _rewards, _episodes):
        yield from rules(config)


def _own_rules(section: Section, path: str = "") -> Iterator[Rule]:
    for rule in section.rules():
        yield dataclasses.replace(rule, field=path + rule.field)
    for name, value in section:
        if isinstance(value, Section):
            yield from _own_rules(value, f"{path}{name}.")


def _policy(config: RunConfig) -> Iterator[Rule]:
    longest, preset = config.max_sequence_tokens, config.precision.preset
    if isinstance(config.model, NewModelSection):
        what = "the model is too short for the sequences of the run"
        holds = config.model.max_position_embeddings >= longest
        yield Rule(holds, "model.max_position_embeddings", what, f"at least {LONGEST} = {longest}")
    if isinstance(config.tokenizer, HuggingFaceSection):
        holds = (config.tokenizer.path or config.model_path) is not None
        what, expected = "tokenizer.kind: huggingface needs files", "files, here or in model.path"
        yield Rule(holds, "tokenizer.path", what, expected)
    if not isinstance(config.precision, Fp8Section):
        because = f"no layer is in FP8 (precision.preset: {preset})"
        yield from config.numerics.idle(because, "kernels", path="numerics.")
    holds = preset != "fp32" or config.numerics.attention in ("auto", "xla")
    expected = "auto, xla, or another precision.preset"
    yield Rule(holds, "numerics.attention", "kernels of attention take BF16 and FP16 only", expected)
    holds = preset not in ("fp32", "fp16") or config.numerics.head_gradient in ("auto", "fp32")
    what, expected = (
        "parts are BF16, and so must the head's operands be",
        "auto, fp32, or another precision.preset",
    )
    yield Rule(holds, "numerics.head_gradient", what, expected)


def _lora(config: RunConfig) -> Iterator[Rule]:
    lora = config.lora
    if lora is None:
        return
    divisor = "the root of lora.rank" if lora.rslora else "lora.rank"
    what = (
        "the factor of an adapter is no power of two, and bits then depend on the matrix that it multiplies"
    )
    holds = not config.numerics.exact or math.frexp(lora.scale)[0] == 0.5
    yield Rule(holds, "lora.alpha", what, f"a power of two times {divisor}, or numerics.exact: false")
    holds = config.precision.preset != "fp8_rollout_only"
    what = "the base is frozen in one format, and this flow trains in another one than it samples in"
    yield Rule(holds, "precision.preset", what, "another preset, or lora: null")
    vllm = isinstance(config.rollout.engine, VllmSection)
    what = "vLLM gets adapters only, and no scales of keys and values beside them"
    holds = not vllm or config.precision.kv_cache == "bf16"
    yield Rule(holds, "precision.kv_cache", what, "bf16, rollout.engine: jax, or lora: null")
    what = "vLLM does not speculate beside adapters here"
    holds = getattr(config.rollout.engine, "speculative_config", None) is None
    yield Rule(holds, "rollout.engine.speculative_config", what, "null, or lora: null")
    what, expected = "vLLM has no place for adapters of this rank", f"at most {VLLM_LORA_RANK}"
    yield Rule(not vllm or lora.rank <= VLLM_LORA_RANK, "lora.rank", what, expected)
    what = "a warm start changes the base that these adapters were trained for"
    holds = lora.path is None or config.warm_start is None
    yield Rule(holds, "lora.path", what, "null, or warm_start: null")
    what = "a draft head is not trained beside adapters"
    holds = vllm or config.draft_head is None
    yield Rule(holds, "rollout.engine.speculation.kind", what, "lookup, or lora: null")


def _engine(config: RunConfig) -> Iterator[Rule]:
    engine, vllm = config.rollout.engine, config.shared_vllm
    if config.draft_head is not None and isinstance(engine, JaxEngineSection):
        layers, field = getattr(config.model, "num_layers", FEWEST_LAYERS), "rollout.engine.speculation.kind"
        what = "a draft head reads three layers after the first"
        yield Rule(
            layers >= FEWEST_LAYERS, field, what, f"lookup, or model.num_layers: {FEWEST_LAYERS} or more"
        )
        what = "a draft head runs on one device only"
        yield Rule(
            config.sharding.devices == 1, field, what, "lookup, or sharding.data: 1, as for the other axes"
        )
    holds = config.precision.kv_query == "bf16" or (
        isinstance(engine, VllmSection) and not config.numerics.exact
    )
    expected = "bf16, or rollout.engine: vllm with numerics.exact: false"
    yield Rule(holds, "precision.kv_query", "this engine does not quantise queries", expected)
    if not isinstance(engine, VllmSection):
        return
    holds = not (config.numerics.exact and config.numerics.attention.startswith("mosaic"))
    expected = "auto, xla, numerics.exact: false, or rollout.engine: jax"
    yield Rule(holds, "numerics.attention", "an exact vLLM computes attention in float64", expected)
    holds = config.precision.preset not in ("fp32", "fp16")
    expected = "jax, or another precision.preset"
    yield Rule(holds, "rollout.engine.kind", "vLLM runs in BF16 and FP8 here", expected)
    least, most = VLLM_TEMPERATURES
    what = "vLLM samples at another temperature than the trainer scores at, or refuses it"
    expected = f"a number from {show(least)} to {show(most)}, or rollout.engine: jax"
    yield Rule(least <= config.rollout.temperature <= most, "rollout.temperature", what, expected)
    holds = vllm is None or vllm.enforce_eager or not config.numerics.exact
    what = "what torch compiles rounds elsewhere, and no CUDA graph holds the exact operations"
    yield Rule(holds, "rollout.engine.enforce_eager", what, "true, or numerics.exact: false")
    what = "vLLM samples beside a trainer on one device only"
    expected = "1, as for sharding.fsdp and sharding.tensor, or rollout.engine: jax"
    yield Rule(config.sharding.devices == 1, "sharding.data", what, expected)
    what = "vLLM samples beside a trainer of one process only"
    yield Rule(not config.distributed.on, "distributed.processes", what, "1, or rollout.engine: jax")


def _batch(config: RunConfig) -> Iterator[Rule]:
    longest, row, updates = config.max_sequence_tokens, config.row_tokens, config.total_updates
    prompts, completion = config.rollout.prompts_per_step, config.rollout.max_completion_tokens
    what = "a packed row is shorter than the longest sequence"
    expected = f"at least {LONGEST} = {longest}, or null for exactly that"
    yield Rule(row >= longest, "batch.row_tokens", what, expected)
    expected = f"at least batch.row_tokens (null: {LONGEST}) = {row}"
    holds = config.batch.microbatch_tokens >= row
    yield Rule(holds, "batch.microbatch_tokens", "a microbatch does not hold one row", expected)
    what = "the warm-up lasts as long as the run: the learning rate never reaches optimizer.learning_rate"
    expected = f"less than run.steps * algorithm.epochs * algorithm.minibatches = {updates}"
    yield Rule(config.optimizer.warmup_steps < updates, "optimizer.warmup_steps", what, expected)
    holds, expected = config.algorithm.minibatches <= prompts, f"at most rollout.prompts_per_step = {prompts}"
    yield Rule(holds, "algorithm.minibatches", "more minibatches than prompts", expected)
    what = "the soft penalty zone is longer than a completion"
    expected = f"at most rollout.max_completion_tokens = {completion}"
    holds = config.algorithm.overlong_tokens(completion) <= completion
    yield Rule(holds, "algorithm.overlong_buffer_tokens", what, expected)


def _devices(config: RunConfig) -> Iterator[Rule]:
    shards, processes = config.sharding.row_shards, config.distributed.processes or 1
    if isinstance(config.model, NewModelSection):
        heads, rows = _uneven(config, config.model)
        what = "shards would cut a head or a 128x128 block of a matrix's scales"
        yield Rule(not heads, "sharding.tensor", what, f"a degree that fits {heads}", SIZES)
        what = "shards would cut a matrix inside a row or a 128x128 block of its scales"
        expected = f"a degree that fits, beside sharding.tensor, {rows}"
        yield Rule(not rows or bool(heads), "sharding.fsdp", what, expected, SIZES)
    if config.warm_start is not None:
        what = "the examples of a supervised step are not shared evenly among the devices"
        holds = config.warm_start.batch_size % shards == 0
        yield Rule(holds, "warm_start.batch_size", what, f"a multiple of {SHARDS} = {shards}")
    what = "the devices of the mesh are not shared evenly among the processes"
    expected = f"a divisor of {SHARDS} = {shards}: every process brings as many devices, which share layers"
    yield Rule(shards % processes == 0, "distributed.processes", what, expected)


def _uneven(config: RunConfig, model: NewModelSection) -> tuple[str, str]:
    """The matrices that `sharding.tensor` cannot split, and those that `sharding.fsdp` then cannot.

    Each with the possible degrees.  The size of the vocabulary is the tokenizer's.
    """
    fp8, sharding = isinstance(config.precision, Fp8Section), config.sharding
    heads, rows = [], []
    for matrix in MATRICES:
        outputs, inputs = matrix.shape(model)
        degrees = fitting_tensor_degrees(outputs, matrix.unit(model.head_dim, blocks=fp8))
        if sharding.tensor not in degrees:
            heads.append(f"{matrix.name} ({outputs} outputs): {degrees}")
        rest = (outputs // sharding.tensor, inputs)
        if sharding.fsdp not in fitting_degrees(rest, fp8):
            rows.append(f"{matrix.name} {list(rest)}: {fitting_degrees(rest, fp8)}")
    return "; ".join(heads), "; ".join(rows)


def _episodes(config: RunConfig) -> Iterator[Rule]:
    task, turn = config.environment, config.rollout.max_turn_tokens
    if task is None:
        what, expected = "only an environment has turns", "null, or task.kind: environment"
        yield Rule(turn is None, "rollout.max_turn_tokens", what, expected)
        yield from config.algorithm.idle("only an environment has turns", "credit", path="algorithm.")
        yield from config.rollout.idle("only an environment has turns", "turns", path="rollout.")
        return
    if config.rollout.turns == "stream":
        yield from _stream(config)
    if config.algorithm.credit == "turn":
        what, expected = "rloo leaves out a sample, not a turn", "episode, or another algorithm.name"
        yield Rule(config.algorithm.name != "rloo", "algorithm.credit", what, expected)
        holds = any(reward.name == "task" and reward.weight for reward in config.rewards)
        what, expected = "no turn has a reward of its own", "episode, or a reward named task with a weight"
        yield Rule(holds, "algorithm.credit", what, expected)
    what, expected = "an environment's turns have no limit", "a whole number (task.kind: environment)"
    yield Rule(turn is not None, "rollout.max_turn_tokens", what, expected)
    what, expected = "environments answer one process only", "1, or another task.kind than environment"
    yield Rule(not config.distributed.on, "distributed.processes", what, expected)
    if isinstance(config.tokenizer, HuggingFaceSection) and config.tokenizer.chat_template:
        because = "tokenizer.chat_template writes the observations"
        yield from task.idle(because, "observation_template", path="task.")


def _stream(config: RunConfig) -> Iterator[Rule]:
    """What a stream of turns needs, so that the time of environments changes nothing."""
    engine, field = config.rollout.engine, "rollout.turns"
    embedded = isinstance(engine, JaxEngineSection)
    what = "only the embedded engine keeps a turn's slot; vLLM finds a history in its prefix cache"
    yield Rule(embedded, field, what, "lockstep, or rollout.engine: jax")
    what = "bits would depend on the time that environments take"
    expected = "lockstep, or numerics.exact: true with another precision.preset than fp32"
    yield Rule(config.numerics.exact and config.precision.preset != "fp32", field, what, expected)
    expected = "lockstep, or sharding.data: 1 and sharding.fsdp: 1"
    holds = config.sharding.row_shards == 1
    yield Rule(holds, field, "a stream runs on one copy of the policy only", expected)


def _rewards(config: RunConfig) -> Iterator[Rule]:
    names = [reward.name for reward in config.rewards]
    for i, reward in enumerate(config.rewards):
        expected = f"each name once; rewards.{names.index(reward.name)}.name is the first: add the weights"
        yield Rule(reward.name not in names[:i], f"rewards.{i}.name", "a reward stands twice", expected)
        separate, path = _separate_process(config, reward.name), f"rewards.{i}."
        because = f"{path}name with task.kind: {config.task.kind}"
        if separate is False and not reward.separate_process:
            because += " runs in the trainer's process, where nothing can end it"
            yield from reward.idle(because, "timeout_s", path=path)
        if separate is True:
            because += " always runs in processes of its own"
            yield from reward.idle(because, "separate_process", path=path)
    counts = any(reward.weight for reward in config.rewards)
    yield Rule(counts, "rewards.0.weight", "no reward counts", "one weight that is not 0")


def _separate_process(config: RunConfig, name: str) -> bool | None:
    """Whether a reward runs in separate processes by default; None if that depends on the user's task."""
    task = config.task
    if name == "task":
        if isinstance(task, ReasoningGymSection | FunctionSection):
            return True if isinstance(task, ReasoningGymSection) else None
        name = task.options.get("verifier", "exact_match") if isinstance(task, RowsSection) else "exact_match"
    return name not in UNTIMED_REWARDS
