"""The Pallas GEMMs beyond what every implementation must do: tiles of every kind, rows and bits, races,
configurations.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ScaledArray, fprop, matmul, quantize
from pallas_kernels.gemm import config
from pallas_kernels.gemm.config import (
    DECODE_64,
    DECODE_256,
    SWAP,
    TRAINING,
    WGRAD_ROWS,
    TuningConfig,
    choose,
    load_table,
)
from pallas_kernels.implementations import interpreter_problem
from tests.kernels.runnable import runnable
from tests.oracles import fp8_oracle, tolerances

interpreted = pytest.mark.skipif(
    interpreter_problem() is not None, reason=f"mosaic_interpret: {interpreter_problem()}"
)
KERNELS = runnable("mosaic_interpret", "mosaic_gpu")
ROWS, SQUARE = (1, 128), (128, 128)
WIDE = TuningConfig(tile_m=128, tile_n=192, warpgroups=2, cluster="m", scale_columns=64)
TILES = {
    "training": (TRAINING, SQUARE, (200, 264, 384)),
    "training, cluster m": (dataclasses.replace(TRAINING, cluster="m"), SQUARE, (200, 136, 384)),
    "training, alone": (dataclasses.replace(TRAINING, cluster="", stages=2), SQUARE, (200, 136, 384)),
    "several scales of B per tile": (WIDE, SQUARE, (200, 200, 256)),
    "pair, odd number of blocks": (DECODE_64, SQUARE, (70, 72, 640)),
    "pair, one block": (DECODE_256, SQUARE, (70, 136, 128)),
    "pair, two warpgroups": (
        dataclasses.replace(TRAINING, tile_m=128, warpgroups=2, pair=True, stages=3),
        SQUARE,
        (130, 136, 512),
    ),
    "swap": (SWAP, SQUARE, (13, 72, 1280)),
    "scale per column": (WGRAD_ROWS, ROWS, (260, 136, 384)),
    "scale per column, in pieces": (
        dataclasses.replace(WGRAD_ROWS, scale_columns=32, cluster="m"),
        ROWS,
        (260, 136, 256),
    ),
}


def operand(rows: int, k: int, block: tuple[int, int], seed: int) -> ScaledArray:
    """Quantised normal values with rows of different size."""
    rng = np.random.default_rng(seed)
    return quantize(
        jnp.asarray(rng.normal(size=(rows, k)) * np.exp2(rng.integers(-6, 6, (rows, 1))), jnp.bfloat16), block
    )


def exact_operand(rows: int, k: int, block: tuple[int, int], seed: int) -> ScaledArray:
    """Small whole numbers as codes: every FP32 sum of their products is exact in any order."""
    rng = np.random.default_rng(seed)
    codes = jnp.asarray(rng.integers(-8, 9, (rows, k)), jnp.float32).astype(jnp.float8_e4m3fn)
    grid = (-(-rows // block[0]), -(-k // block[1]))
    return ScaledArray.create(codes, jnp.asarray(rng.uniform(0.5, 2.0, grid), jnp.float32), block)


def run(
    a: ScaledArray, b: ScaledArray, implementation: str, tiles: TuningConfig, order: str = "deepgemm"
) -> np.ndarray:
    """The FP32 product by one kernel with given tiles."""
    from pallas_kernels.gemm import mosaic

    return np.asarray(
        mosaic.matmul(a, b, jnp.dtype("float32"), order, implementation == "mosaic_interpret", tiles)
    )


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("tiles", TILES)
def test_tiles_match_float64(tiles: str, implementation: str) -> None:
    """Elementwise, with more tiles than programs in a cluster, edges on every side,
    and both orders in turn.
    """
    tuning, block, (m, n, k) = TILES[tiles]
    a, b = operand(m, k, ROWS, 0), operand(n, k, block, 1)
    values = [
        fp8_oracle.dequantize(np.asarray(x.qvalue).view(np.uint8), np.asarray(x.scale), x.block_shape)
        for x in (a, b)
    ]
    magnitude = np.abs(values[0]) @ np.abs(values[1]).T
    bound = (tolerances.fp32_dot_gemm if implementation == "mosaic_interpret" else tolerances.hopper_gemm)(
        k // 128, magnitude
    )
    out = run(a, b, implementation, tuning, "triton" if sorted(TILES).index(tiles) % 2 else "deepgemm")
    error = np.abs(out - values[0] @ values[1].T)
    assert out.shape == (m, n) and np.all(error <= bound), (
        f"worst ratio {np.max(error / np.maximum(bound, 1e-300))}"
    )


@pytest.mark.parametrize("implementation", KERNELS)
def test_row_does_not_depend_on_rows_or_tiles(implementation: str) -> None:
    """Row m for M = 1, 8, 64, 100, 130 and under other tiles: the same bits.

    Interpreted, the dot of a block is a matrix product of the CPU, whose FP32 sums depend on the tile: exact
    sums there.
    """
    make = exact_operand if implementation == "mosaic_interpret" else operand
    w, x = make(136, 384, SQUARE, 1), make(130, 384, ROWS, 0)
    whole = run(x, w, implementation, TRAINING)
    for rows in (1, 8, 64, 100, 130):
        part = ScaledArray(x.qvalue[:rows], x.scale[:rows], ROWS)
        np.testing.assert_array_equal(
            run(part, w, implementation, choose(rows, 136, 384, False)), whole[:rows], err_msg=str(rows)
        )
    last = ScaledArray(x.qvalue[-8:], x.scale[-8:], ROWS)
    np.testing.assert_array_equal(run(last, w, implementation, SWAP), whole[-8:])


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", runnable("mosaic_gpu"))
def test_reruns_give_the_same_bits(implementation: str) -> None:
    a, b = operand(300, 1024, ROWS, 0), operand(264, 1024, SQUARE, 1)
    first = run(a, b, implementation, TRAINING)
    for _ in range(5):
        np.testing.assert_array_equal(run(a, b, implementation, TRAINING), first)


@pytest.mark.parametrize("implementation", runnable("mosaic_gpu"))
@pytest.mark.parametrize("rows", [4, 64, 256, 2048])
def test_order_deepgemm_gives_the_bits_of_cublaslt(rows: int, implementation: str) -> None:
    """cuBLASLt's blockwise product rounds as the order "deepgemm" does. Not below four rows, where it cuts K
    in two.
    """
    torch = pytest.importorskip("torch", reason="torch brings cuBLASLt")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    from tests.benchmarks.kernel_rivals import scaled_mm_blocks

    a, b = operand(rows, 4096, ROWS, 0), operand(4096, 4096, SQUARE, 1)
    codes = [
        torch.from_numpy(np.asarray(x.qvalue).view(np.uint8)).cuda().view(torch.float8_e4m3fn) for x in (a, b)
    ]
    scales = [torch.from_numpy(np.asarray(x.scale)).cuda() for x in (a, b)]
    theirs = scaled_mm_blocks((codes[0], scales[0].T.contiguous().T), (codes[1], scales[1]))
    ours = np.asarray(matmul(a, b, implementation=implementation).astype(jnp.float32))
    np.testing.assert_array_equal(ours, theirs.float().cpu().numpy())


@interpreted
def test_interpreter_finds_a_missing_fence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The race check is on: without the producer's fence, TMA overwrites scales that a consumer may still
    read.

    JAX 0.12 raises where it finds a race, 0.11 prints it.
    """
    from pallas_kernels.gemm import mosaic_tiles

    monkeypatch.setattr(mosaic_tiles.plgpu, "commit_smem", lambda: None)
    a, b = operand(128, 640, ROWS, 0), operand(32, 640, SQUARE, 1)
    tiles = TuningConfig(
        tile_m=128, tile_n=32, warpgroups=2, stages=2, cluster="", persistent=False, scale_columns=32
    )
    try:
        run(a, b, "mosaic_interpret", tiles)
        report = capfd.readouterr().out
    except jax.errors.JaxRuntimeError as error:
        report = str(error)
    assert "RACE DETECTED" in report


@interpreted
def test_kernel_is_differentiated_by_nobody_and_runs_under_jit_and_remat() -> None:
    a, b = exact_operand(8, 256, ROWS, 0), exact_operand(64, 256, SQUARE, 1)

    def product(a: ScaledArray, b: ScaledArray) -> jax.Array:
        return fprop(a, b, implementation="mosaic_interpret")

    direct = product(a, b)
    for program in (jax.jit(product), jax.jit(jax.checkpoint(product))):
        np.testing.assert_array_equal(np.asarray(program(a, b)), np.asarray(direct))


@pytest.mark.parametrize("implementation", runnable("xla", "mosaic_interpret", "mosaic_gpu"))
def test_matmul_takes_turned_copies(implementation: str) -> None:
    """`matmul` of operands turned beforehand is what DGrad does with operands that it turns itself."""
    from pallas_kernels import dgrad

    dy, w = operand(8, 128, ROWS, 0), operand(128, 256, SQUARE, 1)
    out = matmul(dy, w.transpose(), implementation=implementation)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(dgrad(dy, w, implementation=implementation)))


# --------------------------------------------------------------------------------------------------------
# configurations


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile_m": 100}, "rows do not fit: got tile_m=100"),
        ({"warpgroups": 4}, "wrong number: got warpgroups=4"),
        ({"tile_n": 100}, "columns do not fit: got tile_n=100"),
        ({"cluster": "x"}, "unknown axis: got cluster='x'"),
        ({"tile_m": 384, "pair": True, "stages": 2}, "no registers for it: got pair=True with tile_m=384"),
        ({"scale_columns": 48}, "does not divide: got scale_columns=48"),
        ({"stages": 1}, "too few stages: got stages=1"),
        ({"stages": 8}, r"too large: got \d+ bytes of shared memory"),
        ({"swap": True}, "swap=True takes tile_n=64"),
        ({"swap": True, "tile_m": 12}, "tokens do not fit: got tile_m=12"),
    ],
)
def test_tuning_config_raises_on_what_cannot_be(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"TuningConfig: .*{message}"):
        TuningConfig(**fields)


def test_choose_takes_the_smallest_measured_limit_and_rules_elsewhere() -> None:
    table = load_table()
    assert choose(1, 4096, 4096, False) == table[(8, 4096, 4096, False)]
    assert choose(9, 4096, 4096, False) == table[(64, 4096, 4096, False)]
    assert choose(8192, 4096, 4096, False).tile_m == 192
    assert choose(4, 640, 256, False) == SWAP
    assert not choose(4, 640, config.LARGEST_SWAP_K + 128, False).swap
    assert choose(4, 640, 256, True) == WGRAD_ROWS
    assert choose(100_000, 640, 256, False) == dataclasses.replace(TRAINING, snake_width=4)


def test_swapped_kernel_raises_on_operands_that_it_cannot_take() -> None:
    from pallas_kernels.gemm import mosaic

    with pytest.raises(ValueError, match=r"matmul: wrong tiles: got swap=True, b.block_shape=\(1, 128\)"):
        mosaic.matmul(
            operand(8, 256, ROWS, 0), operand(8, 256, ROWS, 1), jnp.dtype("float32"), "deepgemm", False, SWAP
        )


def test_load_table_raises_on_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(
        json.dumps({"rows": [{"m": 1, "n": 1, "k": 1, "per_column": False, "config": {"tiles": 3}}]})
    )
    with pytest.raises(ValueError, match=r"load_table: bad row: got .*'tiles': 3.*table.json"):
        load_table(path)
