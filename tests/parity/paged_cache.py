"""A paged cache as vLLM keeps it, filled with random requests, and what the trainer's attention makes of
them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from jetrl_jax.models import attention
from tests.parity.small_policy import resolved

LAYOUTS = ("separate", "side by side")
BLOCK_SIZE = 16
# Requests of one step: (tokens in the cache, new ones of them); decoding, a prefill, one with nothing new, a
# prompt's second part.
REQUESTS = [(37, 1), (20, 20), (5, 0), (50, 13), (1, 1), (16, 1)]


def bf16(array: Any) -> jnp.ndarray:
    """A torch BF16 tensor as a JAX one, bit for bit."""
    return jnp.asarray(array.contiguous().view(torch.int16).numpy().view(jnp.bfloat16))


def assert_equal(ours: Any, trainers: Any) -> None:
    np.testing.assert_array_equal(ours.float().numpy(), np.asarray(trainers, np.float32))


def normal(rng: np.random.Generator, *shape: int) -> Any:
    """Random BF16 values over some orders of magnitude."""
    return torch.from_numpy(rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))).bfloat16()


class Paged:
    """Keys and values of `REQUESTS` in the blocks of a cache, in a random order, with NaN wherever no token
    is.

    layout: "separate" as vLLM 0.24 and 0.25 have it, "side by side" as later ones; head_major: the memory's
      order below either.
    """

    def __init__(self, layout: str, head_major: bool, heads: int, width: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        used = [-(-length // BLOCK_SIZE) for length, _ in REQUESTS]
        blocks = sum(used) + 3
        names = rng.permutation(blocks)
        table = np.full((len(REQUESTS), max(used) + 1), 10**6)  # entries past a request's length
        shape = (blocks, heads, BLOCK_SIZE) if head_major else (blocks, BLOCK_SIZE, heads)
        if layout == "separate":
            memory = torch.full((blocks, 2, *shape[1:], width), float("nan"), dtype=torch.bfloat16)
            self.cache = memory.transpose(2, 3) if head_major else memory
        else:
            memory = torch.full((*shape, 2 * width), float("nan"), dtype=torch.bfloat16)
            self.cache = memory if head_major else memory.transpose(1, 2)
        self.keys = []
        self.values = []
        for row, (length, _) in enumerate(REQUESTS):
            mine, names = names[: used[row]], names[used[row] :]
            table[row, : used[row]] = mine
            key, value = normal(rng, length, heads, width), normal(rng, length, heads, width)
            self.keys.append(key)
            self.values.append(value)
            for token in range(length):
                block, place = int(mine[token // BLOCK_SIZE]), token % BLOCK_SIZE
                for part, source in ((0, key), (1, value)):
                    if layout == "separate":
                        self.cache[block, part, place] = source[token]
                    else:
                        self.cache[block, :, place, part * width : (part + 1) * width] = source[token]
        self.table = torch.from_numpy(table.astype(np.int32))
        self.lengths = torch.tensor([length for length, _ in REQUESTS], dtype=torch.int32)
        self.starts = torch.tensor(np.cumsum([0, *(new for _, new in REQUESTS)]), dtype=torch.int32)

    def attended_by_the_trainer(self, query: torch.Tensor) -> np.ndarray:
        """`attention.attend` of whole sequences, exact: float32 [new tokens, N * H], the BF16 values."""
        longest, outputs = max(length for length, _ in REQUESTS), []

        def padded(x: torch.Tensor, before: int) -> jnp.ndarray:
            """Zeros around one request's rows, so that all requests are one program."""
            return bf16(torch.nn.functional.pad(x, (0, 0, 0, 0, before, longest - before - len(x))))[None]

        for row, (length, new) in enumerate(REQUESTS):
            start = int(self.starts[row])
            mine = padded(query[start : start + new], length - new)
            out = attention.attend(
                mine, padded(self.keys[row], 0), padded(self.values[row], 0), None, resolved()
            )
            outputs.append(np.asarray(out[0, length - new : length], np.float32))
        return np.concatenate(outputs)
