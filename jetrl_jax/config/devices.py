"""The config sections of the device mesh and of the processes that hold it; imports no jax."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from jetrl_jax.config.types import INT32_MAX, NonNegativeInt, PositiveInt, Rule, Section, Text, must, option

ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):0*([1-9]\d{0,4})")


def _is_address(text: str) -> bool:
    found = ADDRESS.fullmatch(text)
    return found is not None and int(found[2]) < 65536


Address = Annotated[Text, must(_is_address, "not an address", "HOST:PORT of process 0, such as node1:8476")]


Timeout = Annotated[int, Field(ge=5)]


class ShardingSection(Section):
    """The mesh of devices that a run trains and samples on."""

    data: PositiveInt = option(1, "Copies of the policy; the rows of a batch are split over them.")
    fsdp: PositiveInt = option(1, "Devices that share one copy: masters, moments, codes; rows are split too.")
    tensor: PositiveInt = option(1, "Devices that share every layer: heads, MLP channels, vocabulary.")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.tensor

    @property
    def row_shards(self) -> int:
        """Number of parts that the rows of a batch are split into."""
        return self.data * self.fsdp


class DistributedSection(Section):
    """The processes that a run is shared by, one start of the same command each."""

    processes: PositiveInt | None = option(
        1, "Number of processes; null: JAX_NUM_PROCESSES or the cluster's."
    )
    process_id: NonNegativeInt | None = option(
        None, "This one, from 0; null: JAX_PROCESS_ID or the cluster's."
    )
    coordinator: Address | None = option(
        None, "Host:port of process 0; null: JAX_COORDINATOR_ADDRESS or the cluster's."
    )
    timeout_s: Timeout = option(100, "Time for all to start, or for a lost one to end the rest, in seconds.")

    @property
    def on(self) -> bool:
        """Whether JAX's distributed mode is used (a cluster may still turn out to have only one process)."""
        return self.processes != 1

    def _rules(self) -> Iterator[Rule]:
        if not self.on:
            yield from self.idle("distributed.processes is 1", "process_id", "coordinator", "timeout_s")
        last = (self.processes or INT32_MAX) - 1
        expected = f"0 to distributed.processes - 1 = {last}"
        yield Rule((self.process_id or 0) <= last, "process_id", "no such process", expected)
