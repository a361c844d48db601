"""`python -m jetrl_jax export --run DIR --out DIR --format bf16|fp8`: writes a Hugging Face checkpoint.

`bf16` (and fp16, fp32) writes the rounded masters.  `fp8` writes the codes and scales that the run's rollout
and forward multiply, as `weight` and `weight_scale_inv`.  vLLM, SGLang and transformers load both.  `--step`
chooses a checkpoint of the run: a number, best or last.

Of a policy with adapters the base is written so, into `OUT/base`, and the adapters as a PEFT directory,
`OUT/adapter`.  `--merge` writes one checkpoint of both instead.  It is refused for fp8: what adapters add is
often less than half a step between two codes, and would vanish.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bridge.hf.directory import check_place
from bridge.hf.peft import ADAPTER
from jetrl_jax.commands.entry import add_step_argument, command_parser
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.runs.policy_config import ADAPTER_DIRECTORY, BASE_DIRECTORY, is_run, policy_config

FORMATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(
        "export",
        "Write a policy as a Hugging Face checkpoint directory.",
        "export --run runs/tiny_cpu --out out_fp8 --format fp8",
    )
    parser.add_argument(
        "--run",
        type=user_path,
        required=True,
        metavar="DIR",
        help="run directory, or a Hugging Face directory",
    )
    add_step_argument(parser)
    parser.add_argument(
        "--out",
        type=user_path,
        required=True,
        metavar="DIR",
        help="where the checkpoint goes; new, empty or an earlier checkpoint",
    )
    parser.add_argument(
        "--format", choices=[*FORMATS, "fp8"], default="bf16", help="format of the stored weights"
    )
    parser.add_argument("--merge", action="store_true", help="add the adapters to the weights; not in fp8")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="largest file, in 10^9 bytes")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier checkpoint in --out")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="change a field: precision.preset=fp8_unified",
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Parses the command line, reads the policy, writes the directory."""
    arguments = _arguments(argv)
    if not arguments.max_shard_gb > 0:
        raise UserError(
            f"export: bad size: got --max-shard-gb {arguments.max_shard_gb}, expected a positive number."
        )
    adapted = policy_config(arguments.run, arguments.overrides).lora is not None
    if arguments.merge and (not adapted or arguments.format == "fp8"):
        got = "a policy without adapters" if not adapted else "--format fp8, whose codes would hide adapters"
        raise UserError(
            f"export: cannot merge: got --merge with {got}, expected another format or no --merge."
        )

    from bridge.hf.write import save_checkpoint, save_published
    from jetrl_jax.precision.formats import is_adapter
    from jetrl_jax.precision.parameters import named_params, select
    from jetrl_jax.runs.policy import load_policy, published_weights

    apart = adapted and not arguments.merge
    out = arguments.out / BASE_DIRECTORY if apart else arguments.out
    _check_places(arguments.out, out, apart, arguments.overwrite)
    policy = load_policy(arguments.run, arguments.overrides, step=arguments.step)
    options = {
        "tokenizer": policy.tokenizer,
        "max_shard_bytes": arguments.max_shard_gb * 1e9,
        "overwrite": arguments.overwrite,
    }
    config = policy.model.config
    if arguments.format == "fp8":
        weights = select(published_weights(policy), lambda path: not is_adapter(path))
        path = save_published(out, config, weights, **options)
    else:
        own = {path: value for path, value in named_params(policy.params) if not is_adapter(path)}
        parameters = policy.merged() if arguments.merge else own
        path = save_checkpoint(out, config, parameters, dtype=FORMATS[arguments.format], **options)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    source = "" if policy.step is None else f" of step {policy.step}"
    if apart:
        adapter = policy.save_adapter(
            arguments.out / ADAPTER_DIRECTORY, str(path), overwrite=arguments.overwrite
        )
        print(f"adapters{source} in {adapter}, beside their base:")
    print(
        f"{arguments.format} checkpoint{source} in {path}: {size:,} bytes of weights, verified after writing"
    )
    return 0


def _check_places(asked: Path, out: Path, apart: bool, overwrite: bool) -> None:
    """Raises UserError, before the policy is read, if a directory cannot be written or belongs to a run.

    asked: --out; out: the checkpoint's directory; apart: whether adapters come beside it.
    """
    from bridge.hf.write import CHECKPOINT

    beside = sorted({path.name for path in out.parent.glob("*")} - {out.name, ADAPTER_DIRECTORY})
    if beside and (apart or (out.name == BASE_DIRECTORY and is_run(out.parent))):
        raise UserError(
            f"export: would mix with other files: got --out {asked} with {out} beside {beside}, expected a "
            "new directory or an earlier export."
        )
    check_place(out, CHECKPOINT, overwrite)
    if apart:
        check_place(asked / ADAPTER_DIRECTORY, ADAPTER, overwrite)
