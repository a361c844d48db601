"""What the fields of vLLM as rollout engine demand of each other: a part of the tables of `jetrl_jax.config.rules.tables`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jetrl_jax.config.rules.types import NoEffect, Rule
from jetrl_jax.config.types import VLLM_TEMPERATURES, show

if TYPE_CHECKING:
    from jetrl_jax.config.run_config import RunConfig


def shares_gpu(config: RunConfig) -> bool:
    """Whether vLLM is started on the trainer's device."""
    return config.rollout.engine == "vllm" and config.vllm.mode != "external"


def _is_address(url: str) -> bool:
    """Whether an URL names http or https and a host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as http://[::1 or a port that is no number
        return False


VLLM_RULES: tuple[Rule, ...] = (
    Rule(
        ("vllm.url",),
        lambda c: c.vllm.url is None or _is_address(c.vllm.url),
        "an address names http or https and a host",
        lambda c: "http://HOST:PORT",
    ),
    Rule(
        ("vllm.url", "vllm.mode", "rollout.engine"),
        lambda c: c.rollout.engine != "vllm" or (c.vllm.mode == "external") == (c.vllm.url is not None),
        "an external server has an address, and no other has",
        lambda c: "http://HOST:PORT" if c.vllm.mode == "external" else "null, or vllm.mode: external",
    ),
    Rule(
        ("rollout.engine", "precision.preset"),
        lambda c: c.rollout.engine != "vllm" or c.precision.preset not in ("fp32", "fp16"),
        "vLLM runs in BF16 and FP8 here",
        lambda c: "jax, or another preset",
    ),
    Rule(
        ("rollout.temperature", "rollout.engine"),
        lambda c: c.rollout.engine != "vllm" or VLLM_TEMPERATURES[0] <= c.rollout.temperature <= VLLM_TEMPERATURES[1],
        "vLLM samples at another temperature than the trainer scores at, or refuses it",
        lambda c: "a number from {} to {}, or rollout.engine: jax".format(*map(show, VLLM_TEMPERATURES)),
    ),
    Rule(
        ("vllm.enforce_eager", "numerics.exact"),
        lambda c: not shares_gpu(c) or c.vllm.enforce_eager or not c.numerics.exact,
        "what torch compiles rounds elsewhere, and no CUDA graph holds the exact operations",
        lambda c: "true, or numerics.exact: false",
    ),
)

# Of a server that the trainer starts: what it is given, and its limits.
_STARTED = ("max_num_seqs", "gpu_memory_utilization", "sleep", "kv_cache_memory_mb", "enforce_eager")
_TIMED = ("startup_timeout_s", "request_timeout_s", "sync_timeout_s", "restarts")
_CHECKED = ("probe_tokens", "probe_logprob_tolerance", "on_mismatch")


def _vllm(fields: tuple[str, ...], switch: str, idle: Callable[[RunConfig], bool], because: str) -> NoEffect:
    return NoEffect(tuple(f"vllm.{name}" for name in fields), (switch,), idle, because)


VLLM_NO_EFFECT: tuple[NoEffect, ...] = (
    NoEffect(
        ("rollout.slots", "rollout.prefill_rows", "rollout.decode_chunk_tokens"),
        ("rollout.engine",),
        lambda c: c.rollout.engine != "jax",
        "only the embedded engine reads it",
    ),
    _vllm(("mode", "url", *_STARTED, *_TIMED, *_CHECKED), "rollout.engine", lambda c: c.rollout.engine != "vllm", "rollout.engine is jax"),
    _vllm(
        _TIMED,
        "vllm.mode",
        lambda c: c.rollout.engine == "vllm" and c.vllm.mode == "in_process",
        "vLLM runs in the trainer's process, where nothing can end a call",
    ),
    _vllm(
        (*_STARTED, "startup_timeout_s", "restarts"),
        "vllm.mode",
        lambda c: c.rollout.engine == "vllm" and c.vllm.mode == "external",
        "the server was started by somebody else",
    ),
    _vllm(
        ("probe_logprob_tolerance",),
        "vllm.probe_tokens",
        lambda c: c.rollout.engine == "vllm" and c.vllm.probe_tokens == 0,
        "vllm.probe_tokens is 0",
    ),
)
