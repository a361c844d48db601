"""The FP8 linear layer against the numpy oracle: forward bits, DGrad and WGrad on their own operands,
transformations.

The forward is bit-exact.  The backward sums FP32 products in an order of the machine's choosing, so it is
held elementwise to the error of such a sum (tests/oracles/tolerances.py), which is four orders of magnitude
below what a wrong operand gives.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetrl_jax.errors import UserError
from jetrl_jax.models.linear import activation, linear, product_implementation
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import jit
from jetrl_jax.precision.trainable_weight import TrainableFp8Weight
from pallas_kernels import ScaledArray, quantize
from pallas_kernels.implementations import gpu_problem
from tests.kernels.runnable import runnable
from tests.oracles import fp8_oracle, tolerances
from tests.parity.small_policy import resolved

# M, K, N: one block, partial edges, two blocks of everything
SIZES = [(5, 64, 43), (130, 192, 43), (200, 300, 200)]
OPERANDS = ("requantize", "dual", "block")
Operand = tuple[np.ndarray, np.ndarray, tuple[int, int]]  # codes, scales, block shape


def bf16(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)


def matrix(shape: tuple[int, int], seed: int) -> np.ndarray:
    """BF16 rows and columns of different size, an outlier row and a row of zeros."""
    rng = np.random.default_rng(seed)
    x = (
        rng.normal(size=shape)
        * np.exp2(rng.integers(-4, 4, (shape[0], 1)))
        * np.exp2(rng.integers(-2, 2, (1, shape[1])))
    )
    x[1] *= 300
    x[2] = 0
    return bf16(x)


def layer(x: jax.Array, weight: Any, numerics: Numerics, bias: jax.Array | None = None) -> jax.Array:
    return linear(activation(x, (weight,), numerics), weight, bias, numerics)


class Case:
    """Operands of one layer, and the oracle's results for them."""

    def __init__(self, sizes: tuple[int, int, int], numerics: Numerics) -> None:
        M, K, N = sizes
        self.numerics = resolved(numerics)
        self.x = matrix((M, K), 1)
        self.dy = matrix((M, N), 3)
        # more bits than BF16
        self.master = (matrix((N, K), 2).astype(np.float32) * np.float32(1 + 2**-12)).astype(np.float32)
        self.w = self.quantized(bf16(self.master), (128, 128))
        codes = jnp.asarray(self.w[0].view(ml_dtypes.float8_e4m3fn))
        self.codes = ScaledArray.create(codes, jnp.asarray(self.w[1]), (128, 128))

    def quantized(self, x: np.ndarray, block: tuple[int, int]) -> Operand:
        return (*fp8_oracle.quantize(x, block, self.numerics.scale_format), block)

    def trainable(self, fp8_backward: bool = True) -> TrainableFp8Weight:
        return TrainableFp8Weight(jnp.asarray(self.master), self.codes, fp8_backward)

    def forward(self) -> np.ndarray:
        codes, scales, _ = self.quantized(self.x, (1, 128))
        accumulator = fp8_oracle.matmul(
            codes, scales, 1, self.w[0], self.w[1], 128, self.numerics.promotion_order
        )
        return accumulator.astype(self.numerics.dtype)

    def wgrad_operand(self) -> Operand:
        """The second operand of WGrad, by name."""
        name = self.numerics.wgrad_operand
        if name == "requantize":
            codes, scales, _ = self.quantized(self.x, (1, 128))
            return self.quantized(fp8_oracle.dequantize(codes, scales, (1, 128)).astype(np.float32), (128, 1))
        return self.quantized(self.x, (128, 1) if name == "dual" else (128, 128))

    def run(
        self, weight: Any, dy: np.ndarray | None = None, transform: Any = jit
    ) -> tuple[jax.Array, jax.Array, Any]:
        """(y, dx, cotangent of the weight)."""

        def both(x: jax.Array, weight: Any, dy: jax.Array) -> Any:
            y, pullback = jax.vjp(lambda x, w: layer(x, w, self.numerics), x, weight)
            return y, *pullback(dy)

        return transform(both)(jnp.asarray(self.x), weight, jnp.asarray(self.dy if dy is None else dy))


def values(operand: Operand) -> np.ndarray:
    return fp8_oracle.dequantize(*operand)


def check_gemm(got: jax.Array, a: np.ndarray, b: np.ndarray, u: float) -> None:
    """got against a [M, K] times b [N, K] transposed in float64: elementwise within an FP32 sum and one
    rounding of u.
    """
    blocks = -(-a.shape[1] // 128)
    value = a @ b.T
    # A whole FP32 sum over K is at most 128 roundings a block more than the blocked one.
    bound = blocks * tolerances.fp32_dot_gemm(blocks, np.abs(a) @ np.abs(b).T)
    error = np.abs(np.asarray(got).astype(np.float64) - value)
    limit = tolerances.output_rounding(value, bound, u)
    assert np.all(error <= limit), f"worst ratio {np.max(error / np.maximum(limit, 1e-300))}"


FORWARDS: list[Any] = [(sizes, {}) for sizes in SIZES] + [(SIZES[2], {"scale_format": "power_of_two"})]
# The order of the scale products shows in FP32; the rounding to BF16 hides it from all but a few outputs.
FORWARDS += [
    (SIZES[2], {"promotion_order": order, "compute_dtype": "float32"}) for order in ("deepgemm", "triton")
]


@pytest.mark.parametrize(("sizes", "options"), FORWARDS, ids=str)
def test_forward_has_the_oracles_bits(sizes: tuple[int, int, int], options: dict[str, str]) -> None:
    case = Case(sizes, Numerics(**options))
    weights = [case.codes, case.trainable(True), case.trainable(False)]
    for transform in (jit, lambda f: f) if sizes == SIZES[0] else (jit,):
        for y in transform(lambda x, weights: [layer(x, w, case.numerics) for w in weights])(
            jnp.asarray(case.x), weights
        ):
            assert y.dtype == case.numerics.dtype
            assert np.asarray(y).tobytes() == case.forward().tobytes()


@pytest.mark.parametrize("kernels", runnable("xla_fast", "mosaic_interpret"))
def test_forward_without_exact_is_within_the_bound_of_an_fp32_sum(kernels: str) -> None:
    case = Case(SIZES[2], Numerics(exact=False, kernels=kernels))
    y = jit(lambda x, w: layer(x, w, case.numerics))(jnp.asarray(case.x), case.codes)
    check_gemm(y, values(case.quantized(case.x, (1, 128))), values(case.w), tolerances.U_BF16)


@pytest.mark.parametrize(
    ("sizes", "operand"), [(SIZES[0], "requantize"), *((SIZES[2], name) for name in OPERANDS)], ids=str
)
@pytest.mark.parametrize("kernels", runnable("auto", "mosaic_interpret"))
def test_fp8_backward_matches_the_oracle_on_its_operands(
    sizes: tuple[int, int, int], operand: str, kernels: str
) -> None:
    case = Case(sizes, Numerics(wgrad_operand=operand, kernels=kernels))
    _, dx, dw = case.run(case.trainable())
    assert dx.dtype == jnp.bfloat16 and dw.master.dtype == jnp.float32
    check_gemm(dx, values(case.quantized(case.dy, (1, 128))), values(case.w).T, tolerances.U_BF16)
    check_gemm(dw.master, values(case.quantized(case.dy, (128, 1))).T, values(case.wgrad_operand()).T, 0.0)


def test_values_that_several_products_read_are_quantised_once() -> None:
    """Two layers of one input, forward and backward: x in rows and again along tokens, and dy both ways."""
    case = Case(SIZES[2], Numerics(kernels="xla"))

    def run(x: jax.Array, weights: Any, dy: jax.Array) -> Any:
        def layers(x: jax.Array, weights: Any) -> jax.Array:
            shared = activation(x, weights, case.numerics)
            return sum(linear(shared, weight, None, case.numerics) for weight in weights)

        y, pullback = jax.vjp(layers, x, weights)
        return y, pullback(dy)

    arguments = jnp.asarray(case.x), (case.trainable(), case.trainable()), jnp.asarray(case.dy)
    assert jit(run).lower(*arguments).compile().as_text().count(" clamp(") == 4


def test_products_run_on_what_was_asked_for_or_say_why_not() -> None:
    found = [
        product_implementation(Numerics(exact=exact), forward=forward).name
        for exact in (True, False)
        for forward in (True, False)
    ]
    on_gpu = gpu_problem() is None
    assert found == (["mosaic_gpu"] * 4 if on_gpu else ["xla", "xla_fast", "xla_fast", "xla_fast"])
    assert product_implementation(Numerics(kernels="xla"), forward=False).name == "xla"
    if not on_gpu:
        with pytest.raises(
            UserError,
            match=r"numerics\.kernels: cannot run: got implementation='mosaic_gpu', but the platform is "
            r"'cpu'",
        ):
            product_implementation(Numerics(kernels="mosaic_gpu"), forward=True)


def test_wgrad_operands_differ() -> None:
    """The three names mean three things, and the paper's costs the most:
    two roundings of X in place of one.
    """
    errors = {}
    for name in OPERANDS:
        case = Case(SIZES[2], Numerics(wgrad_operand=name))
        rng = np.random.default_rng(0)
        case.x, case.dy = (bf16(rng.normal(size=x.shape)) for x in (case.x, case.dy))
        exact = case.dy.astype(np.float64).T @ case.x.astype(np.float64)
        errors[name] = np.linalg.norm(
            np.asarray(case.run(case.trainable())[2].master) - exact
        ) / np.linalg.norm(exact)
    assert errors["requantize"] > 1.1 * max(errors["dual"], errors["block"]), errors
    assert len({round(error, 6) for error in errors.values()}) == 3, errors


def test_bf16_backward_multiplies_the_dequantised_operands() -> None:
    case = Case(SIZES[2], Numerics(wgrad_operand="dual"))  # which a BF16 backward does not read
    _, dx, dw = case.run(case.trainable(fp8_backward=False))
    assert dx.dtype == jnp.bfloat16 and dw.master.dtype == jnp.float32
    x, w = (
        bf16(values(operand)).astype(np.float64) for operand in (case.quantized(case.x, (1, 128)), case.w)
    )
    dy = case.dy.astype(np.float64)
    check_gemm(dx, dy, w.T, tolerances.U_BF16)
    check_gemm(dw.master, dy.T, x.T, 0.0)


def test_gradient_reaches_the_master_and_not_the_codes() -> None:
    case = Case(SIZES[1], Numerics())
    for fp8_backward in (True, False):
        _, _, dw = case.run(case.trainable(fp8_backward))
        assert np.any(np.asarray(dw.master) != 0)
        assert not np.any(np.asarray(dw.quantized.scale)) and not np.any(
            np.asarray(dw.quantized.qvalue).astype(np.float32)
        )


def test_master_does_not_enter_the_forward() -> None:
    """The codes are what is multiplied: another master changes no bit of y, dx or dw."""
    case = Case(SIZES[1], Numerics())
    other = dataclasses.replace(case.trainable(), master=jnp.zeros_like(case.master))
    chex.assert_trees_all_equal(case.run(case.trainable()), case.run(other))


@pytest.mark.parametrize("kind", ["codes", "trainable"])
def test_bias_is_added_after_the_products_rounding_in_fp8(kind: str) -> None:
    case = Case(SIZES[1], Numerics())
    weight = {"codes": case.codes, "trainable": case.trainable()}[kind]
    bias = np.random.default_rng(7).normal(size=SIZES[1][2]).astype(np.float32) * 3
    expected = bf16(case.forward().astype(np.float32) + bf16(bias).astype(np.float32))
    got = jit(lambda w, b: layer(jnp.asarray(case.x), w, case.numerics, b))(weight, jnp.asarray(bias))
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), expected.view(np.uint16))


def test_bias_joins_the_sums_before_the_rounding_in_bf16() -> None:
    """Against float64, within the error of FP32 sums and one rounding; two roundings leave that bound in many
    places.
    """
    case = Case(SIZES[1], Numerics())
    bias = np.random.default_rng(7).normal(size=SIZES[1][2]).astype(np.float32) * 3
    got = jit(lambda w, b: layer(jnp.asarray(case.x), w, case.numerics, b))(
        jnp.asarray(case.master), jnp.asarray(bias)
    )
    x, weight, rounded_bias = (np.float64(bf16(part)) for part in (case.x, case.master, bias))
    product = x @ weight.T
    exact = product + rounded_bias
    sums = tolerances.gamma(SIZES[1][1] + 1) * (np.abs(x) @ np.abs(weight).T + np.abs(rounded_bias))
    half_ulp = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact) + sums, 1e-30))) - 8) + sums
    assert np.all(np.abs(np.float64(got) - exact) <= half_ulp)
    twice = bf16(bf16(product).astype(np.float32) + rounded_bias.astype(np.float32))
    assert np.mean(np.abs(np.float64(twice) - exact) > half_ulp) > 0.05


@pytest.mark.parametrize("kind", ["trainable", "array"])
def test_bias_gradient_is_an_fp32_sum_over_rows(kind: str) -> None:
    """A parameter's gradient is FP32 and not rounded on the way: microbatches could not be added up
    otherwise.
    """
    case = Case(SIZES[1], Numerics())
    M, _, N = SIZES[1]
    weight = {"trainable": case.trainable(), "array": jnp.asarray(case.master)}[kind]

    def output(bias: jax.Array) -> jax.Array:
        return layer(jnp.asarray(case.x), weight, case.numerics, bias)

    got = jit(lambda b, dy: jax.vjp(output, b)[1](dy)[0])(jnp.zeros(N, jnp.float32), jnp.asarray(case.dy))
    assert got.dtype == jnp.float32
    dy = case.dy.astype(np.float64)
    assert np.all(np.abs(np.asarray(got) - dy.sum(0)) <= tolerances.gamma(M) * np.abs(dy).sum(0))


def test_transformations_give_the_same_bits() -> None:
    """Not jitted, jitted, rematerialised, under `grad`, inside `lax.map`."""
    case = Case(SIZES[0], Numerics())
    plain = case.run(case.trainable())
    weight, x, dy = case.trainable(), jnp.asarray(case.x), jnp.asarray(case.dy)

    def run(x: jax.Array, weight: Any, dy: jax.Array) -> Any:
        checkpointed = jax.checkpoint(lambda x, w: layer(x, w, case.numerics))
        y, pullback = jax.vjp(checkpointed, x, weight)
        return y, *pullback(dy)

    def mapped(x: jax.Array, weight: Any, dy: jax.Array) -> Any:
        outputs = jax.lax.map(
            lambda pair: run(pair[0], weight, pair[1]), (jnp.stack([x, x]), jnp.stack([dy, dy]))
        )
        return jax.tree.map(lambda part: part[1], outputs)

    def loss(x: jax.Array, master: jax.Array) -> Any:
        y = layer(x[None], dataclasses.replace(weight, master=master), case.numerics)[0]
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

    (_, y), (dx, dw) = jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, weight.master)
    results = {
        "not jitted": case.run(weight, transform=lambda f: f),
        "remat": jit(run)(x, weight, dy),
        "lax.map": jit(mapped)(x, weight, dy),
        "grad": (y, dx, dataclasses.replace(plain[2], master=dw)),
    }
    for name, (y, dx, dw) in results.items():
        np.testing.assert_array_equal(np.asarray(y), np.asarray(plain[0]), err_msg=name)
        # The backward's sums may be ordered otherwise in another program: a last bit of FP32.
        np.testing.assert_allclose(
            np.asarray(dx).astype(np.float32),
            np.asarray(plain[1]).astype(np.float32),
            rtol=2**-7,
            err_msg=name,
        )
        magnitude = np.abs(case.dy.astype(np.float32)).T @ np.abs(case.x.astype(np.float32))
        difference = np.abs(np.asarray(dw.master) - np.asarray(plain[2].master))
        assert np.all(difference <= 2 * tolerances.gamma(140) * magnitude * 1.2), name


def test_forward_of_a_row_ignores_the_others() -> None:
    case = Case(SIZES[2], Numerics())
    expected = case.forward().view(np.uint16)
    for rows in (slice(0, 1), slice(50, 130)):
        y = jit(lambda x: layer(x, case.codes, case.numerics))(jnp.asarray(case.x[rows]))
        np.testing.assert_array_equal(np.asarray(y).view(np.uint16), expected[rows])


def test_nonfinite_gradient_is_not_hidden() -> None:
    """An infinity in dY reaches dX and dW; the quantiser's clip does not turn it into 448."""
    case = Case(SIZES[1], Numerics())
    dy = case.dy.copy()
    dy[4, 7] = np.inf
    _, dx, dw = case.run(case.trainable(), dy)
    assert not np.all(np.isfinite(np.asarray(dx)[4].astype(np.float32))) and not np.all(
        np.isfinite(np.asarray(dw.master)[7])
    )


def test_weight_codes_are_those_of_the_bf16_master() -> None:
    case = Case(SIZES[2], Numerics())
    ours = quantize(jnp.asarray(bf16(case.master)), (128, 128))
    np.testing.assert_array_equal(np.asarray(ours.qvalue).view(np.uint8), case.w[0])
    np.testing.assert_array_equal(np.asarray(ours.scale), case.w[1])
