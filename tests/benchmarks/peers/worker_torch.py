"""transformers' generate and a plain PyTorch training step on the common job, with a real model; started by
`compare.py` with the Python of `.venv-trl`.

A step samples every completion by `generate`, takes its rewards, and trains on the prompts and completions:
forward, log-probabilities of the completions, a policy-gradient loss, backward, AdamW.  Masters are FP32;
`bfloat16` trains under autocast, as TRL does, and samples from a copy of the model in BF16.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import copy
import time
from itertools import islice
from typing import Any

import job
import torch
import transformers


class Trainer:
    """The model with its optimizer."""

    def __init__(self, setting: job.Setting, flavor: str) -> None:
        torch.manual_seed(0)
        self.setting = setting
        self.tokenizer = job.hf_tokenizer(setting)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32)
        self.narrow = flavor == "bfloat16"
        self.sampler = copy.deepcopy(self.model).bfloat16() if self.narrow else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=setting.learning_rate)
        self.words = job.words(setting)

    def rows(self, words: list[str]) -> torch.Tensor:
        """The prompts, each once for every completion [sequences, prompt tokens]."""
        prompts = self.tokenizer([job.prompt_of(word) for word in words], return_tensors="pt")["input_ids"]
        assert prompts.shape[1] == self.setting.prompt_tokens
        return prompts.repeat_interleave(self.setting.group_size, dim=0)

    @torch.no_grad()
    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Prompts and sampled completions."""
        tokens = self.setting.completion_tokens
        out = self.sampler.eval().generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            min_new_tokens=None,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        assert out.shape == (len(rows), rows.shape[1] + tokens)
        return out

    def train(self, ids: torch.Tensor, advantages: torch.Tensor) -> None:
        """One update."""
        tokens = self.setting.completion_tokens
        self.model.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
            logits = self.model(ids, use_cache=False, logits_to_keep=tokens + 1).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, -tokens:, None])[..., 0]
        loss = -(torch.exp(logprobs - logprobs.detach()) * advantages[:, None]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.narrow:
            with torch.no_grad():
                for copied, master in zip(self.sampler.parameters(), self.model.parameters(), strict=True):
                    copied.copy_(master)

    def step(self) -> dict[str, float]:
        """One step; the rates of its parts."""
        words = list(islice(self.words, self.setting.prompts))
        start = time.perf_counter()
        ids = self.decode(self.rows(words))
        sampled = time.perf_counter()
        texts = self.tokenizer.batch_decode(ids[:, self.setting.prompt_tokens :])
        answers = [word[::-1] for word in words for _ in range(self.setting.group_size)]
        pairs = zip(texts, answers, strict=True)
        rewards = torch.tensor([job.reward_of(text, answer) for text, answer in pairs])
        groups = rewards.reshape(self.setting.prompts, -1)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        before = time.perf_counter()
        self.train(ids, advantages.reshape(-1))
        completed = self.setting.sequences * self.setting.completion_tokens
        return {
            "rollout_tokens_per_s": completed / (sampled - start),
            "train_tokens_per_s": ids.numel() / (time.perf_counter() - before),
        }


def main() -> None:
    """Build, introduce, train until told to quit."""
    channel, options = job.Channel(), job.arguments()
    setting = job.SETTINGS[options.setting]
    if not setting.model:
        raise SystemExit(f"worker_torch: got --setting {options.setting}, expected one of a pretrained model")
    trainer = Trainer(setting, options.flavor)
    prompts = trainer.rows(list(islice(job.words(setting, 1), setting.prompts)))

    def decode() -> int:
        return trainer.decode(prompts)[:, setting.prompt_tokens :].numel()

    gate = job.StepGate(channel, setting, lambda: None, decode)
    versions: dict[str, Any] = {"transformers": transformers.__version__, "torch": torch.__version__}
    job.introduce(channel, trainer.model.num_parameters(), versions, setting)
    rates: dict[str, float] = {}
    while True:
        gate.between_steps(**rates)
        rates = trainer.step()


if __name__ == "__main__":
    main()
