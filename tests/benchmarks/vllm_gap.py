"""How far the trainer and the real vLLM are apart on random policies, seed by seed: ``make bench-vllm``.

Two layers, hidden size 256, block FP8; the tokens are sampled by vLLM.  Prints for each policy the share of tokens within
1e-5, mean and largest |Δ logprob| and k3 of the FP8 trainer, and of a BF16 trainer beside the same rollout.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bridge.engine.common import set_environment
from jetrl_jax.rollout.engine import Request
from tests.parity.small_policy import SmallPolicy
from tests.parity.vllm_policy import QWEN2, QWEN3, SAMPLING, SETTINGS, Gap, Scorer, fp8_paths, requests


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of the random weights")
    parser.add_argument("--requests", type=int, default=48, help="completions of each policy")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="prompts of so many tokens, four of them")
    parser.add_argument("--vllm-operations", action="store_true", help="keep vLLM's own attention and norms (numerics.exact: false)")
    options = parser.parse_args()
    set_environment(True)
    from bridge.engine.vllm_in_process import InProcessEngine

    print(f"{platform.processor() or platform.machine()}\n\n| policy | seed | trainer | tokens | within 1e-5 | mean | largest | k3 |")
    print("|---|---|---|---|---|---|---|---|")
    for config in (QWEN3, QWEN2):
        for seed in options.seeds:
            policy, settings, asked = SmallPolicy("fp8_unified", config, seed=seed), SETTINGS, requests(options.requests)
            if options.context:
                config = dataclasses.replace(config, max_position_embeddings=options.context + 64)
                policy = SmallPolicy("fp8_unified", config, seed=seed)
                settings = dataclasses.replace(SETTINGS, max_prompt_tokens=options.context, max_num_seqs=4)
                ids = np.random.default_rng(seed).integers(3, config.vocab_size, (4, options.context)).tolist()
                asked = [Request(i, prompt, i) for i, prompt in enumerate(ids)]
            engine = InProcessEngine(config, fp8_paths(policy), dataclasses.replace(settings, exact=not options.vllm_operations))
            engine.load_weights(policy.published, 0)
            trajectories = engine.generate(asked, SAMPLING)
            engine.close()
            rollout = np.concatenate([t.rollout_logprobs for t in trajectories])
            for name, side in (("FP8", policy), ("BF16", SmallPolicy("bf16", config, seed=seed))):
                gap = Gap.of(Scorer(side, settings)(side.published, trajectories), rollout)
                figures = f"{gap.tokens} | {gap.equal:.1%} | {gap.mean:.1e} | {gap.largest:.1e} | {gap.k3:.1e}"
                print(f"| {config.architecture} | {seed} | {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
