"""What fields demand of each other: every rule with a config that breaks it, its message, and a config that
just keeps it.
"""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import yaml

from jetrl_jax.config.load import config_from_dict
from jetrl_jax.config.rules import all_rules, find_problems
from jetrl_jax.config.schema import SYNONYMS, look_up, split
from jetrl_jax.config.task import BUILTIN_REWARDS, UNTIMED_REWARDS, ArithmeticSection
from jetrl_jax.config.types import Problem
from jetrl_jax.errors import UserError

# Blamed field and what is wrong with it, a config (as one line of YAML) that breaks the rule, and one at its
# edge.
TABLE = r"""
model.num_kv_heads: query heads cannot be shared evenly among key/value heads
    model: {num_heads: 6, num_kv_heads: 4}
    model: {num_heads: 6, num_kv_heads: 3}
model.head_dim: out of range
    model: {head_dim: 33}
    model: {head_dim: 34}
model.hidden_size: the width of a llama model is not shared evenly among its heads
    model: {architecture: llama, hidden_size: 130}
    model: {architecture: qwen3, hidden_size: 130}
model.max_position_embeddings: the model is too short for the sequences of the run
    model: {max_position_embeddings: 63}
    model: {max_position_embeddings: 64}
rollout.temperature: out of range
    rollout: {temperature: 1.0e-46}
    rollout: {temperature: 0.001}
rollout.temperature: out of range
    rollout: {temperature: 1.0e-40}
    rollout: {temperature: 0.001}
rollout.temperature: vLLM samples at another temperature than the trainer scores at, or refuses it
    rollout: {temperature: 0.0099, engine: vllm}
    rollout: {temperature: 0.01, engine: vllm}
rollout.temperature: vLLM samples at another temperature than the trainer scores at, or refuses it
    rollout: {temperature: 0.005, engine: vllm}
    rollout: {temperature: 0.01, engine: vllm}
lora.alpha: the factor of an adapter is no power of two, and bits then depend on the matrix that it multiplies
    lora: {rank: 32, alpha: 48}
    lora: {rank: 32, alpha: 16}
lora.alpha: the factor of an adapter is no power of two, and bits then depend on the matrix that it multiplies
    lora: {rank: 32, alpha: 32, rslora: true}
    lora: {rank: 64, alpha: 32, rslora: true}
lora.targets: a layer stands twice
    lora: {targets: [q_proj, v_proj, q_proj]}
    lora: {targets: [q_proj, v_proj]}
lora.rank: vLLM has no place for adapters of this rank
    rollout: {engine: vllm}, lora: {rank: 1024, alpha: 1024}
    rollout: {engine: vllm}, lora: {rank: 512, alpha: 512}
lora.path: a warm start changes the base that these adapters were trained for
    lora: {path: adapter}, warm_start: {steps: 3}
    lora: {path: adapter}
precision.preset: the base is frozen in one format, and this flow trains in another one than it samples in
    precision: {preset: fp8_rollout_only}, lora: {}
    precision: {preset: fp8_forward}, lora: {}
precision.kv_cache: vLLM gets adapters only, and no scales of keys and values beside them
    precision: {kv_cache: fp8}, rollout: {engine: vllm}, lora: {}
    precision: {kv_cache: fp8}, lora: {}
rollout.engine.speculative_config: vLLM does not speculate beside adapters here
    rollout: {engine: {kind: vllm, speculative_config: {method: ngram, num_speculative_tokens: 2}}}, lora: {}
    rollout: {engine: vllm}, lora: {}
rollout.engine.speculation.kind: a draft head is not trained beside adapters
    model: {num_layers: 4}, rollout: {engine: {speculation: {kind: head, lengths: [0, 3]}}}, lora: {}
    model: {num_layers: 4}, rollout: {engine: {speculation: {kind: lookup, lengths: [0, 3]}}}, lora: {}
rollout.top_p: training rollouts cannot be truncated
    rollout: {top_p: 0.999}
    rollout: {top_p: 1}
rollout.engine.speculation.lengths: not a choice of draft lengths
    rollout: {engine: {speculation: {kind: lookup, lengths: [3]}}}
    rollout: {engine: {speculation: {kind: lookup, lengths: [0, 3]}}}
rollout.engine.speculation.lengths: not a choice of draft lengths
    rollout: {engine: {speculation: {kind: lookup, lengths: [0, 17]}}}
    rollout: {engine: {speculation: {kind: lookup, lengths: [0, 16]}}}
rollout.engine.speculation.lengths: not a choice of draft lengths
    rollout: {engine: {speculation: {kind: lookup, lengths: [0, 3, 3]}}}
    rollout: {engine: {speculation: {kind: lookup, lengths: [7, 0, 3]}}}
rollout.engine.speculation.lengths: not a choice of draft lengths
    rollout: {engine: {speculation: {kind: lookup, lengths: [0]}}}
    rollout: {engine: {speculation: {kind: lookup, lengths: [1, 0]}}}
rollout.engine.speculative_config: not a speculation of vLLM's that this project knows
    rollout: {engine: {kind: vllm, speculative_config: {method: mtp, num_speculative_tokens: 1}}}
    rollout: {engine: {kind: vllm, speculative_config: {method: ngram, num_speculative_tokens: 1}}}
rollout.engine.speculative_config: not a speculation of vLLM's that this project knows
    rollout: {engine: {kind: vllm, speculative_config: {method: suffix, num_speculative_tokens: 17}}}
    rollout: {engine: {kind: vllm, speculative_config: {method: suffix, num_speculative_tokens: 16}}}
rollout.engine.speculative_config: a rule of acceptance that does not keep the distribution
    rollout: {engine: {kind: vllm, speculative_config: {method: ngram, num_speculative_tokens: 1, rejection_sample_method: synthetic}}}
    rollout: {engine: {kind: vllm, speculative_config: {method: ngram, num_speculative_tokens: 1, rejection_sample_method: standard}}}
rollout.engine.speculative_config: only a draft of eagle3 has weights
    rollout: {engine: {kind: vllm, speculative_config: {method: eagle3, num_speculative_tokens: 1}}}
    rollout: {engine: {kind: vllm, speculative_config: {method: eagle3, num_speculative_tokens: 1, model: a}}}
rollout.engine.speculative_config: a draft's model is not a directory
    rollout: {engine: {kind: vllm, draft_learning_rate: 1.0e-3, speculative_config: {method: eagle3, num_speculative_tokens: 1, model: null}}}
    rollout: {engine: {kind: vllm, draft_learning_rate: 1.0e-3, speculative_config: {method: eagle3, num_speculative_tokens: 1, model: a}}}
rollout.engine.speculative_config: a draft's model is not a directory
    rollout: {engine: {kind: vllm, draft_learning_rate: 1.0e-3, speculative_config: {method: eagle3, num_speculative_tokens: 1, model: 3}}}
    rollout: {engine: {kind: vllm, draft_learning_rate: 1.0e-3, speculative_config: {method: eagle3, num_speculative_tokens: 1, model: a}}}
rollout.engine.speculative_config: a draft's model is not a directory
    rollout: {engine: {kind: vllm, draft_learning_rate: 1.0e-3, speculative_config: {method: eagle3, num_speculative_tokens: 1, model: ""}}}
    rollout: {engine: {kind: vllm, draft_learning_rate: 1.0e-3, speculative_config: {method: eagle3, num_speculative_tokens: 1, model: a}}}
rollout.engine.speculative_config: a draft's model is not a directory
    rollout: {engine: {kind: vllm, draft_learning_rate: 1.0e-3, speculative_config: {method: eagle3, num_speculative_tokens: 1, model: ~nobody-here/a}}}
    rollout: {engine: {kind: vllm, draft_learning_rate: 1.0e-3, speculative_config: {method: eagle3, num_speculative_tokens: 1, model: a}}}
rollout.engine.draft_learning_rate: has no effect here
    rollout: {engine: {kind: vllm, draft_learning_rate: 1.0e-3, speculative_config: {method: suffix, num_speculative_tokens: 1}}}
    rollout: {engine: {kind: vllm, draft_learning_rate: 1.0e-3, speculative_config: {method: eagle3, num_speculative_tokens: 1, model: a}}}
rollout.engine.speculation.kind: a draft head runs on one device only
    rollout: {engine: {speculation: head}}, model: {num_layers: 4}, sharding: {data: 2}
    rollout: {engine: {speculation: head}}, model: {num_layers: 4}
rollout.engine.speculation.kind: a draft head reads three layers after the first
    rollout: {engine: {speculation: head}}, model: {num_layers: 3}
    rollout: {engine: {speculation: head}}, model: {num_layers: 4}
rollout.top_k: training rollouts cannot be truncated
    rollout: {top_k: 1}
    rollout: {top_k: 0}
batch.row_tokens: a packed row is shorter than the longest sequence
    batch: {row_tokens: 63}
    batch: {row_tokens: 64}
batch.microbatch_tokens: a microbatch does not hold one row
    batch: {microbatch_tokens: 63}
    batch: {microbatch_tokens: 64}
sharding.fsdp: shards would cut a matrix inside a row or a 128x128 block of its scales
    model: {hidden_size: 256, intermediate_size: 384, head_dim: 64}, sharding: {fsdp: 4}
    model: {hidden_size: 512, intermediate_size: 384, head_dim: 128}, sharding: {fsdp: 4}
sharding.fsdp: shards would cut a matrix inside a row or a 128x128 block of its scales
    model: {hidden_size: 128}, precision: {preset: bf16}, sharding: {fsdp: 3}
    model: {hidden_size: 126}, precision: {preset: bf16}, sharding: {fsdp: 3}
numerics.kernels: bits of xla_fast depend on the number of rows
    numerics: {kernels: xla_fast}
    numerics: {kernels: xla_fast, exact: false}
numerics.attention: bits of cuDNN's attention depend on shapes
    numerics: {attention: cudnn}
    numerics: {attention: cudnn, exact: false}
numerics.attention: kernels of attention take BF16 and FP16 only
    precision: {preset: fp32}, numerics: {attention: cudnn, exact: false}
    precision: {preset: fp16}, numerics: {attention: cudnn, exact: false}
numerics.head_gradient: parts are BF16, and so must the head's operands be
    precision: {preset: fp16}, numerics: {head_gradient: bf16x3}
    precision: {preset: fp16}, numerics: {head_gradient: fp32}
numerics.attention: an exact vLLM computes attention in float64
    numerics: {attention: mosaic_gpu}, rollout: {engine: vllm}
    numerics: {attention: xla}, rollout: {engine: vllm}
sharding.tensor: shards would cut a head or a 128x128 block of a matrix's scales
    model: {hidden_size: 256, intermediate_size: 256, head_dim: 64, num_kv_heads: 2}, sharding: {tensor: 2}
    model: {hidden_size: 256, intermediate_size: 256, head_dim: 64, num_kv_heads: 4}, sharding: {tensor: 2}
sharding.tensor: shards would cut a head or a 128x128 block of a matrix's scales
    model: {head_dim: 32, num_kv_heads: 2, num_heads: 4}, precision: {preset: bf16}, sharding: {tensor: 4}
    model: {head_dim: 32, num_kv_heads: 4, num_heads: 4}, precision: {preset: bf16}, sharding: {tensor: 4}
warm_start.batch_size: the examples of a supervised step are not shared evenly among the devices
    warm_start: {steps: 1, batch_size: 6}, sharding: {data: 4}
    warm_start: {batch_size: 8, steps: 1}
sharding.data: vLLM samples beside a trainer on one device only
    rollout: {engine: vllm}, sharding: {data: 2}
    rollout: {engine: vllm}
distributed.process_id: no such process
    distributed: {processes: 2, process_id: 2}, sharding: {data: 2}
    distributed: {processes: 2, process_id: 1}, sharding: {data: 2}
distributed.coordinator: not an address
    distributed: {processes: 2, coordinator: node1}, sharding: {data: 2}
    distributed: {processes: 2, coordinator: '[::1]:8476'}, sharding: {data: 2}
distributed.coordinator: not an address
    distributed: {processes: 2, coordinator: 'node-1.a:65536'}, sharding: {data: 2}
    distributed: {processes: 2, coordinator: 'node-1.a:65535'}, sharding: {data: 2}
distributed.processes: the devices of the mesh are not shared evenly among the processes
    distributed: {processes: 2}, sharding: {data: 3}
    distributed: {processes: 2}, sharding: {data: 4}
distributed.processes: vLLM samples beside a trainer of one process only
    distributed: {processes: null}, rollout: {engine: vllm}
    distributed: {processes: null}
optimizer.warmup_steps: the warm-up lasts as long as the run: the learning rate never reaches optimizer.learning_rate
    optimizer: {warmup_steps: 10}, run: {steps: 10}
    optimizer: {warmup_steps: 9}, run: {steps: 10}
model.path: there is no such home directory
    model: {path: ~nobody_of_that_name/x}
    model: {path: ~/x}
tokenizer.path: there is no such home directory
    tokenizer: {path: ~nobody_of_that_name/x, kind: huggingface}
    tokenizer: {path: ~/x, kind: huggingface}
task.path: there is no such home directory
    task: {path: ~nobody_of_that_name/x, kind: jsonl}
    task: {path: ~/x, kind: jsonl}
task.eval_path: there is no such home directory
    task: {eval_path: ~nobody_of_that_name/x, kind: jsonl, path: a}
    task: {eval_path: ~/x, kind: jsonl, path: a}
run.directory: there is no such home directory
    run: {directory: ~nobody_of_that_name/x}
    run: {directory: ~/x}
algorithm.minibatches: more minibatches than prompts
    algorithm: {minibatches: 33}
    algorithm: {minibatches: 32}
algorithm.overlong_buffer_tokens: the soft penalty zone is longer than a completion
    algorithm: {overlong_buffer_tokens: 33}
    algorithm: {overlong_buffer_tokens: 32}
rollout.engine.url: missing
    rollout: {engine: vllm_external}
    rollout: {engine: {kind: vllm_external, url: 'http://a:1'}}
rollout.engine.url: an address names http or https and a host
    rollout: {engine: {kind: vllm_external, url: 'http://[::1'}}
    rollout: {engine: {kind: vllm_external, url: 'https://[::1]:8'}}
rollout.engine.url: an address names http or https and a host
    rollout: {engine: {kind: vllm_external, url: 'ftp://a'}}
    rollout: {engine: {kind: vllm_external, url: 'https://[::1]:8'}}
rollout.engine.url: an address names http or https and a host
    rollout: {engine: {kind: vllm_external, url: nonsense}}
    rollout: {engine: {kind: vllm_external, url: 'https://[::1]:8'}}
rollout.engine.url: an address names http or https and a host
    rollout: {engine: {kind: vllm_external, url: 'http://a:b'}}
    rollout: {engine: {kind: vllm_external, url: 'https://[::1]:8'}}
rollout.engine.kind: vLLM runs in BF16 and FP8 here
    rollout: {engine: vllm}, precision: {preset: fp16}
    rollout: {engine: vllm}, precision: {preset: bf16}
rollout.engine.enforce_eager: what torch compiles rounds elsewhere, and no CUDA graph holds the exact operations
    rollout: {engine: {kind: vllm, enforce_eager: false}}
    rollout: {engine: {kind: vllm, enforce_eager: false}}, numerics: {exact: false}
correction.veto: veto belongs to mode decoupled; this is mode bypass
    correction: {mode: bypass, veto: 0.0001}
    correction: {mode: decoupled, veto: 0.0001}
correction.weight.low: no ratio lies between the bounds of the mask
    correction: {weight: {kind: token_mask, low: 5, high: 4}}
    correction: {weight: {kind: token_mask, low: 5, high: 5}}
correction.reject.low: no ratio lies between the bounds of the rejection
    correction: {reject: {kind: k1, low: 1.002}}
    correction: {reject: {kind: k1, low: 1.001}}
tokenizer.path: tokenizer.kind: huggingface needs files
    tokenizer: {kind: huggingface}
    tokenizer: {kind: huggingface}, model: {path: a}
tokenizer.characters: a character stands twice in the alphabet
    tokenizer: {characters: abca}
    tokenizer: {characters: abc}
task.name: not one of the choices
    task: {name: revers}
    task: {name: reverse}
task.name: missing
    task: {kind: reasoning_gym}
    task: {kind: reasoning_gym, name: a}
task.name: no Python function
    task: {kind: function, name: a.b.c}
    task: {kind: function, name: 'a:b.c'}
task.path: missing
    task: {kind: jsonl}
    task: {kind: jsonl, path: a}
task.prompt_template: the prompt has no place in the template
    task: {prompt_template: 'Q: {promt}'}
    task: {prompt_template: '{a} {prompt}'}
rewards.0.name: unknown reward
    rewards: [{name: tasks}]
    rewards: [{name: 'a.b:tasks'}]
rewards.1.name: a reward stands twice
    rewards: [{}, {name: task}]
    rewards: [{}, {name: boxed}]
rewards.0.weight: no reward counts
    rewards: [{weight: 0}]
    rewards: [{weight: 0}, {name: boxed, weight: -1}]
run.profile_steps: has no effect here
    run: {steps: 2, profile_steps: 1}
    run: {steps: 3, profile_steps: 1}
numerics.kernels: has no effect here
    precision: {preset: bf16}, numerics: {kernels: xla}
    numerics: {kernels: xla}
model.hidden_size: hidden_size belongs to a new model; this is a checkpoint
    model: {path: a, hidden_size: 64}
    model: {hidden_size: 64}
tokenizer.characters: characters belongs to kind character; this is kind byte
    tokenizer: {kind: byte, characters: ab}
    tokenizer: {characters: ab}
tokenizer.chat_template_kwargs: has no effect here
    tokenizer: {kind: huggingface, path: a, chat_template_kwargs: {a: 1}}
    tokenizer: {kind: huggingface, path: a, chat_template_kwargs: {}}
precision.wgrad_operand: wgrad_operand belongs to preset fp8_unified; this is preset fp8_forward
    precision: {preset: fp8_forward, wgrad_operand: dual}
    precision: {wgrad_operand: dual}
task.path: path belongs to kind jsonl, parquet, gsm8k; this is kind arithmetic
    task: {path: a}
    task: {kind: gsm8k, path: a}
task.eval_fraction: has no effect here
    task: {kind: jsonl, path: a, eval_path: b, eval_fraction: 0.2}
    task: {kind: jsonl, path: a, eval_fraction: 0.2}
task.answer_field: answer_field belongs to kind jsonl, parquet, datasets, function; this is kind reasoning_gym
    task: {kind: reasoning_gym, name: a, answer_field: q}
    task: {kind: parquet, path: a, answer_field: q}
algorithm.max_generation_rounds: has no effect here
    algorithm: {max_generation_rounds: 3}
    algorithm: {dynamic_sampling: true, max_generation_rounds: 3}
distributed.process_id: has no effect here
    distributed: {process_id: 0}
    distributed: {process_id: 0, processes: null}
distributed.timeout_s: has no effect here
    distributed: {timeout_s: 50}
    distributed: {timeout_s: 50, processes: 2}, sharding: {data: 2}
rollout.engine.slots: slots belongs to kind jax; this is kind vllm
    rollout: {engine: {kind: vllm, slots: 4}}
    rollout: {engine: {kind: jax, slots: 4}}
rollout.engine.max_num_seqs: max_num_seqs belongs to kind vllm, vllm_server; this is kind jax
    rollout: {engine: {max_num_seqs: 4}}
    rollout: {engine: {kind: vllm, max_num_seqs: 4}}
rollout.engine.max_num_seqs: max_num_seqs belongs to kind vllm, vllm_server; this is kind vllm_external
    rollout: {engine: {kind: vllm_external, url: 'http://a:1', max_num_seqs: 4}}
    rollout: {engine: {kind: vllm_server, max_num_seqs: 4}}
rollout.engine.probe_logprob_tolerance: has no effect here
    rollout: {engine: {kind: vllm, probe_tokens: 0, probe_logprob_tolerance: 0.1}}
    rollout: {engine: {kind: vllm, probe_tokens: 8, probe_logprob_tolerance: 0.1}}
precision.loss_scale: loss_scale belongs to preset fp16; this is preset fp8_unified
    precision: {loss_scale: {initial: 2.0}}
    precision: {preset: fp16, loss_scale: {initial: 2.0}}
precision.kv_cache: an FP32 policy rounds nothing between operations
    precision: {preset: fp32, kv_cache: fp8}
    precision: {preset: fp16, kv_cache: fp8}
precision.kv_query: no engine quantises queries beside a BF16 cache
    precision: {kv_query: fp8}, rollout: {engine: vllm}, numerics: {exact: false}
    precision: {kv_query: fp8, kv_cache: fp8}, rollout: {engine: vllm}, numerics: {exact: false}
precision.kv_query: this engine does not quantise queries
    precision: {kv_query: fp8, kv_cache: fp8}
    precision: {kv_query: bf16, kv_cache: fp8}
precision.kv_query: this engine does not quantise queries
    precision: {kv_query: fp8, kv_cache: fp8}, rollout: {engine: vllm}
    precision: {kv_query: fp8, kv_cache: fp8}, rollout: {engine: vllm}, numerics: {exact: false}
algorithm.dual_clip: dual_clip belongs to name grpo, rloo, reinforce_pp, dapo, dr_grpo, gspo; this is name cispo
    algorithm: {name: cispo, dual_clip: 3.0}
    algorithm: {name: gspo, dual_clip: 3.0}
correction.weight.low: low belongs to kind token_mask, sequence_mask; this is kind token_truncate
    correction: {weight: {kind: token_truncate, low: 0.2}}
    correction: {weight: {kind: token_mask, low: 0.2}}
correction.reject.low: low belongs to kind k1; this is kind k3
    correction: {reject: {kind: k3, low: 0.5}}
    correction: {reject: {kind: k1, low: 0.5}}
warm_start.steps: missing
    warm_start: {batch_size: 3}
    warm_start: {steps: 1, batch_size: 3}
rewards.0.timeout_s: has no effect here
    rewards: [{name: boxed, timeout_s: 3}]
    rewards: [{name: boxed, timeout_s: 3, separate_process: true}]
rewards.0.separate_process: has no effect here
    rewards: [{name: 'a.b:c', separate_process: true}]
    rewards: [{name: boxed, separate_process: true}]
rewards.0.separate_process: has no effect here
    task: {kind: reasoning_gym, name: a}, rewards: [{name: task, separate_process: true}]
    task: {kind: function, name: 'a:b'}, rewards: [{name: task, separate_process: true}]
tokenizer.system_prompt: has no effect here
    tokenizer: {kind: huggingface, path: a, system_prompt: b}
    tokenizer: {kind: huggingface, path: a, chat_template: true, system_prompt: b}
rollout.max_turn_tokens: only an environment has turns
    rollout: {max_turn_tokens: 4}
    rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number}
rollout.max_turn_tokens: an environment's turns have no limit
    task: {kind: environment, name: guess_number}
    rollout: {max_turn_tokens: 32}, task: {kind: environment, name: guess_number}
rollout.max_turn_tokens: a turn is longer than an episode
    rollout: {max_turn_tokens: 33}, task: {kind: environment, name: guess_number}
    rollout: {max_turn_tokens: 32}, task: {kind: environment, name: guess_number}
distributed.processes: environments answer one process only
    rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number}, distributed: {processes: 2}, sharding: {data: 2}
    rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number}, sharding: {data: 2}
algorithm.credit: has no effect here
    algorithm: {credit: turn}
    algorithm: {credit: turn}, rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number}
algorithm.credit: rloo leaves out a sample, not a turn
    algorithm: {credit: turn, name: rloo}, rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number}
    algorithm: {credit: turn, name: dapo}, rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number}
algorithm.credit: no turn has a reward of its own
    algorithm: {credit: turn}, rewards: [{name: 'a:b'}], rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number}
    algorithm: {credit: turn}, rewards: [{name: 'a:b'}, {name: task}], rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number}
rollout.turns: has no effect here
    rollout: {turns: stream}
    rollout: {max_turn_tokens: 4, turns: stream}, task: {kind: environment, name: guess_number}
rollout.turns: only the embedded engine keeps a turn's slot; vLLM finds a history in its prefix cache
    rollout: {max_turn_tokens: 4, turns: stream, engine: vllm}, task: {kind: environment, name: guess_number}
    rollout: {max_turn_tokens: 4, turns: stream, engine: jax}, task: {kind: environment, name: guess_number}
rollout.turns: bits would depend on the time that environments take
    rollout: {max_turn_tokens: 4, turns: stream}, task: {kind: environment, name: guess_number}, numerics: {exact: false}
    rollout: {max_turn_tokens: 4, turns: stream}, task: {kind: environment, name: guess_number}, numerics: {exact: true}
rollout.turns: a stream runs on one copy of the policy only
    rollout: {max_turn_tokens: 4, turns: stream}, task: {kind: environment, name: guess_number}, sharding: {data: 2}
    rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number}, sharding: {data: 2}
task.observation_template: has no effect here
    rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number, observation_template: '{observation}.'}, tokenizer: {kind: huggingface, path: a, chat_template: true}
    rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number, observation_template: '{observation}.'}, tokenizer: {kind: huggingface, path: a}
task.observation_template: the observation has no place in the template
    rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number, observation_template: 'so'}
    rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_number, observation_template: '{observation}'}
task.name: unknown environment
    rollout: {max_turn_tokens: 4}, task: {kind: environment, name: guess_numbers}
    rollout: {max_turn_tokens: 4}, task: {kind: environment, name: 'a.b:C'}
distributed.coordinator: has no effect here
    distributed: {coordinator: "node1:1"}
    distributed: {coordinator: "node1:1", processes: null}
"""
RULES = [tuple(row.split("\n    ")) for row in re.split(r"\n(?=\S)", TABLE.strip())]


def read(line: str) -> dict[str, Any]:
    """The dictionary of a line of `RULES`."""
    found: dict[str, Any] = yaml.safe_load(f"{{{line}}}")
    return found


@pytest.mark.parametrize(("told", "broken", "kept"), RULES)
def test_parts_that_do_not_fit_are_refused(told: str, broken: str, kept: str) -> None:
    with pytest.raises(UserError) as caught:
        config_from_dict(read(broken))
    assert str(caught.value).startswith(f"a problem in the config\n\nthe config: {told}\n")
    assert all(f"\n  {label}" in str(caught.value) for label in ("got ", "expected ", "meaning "))
    config_from_dict(read(kept))


def test_every_rule_is_broken_by_a_test() -> None:
    told = {row[0].replace(".1.", ".0.") for row in RULES}
    for line in ("", *(row[2] for row in RULES)):
        rules = {
            f"{rule.field}: {rule.what}".replace(".1.", ".0.")
            for rule in all_rules(config_from_dict(read(line)))
        }
        assert rules <= told, rules - told


def test_rules_name_fields_that_exist() -> None:
    for row in RULES:
        for rule in all_rules(config_from_dict(read(row[2]))):
            problem = Problem(rule.field, rule.what, "", rule.expected, rule.hint)
            assert all(look_up(split(path)) is not None for path in problem.involves), problem
    assert all(look_up(split(path)) is not None for path in SYNONYMS.values())


def test_sizes_of_a_checkpoint_are_not_judged_by_the_sizes_of_a_new_model() -> None:
    """The length of a checkpoint's positions is known when it is read, not here."""
    assert not find_problems(
        config_from_dict({"model": {"path": "a"}, "rollout": {"max_completion_tokens": 4096}})
    )


@pytest.mark.parametrize("size", [1, 64, 127, 129, 300])
def test_hidden_sizes_with_partial_blocks_are_fine(size: int) -> None:
    assert (
        config_from_dict({"model": {"hidden_size": size, "intermediate_size": size}}).model.model_dump()[
            "hidden_size"
        ]
        == size
    )


def test_families_are_those_that_the_arithmetic_task_knows() -> None:
    from jetrl_jax.tasks.arithmetic import FAMILIES

    assert set(get_args(ArithmeticSection.model_fields["name"].annotation)) == set(FAMILIES)


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
