"""SiLU in FP32 against extended precision, for every BF16 gate;
the rounding to BF16 that no compiler drops.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.quantize.producers import SILU_NEAR_MIDPOINTS, round_to_bfloat16, silu, silu_multiply

GATES = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
FINITE = GATES[np.isfinite(GATES)]
SMALLEST = 2.0**-119  # results below may become zero


def true_silu(gate: np.ndarray) -> np.ndarray:
    """gate / (1 + exp(-gate)) in extended precision."""
    wide = gate.astype(np.longdouble)
    with np.errstate(over="ignore"):
        return wide / (1 + np.exp(-wide))


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to FP32, then to BF16, as float32: the definition's two roundings."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def error_bound(gate: np.ndarray) -> np.ndarray:
    """Relative error of SiLU in FP32: `exp` and the division within two units in the last place, 2**-22 each,
    sum and product.

    The error of exp(-|g|) reaches the result in part: e / (1 + e) for positive gates, 1 / (1 + e) for
    negative ones.
    """
    decay = np.exp(-np.abs(gate.astype(np.float64)))
    share = np.where(gate >= 0, decay, 1.0) / (1 + decay)
    return 2.0**-22 * share + 2.0**-22 + 2 * 2.0**-24


def distance_to_midpoint(value: np.ndarray) -> np.ndarray:
    """Relative distance of extended precision values to the nearest midpoint of two BF16 numbers."""
    significand = np.ldexp(np.frexp(value)[0], 9)  # 9 bits: BF16 numbers are even, midpoints odd
    return np.abs(significand - (np.round((significand - 1) / 2) * 2 + 1)) / np.abs(significand)


def test_every_gate_but_those_listed_is_further_from_a_midpoint_than_fp32_errs() -> None:
    gates = FINITE[np.abs(true_silu(FINITE)) > SMALLEST]
    near = gates[distance_to_midpoint(true_silu(gates)) <= error_bound(gates)]
    assert sorted(near.tolist()) == sorted(SILU_NEAR_MIDPOINTS)


def test_silu_of_every_gate_matches_extended_precision() -> None:
    result, expected = np.asarray(jax.jit(silu)(FINITE)), to_bf16(true_silu(FINITE))
    large = np.abs(expected) > SMALLEST
    np.testing.assert_array_equal(result[large], expected[large])
    assert np.all((result[~large] == 0) | (result[~large] == expected[~large]))
    np.testing.assert_array_equal(
        np.asarray(silu(jnp.float32([np.inf, np.nan, -np.inf]))), [np.inf, np.nan, np.nan]
    )


def test_silu_of_listed_gates_needs_the_list() -> None:
    """Without the list two correct FP32 evaluations could differ: the true value is closer to the midpoint
    than their errors.
    """
    for gate, listed in SILU_NEAR_MIDPOINTS.items():
        value = true_silu(np.float32([gate]))
        assert listed == to_bf16(value)[0]
        neighbours = {to_bf16(value * (1 + sign * error_bound(np.float32([gate]))))[0] for sign in (-1, 1)}
        assert len(neighbours) == 2


def test_silu_multiply_rounds_twice() -> None:
    rng = np.random.default_rng(0)
    gate, up = (rng.normal(size=1 << 16).astype(ml_dtypes.bfloat16).astype(np.float32) for _ in range(2))
    expected = to_bf16(to_bf16(true_silu(gate)).astype(np.float64) * up)
    np.testing.assert_array_equal(np.asarray(jax.jit(silu_multiply)(gate, up)), expected)


def test_round_to_bfloat16_survives_fusion() -> None:
    x = np.random.default_rng(1).normal(size=4096).astype(np.float32)
    fused = jax.jit(lambda x: round_to_bfloat16(x * jnp.float32(1.1)) * jnp.float32(3))(x)
    np.testing.assert_array_equal(np.asarray(fused), to_bf16(x * np.float32(1.1)) * np.float32(3))
