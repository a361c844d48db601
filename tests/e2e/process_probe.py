"""Two steps of a config in this process, one of several or alone: prints as JSON what it was asked to sample,
and the metrics.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from jetrl_jax.commands.entry import run_entry_point
from jetrl_jax.config.load import load_config
from jetrl_jax.devices import processes
from jetrl_jax.errors import UserError
from jetrl_jax.record.metrics import without_clocks
from jetrl_jax.runs.grpo import GRPOTrainer


def main(words: list[str]) -> None:
    parts = GRPOTrainer(load_config(words[0], words[1:])).parts
    state = parts.programs.init(parts.policy.params)
    asked: list[list[int]] = []
    engines: Any = parts.new_engine()
    with parts.new_rewards() as rewards:
        take = parts.new_step(engines, rewards, state, None)
        for engine in engines.engines:
            submit = engine.submit
            engine.submit = lambda requests, sampling, submit=submit: (
                asked.append([r.id for r in requests]) or submit(requests, sampling)
            )
        rows = [without_clocks(take(step)[0]) for step in (1, 2)]
    engines.close()
    print("PROBE " + json.dumps({"asked": asked, "rows": rows} | exchanged()), flush=True)
    processes.leave()


def exchanged() -> dict[str, Any]:
    """What the exchanges of unequal sizes, and of texts that differ, come to."""
    own = processes.index()
    parts = processes.exchange({"a/b": np.arange(3 * own, dtype=np.int16), "text": np.array("ü" * own)})
    try:
        processes.check_same("colour", f"same\n{'red' if own == 0 else 'blue'}\n")
        message = ""
    except UserError as error:
        message = str(error)
    return {
        "parts": [[part["a/b"].tolist(), str(part["a/b"].dtype), str(part["text"])] for part in parts],
        "values": processes.exchange_json({"own": own}),
        "message": message,
    }


if __name__ == "__main__":
    sys.argv, words = sys.argv[:1], sys.argv[1:]
    run_entry_point(lambda _: main(words))
