"""The tiles of a Pallas GEMM: one frozen value, and the rule that chooses it by shape.

A tile shape changes the speed and never the bits. Every kernel adds the blocks of K in ascending order into
one FP32 accumulator, so a row of the result does not depend on the tile or on the number of rows. `choose`
looks a shape up in `tuned_h100.json` (measured; the file names its source), and uses simple rules for shapes
that are not in the table.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

from pallas_kernels.formats import BLOCK
from pallas_kernels.hopper import REGISTERS, SMEM_BYTES, WGMMA_ROWS

TABLE_FILE = Path(__file__).with_name("tuned_h100.json")
"""Measured configurations per shape, written by `python -m pallas_kernels.tune`."""
LARGEST_SWAP_K = 256 * BLOCK
"""The swapped kernel fetches the scales of all blocks of K by one copy; TMA limits its sides to 256."""
_BARRIER_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """The tiles of one launch, in which the rows, or with `swap` the weights' rows, are wgmma rows.

    Attributes:
      tile_m, tile_n: rows and columns of the result per program. In the swapped kernel tile_n is 64 (weight
        rows) and tile_m the tokens, a multiple of 8.
      warpgroups: consumers (1 to 3); tile_m is 64 or 128 rows for each.
      stages: blocks of K in shared memory at once.
      cluster: "n": two programs along N share their block of A by multicast; "m": along M, of B; "": none.
      pair: two blocks of K in flight in each warpgroup (64 rows each only).
      swap: the weights are the left operand, for few tokens.
      persistent: one program per multiprocessor, each with many tiles; else one per tile.
      snake_width: number of tiles of N processed together, so that they share the second-level cache.
      scale_columns: with one B scale per column, how many of them a warpgroup holds in registers at once.
    """

    tile_m: int = 192
    tile_n: int = 128
    warpgroups: int = 3
    stages: int = 4
    cluster: str = "n"
    pair: bool = False
    swap: bool = False
    persistent: bool = True
    snake_width: int = 8
    scale_columns: int = 128

    def __post_init__(self) -> None:
        problems = self._swap_problems() if self.swap else self._tile_problems()
        if self.stages < 2:
            problems.append(f"too few stages: got stages={self.stages}, expected 2 or more")
        if self.smem_bytes(4, True) > SMEM_BYTES:
            problems.append(
                f"too large: got {self.smem_bytes(4, True)} bytes of shared memory, expected at most "
                f"{SMEM_BYTES}"
            )
        if problems:
            raise ValueError("TuningConfig: " + "; ".join(problems) + ".")

    def _tile_problems(self) -> list[str]:
        problems = []
        if self.warpgroups not in REGISTERS:
            return [f"wrong number: got warpgroups={self.warpgroups}, expected one of {tuple(REGISTERS)}"]
        if self.tile_m not in (WGMMA_ROWS * self.warpgroups, 2 * WGMMA_ROWS * self.warpgroups):
            problems.append(
                f"rows do not fit: got tile_m={self.tile_m}, expected 64 or 128 for each of "
                f"{self.warpgroups} warpgroups"
            )
        if self.tile_n % 32 or not 32 <= self.tile_n <= 256:
            problems.append(
                f"columns do not fit: got tile_n={self.tile_n}, expected a multiple of 32 up to 256"
            )
        if self.cluster not in ("", "m", "n"):
            problems.append(f"unknown axis: got cluster={self.cluster!r}, expected 'm', 'n' or ''")
        if self.pair and self.subtiles != 1:
            problems.append(
                f"no registers for it: got pair=True with tile_m={self.tile_m}, expected 64 rows for "
                "each warpgroup"
            )
        if self.scale_columns % 32 or self.tile_n % self.scale_columns:
            problems.append(
                f"does not divide: got scale_columns={self.scale_columns}, expected a multiple of 32 "
                f"that divides {self.tile_n}"
            )
        return problems

    def _swap_problems(self) -> list[str]:
        problems = []
        if self.tile_m % 8 or not 8 <= self.tile_m <= 64:
            problems.append(
                f"tokens do not fit: got tile_m={self.tile_m}, expected a multiple of 8 up to 64 with "
                "swap=True"
            )
        if (self.tile_n, self.warpgroups, self.cluster, self.pair) != (WGMMA_ROWS, 1, "", False):
            problems.append("swap=True takes tile_n=64, warpgroups=1, cluster='' and pair=False")
        return problems

    @property
    def subtiles(self) -> int:
        """The number of wgmma tiles of 64 rows in each warpgroup."""
        return self.tile_m // (WGMMA_ROWS * self.warpgroups)

    def columns_per_scale(self, per_column: bool) -> int:
        """Columns of a tile promoted together: those that share a scale of B, or `scale_columns` of them."""
        return self.scale_columns if per_column else math.gcd(self.tile_n, BLOCK)

    def smem_bytes(self, out_bytes: int, per_column: bool) -> int:
        """Shared memory of one program: stages of codes and scales, and the tile of the result."""
        codes = self.stages * (max(self.tile_m, 8) + self.tile_n) * BLOCK
        scales = self.stages * 4 * (self.tile_m + (self.tile_n if per_column else 0))
        width = self.columns_per_scale(per_column) if not self.swap else 64
        out = (
            WGMMA_ROWS * self.warpgroups * min(128, width * out_bytes)
            if not self.swap
            else self.tile_m * 64 * out_bytes
        )
        return codes + scales + out + _BARRIER_BYTES


def choose(m: int, n: int, k: int, per_column: bool) -> TuningConfig:
    """The configuration for A [m, k] times B [n, k] transposed; the same on every call.

    Args:
      m, n, k: logical sizes.
      per_column: B has a scale per row (the result's column) instead of one per 128.
    """
    wanted = ([n, k, per_column], [n, None, per_column])
    measured = {
        limit: config for (limit, *size), config in load_table().items() if size in wanted and m <= limit
    }
    return measured[min(measured)] if measured else _by_rule(m, n, k, per_column)


def _by_rule(m: int, n: int, k: int, per_column: bool) -> TuningConfig:
    """The configuration for a shape that was not measured: the best one of the nearest shapes."""
    if per_column:
        return WGRAD_ROWS
    if m <= 8 and k <= LARGEST_SWAP_K:
        return SWAP
    if m <= 64:
        return dataclasses.replace(DECODE_64, tile_n=32, scale_columns=32) if n <= 6144 else DECODE_64
    if m <= 256:
        return DECODE_256
    return dataclasses.replace(TRAINING, snake_width=4) if n <= 4096 else TRAINING


TRAINING = TuningConfig()
"""For thousands of rows: three warpgroups hide each other's promotion."""
WGRAD_ROWS = TuningConfig()
"""For one scale per row on both sides: behind each product stand 64 scale products and 64 multiply-adds of a
thread, which three warpgroups issue in fewer cycles than their products take.
"""
SWAP = TuningConfig(
    tile_m=8, tile_n=64, warpgroups=1, stages=8, cluster="", swap=True, persistent=False, scale_columns=64
)
"""Up to eight rows."""
DECODE_64 = TuningConfig(
    tile_m=64, tile_n=64, warpgroups=1, stages=8, cluster="", pair=True, persistent=False, scale_columns=64
)
"""For up to 64 rows, where the time is that of reading the weights."""
DECODE_256 = TuningConfig(
    tile_m=64, tile_n=128, warpgroups=1, stages=6, cluster="", pair=True, persistent=False
)
"""Up to 256 rows."""


@functools.cache
def load_table(path: Path = TABLE_FILE) -> dict[tuple[Any, ...], TuningConfig]:
    """{(largest m, n, k or None for any, per_column): configuration} from a file of `pallas_kernels.tune`.

    Raises:
      ValueError: a row has an unknown field or an impossible configuration.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    table = {}
    for row in rows:
        try:
            table[(row["m"], row["n"], row["k"], row["per_column"])] = TuningConfig(**row["config"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"load_table: bad row: got {row} in {path.name}, expected m, n, k, per_column and "
                f"config. {error}"
            ) from error
    return table
