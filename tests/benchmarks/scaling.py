"""What each device holds and what a training step sends, by number of devices: ``make bench-scaling``.

Compiles the gradient and update programs of a model on meshes of fake CPU devices, without weights, and
prints Markdown
tables: bytes of masters, moments and published codes on one device, XLA's own memory analysis of both
  programs, and the
collectives of one microbatch with their bytes.  Times come only from real devices; none is printed.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import jax
from jaxlib.mlir import ir

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jetrl_jax.config.load import config_from_dict
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.planning.abstract_run import AbstractRun, on_one_device

MIB = 2**20
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
MESHES = (
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (2, 2, 1),
    (1, 4, 1),
    (1, 2, 2),
    (1, 1, 4),
    (2, 4, 1),
    (1, 8, 1),
    (2, 2, 2),
    (1, 1, 8),
)
OTHERS = ("collective_permute", "all_to_all", "collective_broadcast")


def model_config(hidden: int, intermediate: int, layers: int, vocabulary: int) -> ModelConfig:
    """A Qwen3 with heads of 128 channels."""
    heads = hidden // 128
    return ModelConfig(
        "qwen3",
        vocabulary,
        hidden,
        intermediate,
        layers,
        heads,
        heads,
        128,
        4096,
        1e6,
        None,
        1e-6,
        True,
        False,
        True,
        eos_token_ids=(1,),
    )


def run_on(
    sharding: dict[str, int], sizes: ModelConfig, preset: str, shape: tuple[int, int], remat: str
) -> AbstractRun:
    """A run with a microbatch of `shape` [rows, tokens] on each device; devices that split a layer share
    their rows.
    """
    rows, tokens = shape
    fields = {
        "model": {"path": "--sizes"},  # read by nobody; a path says that the sizes are not the config's
        "precision": {"preset": preset},
        "numerics": {"exact": False},
        "sharding": sharding,
        "rollout": {"max_prompt_tokens": tokens // 2, "max_completion_tokens": tokens - tokens // 2},
        "batch": {"microbatch_tokens": rows * tokens, "logprob_chunk_tokens": tokens, "remat": remat},
    }
    return AbstractRun(config_from_dict(fields), sizes, on_gpu=False)


def collectives(lowered: Any) -> dict[str, tuple[int, int]]:
    """Kind -> (count, bytes of the results on one device), as the program is written; a backend may widen
    types.
    """
    found = dict.fromkeys((*COLLECTIVES, *OTHERS), (0, 0))

    def visit(operation: Any) -> Any:
        kind = operation.name.removeprefix("stablehlo.")
        if kind in found:
            types = [result.type for result in operation.results]
            size = sum(math.prod(one.shape) * max(one.element_type.width, 8) // 8 for one in types)
            found[kind] = (found[kind][0] + 1, found[kind][1] + size)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    return found


def report(run: AbstractRun) -> list[str]:
    """Cells of one row."""
    state, gradient, *update = (
        run.state,
        *(run.trace(program).lower() for program in ("gradient", "check", "step")),
    )
    held = [on_one_device(part) for part in (state.params, state.opt_state, state.published)]
    held += [program.compile().memory_analysis().temp_size_in_bytes for program in (gradient, *update)]
    sent = collectives(gradient)
    cells = [f"{size / MIB:.1f}" for size in held]
    cells += [
        f"{count}: {size / MIB:.1f}" if count else "0" for count, size in (sent[kind] for kind in COLLECTIVES)
    ]
    return [*cells, str(sum(sent[kind][0] for kind in OTHERS))]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="fp8_unified")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs=4,
        default=[1024, 3072, 2, 8192],
        metavar=("HIDDEN", "MLP", "LAYERS", "VOCAB"),
    )
    parser.add_argument(
        "--shape",
        type=int,
        nargs=2,
        default=[1, 256],
        metavar=("ROWS", "TOKENS"),
        help="of a microbatch on each device",
    )
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print(
        f"jax {jax.__version__}, {options.preset}, sizes {options.sizes}, microbatch {options.shape} on "
        "each device; MiB on one device\n"
    )
    heads = [
        "data × fsdp × tensor",
        "remat",
        "masters",
        "moments",
        "published",
        "gradient temp",
        "check temp",
        "step temp",
    ]
    heads += ["all-gather", "reduce-scatter", "all-reduce", "others"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for data, fsdp, tensor in MESHES:
        for remat in ("none", "layer"):
            sharding = {"data": data, "fsdp": fsdp, "tensor": tensor}
            cells = report(
                run_on(sharding, model_config(*options.sizes), options.preset, options.shape, remat)
            )
            print(f"| {data} × {fsdp} × {tensor} | {remat} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
