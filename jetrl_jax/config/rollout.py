"""The config sections of what is generated and by which engine; imports no jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from jetrl_jax.config.rule import Rule
from jetrl_jax.config.types import (
    INT32_MAX,
    TEMPERATURES,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
    show,
)

RESERVE = 0.1  # of a device's memory, left to the driver, NCCL and fragmentation


class _Engine(Section):
    kind: str = Field(
        description="Rollout engine: jax is the embedded one on the trainer's own model; vllm runs in "
        "the trainer's process, "
        "vllm_server in a server that the trainer starts and ends, vllm_external in one that runs already."
    )


class JaxEngineSection(_Engine):
    """The embedded engine."""

    kind: Literal["jax"] = "jax"
    slots: PositiveInt = Field(256, description="Number of sequences decoded at once, on each device.")
    prefill_rows: PositiveInt = Field(32, description="Number of prompts prefilled at once.")
    decode_chunk_tokens: PositiveInt = Field(
        8, description="Tokens decoded between two looks at finished sequences."
    )


class VllmSection(_Engine):
    """vLLM, wherever it runs: what is checked after each weight sync."""

    probe_tokens: NonNegativeInt = Field(
        32,
        description="Length of the probe scored on both sides after each weight sync, in tokens, at "
        "most the longest sequence; 0 is off.",
    )
    probe_logprob_tolerance: NonNegativeFloat | None = Field(
        None,
        description="Largest mean difference of the probe's log-probabilities between engine and "
        "trainer, in nats; null: 1e-6 with "
        "numerics.exact, whose two sides are the same bits, else 0.02.",
    )
    on_mismatch: Literal["stop", "warn"] = Field(
        "stop", description="What a weight sync does whose certificate does not hold."
    )

    def _rules(self) -> Iterator[Rule]:
        if self.probe_tokens == 0:
            yield from self.idle("probe_tokens is 0", "probe_logprob_tolerance")


class StartedVllmSection(VllmSection):
    """A vLLM that the trainer starts on its device: its limits."""

    max_num_seqs: PositiveInt = Field(256, description="Number of sequences that vLLM decodes at once.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1 - RESERVE)] = Field(
        0.4, description="Share of the GPU's memory that vLLM may take while it is awake. Nothing on CPU."
    )
    sleep: bool | None = Field(
        None,
        description="Whether vLLM gives its memory to the trainer from the end of a rollout to the "
        "next weights; JAX must then return "
        "freed memory, which the commands see to. null: on a GPU, where the two share it; a CPU has no "
        "sleep mode.",
    )
    kv_cache_memory_mb: PositiveInt | None = Field(
        None, description="Size of vLLM's KV cache, in MiB; null leaves it to vLLM."
    )
    enforce_eager: bool = Field(
        True,
        description="Whether vLLM runs without compilation, whose fusions round elsewhere than the "
        "trainer; an exact run needs it.",
    )


class ServedVllmSection(VllmSection):
    """A vLLM in another process: how long it may take."""

    request_timeout_s: PositiveFloat = Field(
        600.0, description="Time within which a server must answer a batch of prompts, in seconds."
    )
    sync_timeout_s: PositiveFloat = Field(
        300.0, description="Time within which a server must take new weights, in seconds."
    )


class InProcessVllmSection(StartedVllmSection):
    """vLLM in the trainer's process."""

    kind: Literal["vllm"] = "vllm"


class VllmServerSection(StartedVllmSection, ServedVllmSection):
    """A vLLM server that the trainer starts and ends."""

    kind: Literal["vllm_server"] = "vllm_server"
    startup_timeout_s: PositiveFloat = Field(
        600.0, description="Time within which the server must be ready, in seconds."
    )
    restarts: NonNegativeInt = Field(
        0,
        description="How often in a run a server that died or hung is started anew and the call "
        "repeated; then the run stops.",
    )


class ExternalVllmSection(ServedVllmSection):
    """A vLLM server that runs already."""

    kind: Literal["vllm_external"] = "vllm_external"
    url: Text = Field(description="Address of the server, such as http://127.0.0.1:8000.")

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        yield Rule(
            _is_address(self.url), "url", "an address names http or https and a host", "http://HOST:PORT"
        )


EngineSection = Annotated[
    JaxEngineSection | InProcessVllmSection | VllmServerSection | ExternalVllmSection,
    Field(discriminator="kind"),
]


class RolloutSection(Section):
    """What is generated in a step and how."""

    engine: EngineSection = Field(JaxEngineSection(), description="What generates.")
    prompts_per_step: PositiveInt = Field(32, description="Number of prompts of one step (P).")
    group_size: Annotated[int, Field(ge=2, le=INT32_MAX)] = Field(
        16, description="Completions of one prompt (G); a group of one has no advantage."
    )
    max_prompt_tokens: PositiveInt = Field(
        32, description="Longest prompt, in tokens; a longer one is skipped and counted."
    )
    max_completion_tokens: PositiveInt = Field(32, description="Longest completion, in tokens.")
    temperature: PositiveFloat = Field(
        1.0,
        description="Sampling temperature of training rollouts, 0.001 to 1e6, with vLLM 0.01 to 2; "
        "logprobs are taken at it.",
    )
    top_p: float = Field(
        1.0,
        description="Nucleus of the sampling; must be 1, since a truncated distribution is not the "
        "policy that is trained.",
    )
    top_k: int = Field(
        0,
        description="Candidate tokens of the sampling; must be 0 (off), since a truncated distribution "
        "is not the policy that is trained.",
    )

    def _rules(self) -> Iterator[Rule]:
        yield Rule(
            TEMPERATURES[0] <= self.temperature <= TEMPERATURES[1],
            "temperature",
            "FP32 cannot sample at such a temperature",
            "a number from {} to {}".format(*map(show, TEMPERATURES)),
            "below, the roundoff of the logits decides; greedy decoding is measured by every "
            "evaluation, and generate has --temperature 0",
        )
        truncated = "training rollouts cannot be truncated"
        hint = "a truncated distribution is not the policy that is trained; remove the line"
        yield Rule(self.top_p == 1.0, "top_p", truncated, "1", hint)
        yield Rule(self.top_k == 0, "top_k", truncated, "0 (off)", hint)


def _is_address(url: str) -> bool:
    """Whether an URL names http or https and a host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as http://[::1 or a port that is no number
        return False
