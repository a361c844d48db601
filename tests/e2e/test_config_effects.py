"""Every field of the config does something: each is changed alone, and what the program does or writes must differ.

`CHANGES` names for every field another valid value, the config it stands in, and an observation: a function of a
config that builds the parts of a run and returns what they do (never the config itself, nor `config.yaml`).  A field
without an entry fails.  Each observation is made twice of the unchanged config: one that is not repeatable proves nothing.

Most observations are whole steps or runs of the real trainer on an engine and on device programs that follow a script
(`ScriptedEngine`, `ScriptedPrograms`), so nothing is compiled; what the numerics do is seen on the compiled model.
"""

from __future__ import annotations

import copy
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jetrl_jax.grpo
from jetrl_jax.config import RunConfig
from jetrl_jax.config_io import config_from_dict
from jetrl_jax.config_schema import all_fields
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.grpo import GRPOTrainer
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.fp8_linear import linear
from jetrl_jax.policy import build_engine, build_policy, published_weights
from jetrl_jax.precision import TrainableFp8Weight, jit, named_params
from jetrl_jax.rl.algorithm import policy_objective
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.rollout.engine import Request, SamplingParams, Trajectory
from jetrl_jax.tasks.rewards import RewardFunctions
from jetrl_jax.tasks.task import build_task
from jetrl_jax.training.metrics import read_metrics, without_clocks
from jetrl_jax.training.run_directory import flatten, read_jsonl
from jetrl_jax.training.step import TrainState, UpdateReport

BASE: dict[str, Any] = {
    "model": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16},
    "task": {"name": "sum", "options": {"digits": 1, "train_size": 64, "eval_size": 4}},
    "rewards": [{"name": "exact_match"}],
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 8, "max_completion_tokens": 6, "slots": 8, "prefill_rows": 2},
    "batch": {"microbatch_tokens": 56},
    "eval": {"prompts": 4, "samples": 2},
    "checkpoint": {"every_steps": 2},
    "run": {"steps": 4, "tensorboard": False},
}

# A module that configs of this test name; workers import it from the directory of the test's files.
PROBE = '''
import os, time

class Ours:
    name = "ours"
    train, eval = [], []
    def verify(self, completion, example):
        return 0.0
    def verifier(self):
        return process_id

def process_id(completion, example):
    return float(os.getpid())

def task():
    from jetrl_jax.tasks.task import Example
    made = Ours()
    made.train, made.eval = [Example("1", "1")], [Example("2", "2")]
    return made

def slow(completions, **kwargs):
    time.sleep(0.5)
    return [1.0] * len(completions)

def not_finite(completions, **kwargs):
    return [float("nan")] * len(completions)
'''
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if enable_thinking %}abc{% endif %}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What configs of this test read: task files, tokenizers, a checkpoint, and the module `PROBE`."""
    root = tmp_path_factory.mktemp("files")
    (root / "effects_probe.py").write_text(PROBE)
    for name, start in (("a", 0), ("b", 100), ("held", 200)):
        rows = [{"prompt": f"p{i}", "question": f"q{i}", "answer": f"{i}", "label": f"l{i}"} for i in range(start, start + 10)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder, shift in (("gsm8k", 0), ("gsm8k_other", 50)):
        (root / folder).mkdir()
        for split, start in (("train", shift), ("test", shift + 10)):
            rows = [{"question": f"how much is {i}?", "answer": f"it is #### {i}"} for i in range(start, start + 4)]
            (root / folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_policy(build(seed=5)).save(root / "checkpoint")
    for name, characters in (("one", "0123456789+= "), ("two", "abcdef0123456789+= ")):
        build_policy(build({"tokenizer.characters": characters})).tokenizer.save(root / name)
        (root / name / "generation_config.json").write_text('{"eos_token_id": 1}')
    (root / "two" / "chat_template.jinja").write_text(TEMPLATE)
    sys.path.insert(0, str(root))
    yield root
    sys.path.remove(str(root))
    sys.modules.pop("effects_probe", None)


def build(base: dict[str, Any] | None = None, files: Path = Path("/"), **changes: Any) -> RunConfig:
    """`BASE` with the dotted paths of `base` and `changes` set; the text FILES stands for a directory."""
    data = copy.deepcopy(BASE)
    for path, value in copy.deepcopy((base or {}) | changes).items():
        place: Any = data
        *parents, last = path.split(".")
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        place[int(last) if isinstance(place, list) else last] = value
    return config_from_dict(json.loads(json.dumps(data).replace("FILES", str(files))))


# The script that stands for engine and device


class ScriptedEngine:
    """Answers sums, less and less well from version to version; remembers what it was asked."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.policy_version, self.asked = tokenizer, -1, []

    def load_weights(self, published: Any, version: int) -> None:
        self.policy_version = version

    def generate(self, requests: list[Request], sampling: SamplingParams) -> list[Trajectory]:
        self.asked.append((len(requests), sampling.temperature, sampling.max_tokens, sampling.greedy))
        return [self._answer(request, sampling) for request in requests]

    def _answer(self, request: Request, sampling: SamplingParams) -> Trajectory:
        rng = np.random.default_rng((request.seed, sampling.seed))
        prompt = self.tokenizer.decode(request.prompt_ids).strip("=")
        right = rng.random() < 0.9 - 0.2 * self.policy_version
        text = str(sum(map(int, prompt.split("+")))) if right else "".join(map(str, rng.integers(0, 10, rng.integers(1, 8))))
        ids = np.array([*self.tokenizer.encode(text), self.tokenizer.eos_ids[0]][: sampling.max_tokens], np.int32)
        reason = "stop" if ids[-1] == self.tokenizer.eos_ids[0] else "length"
        return Trajectory(
            request.id, np.array(request.prompt_ids, np.int32), ids, scripted_logprobs(ids, 0) - 0.01, reason, self.policy_version
        )


def scripted_logprobs(ids: np.ndarray, updates: int) -> np.ndarray:
    """Log-probabilities that move by up to one with each update."""
    return (-1.1 - 0.1 * ((np.asarray(ids) * 7 + 5 * updates) % 11)).astype(np.float32)


class ScriptedPrograms:
    """`PolicyPrograms` without a device: scripted logprobs, the real objective, the real optimiser on two small arrays."""

    def __init__(self, real: Any) -> None:
        self.optimizer, self.updates = real.optimizer, 0
        self.shapes: list[tuple[int, ...]] = []
        self.losses: list[float] = []
        self.supervised: list[np.ndarray] = []
        self.weights = {"matrix": jnp.linspace(-1, 1, 6).reshape(2, 3), "vector": jnp.ones(3)}
        self.moments = self.optimizer.init(self.weights)

    def init(self, params: Any) -> TrainState:
        return TrainState(params, {"updates": np.int32(self.updates)}, {})

    def frozen(self, state: TrainState) -> int:
        return -1 if self.updates == 0 else self.updates

    def logprobs(self, weights: int, batch: TrainBatch) -> np.ndarray:
        return scripted_logprobs(batch.token_ids, weights)

    def policy_gradient(self, state: TrainState, batch: TrainBatch, denominators: Any, algorithm: Any) -> Any:
        logprobs = scripted_logprobs(batch.token_ids, self.updates)
        loss, stats = policy_objective(jnp.asarray(logprobs), batch, denominators, algorithm)
        self.shapes.append(batch.token_ids.shape)
        self.losses.append(float(loss))
        return {}, stats | {"loss": loss}, logprobs

    def supervised_gradient(self, state: TrainState, batch: TrainBatch, tokens: float) -> Any:
        self.supervised.append(batch.token_ids)
        return {}, 1.0

    def add(self, total: Any, grads: Any) -> Any:
        return grads

    def update(self, state: TrainState, grads: Any) -> tuple[TrainState, UpdateReport]:
        rng = np.random.default_rng(self.updates)
        scale = 0.3 if self.updates % 2 == 0 else 3.0  # below and above the clip
        raw = {name: jnp.asarray(scale * rng.normal(size=value.shape)) for name, value in self.weights.items()}
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            change, self.moments = self.optimizer.update(raw, self.moments, self.weights)
        self.weights = {name: value + change[name] for name, value in self.weights.items()}
        self.updates += 1
        return state, UpdateReport(1.0, ())


class ScriptedTrainer(GRPOTrainer):
    """The real trainer with `ScriptedPrograms`; `made` are those it made, the RL phase's first."""

    made: list[ScriptedPrograms]

    def new_programs(self, optimizer: Any = None) -> Any:
        programs = ScriptedPrograms(super().new_programs(optimizer))
        self.made = [*getattr(self, "made", []), programs]
        return programs


@dataclass
class Seen:
    """What one step did."""

    row: dict[str, float]
    prompts: list[str]
    asked: list[Any]
    shapes: list[Any]
    losses: list[float]
    weights: list[Any]


def step(config: RunConfig) -> Seen:
    owner = ScriptedTrainer(config)
    programs = owner.new_programs()
    state = programs.init(owner.policy.params)
    with owner._new_rewards(None) as rewards:
        trainer = owner.new_trainer(programs, state, owner.reference(programs, state), rewards, None)
        row, batch = trainer.step(1)
    weights = jax.tree.map(lambda value: np.asarray(value).tolist(), programs.weights)
    prompts = [prompt.example.prompt for prompt in batch.prompts]
    return Seen(without_clocks(row), prompts, trainer.engine.asked, programs.shapes, programs.losses, weights)


# Observations: config -> something that can be compared


def prompts(config: RunConfig) -> Any:
    """The prompts of a step, and how many were passed over."""
    seen = step(config)
    return seen.prompts, seen.row["count/skipped_prompts"]


def sampling(config: RunConfig) -> Any:
    """What the engine was asked for in a step: completions, temperature, longest completion."""
    return step(config).asked


def batch_shapes(config: RunConfig) -> Any:
    """The microbatches of a step."""
    return step(config).shapes


def losses(config: RunConfig) -> Any:
    """The loss share of each microbatch of a step."""
    return step(config).losses


def updated_weights(config: RunConfig) -> Any:
    """Two arrays after the updates of a step, by the run's optimiser."""
    return step(config).weights


def warm_start(config: RunConfig) -> Any:
    """The supervised batches of a run, and two arrays after them."""
    owner = ScriptedTrainer(config)
    run(config, owner)
    programs = owner.made[-1]
    return [batch.tolist() for batch in programs.supervised], jax.tree.map(lambda value: np.asarray(value).tolist(), programs.weights)


def evaluation(config: RunConfig) -> Any:
    """The metrics of an evaluation and what the engine was asked for."""
    owner = ScriptedTrainer(config)
    engine = ScriptedEngine(owner.policy.tokenizer)
    engine.load_weights(None, 1)
    return owner._evaluator(engine).metrics, engine.asked


def run(config: RunConfig, owner: GRPOTrainer | None = None) -> Any:
    """A whole run: how it ended, its files, checkpoints, metrics and samples."""
    try:
        outcome: Any = (owner or ScriptedTrainer(config)).train()["steps"]
    except RunStopped as error:
        outcome = str(error)
    (lock,) = Path.cwd().rglob("run.lock")
    folder = lock.parent
    return {
        "outcome": outcome,
        "directory": str(folder.relative_to(Path.cwd())),
        "files": sorted(path.name for path in folder.iterdir()),
        "events": len(list((folder / "events").iterdir())),
        "bad batches": len(list((folder / "bad_batches").iterdir())),
        "checkpoints": sorted(int(path.name) for path in (folder / "checkpoints").iterdir()),
        "metrics": [without_clocks(row) for row in read_metrics(folder / "metrics.jsonl")],
        "samples": read_jsonl(folder / "samples.jsonl"),
        "wandb": list(sys.modules["wandb"].projects),
    }


def parameters(config: RunConfig) -> Any:
    """The policy's parameters."""
    return {path: np.asarray(value).tobytes() for path, value in named_params(build_policy(config).params)}


def shapes(config: RunConfig) -> Any:
    """Paths and shapes of the policy's parameters; nothing is initialised."""
    model = nnx.eval_shape(lambda: build_policy(config).model)
    return {path: value.shape for path, value in named_params(nnx.state(model, nnx.Param))}


def export(config: RunConfig) -> Any:
    """config.json of the exported policy."""
    build_policy(config).save("export")
    return json.loads(Path("export/config.json").read_text())


def tokens(config: RunConfig) -> Any:
    """Ids of a prompt, and the size of the vocabulary."""
    tokenizer = build_policy(config).tokenizer
    return tokenizer.encode_prompt("1+2="), tokenizer.vocab_size


def templated_tokens(config: RunConfig) -> Any:
    """As `tokens`, of a tokenizer that may have a chat template."""
    pytest.importorskip("transformers", reason="transformers is not installed: no chat template")
    pytest.importorskip("jinja2", reason="jinja2 is not installed: no chat template")
    return tokens(config)


def plan(config: RunConfig) -> Any:
    """The precision table's rows and the types of the published weights."""
    policy = build_policy(config)
    published = jax.eval_shape(policy.plan.publish, policy.params)
    return policy.plan.rows, {path: type(value).__name__ for path, value in named_params(published)}


def fp8_layer(config: RunConfig) -> Any:
    """Output and gradients of one linear layer of the policy, bound to its published weight as in training."""
    policy = build_policy(config)
    layer = policy.model.layers[0].mlp.up_proj
    bound = dict(named_params(policy.plan.training_weights(policy.params, policy.plan.publish(policy.params))))
    weight = bound["layers.0.mlp.up_proj.weight"]
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(size=(160, 1)))
    x = jnp.asarray(scale * rng.normal(size=(160, layer.weight.shape[1])), jnp.bfloat16)
    dy = jnp.asarray(rng.normal(size=(160, layer.weight.shape[0])) * scale[::-1], jnp.bfloat16)

    def program(x: jax.Array, weight: TrainableFp8Weight, dy: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, master: linear(x, rebind(weight, master), None, layer.numerics), x, weight.master)
        return y, pull(dy)

    return [np.asarray(leaf, np.float32).tobytes() for leaf in jax.tree.leaves(jit(program)(x, weight, dy))]


def rebind(weight: TrainableFp8Weight, master: jax.Array) -> TrainableFp8Weight:
    return TrainableFp8Weight(master, weight.quantized, weight.fp8_backward)


def logprobs(config: RunConfig) -> Any:
    """The trainer's log-probabilities of fixed tokens, bit for bit, and the shapes of the logits that it makes."""
    owner = GRPOTrainer(config)
    params, plan = owner.policy.params, owner.policy.plan
    ids = (np.arange(24, dtype=np.int32) % 17 + 2).reshape(2, 12)
    zeros = np.zeros(ids.shape, np.float32)
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    batch = TrainBatch(ids, positions, np.ones_like(ids), zeros, zeros, zeros, ids, zeros)
    seen, original = [], Decoder.logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "logits", lambda self, hidden: seen.append(hidden.shape) or original(self, hidden))
        values = owner.new_programs().logprobs(plan.frozen_weights(params, plan.publish(params)), batch)
    return values.tobytes(), seen


def engine(config: RunConfig) -> Any:
    """What the embedded engine ran for six requests of two to three tokens."""
    policy = build_policy(config)
    made = build_engine(policy, config.rollout)
    made.load_weights(published_weights(policy), 0)
    made.generate([Request(i, [2, 3, 4][: 2 + i % 2] + [5 + i], i) for i in range(6)], SamplingParams(1.0, 6, (), 0))
    return made.statistics, made.shapes


def examples(config: RunConfig) -> Any:
    """Prompts, answers and sizes of both splits of the task."""
    task = build_task(config.task, config.seed)
    return [(len(split), [(e.prompt, e.answer) for e in split[:4]]) for split in (task.train, task.eval)]


def rewards(config: RunConfig) -> Any:
    """Rewards of two fixed completions; NaN as None."""
    example = build_task(config.task, config.seed).eval[0]
    with RewardFunctions.from_config(config.rewards, build_task(config.task, config.seed)) as functions:
        texts = [str(example.answer), f"it is {example.answer}"]
        result = functions([example.prompt] * 2, texts, [example] * 2, ["stop"] * 2, [[1], [1, 1]])
    return [None if np.isnan(value) else float(value) for value in result.total], result.failures


def reward_in_this_process(config: RunConfig) -> Any:
    """Whether the verifier, which returns its process id, ran here."""
    import os

    (first, _), _ = rewards(config)
    return first == os.getpid()


# The table


@dataclass(frozen=True)
class Change:
    """Field `path` set to `value`, in `BASE` with the paths of `base` set, changes what `observe` returns.

    refused: the program refuses the value with a message that holds this.
    """

    path: str
    value: Any
    observe: Callable[[RunConfig], Any]
    base: dict[str, Any] = field(default_factory=dict)
    refused: str = ""

    @property
    def name(self) -> str:
        return ".".join("N" if part.isdecimal() else part for part in self.path.split("."))


BF16 = {"precision": {"preset": "bf16"}, "numerics.exact": False}
WIDE = {"model.hidden_size": 256, "model.intermediate_size": 256, "numerics.exact": False}
OVERRIDE = {"precision.overrides": [{"pattern": "*.mlp.*", "format": "bf16"}]}
FILE_TASK = {"task": {"kind": "jsonl", "path": "FILES/a.jsonl"}}
HF = {"tokenizer": {"kind": "huggingface", "path": "FILES/one/tokenizer.json"}}
CHAT = {"tokenizer": {"kind": "huggingface", "path": "FILES/two", "chat_template": True}}
OFF_POLICY = {"algorithm.minibatches": 2, "algorithm.epochs": 2}
KL = {"algorithm.kl_coef": 0.1, **OFF_POLICY}
PAIRS = {"rollout.group_size": 2, "algorithm.dynamic_sampling": True}
THREE = {"algorithm.epochs": 3}
WARM = {"warm_start.steps": 3, "warm_start.batch_size": 4, "run.steps": 1}

CHANGES = (
    Change("seed", 1, parameters),
    Change("seed", 1, prompts),
    Change("seed", 1, losses),
    Change("seed", 1, evaluation),
    Change("model.path", "FILES/checkpoint", parameters, {"model": {}}),
    Change("model.architecture", "qwen2", shapes),
    Change("model.hidden_size", 48, shapes),
    Change("model.intermediate_size", 96, shapes),
    Change("model.num_layers", 2, shapes),
    Change("model.num_heads", 4, shapes),
    Change("model.num_kv_heads", 1, shapes),
    Change("model.head_dim", 32, shapes),
    Change("model.tie_word_embeddings", False, shapes),
    Change("model.max_position_embeddings", 64, export),
    Change("model.rope_theta", 100.0, logprobs, BF16),
    Change("model.rms_norm_eps", 1e-3, logprobs, BF16),
    Change("tokenizer.kind", "byte", tokens),
    Change("tokenizer.path", "FILES/two/tokenizer.json", tokens, HF),
    Change("tokenizer.characters", "=+9876543210", tokens),
    Change("tokenizer.chat_template", True, templated_tokens, {"tokenizer": {"kind": "huggingface", "path": "FILES/two"}}),
    Change("tokenizer.chat_template_kwargs", {"enable_thinking": True}, templated_tokens, CHAT),
    Change("tokenizer.system_prompt", "be brief", templated_tokens, CHAT),
    Change("precision.preset", "fp8_forward", fp8_layer, WIDE),
    Change("precision.preset", "bf16", plan),
    Change("precision.overrides.N.pattern", "*.down_proj.weight", plan, OVERRIDE),
    Change("precision.overrides.N.format", "fp8", plan, OVERRIDE),
    Change("precision.wgrad_operand", "dual", fp8_layer, WIDE),
    Change("precision.wgrad_operand", "block", fp8_layer, WIDE),
    Change("precision.scale_format", "power_of_two", fp8_layer, WIDE),
    Change("precision.promotion_order", "triton", fp8_layer, WIDE),
    Change("numerics.exact", True, logprobs, BF16),
    Change("numerics.engine_variant", "cuda", logprobs, BF16),
    Change("task.kind", "gsm8k", examples, {"task": {}}),
    Change("task.name", "chain", examples, {"task": {}}),
    Change("task.path", "FILES/b.jsonl", examples, FILE_TASK),
    Change("task.path", "FILES/gsm8k_other", examples, {"task": {"kind": "gsm8k"}}),
    Change("task.eval_path", "FILES/held.jsonl", examples, FILE_TASK),
    Change("task.eval_fraction", 0.5, examples, FILE_TASK),
    Change("task.eval_fraction", 0.5, examples),
    Change("task.prompt_field", "question", examples, FILE_TASK),
    Change("task.answer_field", "label", examples, FILE_TASK),
    Change("task.prompt_template", "compute {prompt}", examples),
    Change("task.options", {"digits": 2, "train_size": 64, "eval_size": 4}, examples),
    Change("rewards.N.name", "last_number", rewards),
    Change("rewards.N.weight", 0.5, rewards),
    Change("rewards.N.timeout_s", 0.1, rewards, {"rewards.0.name": "effects_probe:slow"}),
    Change(
        "rewards.N.separate_process",
        True,
        reward_in_this_process,
        {"task": {"kind": "function", "name": "effects_probe:task"}, "rewards.0.name": "task"},
    ),
    Change("rollout.prompts_per_step", 3, sampling),
    Change("rollout.group_size", 3, sampling),
    Change("rollout.max_prompt_tokens", 5, prompts, {"task.options": {"digits": 2, "eval_size": 64}, "eval.prompts": 64}),
    Change("rollout.max_completion_tokens", 5, sampling),
    Change("rollout.temperature", 0.5, sampling),
    Change("rollout.temperature", 0.5, logprobs, BF16),
    Change("rollout.top_p", 0.9, sampling, refused="rollout.top_p"),
    Change("rollout.top_k", 5, sampling, refused="rollout.top_k"),
    Change("rollout.slots", 4, engine, BF16),
    Change("rollout.prefill_rows", 4, engine, BF16),
    Change("rollout.decode_chunk_tokens", 2, engine, BF16),
    Change("algorithm.name", "dr_grpo", losses),
    Change("algorithm.name", "rloo", losses),
    Change("algorithm.name", "dapo", losses),
    Change("algorithm.loss_aggregation", "sequence_mean", losses),
    Change("algorithm.clip_low", 0.5, losses, OFF_POLICY),
    Change("algorithm.clip_high", 0.5, losses, OFF_POLICY),
    Change("algorithm.dual_clip", 1.1, losses, OFF_POLICY),
    Change("algorithm.kl_coef", 0.1, losses, OFF_POLICY),
    Change("algorithm.kl_estimator", "k2", losses, KL),
    Change("algorithm.epochs", 2, updated_weights),
    Change("algorithm.minibatches", 2, updated_weights),
    Change("algorithm.mask_truncated", True, losses),
    Change("algorithm.dynamic_sampling", True, sampling, {"rollout.group_size": 2}),
    Change("algorithm.max_generation_rounds", 1, sampling, PAIRS),
    Change("algorithm.overlong_buffer_tokens", 4, losses),
    Change("optimizer.learning_rate", 1e-3, updated_weights, THREE),
    Change("optimizer.schedule", "linear", updated_weights, THREE),
    Change("optimizer.schedule", "cosine", updated_weights, THREE),
    Change("optimizer.warmup_steps", 2, updated_weights, THREE),
    Change("optimizer.b1", 0.5, updated_weights, THREE),
    Change("optimizer.b2", 0.9, updated_weights, THREE),
    Change("optimizer.eps", 1e-2, updated_weights, THREE),
    Change("optimizer.weight_decay", 0.5, updated_weights, THREE),
    Change("optimizer.grad_clip", 0.3, updated_weights, THREE),
    Change("batch.row_tokens", 20, batch_shapes),
    Change("batch.microbatch_tokens", 28, batch_shapes),
    Change("batch.logprob_chunk_tokens", 8, logprobs, BF16),
    Change("warm_start.steps", 2, warm_start, WARM),
    Change("warm_start.steps", 0, warm_start, {"warm_start.steps": 1, "run.steps": 1}),
    Change("warm_start.batch_size", 5, warm_start, WARM),
    Change("warm_start.learning_rate", 1e-2, warm_start, WARM),
    Change("warm_start.noise", 0.5, warm_start, WARM),
    Change("eval.every_steps", 1, run),
    Change("eval.prompts", 3, evaluation),
    Change("eval.samples", 3, evaluation),
    Change("checkpoint.every_steps", 1, run),
    Change("checkpoint.keep_last", 1, run, {"checkpoint.keep_best": 0}),
    Change("checkpoint.keep_best", 0, run, {"checkpoint.every_steps": 1, "checkpoint.keep_last": 1}),
    Change("run.directory", "elsewhere/run", run),
    Change("run.steps", 5, run),
    Change("run.samples_per_step", 2, run),
    Change("run.max_skipped_steps", 2, run, {"rewards.0.name": "effects_probe:not_finite"}),
    Change("run.tensorboard", True, run),
    Change("run.wandb_project", "project", run),
    Change("run.profile_steps", 1, run),
)


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    """Observations of unchanged configs, made once for all changes that share them."""
    return {}


@pytest.fixture
def world(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Change, RunConfig], Any]:
    """Makes an observation in an empty directory, with the scripted engine and a scripted wandb."""
    monkeypatch.setenv("GSM8K_DIR", str(files / "gsm8k"))
    monkeypatch.setattr(jetrl_jax.grpo, "build_engine", lambda policy, rollout: ScriptedEngine(policy.tokenizer))
    wandb: Any = types.ModuleType("wandb")
    wandb.Settings = lambda **settings: None

    def init(project: str, **_: Any) -> Any:
        wandb.projects.append(project)
        return types.SimpleNamespace(id="id", log=lambda row, step: None, finish=lambda: None)

    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def observe(change: Change, config: RunConfig) -> Any:
        wandb.projects = []
        here = tmp_path / str(len(list(tmp_path.iterdir())))
        here.mkdir()
        monkeypatch.chdir(here)
        return change.observe(config)

    return observe


def test_every_field_is_in_the_table():
    fields, listed = {path for path, _, _ in all_fields()}, {change.name for change in CHANGES}
    assert listed == fields, f"without an entry: {sorted(fields - listed)}; unknown: {sorted(listed - fields)}"


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: f"{c.name}={str(c.value).rsplit('/', 1)[-1]}-{c.observe.__name__}")
def test_change_is_seen(change: Change, world, files: Path, before: dict[str, Any]):
    path = change.path.replace(".N.", ".0.")
    base = build(change.base, files)
    if change.refused:
        with pytest.raises(UserError, match=change.refused):
            build(change.base, files, **{path: change.value})
        return
    changed = build(change.base, files, **{path: change.value})
    old, new = flatten(base.model_dump()), flatten(changed.model_dump())
    differing = {name for name in old.keys() | new.keys() if old.get(name, "-") != new.get(name, "-")}
    assert differing and all(f"{name}.".startswith(f"{path}.") for name in differing), differing
    key = f"{change.observe.__name__} {base.model_dump_json()}"
    if key not in before:
        before[key] = world(change, base)
        assert world(change, base) == before[key], "not repeatable: the observation proves nothing"
    assert world(change, changed) != before[key]
