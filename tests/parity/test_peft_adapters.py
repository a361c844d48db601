"""Adapters against PEFT and torch: it loads ours and we load its, with the same logits, and a GRPO step has the
gradients of PEFT's model in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from bridge.hf.peft import PeftAdapter, peft_name, read_adapter, save_adapter
from bridge.hf.read import read_config, read_into
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.lora import Adapters
from jetrl_jax.precision.formats import is_adapter
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import map_params, named_params
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.rl.algorithm import resolve_algorithm
from jetrl_jax.rl.batching import count_denominators, pack
from jetrl_jax.training.programs import PolicyPrograms
from tests.oracles.tolerances import gamma
from tests.parity.hf_reference import SIZES, float64_twin, random_model, save, torch, true_float64
from tests.parity.small_policy import trajectories, with_adapters
from tests.sections import algorithm_section

pytestmark = pytest.mark.compiled_quickly

peft = pytest.importorskip("peft", reason="the second opinion on adapters: pip install jetrl-jax[torch]")
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
RANK, ALPHA, SCALE = 4, 8.0, 2.0
LENGTHS, ADVANTAGES = [(5, 20), (3, 14)], [1.2, -0.7]


def decoder_of(directory: Path) -> Decoder:
    """The base in a directory, in FP32, with places for adapters."""
    numerics = Numerics(compute_dtype="float32", exact=False)
    decoder = Decoder(
        read_config(directory), numerics, rngs=nnx.Rngs(0), adapters=Adapters(RANK, SCALE, TARGETS)
    )
    read_into(decoder, directory)
    return decoder


def adapter_of(decoder: Decoder, base: Path) -> PeftAdapter:
    """The adapters of a decoder, with a file's hash, which PEFT does not know."""
    arrays = {p: np.asarray(v) for p, v in named_params(nnx.state(decoder, nnx.Param)) if is_adapter(p)}
    files = {"model.safetensors": "0" * 64}
    return PeftAdapter(RANK, ALPHA, False, TARGETS, str(base), arrays, files)


@nnx.jit
def our_logits(decoder: Decoder, ids: Any, positions: Any, segments: Any) -> Any:
    return decoder.logits(decoder(ids, positions, segments))


def test_peft_and_we_read_each_others_adapters(tmp_path: Path) -> None:
    """An adapter that PEFT made, read by us, written by us, and read by PEFT: the same matrices and logits."""
    made = random_model("qwen3")
    save(made, tmp_path / "base")
    fields = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "init_lora_weights": False}
    theirs = peft.get_peft_model(made, peft.LoraConfig(**fields))
    for name, value in theirs.named_parameters():
        if ".lora_B." in name:
            value.data *= 4
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 17)).astype(np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids, dtype=torch.long)).logits.numpy()
        with theirs.disable_adapter():
            plain = theirs(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    assert np.abs(expected - plain).max() > 0.1

    decoder = decoder_of(tmp_path / "base")
    found = read_adapter(tmp_path / "theirs", decoder.config)
    assert (found.rank, found.alpha, set(found.targets), found.base_files) == (
        RANK,
        ALPHA,
        set(TARGETS),
        None,
    )
    params = nnx.state(decoder, nnx.Param)
    nnx.update(decoder, map_params(lambda path, value: jnp.asarray(found.arrays.get(path, value)), params))
    positions = np.tile(np.arange(17, dtype=np.int32), (2, 1))
    logits = np.asarray(our_logits(decoder, ids, positions, np.ones_like(ids)))
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()

    ours = adapter_of(decoder, tmp_path / "base")
    save_adapter(tmp_path / "ours", ours)
    again = peft.PeftModel.from_pretrained(random_model("qwen3"), str(tmp_path / "ours"))
    with torch.no_grad():
        assert np.array_equal(again(torch.tensor(ids, dtype=torch.long)).logits.numpy(), expected)
    assert read_adapter(tmp_path / "ours", decoder.config).base_files == ours.base_files


@pytest.mark.long
def test_gradient_of_a_grpo_step_is_that_of_peft_in_float64(tmp_path: Path) -> None:
    base = random_model("qwen3")
    save(base, tmp_path / "base")
    decoder = decoder_of(tmp_path / "base")
    nnx.update(decoder, with_adapters(nnx.state(decoder, nnx.Param), 0))
    arrays = adapter_of(decoder, tmp_path / "base").arrays
    save_adapter(tmp_path / "ours", adapter_of(decoder, tmp_path / "base"))
    policy_params = nnx.state(decoder, nnx.Param)
    plan = PrecisionPlan([path for path, _ in named_params(policy_params)], "fp32")
    programs = PolicyPrograms(decoder, plan, optax.sgd(1.0), temperature=0.8, chunk_tokens=1000)
    ones = np.ones(len(LENGTHS), bool)
    (batch,) = pack(trajectories(LENGTHS), ADVANTAGES, ones, 48, 48)
    algorithm = resolve_algorithm(algorithm_section(), 44)
    state = programs.init(policy_params)
    grads, _, _ = programs.policy_gradient(state, batch, count_denominators([batch], 44), algorithm)
    twin = peft.PeftModel.from_pretrained(
        float64_twin(base), str(tmp_path / "ours"), is_trainable=True
    ).double()
    with true_float64():
        count, loss = 0, torch.zeros((), dtype=torch.float64)
        for trajectory, advantage in zip(trajectories(LENGTHS), ADVANTAGES, strict=True):
            row = torch.tensor(trajectory.token_ids, dtype=torch.long)[None]
            logprobs = torch.log_softmax(twin(row).logits[0, :-1] / 0.8, -1)
            of_tokens = logprobs.gather(-1, row[0, 1:, None])[:, 0][torch.tensor(trajectory.sampled[1:])]
            ratio = torch.exp(of_tokens - of_tokens.detach())  # the policy is the one that sampled
            loss = loss - (advantage * ratio).sum()
            count += len(of_tokens)
        (loss / count).backward()
    own = {
        name.replace(".default.", "."): value.grad.numpy()
        for name, value in twin.named_parameters()
        if value.grad is not None
    }
    assert len(own) == len(arrays)
    for path, value in named_params(grads):
        reference = own[peft_name(path)]
        error = np.linalg.norm(np.asarray(value) - reference) / np.linalg.norm(reference)
        assert error <= 4 * gamma(48 + SIZES["intermediate_size"] + 4 * SIZES["hidden_size"]), (path, error)
