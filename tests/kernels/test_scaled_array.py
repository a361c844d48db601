"""ScaledArray: its invariants, its error messages, exact transposition, dequantisation,
and life as a pytree.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import E4M3, ScaledArray, quantize
from pallas_kernels.scaled_array import BLOCK_SHAPES, grid_shape
from tests.oracles import fp8_oracle


def sample(shape: tuple[int, int], block_shape: tuple[int, int]) -> ScaledArray:
    """A quantised matrix of distinct values."""
    rng = np.random.default_rng(0)
    return quantize(
        jnp.asarray(rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1))), jnp.float32), block_shape
    )


@pytest.mark.parametrize("block_shape", BLOCK_SHAPES)
@pytest.mark.parametrize("shape", [(128, 256), (130, 300), (5, 7)])
def test_dequantize_and_transpose_match_oracle(shape: tuple[int, int], block_shape: tuple[int, int]) -> None:
    array = sample(shape, block_shape)
    exact = fp8_oracle.dequantize(
        np.asarray(array.qvalue).view(np.uint8), np.asarray(array.scale), block_shape
    )
    np.testing.assert_array_equal(np.asarray(array.dequantize()), exact.astype(np.float32))
    np.testing.assert_array_equal(
        np.asarray(jax.jit(ScaledArray.dequantize)(array)), exact.astype(np.float32)
    )
    assert array.dequantize(jnp.bfloat16).dtype == jnp.bfloat16
    transposed = array.transpose().check()
    assert transposed.shape == shape[::-1] and transposed.block_shape == block_shape[::-1]
    np.testing.assert_array_equal(np.asarray(transposed.dequantize()), exact.T.astype(np.float32))
    assert array.nbytes == shape[0] * shape[1] + 4 * array.scale.size


def test_grid_shape_counts_partial_blocks() -> None:
    assert grid_shape((1, 1), (128, 128)) == (1, 1)
    assert grid_shape((129, 128), (128, 128)) == (2, 1)
    assert grid_shape((129, 257), (1, 128)) == (129, 3)
    assert grid_shape((129, 257), (128, 1)) == (2, 257)


def test_scaled_array_is_a_pytree_of_anything() -> None:
    array = sample((130, 300), (128, 128))
    leaves, structure = jax.tree.flatten(array)
    assert len(leaves) == 2 and jax.tree.unflatten(structure, leaves).block_shape == (128, 128)
    shapes = jax.tree.map(jnp.shape, array)
    assert shapes.qvalue == (130, 300) and shapes.scale == (2, 3)
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), array)
    assert (names.qvalue, names.scale) == (".qvalue", ".scale")
    assert jax.tree.map(lambda _: None, array).qvalue is None
    abstract = jax.eval_shape(lambda: array)
    assert abstract.shape == (130, 300) and abstract.check() is abstract
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), array, array)
    rows = jax.lax.scan(lambda carry, one: (carry, one.check().dequantize()), 0, stacked)[1]
    np.testing.assert_array_equal(np.asarray(rows[1]), np.asarray(array.dequantize()))


def test_create_accepts_what_holds() -> None:
    array = sample((130, 300), (1, 128))
    again = ScaledArray.create(array.qvalue, array.scale, (1, 128))
    assert again.block_shape == (1, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qvalue": jnp.zeros((4, 256), jnp.bfloat16)}, r"got qvalue.dtype=bfloat16, expected float8_e4m3fn"),
        ({"scale": jnp.zeros((4, 2), jnp.bfloat16)}, r"got scale.dtype=bfloat16, expected float32"),
        (
            {"scale": jnp.zeros((4, 3), jnp.float32)},
            r"got scale.shape=\(4, 3\) for qvalue.shape=\(4, 256\), expected \(4, 2\)",
        ),
        (
            {"qvalue": jnp.zeros((2, 4, 256), E4M3)},
            r"got qvalue.shape=\(2, 4, 256\), expected two dimensions",
        ),
        ({"block_shape": (1, 64)}, r"got block_shape=\(1, 64\), expected one of"),
    ],
)
def test_create_raises_with_both_shapes(change: dict, message: str) -> None:
    good = {
        "qvalue": jnp.zeros((4, 256), E4M3),
        "scale": jnp.ones((4, 2), jnp.float32),
        "block_shape": (1, 128),
    }
    with pytest.raises(ValueError, match=message):
        ScaledArray.create(**(good | change))


def test_check_lists_every_problem_at_once() -> None:
    with pytest.raises(ValueError, match=r"wrong code type.*wrong scale type.*shapes disagree"):
        ScaledArray(jnp.zeros((4, 256)), jnp.zeros((4, 3), jnp.bfloat16), (1, 128)).check()
