"""The config sections of what is generated, and of vLLM as its engine; imports no jax."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jetrl_jax.config.types import INT32_MAX, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Text

RESERVE = 0.1  # of a device's memory, left to the driver, NCCL and fragmentation


class RolloutSection(Section):
    """What is generated in a step and how."""

    engine: Literal["jax", "vllm"] = Field(
        "jax", description="Rollout engine: the embedded one on the trainer's own model, or vLLM (section vllm)."
    )
    prompts_per_step: PositiveInt = Field(32, description="Number of prompts of one step (P).")
    group_size: Annotated[int, Field(ge=2, le=INT32_MAX)] = Field(
        16, description="Completions of one prompt (G); a group of one has no advantage."
    )
    max_prompt_tokens: PositiveInt = Field(32, description="Longest prompt, in tokens; a longer one is skipped and counted.")
    max_completion_tokens: PositiveInt = Field(32, description="Longest completion, in tokens.")
    temperature: PositiveFloat = Field(
        1.0, description="Sampling temperature of training rollouts, 0.001 to 1e6, with vLLM 0.01 to 2; logprobs are taken at it."
    )
    top_p: float = Field(
        1.0, description="Nucleus of the sampling; must be 1, since a truncated distribution is not the policy that is trained."
    )
    top_k: int = Field(
        0,
        description="Candidate tokens of the sampling; must be 0 (off), since a truncated distribution is not the policy that is trained.",
    )
    slots: PositiveInt = Field(256, description="Number of sequences that the embedded engine decodes at once, on each device.")
    prefill_rows: PositiveInt = Field(32, description="Number of prompts that the embedded engine prefills at once.")
    decode_chunk_tokens: PositiveInt = Field(8, description="Tokens decoded between two looks at finished sequences.")


class VllmSection(Section):
    """vLLM as rollout engine: where it runs, its limits, and what is checked after each weight sync."""

    mode: Literal["in_process", "server", "external"] = Field(
        "in_process",
        description="Where vLLM runs: in the trainer's process, in a server that the trainer starts and ends, or in one that runs already.",
    )
    url: Text | None = Field(None, description="Address of the external server, such as http://127.0.0.1:8000; null: there is none.")
    startup_timeout_s: PositiveFloat = Field(600.0, description="Time within which a server must be ready, in seconds.")
    request_timeout_s: PositiveFloat = Field(600.0, description="Time within which a server must answer a batch of prompts, in seconds.")
    sync_timeout_s: PositiveFloat = Field(300.0, description="Time within which a server must take new weights, in seconds.")
    restarts: NonNegativeInt = Field(
        0, description="How often in a run a server that died or hung is started anew and the call repeated; then the run stops."
    )
    max_num_seqs: PositiveInt = Field(256, description="Number of sequences that vLLM decodes at once.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1 - RESERVE)] = Field(
        0.4, description="Share of the GPU's memory that vLLM may take while it is awake. Nothing on CPU."
    )
    sleep: bool | None = Field(
        None,
        description="Whether vLLM gives its memory to the trainer from the end of a rollout to the next weights; JAX must then return "
        "freed memory, which the commands see to. null: on a GPU, where the two share it; a CPU has no sleep mode.",
    )
    kv_cache_memory_mb: PositiveInt | None = Field(None, description="Size of vLLM's KV cache, in MiB; null leaves it to vLLM.")
    enforce_eager: bool = Field(
        True, description="Whether vLLM runs without compilation, whose fusions round elsewhere than the trainer; an exact run needs it."
    )
    probe_tokens: NonNegativeInt = Field(
        32,
        description="Length of the probe scored on both sides after each weight sync, in tokens, at most the longest sequence; 0 is off.",
    )
    probe_logprob_tolerance: NonNegativeFloat | None = Field(
        None,
        description="Largest mean difference of the probe's log-probabilities between engine and trainer, in nats; null: 1e-6 with "
        "numerics.exact, whose two sides are the same bits, else 0.02.",
    )
    on_mismatch: Literal["stop", "warn"] = Field("stop", description="What a weight sync does whose certificate does not hold.")
