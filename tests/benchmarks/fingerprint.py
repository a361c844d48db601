"""SHA-256 of what the program computes, so that a change that should move code and nothing else can show it.

    python tests/benchmarks/fingerprint.py --out before.json      # on the old tree
    python tests/benchmarks/fingerprint.py --against before.json  # on the new one: exit status 1 names each
    difference

    program/...   the lowered StableHLO text of every program of every preset, on a small model of each
                  architecture, exact and not; with the operations of a policy that vLLM samples; on a mesh of
                  eight devices. Names of modules and functions, source locations and names of arguments and
                  results are left out: they say nothing.
    config/...    what --print-config prints for each file of configs/, and docs/config.md as it is generated
    precision/... precision.txt of a run of each preset
    run/...       config.yaml, precision.txt and metrics.jsonl (without times) of three steps of
                  configs/tiny_cpu.yaml, and the bytes of the weights that its last policy publishes

The run is compared on one machine only: without `exact`, sums of a CPU differ from another's.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# Where the product is imported from: all that a move of its files has to change here.
HOMES = {
    "AbstractRun": "jetrl_jax.planning.abstract_run",
    "Controls": "jetrl_jax.rollout.embedded.sampling",
    "ModelConfig": "jetrl_jax.models.config",
    "build_programs": "jetrl_jax.training.programs",
    "build_warm_start_optimizer": "jetrl_jax.training.warm_start",
    "dump_config": "jetrl_jax.config.load",
    "load_config": "jetrl_jax.config.load",
    "load_policy": "jetrl_jax.runs.policy",
    "override_config": "jetrl_jax.config.load",
    "published_weights": "jetrl_jax.runs.policy",
    "reference": "jetrl_jax.commands.config",
    "named_params": "jetrl_jax.precision.parameters",
    "read_metrics": "jetrl_jax.record.metrics",
    "without_clocks": "jetrl_jax.record.metrics",
}
PRESETS = ("fp32", "bf16", "fp16", "fp8_unified", "fp8_forward", "fp8_rollout_only")
ARCHITECTURES = ("qwen3", "qwen2", "llama")
TRAINER_PROGRAMS = ("gradient", "logprobs", "check", "step")
SMALL_RUN = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "batch.microbatch_tokens=76",
    "batch.row_tokens=19",
)
EMBEDDED = ("rollout.engine.slots=8", "rollout.engine.prefill_rows=2")
STEPS = (
    "run.steps=3",
    "warm_start.steps=20",
    "eval.prompts=16",
    "eval.samples=2",
    "checkpoint.every_steps=3",
    "rollout.prompts_per_step=8",
)
DEVICES = "--xla_force_host_platform_device_count=8"
_SYMBOL = re.compile(r"(custom_call\s+)?@(\"[^\"]*\"|[\w.$-]+)")
_LABEL = re.compile(r'(,\s*)?jax\.(result_info|arg_info)\s*=\s*"[^"]*"(\s*,\s*)?')
_LOCATION = re.compile(
    r"^#loc.*$|\s*loc\((?:[^()\"]|\"[^\"]*\"|\((?:[^()\"]|\"[^\"]*\")*\))*\)", re.MULTILINE
)


def home(name: str) -> Any:
    """A name of the product."""
    return getattr(importlib.import_module(HOMES[name]), name)


def digest(text: str | bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def normalized(text: str) -> str:
    """StableHLO text with its symbols numbered in order of appearance, without locations and labels.

    What a custom call names stays: that is the operation.
    """
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return match.group() if match.group(1) else f"@s{numbers.setdefault(match.group(2), len(numbers))}"

    text = _LABEL.sub(
        lambda match: ", " if match.group(1) and match.group(3) else "", _LOCATION.sub("", text)
    )
    return _SYMBOL.sub(number, re.sub(r" \{\}", "", text))


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """One line for each entry that is not the same in both."""
    names = {
        name: ("gone" if name not in after else "new" if name not in before else "differs")
        for name in before | after
    }
    return [f"{name}: {what}" for name, what in names.items() if before.get(name) != after.get(name)]


def sizes(architecture: str) -> Any:
    """A model whose matrices have partial FP8 blocks, except on its heads' side, where a mesh needs whole
    ones.
    """
    return home("ModelConfig")(
        architecture=architecture,
        vocab_size=40,
        hidden_size=256,
        intermediate_size=512,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        max_position_embeddings=128,
        rope_theta=1e4,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        tie_word_embeddings=architecture == "qwen3",
        attention_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        eos_token_ids=(1,),
    )


def settings() -> Iterator[tuple[str, str, list[str], bool]]:
    """(name, architecture, overrides of the config, whether it has an embedded engine) of each family of
    programs.
    """
    for preset in PRESETS:
        for architecture in ARCHITECTURES:
            for exact in ("true", "false"):
                yield (
                    f"{preset}/{architecture}/{'exact' if exact == 'true' else 'fast'}",
                    architecture,
                    [f"precision.preset={preset}", f"numerics.exact={exact}"],
                    True,
                )
    for preset in ("bf16", "fp8_unified"):
        yield (
            f"{preset}/qwen3/exact vllm",
            "qwen3",
            [f"precision.preset={preset}", "rollout.engine=vllm"],
            False,
        )
        mesh = [
            "model={path: sizes}",
            "sharding.data=2",
            "sharding.fsdp=2",
            "sharding.tensor=2",
            "batch.microbatch_tokens=152",
        ]
        yield f"{preset}/qwen3/exact mesh", "qwen3", [f"precision.preset={preset}", *mesh], True
    more = [
        "algorithm.kl_coef=0.01",
        "batch.remat=layer",
        "precision.wgrad_operand=dual",
        "precision.scale_format=power_of_two",
        "numerics.engine_variant=cuda",
    ]
    yield "fp8_unified/qwen3/exact other numerics", "qwen3", more, True


def lowered(run: Any, engine: bool) -> Iterator[tuple[str, Any]]:
    """(name, lowered program) of each program of a run."""
    import jax
    import jax.numpy as jnp

    for name in (*TRAINER_PROGRAMS, *(("prefill", "decode") if engine else ())):
        yield name, run.trace(name).lower()
    state, programs = run.state, run.programs
    yield "publish", programs._publish.trace(state.params).lower()
    yield "freeze", programs._freeze.trace(state.params, state.published).lower()
    yield "add", programs._add.trace(state.params, state.params).lower()
    optimizer = home("build_warm_start_optimizer")(run.config.warm_start)
    warm = home("build_programs")(run.config, run.model, run.plan, run.layout, optimizer)
    start = warm.abstract(state.params)
    factor = None if start.loss_scale is None else start.loss_scale.factor
    tokens = jax.ShapeDtypeStruct((), jnp.float32)
    yield (
        "warm start gradient",
        warm._supervised_gradient.trace(start.params, start.published, factor, run.batch(), tokens).lower(),
    )
    yield "warm start step", warm.trace_update(start)[1].lower()
    if engine:
        rows = run.engine.shapes.prefill_rows
        prompt = jax.ShapeDtypeStruct((rows, run.engine.shapes.prompt_buckets[-1]), jnp.int32)
        kept = run.engine.programs
        weights = list(kept.published_spec.values())
        lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
        prefilled = jax.eval_shape(kept._prefill_program, weights, prompt, lengths)
        slots = run.slots()
        count = slots.token.shape[0]
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        controls = home("Controls")(
            *(jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.bool_, jnp.uint32)),
            jax.ShapeDtypeStruct((run.sizes.vocab_size,), jnp.bool_),
        )
        source, seeds = (jax.ShapeDtypeStruct((count,), dtype) for dtype in (jnp.int32, jnp.uint32))
        yield (
            "insert",
            jax.jit(kept._insert_program).trace(slots, prefilled, source, seeds, scalar, controls).lower(),
        )


def program_prints() -> Iterator[tuple[str, str]]:
    """Of the programs and of precision.txt."""
    load_config, abstract_run = home("load_config"), home("AbstractRun")
    for name, architecture, overrides, engine in settings():
        config = load_config(
            ROOT / "configs" / "tiny_cpu.yaml", [*SMALL_RUN, *(EMBEDDED if engine else ()), *overrides]
        )
        run = abstract_run(config, sizes(architecture), on_gpu=False)
        yield f"precision/{name}", digest(run.plan.table())
        for program, stage in lowered(run, engine and config.sharding.devices == 1):
            yield f"program/{name}/{program}", digest(normalized(stage.as_text()))


def config_prints() -> Iterator[tuple[str, str]]:
    """Of the files of configs/ and of the reference."""
    load_config, dump_config = home("load_config"), home("dump_config")
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        yield f"config/{file.name}", digest(dump_config(load_config(file)))
    # how to write it, which names a module
    page = re.sub(r"^Written by .*$", "", home("reference")(), flags=re.MULTILINE)
    yield "config/reference", digest(page)


def run_prints(directory: Path) -> Iterator[tuple[str, str]]:
    """Of three steps of the main job, by its command."""
    import jax

    run = directory / "run"
    overrides = [f"--set={override}" for override in (*STEPS, f"run.directory={run}")]
    command = [
        sys.executable,
        "-m",
        "jetrl_jax.train",
        "--config",
        str(ROOT / "configs" / "tiny_cpu.yaml"),
        *overrides,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    config = (run / "config.yaml").read_text(encoding="utf-8").replace(str(run), "RUN")
    yield "run/config.yaml", digest(config)
    yield "run/precision.txt", digest((run / "precision.txt").read_bytes())
    rows = [home("without_clocks")(row) for row in home("read_metrics")(run / "metrics.jsonl")]
    for row in rows:
        yield f"run/metrics of step {row['step']}", digest(json.dumps(row, sort_keys=True))
    policy = home("load_policy")(run)
    weights = hashlib.sha256()
    for path, value in home("named_params")(home("published_weights")(policy)):
        weights.update(path.encode())
        for leaf in jax.tree.leaves(value):
            weights.update(jax.device_get(leaf).tobytes())
    yield "run/published weights", weights.hexdigest()


def prints() -> dict[str, str]:
    """Everything."""
    with tempfile.TemporaryDirectory() as directory:
        return dict(config_prints()) | dict(run_prints(Path(directory))) | dict(program_prints())


def main() -> int:
    """Prints the fingerprint; exit status 1 where it is not the given one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it as JSON")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with one that was written")
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()  # before JAX starts
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    found = prints()
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not arguments.against:
        print("\n".join(f"{value}  {name}" for name, value in found.items()))
        return 0
    changed = differences(json.loads(arguments.against.read_text(encoding="utf-8")), found)
    print("\n".join(changed) if changed else f"equal: {len(found)} entries")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
