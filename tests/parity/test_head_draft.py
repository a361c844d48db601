"""A draft head in the embedded engine: the tokens and bits of the loop without it, whatever it guesses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jetrl_jax.models.draft_head import DraftHead
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.rollout.embedded.draft_length import DraftLength
from jetrl_jax.rollout.embedded.head_draft import HeadDraft
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.embedded.speculation import Completions
from jetrl_jax.rollout.types import Request
from jetrl_jax.training.draft import DraftTrainer
from jetrl_jax.training.programs import PolicyPrograms
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
    graphdef, state = nnx.split(head)
    broken = jax.tree.map(lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    for weights in (state, broken):
        engine.load_draft(nnx.merge(graphdef, weights))
        engine._completions = Completions()
        assert unequal(engine.generate(requests(), SAMPLING), expected) == []
        assert engine.statistics.drafted > 0
    assert set(chosen) == {0, 1, 3}


@pytest.mark.long
def test_more_guesses_of_a_head_are_kept_while_it_trains() -> None:
    """On the policy's own rollouts.  A new head guesses from uniform distributions, and not badly: with the
    noise of the policy's own sample.
    """
    policy = SmallPolicy("bf16", DEEP, exact=False)
    programs = PolicyPrograms(policy.model, policy.plan, optax.sgd(0.0), temperature=1.0, chunk_tokens=64)
    head = DraftHead(DEEP, policy.numerics, np.arange(VOCAB), rngs=nnx.Rngs(0))
    trainer = DraftTrainer(head, programs, 5e-3, (2,))
    sizes = SIZES | {"slots": 32, "prefill_rows": 8}
    engine = JaxEngine(policy.model, policy.plan, draft=trainer.draft, **sizes)
    engine.load(policy.published, 0)
    overlaps: list[float] = []
    rng, kept, sampling = (
        np.random.default_rng(0),
        [],
        dataclasses.replace(SAMPLING, stop_token_ids=(), temperature=0.5),
    )
    for round_index in range(4):
        asked = [Request(i, rng.integers(0, VOCAB, 6).tolist(), i) for i in range(64)]
        engine.load_draft(trainer.head)
        done = engine.generate(asked, dataclasses.replace(sampling, seed=round_index))
        kept.append(engine.statistics.accepted / engine.statistics.active_slot_steps)
        ids = np.stack([one.token_ids for one in done])
        places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
        sampled, zeros = np.stack([one.sampled for one in done]), np.zeros(ids.shape, np.float32)
        rows = np.broadcast_to(np.arange(len(ids), dtype=np.int32)[:, None], ids.shape)
        batch = TrainBatch(ids, places, np.ones_like(ids), sampled, zeros, zeros, rows, zeros)
        told = [trainer(policy.published, [batch] * 10)["draft/overlap"] for _ in range(4)]
        overlaps += told
    assert kept[-1] > kept[0] + 0.05, kept
    assert overlaps[-1] > overlaps[0] + 0.03, overlaps
