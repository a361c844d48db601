"""The devices that a plan is made for: how many, their memory, their speed where it is known;
imports no jax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jetrl_jax.errors import UserError

GIB = 2**30
# What a process sees of the card's memory: H100 as XLA's target description states it, the others as the
# vendor does.
MEMORY_BYTES = {
    "H100": 84_942_979_072,
    "H200": 141_000_000_000,
    "A100": 80_000_000_000,
    "B200": 180_000_000_000,
}


@dataclass(frozen=True)
class Devices:
    """count; name: "H100", or "80GiB" where only the size is given; memory_bytes: of one device."""

    count: int
    name: str
    memory_bytes: int


def parse_devices(text: str) -> Devices:
    """ "8xH100" or "8x80GiB".

    Raises:
      UserError: neither.
    """
    match = re.fullmatch(r"([1-9]\d*)x(.+)", text)
    if match:
        count, name = int(match[1]), match[2]
        size = re.fullmatch(r"(\d+(?:\.\d+)?)GiB", name)
        if size and float(size[1]) > 0:
            return Devices(count, name, int(float(size[1]) * GIB))
        if name in MEMORY_BYTES:
            return Devices(count, name, MEMORY_BYTES[name])
    known = ", ".join(MEMORY_BYTES)
    expected = f"a number, x, and one of {known} or a size, such as 8xH100 or 8x80GiB"
    raise UserError(f"--devices: not understood: got {text!r}, expected {expected}.")
