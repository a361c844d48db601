"""TRL's GRPOTrainer on the common job; started by `compare.py` with the Python of `.venv-trl`."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tempfile
from itertools import islice
from typing import Any

import job
import torch
import transformers
import trl
from datasets import Dataset

STEPS = 10**6  # more than any comparison asks for
WORDS = 4096


class Gate(transformers.TrainerCallback):
    """Hands the moments between two steps to the gate."""

    gate: job.StepGate

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the first command."""
        self.gate.between_steps()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count a step, wait where a burst is over."""
        self.gate.between_steps()


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Rewards in the form TRL calls them."""
    return [
        job.reward_of(completion, expected) for completion, expected in zip(completions, answer, strict=True)
    ]


def build(setting: job.Setting, flavor: str) -> tuple[trl.GRPOTrainer, Gate]:
    """The trainer and the callback that its gate is still to be hung on."""
    torch.manual_seed(0)
    drawn = list(islice(job.words(setting), WORDS))
    data = Dataset.from_dict(
        {"prompt": [job.prompt_of(word) for word in drawn], "answer": [word[::-1] for word in drawn]}
    )
    options = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=setting.sequences,
        num_generations=setting.group_size,
        max_completion_length=setting.completion_tokens,
        max_steps=STEPS,
        learning_rate=setting.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        use_cpu=True,
        bf16=flavor == "bfloat16",
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=STEPS,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    gate = Gate()
    trainer = trl.GRPOTrainer(
        model=build_model(setting),
        processing_class=job.hf_tokenizer(setting),
        reward_funcs=reward,
        args=options,
        train_dataset=data,
        callbacks=[gate],
    )
    return trainer, gate


def build_model(setting: job.Setting) -> Any:
    """A random policy, or the real model, in FP32."""
    if setting.model:
        return transformers.AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32)
    config = transformers.Qwen3Config(
        vocab_size=job.VOCAB,
        hidden_size=setting.hidden_size,
        intermediate_size=setting.intermediate_size,
        num_hidden_layers=setting.num_layers,
        num_attention_heads=setting.num_heads,
        num_key_value_heads=setting.num_heads,
        head_dim=setting.head_dim,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.Qwen3ForCausalLM(config)


def main() -> None:
    """Build, introduce, train until told to quit."""
    channel, options = job.Channel(), job.arguments()
    setting = job.SETTINGS[options.setting]
    trainer, callback = build(setting, options.flavor)
    prompt = trainer.processing_class(
        [job.prompt_of(word) for word in islice(job.words(setting, 1), setting.prompts)], return_tensors="pt"
    )
    rows = {
        name: prompt[name].repeat_interleave(setting.group_size, dim=0)
        for name in ("input_ids", "attention_mask")
    }

    @torch.no_grad()
    def decode() -> int:
        with trainer.accelerator.autocast():
            out = trainer.model.generate(**rows, generation_config=trainer.generation_config)
        new = out[:, rows["input_ids"].shape[1] :]
        assert new.shape == (setting.sequences, setting.completion_tokens)
        return new.numel()

    callback.gate = job.StepGate(channel, setting, lambda: None, decode)
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    job.introduce(channel, trainer.model.num_parameters(), versions, setting)
    trainer.train()


if __name__ == "__main__":
    main()
