"""Random transformers models in FP32 and their twins in true float64, for the parity tests.

``model.double()`` alone is no float64 model: transformers' RMSNorm, softmax and rotary embedding cast to
float32 by name, and with left padding that float32 softmax of a mask of -1.8e308 gives NaN. ``true_float64``
makes the name mean float64 while a twin is built and run; that it does is checked against a float64 numpy
decoder.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference is a torch model: pip install jetrl-jax[torch]")
transformers = pytest.importorskip(
    "transformers", reason="the reference is a transformers model: pip install jetrl-jax[hf]"
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": [1, 2],
    "pad_token_id": 0,
}
# The stretching's three bands all hold frequencies: wavelengths from 6 to 40,000 tokens, bounds at 16 and 64.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Of the 12 pairs of 24 channels two are kept, the last four divided, those between blended.
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 0.1,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 24,
        "tie_word_embeddings": False,
        "rope_parameters": PLAIN_ROPE,
    },
    "qwen3_yarn": {
        "model_type": "qwen3",
        "head_dim": 24,
        "tie_word_embeddings": False,
        "rope_parameters": YARN_ROPE,
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": PLAIN_ROPE},
    "llama3": {"model_type": "llama", "tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE},
    "llama_bias": {
        "model_type": "llama",
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": PLAIN_ROPE | {"rope_type": "linear", "factor": 4.0},
    },
}


@contextlib.contextmanager
def true_float64() -> Iterator[None]:
    """torch.float32 and Tensor.float() mean float64, and new tensors are float64, inside."""
    saved = torch.float32, torch.float, torch.Tensor.float
    default = torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
        torch.set_default_dtype(default)


def random_model(case: str, seed: int = 0) -> Any:
    """An FP32 model in eval mode; every parameter random, no norm weight near one, no bias near zero."""
    values = dict(CASES[case])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **SIZES, **copy.deepcopy(values))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.5 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise if "embed" in name else noise * parameter.shape[1] ** -0.5)
    return model


def float64_twin(model: Any) -> Any:
    """The same weights in float64, its rotary frequencies computed in float64; run it inside
    ``true_float64``.
    """
    with true_float64():
        twin = type(model)(copy.deepcopy(model.config)).eval().double()
        twin.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return twin


def ragged_batch(
    lengths: list[int], side: str, vocab_size: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(token ids, positions, mask), int32 [B, T]: random tokens padded with 0 on the given side."""
    rng = np.random.default_rng(seed)
    tokens, positions, mask = (np.zeros((len(lengths), max(lengths)), np.int32) for _ in range(3))
    for row, length in enumerate(lengths):
        where = slice(max(lengths) - length, None) if side == "left" else slice(0, length)
        tokens[row, where] = rng.integers(1, vocab_size, length)
        positions[row, where] = np.arange(length)
        mask[row, where] = 1
    return tokens, positions, mask


def hf_logits(model: Any, tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] as numpy in the model's own dtype."""
    ids, places, attended = (torch.from_numpy(x.astype(np.int64)) for x in (tokens, positions, mask))
    with torch.no_grad():
        return model(
            input_ids=ids, position_ids=places, attention_mask=attended, use_cache=False
        ).logits.numpy()


def save(model: Any, directory: Path) -> Path:
    """The model's checkpoint directory as transformers writes it."""
    model.save_pretrained(directory)
    return directory


def errors(got: Any, reference: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """(max, mean) absolute error over all elements, or over those of the valid tokens."""
    assert reference.dtype == np.float64 and got.dtype == np.float32 and got.shape == reference.shape
    difference = np.abs(np.asarray(got, np.float64) - reference)
    difference = difference if valid is None else difference[valid.astype(bool)]
    return np.asarray([difference.max(), difference.mean()])
