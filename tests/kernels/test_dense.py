"""The batch-invariant product of BF16 and FP16 matrices: one body for every implementation, rows and columns
bit for bit.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense import dense_matmul
from tests.kernels.runnable import runnable
from tests.oracles import tolerances

EVERY = runnable("xla", "xla_fast", "mosaic_interpret", "mosaic_gpu")
INVARIANT = runnable("xla", "mosaic_interpret", "mosaic_gpu")
KERNELS = runnable("mosaic_interpret", "mosaic_gpu")
ROUNDOFF = {"float32": 0.0, "bfloat16": tolerances.U_BF16, "float16": tolerances.U_FP16}
SUBNORMAL_HALF_STEP = {"float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-25}


def operands(m: int, n: int, k: int, dtype: str = "bfloat16", seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Normal values of distinct rows and columns, x [M, K] and w [N, K]; rows of different size, within
    FP16's range.
    """
    rng = np.random.default_rng(seed)
    x, w = (
        rng.normal(size=(m, k)) * np.exp2(rng.integers(-4, 4, (m, 1))),
        rng.normal(size=(n, k)) * np.exp2(rng.integers(-4, 4, (n, 1))),
    )
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def product(x: jax.Array, w: jax.Array, implementation: str, out_dtype: Any = "float32") -> np.ndarray:
    """The product as float64."""
    return np.asarray(
        dense_matmul(x, w, out_dtype=jnp.dtype(out_dtype), implementation=implementation), np.float64
    )


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(
    ("sizes", "dtype", "out_dtype"),
    [
        ((136, 264, 192), "bfloat16", "float32"),
        ((1, 7, 13), "bfloat16", "bfloat16"),
        ((66, 48, 520), "float16", "float16"),
    ],
)
def test_product_matches_float64(
    sizes: tuple[int, int, int], dtype: str, out_dtype: str, implementation: str
) -> None:
    """Elementwise, for sizes that fit and sizes that nothing divides."""
    x, w = operands(*sizes, dtype)
    wide = np.asarray(x, np.float64), np.asarray(w, np.float64)
    exact, magnitude = wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T
    error = (tolerances.hopper_dot if implementation == "mosaic_gpu" else tolerances.fp32_dot)(
        sizes[2], magnitude
    )
    bound = tolerances.output_rounding(exact, error, ROUNDOFF[out_dtype]) + SUBNORMAL_HALF_STEP[out_dtype]
    out = product(x, w, implementation, out_dtype)
    assert out.shape == sizes[:2]
    assert np.all(np.abs(out - exact) <= bound), f"worst ratio {np.max(np.abs(out - exact) / bound)}"


@pytest.mark.parametrize("implementation", EVERY)
def test_output_is_the_float32_sum_rounded_once(implementation: str) -> None:
    """Whole numbers whose sums FP32 holds exactly: nothing may be off, and a sum between two BF16 numbers
    goes to the even one.
    """
    rng = np.random.default_rng(3)
    x, w = (jnp.asarray(rng.integers(-16, 17, shape), jnp.bfloat16) for shape in ((9, 128), (40, 128)))
    exact = (np.asarray(x, np.float32) @ np.asarray(w, np.float32).T).astype(jnp.bfloat16)
    np.testing.assert_array_equal(product(x, w, implementation, "bfloat16"), exact.astype(np.float64))


@pytest.mark.parametrize("implementation", INVARIANT)
def test_row_does_not_depend_on_the_rows_beside_it(implementation: str) -> None:
    """The first rows alone, and rows from the middle at another place in the tile: the same bits."""
    rows, more = 150, ()
    if implementation == "mosaic_gpu":
        rows, more = 8192, (slice(0, 8), slice(0, 64), slice(0, 130), slice(5000, 5256))
    x, w = operands(rows, 40, 192)
    whole = product(x, w, implementation)
    for part in (slice(0, 1), slice(69, 70), slice(100, rows), *more):
        np.testing.assert_array_equal(product(x[part], w, implementation), whole[part], err_msg=str(part))


@pytest.mark.parametrize("implementation", INVARIANT)
def test_column_does_not_depend_on_the_columns_beside_it(implementation: str) -> None:
    """Slices of a vocabulary, as devices that share a head hold them: the same bits."""
    x, w = operands(5, 300, 192)
    whole = product(x, w, implementation)
    for part in (slice(0, 24), slice(150, 300), slice(299, 300)):
        np.testing.assert_array_equal(product(x, w[part], implementation), whole[:, part], err_msg=str(part))


@pytest.mark.parametrize("implementation", runnable("mosaic_interpret"))
def test_the_interpreter_sums_in_one_order(implementation: str) -> None:
    """Whatever the CPU: from the first of 64 to the last, then these sums, each operation rounded to FP32."""
    x, w = operands(136, 40, 192)
    terms = np.asarray(x, np.float32)[:, None] * np.asarray(w, np.float32)  # exact
    parts = [functools.reduce(np.add, np.moveaxis(terms[..., at : at + 64], -1, 0)) for at in (0, 64, 128)]
    np.testing.assert_array_equal(product(x, w, implementation), functools.reduce(np.add, parts))


@pytest.mark.parametrize("implementation", KERNELS)
def test_a_program_with_several_tiles_writes_them_all(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cluster for six tiles: the producer runs ahead into the next one."""
    monkeypatch.setattr("pallas_kernels.dense.mosaic.H100_SMS", 2)
    x, w = (jnp.round(4 * part) for part in operands(136, 520, 64))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_array_equal(product(x, w, implementation), exact.astype(np.float32))


@pytest.mark.parametrize("implementation", EVERY)
def test_nan_and_infinity_reach_what_they_touch_and_nothing_else(implementation: str) -> None:
    x, w = operands(6, 20, 72)
    x = x.at[2, 5].set(jnp.nan).at[4, 70].set(jnp.inf)
    w = w.at[7, 3].set(-jnp.inf)
    with np.errstate(invalid="ignore"):
        expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    out = product(x, w, implementation)
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(out), kind(expected))


def test_wrong_operands_are_refused_with_everything_that_is_wrong() -> None:
    x = jnp.zeros((4, 8), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=re.escape("dense_matmul: shapes do not fit: got x.shape=(4, 8) and w.shape=(4, 9)")
    ):
        dense_matmul(x, jnp.zeros((4, 9), jnp.bfloat16))
    with pytest.raises(
        ValueError,
        match=r"wrong dtypes: got x.dtype=bfloat16 and w.dtype=float16.*; wrong dtype: got out_dtype=.*int8",
    ):
        dense_matmul(x, jnp.zeros((4, 8), jnp.float16), out_dtype=jnp.int8)
    with pytest.raises(ValueError, match="unknown name: got implementation='triton'"):
        dense_matmul(x, x, implementation="triton")
    with pytest.raises(
        NotImplementedError,
        match="dense_matmul: cannot run: got implementation='mosaic_gpu', but an operand is empty",
    ):
        dense_matmul(x[:0], x, implementation="mosaic_gpu")
    assert dense_matmul(x[:0], x).shape == (0, 4)
