"""The devices for which a plan is made: their number and memory; imports no jax."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jetrl_jax.errors import UserError

GIB = 2**30
# Memory of a card as a process sees it: H100 from XLA's target description, the others from the vendor.
MEMORY_BYTES = {
    "H100": 84_942_979_072,
    "H200": 141_000_000_000,
    "A100": 80_000_000_000,
    "B200": 180_000_000_000,
}


@dataclass(frozen=True)
class Devices:
    """`count` equal devices; name: "H100", or "80GiB" if only the size is given; memory_bytes: of one."""

    count: int
    name: str
    memory_bytes: int


def parse_devices(text: str) -> Devices:
    """The devices named by a text such as "8xH100" or "8x80GiB".

    Raises:
      UserError: the text has another form.
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
