"""Interfaces to other systems: Hugging Face checkpoints without torch (`bridge.hf`), vLLM (`bridge.vllm`).

``load_checkpoint`` and ``read_into`` read a checkpoint directory.  ``save_checkpoint`` writes one that
``transformers.AutoModelForCausalLM.from_pretrained`` and vLLM can read.  ``name_map`` is the bijection
between the names of parameters and of checkpoint tensors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.hf.read import load_checkpoint, read_into
    from bridge.hf.write import decoder_parameters, save_checkpoint

__all__ = ["decoder_parameters", "load_checkpoint", "read_into", "save_checkpoint"]

_MODULES = {
    "decoder_parameters": "bridge.hf.write",
    "load_checkpoint": "bridge.hf.read",
    "read_into": "bridge.hf.read",
    "save_checkpoint": "bridge.hf.write",
}


def __getattr__(name: str) -> Any:
    """Loads a name's module when it is first used, so that vLLM's processes import little but the plugin."""
    if name not in _MODULES:
        raise AttributeError(f"module 'bridge' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
