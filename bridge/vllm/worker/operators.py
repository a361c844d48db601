"""Records the output of every operator in a forward of vLLM's model, by hooks on its torch modules.

Operators have the names of `jetrl_jax.diagnostics.operators`.  If two modules make an operator's output (the
norms of query and key heads), or a module returns a tuple, the parts are concatenated.  RoPE is one module
for all layers, so its layer is found by counting its calls.  vLLM must run in this process and eagerly, since
compiled code does not call modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bridge.vllm.settings import EngineFailed
from jetrl_jax.diagnostics.operators import FINAL

Outputs = dict[tuple[int, str], np.ndarray]  # (layer, operator) -> float32 [T, width]
# The end of a module's path in vLLM's Qwen2, Qwen3 and Llama -> the operator that the module completes.
MODULES = {
    "input_layernorm": "input_norm",
    "self_attn.qkv_proj": "qkv",
    "self_attn.q_norm": "qk_norm",
    "self_attn.k_norm": "qk_norm",
    "self_attn.rotary_emb": "rope",
    "self_attn.attn": "attention",
    "self_attn.o_proj": "o_proj",
    "post_attention_layernorm": "post_norm",
    "mlp.gate_up_proj": "gate_up",
    "mlp.act_fn": "silu",
    "mlp.down_proj": "down",
    "model.norm": "norm",
}


@contextmanager
def recorded(model: torch.nn.Module) -> Iterator[list[tuple[str, np.ndarray]]]:
    """While open, appends (operator, float32 [T, width]) of each module of `MODULES` that runs, in order."""
    events: list[tuple[str, np.ndarray]] = []

    def hook(operator: str) -> Any:
        return lambda module, inputs, output: events.append((operator, _flat(output)))

    handles = []
    for path, module in model.named_modules():
        operator = next((name for end, name in MODULES.items() if f".{path}".endswith(f".{end}")), None)
        if operator is not None:
            handles.append(module.register_forward_hook(hook(operator)))
    try:
        yield events
    finally:
        for handle in handles:
            handle.remove()


def by_layer(events: list[tuple[str, np.ndarray]], layers: int) -> Outputs:
    """The recorded events of one forward, by layer and operator.

    Raises:
      EngineFailed: the events are not those of one forward of `layers` layers.
    """
    outputs: Outputs = {}
    runs: dict[str, int] = {}
    for operator, group in itertools.groupby(events, key=lambda event: event[0]):
        layer = FINAL if operator == "norm" else runs.get(operator, 0)
        runs[operator] = runs.get(operator, 0) + 1
        outputs[layer, operator] = np.concatenate([values for _, values in group], axis=-1)
    expected = {
        operator: 1 if operator == "norm" else layers for operator in set(MODULES.values()) - {"qk_norm"}
    }
    if {operator: count for operator, count in runs.items() if operator != "qk_norm"} != expected:
        raise EngineFailed(f"vLLM: its operators cannot be told apart: got runs {runs}, expected {expected}.")
    return outputs


def _flat(output: Any) -> np.ndarray:
    """A module's output as float32 [T, width]; a copy, since later operators may write into it.

    In a linear layer's (output, bias) the bias is None.  Of a norm's (normed, residual) and RoPE's (q, k),
    both parts are kept.
    """
    parts = [part for part in (output if isinstance(output, tuple) else (output,)) if part is not None]
    return np.concatenate(
        [part.detach().float().cpu().numpy().reshape(len(part), -1) for part in parts], axis=-1
    )
