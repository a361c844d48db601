"""The config sections of what is generated and by which engine; imports no jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from jetrl_jax.config.types import (
    INT32_MAX,
    TEMPERATURES,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    Rule,
    Section,
    Text,
    UserPath,
    has_home,
    must,
    option,
)

MOST_DRAFTED = 16  # tokens of a step's draft
RESERVE = 0.1  # of a device's memory, left to the driver, NCCL and fragmentation


def _is_address(url: str) -> bool:
    """Whether an URL names http or https and a host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as http://[::1 or a port that is no number
        return False


Url = Annotated[Text, must(_is_address, "an address names http or https and a host", "http://HOST:PORT")]
Temperature = Annotated[float, Field(ge=TEMPERATURES[0], le=TEMPERATURES[1])]
One = Annotated[float, must(lambda p: p == 1, "training rollouts cannot be truncated", "1")]
Zero = Annotated[int, must(lambda k: k == 0, "training rollouts cannot be truncated", "0 (off)")]
GroupSize = Annotated[int, Field(ge=2, le=INT32_MAX)]
Share = Annotated[float, Field(gt=0, lt=1 - RESERVE)]

DraftLengths = Annotated[
    tuple[int, ...],
    must(
        lambda ks: 0 in ks and len(set(ks)) == len(ks) > 1 and 0 <= min(ks) <= max(ks) <= MOST_DRAFTED,
        "not a choice of draft lengths",
        f"different numbers from 0 to {MOST_DRAFTED}, 0 and another one among them, such as [0, 3]",
    ),
]


VLLM_DRAFTS = ("ngram", "suffix", "eagle3")  # whose acceptance and weights are known here
VllmSpeculation = Annotated[
    Options,
    must(
        lambda given: (
            given.get("method") in VLLM_DRAFTS
            and type(given.get("num_speculative_tokens")) is int
            and 1 <= given["num_speculative_tokens"] <= MOST_DRAFTED
        ),
        "not a speculation of vLLM's that this project knows",
        f"method: one of {', '.join(VLLM_DRAFTS)}, and num_speculative_tokens: 1 to {MOST_DRAFTED}",
    ),
    must(
        lambda given: given.get("rejection_sample_method", "standard") == "standard",
        "a rule of acceptance that does not keep the distribution",
        "rejection_sample_method: standard, or left out",
    ),
    must(
        lambda given: (given["method"] == "eagle3") == ("model" in given),
        "only a draft of eagle3 has weights",
        "model: its directory with method: eagle3, and no model with another one",
    ),
    must(
        lambda given: (
            "model" not in given
            or (isinstance(given["model"], str) and given["model"] != "" and has_home(given["model"]))
        ),
        "a draft's model is not a directory",
        "model: a path, such as runs/earlier/draft_head",
    ),
]


class NoSpeculationSection(Section):
    """One token of each sequence in a step."""

    kind: Literal["none"] = option(
        "none",
        "Draft of the next tokens, which a step verifies at once; it changes no token. lookup: what followed "
        "the last tokens where they stood before, in the sequence or in others of its prompt. head: a small "
        "model of the policy's hidden states, trained beside it.",
    )


class LookupSection(Section):
    """Guesses from text that is there."""

    kind: Literal["lookup"] = "lookup"
    lengths: DraftLengths = option(
        (0, 3), "Numbers of tokens drafted in a step, of which the faster is taken; 0 is a step without."
    )
    longest_match: PositiveInt = option(3, "Most last tokens that are compared.")


class HeadSection(Section):
    """Guesses of a small model that reads the policy's hidden states and is trained beside it."""

    kind: Literal["head"] = "head"
    lengths: DraftLengths = option((0, 3), "Of a draft head too.")
    head_path: UserPath | None = option(
        None, "A directory with a head of this policy, such as a run's draft_head; null: a new one."
    )
    learning_rate: PositiveFloat = option(1e-4, "Of the head's own AdamW.")


SpeculationSection = Annotated[
    NoSpeculationSection | LookupSection | HeadSection, Field(discriminator="kind")
]


class JaxEngineSection(Section):
    """The embedded engine."""

    kind: Literal["jax"] = option(
        "jax",
        "Rollout engine: jax is the embedded one on the trainer's own model; vllm runs in its process, "
        "vllm_server in a server that the trainer starts and ends, vllm_external in one that runs already.",
    )
    slots: PositiveInt = option(256, "Number of sequences decoded at once, on each device.")
    prefill_rows: PositiveInt = option(32, "Number of prompts prefilled at once.")
    decode_chunk_tokens: PositiveInt = option(
        8, "Tokens, or steps of speculation, between two looks at finished sequences."
    )
    speculation: SpeculationSection = option(NoSpeculationSection(), "Whether a step samples several tokens.")


class VllmSection(Section):
    """vLLM, wherever it runs: what is checked after each weight sync."""

    kind: str
    probe_tokens: NonNegativeInt = option(32, "Tokens scored on both sides after a weight sync; 0 is off.")
    probe_logprob_tolerance: NonNegativeFloat | None = option(
        None,
        "Largest mean difference of the probe's log-probabilities between engine and trainer, in nats; null: "
        "1e-6 with numerics.exact, whose two sides are the same bits, else 0.02.",
    )
    on_mismatch: Literal["stop", "warn"] = option("stop", "What a failed certificate of a weight sync does.")

    def _rules(self) -> Iterator[Rule]:
        if self.probe_tokens == 0:
            yield from self.idle("rollout.engine.probe_tokens is 0", "probe_logprob_tolerance")


class StartedVllmSection(VllmSection):
    """A vLLM that the trainer starts on its device: its limits."""

    max_num_seqs: PositiveInt = option(256, "Number of sequences that vLLM decodes at once.")
    gpu_memory_utilization: Share = option(0.4, "Share of the GPU's memory for vLLM awake. Nothing on CPU.")
    sleep: bool | None = option(
        None,
        "Whether vLLM gives its memory to the trainer from a rollout's end to the next weights; JAX must "
        "then return freed memory, which the commands see to. null: on a GPU; a CPU has no sleep mode.",
    )
    kv_cache_memory_mb: PositiveInt | None = option(
        None, "Size of vLLM's KV cache, in MiB; null leaves it to vLLM."
    )
    speculative_config: VllmSpeculation | None = option(
        None,
        "Fields of vLLM's own speculation, such as {method: ngram, num_speculative_tokens: 3, "
        "prompt_lookup_max: 3}. It keeps the distribution, but not the tokens that are sampled without it. "
        "null: none.",
    )
    draft_learning_rate: PositiveFloat | None = option(
        None,
        "Of the AdamW that trains the draft of speculative_config's eagle3 beside the policy; vLLM gets its "
        "weights after each update of the policy's. null: the draft stays as it was read.",
    )
    enforce_eager: bool = option(
        True, "Whether vLLM runs without compilation, whose fusions round elsewhere; an exact run needs it."
    )

    @property
    def trained_draft(self) -> HeadSection | None:
        """The draft that is trained beside the policy; None without one."""
        given = self.speculative_config
        if self.draft_learning_rate is None or given is None or "model" not in given:
            return None
        lengths, path = (0, given["num_speculative_tokens"]), given["model"]
        return HeadSection(lengths=lengths, head_path=path, learning_rate=self.draft_learning_rate)

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        if self.speculative_config is None or "model" not in self.speculative_config:
            yield from self.idle("speculative_config has no draft with weights", "draft_learning_rate")


class ServedVllmSection(VllmSection):
    """A vLLM in another process: how long it may take."""

    request_timeout_s: PositiveFloat = option(600.0, "Time for the answer to a batch of prompts, in seconds.")
    sync_timeout_s: PositiveFloat = option(300.0, "Time within which a server takes new weights, in seconds.")


class InProcessVllmSection(StartedVllmSection):
    """vLLM in the trainer's process."""

    kind: Literal["vllm"] = "vllm"


class VllmServerSection(StartedVllmSection, ServedVllmSection):
    """A vLLM server that the trainer starts and ends."""

    kind: Literal["vllm_server"] = "vllm_server"
    startup_timeout_s: PositiveFloat = option(600.0, "Time until the server is ready, in seconds.")
    restarts: NonNegativeInt = option(0, "Times in a run that a dead or hung server is started anew.")


class ExternalVllmSection(ServedVllmSection):
    """A vLLM server that runs already."""

    kind: Literal["vllm_external"] = "vllm_external"
    url: Url = Field(description="Address of the server, such as http://127.0.0.1:8000.")


EngineSection = Annotated[
    JaxEngineSection | InProcessVllmSection | VllmServerSection | ExternalVllmSection,
    Field(discriminator="kind"),
]


class RolloutSection(Section):
    """What is generated in a step and how."""

    engine: EngineSection = option(JaxEngineSection(), "What generates.")
    prompts_per_step: PositiveInt = option(32, "Number of prompts of one step (P).")
    group_size: GroupSize = option(16, "Completions of one prompt (G); a group of one has no advantage.")
    max_prompt_tokens: PositiveInt = option(32, "Longest prompt, in tokens; a longer one is skipped.")
    max_completion_tokens: PositiveInt = option(
        32, "Longest completion, in tokens; of an episode all that follows its prompt, observations too."
    )
    max_turn_tokens: PositiveInt | None = option(
        None, "Longest turn of an episode, in tokens; null: there are no episodes."
    )
    turns: Literal["lockstep", "stream"] = option(
        "lockstep",
        "When an episode goes on: lockstep: a turn of all, then an answer to all, each history prefilled "
        "anew; stream: as soon as its environment has answered, from the tokens that its slot holds.",
    )
    temperature: Temperature = option(1.0, "Sampling temperature, of logprobs too; with vLLM 0.01 to 2.")
    top_p: One = option(1.0, "Nucleus; 1, since a truncated distribution is not the policy that is trained.")
    top_k: Zero = option(0, "Candidates of the sampling; 0 (off), as top_p is 1.")

    @property
    def longest_tokens(self) -> int:
        """Longest sequence, prompt and all that follows, in tokens."""
        return self.max_prompt_tokens + self.max_completion_tokens

    @property
    def turn_tokens(self) -> int:
        """Longest completion of one request to the engine, in tokens."""
        return self.max_turn_tokens or self.max_completion_tokens

    @property
    def longest_history_tokens(self) -> int:
        """Longest prompt of a request to the engine, in tokens; of an episode, the tokens so far are one."""
        return self.max_prompt_tokens if self.max_turn_tokens is None else self.longest_tokens - 1

    def _rules(self) -> Iterator[Rule]:
        what = "a turn is longer than an episode"
        expected = f"at most rollout.max_completion_tokens = {self.max_completion_tokens}"
        holds = self.turn_tokens <= self.max_completion_tokens
        yield Rule(holds, "max_turn_tokens", what, expected)
