"""How far the trainer and the real vLLM are apart on random policies, seed by seed: ``make bench-vllm``.

Two layers, hidden size 256; every token is sampled by vLLM and scored again by the trainer:

    ours           vLLM on the trainer's FP8 codes                        trainer: the same codes, the engine's rounding points
    formula only   the same                                               the same codes, other roundings (one in the norms, FP32 sums)
    mixed          the same                                               BF16
    BF16 floor     vLLM on the same policy in BF16                        BF16

Prints of each the share of tokens within 1e-5, mean and largest |Δ logprob| and k3.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bridge.engine.common import EngineSettings, set_environment
from jetrl_jax.models.hf_config import ModelConfig
from jetrl_jax.rollout.engine import Request
from tests.parity.small_policy import SmallPolicy
from tests.parity.vllm_policy import QWEN2, QWEN3, SAMPLING, SETTINGS, Gap, Scorer, fp8_paths, requests

Asked = tuple[EngineSettings, list[Request]]


def asked(config: ModelConfig, seed: int, count: int, context: int | None) -> tuple[ModelConfig, Asked]:
    """(config, (settings, requests)): `count` short prompts, or four of `context` tokens."""
    if not context:
        return config, (SETTINGS, requests(count))
    config = dataclasses.replace(config, max_position_embeddings=context + 64)
    ids = np.random.default_rng(seed).integers(3, config.vocab_size, (4, context)).tolist()
    settings = dataclasses.replace(SETTINGS, max_prompt_tokens=context, max_num_seqs=4)
    return config, (settings, [Request(i, prompt, i) for i, prompt in enumerate(ids)])


def gaps(policy: SmallPolicy, trainers: dict[str, SmallPolicy], config: ModelConfig, what: Asked, how: dict[str, bool]) -> dict[str, Gap]:
    """The gap of each trainer to vLLM, which samples `policy`."""
    from bridge.engine.vllm_in_process import InProcessEngine

    settings, prompts = what
    engine = InProcessEngine(config, fp8_paths(policy), dataclasses.replace(settings, **how))
    engine.load_weights(policy.published, 0)
    trajectories = engine.generate(prompts, SAMPLING)
    engine.close()
    rollout = np.concatenate([t.rollout_logprobs for t in trajectories])
    return {name: Gap.of(Scorer(side, settings)(side.published, trajectories), rollout) for name, side in trainers.items()}


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of the random weights")
    parser.add_argument("--requests", type=int, default=48, help="completions of each policy")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="prompts of so many tokens, four of them")
    parser.add_argument("--vllm-operations", action="store_true", help="keep vLLM's own attention and norms (numerics.exact: false)")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile (vllm.enforce_eager: false)")
    options = parser.parse_args()
    set_environment(True, eager=not options.compiled)
    how = {"exact": not options.vllm_operations, "enforce_eager": not options.compiled}
    print(f"{platform.processor() or platform.machine()}\n\n| policy | seed | pair | tokens | within 1e-5 | mean | largest | k3 |")
    print("|---|---|---|---|---|---|---|---|")
    for architecture in (QWEN3, QWEN2):
        for seed in options.seeds:
            config, what = asked(architecture, seed, options.requests, options.context)
            fp8, bf16 = (SmallPolicy(preset, config, seed=seed) for preset in ("fp8_unified", "bf16"))
            formula = SmallPolicy("fp8_unified", config, seed=seed, exact=False, engine_variant="cuda")
            found = gaps(fp8, {"ours": fp8, "formula only": formula, "mixed": bf16}, config, what, how)
            found |= gaps(bf16, {"BF16 floor": bf16}, config, what, how)
            for name, gap in found.items():
                figures = f"{gap.tokens} | {gap.equal:.1%} | {gap.mean:.1e} | {gap.largest:.1e} | {gap.k3:.1e}"
                print(f"| {config.architecture} | {seed} | {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
