"""The config section of the device mesh, and which axis of a matrix a degree can split; imports no jax."""

from __future__ import annotations

from pydantic import Field

from jetrl_jax.config_types import PositiveInt, Section

FP8_BLOCK = 128


class ShardingSection(Section):
    """The mesh of devices that a run trains and samples on."""

    data: PositiveInt = Field(1, description="Copies of the policy; the rows of a batch are split over them.")
    fsdp: PositiveInt = Field(
        1, description="Devices that one copy is split over: masters, moments and published codes; the rows of a batch are split as well."
    )

    tensor: PositiveInt = Field(
        1, description="Devices that every layer is split over, in training and in the embedded engine: heads, MLP channels, vocabulary."
    )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.tensor

    @property
    def row_shards(self) -> int:
        """Parts that the rows of a batch are split into."""
        return self.data * self.fsdp


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
