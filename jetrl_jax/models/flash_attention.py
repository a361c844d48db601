"""Attention by cuDNN's flash kernels: forward and backward without the scores [B, N, T, S] in memory.

    out = softmax(q k^T / sqrt(H) + mask) v,    q, k, v in BF16 or FP16

Scores, maxima and sums are FP32.  The weights, not yet divided by their sum, are rounded to the operands'
dtype before the product with the values, since tensor cores take no FP32 operands.  The result is rounded
once, as in `attention.attend`.  cuDNN is only called through `jax.nn.dot_product_attention`.  Masks:

    causal       prefill, one prompt in each row: no mask; nothing above the diagonal is computed
    packed rows  causal, and a mask [B, 1, T, T] in the operands' dtype, shared by all heads, since JAX's
                 public function takes no segment ids.  cuDNN's packed layout, in a private function of JAX,
                 would store the sums of the softmax once for each segment that a row might have,
                 [B * segments, N, T] in FP32 for every layer
    a cache      decode: the number of keys of each row.  The query heads of a key/value head become the
                 tokens of a query with one head, so that keys and values are read once and in the cache's
                 own layout

cuDNN guarantees no order of reductions, forward or backward, so a run with `numerics.exact` does not use it.
Axes as in `jetrl_jax.models.ops`.  Tests: tests/parity/test_flash_attention.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.errors import UserError
from jetrl_jax.precision.numerics import Numerics
from pallas_kernels.attention import operand_problem
from pallas_kernels.implementations import Choice, cannot_run, kernel_jax_problem

KERNELS = ("mosaic_gpu", "mosaic_interpret")  # implementations of `pallas_kernels.attention`
PLANNED = "planned"  # cuDNN's operands and results without the call, for `jetrl_jax.planning`; cannot run
HEAD_UNIT, LARGEST_HEAD = 8, 256
PROBE = 128  # tokens of the calls that are compiled to find out whether cuDNN supports them
FIRST_JAX = (0, 11, 2)  # 0.10.2 also computes and writes the mask's gradient, which is not used


def attention_implementation(
    numerics: Numerics, head_dim: int, group: int = 1, *, elsewhere: bool = False
) -> Choice:
    """The implementation of attention in training, prefill and decode, with the reason.

    "auto" means the Pallas kernels (`pallas_kernels.attention`) for an exact run and cuDNN for any other, if
    they can run, else "xla" (`jetrl_jax.models.attention`).

    Args:
      numerics: its `attention` is the name of an implementation, or "auto".
      head_dim: H.
      group: number of query heads that share a key/value head.
      elsewhere: choose for a GPU that this machine does not have, with this version of JAX; then nothing can
        be tried out.

    Raises:
      UserError: an implementation was requested by name and cannot run.
    """
    asked = numerics.attention
    name = asked if asked != "auto" else "mosaic_gpu" if numerics.exact else "cudnn"
    problem = None
    if name == "cudnn":
        problem = _operand_problem(numerics, head_dim)
        problem = problem or (_version_problem() if elsewhere else _device_problem(numerics.dtype, head_dim))
    elif name in KERNELS:
        problem = operand_problem(numerics.dtype, head_dim, group) or _cache_problem(numerics)
        problem = problem or (kernel_jax_problem() if elsewhere else cannot_run(name))
    if asked != "auto":
        if problem is None:
            return Choice(name, "asked for by name")
        raise UserError(
            f"numerics.attention: cannot run: got {name!r}, but {problem}. 'auto' takes what can run, "
            "'xla' runs everywhere."
        )
    if problem is None:
        return Choice(
            name, f"auto: {'a GPU that is not here' if elsewhere else 'a GPU'} and operands that it takes"
        )
    return Choice("xla", f"auto: {name} cannot run: {problem}")


def extension_implementation(attention: Choice) -> Choice:
    """The implementation for several new tokens of each row against a cache, given that of the rest."""
    if attention.name == "xla" or attention.name in KERNELS:
        return attention
    return Choice("xla", "cuDNN's call has one number of visible keys for all tokens of a row")


def _cache_problem(numerics: Numerics) -> str | None:
    if numerics.stored_dtype in (None, numerics.compute_dtype):
        return None
    return f"keys and values are stored in {numerics.stored_dtype}, expected {numerics.compute_dtype}"


def _operand_problem(numerics: Numerics, head_dim: int) -> str | None:
    if numerics.exact:
        return "numerics.exact is true, and cuDNN's sums depend on shapes"
    if numerics.compute_dtype == "float32":
        return "activations are float32, expected bfloat16 or float16"
    if head_dim % HEAD_UNIT or head_dim > LARGEST_HEAD:
        return f"head_dim is {head_dim}, expected a multiple of {HEAD_UNIT} up to {LARGEST_HEAD}"
    return None


def _device_problem(dtype: Any, head_dim: int) -> str | None:
    platform = jax.default_backend()
    if platform not in ("gpu", "cuda"):
        return f"the platform is {platform!r}, expected 'gpu'"
    return _version_problem() or _refusal(jnp.dtype(dtype).name, head_dim)


def _version_problem() -> str | None:
    if jax.__version_info__ < FIRST_JAX:
        return f"JAX is {jax.__version__}, expected {'.'.join(map(str, FIRST_JAX))} or newer"
    return None


@functools.cache
def _refusal(dtype: str, head_dim: int) -> str | None:
    """Why the calls do not compile on this GPU, such as cuDNN's version or the head's width; else None."""
    tokens, cache = (
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, PROBE, 2, head_dim), (1, 1, PROBE, head_dim))
    )

    def all_forms(x: jax.Array, cache: jax.Array) -> Any:
        mask = jnp.tril(jnp.ones((1, PROBE, PROBE), bool))

        def total(x: jax.Array, mask: jax.Array | None) -> jax.Array:
            return flash_attention(x, x, x, mask).astype(jnp.float32).sum()

        decoded = flash_cached_attention(x[:, 0], cache, cache, jnp.zeros(1, jnp.int32))
        return jax.grad(total)(x, mask), total(x, None), decoded

    try:
        jax.jit(all_forms).lower(tokens, cache).compile()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return f"its calls do not compile: {error}"
    return None


def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, *, planned: bool = False
) -> jax.Array:
    """Causal attention; differentiable in q, k and v.

    Args:
      q: [B, T, N, H]; k, v: [B, T, K, H], all BF16 or FP16.
      mask: bool [B, T, T], true where a key is visible: somewhere in each row, nowhere above the diagonal.
        None: everything up to the diagonal.  cuDNN adds -2^41 to hidden scores, so a row without a visible
        key would consist of differences of such numbers.
      planned: see `PLANNED`.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    length = q.shape[1]
    if mask is not None:
        mask = mask[:, None]
    # JAX has no backward for an odd length: a token is appended that sees all others and that none sees
    if length % 2:
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
        mask = mask if mask is None else jnp.pad(mask, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=True)
    if planned:
        return _planned(q, k, v, mask)[:, :length]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")[
        :, :length
    ]


def flash_cached_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, *, planned: bool = False
) -> jax.Array:
    """Attention of one token per row against a cache; not differentiable.

    Args:
      q: [B, N, H]; k, v: [B, K, S, H], all of one dtype, BF16 or FP16.
      positions: int32 [B]; keys up to this position are visible.
      planned: see `PLANNED`.

    Returns:
      [B, N, H] in q's dtype.
    """
    B, N, H = q.shape
    K, S = k.shape[1:3]
    queries = q.reshape(B * K, N // K, 1, H)
    keys, values = (x.reshape(B * K, S, 1, H) for x in (k, v))
    if planned:
        return _planned(queries, keys, values, None).reshape(B, N, H)
    lengths = jnp.repeat(positions + 1, K, total_repeat_length=B * K)
    out = jax.nn.dot_product_attention(
        queries, keys, values, key_value_seq_lengths=lengths, implementation="cudnn"
    )
    return out.reshape(B, N, H)


@jax.custom_vjp
def _planned(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    return _planned_forward(q, k, v, mask)[0]


def _planned_forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> Any:
    bias = () if mask is None else (mask.astype(q.dtype),)  # cuDNN's bias has other values but the same size
    B, T, N, _ = q.shape
    results = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    out, sums = jax.ffi.ffi_call(PLANNED, results)(q, k, v, *bias)
    return out, (q, k, v, bias, out, sums)


def _planned_backward(saved: Any, cotangent: jax.Array) -> Any:
    q, k, v, bias, out, sums = saved
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    return (*jax.ffi.ffi_call(PLANNED, results)(q, k, v, *bias, out, sums, cotangent), None)


_planned.defvjp(_planned_forward, _planned_backward)
