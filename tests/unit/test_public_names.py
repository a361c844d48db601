"""A step of REINFORCE by hand, with a loss of its own, from the package's public names only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jetrl_jax

SETS = [
    "model.hidden_size=128",
    "model.intermediate_size=128",
    "model.num_layers=1",
    "numerics.exact=false",
    "rollout.engine.slots=4",
    "rollout.engine.prefill_rows=4",
    "rollout.engine.decode_chunk_tokens=4",
    "rollout.max_prompt_tokens=8",
    "rollout.max_completion_tokens=4",
]


def test_a_step_by_hand_from_public_names(tmp_path: Path) -> None:
    config = jetrl_jax.load_config(None, SETS)
    policy = jetrl_jax.build_policy(config)
    published = jetrl_jax.published_weights(policy)
    engine = jetrl_jax.JaxEngine.from_section(
        policy.model, policy.plan, config.rollout, policy.tokenizer.pad_id
    )
    with pytest.raises(RuntimeError, match="published: no weights"):
        _ = engine.published
    engine.load(published, 0)
    assert engine.published is published
    prompt = policy.tokenizer.encode_prompt("ab=")
    requests = [jetrl_jax.Request(i, prompt, seed=i) for i in range(4)]
    group = engine.generate(
        requests, jetrl_jax.SamplingParams(1.0, 4, tuple(policy.tokenizer.eos_ids), seed=0)
    )

    rewards = np.array([float(len(set(t.completion_ids.tolist()))) for t in group])
    rewards[0] += 1  # one is better in any case
    advantages = jetrl_jax.advantages.rloo(rewards[None])[0]
    np.testing.assert_allclose(advantages, (rewards - rewards.mean()) * 4 / 3)  # r - mean of the others
    (batch,) = jetrl_jax.pack(group, advantages, np.ones(4, bool), row_tokens=12, microbatch_tokens=48)
    tokens = jetrl_jax.count_denominators([batch], max_completion_tokens=4).tokens

    def loss(params: nnx.State) -> jax.Array:
        model = nnx.merge(nnx.graphdef(policy.model), policy.plan.training_weights(params, published))
        arrays = (jnp.asarray(batch.token_ids), jnp.asarray(batch.positions), jnp.asarray(batch.segment_ids))
        logprobs, _ = jetrl_jax.completion_logprobs(model, *arrays, temperature=1.0, chunk_tokens=64)
        token_loss, _ = jetrl_jax.losses.policy_loss(
            logprobs, None, batch.advantages, batch.loss_mask, clip_low=0.2, clip_high=0.2
        )
        return token_loss.sum() / tokens

    value, grads = jax.jit(jax.value_and_grad(loss))(policy.params)
    # On-policy every ratio is 1, so that the loss is minus the mean advantage of a token.
    assert abs(float(value) + (batch.advantages * batch.loss_mask).sum() / tokens) < 1e-6
    assert all(np.any(np.asarray(grad)) for path, grad in jax.tree.leaves_with_path(grads))

    exported = jetrl_jax.save_published(tmp_path / "fp8", policy.model.config, published)
    assert json.loads((exported / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"


def test_logits_and_logprobs_need_no_numerics() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 11)).astype(np.float32)
    ids = np.array([4, 0, 10], np.int32)
    found = jetrl_jax.token_logprobs(jetrl_jax.scale_logits(jnp.asarray(logits), 0.5), jnp.asarray(ids))
    wide = logits.astype(np.float64) / 0.5
    expected = wide[np.arange(3), ids] - np.log(np.exp(wide).sum(-1))
    np.testing.assert_allclose(np.asarray(found), expected, atol=2e-6)


@pytest.mark.parametrize(
    "temperature", [0.0, -1.0, float("nan"), float("inf"), np.array([1.0, 2.0, 3.0], np.float32), "1"]
)
def test_scale_logits_raises_on_a_temperature_that_is_no_positive_number(temperature: Any) -> None:
    """One for each row would divide the columns."""
    with pytest.raises(ValueError, match="scale_logits: got temperature"):
        jetrl_jax.scale_logits(jnp.ones((3, 3)), temperature)


@pytest.mark.parametrize(
    "logits", [np.ones((3, 7)), jnp.ones((3, 7), jnp.bfloat16), jnp.ones((3, 7), jnp.int32), np.float32(1)]
)
def test_functions_of_logits_raise_on_other_dtypes(logits: Any) -> None:
    for ask in (
        lambda: jetrl_jax.scale_logits(logits, 1.0),
        lambda: jetrl_jax.token_logprobs(logits, np.zeros(3, np.int32)),
    ):
        with pytest.raises(ValueError, match=r"got logits .*, expected float32 \[\.\.\., V\]"):
            ask()


@pytest.mark.parametrize(
    "ids", [[1], [[1], [2], [3]], 1, [1.0, 2.0, 3.0], [True, False, True], [-100, 0, 1], [0, 1, 7]]
)
def test_token_logprobs_raises_on_ids_that_are_not_one_for_each_row(ids: Any) -> None:
    """One id would be broadcast, and -100, which other libraries mask,
    would count from the vocabulary's end.
    """
    with pytest.raises(ValueError, match="token_logprobs: got token_ids"):
        jetrl_jax.token_logprobs(jnp.ones((3, 7)), np.asarray(ids))


def test_assemble_raises_on_rewards_of_other_groups() -> None:
    config = jetrl_jax.load_config(None, [])
    algorithm = jetrl_jax.resolve_algorithm(config.algorithm, 4, config.correction)
    group = [jetrl_jax.Trajectory.of_completion(i, [1], [2, 3], [-1.0, -1.0], "stop", 0) for i in range(2)]
    for rewards in ([np.array([0.0, 1.0, 1.0]), np.array([0.0])], [np.array([0.0, 1.0])], np.zeros(4), []):
        with pytest.raises(ValueError, match="assemble: rewards do not fit the groups"):
            jetrl_jax.assemble(
                [group, group],
                rewards,
                algorithm,
                config.correction,
                lambda micro: (None, None),
                row_tokens=8,
                microbatch_tokens=8,
                seed=(0, 1),
            )
