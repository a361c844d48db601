"""The exact operations of vLLM's side against the trainer's own and a float64 oracle: equal bits, in every
layout of a paged cache.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.models import ops, vocabulary
from jetrl_jax.precision.numerics import Numerics
from tests.oracles import attention_oracle

torch = pytest.importorskip("torch", reason="torch is not installed")
from bridge.vllm.worker import exact_torch  # noqa: E402
from tests.parity.paged_cache import LAYOUTS, REQUESTS, Paged, assert_equal, bf16, normal  # noqa: E402

pytestmark = pytest.mark.as_the_product

VARIANTS = ("native", "cuda")
EPS = 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(500, 256), (300, 4, 64)])
def test_rms_norm_is_the_trainers(
    variant: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_torch, "ELEMENTS_AT_ONCE", 256 * 7)  # seven rows at a time
    rng, numerics = np.random.default_rng(0), Numerics(engine_variant=variant)
    x, residual, weight = (
        normal(rng, *shape),
        normal(rng, *shape),
        torch.from_numpy(1 + rng.normal(size=shape[-1])).bfloat16(),
    )
    master = bf16(weight).astype(jnp.float32)
    assert_equal(
        exact_torch.rms_norm(x, weight, EPS, variant)[0], ops.rms_norm(bf16(x), master, EPS, numerics)
    )
    ours = exact_torch.rms_norm(x, weight, EPS, variant, residual)
    for mine, theirs in zip(
        ours, ops.add_rms_norm(bf16(x), bf16(residual), master, EPS, numerics), strict=True
    ):
        assert_equal(mine, theirs)


def test_rms_norm_has_two_variants() -> None:
    rng = np.random.default_rng(1)
    x, residual, weight = (
        normal(rng, 100, 256),
        normal(rng, 100, 256),
        torch.from_numpy(1 + rng.normal(size=256)).bfloat16(),
    )
    native, cuda = (exact_torch.rms_norm(x, weight, EPS, variant, residual)[0] for variant in VARIANTS)
    assert 0.1 < (native != cuda).float().mean() < 0.5


def test_silu_is_the_trainers() -> None:
    """For every BF16 gate; subnormal results are 0 in XLA."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = bits[torch.isfinite(bits)][:, None]
    up = torch.full_like(gate, 1.375)
    ours = exact_torch.silu_multiply(torch.cat((gate, up), dim=-1)).float().numpy()
    trainers = np.asarray(ops.silu_multiply(bf16(gate), bf16(up), Numerics()), np.float32)
    smallest = np.finfo(np.float32).tiny
    np.testing.assert_array_equal(
        *(np.where(np.abs(side) <= 2 * smallest, 0, side) for side in (ours, trainers))
    )


def test_rotation_is_the_trainers_and_rounds_to_nearest() -> None:
    rng, numerics = np.random.default_rng(0), Numerics()
    x, cos, sin = normal(rng, 300, 4, 64), normal(rng, 300, 32), normal(rng, 300, 32)
    ours = exact_torch.rotate(x, cos, sin)
    assert_equal(ours, ops.rope(bf16(x)[None], (bf16(cos)[None], bf16(sin)[None]), numerics)[0])
    first, second = x.double().chunk(2, dim=-1)
    wide = [side.double()[:, None] for side in (cos, sin)]
    expected = torch.cat(
        (first * wide[0] - second * wide[1], second * wide[0] + first * wide[1]), dim=-1
    ).float()
    assert torch.equal(ours, expected.bfloat16())
    assert not torch.equal(ours.float(), (expected.view(torch.int32) & ~0xFFFF).view(torch.float32)), (
        "truncation is another rotation"
    )


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_log_softmax_is_the_trainers(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 500)) * size).float()
    every = jnp.tile(jnp.arange(500, dtype=jnp.int32)[None], (40, 1))
    trainers = [
        vocabulary.token_logprobs(jnp.asarray(logits.numpy()), every[:, i]) for i in range(0, 500, 50)
    ]
    for at_once in (exact_torch.ELEMENTS_AT_ONCE, 1100):
        monkeypatch.setattr(exact_torch, "ELEMENTS_AT_ONCE", at_once)
        ours = exact_torch.log_softmax(logits)
        np.testing.assert_array_equal(ours[:, ::50].numpy(), np.stack(trainers, axis=1))
    wide = logits.double()
    assert (ours.double() - (wide - wide.logsumexp(-1, keepdim=True))).abs().max() < 1e-6 * size


def test_linear_is_the_float64_product_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, weight, bias = normal(rng, 7, 96), normal(rng, 50, 96), normal(rng, 50)
    product = x.double().numpy() @ weight.double().numpy().T
    for at_once in (exact_torch.ELEMENTS_AT_ONCE, 1000, 1):
        monkeypatch.setattr(exact_torch, "ELEMENTS_AT_ONCE", at_once)
        np.testing.assert_array_equal(exact_torch.linear(x, weight).numpy(), product.astype(np.float32))
        expected = product.astype(np.float32) + bias.float().numpy()
        np.testing.assert_array_equal(exact_torch.linear(x, weight, bias).numpy(), expected)


def attended(paged: Paged, query: Any) -> Any:
    """`paged_attention` of all requests, in an output with two rows more than there are tokens."""
    tokens, heads, width = query.shape
    output = torch.full((tokens, heads, width), 7.0, dtype=torch.bfloat16)
    keys, values = exact_torch.key_value_cache(paged.cache, width)
    exact_torch.paged_attention(
        query, keys, values, paged.table, paged.starts, paged.lengths, width**-0.5, output
    )
    assert (output[-2:] == 7).all(), "rows of no request"
    return output[:-2].reshape(tokens - 2, -1)


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [64, 128])
def test_paged_attention_is_the_trainers(layout: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode against `attention` of whole sequences, whatever is computed at once."""
    paged = Paged(layout, False, 2, width)
    query = normal(np.random.default_rng(1), int(paged.starts[-1]) + 2, 4, width)
    expected = paged.attended_by_the_trainer(query)
    for at_once in (exact_torch.ELEMENTS_AT_ONCE, 5000, 1):
        monkeypatch.setattr(exact_torch, "ELEMENTS_AT_ONCE", at_once)
        assert_equal(attended(paged, query), expected)


def test_an_unknown_cache_layout_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"unknown layout of the KV cache: got \[2, 8, 16, 2, 64\]"):
        exact_torch.key_value_cache(torch.zeros(2, 8, 16, 2, 64), 64)
