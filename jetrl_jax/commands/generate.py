"""`python -m jetrl_jax generate --checkpoint DIR --prompt TEXT`: talk to a trained policy.

DIR is a run directory (`--step` chooses the checkpoint), a Hugging Face directory, or one of PEFT.  Without
--prompt, each line of standard input is a prompt, answered as it arrives.
"""

from __future__ import annotations

import sys

from jetrl_jax.commands.entry import add_step_argument, command_parser
from jetrl_jax.config.types import user_path
from jetrl_jax.runs.policy_config import policy_config


def main(argv: list[str]) -> int:
    """Parses the command line and prints completions to standard output."""
    parser = command_parser(
        "generate",
        "Complete prompts with a trained policy.",
        "generate --checkpoint runs/tiny_cpu --prompt jetrl= --samples 4",
    )
    parser.add_argument(
        "--checkpoint",
        type=user_path,
        required=True,
        metavar="DIR",
        help="run directory, Hugging Face directory, or one of PEFT",
    )
    add_step_argument(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="prompt (repeatable); without it, lines of standard input",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=None,
        metavar="N",
        help="longest completion, in tokens (default: the run's)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=None,
        help="sampling temperature, 0 is greedy (default: the run's)",
    )
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="completions of each prompt (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling noise (default: 0)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="change a field of the run's config",
    )
    arguments = parser.parse_args(argv)
    for name, value, least in (
        ("--max-tokens", arguments.max_tokens, 1),
        ("--samples", arguments.samples, 1),
        ("--seed", arguments.seed, 0),
    ):
        if value is not None and value < least:
            parser.error(f"{name}: got {value}, expected at least {least}")
    if arguments.temperature is not None and arguments.temperature < 0:
        parser.error(f"--temperature: got {arguments.temperature}, expected at least 0")

    overrides = list(arguments.overrides)
    if arguments.max_tokens is not None:
        overrides.append(f"rollout.max_completion_tokens={arguments.max_tokens}")
    if arguments.temperature:
        overrides.append(f"rollout.temperature={arguments.temperature}")
    policy_config(arguments.checkpoint, overrides)

    from jetrl_jax.runs.policy import load_policy
    from jetrl_jax.runs.sampler import PolicySampler

    sampler = PolicySampler(load_policy(arguments.checkpoint, overrides, step=arguments.step))
    prompts = arguments.prompt if arguments.prompt is not None else (line.rstrip("\n") for line in sys.stdin)
    for prompt in prompts:
        for text in sampler(
            prompt, arguments.samples, seed=arguments.seed, greedy=arguments.temperature == 0
        ):
            print(text, flush=True)
    return 0
