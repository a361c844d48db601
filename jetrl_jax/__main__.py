"""`python -m jetrl_jax COMMAND`: all commands except training, which is `python -m jetrl_jax.train`.

Only the module of the requested command is imported.
"""

from __future__ import annotations

import difflib
from importlib import import_module

from jetrl_jax.commands.entry import run_entry_point
from jetrl_jax.errors import UserError

COMMANDS = {
    "evaluate": "held-out accuracy, pass@k and greedy accuracy of a policy",
    "generate": "talk to a trained policy",
    "report": "one HTML page about a run, or about several runs overlaid",
    "mismatch": "where two precision flows diverge on the same tokens, operator by operator",
    "plan": "does a run fit on given devices, and how much will it send; nothing is allocated",
    "export": "a policy as a Hugging Face checkpoint directory, in BF16 or FP8",
    "parity": "the same tokens scored by the trainer and by vLLM",
    "check-engine": "the installed vLLM against the golden vectors of the contract",
    "verify-resume": "does a run that is stopped and resumed equal an uninterrupted one",
    "config": "every field of a config with its type, default and meaning; or a config to start from: "
    "config tiny_cpu",
}
USAGE = "usage: python -m jetrl_jax COMMAND [...]"


def listing() -> str:
    """The text that --help prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {meaning}" for name, meaning in COMMANDS.items()]
    train = f"  {'(train)'.ljust(width)}  a run from a config: python -m jetrl_jax.train --config FILE"
    return "\n".join([USAGE, "", train, *lines, "", "COMMAND --help lists its options and shows an example."])


def main(argv: list[str]) -> int | None:
    """Runs the command named by the first argument; returns its exit status."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(listing())
        return 0 if argv else 2
    if argv[0].replace("_", "-") not in COMMANDS:
        close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else " A run is trained by python -m jetrl_jax.train."
        raise UserError(
            f"python -m jetrl_jax: no such command: got {argv[0]!r}, expected one of "
            f"{', '.join(COMMANDS)}.{hint}"
        )
    module = import_module(f"jetrl_jax.commands.{argv[0].replace('-', '_')}")
    status: int | None = module.main(argv[1:])
    return status


if __name__ == "__main__":
    run_entry_point(main)
