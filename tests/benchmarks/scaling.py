"""What each device holds and what a training step sends, by number of devices: ``make bench-scaling``.

Compiles the gradient and update programs of a model on meshes of fake CPU devices, without weights, and prints Markdown
tables: bytes of masters, moments and published codes on one device, XLA's own memory analysis of both programs, and the
collectives of one microbatch with their bytes.  Times come only from real devices; none is printed.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxlib.mlir import ir

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jetrl_jax.config import RunConfig
from jetrl_jax.config_sharding import ShardingSection
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.hf_config import ModelConfig
from jetrl_jax.precision import Numerics, PrecisionPlan, named_params
from jetrl_jax.rl.algorithm import resolve_algorithm
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.rl.losses import Denominators
from jetrl_jax.sharding import Layout
from jetrl_jax.training.optimizer import build_optimizer
from jetrl_jax.training.step import PolicyPrograms, TrainState

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
        "qwen3", vocabulary, hidden, intermediate, layers, heads, heads, 128, 4096, 1e6, None, 1e-6, True, False, True, eos_token_ids=(1,)
    )


def lowered(
    config: ModelConfig, section: ShardingSection, preset: str, shape: tuple[int, int], remat: bool
) -> tuple[TrainState, Any, tuple[Any, Any]]:
    """(abstract state, lowered gradient, lowered check and step) for a microbatch of `shape` [rows, tokens] on each device.

    Devices that split a layer share their rows.
    """
    rows, tokens = shape
    numerics = Numerics(exact=False)
    model = nnx.eval_shape(lambda: Decoder(config, numerics, rngs=nnx.Rngs(0), remat=remat))
    params = nnx.state(model, nnx.Param)
    plan = PrecisionPlan([path for path, _ in named_params(params)], preset)
    layout = Layout(section, plan, model)
    run = RunConfig()
    programs = PolicyPrograms(model, plan, build_optimizer(run.optimizer, 10), temperature=1.0, chunk_tokens=tokens, layout=layout)
    state = programs.abstract(params)
    shape = (rows * section.row_shards, tokens)
    whole, number = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    mask = jax.ShapeDtypeStruct(shape, jnp.bool_)
    batch = TrainBatch(whole, whole, whole, mask, number, number, whole, number)
    count = jax.ShapeDtypeStruct((), jnp.float32)
    algorithm = resolve_algorithm(run.algorithm, tokens, run.correction)
    return state, programs.lower_gradient(state, batch, Denominators(count, count, count), algorithm), programs.lower_update(state)


def collectives(lowered: Any) -> dict[str, tuple[int, int]]:
    """Kind -> (count, bytes of the results on one device), as the program is written; a backend may widen types."""
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


def on_one_device(tree: Any) -> int:
    """Bytes of a tree of abstract arrays with shardings on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def report(state: TrainState, gradient: Any, update: tuple[Any, Any]) -> list[str]:
    """Cells of one row."""
    held = [on_one_device(part) for part in (state.params, state.opt_state, state.published)]
    held += [program.compile().memory_analysis().temp_size_in_bytes for program in (gradient, *update)]
    sent = collectives(gradient)
    cells = [f"{size / MIB:.1f}" for size in held]
    cells += [f"{count}: {size / MIB:.1f}" if count else "0" for count, size in (sent[kind] for kind in COLLECTIVES)]
    return [*cells, str(sum(sent[kind][0] for kind in OTHERS))]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="fp8_unified")
    parser.add_argument("--sizes", type=int, nargs=4, default=[1024, 3072, 2, 8192], metavar=("HIDDEN", "MLP", "LAYERS", "VOCAB"))
    parser.add_argument("--shape", type=int, nargs=2, default=[1, 256], metavar=("ROWS", "TOKENS"), help="of a microbatch on each device")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"jax {jax.__version__}, {options.preset}, sizes {options.sizes}, microbatch {options.shape} on each device; MiB on one device\n")
    heads = ["data × fsdp × tensor", "remat", "masters", "moments", "published", "gradient temp", "check temp", "step temp"]
    heads += ["all-gather", "reduce-scatter", "all-reduce", "others"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for data, fsdp, tensor in MESHES:
        for remat in (False, True):
            section = ShardingSection(data=data, fsdp=fsdp, tensor=tensor)
            cells = report(*lowered(model_config(*options.sizes), section, options.preset, tuple(options.shape), remat))
            print(f"| {data} × {fsdp} × {tensor} | {'layer' if remat else 'none'} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
