"""What several processes demand of the other fields: a part of the tables of `jetrl_jax.config_rules`."""

from __future__ import annotations

import re

from jetrl_jax.config_rule_types import NoEffect, Rule

ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")

DISTRIBUTED_RULES: tuple[Rule, ...] = (
    Rule(
        ("distributed.process_id", "distributed.processes"),
        lambda c: c.distributed.process_id is None or c.distributed.processes is None or c.distributed.process_id < c.distributed.processes,
        "no such process",
        lambda c: f"0 to distributed.processes - 1 = {(c.distributed.processes or 1) - 1}",
    ),
    Rule(
        ("distributed.coordinator",),
        lambda c: c.distributed.coordinator is None or _is_address(c.distributed.coordinator),
        "not an address",
        lambda c: "HOST:PORT of process 0, such as node1:8476",
    ),
    Rule(
        ("distributed.processes", "sharding.data", "sharding.fsdp"),
        lambda c: c.sharding.row_shards % (c.distributed.processes or 1) == 0,
        "the devices of the mesh are not shared evenly among the processes",
        lambda c: f"a divisor of sharding.data * sharding.fsdp = {c.sharding.row_shards}",
        "every process brings the same number of devices, and all that share a layer",
    ),
    Rule(
        ("distributed.processes", "rollout.engine"),
        lambda c: not c.distributed.on or c.rollout.engine == "jax",
        "vLLM samples beside a trainer of one process only",
        lambda c: "1, or rollout.engine: jax",
    ),
)

DISTRIBUTED_NO_EFFECT: tuple[NoEffect, ...] = (
    NoEffect(
        ("distributed.process_id", "distributed.coordinator", "distributed.timeout_s"),
        ("distributed.processes",),
        lambda c: not c.distributed.on,
        "distributed.processes is 1",
    ),
)


def _is_address(text: str) -> bool:
    found = ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[2]) < 65536
