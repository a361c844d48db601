"""vLLM's operators, built and called as in an engine with this project's settings, for `check-engine`.

Each is vLLM's own class, made under the settings of such an engine and called as vLLM's model calls it.  So
the result is that of the platform, CPU library and plugin that vLLM would choose on this machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from bridge.vllm.worker import plugin

Arrays = Mapping[str, Any]
BLOCK_SIZE = 16


def run(case: str, parameters: Mapping[str, Any], inputs: Arrays) -> dict[str, np.ndarray]:
    """The outputs by name of one case of the contract, such as "rope llama3"."""
    plugin.register()
    variant = parameters.get("engine_variant", "native")
    with set_current_vllm_config(_engine_config(variant)), torch.no_grad():
        outputs = OPERATORS[case.split()[0]](
            parameters, {name: _tensor(array) for name, array in inputs.items()}
        )
    return {name: _array(tensor) for name, tensor in outputs.items()}


@functools.cache
def _engine_config(engine_variant: str) -> VllmConfig:
    """The part of an exact engine's config (of a BF16 model) that its operators read."""
    config = VllmConfig(additional_config={"jetrl": {"exact": True, "engine_variant": engine_variant}})
    asked = {"dtype": torch.bfloat16, "enforce_eager": True, "head_dtype": torch.float32}
    config.model_config = SimpleNamespace(**asked, hf_config=SimpleNamespace(head_dtype="float32"))
    return config


def _device() -> str:
    return "cpu" if current_platform.is_cpu() else "cuda"


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(_device())
    return torch.from_numpy(array.copy()).to(_device())


def _array(tensor: torch.Tensor) -> np.ndarray:
    host = tensor.contiguous().cpu()
    return host.view(torch.int16).numpy() if host.dtype == torch.bfloat16 else host.numpy()


def _norm(parameters: Mapping[str, Any], arrays: Arrays) -> dict[str, torch.Tensor]:
    norm = RMSNorm(arrays["x"].shape[-1], eps=parameters["eps"], dtype=torch.bfloat16).to(_device())
    norm.weight.data.copy_(arrays["weight"])
    normed, total = norm(arrays["x"], arrays["residual"])
    return {"normed": normed, "total": total}


def _rope(parameters: Mapping[str, Any], arrays: Arrays) -> dict[str, torch.Tensor]:
    _ROPE_DICT.clear()
    x, scaling = arrays["x"], parameters["scaling"] or {"rope_type": "default"}
    asked = {"rope_theta": parameters["theta"], **scaling}
    rope = get_rope(x.shape[-1], 8192, rope_parameters=asked, dtype=torch.bfloat16).to(_device())
    flat = x.reshape(len(x), -1)
    rotated, _ = rope(arrays["positions"].long(), flat.clone(), flat.clone())
    return {"rotated": rotated.view(x.shape)}


def _attention(parameters: Mapping[str, Any], arrays: Arrays) -> dict[str, torch.Tensor]:
    """Prefills all tokens except the last and decodes the last, through the paged cache."""
    backend = (
        AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.FLASH_ATTN
    ).get_class()
    q, k, v = (arrays[name] for name in "qkv")
    tokens, heads, width = q.shape
    kv_heads, scale = k.shape[1], width**-0.5
    implementation = backend.get_impl_cls()(
        num_heads=heads,
        head_size=width,
        scale=scale,
        num_kv_heads=kv_heads,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
    )
    blocks = -(-tokens // BLOCK_SIZE)
    cache = torch.zeros(blocks, kv_heads, BLOCK_SIZE, 2 * width, dtype=torch.bfloat16, device=q.device)
    places = torch.arange(tokens, device=q.device)
    if current_platform.is_cpu():
        implementation.do_kv_cache_update(None, k, v, cache, places)
    else:  # in a running engine, vLLM's kernel does this copy
        cache[places // BLOCK_SIZE, :, places % BLOCK_SIZE] = torch.cat((k, v), dim=-1)
        cache = cache.transpose(1, 2)
    attended = []
    for first, last in ((0, tokens - 1), (tokens - 1, tokens)):
        output = torch.zeros_like(q[first:last])
        metadata = SimpleNamespace(
            num_actual_tokens=last - first,
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32, device=q.device),
            seq_lens=torch.tensor([last], dtype=torch.int32, device=q.device),
            block_table=torch.arange(blocks, dtype=torch.int32, device=q.device)[None],
        )
        implementation.forward(None, q[first:last], k[first:last], v[first:last], cache, metadata, output)
        attended.append(output.view(last - first, -1))
    return {"attended": torch.cat(attended)}


def _silu(parameters: Mapping[str, Any], arrays: Arrays) -> dict[str, torch.Tensor]:
    return {"product": SiluAndMul()(torch.cat((arrays["gate"], arrays["up"]), dim=-1))}


def _linear(parameters: Mapping[str, Any], arrays: Arrays) -> dict[str, torch.Tensor]:
    """Uses the method of an unquantised layer; the layer itself would need vLLM's process groups."""
    layer: Any = torch.nn.Module()
    method = UnquantizedLinearMethod()
    layer.weight = torch.nn.Parameter(arrays["weight"], requires_grad=False)
    layer.bias = arrays.get("bias")
    method.process_weights_after_loading(layer)
    return {"out": method.apply(layer, arrays["x"], layer.bias)}


def _head(parameters: Mapping[str, Any], arrays: Arrays) -> dict[str, torch.Tensor]:
    """Log-probabilities as computed for a prompt and for a sampled token; NaN where the two differ."""
    weight = arrays["weight"]
    head = SimpleNamespace(
        tp_size=1,
        weight=weight,
        quant_method=SimpleNamespace(apply=lambda layer, x, bias: x @ layer.weight.t()),
    )
    processor = LogitsProcessor(weight.shape[0])
    logits = processor._get_logits(arrays["x"], head, None)
    of_prompt = Sampler(logprobs_mode="processed_logprobs").compute_logprobs(logits)
    generators = {row: torch.Generator(device=logits.device).manual_seed(row) for row in range(len(logits))}
    of_sampled = TopKTopPSampler(logprobs_mode="processed_logprobs")(logits.clone(), generators, None, None)[
        1
    ]
    return {"logits": logits, "logprobs": torch.where(of_prompt == of_sampled, of_sampled, torch.nan)}


OPERATORS: Mapping[str, Callable[..., dict[str, torch.Tensor]]] = {
    "norm": _norm,
    "rope": _rope,
    "attention": _attention,
    "silu": _silu,
    "linear": _linear,
    "head": _head,
}
