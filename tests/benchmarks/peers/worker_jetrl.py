"""Our trainer on the common job; flavors are a precision preset, and one ending in `-fast` is not exact
(`numerics.exact: false`).
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import job
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # where the package is not installed

from jetrl_jax import GRPOTrainer, RunConfig
from jetrl_jax.config.load import config_from_dict
from jetrl_jax.rollout.types import Request, SamplingParams

WORDS = 4096


class JobTokenizer:
    """The common tokenizer in the form our trainer calls it; nothing stops a completion before its full
    length.
    """

    eos_ids: tuple[int, ...] = ()
    pad_id = 0

    def __init__(self, setting: job.Setting) -> None:
        self._tokenizer = job.build_tokenizer(setting)
        self.vocab_size = self._tokenizer.get_vocab_size() - 2  # padding and stop are not the model's

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return self._tokenizer.encode(text).ids

    encode_prompt = encode

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return self._tokenizer.decode(list(ids))

    def fingerprint(self) -> str:
        """Fixed: there is one such tokenizer."""
        return "peers"

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer.json."""
        self._tokenizer.save(str(Path(directory) / "tokenizer.json"))


def reward(prompts: list[str], completions: list[str], answers: list[str], **_: Any) -> list[float]:
    """Rewards in the form our trainer calls them."""
    return [
        job.reward_of(completion, expected) for completion, expected in zip(completions, answers, strict=True)
    ]


def build_config(setting: job.Setting, flavor: str) -> RunConfig:
    """The common job as a config."""
    preset, _, fast = flavor.partition("-")
    tokens = setting.prompt_tokens + setting.completion_tokens
    sizes = {
        "hidden_size": setting.hidden_size,
        "intermediate_size": setting.intermediate_size,
        "num_layers": setting.num_layers,
        "num_heads": setting.num_heads,
        "num_kv_heads": setting.num_heads,
        "head_dim": setting.head_dim,
    }
    return config_from_dict(
        {
            "model": {"path": setting.model} if setting.model else sizes,
            "precision": {"preset": preset},
            "numerics": {"exact": not fast},
            "rollout": {
                "prompts_per_step": setting.prompts,
                "group_size": setting.group_size,
                "max_prompt_tokens": setting.prompt_tokens,
                "max_completion_tokens": setting.completion_tokens,
                "engine": {
                    "kind": "jax",
                    "slots": setting.sequences,
                    "prefill_rows": setting.prompts,
                    "decode_chunk_tokens": setting.completion_tokens,
                },
            },
            "optimizer": {"learning_rate": setting.learning_rate},
            "batch": {"microbatch_tokens": setting.sequences * tokens},
        }
    )


def main() -> None:
    """Build, introduce, train until told to quit."""
    channel, options = job.Channel(), job.arguments()
    setting = job.SETTINGS[options.setting]
    drawn = list(islice(job.words(setting), WORDS))
    records = [{"prompt": job.prompt_of(word), "answer": word[::-1]} for word in drawn]
    config = build_config(setting, options.flavor)
    run = GRPOTrainer(config, tokenizer=JobTokenizer(setting), dataset=records, reward_functions=[reward])
    engine, rewards = run.parts.new_engine(), run.parts.new_rewards()
    take = run.parts.new_step(engine, rewards, run.parts.programs.init(run.policy.params), None)
    prompts = [
        run.policy.tokenizer.encode(job.prompt_of(word))
        for word in islice(job.words(setting, 1), setting.prompts)
    ]
    sampling = SamplingParams(
        temperature=1.0, max_tokens=setting.completion_tokens, stop_token_ids=JobTokenizer.eos_ids, seed=0
    )

    def decode() -> int:
        requests = [
            Request(i, np.asarray(prompts[i // setting.group_size], np.int32), seed=i)
            for i in range(setting.sequences)
        ]
        trajectories = engine.generate(requests, sampling)
        assert all(len(trajectory.completion_ids) == setting.completion_tokens for trajectory in trajectories)
        return setting.sequences * setting.completion_tokens

    gate = job.StepGate(channel, setting, lambda: jax.block_until_ready(take.state), decode)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.policy.params))
    job.introduce(channel, parameters, {"jax": jax.__version__}, setting)
    rates: dict[str, float] = {}
    for step in range(1, 10**6):
        gate.between_steps(**rates)
        start = time.perf_counter()
        row, _ = take(step)
        jax.block_until_ready(take.state)  # the update of the masters ends after the step
        trained_s = time.perf_counter() - start - row["time/rollout_s"]
        rates = {
            "rollout_tokens_per_s": row["rate/rollout_tokens_per_s"],
            "train_tokens_per_s": row["count/train_tokens"] / trained_s,
        }


if __name__ == "__main__":
    main()
