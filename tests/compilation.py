"""How a test's programs are compiled."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax

VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"


@contextlib.contextmanager
def compilation(quick: bool) -> Iterator[None]:
    """Programs of this process and of those that it starts: made quickly, or as the product has them."""

    def turn(value: bool) -> None:
        jax.config.update("jax_disable_most_optimizations", value)
        os.environ[VARIABLE] = str(int(value))
        jax.clear_caches()

    before = os.environ.get(VARIABLE, "0") == "1"
    if before != quick:
        turn(quick)
    yield
    if before != quick:
        turn(before)
