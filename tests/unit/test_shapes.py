"""The check of axes in signatures (tests/shapes.py) is on, finds what it looks for, and lets a function's own errors pass."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Float8e4m3fn, Float32

from jetrl_jax.rl.losses import policy_loss
from jetrl_jax.rollout.embedded.sampling import sample
from pallas_kernels import ScaledArray, matmul, quantize, wgrad
from tests.shapes import checked

ROWS = jnp.ones((2, 256), jnp.float32)


def turned(x: Float[Array, "R C"]) -> Float[Array, "R C"]:
    return x.T


def halved(x: Float[Array, "R C"]) -> tuple[Float32[Array, "R C"], dict[str, Float[Array, ""]]]:
    return x.astype(jnp.bfloat16), {"sum": x.sum()}


def summed(x: Float[Array, "R C"]) -> tuple[Float32[Array, "R C"], dict[str, Float[Array, ""]]]:
    return x, {"sum": x.sum(0)}


def added(x: Float[Array, "R C"], y: Float[Array, "R C"] | None = None) -> Float[Array, "R C"]:
    return x if y is None else x + y


def quantized(x: Float[Array, "R C"]) -> Float8e4m3fn[ScaledArray, "C R"]:
    return quantize(x, (1, 128))


@pytest.mark.parametrize("function", [turned, halved, summed, quantized])
def test_a_signature_that_is_not_so_is_found(function):
    with pytest.raises(AssertionError, match=rf"{function.__name__}: return is not .*float32\[2, 256\]"):
        checked(function)(ROWS)


def test_axes_are_the_same_in_all_arguments():
    assert checked(added)(ROWS).shape == checked(added)(ROWS, np.asarray(ROWS)).shape == ROWS.shape
    with pytest.raises(AssertionError, match="added: y is not"):
        checked(added)(ROWS, ROWS[:1])


def test_the_packages_are_checked_when_a_call_returns():
    for function in (matmul, wgrad, quantize, ScaledArray.dequantize, policy_loss, sample):
        assert hasattr(function, "__wrapped__"), function
    with pytest.raises(ValueError, match="contracted sizes differ"):
        matmul(quantize(ROWS, (1, 128)), quantize(ROWS[:, :128], (1, 128)))
