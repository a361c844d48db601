"""Every field of the config does something: each is changed alone, and what the program does or writes must
differ.

`CHANGES` names for every field another valid value, the config it stands in, and an observation
(`observations.py`). A field without an entry fails.  Each observation is made twice of the unchanged config:
one that is not repeatable proves nothing.

Most observations are whole steps or runs of the real trainer on an engine and on device programs that follow
a script (`scripted.py`), so nothing is compiled; what the numerics do is seen on the compiled model.
"""

from __future__ import annotations

import copy
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from observations import (
    adapters,
    attention,
    batch_shapes,
    draft_head,
    engine,
    episodes,
    evaluation,
    examples,
    export,
    fp8_layer,
    head_gradient,
    joining,
    kernels,
    logprobs,
    loss_scale,
    losses,
    parameters,
    placement,
    plan,
    prompts,
    recomputation,
    reward_in_this_process,
    rewards,
    run,
    sampling,
    shapes,
    shared_gpu,
    speculation,
    streams,
    templated_tokens,
    tokens,
    turn_losses,
    updated_weights,
    vllm_engine,
    warm_start,
)
from scripted import ScriptedEngine

import jetrl_jax.runs.parts
from bridge.hf.draft import save_draft_head
from jetrl_jax.config.load import config_from_dict
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.schema import all_fields
from jetrl_jax.errors import UserError
from jetrl_jax.models.draft_head import DraftHead
from jetrl_jax.record.run_directory import flatten
from jetrl_jax.runs.policy import build_policy

HEAD = {"rollout.engine.speculation": {"kind": "head", "lengths": [0, 2]}, "model.num_layers": 4}
LOOKUP = {"rollout.engine.speculation": {"kind": "lookup"}}
SLOTS = {"kind": "jax", "slots": 8, "prefill_rows": 2}
BASE: dict[str, Any] = {
    "model": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 16,
    },
    "task": {"name": "sum", "options": {"digits": 1, "train_size": 64, "eval_size": 4}},
    "rewards": [{"name": "exact_match"}],
    "rollout": {
        "engine": SLOTS,
        "prompts_per_step": 4,
        "group_size": 4,
        "max_prompt_tokens": 8,
        "max_completion_tokens": 6,
    },
    "batch": {"microbatch_tokens": 56},
    "eval": {"prompts": 4, "samples": 2},
    "checkpoint": {"every_steps": 2},
    "run": {"steps": 4, "tensorboard": False},
}

# A module that configs of this test name; workers import it from the directory of the test's files.
PROBE = """
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
    from jetrl_jax.tasks.base import Example
    made = Ours()
    made.train, made.eval = [Example("1", "1")], [Example("2", "2")]
    return made

def slow(completions, **kwargs):
    time.sleep(0.5)
    return [1.0] * len(completions)

def not_finite(completions, **kwargs):
    return [float("nan")] * len(completions)

def equal(completions, **kwargs):
    return [1.0] * len(completions)

class Talk:
    def __init__(self, slow_s=0.0):
        self.slow_s = slow_s
    def reset(self, *, seed=None):
        return "1+1=", {}
    def step(self, text):
        if text:
            time.sleep(self.slow_s)
        return "0123456789", 0.6, False, False, {}
    def close(self):
        pass
"""
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if enable_thinking %}abc{% endif %}"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What configs of this test read: task files, tokenizers, a checkpoint, and the module `PROBE`."""
    root = tmp_path_factory.mktemp("files")
    (root / "effects_probe.py").write_text(PROBE)
    for name, start in (("a", 0), ("b", 100), ("held", 200)):
        rows = [
            {"prompt": f"p{i}", "question": f"q{i}", "answer": f"{i}", "label": f"l{i}"}
            for i in range(start, start + 10)
        ]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder, shift in (("gsm8k", 0), ("gsm8k_other", 50)):
        (root / folder).mkdir()
        for split, start in (("train", shift), ("test", shift + 10)):
            rows = [
                {"question": f"how much is {i}?", "answer": f"it is #### {i}"}
                for i in range(start, start + 4)
            ]
            (root / folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_policy(build(seed=5)).save(root / "checkpoint")
    build_policy(build(LORA, seed=5)).save_adapter(root / "adapter", "its base")
    model = build_policy(build({"model.num_layers": 4})).model
    ids = np.arange(model.config.vocab_size)
    save_draft_head(root / "head", DraftHead(model.config, model.numerics, ids, rngs=nnx.Rngs(9)))
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


KINDS = (
    "model.path",
    "tokenizer.kind",
    "precision.preset",
    "task.kind",
    "rollout.engine.kind",
    "algorithm.name",
    "correction.mode",
)
KINDS += ("correction.weight.kind", "correction.reject.kind", "rollout.engine.speculation.kind")
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
FP16 = {"precision": {"preset": "fp16"}}
FP32 = {"precision": {"preset": "fp32"}, "numerics.exact": False}  # the least to compile
WIDE = {"model.hidden_size": 256, "model.intermediate_size": 256, "numerics.exact": False}
OVERRIDE = {"precision.overrides": [{"pattern": "*.mlp.*", "format": "bf16"}]}
FILE_TASK = {"task": {"kind": "jsonl", "path": "FILES/a.jsonl"}}
HF = {"tokenizer": {"kind": "huggingface", "path": "FILES/one/tokenizer.json"}}
CHAT = {"tokenizer": {"kind": "huggingface", "path": "FILES/two", "chat_template": True}}
OFF_POLICY = {"algorithm.minibatches": 2, "algorithm.epochs": 2}
KL = {"algorithm.kl_coef": 0.1, **OFF_POLICY}
PAIRS = {"rollout.group_size": 2, "algorithm.dynamic_sampling": True}
THREE = {"algorithm.epochs": 3}
NO_SLOTS = {
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_prompt_tokens": 8, "max_completion_tokens": 6}
}
BLOCKS = {
    "model": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 32,
    }
}
VLLM = {**BLOCKS, **NO_SLOTS, "rollout.engine.kind": "vllm"}
QUANTISED_QUERIES = {**VLLM, "precision.kv_cache": "fp8", "numerics.exact": False}
EAGLE = {
    **NO_SLOTS,
    "rollout.engine": {
        "kind": "vllm",
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 2, "model": "FILES/head"},
        "draft_learning_rate": 1e-4,
    },
    "model.num_layers": 4,
}
SERVER = {**VLLM, "rollout.engine.kind": "vllm_server"}
EXTERNAL = {**VLLM, "rollout.engine": {"kind": "vllm_external", "url": "http://127.0.0.1:1"}}
PROCESSES = {
    "sharding.data": 4,
    "distributed": {"processes": 2, "process_id": 1, "coordinator": "node1:8476"},
}
TALK = {
    "task": {
        "kind": "environment",
        "name": "effects_probe:Talk",
        "max_turns": 3,
        "train_size": 8,
        "eval_size": 8,
    },
    "rewards": [{}],
    "rollout.max_completion_tokens": 40,
    "rollout.max_turn_tokens": 7,
    "batch.microbatch_tokens": 96,
}
LORA = {"lora": {"rank": 4, "alpha": 4.0}}
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
    Change(
        "tokenizer.chat_template",
        True,
        templated_tokens,
        {"tokenizer": {"kind": "huggingface", "path": "FILES/two"}},
    ),
    Change("tokenizer.chat_template_kwargs", {"enable_thinking": True}, templated_tokens, CHAT),
    Change("tokenizer.system_prompt", "be brief", templated_tokens, CHAT),
    Change("precision.preset", "fp8_forward", fp8_layer, WIDE),
    Change("precision.preset", "bf16", plan),
    Change("precision.preset", "fp16", plan),
    Change("precision.overrides.N.pattern", "*.down_proj.weight", plan, OVERRIDE),
    Change("precision.overrides.N.format", "fp8", plan, OVERRIDE),
    Change("precision.wgrad_operand", "dual", fp8_layer, WIDE),
    Change("precision.wgrad_operand", "block", fp8_layer, WIDE),
    Change("precision.scale_format", "power_of_two", fp8_layer, WIDE),
    Change("precision.promotion_order", "triton", fp8_layer, WIDE),
    Change("precision.kv_cache", "fp8", plan),
    Change("precision.kv_query", "fp8", plan, QUANTISED_QUERIES),
    Change("precision.loss_scale.initial", 64.0, loss_scale, FP16),
    Change("precision.loss_scale.growth_interval", 7, loss_scale, FP16),
    Change("numerics.exact", True, logprobs, BF16),
    Change("numerics.engine_variant", "cuda", logprobs, BF16),
    Change("numerics.kernels", "xla", kernels, {"numerics.exact": False}),
    Change("numerics.attention", "xla", attention, {"numerics.exact": False}),
    Change("numerics.head_gradient", "bf16x2", head_gradient),
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
    Change("task.max_turns", 2, episodes, TALK),
    Change("task.max_observation_tokens", 3, episodes, TALK),
    Change("task.stop_texts", ["a"], episodes, TALK),
    Change("task.observation_template", "={observation}", episodes, TALK),
    Change("task.timeout_s", 0.05, episodes, TALK | {"task.options": {"slow_s": 0.1}, "task.max_turns": 1}),
    Change("task.workers", 1, episodes, TALK),
    Change("task.solved", 2.0, episodes, TALK),
    Change("task.train_size", 9, episodes, TALK),
    Change("task.eval_size", 3, episodes, TALK),
    Change("rollout.max_turn_tokens", 2, episodes, TALK),
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
    Change(
        "rollout.max_prompt_tokens",
        5,
        prompts,
        {"task.options": {"digits": 2, "eval_size": 64}, "eval.prompts": 64},
    ),
    Change("rollout.max_completion_tokens", 5, sampling),
    Change("rollout.temperature", 0.5, sampling),
    Change("rollout.engine.kind", "vllm", vllm_engine, {**BLOCKS, **NO_SLOTS}),
    Change("rollout.engine.kind", "vllm_server", vllm_engine, VLLM),
    Change("rollout.engine.url", "http://127.0.0.1:2", vllm_engine, EXTERNAL),
    Change("rollout.engine.startup_timeout_s", 7.0, vllm_engine, SERVER),
    Change("rollout.engine.request_timeout_s", 7.0, vllm_engine, SERVER),
    Change("rollout.engine.sync_timeout_s", 7.0, vllm_engine, SERVER),
    Change("rollout.engine.restarts", 2, vllm_engine, SERVER),
    Change("numerics.exact", False, vllm_engine, VLLM),
    Change("numerics.engine_variant", "cuda", vllm_engine, VLLM),
    Change("rollout.engine.max_num_seqs", 7, vllm_engine, VLLM),
    Change(
        "rollout.engine.speculative_config",
        {"method": "suffix", "num_speculative_tokens": 2},
        vllm_engine,
        VLLM,
    ),
    Change("rollout.engine.draft_learning_rate", 1e-3, draft_head, BF16 | EAGLE),
    Change("rollout.engine.gpu_memory_utilization", 0.7, vllm_engine, VLLM),
    Change("rollout.engine.sleep", False, shared_gpu, VLLM),
    Change("rollout.engine.kv_cache_memory_mb", 7, vllm_engine, VLLM),
    Change("rollout.engine.enforce_eager", False, vllm_engine, VLLM | {"numerics.exact": False}),
    Change("rollout.engine.probe_tokens", 7, vllm_engine, VLLM),
    Change("rollout.engine.probe_logprob_tolerance", 0.7, vllm_engine, VLLM),
    Change("rollout.engine.on_mismatch", "warn", vllm_engine, VLLM),
    Change("rollout.temperature", 0.5, logprobs, BF16),
    Change("rollout.top_p", 0.9, sampling, refused="rollout.top_p"),
    Change("rollout.top_k", 5, sampling, refused="rollout.top_k"),
    Change("rollout.turns", "stream", streams, TALK),
    Change("rollout.engine.slots", 4, engine, FP32),
    Change("rollout.engine.prefill_rows", 4, engine, FP32),
    Change("rollout.engine.decode_chunk_tokens", 2, engine, FP32),
    Change("rollout.engine.speculation.kind", "lookup", speculation, FP32),
    Change("rollout.engine.speculation.lengths", (0, 2), speculation, FP32 | LOOKUP),
    Change("rollout.engine.speculation.longest_match", 1, speculation, FP32 | LOOKUP),
    Change("rollout.engine.speculation.head_path", "FILES/head", draft_head, BF16 | HEAD),
    Change("rollout.engine.speculation.learning_rate", 1e-2, draft_head, BF16 | HEAD),
    Change("algorithm.name", "dr_grpo", losses),
    Change("algorithm.name", "rloo", losses),
    Change("algorithm.name", "dapo", losses),
    Change("algorithm.name", "reinforce_pp", losses),
    Change("algorithm.name", "gspo", losses),
    Change("algorithm.name", "cispo", losses),
    Change("correction.mode", "bypass", losses, OFF_POLICY),
    Change("correction.weight.kind", "token_truncate", losses),
    Change("correction.weight.kind", "sequence_truncate", losses),
    Change("correction.weight.kind", "token_mask", losses),
    Change("correction.weight.kind", "sequence_mask", losses),
    Change("correction.weight.low", 0.9, losses, {"correction.weight.kind": "token_mask"}),
    Change("correction.weight.high", 1.1, losses, {"correction.weight.kind": "token_truncate"}),
    Change("correction.weight.normalize", True, losses, {"correction.weight.kind": "token_truncate"}),
    Change("correction.reject.kind", "k3", losses, {"correction": {"veto": 1e-9}}),
    Change(
        "correction.reject.level",
        "token",
        losses,
        {"correction.reject": {"kind": "k1", "low": 0.5, "high": 1.2}},
    ),
    Change("correction.reject.low", 0.5, losses, {"correction.reject": {"kind": "k1", "level": "token"}}),
    Change("correction.reject.high", 2.0, losses, {"correction.reject": {"kind": "k2", "level": "token"}}),
    Change("correction.veto", 0.9, losses, {"correction.weight.kind": "token_truncate"}),
    Change("lora.rank", 2, shapes, LORA),
    Change("lora.alpha", 8.0, adapters, LORA),
    Change("lora.rslora", True, adapters, LORA),
    Change("lora.targets", ["q_proj"], shapes, LORA),
    Change("lora.path", "FILES/adapter", parameters, LORA),
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
    Change("algorithm.credit", "turn", turn_losses, TALK),
    Change("optimizer.learning_rate", 1e-3, updated_weights, THREE),
    Change("optimizer.schedule", "linear", updated_weights, THREE),
    Change("optimizer.schedule", "cosine", updated_weights, THREE),
    Change("optimizer.warmup_steps", 2, updated_weights, THREE),
    Change("optimizer.b1", 0.5, updated_weights, THREE),
    Change("optimizer.b2", 0.9, updated_weights, THREE),
    Change("optimizer.eps", 1e-2, updated_weights, THREE),
    Change("optimizer.weight_decay", 0.5, updated_weights, THREE),
    Change("optimizer.grad_clip", 0.3, updated_weights, THREE),
    Change("sharding.data", 2, placement, FP32),
    Change("sharding.fsdp", 2, placement, FP32),
    Change("sharding.tensor", 2, placement, FP32),
    Change("distributed.processes", 4, joining, PROCESSES),
    Change("distributed.processes", None, joining, PROCESSES),
    Change("distributed.process_id", 0, joining, PROCESSES),
    Change("distributed.coordinator", "node2:8476", joining, PROCESSES),
    Change("distributed.timeout_s", 7, joining, PROCESSES),
    Change("batch.row_tokens", 20, batch_shapes),
    Change("batch.remat", "layer", recomputation, FP32),
    Change("batch.microbatch_tokens", 28, batch_shapes),
    Change("batch.logprob_chunk_tokens", 8, logprobs, BF16),
    Change("warm_start.steps", 2, warm_start, WARM),
    Change("warm_start.batch_size", 5, warm_start, WARM),
    Change("warm_start.learning_rate", 1e-2, warm_start, WARM),
    Change("warm_start.noise", 0.5, warm_start, WARM),
    Change("eval.every_steps", 1, run),
    Change("eval.prompts", 3, evaluation),
    Change("eval.samples", 3, evaluation),
    Change("eval.verifier", "gsm8k", evaluation),
    Change("rewards.N.name", "gsm8k", evaluation, {"rewards.0.name": "exact_match"}),
    Change("checkpoint.every_steps", 1, run),
    Change("checkpoint.keep_last", 1, run, {"checkpoint.keep_best": 0}),
    Change("checkpoint.keep_best", 0, run, {"checkpoint.every_steps": 1, "checkpoint.keep_last": 1}),
    Change("run.directory", "elsewhere/run", run),
    Change("run.steps", 5, run),
    Change("run.samples_per_step", 2, run),
    Change("run.max_skipped_steps", 2, run, {"rewards.0.name": "effects_probe:not_finite"}),
    Change("run.max_steps_without_signal", 2, run, {"rewards.0.name": "effects_probe:equal"}),
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
    monkeypatch.setattr(
        jetrl_jax.runs.parts, "build_engine", lambda policy, *_, **__: ScriptedEngine(policy.tokenizer)
    )
    wandb: Any = types.ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)  # libraries that are first imported here ask for it
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
    assert listed == fields, (
        f"without an entry: {sorted(fields - listed)}; unknown: {sorted(listed - fields)}"
    )


@pytest.mark.parametrize(
    "change", CHANGES, ids=lambda c: f"{c.name}={str(c.value).rsplit('/', 1)[-1]}-{c.observe.__name__}"
)
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
    # another kind of a section has other fields and defaults
    of_kind = path.rsplit(".", 1)[0] if path in KINDS else path
    assert differing and all(f"{name}.".startswith(f"{of_kind}.") for name in differing), differing
    key = f"{change.observe.__name__} {base.model_dump_json()}"
    if key not in before:
        before[key] = world(change, base)
        assert world(change, base) == before[key], "not repeatable: the observation proves nothing"
    assert world(change, changed) != before[key]
