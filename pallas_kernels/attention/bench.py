"""Times attention on this GPU as a part of `python -m pallas_kernels.bench`: Qwen3-8B's heads, causal.

Training rows are sequences of up to 4,096 tokens; the FLOPs are those of the causal half, 4 T² H / 2 a head
forward and 5/2 of it backward. Decode is one token of each of 64 sequences against its cache, whose bytes
are read once. The rival is cuDNN, by JAX's own call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.api import cached_attention, causal_attention
from pallas_kernels.measure import jax_contender, steady_state

KERNEL = "mosaic_gpu"
HEADS, KV_HEADS, WIDTH = 32, 8, 128
SEQUENCE_TOKENS = 4096
SEQUENCES, CACHE_TOKENS = 64, (512, 2048)
BACKWARD = 2.5
"""FLOPs of a backward in those of a forward: five products for two."""

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def training_cases(implementation: str) -> dict[str, Attention]:
    """{contender: function of q, k, v} of whole sequences."""
    return {
        "mosaic": lambda q, k, v: causal_attention(q, k, v, implementation=implementation),
        "cudnn": lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        ),
    }


def decode_cases(implementation: str) -> dict[str, Callable[..., jax.Array]]:
    """{contender: function of q, keys, values and positions} of one new token of each sequence."""

    def cudnn(q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
        B, K, S, H = keys.shape
        keys, values = (x.reshape(B * K, S, 1, H) for x in (keys, values))
        lengths = jnp.repeat(positions[:, 0] + 1, K, total_repeat_length=B * K)
        out = jax.nn.dot_product_attention(
            q.reshape(B * K, -1, 1, H), keys, values, key_value_seq_lengths=lengths, implementation="cudnn"
        )
        return out.reshape(q.shape)

    return {
        "mosaic": lambda *arrays: cached_attention(*arrays, implementation=implementation),
        "cudnn": cudnn,
    }


def with_gradient(attend: Attention) -> Callable[..., Any]:
    """The function of q, k, v and a cotangent that gives the result and the gradients."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> Any:
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(cotangent)

    return both


def bench_attention(rows: list[int]) -> Iterator[dict[str, Any]]:
    """One row per site, size and contender: TFLOP/s of training, microseconds and GB/s of decode."""
    for m in rows:
        length = min(m, SEQUENCE_TOKENS)
        q, k, v, cotangent = (
            _normal(m // length, length, heads) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )
        flops = 2.0 * (m // length) * length * length * HEADS * WIDTH
        forward = {name: jax_contender(one, q, k, v) for name, one in training_cases(KERNEL).items()}
        both = {
            name: jax_contender(with_gradient(one), q, k, v, cotangent)
            for name, one in training_cases(KERNEL).items()
        }
        for site, contenders, work in (
            ("attention forward", forward, flops),
            ("attention forward and backward", both, flops * (1 + BACKWARD)),
        ):
            for name, timing in steady_state(contenders).items():
                rate = work / timing.median / 1e12
                yield _row(site, m, name, f"{rate:.0f}", timing, tflops=round(rate, 1))
    for length in CACHE_TOKENS:
        q, cache = _normal(SEQUENCES, 1, HEADS), _normal(SEQUENCES, KV_HEADS, length)
        positions = jnp.full((SEQUENCES, 1), length - 1, jnp.int32)
        contenders = {
            name: jax_contender(one, q, cache, cache + jnp.bfloat16(1), positions)
            for name, one in decode_cases(KERNEL).items()
        }
        for name, timing in steady_state(contenders).items():
            rate = 2 * cache.size * 2 / timing.median / 1e9
            microseconds = timing.median * 1e6
            yield _row(
                "attention decode",
                length,
                name,
                f"{microseconds:.1f}",
                timing,
                us=microseconds,
                gbs=round(rate, 1),
            )


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), (*shape, WIDTH), jnp.bfloat16)


def _row(site: str, m: int, contender: str, figure: str, timing: Any, **figures: float) -> dict[str, Any]:
    row = {"site": site, "layer": "attention", "M": m, "contender": contender, "figure": figure}
    return row | figures | {"spread": round(timing.spread, 4)}
