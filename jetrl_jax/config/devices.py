"""The config sections of the device mesh and of the processes that hold it; imports no jax."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from jetrl_jax.config.rule import Rule
from jetrl_jax.config.types import INT32_MAX, NonNegativeInt, PositiveInt, Section, Text

ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")


class ShardingSection(Section):
    """The mesh of devices that a run trains and samples on."""

    data: PositiveInt = Field(1, description="Copies of the policy; the rows of a batch are split over them.")
    fsdp: PositiveInt = Field(
        1,
        description="Devices that one copy is split over: masters, moments and published codes; the "
        "rows of a batch are split as well.",
    )

    tensor: PositiveInt = Field(
        1,
        description="Devices that every layer is split over, in training and in the embedded engine: "
        "heads, MLP channels, vocabulary.",
    )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.tensor

    @property
    def row_shards(self) -> int:
        """Parts that the rows of a batch are split into."""
        return self.data * self.fsdp


class DistributedSection(Section):
    """The processes that a run is shared by, one start of the same command each."""

    processes: PositiveInt | None = Field(
        1,
        description="Number of processes; 1 is off. null: JAX_NUM_PROCESSES in the environment, or "
        "what the cluster (SLURM, MPI) says.",
    )
    process_id: NonNegativeInt | None = Field(
        None,
        description="Which of them this one is, from 0; no part of the run's record. null: "
        "JAX_PROCESS_ID, or what the cluster says.",
    )
    coordinator: Text | None = Field(
        None,
        description="Address host:port at which process 0 listens; null: JAX_COORDINATOR_ADDRESS, or "
        "what the cluster says.",
    )
    timeout_s: Annotated[int, Field(ge=5)] = Field(
        100,
        description="Time within which all processes must be there at the start, and a lost one ends "
        "the others, in seconds.",
    )

    @property
    def on(self) -> bool:
        """Whether the run is one of several processes (where a cluster says how many,
        there may turn out to be one).
        """
        return self.processes != 1

    def _rules(self) -> Iterator[Rule]:
        if not self.on:
            yield from self.idle("distributed.processes is 1", "process_id", "coordinator", "timeout_s")
        last = (self.processes or INT32_MAX) - 1
        holds = self.process_id is None or self.process_id <= last
        yield Rule(
            holds,
            "process_id",
            "no such process",
            f"0 to distributed.processes - 1 = {last}",
            involves=("processes",),
        )
        found = ADDRESS.fullmatch(self.coordinator or "node:1")
        holds = found is not None and 0 < int(found[2]) < 65536
        yield Rule(holds, "coordinator", "not an address", "HOST:PORT of process 0, such as node1:8476")
