"""The config section of several processes that run one policy; imports no jax."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jetrl_jax.config_types import NonNegativeInt, PositiveInt, Section, Text


class DistributedSection(Section):
    """The processes that a run is shared by, one start of the same command each."""

    processes: PositiveInt | None = Field(
        1,
        description="Number of processes; 1 is off. null: JAX_NUM_PROCESSES in the environment, or what the cluster (SLURM, MPI) says.",
    )
    process_id: NonNegativeInt | None = Field(
        None, description="Which of them this one is, from 0; no part of the run's record. null: JAX_PROCESS_ID, or what the cluster says."
    )
    coordinator: Text | None = Field(
        None, description="Address host:port at which process 0 listens; null: JAX_COORDINATOR_ADDRESS, or what the cluster says."
    )
    timeout_s: Annotated[int, Field(ge=5)] = Field(
        100, description="Time within which all processes must be there at the start, and a lost one ends the others, in seconds."
    )

    @property
    def on(self) -> bool:
        """Whether the run is one of several processes (where a cluster says how many, there may turn out to be one)."""
        return self.processes != 1
