"""Several processes that run one policy: their start on JAX's distributed runtime, and their communication.

Every process runs the same program on the same host data.  Configs, prompts, trajectories, rewards,
advantages and packed batches are whole everywhere, so that all processes take the same branches and start the
same collectives in the same order.  The work is divided: the devices' rows and shards, the completions
sampled on them, and the calls of reward functions, whose results are exchanged.  The first process
(`is_first`) does the work that is done once.

With one process, every function here does nothing or returns its argument.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jetrl_jax.config.devices import DistributedSection
from jetrl_jax.errors import UserError
from jetrl_jax.precision import parameters

ENVIRONMENT = {
    "processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
    "coordinator": "JAX_COORDINATOR_ADDRESS",
}
MAX_EXCHANGED_BYTES = 2**30  # per process and call: sizes are int32, and buffers are powers of two
_LOST = re.compile(
    r"gloo|nccl|coordination service|coordinationservice|connection closed by peer", re.IGNORECASE
)


def start(section: DistributedSection) -> None:
    """Joins this process to the others; must run before anything touches a device.

    Does nothing with one process, or if the caller has already initialised `jax.distributed`.

    Raises:
      UserError: a setting is not in the config, the environment or a cluster that JAX detects, or is not a
        number; or the coordinator's port is taken.
    """
    if not section.on or jax.distributed.is_initialized():
        return
    address = section.coordinator or os.environ.get(ENVIRONMENT["coordinator"])
    number, process_id = _number(section, "processes"), _number(section, "process_id")
    if process_id == 0 and address is not None:
        _check_free(address)
    # this service would catch SIGTERM, which a run handles itself
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address,
            number,
            process_id,
            initialization_timeout=section.timeout_s,
            heartbeat_timeout_seconds=section.timeout_s,
            shutdown_timeout_seconds=section.timeout_s,
        )
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise UserError(
            f"distributed: cannot join the other processes: got coordinator={address}, "
            f"processes={number}, process_id={process_id} "
            f"({error}), expected each from the config, from the environment "
            f"({', '.join(ENVIRONMENT.values())}) or from a cluster "
            "that JAX knows (SLURM, Open MPI), and for process 0 a free port."
        ) from error


def _number(section: DistributedSection, name: str) -> int | None:
    """A number from the config, else from the environment; None leaves it to JAX's cluster detection."""
    value, text = getattr(section, name), os.environ.get(ENVIRONMENT[name])
    if value is not None or text is None:
        return value
    if not text.isdecimal():
        raise UserError(
            f"distributed: not a number: got {ENVIRONMENT[name]}={text!r} in the environment, expected an "
            "integer."
        )
    return int(text)


def _check_free(address: str) -> None:
    """Raises UserError if the coordinator's port is in use; gRPC would share it with another coordinator."""
    port = address.rpartition(":")[2]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"distributed: not an address: got coordinator={address}, expected HOST:PORT of process 0, "
            "such as node1:8476."
        )
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        socket.create_server(("", int(port)), family=family, dualstack_ipv6=family == socket.AF_INET6).close()
    except OSError as error:
        raise UserError(
            f"distributed: the coordinator's port is taken: got {address} ({error.strerror}), expected "
            "a free port of this machine; "
            "another run may have it."
        ) from error


def count() -> int:
    """Number of processes."""
    return jax.process_count()


def index() -> int:
    """The number of this process, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this process does the work that is done once: record, console, export."""
    return index() == 0


def mesh_devices(wanted: int, together: int) -> list[jax.Device]:
    """The devices of a mesh of size `wanted`, equally many per process; fewer if not enough exist.

    Raises:
      UserError: groups of `together` neighbours cannot be shared evenly among the processes.
    """
    if wanted // together % count():
        raise UserError(
            f"sharding: devices are not shared evenly: got {wanted // together} groups of {together} "
            f"and {count()} processes, expected "
            "sharding.data * sharding.fsdp to be a multiple."
        )
    taken = [0] * count()
    chosen = []
    for device in jax.devices():
        if taken[device.process_index] < wanted // count():
            taken[device.process_index] += 1
            chosen.append(device)
    return chosen


def exchange(arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The arrays given by each process, in the order of the processes.

    Names must be the same everywhere, shapes may differ.

    Raises:
      ValueError: a process gave more than `MAX_EXCHANGED_BYTES`.
    """
    if count() == 1:
        return [dict(arrays)]
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    payload = np.frombuffer(buffer.getvalue(), np.uint8)
    sizes = [int(size) for size in multihost_utils.process_allgather(np.int32(min(len(payload), 2**31 - 1)))]
    if max(sizes) > MAX_EXCHANGED_BYTES:
        raise ValueError(
            f"exchange: too much at once: got {max(sizes)} bytes of one process, expected at most "
            f"{MAX_EXCHANGED_BYTES}."
        )
    padded = np.zeros(1 << (max(sizes) - 1).bit_length(), np.uint8)  # a power of two: few shapes to compile
    padded[: len(payload)] = payload
    gathered = multihost_utils.process_allgather(padded)
    return [
        dict(np.load(io.BytesIO(row[:size].tobytes()), allow_pickle=False))
        for row, size in zip(gathered, sizes, strict=True)
    ]


def exchange_json(value: Any) -> list[Any]:
    """The JSON value given by each process, in the order of the processes."""
    return [json.loads(str(given["json"])) for given in exchange({"json": np.array(json.dumps(value))})]


def check_same(what: str, text: str) -> None:
    """Raises UserError in every process if `text` differs between processes; names the first such lines."""
    texts = exchange_json(text)
    for index, other in enumerate(texts):
        if other != texts[0]:
            pairs = zip(texts[0].splitlines(), other.splitlines(), strict=False)
            first, here = next(((a, b) for a, b in pairs if a != b), ("", ""))
            raise UserError(
                f"distributed: process {index} has another {what}: got {here.strip()!r}, expected "
                f"{first.strip()!r} as process 0."
            )


def fetch(tree: Any) -> Any:
    """The arrays of a tree as whole numpy arrays; every process must call this if one is split over them."""

    def one(value: Any) -> Any:
        split = isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated)
        return np.asarray(multihost_utils.process_allgather(value, tiled=True) if split else value)

    return jax.tree.map(one, tree)


def gather_to_first(tree: Any) -> Any | None:
    """`fetch` array by array, kept only by the first process; None in the others.

    With one process, returns the tree unchanged.
    """
    if count() == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    kept = []
    for leaf in leaves:
        whole = fetch(leaf)
        kept.append(whole if is_first() else None)
    return jax.tree.unflatten(structure, kept) if is_first() else None


def barrier() -> None:
    """Waits until every process has called this."""
    if count() > 1:
        multihost_utils.process_allgather(np.int32(0))


def place(tree: Any, shardings: Any) -> Any:
    """`jax.device_put` onto the devices of all processes, each of which holds the same whole arrays.

    With several processes the arrays go through the host.  From a device, jax (0.10 to 0.12) makes replicated
    arrays whose shards cannot be read; from numpy, it would send the arrays around to compare them.
    """
    if count() == 1:
        return jax.device_put(tree, shardings)

    def put(sharding: Any, part: Any) -> Any:
        whole = jax.tree.map(np.asarray, part)
        return jax.tree.map(
            lambda value: jax.make_array_from_callback(value.shape, sharding, lambda index: value[index]),
            whole,
        )

    return jax.tree.map(put, shardings, tree)


def fingerprint(tree: Any) -> str:
    """A hash of the bits of all arrays, for `check_same`; empty with one process."""
    if count() == 1:
        return ""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return digest.hexdigest()


def settle(tree: Any) -> Any:
    """Waits until the tree is computed, then returns it.

    If a process drives several CPU devices, programs of several processes that run at the same time can wait
    for each other's threads for ever.
    """
    return tree if count() == 1 else jax.block_until_ready(tree)


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jetrl_jax.precision.parameters.jit`, with `settle` after each call."""
    compiled = parameters.jit(function, **options)
    if count() == 1:
        return compiled
    return lambda *args, **kwargs: settle(compiled(*args, **kwargs))


def tells_of_a_lost_process(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, shows that a collective or the coordinator lost a process."""
    while error is not None:
        if isinstance(error, RuntimeError | ValueError) and _LOST.search(str(error)):
            return count() > 1
        error = error.__cause__ or error.__context__
    return False


def leave() -> None:
    """Shuts down together with the other processes; all must call this within `distributed.timeout_s`."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
