"""A draft head in the embedded engine: the tokens and bits of the loop without it, whatever it guesses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetrl_jax.models.draft_head import DraftHead
from jetrl_jax.rollout.embedded.draft_length import DraftLength
from jetrl_jax.rollout.embedded.head_draft import HeadDraft
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.embedded.speculation import Completions
from tests.parity.small_policy import CONFIG, VOCAB, SmallPolicy
from tests.parity.test_speculation import SAMPLING, SIZES, requests, unequal

DEEP = dataclasses.replace(CONFIG, num_layers=4)


@pytest.mark.long
def test_a_head_gives_the_tokens_and_bits_of_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new head, one of NaN, and lengths by chance."""
    policy = SmallPolicy("bf16", DEEP)
    plain = JaxEngine(policy.model, policy.plan, **SIZES)
    plain.load(policy.published, 0)
    expected = plain.generate(requests(), SAMPLING)
    head = DraftHead(DEEP, policy.numerics, np.arange(0, VOCAB, 2), rngs=nnx.Rngs(0))
    rng, chosen = np.random.default_rng(0), []

    def choose(self: DraftLength, shape: tuple[int, int]) -> int:
        chosen.append(int(rng.choice(self.lengths)))
        return chosen[-1]

    monkeypatch.setattr(DraftLength, "choose", choose)
    engine = JaxEngine(policy.model, policy.plan, draft=HeadDraft.of(head, (0, 1, 3)), **SIZES)
    engine.load(policy.published, 0)
    state = nnx.state(head)
    broken = jax.tree.map(lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    for weights in (state, broken):
        engine.load_draft(weights)
        engine._completions = Completions()
        assert unequal(engine.generate(requests(), SAMPLING), expected) == []
        assert engine.statistics.drafted > 0
    assert set(chosen) == {0, 1, 3}
