"""The precision study's own arithmetic: coarser codes against counting, and what its table says of made-up
runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ScaledArray
from pallas_kernels.formats import E4M3

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import study
from coarse_rollout import coarsen


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_coarse_codes_are_the_nearest_with_so_many_mantissa_bits(bits: int) -> None:
    """All 256 codes against numpy's frexp: rounded to even, saturated at the largest number of the coarser
    format.
    """
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8).reshape(2, 128), E4M3)
    coarse = coarsen(ScaledArray(codes, jnp.ones((1, 1), jnp.float32), (128, 128)), bits)
    values, found = (np.asarray(part.astype(jnp.float32), np.float64) for part in (codes, coarse.qvalue))
    finite = np.isfinite(values)
    mantissa, exponent = np.frexp(values[finite])
    steps = 2.0 ** (bits + 1)
    expected = np.ldexp(np.round(mantissa * steps) / steps, exponent)
    largest = {1: 384.0, 2: 448.0, 3: 448.0}[bits]
    np.testing.assert_array_equal(found[finite], np.clip(expected, -largest, largest))
    assert np.isnan(found[~finite]).all()
    assert len(np.unique(np.abs(found[finite]))) == {1: 36, 2: 68, 3: 127}[bits]


def test_weights_that_are_not_fp8_stay() -> None:
    weight = jnp.ones((4, 4), jnp.bfloat16)
    assert coarsen(weight, 1) is weight


def test_summary_counts_steps_and_collapse() -> None:
    """Reward 0.9 from step 6 on, then a fall to 0.1: reached after step 10 (five steps of 0.9), and
    collapsed.
    """
    reward = [0.1] * 5 + [0.9] * 10 + [0.1] * 10
    rows = [{"step": 0, "eval/accuracy": 0.3, "eval/greedy_accuracy": 0.5}]
    for step, value in enumerate(reward, start=1):
        mismatch = {
            "logprob_abs_mean": 0.5,
            "logprob_abs_max": float(step),
            "k3": 0.25,
            "ess": 1 - step / 100,
        }
        row = {f"mismatch/{name}": number for name, number in mismatch.items()}
        rows.append(
            row | {"step": step, "reward/mean": value, "policy/entropy": 1.0, "clip/negative_fraction": 0.125}
        )
    rows[-1] |= {"eval/accuracy": 0.2, "eval/greedy_accuracy": 0.4}
    found = study.summary(rows)
    assert (found["steps to threshold"], found["collapsed"]) == (10, 1)
    assert (found["accuracy before"], found["accuracy"], found["max |Δ|"]) == (0.3, 0.2, 25)
    assert found["smallest ESS"] == pytest.approx(0.75)
    table = study.table({"bf16": [found, found | {"accuracy": 0.4}]})
    assert "| `bf16` | 0.300 | 0.300 (0.200 to 0.400) |" in table and "2 of 2" in table
