"""Observations of a config: functions that build the parts of a run and return what they do, as values to
compare.

None returns the config itself or `config.yaml`.  Those of steps and runs need `scripted` in place of the
engine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scripted import ScriptedEngine, ScriptedTrainer, scripted_logprobs

from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.devices import processes
from jetrl_jax.devices.gpu_memory import share_gpu
from jetrl_jax.errors import RunStopped
from jetrl_jax.models import flash_attention
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.linear import activation, linear
from jetrl_jax.precision.parameters import jit, named_params
from jetrl_jax.precision.trainable_weight import TrainableFp8Weight
from jetrl_jax.record.metrics import read_metrics, without_clocks
from jetrl_jax.record.run_directory import read_jsonl
from jetrl_jax.rewards.functions import RewardFunctions
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from jetrl_jax.runs.drafter import build_drafter
from jetrl_jax.runs.engines import build_engine
from jetrl_jax.runs.grpo import GRPOTrainer, build_player
from jetrl_jax.runs.policy import build_policy, published_weights
from jetrl_jax.tasks.registry import build_task
from jetrl_jax.training.evaluation import Evaluator
from jetrl_jax.training.programs import build_programs


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
    parts = ScriptedTrainer(config).parts
    programs, engine = parts.programs, parts.new_engine()
    state = programs.init(parts.policy.params)
    with parts.new_rewards() as rewards:
        row, batch = parts.new_step(engine, rewards, state, parts.reference(state))(1)
    weights = jax.tree.map(lambda value: np.asarray(value).tolist(), programs.weights)
    prompts = [group.prompt.example.prompt for group in batch.groups]
    return Seen(without_clocks(row), prompts, engine.asked, programs.shapes, programs.losses, weights)


def loss_scale(config: RunConfig) -> Any:
    """The loss scale of the first update, and how often it may grow."""
    scale = GRPOTrainer(config).parts.programs.loss_scale
    return None if scale is None else (float(scale.factor), scale.growth_interval)


def shared_gpu(config: RunConfig) -> Any:
    """What a process that has not started JAX is told of the GPU's memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
        patch.setattr(os, "environ", {})
        share_gpu(config)
        return dict(os.environ)


def vllm_engine(config: RunConfig) -> Any:
    """The vLLM engine of a config as it stands before its first weights: its kind, limits and probe; nothing
    is started.
    """

    class InProcess:
        """In place of vLLM itself, which is started when it is made."""

        owned, url = None, None

        def __init__(self, model: Any, fp8_paths: Any, settings: Any) -> None:
            self.settings = settings
            self.after_load = []

        def close(self) -> None:
            """Nothing runs."""

    owner = GRPOTrainer(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jetrl_jax.runs.engines.require_vllm", lambda: None)
        patch.setitem(sys.modules, "bridge.vllm.in_process", SimpleNamespace(InProcessEngine=InProcess))
        patch.setattr("jetrl_jax.runs.engines.set_environment", lambda on_cpu, eager: None)
        engine = build_engine(owner.policy, config.rollout)
    if not engine.after_load:
        return type(engine).__name__
    (certificate,) = engine.after_load
    limits = certificate.probe, certificate.tolerance, certificate.on_mismatch
    engine.close()
    return engine.owned, engine.url, dataclasses.asdict(engine.settings), *limits


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


def placement(config: RunConfig) -> Any:
    """Where the first and the last matrix lie, device by device."""
    parts = GRPOTrainer(config).parts
    state = parts.programs.init(parts.policy.params)
    values = [value for value in jax.tree.leaves(state.params) if value.ndim == 2]
    return [
        [(shard.device.id, shard.data.shape) for shard in value.addressable_shards]
        for value in (values[0], values[-1])
    ]


def joining(config: RunConfig) -> Any:
    """What JAX's distributed runtime is told by this process; nothing is started."""
    told: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: told.append((args, kwargs)))
        processes.start(config.distributed)
    return told


def recomputation(config: RunConfig) -> Any:
    """How many parts of the forward the backward computes again."""
    ids = np.ones((1, 4), np.int32)
    return str(jax.make_jaxpr(build_policy(config).model)(ids, ids, ids)).count("= remat")


def kernels(config: RunConfig) -> Any:
    """What forms the FP8 products."""
    choices = build_policy(config).model.numerics.choices
    return choices.forward.name, choices.backward.name


def attention(config: RunConfig) -> Any:
    """What computes attention, on a GPU that takes everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attention, "_device_problem", lambda dtype, head_dim: None)
        return build_policy(config).model.numerics.choices.attention.name


def head_gradient(config: RunConfig) -> Any:
    """In how many parts the head's gradient is multiplied."""
    return build_policy(config).model.numerics.choices.head_backward.name


def losses(config: RunConfig) -> Any:
    """The loss share of each microbatch of a step."""
    return step(config).losses


def turn_losses(config: RunConfig) -> Any:
    """As `losses`, of episodes of letters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jetrl_jax.runs.parts.build_engine", lambda policy, *_, **__: Speaker(policy.tokenizer))
        return losses(config)


def updated_weights(config: RunConfig) -> Any:
    """Two arrays after the updates of a step, by the run's optimiser."""
    return step(config).weights


def warm_start(config: RunConfig) -> Any:
    """The supervised batches of a run, and two arrays after them."""
    owner = ScriptedTrainer(config)
    run(config, owner)
    programs = owner.parts.warm_programs or owner.parts.programs
    return [batch.tolist() for batch in programs.supervised], jax.tree.map(
        lambda value: np.asarray(value).tolist(), programs.weights
    )


def evaluation(config: RunConfig) -> Any:
    """The metrics of an evaluation and what the engine was asked for."""
    parts = ScriptedTrainer(config).parts
    engine = ScriptedEngine(parts.policy.tokenizer)
    engine.load(None, 1)
    return parts.evaluator(engine).metrics, engine.asked


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


def adapters(config: RunConfig) -> Any:
    """Rank, scale and targets of the policy's adapters."""
    return nnx.eval_shape(lambda: build_policy(config).model).adapters


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
    return tokens(config)


def plan(config: RunConfig) -> Any:
    """The precision table's rows and the types of the published weights."""
    policy = build_policy(config)
    published = jax.eval_shape(policy.plan.publish, policy.params, policy.plan.unit_scales)
    return policy.plan.rows, {path: type(value).__name__ for path, value in named_params(published)}


def fp8_layer(config: RunConfig) -> Any:
    """Output and gradients of one linear layer of the policy,
    bound to its published weight as in training.
    """
    policy = build_policy(config)
    layer = policy.model.layers[0].mlp.up_proj
    bound = dict(
        named_params(policy.plan.training_weights(policy.params, policy.plan.publish(policy.params)))
    )
    weight = bound["layers.0.mlp.up_proj.weight"]
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(size=(160, 1)))
    x = jnp.asarray(scale * rng.normal(size=(160, layer.weight.shape[1])), jnp.bfloat16)
    dy = jnp.asarray(rng.normal(size=(160, layer.weight.shape[0])) * scale[::-1], jnp.bfloat16)

    def program(x: jax.Array, weight: TrainableFp8Weight, dy: jax.Array) -> Any:
        def output(x: jax.Array, master: jax.Array) -> jax.Array:
            bound = rebind(weight, master)
            return linear(activation(x, (bound,), layer.numerics), bound, None, layer.numerics)

        y, pull = jax.vjp(output, x, weight.master)
        return y, pull(dy)

    return [np.asarray(leaf, np.float32).tobytes() for leaf in jax.tree.leaves(jit(program)(x, weight, dy))]


def rebind(weight: TrainableFp8Weight, master: jax.Array) -> TrainableFp8Weight:
    return TrainableFp8Weight(master, weight.quantized, weight.fp8_backward)


def logprobs(config: RunConfig) -> Any:
    """The trainer's log-probabilities of fixed tokens, bit for bit, and the shapes of the logits that it
    makes.
    """
    owner = GRPOTrainer(config)
    params, plan = owner.policy.params, owner.policy.plan
    ids = (np.arange(24, dtype=np.int32) % 17 + 2).reshape(2, 12)
    zeros = np.zeros(ids.shape, np.float32)
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    batch = TrainBatch(ids, positions, np.ones_like(ids), zeros, zeros, zeros, ids, zeros)
    seen, original = [], Decoder.logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Decoder,
            "logits",
            lambda self, hidden, head=None: seen.append(hidden.shape) or original(self, hidden, head),
        )
        values = owner.parts.programs.logprobs(plan.frozen_weights(params, plan.publish(params)), batch)
    return values.tobytes(), seen


def engine(config: RunConfig) -> Any:
    """What the embedded engine ran for six requests of two to three tokens."""
    policy = build_policy(config)
    made = build_engine(policy, config.rollout)
    made.load(published_weights(policy), 0)
    made.generate(
        [Request(i, [*[2, 3, 4][: 2 + i % 2], 5 + i], i) for i in range(6)], SamplingParams(1.0, 6, (), 0)
    )
    return made.statistics, made.shapes


def streams(config: RunConfig) -> Any:
    """Whether the embedded engine takes replies."""
    return build_engine(build_policy(config), config.rollout).streams


def speculation(config: RunConfig) -> Any:
    """The draft of the embedded engine, and the rule and promise that it records."""
    return build_engine(build_policy(config), config.rollout).describe()


def draft_head(config: RunConfig) -> Any:
    """A draft head as a run begins with it, and its optimiser's step by a gradient of ones."""
    policy = build_policy(config)
    trainer = build_drafter(policy, build_programs(config, policy.model, policy.plan, None))
    assert trainer is not None
    ones = jax.tree.map(jnp.ones_like, trainer.params)
    with jax.numpy_dtype_promotion("standard"):
        changes, _ = jit(trainer._optimizer.update)(ones, trainer.moments, trainer.params)
    return [np.asarray(leaf, np.float32).tolist() for leaf in jax.tree.leaves((trainer.params, changes))]


def examples(config: RunConfig) -> Any:
    """Prompts, answers and sizes of both splits of the task."""
    task = build_task(config.task, config.seed)
    return [(len(split), [(e.prompt, e.answer) for e in split[:4]]) for split in (task.train, task.eval)]


class Speaker(ScriptedEngine):
    """Says letters, some of which are stop texts; what it says depends on the request and all before it."""

    def _answer(self, request: Request, sampling: SamplingParams) -> Trajectory:
        rng = np.random.default_rng((request.seed, len(request.prompt_ids)))
        said = [*self.tokenizer.encode("".join(rng.choice(list("abc"), size=6))), 1]
        ends = [place for place, one in enumerate(said) if one in sampling.stop_token_ids]
        ids = np.array(said[: min(ends[0] + 1, request.limit(sampling))], np.int32)
        reason = "stop" if ids[-1] in sampling.stop_token_ids else "length"
        logprobs = scripted_logprobs(ids, 0)
        return Trajectory.of_completion(request.id, request.prompt_ids, ids, logprobs, reason, 0)


def episodes(config: RunConfig) -> Any:
    """Episodes of an evaluation on a scripted engine, sizes of the splits, and the number of workers."""
    policy, task = build_policy(config), build_task(config.task, config.seed)
    player = build_player(config, task, policy.tokenizer)
    engine = Speaker(policy.tokenizer)
    engine.load(None, 0)
    sizes = {"prompts": 4, "samples": 2, "temperature": 1.0, "seed": 0, "player": player}
    lengths = {"max_prompt_tokens": 8, "max_completion_tokens": config.rollout.max_completion_tokens}
    result = Evaluator(task, policy.tokenizer, **sizes, **lengths)(engine)
    task.close()
    samples = [(sample["completion"], sample["reward"]) for sample in result.samples]
    return samples, result.metrics, len(task.train), len(task.eval), len(task.pool._workers)


def rewards(config: RunConfig) -> Any:
    """Rewards of two fixed completions; NaN as None."""
    example = build_task(config.task, config.seed).eval[0]
    with RewardFunctions.from_config(config.rewards, build_task(config.task, config.seed)) as functions:
        texts = [str(example.answer), f"it is {example.answer}"]
        result = functions([example.prompt] * 2, texts, [example] * 2, ["stop"] * 2, [[1], [1, 1]])
    return [None if np.isnan(value) else float(value) for value in result.total], result.failures


def reward_in_this_process(config: RunConfig) -> Any:
    """Whether the verifier, which returns its process id, ran here."""
    (first, _), _ = rewards(config)
    return first == os.getpid()
