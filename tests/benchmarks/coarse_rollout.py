"""`jetrl_jax.train` whose rollouts see FP8 weights with fewer mantissa bits than E4M3's three: a row of
``make study``.

    python tests/benchmarks/coarse_rollout.py --mantissa-bits 1 --config configs/tiny_cpu.yaml --set
    precision.preset=fp8_rollout_only

Each code that the engine is given is rounded (to even) to so many explicit mantissa bits; scales, activations
and trainer stay as they are.  It widens the mismatch of a mixed flow where the model and its answers are too
small to show it. Evaluations sample with the same engine.  All other arguments are those of
`jetrl_jax.train`.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax import train
from jetrl_jax.commands.entry import run_entry_point
from jetrl_jax.precision.parameters import map_params
from jetrl_jax.runs import parts
from pallas_kernels import ScaledArray
from pallas_kernels.formats import E4M3, E4M3_MAX


def coarsen(weight: Any, mantissa_bits: int) -> Any:
    """A `ScaledArray` with its codes rounded to `mantissa_bits` (1 to 3), never beyond the largest such E4M3
    number; else `weight`.
    """
    if not isinstance(weight, ScaledArray):
        return weight
    largest = min((2 - 2.0**-mantissa_bits) * 256, E4M3_MAX)
    rounded = jax.lax.reduce_precision(
        weight.qvalue.astype(jnp.float32), exponent_bits=8, mantissa_bits=mantissa_bits
    )
    return ScaledArray(jnp.clip(rounded, -largest, largest).astype(E4M3), weight.scale, weight.block_shape)


def coarse_engine(build: Any, mantissa_bits: int, *arguments: Any, **options: Any) -> Any:
    """The engine of `build(*arguments, **options)`, which rounds what it loads."""
    engine = build(*arguments, **options)
    load = engine.load
    round_all = jax.jit(
        lambda published: map_params(lambda _, weight: coarsen(weight, mantissa_bits), published)
    )
    engine.load = lambda published, version: load(round_all(published), version)
    return engine


def main(argv: list[str]) -> int:
    """Takes its own argument, replaces the engine, and is `jetrl_jax.train` from there on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], add_help=False)
    parser.add_argument("--mantissa-bits", type=int, choices=(1, 2, 3), required=True)
    own, others = parser.parse_known_args(argv)
    parts.build_engine = functools.partial(coarse_engine, parts.build_engine, own.mantissa_bits)
    return train.main(others)


if __name__ == "__main__":
    run_entry_point(main)
