"""An environment with faults by a schedule, for worker processes: a seed has a kind, and a kind its fault.

The first observation shows the kind, so that a recorded episode shows which fault it should have met.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

from jetrl_jax.tasks.environments.guess_number import GuessNumber

# the first observation -> what goes wrong; "again": in the reset of a seed right after another reset of it,
# so that the example is made and some members of its group do not begin
KINDS = {
    "a": "",
    "b": "step raises",
    "c": "step hangs",
    "d": "step dies",
    "e": "again dies",
    "f": "again hangs",
}
NEVER = "reset dies"  # and no example can be made
FAULTY_TURN = 2
KILLED = "KILL_TRAINER_AT"  # variable of the seed whose first step ends the trainer

last_reset: int | None = None  # the seed, if the last call in this process was a reset


def kind_of(seed: int) -> str:
    """The fault of a seed; held-out seeds (from 2**30 on) do without those that take time or a history."""
    if seed == 0:  # the check before a run
        return ""
    kinds = [*KINDS.values(), "", NEVER] if seed < 1 << 30 else ["", "", "step raises", "step dies"]
    return random.Random(f"kind of {seed}").choice(kinds)


class Faulty(GuessNumber):
    """Guess a number."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        global last_reset
        assert seed is not None
        again, last_reset = last_reset == seed, seed
        super().reset(seed=seed)
        self.seed, self.kind, self.turn = seed, kind_of(seed), 0
        if self.kind == NEVER or (again and self.kind.startswith("again")):
            self.fail()
        return next((shown for shown, kind in KINDS.items() if kind == self.kind), "z"), {}

    def step(self, text: str) -> Any:
        global last_reset
        last_reset = None
        self.turn += 1
        if os.environ.get(KILLED) == str(self.seed):
            os.kill(os.getppid(), signal.SIGKILL)
        if self.turn == FAULTY_TURN and self.kind.startswith("step"):
            self.fail()
        return super().step(text)

    def fail(self) -> None:
        """Raises, hangs or dies, as the kind says."""
        if self.kind.endswith("dies"):
            os._exit(7)
        if self.kind.endswith("hangs"):
            time.sleep(600)
        raise RuntimeError("by the schedule")
