"""vLLM's settings, arguments, model directory, requests and answers, common to both vLLM engines.

Imports neither torch nor vLLM.  The arguments fix the conditions of the contract: BF16 with an FP32 head,
logprobs after the temperature over the full vocabulary, FP32 scales, no defaults from a checkpoint's
generation_config, and one prefill per prompt (vLLM 0.32 on CPU refuses a seed for a prompt that is split).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bridge.hf.config import to_hf
from bridge.hf.tensors import quantization_config
from jetrl_jax.config.learning import LoraSection
from jetrl_jax.config.precision import Fp8UnifiedSection, NumericsSection
from jetrl_jax.config.rollout import RolloutSection, StartedVllmSection
from jetrl_jax.config.types import VLLM_TEMPERATURES
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.models.anatomy import MATRICES
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.rollout.engine import too_long
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory

# Level 2 drops weights and cache, since new weights come before the next request; level 1 would keep a copy
# on the host.
SLEEP_LEVEL = 2
# The allowed implementations of FP8 products by promotion order: this project's on a CPU, vLLM's on CUDA.
FP8_PRODUCTS = {
    "deepgemm": ("ReferenceFp8BlockScaledMMKernel", "CutlassFp8BlockScaledMMKernel"),
    "triton": ("ReferenceFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel"),
}
# Operations of an exact engine that this project implements; "linear" only if the model has BF16 layers.
# and "adapters" only if it has some.
EXACT = ("attention", "norm", "rope", "silu", "linear", "logits", "logprobs", "adapters")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of `max_lora_rank`
# Promotion order (`precision.promotion_order`) -> vLLM's CUDA kernel for FP8 products in that order.
LINEAR_BACKENDS = {"deepgemm": "cutlass", "triton": "triton"}
SUPPORTED = ((0, 24), (0, 32))  # first and last minor release whose numerics and interfaces are known
# Environment variables that vLLM reads when it is imported or started.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Hopper: by default vLLM prefers DeepGEMM, whose power-of-two scales requantise the weights, and
    # FlashInfer's kernel to CUTLASS.
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it computes log-probabilities in a Triton kernel with FP32 sums
}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # OpenMP's threads would compete with JAX's
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM's kernels for CPUs with AMX quantise activations by another formula, or not at all, and repack
    # the codes.
    "VLLM_DISABLED_KERNELS": "CPUFp8W8A8BlockScaledMMKernel,CPUFp8BlockScaledMMKernel",
}
COMPILER_SWITCH = "TORCHDYNAMO_DISABLE"  # torch reads it at each compilation


class EngineFailed(RunStopped):
    """The rollout engine died, hung or gave an invalid answer; exit status 3, and the run can be resumed."""


@dataclass(frozen=True)
class EngineSettings:
    """How vLLM runs: the sections of the config that it reads, and whether it sleeps.

    rollout: its `engine` is one of vLLM's; also gives the longest prompt and completion.
    fp8: promotion order and scale format of this project's FP8 kernel; on CUDA the order selects vLLM's;
      and the format of keys and values.
    numerics: `exact` (reductions in float64, `bridge.vllm.worker.exact`, for eager engines) and the rounding
      points.
    sleep: whether the engine's `sleep` frees its memory; vLLM refuses it on a CPU.
    lora: the adapters beside a frozen base; None: there are none.
    """

    rollout: RolloutSection
    fp8: Fp8UnifiedSection
    numerics: NumericsSection
    sleep: bool
    lora: LoraSection | None = None

    @property
    def sleep_level(self) -> int:
        """Of vLLM's sleep.  Beside adapters the base is kept on the host, since only they come again."""
        return SLEEP_LEVEL if self.lora is None else 1

    @property
    def started(self) -> StartedVllmSection:
        """The section of a vLLM that this project starts."""
        assert isinstance(self.rollout.engine, StartedVllmSection)
        return self.rollout.engine

    @property
    def longest(self) -> int:
        """The longest prompt with its completion, in tokens."""
        return self.rollout.longest_tokens

    @property
    def described_speculation(self) -> dict[str, Any] | None:
        """For a run's record: vLLM's speculation and its rule of acceptance; None without."""
        engine = self.rollout.engine
        given = engine.speculative_config if isinstance(engine, StartedVllmSection) else None
        return given and {
            "draft": dict(given),
            "trained": self.started.trained_draft is not None,
            "acceptance": "rejection sampling, by vLLM",
            "promise": "the distribution without speculation; tokens are others than without it",
        }

    def arguments(self, model_directory: Path, model: ModelConfig, on_cpu: bool) -> dict[str, Any]:
        """vLLM's engine arguments by name, as JSON values; a server gets the same ones as flags."""
        longest = min(self.longest + 1, model.max_position_embeddings)  # + 1: scoring samples one token
        section = self.started
        arguments: dict[str, Any] = {
            "model": str(model_directory),
            "load_format": "dummy",  # weights are transferred before the first request
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": "bfloat16",
            "hf_overrides": {"head_dtype": "float32"},
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 1,
            "max_model_len": longest,
            "max_num_seqs": section.max_num_seqs,
            "max_num_batched_tokens": max(longest, section.max_num_seqs * longest),
            "enable_chunked_prefill": False,
            "seed": 0,
            "enforce_eager": section.enforce_eager,
            "gpu_memory_utilization": section.gpu_memory_utilization,
            "weight_transfer_config": {"backend": "jetrl"},
            "worker_extension_cls": "bridge.vllm.worker.transfer.WorkerExtension",
            "additional_config": {
                "jetrl": {
                    "promotion_order": self.fp8.promotion_order,
                    "scale_format": self.fp8.scale_format,
                    "exact": self.numerics.exact,
                    "engine_variant": self.numerics.engine_variant,
                }
            },
        }
        if not on_cpu:
            arguments["linear_backend"] = LINEAR_BACKENDS[self.fp8.promotion_order]
        if self.numerics.exact and not on_cpu:
            arguments["attention_backend"] = "FLASH_ATTN"  # the plugin's exact attention replaces it
        if self.fp8.kv_cache == "fp8":
            arguments["kv_cache_dtype"] = "fp8_e4m3"
        if section.speculative_config is not None:
            drafts = (
                {"draft_load_config": {"load_format": "auto"}}
                if "model" in section.speculative_config
                else {}
            )
            arguments["speculative_config"] = (
                drafts | section.speculative_config
            )  # a draft's weights are read
        if self.lora is not None:
            names = {
                matrix.fused_as.rsplit(".", 1)[-1] for matrix in MATRICES if matrix.name in self.lora.targets
            }
            arguments |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= self.lora.rank),
                "lora_dtype": "bfloat16",
                "lora_target_modules": sorted(names),  # or it would replace embedding and head too
            }
        if self.sleep:
            arguments["enable_sleep_mode"] = True
        if section.kv_cache_memory_mb is not None:
            arguments["kv_cache_memory_bytes"] = section.kv_cache_memory_mb << 20
        return arguments


def environment(on_cpu: bool, eager: bool) -> dict[str, str]:
    """Environment variables of a process that runs vLLM; `eager` as `rollout.engine.enforce_eager`.

    Raises:
      UserError: vLLM is to be compiled, but the user's environment keeps torch from compiling.
    """
    if not eager and os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        raise UserError(
            "rollout.engine.enforce_eager: got false with TORCH_COMPILE_DISABLE=1 in the environment, "
            "expected true, or that unset."
        )
    # Even an eager engine compiles small helpers, which on a CPU costs more time than it saves.
    compiler = {COMPILER_SWITCH: "1" if eager and on_cpu else "0"}
    return ENVIRONMENT | compiler | (CPU_ENVIRONMENT if on_cpu else {})


def check_version(version: str) -> None:
    """Raises UserError if this version of vLLM is outside the supported range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    first, last = (".".join(map(str, bound)) for bound in SUPPORTED)
    if found is None or not SUPPORTED[0] <= (int(found[1]), int(found[2])) <= SUPPORTED[1]:
        raise UserError(
            f"vLLM: unsupported version: got {version}, expected {first} to {last}, whose numerics are known."
        )


def require_exact(operations: Mapping[str, str], settings: EngineSettings, fp8: bool) -> None:
    """Raises EngineFailed if an engine that should be exact uses other operations.

    operations: from `bridge.vllm.worker.exact.operations`; fp8: whether the model has FP8 layers.
    """
    if not settings.numerics.exact:
        return
    optional = {"linear"} | ({"adapters"} if settings.lora is None else set())
    served = {
        name: operations.get(name, "nothing") for name in EXACT if name in operations or name not in optional
    }
    wrong = [
        f"{name} by {by}"
        for name, by in served.items()
        if not all(part.startswith("Exact") for part in by.split("+"))
    ]
    products, product = FP8_PRODUCTS[settings.fp8.promotion_order], operations.get("fp8_product", "nothing")
    if fp8 and product not in products:
        wrong.append(f"fp8_product by {product}, expected {' or '.join(products)}")
    if wrong:
        hint = (
            "Is this package's plugin there (entry point jetrl of vllm.general_plugins), and no "
            "VLLM_ variable set?"
        )
        raise EngineFailed(
            "vLLM: numerics.exact: it runs operations that are not the trainer's: got "
            f"{'; '.join(wrong)}. {hint}"
        )


def write_model_directory(directory: Path, model: ModelConfig, fp8_paths: Iterable[str]) -> Path:
    """Writes a directory with architecture and formats for vLLM, without weights; returns it."""
    config = to_hf(model, dtype="bfloat16")
    quantization = quantization_config(model, fp8_paths)
    if quantization is not None:
        config["quantization_config"] = quantization
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return directory


def sampling_fields(sampling: SamplingParams, request: Request) -> dict[str, Any]:
    """All of vLLM's sampling parameters of one request; none is left to a default of engine or checkpoint."""
    digest = hashlib.sha256(f"{sampling.seed} {request.seed}".encode()).digest()
    return {
        "n": 1,
        "temperature": 0.0 if sampling.greedy else float(sampling.temperature),
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": int.from_bytes(digest[:7], "little"),
        "stop": [],
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # only the stop tokens above count
        "min_tokens": 0,
        "max_tokens": request.limit(sampling),
        "logprobs": 0,  # only that of the sampled token
        "detokenize": False,
        "skip_special_tokens": False,
    }


def scoring_fields() -> dict[str, Any]:
    """Sampling parameters with which vLLM reports the log-probabilities of a prompt at temperature 1."""
    request = Request(0, [0], 0)
    return sampling_fields(SamplingParams(1.0, 1, (), 0), request) | {"prompt_logprobs": 0}


def check_requests(
    requests: Sequence[Request], sampling: SamplingParams, settings: EngineSettings, vocab_size: int
) -> None:
    """Raises ValueError for requests that vLLM would refuse or silently truncate."""
    problems = []
    low, high = VLLM_TEMPERATURES
    if not sampling.greedy and not low <= sampling.temperature <= high:
        problems.append(
            f"got temperature={sampling.temperature}, expected {low} to {high}, which vLLM takes as they are"
        )
    longest, history = settings.rollout.turn_tokens, settings.rollout.longest_history_tokens
    if sampling.max_tokens > longest:
        problems.append(
            f"got max_tokens={sampling.max_tokens}, expected at most max_completion_tokens={longest}"
        )
    for request in requests:
        if not 0 < len(request.prompt_ids) <= history:
            limit = f"expected 1 to max_prompt_tokens={history}"
            problems.append(
                f"request {request.id}: got a prompt of {len(request.prompt_ids)} tokens, {limit}"
            )
        elif min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
            problems.append(
                f"request {request.id}: got a token id outside 0 .. vocab_size - 1 = {vocab_size - 1}"
            )
    problems += too_long(requests, sampling, settings.longest)
    if problems:
        raise ValueError("submit: bad request: " + "; ".join(problems[:5]) + ".")


def trajectory(
    request: Request,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    sampling: SamplingParams,
    version: int,
) -> Trajectory:
    """An answer of vLLM as a `Trajectory`.

    Raises:
      EngineFailed: the answer does not fit the request: an aborted or empty completion, a missing logprob, or
        an unknown finish reason.
    """
    stopped = bool(token_ids) and token_ids[-1] in sampling.stop_token_ids
    problems = (
        []
        if finish_reason in ("stop", "length")
        else [f"finish_reason={finish_reason!r}, expected 'stop' or 'length'"]
    )
    limit = request.limit(sampling)
    if not 0 < len(token_ids) <= limit or len(logprobs) != len(token_ids):
        problems.append(
            f"{len(token_ids)} tokens with {len(logprobs)} logprobs, expected 1 to {limit} of each"
        )
    if finish_reason == "stop" and not stopped:
        problems.append(
            f"a stop after token {list(token_ids[-1:])}, expected one of {sampling.stop_token_ids}"
        )
    if problems:
        raise EngineFailed(f"vLLM: request {request.id} ended badly: got {'; '.join(problems)}.")
    reason: Literal["stop", "length"] = "stop" if stopped else "length"
    return Trajectory.of_completion(request.id, request.prompt_ids, token_ids, logprobs, reason, version)


def speculation_counts(metrics: str, drafted: int) -> dict[str, int]:
    """The counts of `RolloutEngine.counts` in the text of vLLM's metrics (Prometheus), since it began.

    drafted: tokens of a draft.  vLLM counts the steps of a sequence that had one.
    """
    told: Counter[str] = Counter()
    for name, labels, value in re.findall(r"^vllm:spec_decode_num_(\w+)_total\{(.*)\} (\S+)$", metrics, re.M):
        place = re.search(r'position="(\d+)"', labels)
        told[name if place is None else f"accepted_{int(place[1]) + 1}"] += int(float(value))
    steps, places = told["drafts"], range(1, drafted + 1)
    whole = {"drafted": told["draft_tokens"], "accepted": told["accepted_tokens"]}
    whole |= {"verified": steps, "asked": steps * drafted}
    of_places = {f"accepted_{place}": told[f"accepted_{place}"] for place in places}
    return whole | of_places | {f"drafted_{place}": steps for place in places}


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as command-line flags of vLLM's server."""
    flags = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            values = value if isinstance(value, list) else [value]
            flags += [flag, *(json.dumps(one) if isinstance(one, dict) else str(one) for one in values)]
    return flags


def set_environment(on_cpu: bool, eager: bool = True) -> None:
    """Sets vLLM's environment variables that the user has not set; errors as `environment`.

    Call it before vLLM is imported, and again for each engine, since the config of each engine decides
    whether torch compiles.
    """
    variables = environment(on_cpu, eager)
    os.environ[COMPILER_SWITCH] = variables.pop(COMPILER_SWITCH)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
