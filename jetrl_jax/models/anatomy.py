"""Which axis of a layer's matrix a number of devices can split; imports no jax."""

from __future__ import annotations

FP8_BLOCK = 128


def shard_axis(shape: tuple[int, ...], degree: int, fp8: bool) -> int | None:
    """The first axis of a matrix that `degree` devices can split without cutting a block of its scales; None: no such axis.

    Vectors are not split (None); nor is anything at degree 1.
    """
    if degree == 1 or len(shape) != 2:
        return None
    unit = FP8_BLOCK if fp8 else 1
    return next((axis for axis, size in enumerate(shape) if size % (degree * unit) == 0), None)


def fitting_degrees(shape: tuple[int, ...], fp8: bool, most: int = 64) -> list[int]:
    """The degrees up to `most` that can split a matrix over "fsdp"."""
    return [degree for degree in range(1, most + 1) if degree == 1 or shard_axis(shape, degree, fp8) is not None]


def fitting_tensor_degrees(features: int, unit: int, most: int = 64) -> list[int]:
    """The degrees up to `most` whose shares of `features` output features are whole units (heads, blocks, rows)."""
    return [degree for degree in range(1, most + 1) if features % (degree * unit) == 0 or degree == 1]
