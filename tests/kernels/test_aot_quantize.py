"""The quantisers' kernels compiled for an H100 without one: nothing spilled, and three programs on a
multiprocessor.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import SCALE_FORMATS, bench, implementations
from pallas_kernels.quantize.fused import KERNEL_WIDTHS
from tests.kernels.aot import KernelReport, compile_for_h100, missing, program_for_h100

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

REGISTERS = 64 * 1024  # of one multiprocessor
THREADS = 256


def assert_clean(reports: list[KernelReport], programs: int) -> None:
    """One kernel, nothing spilled, and so few registers that `programs` of its programs are resident
    together.
    """
    assert len(reports) == 1
    assert reports[0].clean, reports[0].text
    assert programs * THREADS * (-(-reports[0].registers // 8) * 8) <= REGISTERS, reports[0].text


@pytest.mark.parametrize(
    "plan",
    [
        ("row", None),
        (None, "column"),
        ("block", None),
        ("row", "column"),
        ("row", "block"),
        ("block", "block"),
    ],
)
@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
def test_quantiser_compiles_without_spills(plan: tuple[str | None, str | None], scale_format: str) -> None:
    from pallas_kernels.quantize import mosaic

    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    assert_clean(
        compile_for_h100(lambda x: mosaic.quantize((x,), mosaic.Plan(*plan), scale_format, False), x),
        programs=3,
    )


def test_quantiser_compiles_for_ragged_tokens_and_fp16() -> None:
    from pallas_kernels.quantize import mosaic

    x = jax.ShapeDtypeStruct((1003, 1024), jnp.float16)
    assert_clean(
        compile_for_h100(lambda x: mosaic.quantize((x,), mosaic.Plan("row", "column"), "float32", False), x),
        programs=3,
    )


@pytest.mark.parametrize(("tokens", "scale_format"), [(8192, "float32"), (1003, "power_of_two")])
def test_requantiser_compiles_without_spills(tokens: int, scale_format: str) -> None:
    from pallas_kernels.quantize import mosaic_requantize

    codes = jax.ShapeDtypeStruct((tokens, 4096), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((4096 // 128, tokens), jnp.float32)
    assert_clean(
        compile_for_h100(
            lambda *array: mosaic_requantize.requantize(*array, scale_format, False), codes, scales
        ),
        programs=3,
    )


@pytest.mark.parametrize("transposed", [None, "column", "block"])
def test_silu_quantiser_compiles_without_spills(transposed: str | None) -> None:
    from pallas_kernels.quantize import mosaic

    x = jax.ShapeDtypeStruct((8192, 12288), jnp.bfloat16)
    assert_clean(
        compile_for_h100(
            lambda *x: mosaic.quantize(x, mosaic.Plan("row", transposed), "float32", False), x, x
        ),
        programs=2,
    )


def test_silu_gradients_compile_without_spills() -> None:
    from pallas_kernels.quantize import mosaic_silu

    x = jax.ShapeDtypeStruct((8192, 12288), jnp.bfloat16)
    assert_clean(
        compile_for_h100(lambda *x: mosaic_silu.silu_gradients_quantize(*x, "float32", False), x, x, x),
        programs=2,
    )


@pytest.mark.parametrize("width", KERNEL_WIDTHS)
@pytest.mark.parametrize("has_residual", [True, False])
def test_norm_quantiser_compiles_without_spills(width: int, has_residual: bool) -> None:
    """With an odd number of tokens where no residual is added."""
    from pallas_kernels.quantize import mosaic_norm

    x = jax.ShapeDtypeStruct((8192 if has_residual else 1003, width), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((width,), jnp.bfloat16)

    def run(weight: jax.Array, x: jax.Array, residual: jax.Array | None = None) -> object:
        return mosaic_norm.rms_norm_quantize(
            x, weight, residual, 1e-6, "native" if has_residual else "cuda", "float32", False
        )

    assert_clean(compile_for_h100(run, weight, *([x, x] if has_residual else [x])), programs=2)


@pytest.mark.parametrize("x_block", [(128, 1), (128, 128)])
def test_gemms_read_what_the_quantisers_write(
    monkeypatch: pytest.MonkeyPatch, x_block: tuple[int, int]
) -> None:
    """A linear layer from BF16 is three quantiser kernels and three GEMMs: no code and no row's scale is
    turned or copied.
    """
    monkeypatch.setattr(implementations, "gpu_problem", lambda: None)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 512), (768, 512), (1024, 768))]
    program = program_for_h100(bench._fp8_layer(x_block), *shapes)
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", program)) == 6
    others = re.findall(
        r"= \(?(\w+)\[([\d,]+)\]\S* (?:transpose|copy|fusion|pad|slice|concatenate)\(", program
    )
    sizes = [(kind, [int(size) for size in sizes.split(",")]) for kind, sizes in others]
    # the scale grids of (128, 128) blocks
    assert all(kind == "f32" and max(size) <= 8 for kind, size in sizes), sizes
