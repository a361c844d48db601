"""The exact operations of vLLM's side against the trainer's own and a float64 oracle: equal bits, in every layout of a paged cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.models import ops
from jetrl_jax.precision import Numerics
from tests.oracles import attention_oracle
from tests.parity.small_policy import CONFIG

torch = pytest.importorskip("torch", reason="torch is not installed")
from bridge.engine import torch_exact  # noqa: E402

VARIANTS = ("native", "cuda")
EPS = 1e-6
BLOCK_SIZE = 16
# Requests of one step: (tokens in the cache, new ones of them); decoding, a prefill, one with nothing new, a prompt's second part.
REQUESTS = [(37, 1), (20, 20), (5, 0), (50, 13), (1, 1), (16, 1)]


def bf16(array: Any) -> jnp.ndarray:
    """A torch BF16 tensor as a JAX one, bit for bit."""
    return jnp.asarray(array.contiguous().view(torch.int16).numpy().view(jnp.bfloat16))


def assert_equal(ours: Any, trainers: Any) -> None:
    np.testing.assert_array_equal(ours.float().numpy(), np.asarray(trainers, np.float32))


def normal(rng: np.random.Generator, *shape: int) -> Any:
    """Random BF16 values over some orders of magnitude."""
    return torch.from_numpy(rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))).bfloat16()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(500, 256), (300, 4, 64)])
def test_rms_norm_is_the_trainers(variant: str, shape: tuple[int, ...]) -> None:
    rng, numerics = np.random.default_rng(0), Numerics(engine_variant=variant)
    x, residual, weight = normal(rng, *shape), normal(rng, *shape), torch.from_numpy(1 + rng.normal(size=shape[-1])).bfloat16()
    master = bf16(weight).astype(jnp.float32)
    assert_equal(torch_exact.rms_norm(x, weight, EPS, variant)[0], ops.rms_norm(bf16(x), master, EPS, numerics))
    ours = torch_exact.rms_norm(x, weight, EPS, variant, residual)
    for mine, theirs in zip(ours, ops.add_rms_norm(bf16(x), bf16(residual), master, EPS, numerics), strict=True):
        assert_equal(mine, theirs)


def test_rms_norm_has_two_variants() -> None:
    rng = np.random.default_rng(1)
    x, residual, weight = normal(rng, 100, 256), normal(rng, 100, 256), torch.from_numpy(1 + rng.normal(size=256)).bfloat16()
    native, cuda = (torch_exact.rms_norm(x, weight, EPS, variant, residual)[0] for variant in VARIANTS)
    assert 0.1 < (native != cuda).float().mean() < 0.5


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e4), (128, 1e6)])
def test_rope_table_is_the_trainers(head_dim: int, theta: float) -> None:
    positions = 40960
    table = torch_exact.rope_table(torch.from_numpy(ops.inverse_frequencies(head_dim, theta)), positions).bfloat16()
    config = dataclasses.replace(CONFIG, head_dim=head_dim, rope_theta=theta, max_position_embeddings=positions)
    trainers = ops.rope_table(jnp.arange(positions, dtype=jnp.int32)[None], config, Numerics())
    assert_equal(table, np.concatenate([np.asarray(part[0], np.float32) for part in trainers], axis=-1))


class Paged:
    """Keys and values of `REQUESTS` in the blocks of a cache, in a random order, with NaN wherever no token is.

    layout: "separate" as vLLM 0.24 has it, "side by side" as from 0.26 on; head_major: the memory's order below either.
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
        self.keys, self.values = [], []
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


def attended(paged: Paged, query: Any) -> Any:
    """`paged_attention` of all requests, in an output with two rows more than there are tokens."""
    tokens, heads, width = query.shape
    output = torch.full((tokens, heads, width), 7.0, dtype=torch.bfloat16)
    keys, values = torch_exact.key_value_cache(paged.cache, width)
    torch_exact.paged_attention(query, keys, values, paged.table, paged.starts, paged.lengths, width**-0.5, output)
    assert (output[-2:] == 7).all(), "rows of no request"
    return output[:-2].reshape(tokens - 2, -1)


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("layout", ["separate", "side by side"])
@pytest.mark.parametrize("width", [16, 64])
def test_paged_attention_is_float64_rounded_once(layout: str, head_major: bool, width: int) -> None:
    """Against the oracle: its scale, a power of two, is exact in any format."""
    paged = Paged(layout, head_major, 2, width)
    query = normal(np.random.default_rng(1), int(paged.starts[-1]) + 2, 4, width)
    expected = []
    for row, (length, new) in enumerate(REQUESTS):
        start = int(paged.starts[row])
        q = query[start : start + new].double().numpy()[None]
        visible = np.arange(length)[None] <= np.arange(length - new, length)[:, None]
        k, v = (side[row].double().numpy()[None] for side in (paged.keys, paged.values))
        out = attention_oracle.attention(q, k, v, visible[None], np.zeros_like(q)).values[0]
        expected.append(torch.from_numpy(out[0]).float().bfloat16().reshape(new, 4 * width))
    assert torch.equal(attended(paged, query), torch.cat(expected))


@pytest.mark.parametrize("layout", ["separate", "side by side"])
@pytest.mark.parametrize("width", [64, 128])
def test_paged_attention_is_the_trainers(layout: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode against `attention` of whole sequences, whatever is computed at once."""
    paged, numerics = Paged(layout, False, 2, width), Numerics()
    query = normal(np.random.default_rng(1), int(paged.starts[-1]) + 2, 4, width)
    expected, longest = [], max(length for length, _ in REQUESTS)

    def padded(x: Any, before: int) -> jnp.ndarray:
        """Zeros around one request's rows, so that all requests are one program."""
        return bf16(torch.nn.functional.pad(x, (0, 0, 0, 0, before, longest - before - len(x))))[None]

    for row, (length, new) in enumerate(REQUESTS):
        start = int(paged.starts[row])
        mine = padded(query[start : start + new], length - new)
        out = ops.attention(mine, padded(paged.keys[row], 0), padded(paged.values[row], 0), None, numerics)
        expected.append(np.asarray(out[0, length - new : length], np.float32))
    for at_once in (torch_exact.ELEMENTS_AT_ONCE, 5000, 1):
        monkeypatch.setattr(torch_exact, "ELEMENTS_AT_ONCE", at_once)
        assert_equal(attended(paged, query), np.concatenate(expected))


def test_an_unknown_cache_layout_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"unknown layout of the KV cache: got \[2, 8, 16, 2, 64\]"):
        torch_exact.key_value_cache(torch.zeros(2, 8, 16, 2, 64), 64)
