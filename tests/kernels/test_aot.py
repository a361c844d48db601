"""Every GEMM kernel compiled for an H100 that is not there: no registers spilled, no wgmma that waits for
another.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import ScaledArray
from pallas_kernels.gemm.config import (
    DECODE_64,
    DECODE_256,
    SWAP,
    TRAINING,
    WGRAD_ROWS,
    TuningConfig,
    load_table,
)
from pallas_kernels.gemm.mosaic import matmul
from pallas_kernels.tune import candidates
from tests.kernels import aot
from tests.kernels.aot import ROWS, SQUARE, compile_product, scaled

pytestmark = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
RULES = {
    "training": TRAINING,
    "training, narrow": dataclasses.replace(TRAINING, snake_width=4),
    "decode 32": dataclasses.replace(DECODE_64, tile_n=32, scale_columns=32),
    "decode 64": DECODE_64,
    "decode 256": DECODE_256,
    "swap": SWAP,
}
TABLE = {
    f"table {m} x {n} x {k}": tuning
    for (m, n, k, per_column), tuning in load_table().items()
    if not per_column
}
PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for kernel_mosaic_gpu_kernel
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""


@pytest.mark.parametrize("order", ["deepgemm", "triton"])
@pytest.mark.parametrize("name", [*RULES, *TABLE])
def test_fprop_and_dgrad_kernels_compile_cleanly(name: str, order: str) -> None:
    report = compile_product((RULES | TABLE)[name], order, "bfloat16")
    assert report.clean, report.text


@pytest.mark.parametrize("order", ["deepgemm", "triton"])
@pytest.mark.parametrize("block", [ROWS, SQUARE])
def test_wgrad_kernels_compile_cleanly(block: tuple[int, int], order: str) -> None:
    report = compile_product(WGRAD_ROWS if block == ROWS else TRAINING, order, "float32", block)
    assert report.clean, report.text


@pytest.mark.parametrize("order", ["deepgemm", "triton"])
@pytest.mark.parametrize("block", [ROWS, SQUARE])
def test_accumulating_kernels_compile_cleanly(block: tuple[int, int], order: str) -> None:
    tuning, shape = WGRAD_ROWS if block == ROWS else TRAINING, (1024, 4096)
    operands = scaled(1024, 4096, ROWS), scaled(4096, 4096, block), jax.ShapeDtypeStruct(shape, jnp.float32)
    (report,) = aot.compile_for_h100(
        lambda a, b, c: matmul(a, b, jnp.dtype("float32"), order, False, tuning, c), *operands
    )
    assert report.clean, report.text


def test_an_accumulator_of_many_microbatches_is_copied_once_at_most() -> None:
    """Each product goes into the buffer of the sum before it; the first one's is an argument that its owner
    may still read.
    """
    operands = scaled(512, 256, ROWS), scaled(256, 256, ROWS), jax.ShapeDtypeStruct((512, 256), jnp.float32)

    def three(a: ScaledArray, b: ScaledArray, total: jax.Array) -> jax.Array:
        for _ in range(3):
            total = matmul(a, b, jnp.dtype("float32"), "deepgemm", accumulator=total)
        return total

    text = aot.program_for_h100(three, *operands)
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", text)) == 3
    assert len(re.findall(r"= f32\[512,256\]\S* (?:copy|fusion|add)\(", text)) <= 1, text


@pytest.mark.parametrize(("order", "multiplications"), [("deepgemm", 2), ("triton", 64)])
def test_promotion_is_fused_and_in_the_order_asked_for(order: str, multiplications: int) -> None:
    """A thread holds 64 sums in two rows: 64 fused multiply-adds a block, and a scale product for each row or
    for each sum.
    """
    operations = compile_product(TRAINING, order, "bfloat16").float_operations()
    assert operations == {"mul": multiplications, "add": 0, "fma": 64}


@pytest.mark.parametrize("order", ["deepgemm", "triton"])
def test_promotion_with_a_scale_per_column_is_fused(order: str) -> None:
    """64 sums: the product of scales, or of dot and scale, and a fused multiply-add for each."""
    operations = compile_product(WGRAD_ROWS, order, "float32", ROWS).float_operations()
    assert operations == {"mul": 64, "add": 0, "fma": 64}


@pytest.mark.parametrize(("order", "multiplications"), [("deepgemm", 2), ("triton", 4)])
def test_promotion_of_the_swapped_kernel_is_fused(order: str, multiplications: int) -> None:
    """A thread holds four sums, of two tokens."""
    assert compile_product(SWAP, order, "bfloat16").float_operations() == {
        "mul": multiplications,
        "add": 0,
        "fma": 4,
    }


@pytest.mark.newest
@pytest.mark.long
@pytest.mark.parametrize("per_column", [False, True])
def test_candidates_of_the_tuner_compile_cleanly(per_column: bool) -> None:
    rows = (4096,) if per_column else (1, 64, 256, 4096)
    tunings = dict.fromkeys(tuning for m in rows for tuning in candidates(m, per_column))
    out_dtype, block = ("float32", ROWS) if per_column else ("bfloat16", SQUARE)
    reports = {
        (tuning, order): compile_product(tuning, order, out_dtype, block)
        for tuning in tunings
        for order in ("deepgemm", "triton")
    }
    assert not [(what, report.text) for what, report in reports.items() if not report.clean]


@pytest.mark.parametrize("tuning", [TRAINING, SWAP])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_outputs_compile_cleanly(dtype: str, tuning: TuningConfig) -> None:
    report = compile_product(tuning, "deepgemm", dtype, SQUARE)
    assert report.clean, report.text


@pytest.mark.parametrize("sizes", [(1, 130, 300), (100, 7, 128), (1000, 1000, 1000)])
def test_ragged_sizes_compile_cleanly(sizes: tuple[int, int, int]) -> None:
    for block in (ROWS, SQUARE):
        report = compile_product(None, "deepgemm", "bfloat16", block, sizes)
        assert report.clean, report.text


def test_spills_are_seen() -> None:
    """Two tiles of 64 rows for each of two warpgroups need more registers than there are in the order
    "deepgemm".
    """
    report = compile_product(TuningConfig(tile_m=256, warpgroups=2), "deepgemm", "bfloat16")
    assert report.spilled_bytes > 0 and not report.clean


def test_parse_reads_every_kind_of_trouble() -> None:
    clean = PTXAS.format(stack=0, stores=0, loads=0)
    assert aot.parse(clean) == aot.KernelReport(168, 0, 0, False, clean) and aot.parse(clean).clean
    spilled = aot.parse(PTXAS.format(stack=104, stores=100, loads=244))
    assert (spilled.stack_bytes, spilled.spilled_bytes, spilled.clean) == (104, 344, False)
    warning = (
        "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register"
    )
    assert aot.parse(clean + warning).serialized
    arrive = (
        "ptxas info    : (C7519) warpgroup.arrive is injected in around line 616 by compiler to "
        "allow use of registers in GMMA"
    )
    assert aot.parse(clean + arrive).clean
    with pytest.raises(ValueError, match="parse: unknown report"):
        aot.parse("ptxas info    : nothing")


def test_kernel_compiles_inside_shard_map_behind_gathered_codes() -> None:
    """Two H100: each has half of W's codes and scales, gathers the rest as FP8, and multiplies its own rows
    of X.
    """
    mesh, split = aot.h100_mesh(2), PartitionSpec("device")

    def layer(x: ScaledArray, w: ScaledArray) -> jax.Array:
        codes, scales = (
            jax.lax.all_gather(part, "device", axis=0, tiled=True) for part in (w.qvalue, w.scale)
        )
        return matmul(x, ScaledArray(codes, scales, w.block_shape), jnp.bfloat16, "deepgemm")

    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=False)
    operands = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, split)),
        (scaled(512, 256, ROWS), scaled(512, 256, SQUARE)),
    )
    text = jax.jit(mapped).lower(*operands).compile().as_text()
    assert "mosaic_gpu" in text and "all-gather" in text and "f8e4m3fn[512,256]" in text, text[:3000]
