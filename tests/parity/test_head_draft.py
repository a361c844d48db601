"""A draft head in the embedded engine: the tokens and bits of the loop without it, whatever it guesses."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

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
from jetrl_jax.training import draft
from jetrl_jax.training.draft import DraftTrainer
from jetrl_jax.training.programs import PolicyPrograms
from tests.parity.small_episodes import episodes_of
from tests.parity.small_policy import CONFIG, VOCAB, SmallPolicy
from tests.parity.test_speculation import SAMPLING, SIZES, requests, unequal

pytestmark = pytest.mark.compiled_quickly(long=True)
DEEP = dataclasses.replace(CONFIG, num_layers=4)
LONG = pytest.mark.long
HEADS = [  # flow, lengths, slots, chunk
    ("bf16", (0, 1), 5, 2),
    pytest.param("bf16", (0, 3), 32, 3, marks=LONG),  # the last sequences in fewer slots
    pytest.param("fp8_unified, fp8 cache", (0, 7), 1, 1, marks=LONG),
]


@pytest.mark.parametrize(("preset", "lengths", "slots", "chunk"), HEADS)
def test_a_head_gives_the_tokens_and_bits_of_one_by_one(
    preset: str,
    lengths: tuple[int, ...],
    slots: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new head, one of NaN, and the first again, whose slots have the keys of the other; lengths by chance.

    Prompts are of two buckets.  The loop without speculation is that of an engine without a head; of the case
    that is not long, to compile less, the same engine's without drafts.
    """
    name, _, cache = preset.removesuffix(" cache").partition(", ")
    policy = SmallPolicy(name, DEEP, **({"kv_cache": cache} if cache else {}))
    sizes = SIZES | {"max_prompt_tokens": 9, "slots": slots, "decode_chunk_tokens": chunk}
    rng, chosen = np.random.default_rng(0), [0]
    asked = [*requests(), *(Request(100 + i, [5 + i] * 9, 100 + i) for i in range(6))]
    head = DraftHead(DEEP, policy.numerics, np.arange(0, VOCAB, 2), rngs=nnx.Rngs(0))
    engine = JaxEngine(policy.model, policy.plan, draft=HeadDraft.of(head, lengths), **sizes)
    engine.load(policy.published, 0)
    plain, allowed = engine, (0,)
    if lengths != (0, 1):
        plain = JaxEngine(policy.model, policy.plan, **sizes)
        plain.load(policy.published, 0)

    def choose(self: DraftLength, shape: tuple[int, int]) -> int:
        chosen.append(int(rng.choice(allowed)))
        return chosen[-1]

    monkeypatch.setattr(DraftLength, "choose", choose)
    engine.load_draft(head)
    expected, allowed = plain.generate(asked, SAMPLING), lengths
    assert engine.statistics.drafted == 0 and len(engine.shapes.prompt_buckets) == 2
    graphdef, state = nnx.split(head)
    broken = jax.tree.map(lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    kept = []
    for weights in (state, broken, state):
        engine.load_draft(nnx.merge(graphdef, weights))
        engine._completions, rng = Completions(), np.random.default_rng(0)
        assert unequal(engine.generate(asked, SAMPLING), expected) == []
        kept.append((engine.statistics.drafted, engine.statistics.accepted))
    assert set(chosen) == set(lengths) and kept[0] == kept[2] and kept[0][1] > kept[1][1]


@LONG
def test_a_head_changes_no_stream_of_turns() -> None:
    """Which it reads anew after each observation; the slots' caches are those of the turns before."""
    policy = SmallPolicy("bf16", DEEP)
    sizes = SIZES | {"max_prompt_tokens": 16, "slots": 5, "decode_chunk_tokens": 2}
    head = DraftHead(DEEP, policy.numerics, np.arange(VOCAB), rngs=nnx.Rngs(0))
    draft = HeadDraft.of(head, (2,))
    found = []
    for made in (None, draft):
        engine = JaxEngine(policy.model, policy.plan, draft=made, streams=True, **sizes)
        engine.load(policy.published, 0)
        if made is not None:
            engine.load_draft(head)
        found.append(episodes_of(engine, VOCAB, 1.0, 24, turns="stream", timing=len(found)))
    assert engine.statistics.accepted > 0 and engine.statistics.continuations > 3
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids) and a.turns == b.turns
        assert np.array_equal(a.logprobs.view(np.int32), b.logprobs.view(np.int32))


def test_an_update_that_is_not_finite_leaves_the_head_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers of the batch for gradient and loss; moments too, and later updates go on from them."""

    def gradient(head: nnx.State, _: object, __: object, arrays: Any, ___: int) -> Any:
        size, loss = arrays[0], arrays[1]
        trained = nnx.split_state(head, nnx.Param, ...)[0]
        return jax.tree.map(lambda x: x * size + size, trained), loss, jnp.zeros(1)

    monkeypatch.setattr(draft, "draft_gradient", gradient)
    graphdef, weights = nnx.split(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    told: list[str] = []
    head: Any = nnx.merge(graphdef, weights)  # any module with parameters
    programs: Any = SimpleNamespace(graphdef=graphdef)
    trainer = DraftTrainer(head, programs, 1e-3, (2,), told.append)
    start = trainer.saved

    def trained(*pairs: tuple[float, float]) -> tuple[dict[str, float], list[np.ndarray]]:
        """The metrics and what a checkpoint holds after these gradients and losses."""
        trainer.restore(start)
        batches: list[Any] = [
            SimpleNamespace(token_ids=np.float32(x), positions=np.float32(y), segment_ids=0, loss_mask=0)
            for x, y in pairs
        ]
        return trainer(weights, batches), [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.saved)]

    row, expected = trained((1.0, 2.0), (0.5, 4.0))
    assert row == {"draft/loss": 3.0, "draft/overlap": 0.0, "draft/skipped_updates": 0} and told == []
    row, found = trained((1.0, 2.0), (1.0, np.nan), (np.inf, 1.0), (np.nan, 1.0), (0.5, 4.0))
    assert row == {"draft/loss": 3.0, "draft/overlap": 0.0, "draft/skipped_updates": 3}
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(told) == 1 and "in 3 of 5 microbatches" in told[0]
    assert np.isnan(trained((np.nan, 1.0))[0]["draft/loss"])


@LONG
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
