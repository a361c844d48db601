"""The weight transfer backend ``jetrl`` for vLLM; an update is verified whole before any of it is applied.

    start_weight_update    forget the staged weights of an earlier, failed update
    update_weights         stage and verify every tensor of the manifest: its shape, dtype and hash
    finish_weight_update   apply by vLLM's layerwise reload, into the storage that the model already has

vLLM 0.24 does not notify a backend of the end, so there `update_weights` applies the verified weights itself
(the update starts with `is_checkpoint_format=False`, so that vLLM does not take the model apart first).  The
model is not touched before that, so an earlier failure leaves the old version whole.

Weights come from a safetensors file (engine in another process) or from tensors that the trainer has passed
in this process.  For the parity certificate, `jetrl_held_manifest` reads back the weights that the model
multiplies, with fused layers taken apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from bridge.vllm.worker.exact import FP8_CACHE, operations
from jetrl_jax.precision.formats import is_adapter, is_kv_scale
from jetrl_jax.rollout.manifest import Manifest, TensorEntry
from pallas_kernels.formats import BLOCK

BACKEND = "jetrl"
SHOWN = 5
APPLIES_ON_RECEIPT = not hasattr(WeightTransferEngine, "finish_weight_update")  # vLLM 0.24

# stands in for the model's config, which vLLM 0.24 does not give to a backend; only its dtype is read
BF16 = SimpleNamespace(dtype=torch.bfloat16)

_handed_over: dict[str, tuple[Manifest, list[tuple[str, torch.Tensor]]]] = {}
_tickets = itertools.count()


def register_backend() -> None:
    """Registers the backend with vLLM."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, JetrlWeightTransfer)


def hand_over(manifest: Manifest, tensors: list[tuple[str, torch.Tensor]]) -> str:
    """Leaves tensors for the engine in this process; returns the `ticket` for its `update_info`."""
    ticket = str(next(_tickets))
    _handed_over[ticket] = (manifest, tensors)
    return ticket


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The initialisation of the backend, which needs no information."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where a policy version is: a file with its manifest (``<path>.json``), or a ticket of `hand_over`."""

    path: str | None = None
    ticket: str | None = None


class JetrlWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The backend in vLLM's worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._staged: list[tuple[str, torch.Tensor]] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Forgets a staged version that was never applied."""
        self._staged = None

    def receive_weights(self, update_info: UpdateInfo, load_weights: Any = None) -> None:
        """Stages one version; `load_weights`, vLLM 0.24's own way to apply it, is not used.

        Raises:
          ValueError: the weights differ from their manifest; the model is unchanged.
        """
        if update_info.ticket is not None:
            manifest, tensors = _handed_over.pop(update_info.ticket)
        elif update_info.path is not None:
            manifest = Manifest.from_json(Path(f"{update_info.path}.json").read_text(encoding="utf-8"))
            with safe_open(update_info.path, framework="pt") as file:
                tensors = [(name, file.get_tensor(name)) for name in file.keys()]
        else:
            raise ValueError("update_weights: nothing to take: got neither path nor ticket.")
        problems = manifest.differences(manifest_of(tensors, manifest.policy_version))
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise ValueError(
                "update_weights: the weights are not those of their manifest: "
                f"{'; '.join(problems[:SHOWN])}{more}."
            )
        # ordered by layer, as vLLM's reload needs them
        order = {name: place for place, name in enumerate(manifest.entries)}
        self._staged = sorted(tensors, key=lambda pair: order[pair[0]])
        if APPLIES_ON_RECEIPT:
            self.finish_weight_update()

    def finish_weight_update(self) -> None:
        """Applies the staged version.

        Raises:
          RuntimeError: nothing is staged.
        """
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        staged = self._staged
        self._staged = None
        if staged is None:
            raise RuntimeError(
                "finish_weight_update: nothing is staged: expected update_weights(...) before."
            )
        scales = [(name, tensor) for name, tensor in staged if is_kv_scale(name)]
        initialize_layerwise_reload(self.model)
        self.model.load_weights(pair for pair in staged if not is_kv_scale(pair[0]))
        finalize_layerwise_reload(self.model, getattr(self, "model_config", BF16))
        set_scales(self.model, scales)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Required by vLLM 0.24 and 0.25, but unused: the trainer writes a file or passes tensors."""
        raise NotImplementedError("trainer_send_weights: weights of backend jetrl come by path or ticket.")

    def shutdown(self) -> None:
        """Drops staged weights."""
        self._staged = None


class WorkerExtension:
    """Methods added to vLLM's worker class, for `collective_rpc`."""

    def jetrl_held_manifest(self, names: list[str], version: int) -> str:
        """The manifest, as JSON, of the checkpoint tensors `names` as the model holds them."""
        with torch.no_grad():
            return manifest_of(held_tensors(self.get_model(), names), version).to_json()  # type: ignore[attr-defined]

    def jetrl_operations(self) -> dict[str, str]:
        """The classes that compute each operation of the model and its sampler."""
        return operations(self.get_model(), getattr(self.model_runner, "sampler", None))  # type: ignore[attr-defined]


def manifest_of(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Manifest:
    """The manifest of torch tensors, as `Manifest.of`."""
    entries = {}
    for name, tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        entries[name] = TensorEntry.of(
            tensor.shape, str(tensor.dtype).removeprefix("torch."), host.reshape(-1).view(torch.uint8).numpy()
        )
    return Manifest(version, entries)


def set_scales(model: torch.nn.Module, scales: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Sets the scales of keys, values and queries in every place where vLLM's backends read them.

    vLLM takes them from a checkpoint only if the model is quantised, and rounds them to BF16 at the first
    load.

    Raises:
      RuntimeError: a layer has no such scale, or its cache is not in E4M3.
    """
    modules = dict(model.named_modules())
    for name, tensor in scales:
        path, _, kind = name.rpartition(".")
        layer: Any = modules.get(f"{path}.attn")
        found = None if layer is None else (getattr(layer, "kv_cache_dtype", None))
        if found not in FP8_CACHE or not hasattr(layer, f"_{kind}"):
            raise RuntimeError(
                f"finish_weight_update: {name}: got a KV cache in {found}, expected one of {FP8_CACHE}."
            )
        value = float(tensor)
        getattr(layer, f"_{kind}").fill_(value)
        setattr(layer, f"_{kind}_float", value)
        if hasattr(layer, f"_{kind}_cpu"):
            getattr(layer, f"_{kind}_cpu").fill_(value)
        for stale in ("bmm1_scale", "bmm2_scale"):  # FlashInfer's products of scales, made at its first call
            if hasattr(layer.impl, stale):
                setattr(layer.impl, stale, None)


def held_tensors(model: torch.nn.Module, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint tensors `names` as a vLLM model holds them; names that it lacks are left out."""
    modules, fused, rank = dict(model.named_modules()), _fused(model), _adapter_rank(model)
    for name in names:
        path, attribute = name.rsplit(".", 1)
        if is_adapter(name):
            if (matrix := _adapter(modules, fused, name, rank)) is not None:
                yield name, matrix
            continue
        if is_kv_scale(name):
            scale = getattr(modules.get(f"{path}.attn"), f"_{attribute}", None)
            if scale is not None:
                yield name, scale.detach().reshape(1)
            continue
        parent, last = path.rsplit(".", 1) if "." in path else ("", path)
        if last in fused:
            whole, parts = fused[last]
            layer = modules.get(f"{parent}.{whole}")
        else:
            layer, parts = modules.get(path), [last]
        layer = getattr(layer, "base_layer", layer)  # of a layer with an adapter
        tensor = None if layer is None else _held(layer, attribute)
        if tensor is None:
            continue
        if len(parts) > 1:
            tensor = _part(layer, tensor, parts.index(last), attribute)
        if (vocabulary := getattr(layer, "org_vocab_size", None)) is not None:
            tensor = tensor[:vocabulary]  # vLLM pads the vocabulary
        yield name, tensor


def _fused(model: torch.nn.Module) -> dict[str, tuple[str, list[str]]]:
    """The last name of each matrix that vLLM fuses -> (that of the whole, those of its parts)."""
    packed = getattr(model, "packed_modules_mapping", {})
    return {part: (whole, parts) for whole, parts in packed.items() for part in parts}


def _adapter(
    modules: dict[str, Any], fused: dict[str, tuple[str, list[str]]], name: str, rank: int
) -> torch.Tensor | None:
    """A matrix of the adapter in vLLM's only slot; B is multiplied by its scale."""
    path, kind = name.removesuffix(".weight").rsplit(".", 1)
    parent, _, last = path.rpartition(".")
    whole, parts = fused.get(last, (last, [last]))
    layer = modules.get(f"{parent}.{whole}")
    stacked = getattr(layer, "lora_a_stacked" if kind == "lora_A" else "lora_b_stacked", None)
    if stacked is None or not rank:
        return None
    matrix = stacked[parts.index(last)][0, 0]  # with zeros up to the largest rank
    return matrix[:rank] if kind == "lora_A" else matrix[:, :rank]


def _adapter_rank(model: torch.nn.Module) -> int:
    """The rank of the adapter in vLLM's only slot; 0 if there is none."""
    manager: Any = getattr(model, "lora_manager", None)
    if manager is None or manager.lora_index_to_id[0] is None:
        return 0
    return int(manager._registered_adapters[manager.lora_index_to_id[0]].rank)


def _held(layer: Any, attribute: str) -> torch.Tensor | None:
    """A parameter of a layer; a weight packed for vLLM's CPU kernel is read by multiplying the identity."""
    tensor = getattr(layer, attribute, None)
    if attribute == "weight" and tensor is not None and tensor.numel() == 0:
        identity = torch.eye(layer.input_size_per_partition, dtype=tensor.dtype)
        return layer.quant_method.apply(layer, identity, None).t()  # exact: one product a sum is not 0
    return tensor


def _part(layer: Any, tensor: torch.Tensor, index: int, attribute: str) -> torch.Tensor:
    """The rows of one projection of a fused layer."""
    sizes = [int(size) for size in layer.output_partition_sizes]
    if attribute.startswith("weight_scale"):
        sizes = [-(-size // BLOCK) for size in sizes]
    start = sum(sizes[:index])
    return tensor[start : start + sizes[index]]
