"""A Qwen3 / Qwen2 / Llama 3 decoder in float64 numpy, token by token and head by head; imports none of our
code.

Formulas: RMSNorm (Zhang & Sennrich 2019), RoPE with halves as pairs (Su et al. 2021), its Llama 3.1
  stretching
(Dubey et al. 2024) and YaRN's (Peng et al. 2023), grouped-query attention (Ainslie et al. 2023), SwiGLU
(Shazeer 2020).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight of one vector."""
    return x / math.sqrt(float(np.mean(x * x)) + eps) * weight


def frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> list[float]:
    """Angular frequencies of the head_dim / 2 pairs; scaling as config.json's rope dictionary, or None."""
    result = []
    for pair in range(head_dim // 2):
        frequency = theta ** (-2.0 * pair / head_dim)
        if scaling and scaling["rope_type"] == "linear":
            frequency /= scaling["factor"]
        elif scaling and scaling["rope_type"] == "llama3":
            # over the old context
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            frequency = kept * frequency + (1 - kept) * frequency / scaling["factor"]
        elif scaling and scaling["rope_type"] == "yarn":
            # The pair that turns n times over the old context: context * theta^(-2 pair / head_dim) = 2 pi n,
            # solved for pair.
            context = scaling["original_max_position_embeddings"]
            turns = scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)
            first, last = (
                head_dim * math.log(context / (2 * math.pi * n)) / (2 * math.log(theta)) for n in turns
            )
            if scaling.get("truncate", True):
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            divided = min(1.0, max(0.0, (pair - first) / (last - first)))
            frequency = (1 - divided) * frequency + divided * frequency / scaling["factor"]
        result.append(frequency)
    return result


def magnitude(scaling: Mapping[str, Any] | None) -> float:
    """What cos and sin are multiplied by: YaRN's, of the keys that config.json may state, else 1."""
    if not scaling or scaling["rope_type"] != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    growth = 0.1 * math.log(scaling["factor"])
    return (1 + growth * above) / (1 + growth * below) if above and below else 1 + growth


def rotate(x: np.ndarray, position: int, angular: list[float]) -> np.ndarray:
    """RoPE of one head [H]: the pair (i, i + H/2) turned by position * frequency i."""
    half, out = len(x) // 2, np.empty_like(x)
    for i, frequency in enumerate(angular):
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


def attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Causal attention of one sequence: [T, N, H], [T, K, H], [T, K, H] -> [T, N * H]."""
    length, heads, width = queries.shape
    group = heads // keys.shape[1]
    out = np.zeros((length, heads, width))
    for t in range(length):
        for n in range(heads):
            scores = keys[: t + 1, n // group] @ queries[t, n] / math.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ values[: t + 1, n // group] / weights.sum()
    return out.reshape(length, heads * width)


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def logits(config: Mapping[str, Any], weights: Mapping[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Float64 logits [T, V] of one sequence at positions 0, 1, 2 …

    ``config``: the keys of config.json with ``rope_theta`` and ``rope_scaling``; ``weights``: Hugging Face's
      names
    with their prefix ``model.``, [out, in].
    """
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    eps, width = config["rms_norm_eps"], config["head_dim"]
    angular, grown = (
        frequencies(width, config["rope_theta"], config["rope_scaling"]),
        magnitude(config["rope_scaling"]),
    )
    h = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."

        def project(x: np.ndarray, name: str, prefix: str = prefix) -> np.ndarray:
            return x @ w[f"{prefix}{name}.weight"].T + w.get(f"{prefix}{name}.bias", 0.0)

        n = np.stack([rms_norm(x, w[prefix + "input_layernorm.weight"], eps) for x in h])
        q, k, v = (project(n, f"self_attn.{letter}_proj").reshape(len(tokens), -1, width) for letter in "qkv")
        for x, name in ((q, "q_norm"), (k, "k_norm")):
            for t in range(len(tokens)):
                for head in range(x.shape[1]):
                    if f"{prefix}self_attn.{name}.weight" in w:
                        x[t, head] = rms_norm(x[t, head], w[f"{prefix}self_attn.{name}.weight"], eps)
                    x[t, head] = grown * rotate(x[t, head], t, angular)
        h = h + project(attention(q, k, v), "self_attn.o_proj")
        n = np.stack([rms_norm(x, w[prefix + "post_attention_layernorm.weight"], eps) for x in h])
        h = h + project(silu(project(n, "mlp.gate_proj")) * project(n, "mlp.up_proj"), "mlp.down_proj")
    n = np.stack([rms_norm(x, w["model.norm.weight"], eps) for x in h])
    head = w["model.embed_tokens.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
    return n @ head.T
