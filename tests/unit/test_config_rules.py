"""What fields demand of each other: every rule with a config that breaks it and one that just keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from jetrl_jax.config.load import config_from_dict
from jetrl_jax.config.rules.tables import ARITHMETIC_FAMILIES, BUILTIN_REWARDS, NO_EFFECT, RULES, UNTIMED_REWARDS, find_problems
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.schema import SYNONYMS, all_fields
from jetrl_jax.config.types import value_at
from jetrl_jax.errors import UserError

# Blamed field, a config (as one line of YAML) that breaks the rule, and one at its edge.
EXTERNAL = "rollout: {engine: vllm}, vllm: {mode: external"
BROKEN = [
    ("model.num_kv_heads", "model: {num_heads: 6, num_kv_heads: 4}", "model: {num_heads: 6, num_kv_heads: 3}"),
    (
        "precision.overrides",
        "precision: {preset: fp16, overrides: [{pattern: layers.0.*, format: fp8}]}",
        "precision: {preset: bf16, overrides: [{pattern: layers.0.*, format: fp8}]}",
    ),
    (
        "precision.overrides",
        "precision: {preset: fp32, overrides: [{pattern: layers.0.*, format: fp8}]}",
        "precision: {preset: bf16, overrides: [{pattern: layers.0.*, format: fp8}]}",
    ),
    ("model.head_dim", "model: {head_dim: 33}", "model: {head_dim: 34}"),
    ("model.hidden_size", "model: {architecture: llama, hidden_size: 130}", "model: {architecture: qwen3, hidden_size: 130}"),
    ("model.max_position_embeddings", "model: {max_position_embeddings: 63}", "model: {max_position_embeddings: 64}"),
    *(
        ("rollout.temperature", f"rollout: {{temperature: {bad}}}", f"rollout: {{temperature: {edge}}}")
        for bad, edge in (("1.0e-46", "0.001"), ("1.0e-40", "0.001"), ("0.00099", "0.001"), ("1.1e+6", "1.0e+6"), ("1.0e+39", "1.0e+6"))
    ),
    *(
        ("rollout.temperature", f"rollout: {{engine: vllm, temperature: {bad}}}", f"rollout: {{engine: vllm, temperature: {edge}}}")
        for bad, edge in (("0.0099", "0.01"), ("0.005", "0.01"), ("2.001", "2"))
    ),
    ("rollout.top_p", "rollout: {top_p: 0.999}", "rollout: {top_p: 1}"),
    ("rollout.top_k", "rollout: {top_k: 1}", "rollout: {top_k: 0}"),
    ("batch.row_tokens", "batch: {row_tokens: 63}", "batch: {row_tokens: 64}"),
    ("batch.microbatch_tokens", "batch: {microbatch_tokens: 63}", "batch: {microbatch_tokens: 64}"),
    ("batch.microbatch_tokens", "batch: {row_tokens: 128, microbatch_tokens: 127}", "batch: {row_tokens: 128, microbatch_tokens: 128}"),
    (
        "sharding.fsdp",
        "model: {hidden_size: 256, intermediate_size: 384, head_dim: 64}, sharding: {fsdp: 4}",
        "model: {hidden_size: 512, intermediate_size: 384, head_dim: 128}, sharding: {fsdp: 4}",
    ),
    (
        "sharding.fsdp",
        "model: {hidden_size: 128}, precision: {preset: bf16}, sharding: {fsdp: 3}",
        "model: {hidden_size: 126}, precision: {preset: bf16}, sharding: {fsdp: 3}",
    ),
    ("numerics.kernels", "numerics: {kernels: xla_fast}", "numerics: {kernels: xla_fast, exact: false}"),
    ("numerics.attention", "numerics: {attention: cudnn}", "numerics: {attention: cudnn, exact: false}"),
    (
        "numerics.attention",
        "precision: {preset: fp32}, numerics: {attention: cudnn, exact: false}",
        "precision: {preset: fp16}, numerics: {attention: cudnn, exact: false}",
    ),
    (
        "sharding.tensor",
        "model: {hidden_size: 256, intermediate_size: 256, head_dim: 64, num_kv_heads: 2}, sharding: {tensor: 2}",
        "model: {hidden_size: 256, intermediate_size: 256, head_dim: 64, num_kv_heads: 4}, sharding: {tensor: 2}",
    ),
    (
        "sharding.tensor",
        "model: {head_dim: 32, num_kv_heads: 2, num_heads: 4}, precision: {preset: bf16}, sharding: {tensor: 4}",
        "model: {head_dim: 32, num_kv_heads: 4, num_heads: 4}, precision: {preset: bf16}, sharding: {tensor: 4}",
    ),
    ("warm_start.batch_size", "warm_start: {steps: 1, batch_size: 6}, sharding: {data: 4}", "warm_start: {batch_size: 8, steps: 1}"),
    ("sharding.data", "rollout: {engine: vllm}, sharding: {data: 2}", "rollout: {engine: vllm}"),
    (
        "distributed.process_id",
        "distributed: {processes: 2, process_id: 2}, sharding: {data: 2}",
        "distributed: {processes: 2, process_id: 1}, sharding: {data: 2}",
    ),
    (
        "distributed.coordinator",
        "distributed: {processes: 2, coordinator: node1}, sharding: {data: 2}",
        "distributed: {processes: 2, coordinator: '[::1]:8476'}, sharding: {data: 2}",
    ),
    (
        "distributed.coordinator",
        "distributed: {processes: 2, coordinator: 'node-1.a:65536'}, sharding: {data: 2}",
        "distributed: {processes: 2, coordinator: 'node-1.a:65535'}, sharding: {data: 2}",
    ),
    ("distributed.processes", "distributed: {processes: 2}, sharding: {data: 3}", "distributed: {processes: 2}, sharding: {data: 4}"),
    ("distributed.processes", "distributed: {processes: 2}", "distributed: {processes: null}"),
    ("distributed.processes", "distributed: {processes: null}, rollout: {engine: vllm}", "distributed: {processes: null}"),
    ("optimizer.warmup_steps", "optimizer: {warmup_steps: 10}, run: {steps: 10}", "optimizer: {warmup_steps: 9}, run: {steps: 10}"),
    (
        "optimizer.warmup_steps",
        "optimizer: {warmup_steps: 12}, run: {steps: 2}, algorithm: {epochs: 2, minibatches: 3}",
        "optimizer: {warmup_steps: 11}, run: {steps: 2}, algorithm: {epochs: 2, minibatches: 3}",
    ),
    *(
        (f"{section}.{name}", f"{section}: {{{name}: ~nobody_of_that_name/x{more}}}", f"{section}: {{{name}: ~/x{more}}}")
        for section, name, more in (
            ("model", "path", ""),
            ("tokenizer", "path", ", kind: huggingface"),
            ("task", "path", ", kind: jsonl"),
            ("task", "eval_path", ", kind: jsonl, path: a"),
            ("run", "directory", ""),
        )
    ),
    ("algorithm.minibatches", "algorithm: {minibatches: 33}", "algorithm: {minibatches: 32}"),
    ("algorithm.overlong_buffer_tokens", "algorithm: {overlong_buffer_tokens: 33}", "algorithm: {overlong_buffer_tokens: 32}"),
    ("vllm.url", "rollout: {engine: vllm}, vllm: {mode: external}", "rollout: {engine: vllm}, vllm: {mode: external, url: 'http://a:1'}"),
    *(
        ("vllm.url", f"{EXTERNAL}, url: '{url}'}}", f"{EXTERNAL}, url: 'https://[::1]:8'}}")
        for url in ("http://[::1", "ftp://a", "nonsense", "http://a:b", "http://")
    ),
    ("vllm.url", "rollout: {engine: vllm}, vllm: {mode: server, url: 'http://a:1'}", "rollout: {engine: vllm}, vllm: {mode: server}"),
    ("rollout.engine", "rollout: {engine: vllm}, precision: {preset: fp16}", "rollout: {engine: vllm}, precision: {preset: bf16}"),
    (
        "vllm.enforce_eager",
        "rollout: {engine: vllm}, vllm: {enforce_eager: false}",
        "rollout: {engine: vllm}, vllm: {enforce_eager: false}, numerics: {exact: false}",
    ),
    ("correction.mode", "correction: {mode: bypass, veto: 1.0e-4}", "correction: {mode: decoupled, veto: 1.0e-4}"),
    ("correction.low", "correction: {weight: token_mask, low: 5, high: 4}", "correction: {weight: token_mask, low: 5, high: 5}"),
    ("correction.reject_low", "correction: {reject: k1, reject_low: 1.002}", "correction: {reject: k1, reject_low: 1.001}"),
    ("tokenizer.path", "tokenizer: {kind: huggingface}", "tokenizer: {kind: huggingface}, model: {path: a}"),
    ("tokenizer.characters", "tokenizer: {characters: abca}", "tokenizer: {characters: abc}"),
    ("tokenizer.chat_template", "tokenizer: {chat_template: true}", "tokenizer: {chat_template: true, kind: huggingface, path: a}"),
    ("task.name", "task: {name: revers}", "task: {name: reverse}"),
    ("task.name", "task: {kind: reasoning_gym}", "task: {kind: reasoning_gym, name: a}"),
    ("task.name", "task: {kind: datasets}", "task: {kind: datasets, name: a/b}"),
    ("task.name", "task: {kind: function}", "task: {kind: function, name: 'a.b:c'}"),
    ("task.name", "task: {kind: function, name: a.b.c}", "task: {kind: function, name: 'a:b.c'}"),
    ("task.path", "task: {kind: jsonl}", "task: {kind: jsonl, path: a}"),
    ("task.path", "task: {kind: parquet}", "task: {kind: parquet, path: a}"),
    ("task.prompt_template", "task: {prompt_template: 'Q: {promt}'}", "task: {prompt_template: '{a} {prompt}'}"),
    ("rewards.0.name", "rewards: [{name: tasks}]", "rewards: [{name: 'a.b:tasks'}]"),
    ("rewards.0.name", "rewards: [{name: 'a b:c'}]", "rewards: [{name: math_verify}]"),
    ("rewards.1.name", "rewards: [{}, {name: task}]", "rewards: [{}, {name: boxed}]"),
    ("rewards.0.weight", "rewards: [{weight: 0}]", "rewards: [{weight: 0}, {name: boxed, weight: -1}]"),
]  # fmt: skip

# Fields without an effect: the path, a config that sets it in vain (equal to the default or not), a config where it works.
IDLE = [
    ("run.profile_steps", "run: {steps: 2, profile_steps: 1}", "run: {steps: 3, profile_steps: 1}"),
    ("numerics.kernels", "precision: {preset: bf16}, numerics: {kernels: xla}", "numerics: {kernels: xla}"),
    ("model.hidden_size", "model: {path: a, hidden_size: 64}", "model: {hidden_size: 64}"),
    ("model.hidden_size", "model: {path: a, hidden_size: 128}", "model: {hidden_size: 128}"),
    ("model.tie_word_embeddings", "model: {path: a, tie_word_embeddings: false}", "model: {tie_word_embeddings: false}"),
    ("tokenizer.characters", "tokenizer: {kind: byte, characters: ab}", "tokenizer: {characters: ab}"),
    ("tokenizer.path", "tokenizer: {path: a}", "tokenizer: {kind: huggingface, path: a}"),
    (
        "tokenizer.system_prompt",
        "tokenizer: {system_prompt: a}",
        "tokenizer: {kind: huggingface, path: a, chat_template: true, system_prompt: a}",
    ),
    ("tokenizer.chat_template_kwargs", "tokenizer: {chat_template_kwargs: {a: 1}}", "tokenizer: {chat_template_kwargs: {}}"),
    (
        "precision.overrides",
        "precision: {preset: bf16, overrides: [{pattern: '*', format: bf16}]}",
        "precision: {preset: bf16, overrides: [{pattern: '*', format: fp8}]}",
    ),
    ("precision.scale_format", "precision: {preset: bf16, scale_format: power_of_two}", "precision: {scale_format: power_of_two}"),
    (
        "precision.promotion_order",
        "precision: {preset: bf16, promotion_order: triton}",
        "precision: {preset: fp8_rollout_only, promotion_order: triton}",
    ),
    ("precision.wgrad_operand", "precision: {preset: fp8_forward, wgrad_operand: dual}", "precision: {wgrad_operand: dual}"),
    ("task.path", "task: {path: a}", "task: {kind: gsm8k, path: a}"),
    ("task.name", "task: {kind: gsm8k, name: a}", "task: {name: chain}"),
    ("task.eval_path", "task: {kind: gsm8k, eval_path: a}", "task: {kind: jsonl, path: a, eval_path: b}"),
    (
        "task.eval_fraction",
        "task: {kind: jsonl, path: a, eval_path: b, eval_fraction: 0.2}",
        "task: {kind: jsonl, path: a, eval_fraction: 0.2}",
    ),
    (
        "task.eval_fraction",
        "task: {kind: datasets, name: a, eval_fraction: 0.2, options: {eval_split: test}}",
        "task: {kind: datasets, name: a, eval_fraction: 0.2, options: {split: test}}",
    ),
    ("task.prompt_field", "task: {prompt_field: q}", "task: {kind: datasets, name: a, prompt_field: q}"),
    ("task.answer_field", "task: {kind: reasoning_gym, name: a, answer_field: q}", "task: {kind: parquet, path: a, answer_field: q}"),
    ("algorithm.max_generation_rounds", "algorithm: {max_generation_rounds: 10}", "algorithm: {name: dapo, max_generation_rounds: 10}"),
    (
        "algorithm.max_generation_rounds",
        "algorithm: {name: dapo, dynamic_sampling: false, max_generation_rounds: 3}",
        "algorithm: {dynamic_sampling: true, max_generation_rounds: 3}",
    ),
    ("distributed.process_id", "distributed: {process_id: 0}", "distributed: {process_id: 0, processes: null}"),
    ("distributed.timeout_s", "distributed: {timeout_s: 50}", "distributed: {timeout_s: 50, processes: 2}, sharding: {data: 2}"),
    ("rollout.slots", "rollout: {engine: vllm, slots: 4}", "rollout: {engine: jax, slots: 4}"),
    ("vllm.max_num_seqs", "vllm: {max_num_seqs: 4}", "rollout: {engine: vllm}, vllm: {max_num_seqs: 4}"),
    (
        "vllm.max_num_seqs",
        "rollout: {engine: vllm}, vllm: {mode: external, url: 'http://a:1', max_num_seqs: 4}",
        "rollout: {engine: vllm}, vllm: {mode: server, max_num_seqs: 4}",
    ),
    ("vllm.sleep", "vllm: {sleep: true}", "rollout: {engine: vllm}, vllm: {sleep: true}"),
    ("vllm.restarts", "rollout: {engine: vllm}, vllm: {restarts: 1}", "rollout: {engine: vllm}, vllm: {mode: server, restarts: 1}"),
    (
        "vllm.probe_logprob_tolerance",
        "rollout: {engine: vllm}, vllm: {probe_tokens: 0, probe_logprob_tolerance: 0.1}",
        "rollout: {engine: vllm}, vllm: {probe_tokens: 8, probe_logprob_tolerance: 0.1}",
    ),
    ("loss_scale.initial", "loss_scale: {initial: 2.0}", "precision: {preset: fp16}, loss_scale: {initial: 2.0}"),
    ("algorithm.dual_clip", "algorithm: {name: cispo, dual_clip: 3.0}", "algorithm: {name: gspo, dual_clip: 3.0}"),
    ("correction.high", "correction: {high: 5.0}", "correction: {weight: token_truncate, high: 5.0}"),
    ("correction.normalize", "correction: {normalize: true}", "correction: {weight: sequence_mask, normalize: true}"),
    ("correction.low", "correction: {weight: token_truncate, low: 0.2}", "correction: {weight: token_mask, low: 0.2}"),
    ("correction.reject_level", "correction: {reject_level: token}", "correction: {reject: k3, reject_level: token}"),
    ("correction.reject_high", "correction: {veto: 1.0e-4, reject_high: 2.0}", "correction: {reject: k2, reject_high: 2.0}"),
    ("correction.reject_low", "correction: {reject: k3, reject_low: 0.5}", "correction: {reject: k1, reject_low: 0.5}"),
    ("warm_start.batch_size", "warm_start: {batch_size: 3}", "warm_start: {steps: 1, batch_size: 3}"),
    ("warm_start.noise", "warm_start: {noise: 0.1}", "warm_start: {noise: 0.0}"),
    ("rewards.0.timeout_s", "rewards: [{name: boxed, timeout_s: 3}]", "rewards: [{name: boxed, timeout_s: 3, separate_process: true}]"),
    ("rewards.0.timeout_s", "rewards: [{name: task, timeout_s: 3}]", "rewards: [{name: task, timeout_s: 3, separate_process: true}]"),
    (
        "rewards.0.timeout_s",
        "task: {kind: jsonl, path: a}, rewards: [{name: task, timeout_s: 3}]",
        "task: {kind: jsonl, path: a, options: {verifier: math_verify}}, rewards: [{name: task, timeout_s: 3}]",
    ),
    (
        "rewards.0.separate_process",
        "rewards: [{name: 'a.b:c', separate_process: true}]",
        "rewards: [{name: boxed, separate_process: true}]",
    ),
    (
        "rewards.0.separate_process",
        "task: {kind: reasoning_gym, name: a}, rewards: [{name: task, separate_process: true}]",
        "task: {kind: function, name: 'a:b'}, rewards: [{name: task, separate_process: true}]",
    ),
]


def refusal(data: dict[str, Any]) -> str:
    """The message with which a config is refused."""
    with pytest.raises(UserError) as caught:
        config_from_dict(data)
    return str(caught.value)


@pytest.mark.parametrize(("path", "broken", "kept"), BROKEN)
def test_parts_that_do_not_fit_are_refused(path: str, broken: str, kept: str) -> None:
    message = refusal(yaml.safe_load(f"{{{broken}}}"))
    assert message.startswith(f"a problem in the config\n\nthe config: {path}: ")
    assert all(f"\n  {label}" in message for label in ("got ", "expected ", "meaning "))
    config_from_dict(yaml.safe_load(f"{{{kept}}}"))


@pytest.mark.parametrize(("path", "idle", "working"), IDLE)
def test_field_without_an_effect_is_refused(path: str, idle: str, working: str) -> None:
    message = refusal(yaml.safe_load(f"{{{idle}}}"))
    assert message.startswith(f"a problem in the config\n\nthe config: {path}: has no effect here\n")
    assert "; remove it\n" in message
    config_from_dict(yaml.safe_load(f"{{{working}}}"))


def test_every_rule_is_broken_by_a_test() -> None:
    for rule in RULES:
        assert rule.fields[0] in {path for path, _, _ in BROKEN}, rule
    told = {path for path, _, _ in IDLE}
    for entry in NO_EFFECT:
        assert told & set(entry.fields), entry


def test_rules_name_fields_that_exist() -> None:
    config = RunConfig()
    for entry in (*RULES, *NO_EFFECT):
        for path in (*entry.fields, *getattr(entry, "switches", ())):
            value_at(config, path)
    fields = {path for path, _, _ in all_fields()} | set(RunConfig.model_fields)
    assert set(SYNONYMS.values()) <= fields


def test_sizes_of_a_checkpoint_are_not_judged_by_the_sizes_of_a_new_model() -> None:
    """The length of a checkpoint's positions is known when it is read, not here."""
    assert not find_problems(config_from_dict({"model": {"path": "a"}, "rollout": {"max_completion_tokens": 4096}}))


@pytest.mark.parametrize("size", [1, 64, 127, 129, 300])
def test_hidden_sizes_with_partial_blocks_are_fine(size: int) -> None:
    assert config_from_dict({"model": {"hidden_size": size, "intermediate_size": size}}).model.hidden_size == size


def test_rules_hold_for_a_config_built_in_python() -> None:
    with pytest.raises(ValueError, match=r"rollout\.top_p: training rollouts cannot be truncated: got 0\.5, expected 1"):
        RunConfig.model_validate({"rollout": {"top_p": 0.5}})


def test_families_are_those_that_the_arithmetic_task_knows() -> None:
    from jetrl_jax.tasks.arithmetic import FAMILIES

    assert set(ARITHMETIC_FAMILIES) == set(FAMILIES)


def test_rewards_by_name_are_those_that_the_rewards_module_knows() -> None:
    from jetrl_jax.tasks import verify

    assert set(BUILTIN_REWARDS) == {"task", *verify.VERIFIERS}
    assert set(UNTIMED_REWARDS) == set(verify.VERIFIERS) - verify.NEEDS_PROCESS


@pytest.mark.parametrize(
    ("rewards", "verifier"),
    [
        ("[]", "task"),
        ("[{name: boxed}]", "boxed"),
        ("[{name: 'a:b'}]", "task"),
        ("[{name: 'a:b'}, {name: last_number}, {name: boxed}]", "last_number"),
        ("[{name: boxed}, {}]", "task"),
        ("[{name: boxed}, {weight: 0}]", "boxed"),
        ("[{name: 'a:b'}, {name: boxed, weight: -1}]", "task"),
        ("[{name: boxed}], eval: {verifier: gsm8k}", "gsm8k"),
    ],
)
def test_what_is_rewarded_judges_the_held_out_set(rewards: str, verifier: str) -> None:
    config = config_from_dict(yaml.safe_load(f"{{rewards: {rewards}}}") if rewards != "[]" else {})
    assert config.eval_verifier == verifier
    assert config.resolved_nulls().get("eval.verifier", verifier) == verifier
