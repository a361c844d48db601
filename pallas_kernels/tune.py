"""`python -m pallas_kernels.tune`: measures tiles for GEMMs and writes the table that `gemm.config` reads.

Every candidate compiles without spills (tests/kernels/test_aot.py) and gives the same bits, so the table
changes only the speed. Products of more than 256 rows are timed in steady state, others with cold weights,
as `measure` describes. Sizes are those of Qwen3-8B (`bench.LAYERS`): FProp and DGrad by (N, K), WGrad with
scales per column by (N, K) of dW. The command rewrites `gemm/tuned_h100.json` (or `--out`); with `--layers`
it rewrites only the rows of these layers' sizes. Without a GPU for these kernels it ends with status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pallas_kernels import ScaledArray, quantize
from pallas_kernels.bench import COLUMNS, DECODE_ROWS, LAYERS, ROWS, SQUARE, TRAINING_ROWS, random_matrix
from pallas_kernels.gemm.config import (
    DECODE_64,
    DECODE_256,
    SWAP,
    TABLE_FILE,
    TRAINING,
    WGRAD_ROWS,
    TuningConfig,
)
from pallas_kernels.measure import (
    cold_kernels,
    copies_beyond_cache,
    environment,
    jax_contender,
    require_gpu,
    steady_state,
)

EVERY_ROW = 1 << 30
"""The limit of the last entry of a size, which also serves every larger M."""
_replace = dataclasses.replace


def candidates(m: int, per_column: bool) -> list[TuningConfig]:
    """The tiles to measure for a product of `m` rows."""
    if per_column:
        wide, two = (
            _replace(WGRAD_ROWS, tile_m=256, warpgroups=2),
            _replace(WGRAD_ROWS, tile_m=128, warpgroups=2, stages=6),
        )
        few = [
            _replace(wide, scale_columns=columns, cluster=cluster)
            for columns in (32, 128)
            for cluster in ("n", "m")
        ]
        return [*few, two, WGRAD_ROWS, _replace(two, pair=True, scale_columns=32)]
    wide = TuningConfig(tile_m=128, tile_n=192, warpgroups=2, cluster="m", scale_columns=64)
    two = TuningConfig(tile_m=128, warpgroups=2, stages=6, pair=True)
    if m > 256:
        widths = [_replace(TRAINING, snake_width=width) for width in (4, 8)]
        return [*widths, _replace(TRAINING, cluster="m"), _replace(TRAINING, cluster=""), two, wide]
    narrow = [
        _replace(DECODE_64, tile_n=n, scale_columns=32, stages=stages)
        for n in (32, 64)
        for stages in (4, 6, 8)
    ]
    if m <= 8:
        return [*(_replace(SWAP, stages=stages) for stages in (4, 6, 8, 12)), *narrow]
    flat = TuningConfig(tile_m=128, tile_n=96, warpgroups=2, stages=6, cluster="", scale_columns=32)
    more = [
        DECODE_256,
        _replace(DECODE_256, stages=4),
        flat,
        _replace(two, cluster=""),
        _replace(two, cluster="m"),
        wide,
    ]
    swapped = [_replace(SWAP, tile_m=tokens) for tokens in (16, 32, 64) if tokens <= max(16, m)]
    return [*narrow, *more, *swapped]


def sizes(layers: Iterable[str] = LAYERS) -> Iterator[tuple[int, int, int, int, bool]]:
    """(rows, largest rows served, n, k, per_column) of every entry of the table that these layers read."""
    training = TRAINING_ROWS[0]
    weights = [LAYERS[layer] for layer in layers]
    shapes = dict.fromkeys(weights) | dict.fromkeys((k, n) for n, k in weights)
    for n, k in shapes:
        for m in DECODE_ROWS:
            yield m, max(m, 8), n, k, False
        yield training, EVERY_ROW, n, k, False
    for n, k in weights:
        yield n, n, k, training, True  # dW [n, k], contracted over tokens, of which there may be any number


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=TABLE_FILE)
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=list(LAYERS),
        default=list(LAYERS),
        metavar="LAYER",
        help="default: all",
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    require_gpu("python -m pallas_kernels.tune")
    rows = []
    for m, limit, n, k, per_column in sizes(options.layers):
        seconds = measure(m, n, k, per_column)
        best = min(seconds, key=seconds.__getitem__)
        rows.append(entry(limit, n, k, per_column, best, seconds[best]))
        print(
            json.dumps(rows[-1]),
            f"of {len(seconds)} candidates, slowest {max(seconds.values()) * 1e6:.1f} us",
            flush=True,
        )
        # after every row, so that figures are kept if the time runs out
        write_table(
            options.out,
            rows,
            {"command": "python -m pallas_kernels.tune " + " ".join(sys.argv[1:]), **environment()},
        )


def measure(m: int, n: int, k: int, per_column: bool) -> dict[TuningConfig, float]:
    """Seconds of every candidate on one product of random matrices."""
    from pallas_kernels.gemm import mosaic

    def product(tuning: TuningConfig) -> Any:
        out = jnp.dtype("float32" if per_column else "bfloat16")
        return lambda a, b: mosaic.matmul(a, b, out, "deepgemm", False, tuning)

    tunings = candidates(m, per_column)
    a = quantize(random_matrix(m, k, 0), ROWS)
    if m > 256:
        b = _right(n, k, 1, per_column)
        timings = steady_state(
            {str(index): jax_contender(product(tuning), a, b) for index, tuning in enumerate(tunings)}
        )
        return {tuning: timings[str(index)].median for index, tuning in enumerate(tunings)}
    weights = [_right(n, k, seed, per_column) for seed in range(copies_beyond_cache(n * k))]
    return {tuning: cold_kernels(product(tuning), a, weights).median for tuning in tunings}


def _right(n: int, k: int, seed: int, per_column: bool) -> ScaledArray:
    return (
        quantize(random_matrix(k, n, seed), COLUMNS).transpose()
        if per_column
        else quantize(random_matrix(n, k, seed), SQUARE)
    )


def entry(
    limit: int, n: int, k: int, per_column: bool, tuning: TuningConfig, seconds: float
) -> dict[str, Any]:
    """A row of the table; a contraction over tokens (`per_column`) serves any number of them."""
    size = {"m": limit, "n": n, "k": None if per_column else k}
    return {
        **size,
        "per_column": per_column,
        "us": round(seconds * 1e6, 2),
        "config": dataclasses.asdict(tuning),
    }


def write_table(path: Path, rows: list[dict[str, Any]], source: dict[str, Any]) -> None:
    """Writes the file that `gemm.config.load_table` reads, one row per line; rows of other sizes are kept."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"source": None, "rows": []}
    measured = {_size(row) for row in rows}
    kept = [{"source": table["source"]} | row for row in table["rows"] if _size(row) not in measured]
    lines = ",\n".join(json.dumps(row) for row in [*kept, *({"source": source} | row for row in rows)])
    beside = path.with_name(f"{path.name}.new")  # so that a kill leaves the old or the new table
    beside.write_text(f'{{\n"source": "of each row",\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
    beside.replace(path)


def _size(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["m"], row["n"], row["k"], row["per_column"]


if __name__ == "__main__":
    main()
