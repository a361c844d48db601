"""The block-scaled GEMMs: bits against the integer oracle, errors against float64, invariance, poisoning and
messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ScaledArray, dgrad, fprop, matmul, quantize, wgrad
from pallas_kernels import implementations as kernel_implementations
from pallas_kernels.gemm import reference, vllm_triton
from pallas_kernels.gemm.api import PROMOTION_ORDERS
from pallas_kernels.scaled_array import grid_shape
from tests.kernels import vllm_interpreter
from tests.kernels.runnable import runnable
from tests.oracles import fp8_oracle, tolerances

BLOCKS = {
    "fprop": ((1, 128), (128, 128)),
    "dgrad": ((1, 128), (128, 128)),
    "wgrad": ((128, 1), (128, 1)),
    "wgrad_block": ((128, 1), (128, 128)),
}
GEMMS: dict[str, Callable[..., jax.Array]] = {
    "fprop": fprop,
    "dgrad": dgrad,
    "wgrad": wgrad,
    "wgrad_block": wgrad,
}
# M, N, K: whole blocks, partial edges, several row blocks
SIZES = [(16, 256, 384), (1, 130, 300), (300, 7, 129)]
IMPLEMENTATIONS = runnable("xla", "xla_fast", "mosaic_interpret", "mosaic_gpu", "triton")
NEWEST = (pytest.mark.long, pytest.mark.newest)
MANY_BLOCKS = (reference.UNROLLED_BLOCKS + 3) * 128 - 50


def orders(implementation: str) -> tuple[str, ...]:
    """The orders that an implementation has."""
    return ("triton",) if implementation == "triton" else PROMOTION_ORDERS


@pytest.fixture(autouse=True)
def _triton_interpreted_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's kernel runs on a CPU too: interpreted, which the package itself does not offer."""
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(kernel_implementations, "triton_problem", lambda: None)
        monkeypatch.setattr(vllm_triton, "matmul", vllm_interpreter.matmul)


IN_EVERY_ORDER = [
    pytest.param(order, *param.values, marks=param.marks, id=f"{order}-{param.values[0]}")
    for param in IMPLEMENTATIONS
    for order in orders(str(param.values[0]))
]


def matrix(shape: tuple[int, int], seed: int) -> jax.Array:
    """BF16 with rows of very different size, an outlier row, a zero row and a zero, a tiny and a huge block
    where they fit.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-6, 6, (shape[0], 1)))
    if shape[0] > 4:
        x[1, ::7] *= 1e4
        x[2] = 0.0
    if min(shape) >= 256:
        x[:128, :128] = 0.0
        x[128:256, :128] *= 1e-30
        x[:128, 128:256] *= 1e12
    return jnp.asarray(x, jnp.bfloat16)


def quantized(x: jax.Array, block_shape: tuple[int, int], scale_format: str = "float32") -> ScaledArray:
    """The codes and scales of the oracle, for which nothing is compiled."""
    codes, scales = fp8_oracle.quantize(np.asarray(x).astype(np.float32), block_shape, scale_format)
    return ScaledArray.create(jnp.asarray(codes.view(jnp.float8_e4m3fn)), jnp.asarray(scales), block_shape)


def operands(
    site: str, sizes: tuple[int, int, int], scale_format: str = "float32"
) -> tuple[ScaledArray, ScaledArray]:
    """The quantised operands of a site for a layer with N outputs and K inputs and M tokens."""
    m, n, k = sizes
    shapes = {
        "fprop": ((m, k), (n, k)),
        "dgrad": ((m, n), (n, k)),
        "wgrad": ((m, n), (m, k)),
        "wgrad_block": ((m, n), (m, k)),
    }[site]
    left, right = (
        quantized(matrix(shape, seed), block, scale_format)
        for seed, (shape, block) in enumerate(zip(shapes, BLOCKS[site], strict=True))
    )
    return left, right


def oracle_operands(site: str, left: ScaledArray, right: ScaledArray) -> tuple[tuple, tuple]:
    """(codes, scales, rows per block) of A [M, K] and B [N, K] with the contraction last, as the oracle wants
    them.
    """

    def plain(array: ScaledArray, transpose: bool) -> tuple[np.ndarray, np.ndarray, int]:
        codes, scales, edges = (
            np.asarray(array.qvalue).view(np.uint8),
            np.asarray(array.scale),
            array.block_shape,
        )
        return (codes.T, scales.T, edges[1]) if transpose else (codes, scales, edges[0])

    return plain(left, site.startswith("wgrad")), plain(right, site != "fprop")


def float64_reference(a: tuple, b: tuple) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Value, sum of |block|, sum of |product| and number of blocks,
    in float64 from the dequantised operands.
    """
    a_values, b_values = (fp8_oracle.dequantize(codes, scales, (edge, 128)) for codes, scales, edge in (a, b))
    starts = range(0, a_values.shape[1], 128)
    blocks = np.stack([a_values[:, i : i + 128] @ b_values[:, i : i + 128].T for i in starts])
    products = np.abs(a_values) @ np.abs(b_values).T
    return blocks.sum(0), np.abs(blocks).sum(0), products, len(blocks)


@pytest.mark.parametrize("order", PROMOTION_ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("site", BLOCKS)
def test_gemm_matches_oracle_bit_for_bit(site: str, sizes: tuple[int, int, int], order: str) -> None:
    left, right = operands(site, sizes)
    expected = fp8_oracle.matmul(
        *(x for operand in oracle_operands(site, left, right) for x in operand), order
    )
    out = GEMMS[site](left, right, out_dtype=jnp.float32, promotion_order=order)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(out), expected)


@pytest.mark.parametrize("order", PROMOTION_ORDERS)
def test_gemm_forms_give_the_same_bits(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unrolled, batched and looped blocks of K: one result, the oracle's; power-of-two scales too."""
    for scale_format in ("float32", "power_of_two"):
        left, right = operands("fprop", (6, 130, MANY_BLOCKS), scale_format)
        expected = fp8_oracle.matmul(
            *(x for operand in oracle_operands("fprop", left, right) for x in operand), order
        )
        forms = {
            "batched": {},
            "unrolled": {"UNROLLED_BLOCKS": 99},
            "loop": {"FUSED_BLOCKS": 2},
            "loop by size": {"FUSED_BYTES": 1000},
        }
        for form, constants in forms.items():
            with monkeypatch.context() as patch:
                for name, value in constants.items():
                    patch.setattr(reference, name, value)
                # traced anew in each lambda, or the first form would serve all
                matmul = reference.matmul_exact.__wrapped__
                out = jax.jit(lambda a, b, matmul=matmul: matmul(a, b, jnp.dtype("float32"), order))(
                    left, right
                )
            np.testing.assert_array_equal(np.asarray(out), expected, err_msg=form)


@pytest.mark.parametrize(("order", "implementation"), IN_EVERY_ORDER)
@pytest.mark.parametrize("site", BLOCKS)
def test_gemm_error_is_within_the_derived_bound(site: str, order: str, implementation: str) -> None:
    """Elementwise against float64 of the dequantised operands, before and after the rounding to BF16."""
    # interpreting is slow
    left, right = operands(site, (300, 260, 390) if implementation.startswith("xla") else (260, 132, 260))
    for dtype in (jnp.float32, jnp.bfloat16)[: 2 if site == "fprop" else 1]:
        assert_within_bound(site, left, right, dtype, order, implementation)


# XLA's definition has no tiles: one row, and a block that is not whole.
ROWS = [
    (rows, param)
    for param in IMPLEMENTATIONS
    for rows in ((1, 130) if param.values[0] == "xla" else (1, 8, 64, 100, 130))
]


@pytest.mark.parametrize(
    ("rows", "implementation"), [pytest.param(rows, *param.values, marks=param.marks) for rows, param in ROWS]
)
@pytest.mark.parametrize("site", BLOCKS)
def test_gemm_takes_any_number_of_rows(site: str, rows: int, implementation: str) -> None:
    """Tokens are rows of FProp and DGrad and the contraction of WGrad: every tile of decode, and edges of
    every kind.
    """
    left, right = operands(site, (rows, 136, 300))
    for array in (left, right):
        codes = np.asarray(array.qvalue).view(np.uint8) & 0x7F
        if array.shape[0] > 4:
            assert ((codes > 0) & (codes < 8)).any() and (codes == 0).any(), (
                "the operands hold no subnormal code or no zero"
            )
    assert_within_bound(site, left, right, jnp.float32, orders(implementation)[0], implementation)


def assert_within_bound(
    site: str, left: ScaledArray, right: ScaledArray, dtype: Any, order: str, implementation: str
) -> None:
    """Every element of the product lies as close to float64 as the implementation's roundings allow."""
    value, block_sum, product_sum, blocks = float64_reference(*oracle_operands(site, left, right))
    interpreted = implementation == "triton" and jax.default_backend() == "cpu"
    bound = {
        "xla": lambda: tolerances.exact_dot_gemm(blocks, block_sum),
        "mosaic_gpu": lambda: tolerances.hopper_gemm(blocks, product_sum),
        "triton": lambda: (tolerances.fp32_dot_gemm if interpreted else tolerances.hopper_gemm)(
            blocks, product_sum
        ),
    }.get(implementation, lambda: tolerances.fp32_dot_gemm(blocks, product_sum))()
    # Triton's interpreter cuts bits off where its compiler rounds
    unit = tolerances.U_BF16 * (2 if interpreted else 1)
    out = GEMMS[site](left, right, out_dtype=dtype, promotion_order=order, implementation=implementation)
    assert out.dtype == dtype and out.shape == value.shape
    error = np.abs(np.asarray(out.astype(jnp.float32)).astype(np.float64) - value)
    limit = tolerances.output_rounding(value, bound, unit if dtype == jnp.bfloat16 else 0.0)
    assert np.all(error <= limit), f"{dtype}: worst ratio {np.max(error / np.maximum(limit, 1e-300))}"


@pytest.mark.parametrize(("order", "implementation"), IN_EVERY_ORDER)
@pytest.mark.parametrize(("site", "rows"), [("fprop", 1), ("fprop", 100), ("wgrad", 128)])
def test_promotion_order_is_the_one_asked_for(site: str, rows: int, order: str, implementation: str) -> None:
    """Scales of 2**70 and a dot of 2**-18: the product of the scales overflows, the dot times one of them
    does not.

    The scales are weakly typed, as `jnp.full` makes them, which must not widen the product.
    """
    shape = (rows, 128)
    codes = jnp.zeros(shape, jnp.float32).at[0, 0].set(2.0**-9).astype(jnp.float8_e4m3fn)
    left, right = (
        ScaledArray.create(codes, jnp.full(grid_shape(shape, block), 2.0**70), block)
        for block in BLOCKS[site]
    )
    out = GEMMS[site](
        left, right, out_dtype=jnp.float32, promotion_order=order, implementation=implementation
    )
    assert np.asarray(out)[0, 0] == {"deepgemm": np.inf, "triton": 2.0**122}[order]


ACCUMULATED = [
    ("wgrad", (300, 264, 136)),
    pytest.param("wgrad", (5, 264, 136), marks=NEWEST),
    ("wgrad_block", (130, 264, 136)),
    ("fprop", (5, 72, 256)),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("site", "sizes"), ACCUMULATED)
def test_accumulator_takes_the_finished_product_by_one_addition(
    site: str, sizes: tuple[int, int, int], implementation: str
) -> None:
    """Bit for bit accumulator + product, on operands whose dots are exact in FP32 in any order; edges, and
    few rows.
    """
    options = {
        "out_dtype": jnp.float32,
        "promotion_order": orders(implementation)[0],
        "implementation": implementation,
    }
    left, right = exact_operands(site, sizes)
    product = fp8_oracle.matmul(
        *(x for operand in oracle_operands(site, left, right) for x in operand), options["promotion_order"]
    )
    accumulator = jnp.asarray(np.random.default_rng(2).normal(size=product.shape) * 1e3, jnp.float32)
    gemm = matmul if site == "fprop" else wgrad
    out = jax.jit(lambda accumulator: gemm(left, right, accumulator=accumulator, **options))(accumulator)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(accumulator) + product)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("site", "sizes"),
    [
        ("wgrad", (100, 264, 136)),
        pytest.param("wgrad", (300, 264, 136), marks=NEWEST),
        ("fprop", (64, 128, 128)),
        ("fprop", (5, 72, 128)),
    ],
)
def test_product_is_rounded_before_it_is_added(
    site: str, sizes: tuple[int, int, int], implementation: str
) -> None:
    """On operands whose dots and scales are not exact, one block of them and more: a multiply-add would round
    once.
    """
    options = {
        "out_dtype": jnp.float32,
        "promotion_order": orders(implementation)[0],
        "implementation": implementation,
    }
    left, right = operands(site, sizes)
    gemm = matmul if site == "fprop" else wgrad
    product = np.asarray(jax.jit(lambda: gemm(left, right, **options))())
    accumulator = jnp.asarray(
        np.random.default_rng(2).normal(size=product.shape) * np.abs(product).mean(), jnp.float32
    )
    out = jax.jit(lambda accumulator: gemm(left, right, accumulator=accumulator, **options))(accumulator)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(accumulator) + product)


def exact_operands(site: str, sizes: tuple[int, int, int]) -> tuple[ScaledArray, ScaledArray]:
    """As `operands` with small whole numbers as codes and powers of two as scales."""
    rng = np.random.default_rng(0)
    arrays = []
    for array in operands(site, sizes):
        codes = jnp.asarray(rng.integers(-8, 9, array.shape), jnp.float32).astype(jnp.float8_e4m3fn)
        scale = jnp.asarray(np.exp2(rng.integers(-3, 3, array.scale.shape)), jnp.float32)
        arrays.append(ScaledArray.create(codes, scale, array.block_shape))
    return arrays[0], arrays[1]


def test_accumulator_of_another_shape_or_dtype_is_refused() -> None:
    x, w = operands("fprop", (16, 256, 384))
    accumulator = jnp.zeros((16, 256), jnp.float32)
    with pytest.raises(
        ValueError,
        match=r"matmul: wrong accumulator: got accumulator float32\[256, 16\] and out_dtype=float32, "
        r"expected",
    ):
        matmul(x, w, out_dtype=jnp.float32, accumulator=accumulator.T)
    with pytest.raises(ValueError, match=r"wrong accumulator: got .* and out_dtype=bfloat16"):
        matmul(x, w, accumulator=accumulator)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_output_is_rounded_once_from_the_accumulator(dtype: jnp.dtype) -> None:
    left, right = operands("fprop", (16, 256, 384))
    accumulator = np.asarray(fprop(left, right, out_dtype=jnp.float32))
    with np.errstate(over="ignore"):  # the largest do not fit float16
        expected = accumulator.astype(dtype)
    np.testing.assert_array_equal(np.asarray(fprop(left, right, out_dtype=dtype)), expected)


def test_dgrad_is_fprop_with_transposed_codes() -> None:
    dy, w = operands("dgrad", (16, 256, 300))
    transposed = ScaledArray.create(w.qvalue.T, w.scale.T, (128, 128))
    np.testing.assert_array_equal(np.asarray(dgrad(dy, w)), np.asarray(fprop(dy, transposed)))
    requantized = quantize(matrix((256, 300), 1).T, (128, 128))
    np.testing.assert_array_equal(
        np.asarray(requantized.qvalue).view(np.uint8), np.asarray(transposed.qvalue).view(np.uint8)
    )
    np.testing.assert_array_equal(np.asarray(requantized.scale), np.asarray(transposed.scale))


def test_row_does_not_depend_on_its_batch_mates() -> None:
    """The bits of a row are those of the row alone, at any number of rows, at any place, with any mates."""
    _, w = operands("fprop", (1, 130, 384))
    x = matrix((257, 384), 7)
    run = jax.jit(lambda x, w: fprop(quantize(x, (1, 128)), w, out_dtype=jnp.float32))
    whole = np.asarray(run(x, w))
    for rows in (1, 2, 16, 33, 200):
        np.testing.assert_array_equal(np.asarray(run(x[-rows:], w)), whole[-rows:])
    shuffled = np.random.default_rng(0).permutation(257)
    np.testing.assert_array_equal(np.asarray(run(x[shuffled], w)), whole[shuffled])


def test_gemm_gives_the_same_bits_in_every_kind_of_program() -> None:
    """Direct, jitted, fused between quantiser and consumers, vmapped, scanned, rematerialised, with excess
    precision or not.
    """
    x, w = matrix((32, 384), 3), matrix((130, 384), 4)

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return fprop(quantize(x, (1, 128)), quantize(w, (128, 128)))

    def consumed(x: jax.Array, w: jax.Array) -> jax.Array:
        """A consumer that widens again, where XLA may drop the rounding to BF16."""
        return layer(x, w).astype(jnp.float32) * 2.0

    codes = [
        fp8_oracle.quantize(np.asarray(a.astype(jnp.float32)), block)
        for a, block in ((x, (1, 128)), (w, (128, 128)))
    ]
    accumulator = fp8_oracle.matmul(*codes[0], 1, *codes[1], 128, "deepgemm")
    expected = accumulator.astype(jnp.bfloat16).view(np.uint16)
    pieces = x.reshape(2, 16, 384)
    strict = jax.jit(layer, compiler_options={"xla_allow_excess_precision": False})
    outs = {
        "direct": layer(x, w),
        "jit": jax.jit(layer)(x, w),
        "strict": strict(x, w),
        "vmap": jax.vmap(layer, (0, None))(pieces, w),
        "jit vmap jit": jax.jit(jax.vmap(jax.jit(layer), (0, None)))(pieces, w),
        "scan": jax.lax.scan(lambda carry, piece: (carry, layer(piece, w)), 0, pieces)[1],
        "scan checkpoint": jax.jit(
            lambda p: jax.lax.scan(jax.checkpoint(lambda c, piece: (c, layer(piece, w))), 0, p)[1]
        )(pieces),
    }
    for name, out in outs.items():
        np.testing.assert_array_equal(
            np.asarray(out.reshape(32, 130)).view(np.uint16), expected, err_msg=name
        )
    np.testing.assert_array_equal(
        np.asarray(jax.jit(consumed)(x, w)), (expected.astype(np.uint32) << 16).view(np.float32) * 2
    )
    assert jnp.ones(1).dtype == jnp.float32, "the float64 context leaked"


def test_gemms_inside_a_differentiation_rule_under_remat() -> None:
    """The use they are made for: custom_vjp, under jit, checkpoint and scan, gives the gradient of the direct
    calls.
    """
    x, w = matrix((128, 256), 5).astype(jnp.float32) * 0.01, matrix((130, 256), 6).astype(jnp.float32) * 0.01

    @jax.custom_vjp
    def linear(x: jax.Array, w: jax.Array) -> jax.Array:
        return fprop(quantize(x, (1, 128)), quantize(w, (128, 128)), out_dtype=jnp.float32)

    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[ScaledArray, ScaledArray]]:
        return linear(x, w), (quantize(x, (128, 1)), quantize(w, (128, 128)))

    def backward(saved: tuple[ScaledArray, ScaledArray], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        x8, w8 = saved
        return dgrad(quantize(dy, (1, 128)), w8, out_dtype=jnp.float32), wgrad(quantize(dy, (128, 1)), x8)

    linear.defvjp(forward, backward)
    target = jnp.asarray(np.random.default_rng(8).normal(size=(128, 130)), jnp.float32)

    def loss(x: jax.Array, w: jax.Array, layer: Callable = linear) -> jax.Array:
        return jnp.sum(layer(x, w) * target)

    direct = backward(forward(x, w)[1], target)
    for program in (
        jax.jit(jax.grad(functools.partial(loss, layer=jax.checkpoint(linear)), (0, 1))),
        jax.jit(
            jax.grad(
                lambda x, w: jax.lax.scan(
                    jax.checkpoint(lambda c, t: (c + loss(x, w), None)), 0.0, None, length=1
                )[0],
                (0, 1),
            )
        ),
    ):
        for got, expected in zip(program(x, w), direct, strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nonfinite_input_poisons_what_reads_it_and_nothing_else(implementation: str) -> None:
    x, w = matrix((16, 256), 0), matrix((256, 256), 1)

    def product(x: ScaledArray, w: ScaledArray) -> np.ndarray:
        return np.asarray(
            fprop(x, w, promotion_order=orders(implementation)[0], implementation=implementation).astype(
                jnp.float32
            )
        )

    clean = product(quantized(x, (1, 128)), quantized(w, (128, 128)))
    for value in (jnp.nan, jnp.inf):
        bad_x, bad_w = (
            quantize(x.at[3, 200].set(value), (1, 128)),
            quantize(w.at[5, 6].set(value), (128, 128)),
        )
        rows = product(bad_x, quantized(w, (128, 128)))
        assert not np.isfinite(rows[3]).any()
        np.testing.assert_array_equal(np.delete(rows, 3, 0), np.delete(clean, 3, 0))
        columns = product(quantized(x, (1, 128)), bad_w)
        assert not np.isfinite(columns[:, :128]).any() and np.isfinite(columns[:, 128:]).all()


def small(shape: tuple[int, int], block_shape: tuple[int, int]) -> ScaledArray:
    """A quantised matrix of ones."""
    return quantized(jnp.ones(shape), block_shape)


ROWS, COLUMNS, SQUARE = (1, 128), (128, 1), (128, 128)


@pytest.mark.parametrize(
    ("gemm", "left", "right", "message"),
    [
        (
            fprop,
            ((4, 256), ROWS),
            ((8, 384), SQUARE),
            r"fprop: contracted sizes differ: got x.shape=\(4, 256\) and w.shape=\(8, 384\)",
        ),
        (
            dgrad,
            ((4, 256), ROWS),
            ((8, 256), SQUARE),
            r"dgrad: .*got dy.shape=\(4, 256\) and w.shape=\(8, 256\)",
        ),
        (
            wgrad,
            ((4, 256), COLUMNS),
            ((8, 256), COLUMNS),
            r"wgrad: .*got dy.shape=\(4, 256\) and x.shape=\(8, 256\)",
        ),
        (
            fprop,
            ((4, 256), COLUMNS),
            ((8, 256), SQUARE),
            r"fprop: wrong block shape: got x.block_shape=\(128, 1\)",
        ),
        (fprop, ((4, 256), ROWS), ((8, 256), ROWS), r"got w.block_shape=\(1, 128\)"),
        (
            wgrad,
            ((4, 256), COLUMNS),
            ((4, 256), ROWS),
            r"got x.block_shape=\(1, 128\), expected one of \(\(128, 1\), \(128, 128\)\)",
        ),
    ],
)
def test_gemm_raises_with_both_shapes(gemm: Callable, left: tuple, right: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gemm(small(*left), small(*right))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_dtype": jnp.int32}, "wrong dtype: got out_dtype="),
        ({"promotion_order": "cutlass"}, "got promotion_order='cutlass', expected one of"),
        ({"implementation": "mosaic"}, "got implementation='mosaic', expected one of"),
    ],
)
def test_gemm_raises_on_unknown_names(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fprop(small((4, 128), ROWS), small((8, 128), SQUARE), **options)


def test_gemm_raises_on_a_plain_array_and_on_a_broken_one() -> None:
    x, w = small((4, 128), (1, 128)), small((8, 128), (128, 128))
    with pytest.raises(ValueError, match=r"fprop: wrong type: got w=.*expected ScaledArray"):
        fprop(x, w.dequantize())
    with pytest.raises(
        ValueError, match=r"got scale.shape=\(1, 1\) for qvalue.shape=\(4, 128\), expected \(4, 1\)"
    ):
        fprop(ScaledArray(x.qvalue, w.scale, (1, 128)), w)
    with pytest.raises(ValueError, match=r"contracted sizes differ.*unknown order.*unknown name"):
        fprop(x, small((8, 256), (128, 128)), promotion_order="a", implementation="b")
