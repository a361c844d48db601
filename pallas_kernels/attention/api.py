"""Batch-invariant causal attention of packed segments, and of new tokens against a cache; BF16 or FP16.

    out = softmax(q k^T / sqrt(H)) v,    a token sees the keys 0 .. p of its own segment

A token's bits depend only on its query and on those keys.  Training, prefill and decode add in the same
order: ascending blocks of 128 keys, starting at the segment's first token (equations in `reference`).  A
segment of a packed row therefore has to begin at a multiple of 128, which `segment_blocks` checks.

    xla               the definition (`reference`): sums within a block in float64, rounded once to FP32
    mosaic_gpu        kernels for Hopper's tensor cores (`mosaic`), whose gradient (`mosaic_backward`) uses
                      no atomic additions, so every call gives the same bits
    mosaic_interpret  the same kernels on a CPU, with race detection, for tests
    auto              mosaic_gpu if it can run, else xla

The last bits of FP32 sums differ between xla and the kernels, so one policy has to use one implementation for
all calls.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention import reference
from pallas_kernels.formats import BLOCK, E4M3
from pallas_kernels.hopper import WGMMA_ROWS
from pallas_kernels.implementations import resolve, unknown_name

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "mosaic_interpret", "auto")
"""Implementations by name."""
DTYPES = (jnp.bfloat16, jnp.float16)
WIDTHS = (64, 128)
"""Widths of a head that the kernels support."""


def segment_blocks(segment_ids: Int32[Array, "B T"]) -> Int32[Array, "B blocks"]:
    """The first block of each block's segment, ceil(T / 128) of a row; the id 0 is padding.

    A valid block contains one segment, which begins at a multiple of 128 and has no gap, and after it only
    padding.  The result for any other block is the number of blocks: its tokens see nothing, and their
    attention is NaN.  Padding may see other padding and the segment before it.
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
    late = begins[:, :, 0] & (start != own * BLOCK)  # a segment continues after a gap
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
      k, v: in the dtype of q, N a multiple of K: N / K query heads share a key/value head.
      first_blocks: from `segment_blocks`; None: each row is one segment.
      implementation: one of `IMPLEMENTATIONS`.
    Returns:
      In the dtype of q, bit-identical to `cached_attention` (tests/kernels/test_attention.py).  It differs
      from float64 by the roundings of FP32 sums, of the weights and of the result.  None of this is
      guaranteed for the gradient.
    Raises:
      ValueError: invalid shapes, dtypes or names; one message has all of them.
      NotImplementedError: a kernel that was requested by name cannot run here; the message has the reason.
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
    scales: Float32[Array, " 2"] | None = None,
    *,
    implementation: str = "xla",
) -> Float[Array, "B t N H"]:
    """Attention of new tokens of each row against a cache that already contains them; not differentiable.

    Args:
      q: bfloat16 or float16.
      keys, values: in the dtype of q, or float8_e4m3fn codes; a row's tokens 0, 1, ..., then any finite
        values.
      positions: from 0 to S - 1; a token sees the keys up to its own position.
      scales: of codes, of keys and of values, powers of two with which code * scale is exact in the dtype of
        q; None if keys and values are no codes.
      implementation: one of `IMPLEMENTATIONS`.
    Returns:
      In the dtype of q, bit-identical to `causal_attention`.
    Raises:
      As `causal_attention`.
    """
    B, t = q.shape[0], q.shape[1] if q.ndim == 4 else 0
    shapes = (B, t, "N", "H"), (B, "K", "S", "H"), (B, "K", "S", "H")
    operands = {"q": q, "keys": keys, "values": values}
    problems = _operand_problems(operands, shapes, implementation, codes=scales is not None)
    if scales is not None and (scales.shape != (2,) or scales.dtype != jnp.float32):
        got = f"{scales.dtype}{list(scales.shape)}"
        problems.append(f"wrong scales: got scales {got}, expected float32 [2], of keys and of values")
    if positions.shape != (B, t) or positions.dtype != jnp.int32:
        got = f"{positions.dtype}{list(positions.shape)}"
        problems.append(f"wrong positions: got positions {got}, expected int32 [{B}, {t}]")
    name = _chosen("cached_attention", problems, q, keys.shape[1:2], implementation)
    if name == "xla":
        return reference.cached_attention(q, keys, values, positions, scales)
    # imported here, because not every platform has Pallas for GPUs
    from pallas_kernels.attention import mosaic

    return mosaic.cached_attention(q, keys, values, positions, name == "mosaic_interpret", scales)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _causal_attention(
    name: str, q: jax.Array, k: jax.Array, v: jax.Array, first_blocks: jax.Array
) -> jax.Array:
    return _forward(name, q, k, v, first_blocks)[0]


def _forward(name: str, q: jax.Array, k: jax.Array, v: jax.Array, first_blocks: jax.Array) -> Any:
    """The result, and the arrays that the backward needs."""
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
    """Why the kernels cannot run with `group` query heads for each key/value head of `width`, or None."""
    if jnp.dtype(dtype) not in DTYPES:
        return f"activations are {jnp.dtype(dtype).name}, expected bfloat16 or float16"
    if width not in WIDTHS:
        return f"head_dim is {width}, expected one of {WIDTHS}"
    if group > WGMMA_ROWS:
        return f"{group} query heads share a key/value head, expected at most {WGMMA_ROWS}"
    return None


def _operand_problems(
    operands: dict[str, jax.Array],
    shapes: tuple[tuple[Any, ...], ...],
    implementation: str,
    codes: bool = False,
) -> list[str]:
    """Problems of arrays that should have these shapes; equal letters mean equal sizes.

    codes: whether all but the first are E4M3 codes.
    """
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
    first, *others = kinds.values()
    expected = [first if not codes else jnp.dtype(E4M3).name] * len(others)
    if others != expected or first not in [jnp.dtype(d).name for d in DTYPES]:
        rule = f"and {jnp.dtype(E4M3).name} of keys and values" if codes else "the same of all"
        problems.append(f"wrong dtypes: got {kinds}, expected bfloat16 or float16, {rule}")
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
