"""Greedy decoding of the embedded engine against transformers' `generate`, and several tokens against a cache
against its forward, all in FP32 on a random Qwen3.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge import read_into
from bridge.hf.read import read_config
from jetrl_jax.models.cache import KVCache
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import jit, named_params
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.types import Request, SamplingParams
from tests.parity.hf_reference import random_model, save, torch

pytestmark = pytest.mark.compiled_quickly

MAX_TOKENS = 20
LENGTHS = (1, 2, 5, 8, 9, 13, 16)


def read(directory: Path) -> Decoder:
    decoder = Decoder(read_config(directory), Numerics(compute_dtype="float32"), rngs=nnx.Rngs(0))
    read_into(decoder, directory)
    return decoder


def test_several_tokens_against_a_cache_have_the_logits_of_transformers(tmp_path: Path) -> None:
    """Rows begin at other places; logits as FP32 in test_hf_logits, of which a token too many is far off."""
    reference = random_model("qwen3")
    decoder, starts, new, length = read(save(reference, tmp_path)), np.array([1, 4, 9]), 4, 13
    ids = np.random.default_rng(0).integers(3, decoder.config.vocab_size, (3, length)).astype(np.int32)
    expected = reference(torch.tensor(ids.astype(np.int64))).logits.detach().numpy()
    positions = (starts[:, None] + np.arange(new)).astype(np.int32)
    tokens = np.take_along_axis(ids, positions, axis=1)

    def logits(model: Decoder, shown: jax.Array) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], ids.shape)
        _, kept = model.prefill(shown, places)
        cache = [KVCache.of(layer, length + 2, model.numerics) for layer in kept]
        return model.logits(model.extend(jnp.asarray(tokens), jnp.asarray(positions), cache)[0])

    # behind its start each row of the cache is of other tokens, which are written over
    shown = np.where(np.arange(length)[None] < starts[:, None], ids, 5).astype(np.int32)
    found = np.asarray(nnx.jit(logits)(decoder, jnp.asarray(shown)))
    of_rows = np.take_along_axis(expected, positions[:, :, None], axis=1)
    np.testing.assert_allclose(found, of_rows, rtol=0, atol=5e-5)
    assert np.abs(found[:, :-1] - of_rows[:, 1:]).max() > 0.1


def test_greedy_tokens_and_logprobs_match_transformers(tmp_path: Path) -> None:
    """Logprobs: both sides are FP32; each is within the model's FP32 error of the truth, 2e-5 here
    (test_hf_logits).
    """
    reference = random_model("qwen3")
    decoder = read(save(reference, tmp_path))
    config = decoder.config
    params = nnx.state(decoder, nnx.Param)
    plan = PrecisionPlan([path for path, _ in named_params(params)], "fp32")
    engine = JaxEngine(
        decoder,
        plan,
        slots=5,
        prefill_rows=3,
        decode_chunk_tokens=4,
        max_prompt_tokens=16,
        max_completion_tokens=MAX_TOKENS,
        pad_id=0,
    )
    engine.load(jit(plan.publish)(params), 0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, config.vocab_size, length).tolist() for length in LENGTHS * 2]
    stops = config.eos_token_ids
    got = engine.generate(
        [Request(i, prompt, i) for i, prompt in enumerate(prompts)],
        SamplingParams(1.0, MAX_TOKENS, stops, 0, greedy=True),
    )
    for trajectory, scored in zip(got, engine.score([t.token_ids for t in got]), strict=True):
        ids = torch.tensor(trajectory.token_ids[None].astype(np.int64))
        log_softmax = torch.log_softmax(reference(ids).logits[0].double(), -1).detach().numpy()
        expected = log_softmax[np.arange(ids.shape[1] - 1), trajectory.token_ids[1:]]
        assert scored[0] == 0
        np.testing.assert_allclose(scored[1:], expected, rtol=0, atol=5e-5)
    finish_reasons = set()
    for trajectory, prompt in zip(got, prompts, strict=True):
        ids = torch.tensor([prompt])
        output = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=list(stops),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        expected = output.sequences[0, len(prompt) :].numpy()
        np.testing.assert_array_equal(trajectory.completion_ids, expected)
        log_softmax = torch.log_softmax(torch.stack(output.logits)[:, 0].double(), -1).numpy()
        np.testing.assert_allclose(
            trajectory.sampled_logprobs, log_softmax[np.arange(len(expected)), expected], rtol=0, atol=5e-5
        )
        finish_reasons.add(trajectory.finish_reason)
        assert trajectory.finish_reason == ("stop" if expected[-1] in stops else "length")
    if finish_reasons != {"stop", "length"}:
        pytest.fail(f"the prompts should show both ways to finish: got {finish_reasons}")
