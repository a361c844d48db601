"""Batch-invariant causal attention of packed segments, and of new tokens against a cache; BF16 or FP16.

    out = softmax(q k^T / sqrt(H)) v,    a token sees the keys 0 .. p of its own segment

A token's bits depend on its query and on those keys, in one order for training, prefill and decode: blocks
of 128 keys from the segment's first token on, ascending (`reference` has the equations). A segment of a
packed row therefore begins at a multiple of 128, as `segment_blocks` reads off its ids.

    xla               the definition (`reference`): sums within a block in float64, rounded once to FP32
    mosaic_gpu        one body for every grid (`mosaic`), on Hopper's tensor cores; in the gradient
                      (`mosaic_backward`) no atomic additions, so it has the same bits on every call
    mosaic_interpret  the same kernels on a CPU, with race detection, for tests
    auto              mosaic_gpu where it can run, else xla

The two forms differ in the last bits of FP32 sums: an implementation is chosen once for a policy, not for
each call.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.attention import reference
from pallas_kernels.formats import BLOCK
from pallas_kernels.hopper import WGMMA_ROWS
from pallas_kernels.implementations import resolve, unknown_name

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "mosaic_interpret", "auto")
"""Implementations by name."""
DTYPES = (jnp.bfloat16, jnp.float16)
WIDTHS = (64, 128)
"""Of heads, in the kernels."""


def segment_blocks(segment_ids: Int32[Array, "B T"]) -> Int32[Array, "B blocks"]:
    """The first block of each block's segment, ceil(T / 128) of a row; the id 0 is padding.

    A block whose tokens are not of one segment that begins at a multiple of 128 and has no gap, with
    nothing but padding behind it, gets the number of blocks: its tokens see nothing, and their attention is
    NaN. Tokens of padding may see each other and, behind a segment, that segment.
    """
    B, T = segment_ids.shape
    blocks = -(-T // BLOCK)
    ids = jnp.pad(segment_ids, ((0, 0), (0, blocks * BLOCK - T)))
    before = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    begins = ((ids != before) & (ids > 0)).reshape(B, blocks, BLOCK)
    own, head = jnp.arange(blocks, dtype=jnp.int32)[None], ids[:, ::BLOCK]
    start = jnp.argmax(ids[:, None] == head[:, :, None], axis=-1).astype(
        jnp.int32
    )  # of the segment, in tokens
    late = begins[:, :, 0] & (start != own * BLOCK)  # a segment goes on behind a gap
    wrong = begins[:, :, 1:].any(-1) | ((head > 0) & (late | (start % BLOCK != 0)))
    return jnp.where(wrong, jnp.int32(blocks), jnp.where(head > 0, start // BLOCK, own))


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    first_blocks: Int32[Array, "B blocks"] | None = None,
    *,
    implementation: str = "xla",
) -> Float[Array, "B T N H"]:
    """Attention of whole rows of tokens; differentiable in q, k and v.

    Args:
      q: bfloat16 or float16.
      k, v: of its dtype, N a multiple of K: N / K query heads share a key/value head.
      first_blocks: `segment_blocks`; None: a row is one segment.
      implementation: one of `IMPLEMENTATIONS`.
    Returns:
      In q's dtype, against float64 within the roundings of FP32 sums, of the weights and of
      the result; bit for bit that of `cached_attention` (tests/kernels/test_attention.py). The gradient is
      no part of that promise.
    Raises:
      ValueError: shapes, dtypes or names do not fit, all of them in one message.
      NotImplementedError: a kernel asked for by name cannot run here; the message says why.
    """
    B, T = q.shape[0], q.shape[1] if q.ndim == 4 else 0
    if first_blocks is None:
        first_blocks = jnp.zeros((B, -(-T // BLOCK)), jnp.int32)
    shapes = (B, T, "N", "H"), (B, T, "K", "H"), (B, T, "K", "H")
    problems = _operand_problems({"q": q, "k": k, "v": v}, shapes, implementation)
    if first_blocks.shape != (B, -(-T // BLOCK)) or first_blocks.dtype != jnp.int32:
        got = f"{first_blocks.dtype}{list(first_blocks.shape)}"
        problems.append(f"wrong blocks: got first_blocks {got}, expected int32 [{B}, {-(-T // BLOCK)}]")
    name = _chosen("causal_attention", problems, q, k.shape[2:], implementation)
    return _causal_attention(name, q, k, v, first_blocks)


def cached_attention(
    q: Float[Array, "B t N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    positions: Int32[Array, "B t"],
    *,
    implementation: str = "xla",
) -> Float[Array, "B t N H"]:
    """Attention of new tokens of each row against a cache that holds them; no gradient.

    Args:
      q: bfloat16 or float16.
      keys, values: of its dtype; a row's tokens from 0 on, anything finite behind them.
      positions: from 0 to below S; a token sees the keys at or below its own.
      implementation: one of `IMPLEMENTATIONS`.
    Returns:
      In q's dtype, bit for bit that of `causal_attention`.
    Raises:
      As `causal_attention`.
    """
    B, t = q.shape[0], q.shape[1] if q.ndim == 4 else 0
    shapes = (B, t, "N", "H"), (B, "K", "S", "H"), (B, "K", "S", "H")
    problems = _operand_problems({"q": q, "keys": keys, "values": values}, shapes, implementation)
    if positions.shape != (B, t) or positions.dtype != jnp.int32:
        got = f"{positions.dtype}{list(positions.shape)}"
        problems.append(f"wrong positions: got positions {got}, expected int32 [{B}, {t}]")
    name = _chosen("cached_attention", problems, q, keys.shape[1:2], implementation)
    if name == "xla":
        return reference.cached_attention(q, keys, values, positions)
    # here, because Pallas for GPUs is not there on every platform
    from pallas_kernels.attention import mosaic

    return mosaic.cached_attention(q, keys, values, positions, name == "mosaic_interpret")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _causal_attention(
    name: str, q: jax.Array, k: jax.Array, v: jax.Array, first_blocks: jax.Array
) -> jax.Array:
    return _forward(name, q, k, v, first_blocks)[0]


def _forward(name: str, q: jax.Array, k: jax.Array, v: jax.Array, first_blocks: jax.Array) -> Any:
    """The result, and what the backward reads."""
    if name == "xla":
        return reference.causal_attention(q, k, v, first_blocks), (q, k, v, first_blocks)
    from pallas_kernels.attention import mosaic

    out, log_sums = mosaic.causal_attention(q, k, v, first_blocks, name == "mosaic_interpret")
    return out, (q, k, v, first_blocks, out, log_sums)


def _backward(name: str, saved: Any, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
    if name == "xla":
        return (*reference.causal_gradients(*saved, cotangent), None)
    from pallas_kernels.attention import mosaic_backward

    return (*mosaic_backward.causal_gradients(*saved, cotangent, name == "mosaic_interpret"), None)


_causal_attention.defvjp(_forward, _backward)


def operand_problem(dtype: Any, width: int, group: int) -> str | None:
    """Why the kernels cannot take `group` query heads of `width` values to a key/value head, or None."""
    if jnp.dtype(dtype) not in DTYPES:
        return f"activations are {jnp.dtype(dtype).name}, expected bfloat16 or float16"
    if width not in WIDTHS:
        return f"head_dim is {width}, expected one of {WIDTHS}"
    if group > WGMMA_ROWS:
        return f"{group} query heads share a key/value head, expected at most {WGMMA_ROWS}"
    return None


def _operand_problems(
    operands: dict[str, jax.Array], shapes: tuple[tuple[Any, ...], ...], implementation: str
) -> list[str]:
    """Of arrays that should have these shapes, where equal letters are equal sizes."""
    problems: list[str] = []
    sizes: dict[Any, int] = {}
    for (name, array), shape in zip(operands.items(), shapes, strict=True):
        fits = len(array.shape) == len(shape)
        for letter, size in zip(shape, array.shape, strict=False):
            fits &= sizes.setdefault(letter, size) == size
        if not fits:
            known = ", ".join(str(sizes.get(letter, letter)) for letter in shape)
            problems.append(f"shapes do not fit: got {name}.shape={array.shape}, expected [{known}]")
    if not problems and sizes["N"] % sizes["K"]:
        problems.append(f"heads do not fit: got N={sizes['N']}, expected a multiple of K={sizes['K']}")
    kinds = {name: array.dtype.name for name, array in operands.items()}
    if len(set(kinds.values())) > 1 or next(iter(kinds.values())) not in [jnp.dtype(d).name for d in DTYPES]:
        problems.append(f"wrong dtypes: got {kinds}, expected bfloat16 or float16, the same of all")
    if implementation not in IMPLEMENTATIONS:
        problems.append(unknown_name(implementation, IMPLEMENTATIONS))
    return problems


def _chosen(
    function: str, problems: list[str], q: jax.Array, rest: tuple[int, ...], implementation: str
) -> str:
    """The implementation that runs."""
    if problems:
        raise ValueError(f"{function}: " + "; ".join(problems) + ".")
    problem = (
        "an operand is empty" if 0 in q.shape else operand_problem(q.dtype, q.shape[3], q.shape[2] // rest[0])
    )
    return resolve(function, implementation, IMPLEMENTATIONS, problem).name
