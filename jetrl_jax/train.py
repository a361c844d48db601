"""The main command, `python -m jetrl_jax.train --config C [--set a.b=c ...]`: a GRPO run from a config.

Exit status: 0 finished, 2 bad input (nothing was written), 3 stopped by its own rules, 4 another process of
the run was lost, 130 or 143 stopped by SIGINT or SIGTERM after saving.
"""

from __future__ import annotations

import argparse
import signal

from jetrl_jax.commands.entry import (
    add_config_arguments,
    command_parser,
    config_from_arguments,
    run_entry_point,
)
from jetrl_jax.config.load import dump_config, override_config
from jetrl_jax.config.run_config import RunConfig

PROFILED_STEPS = 3


def main(argv: list[str]) -> int:
    """Parses the command line, trains, prints the outcome; returns the exit status."""
    parser = command_parser(
        "train",
        "Train a language model with GRPO through one FP8 flow.",
        "train --config configs/tiny_cpu.yaml --set run.directory=runs/mine --set seed=1",
        "train --config configs/tiny_cpu.yaml --set run.directory=runs/mine --set seed=1 --resume",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--resume", action="store_true", help="continue from the latest checkpoint of run.directory"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="build everything, compile and run one step, write nothing"
    )
    parser.add_argument(
        "--profile", action="store_true", help=f"trace {PROFILED_STEPS} steps with jax.profiler"
    )
    parser.add_argument(
        "--verify-resume",
        type=int,
        metavar="K",
        help="check that K steps, a stop, a resume and K more equal 2K",
    )
    arguments = parser.parse_args(argv)
    config = config_from_arguments(arguments)
    if arguments.profile:
        config = override_config(config, [f"run.profile_steps={PROFILED_STEPS}"])
    if arguments.print_config:
        print(dump_config(config), end="")
        return 0
    if arguments.verify_resume is not None:
        from jetrl_jax.commands.verify_resume import verify_resume

        print("\n".join(verify_resume(config, arguments.verify_resume)))
        return 0
    if config.distributed.on:
        from jetrl_jax.commands.supervise import supervise

        return supervise(config.distributed, lambda: _train(config, arguments))
    return _train(config, arguments)


def _train(config: RunConfig, arguments: argparse.Namespace) -> int:
    from jetrl_jax.runs.grpo import GRPOTrainer  # JAX is loaded here, after the config has been checked

    trainer = GRPOTrainer(config, resume=arguments.resume)
    if arguments.dry_run:
        outcome = trainer.dry_run()
        trainer.console.message(
            f"dry run: one step in {outcome['seconds']:.1f} s, compilation included; nothing was written"
        )
        return 0
    outcome = trainer.train()
    if outcome["stopped_by"]:
        return 128 + signal.Signals[outcome["stopped_by"]].value
    before, after = outcome["before"], outcome["after"]
    trainer.console.message(
        f"finished {outcome['steps']} steps in {outcome['directory']}: held-out accuracy "
        f"{before['eval/accuracy']:.3f} -> "
        f"{after['eval/accuracy']:.3f}, greedy {before['eval/greedy_accuracy']:.3f} -> "
        f"{after['eval/greedy_accuracy']:.3f}"
    )
    return 0


if __name__ == "__main__":
    run_entry_point(main)
