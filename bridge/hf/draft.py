"""A draft head (`jetrl_jax.models.draft_head`) as a directory that vLLM's `llama_eagle3` loads.

    config.json        a Llama of one layer, with the size of the draft's vocabulary and the feature layers
    model.safetensors  the head's parameters in BF16; for a part of the vocabulary d2t, offsets (id - index),
                       and t2d, which vLLM refuses with the whole

The embedding is the policy's, and is not in the directory.  An architecture `LlamaForCausalLMEagle3` and the
method `eagle3` select the model in vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from bridge.hf.config import rope_to_hf
from bridge.hf.directory import Kind, write_json, written_directory
from bridge.hf.safetensors_file import parse_json, read_header
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.draft_head import DraftHead, feature_layers
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import map_params, named_params

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def draft_config(policy: ModelConfig, draft_vocab: int) -> dict[str, Any]:
    """The dictionary of a head's ``config.json``."""
    rope = rope_to_hf(policy.rope_scaling) if policy.rope_scaling is not None else None
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": policy.vocab_size,
        "draft_vocab_size": draft_vocab,
        "hidden_size": policy.hidden_size,
        "intermediate_size": policy.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": policy.num_heads,
        "num_key_value_heads": policy.num_kv_heads,
        "head_dim": policy.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": policy.max_position_embeddings,
        "rms_norm_eps": policy.rms_norm_eps,
        "rope_theta": policy.rope_theta,
        "rope_scaling": rope,
        "rope_parameters": {"rope_theta": policy.rope_theta, **(rope or {"rope_type": "default"})},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eagle_aux_hidden_state_layer_ids": list(feature_layers(policy.num_layers)),
        "torch_dtype": "bfloat16",
    }


def draft_tensors(head: DraftHead) -> dict[str, np.ndarray]:
    """The tensors of a head's file."""
    ids = np.asarray(head.d2t[...], np.int64)
    kept = np.zeros(head.config.vocab_size, bool)
    kept[ids] = True
    parameters = named_params(nnx.state(head, nnx.Param))
    tensors = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in parameters}
    return tensors if kept.all() else tensors | {"d2t": ids - np.arange(len(ids)), "t2d": kept}


def save_draft_head(directory: str | Path, head: DraftHead) -> Path:
    """Writes a head into a directory, whole or not at all, in place of one that is there; returns it."""
    tensors = draft_tensors(head)
    with written_directory(directory, Kind((CONFIG, WEIGHTS), CONFIG), overwrite=True) as partial:
        write_json(partial / CONFIG, draft_config(head.config, len(head.d2t[...])))
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / WEIGHTS).chmod((partial / CONFIG).stat().st_mode)
    return user_path(directory)


def read_draft_head(directory: str | Path, policy: ModelConfig, numerics: Numerics) -> DraftHead:
    """The head in a directory, for a policy.

    Raises:
      UserError: the directory has no head, a damaged one, or one of another policy's sizes; every difference
        is named.
    """
    root = user_path(directory)
    missing = [name for name in (CONFIG, WEIGHTS) if not (root / name).is_file()]
    if missing:
        raise UserError(f"read_draft_head: no draft head: got {root} without {missing}, expected both.")
    found = parse_json((root / CONFIG).read_bytes(), str(root / CONFIG))
    size = found.get("draft_vocab_size") or policy.vocab_size
    expected = draft_config(policy, size)
    told = ("rope_parameters", "torch_dtype")  # in other words in files of other origin
    wrong = [
        f"{name}={found.get(name)!r}, expected {value!r}"
        for name, value in expected.items()
        if name not in told and found.get(name) != value
    ]
    if wrong:
        raise UserError(f"read_draft_head: {root} is another policy's: got {'; '.join(wrong)}.")
    tensors = {name: stored.read() for name, stored in read_header(root / WEIGHTS).items()}
    offsets = tensors.get("d2t", np.zeros(policy.vocab_size, np.int64))  # of the whole vocabulary none
    if offsets.shape != (size,):
        raise UserError(
            f"read_draft_head: {root / WEIGHTS} does not fit: got d2t {offsets.shape}, expected ({size},)."
        )
    head = DraftHead(policy, numerics, np.arange(size) + offsets, rngs=nnx.Rngs(0))
    state = nnx.state(head, nnx.Param)
    different = [
        f"{name} {tensors[name].shape if name in tensors else 'missing'}, expected {value.shape}"
        for name, value in named_params(state)
        if name not in tensors or tensors[name].shape != value.shape
    ]
    if different:
        raise UserError(f"read_draft_head: {root / WEIGHTS} does not fit: got {'; '.join(different)}.")
    arrays = {name: tensors[name].astype(np.float32) for name, _ in named_params(state)}
    bad = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if bad:
        raise UserError(f"read_draft_head: {root / WEIGHTS}: got {bad} not finite, expected finite values.")
    nnx.update(head, map_params(lambda name, _: arrays[name], state))
    return head
