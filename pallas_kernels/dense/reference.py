"""THE definition of the product x Wᵀ of BF16 or FP16 matrices, in plain XLA, and XLA's own quicker form.

    exact   out = out_dtype(f32(sum over k of f64(x[m, k]) f64(w[n, k])))
    fast    out = out_dtype(sum over k of x[m, k] w[n, k]),   FP32 sums in an order that XLA chooses

A product of two such numbers is exact in float64, and K float64 additions are off by K 2**-53 of the sum of
magnitudes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import round_output, round_to_float32, to_float64

_CONTRACT_LAST = (((1,), (1,)), ((), ()))
_jit = functools.partial(jax.jit, static_argnums=(2,), inline=True)


@_jit
def matmul_exact(x: jax.Array, w: jax.Array, out_dtype: Any) -> jax.Array:
    """x [M, K] times w [N, K] transposed: [M, N], in which no element depends on others, except for ties."""
    with jax.enable_x64(True):
        total = round_to_float32(lax.dot_general(to_float64(x), to_float64(w), _CONTRACT_LAST))
    return round_output(total, out_dtype)


@_jit
def matmul_fast(x: jax.Array, w: jax.Array, out_dtype: Any) -> jax.Array:
    """x [M, K] times w [N, K] transposed: [M, N]."""
    return round_output(lax.dot_general(x, w, _CONTRACT_LAST, preferred_element_type=jnp.float32), out_dtype)
