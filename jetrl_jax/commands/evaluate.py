"""`python -m jetrl_jax evaluate --checkpoint RUN`: held-out accuracy, pass@k and greedy accuracy of a policy.

For a run directory, the run's own config gives task and sizes, and `--step` chooses the checkpoint.  A
Hugging Face directory, or one of PEFT, needs `--config`.  Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json

from jetrl_jax.commands.entry import add_step_argument, command_parser
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.runs.policy_config import is_run, policy_config


def main(argv: list[str]) -> int:
    """Parses the command line, evaluates, prints the metrics."""
    parser = command_parser(
        "evaluate",
        "Evaluate a policy on held-out prompts.",
        "evaluate --checkpoint runs/tiny_cpu --step best",
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
        "--config",
        type=user_path,
        metavar="FILE",
        help="config with the task, needed if DIR is no run",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="change a field, such as eval.prompts=1024",
    )
    arguments = parser.parse_args(argv)

    policy_config(arguments.checkpoint, arguments.overrides, arguments.config)
    if arguments.config is None and not is_run(arguments.checkpoint):
        raise UserError(
            f"evaluate: no task: got {arguments.checkpoint}, which is no run, without --config, expected "
            "--config FILE."
        )

    from jetrl_jax.runs.engines import sampling_engine
    from jetrl_jax.runs.grpo import build_player
    from jetrl_jax.runs.policy import load_policy
    from jetrl_jax.tasks.registry import build_task
    from jetrl_jax.training.evaluation import Evaluator

    policy = load_policy(arguments.checkpoint, arguments.overrides, arguments.config, arguments.step)
    config = policy.config
    rollout = config.rollout
    task = build_task(config.task, config.seed)
    evaluator = Evaluator(
        task,
        policy.tokenizer,
        prompts=config.eval.prompts,
        samples=config.eval.samples,
        temperature=rollout.temperature,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_completion_tokens=rollout.max_completion_tokens,
        seed=config.seed,
        verifier=config.eval_verifier,
        player=build_player(config, task, policy.tokenizer),
    )
    with contextlib.closing(evaluator), contextlib.closing(sampling_engine(policy)) as engine:
        evaluation = evaluator(engine)
    print(json.dumps(evaluation.metrics | {"prompts": len(evaluator.prompts), "step": policy.step}, indent=2))
    return 0
