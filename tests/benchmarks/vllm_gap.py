"""How far the trainer and the real vLLM are apart on random policies, seed by seed: ``make bench-vllm``.

Two layers, hidden size 256; every token is sampled by vLLM and scored again by the trainer:

    ours           vLLM on the trainer's FP8 codes                        trainer: the same codes, the
                   engine's rounding points
    formula only   the same                                               the same codes, other roundings (in
                   the norms, FP32 sums)
    mixed          the same                                               BF16
    BF16 floor     vLLM on the same policy in BF16                        BF16
    both           vLLM with attention in BF16 and the MLP in FP8         the same codes and BF16 weights

vLLM runs with the trainer's exact operations and, where asked to, with its own, eager or compiled.  Prints of
each the share of tokens within 1e-5, mean and largest |Δ logprob| and k3, below the card or the processor and
the instruction set that torch takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import platform
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # vLLM is on the same GPU

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bridge.vllm.settings import EngineSettings, set_environment
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.rollout.types import Request
from tests.parity.small_policy import SmallPolicy
from tests.parity.vllm_policy import (
    QWEN2,
    QWEN3,
    SAMPLING,
    SETTINGS,
    Gap,
    Scorer,
    fp8_paths,
    requests,
    sampled_policy,
)
from tests.sections import changed

ARCHITECTURES = {"qwen3": QWEN3, "qwen2": QWEN2}
Asked = tuple[EngineSettings, list[Request]]


def asked(config: ModelConfig, seed: int, count: int, context: int | None) -> tuple[ModelConfig, Asked]:
    """(config, (settings, requests)): `count` short prompts, or four of `context` tokens."""
    if not context:
        return config, (SETTINGS, requests(count))
    config = dataclasses.replace(config, max_position_embeddings=context + 64)
    ids = np.random.default_rng(seed).integers(3, config.vocab_size, (4, context)).tolist()
    settings = changed(SETTINGS, max_prompt_tokens=context, max_num_seqs=4)
    return config, (settings, [Request(i, prompt, i) for i, prompt in enumerate(ids)])


def gaps(
    policy: SmallPolicy, trainers: dict[str, SmallPolicy], what: Asked, how: dict[str, bool]
) -> dict[str, Gap]:
    """The gap of each trainer to vLLM, which samples `policy`; how: exact, enforce_eager."""
    from bridge.vllm.in_process import InProcessEngine

    settings, prompts = what
    settings = changed(settings, engine_variant=policy.numerics.engine_variant, **how)
    engine = InProcessEngine(policy.model.config, fp8_paths(policy), settings)
    engine.load(policy.published, 0)
    trajectories = engine.generate(prompts, SAMPLING)
    engine.close()
    del engine
    gc.collect()  # what it held of a GPU is there for the next
    rollout = np.concatenate([t.sampled_logprobs for t in trajectories])
    return {
        name: Gap.of(Scorer(side, settings)(side.published, trajectories), rollout)
        for name, side in trainers.items()
    }


def rows(
    architecture: ModelConfig, seed: int, count: int, context: int | None, how: dict[str, bool]
) -> dict[str, Gap]:
    """All pairs of one random policy and one way to run vLLM;
    rounding points are those of vLLM's platform.
    """
    config, what = asked(architecture, seed, count, context)
    here, elsewhere = ("native", "cuda") if jax.default_backend() == "cpu" else ("cuda", "native")
    fp8, bf16 = (
        sampled_policy(preset, config, seed=seed, engine_variant=here) for preset in ("fp8_unified", "bf16")
    )
    both = sampled_policy(
        "fp8_unified", config, seed=seed, engine_variant=here, overrides=[("*.self_attn.*", "bf16")]
    )
    formula = sampled_policy("fp8_unified", config, seed=seed, exact=False, engine_variant=elsewhere)
    found = gaps(fp8, {"ours": fp8, "formula only": formula, "mixed": bf16}, what, how)
    return found | gaps(bf16, {"BF16 floor": bf16}, what, how) | gaps(both, {"both": both}, what, how)


def processor() -> str:
    """The CPU's name where the system tells it, and the instruction set that torch takes."""
    import torch  # here, so that the command line can be read without it

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of the random weights")
    parser.add_argument(
        "--architectures",
        nargs="+",
        choices=list(ARCHITECTURES),
        default=list(ARCHITECTURES),
        help="default: all",
    )
    parser.add_argument("--requests", type=int, default=48, help="completions of each policy")
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help="prompts of so many tokens, four of them"
    )
    parser.add_argument(
        "--vllm-operations",
        action="store_true",
        help="also with vLLM's own operations (numerics.exact: false)",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="also compiled and, on a GPU, in CUDA graphs (enforce_eager: false)",
    )
    options = parser.parse_args()
    on_cpu = jax.default_backend() == "cpu"
    set_environment(on_cpu, eager=not options.compiled)
    ways = {"our operations": {"exact": True}}
    ways |= {"its own": {"exact": False}} if options.vllm_operations else {}
    ways |= {"its own, compiled": {"exact": False, "enforce_eager": False}} if options.compiled else {}
    where = processor() if on_cpu else jax.devices()[0].device_kind
    print(f"{where}\n\n| policy | seed | vLLM | pair | tokens | within 1e-5 | mean | largest | k3 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for architecture in (ARCHITECTURES[name] for name in options.architectures):
        for seed in options.seeds:
            for way, how in ways.items():
                for name, gap in rows(architecture, seed, options.requests, options.context, how).items():
                    figures = (
                        f"{gap.tokens} | {gap.equal:.1%} | {gap.mean:.1e} | {gap.largest:.1e} | {gap.k3:.1e}"
                    )
                    print(
                        f"| {architecture.architecture} | {seed} | {way} | {name} | {figures} |", flush=True
                    )


if __name__ == "__main__":
    main()
