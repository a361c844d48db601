"""Packing: what lies where, that nothing is lost or truncated, and that packed equals unpacked in loss,
gradient and metrics.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.rl import losses, metrics
from jetrl_jax.rl.batching import (
    TrainBatch,
    count_denominators,
    pack,
    sample_masks,
    split_minibatches,
    unpack,
)
from jetrl_jax.rollout.types import Trajectory, Turn

VOCABULARY = 7
MAX_COMPLETION = 9


def sampled(prompt, completion, logprobs):
    return Trajectory.of_completion(0, prompt, completion, logprobs, "stop", 0)


def draw(count=17, seed=0):
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        n = int(rng.integers(1, MAX_COMPLETION + 1))
        ids = rng.integers(0, VOCABULARY, int(rng.integers(1, 6)) + n).astype(np.int32)
        sequences.append(sampled(ids[:-n], ids[-n:], -rng.exponential(1.5, n).astype(np.float32)))
    return sequences, rng.normal(size=count).astype(np.float32)


def padded(sequences, advantages):
    """The unpacked batch, one sequence a row, padding on the right, built by hand."""
    shape = (len(sequences), max(len(s.prompt_ids) + len(s.completion_ids) for s in sequences))
    rows = {name: np.zeros(shape, np.int32) for name in ("token_ids", "positions", "segment_ids")}
    rows |= {
        name: np.zeros(shape, np.float32) for name in ("rollout_logprobs", "advantages", "inverse_length")
    }
    rows |= {"loss_mask": np.zeros(shape, bool), "sequence_index": np.full(shape, -1, np.int32)}
    for i, s in enumerate(sequences):
        p, n = len(s.prompt_ids), len(s.completion_ids)
        rows["token_ids"][i, : p + n] = [*s.prompt_ids, *s.completion_ids]
        for t in range(p + n):
            rows["positions"][i, t] = t
            rows["segment_ids"][i, t] = 1
            rows["sequence_index"][i, t] = i
        for t in range(n):
            rows["loss_mask"][i, p + t] = True
            rows["rollout_logprobs"][i, p + t] = s.sampled_logprobs[t]
            rows["advantages"][i, p + t] = advantages[i]
            rows["inverse_length"][i, p + t] = 1 / n
    return TrainBatch(**rows)


def toy_logprobs(weights, batch):
    """A causal language model of sums: what token t sees is the earlier tokens of its segment and their
    positions.
    """
    index = jnp.arange(batch.token_ids.shape[1])
    same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
    seen = (
        same & (batch.segment_ids > 0)[:, :, None] & (index[None, None, :] <= index[None, :, None])
    ).astype(jnp.float32)
    state = jnp.einsum(
        "rts,rsv->rtv", seen, weights["token"][batch.token_ids] + weights["position"][batch.positions]
    )
    logprobs = jax.nn.log_softmax(jnp.tanh(state), axis=-1)
    targets = jnp.take_along_axis(logprobs[:, :-1], jnp.asarray(batch.token_ids)[:, 1:, None], axis=-1)[
        ..., 0
    ]
    return jnp.pad(targets, ((0, 0), (1, 0)))  # target t is predicted from t − 1


AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


@jax.jit
def loss_gradient_logprobs(weights, batch, denominators):
    """The three losses [3], their gradients, the sums and the log-probabilities."""

    def loss(w):
        logprobs = toy_logprobs(w, batch)
        values, stats = losses.policy_loss(
            logprobs,
            batch.rollout_logprobs,
            batch.advantages,
            batch.loss_mask,
            clip_low=0.2,
            clip_high=0.28,
            dual_clip=3.0,
        )
        share = functools.partial(
            losses.aggregate, values, batch.loss_mask, batch.inverse_length, denominators=denominators
        )
        shares = jnp.stack([share(aggregation=name) for name in AGGREGATIONS])
        return shares, (shares, stats, logprobs)

    gradient, (value, stats, logprobs) = jax.jacrev(loss, has_aux=True)(weights)
    return value, gradient, stats, logprobs


def toy_weights():
    rng = np.random.default_rng(9)
    return {
        name: rng.normal(size=(n, VOCABULARY)).astype(np.float32)
        for name, n in (("token", VOCABULARY), ("position", 16))
    }


def everything(batches, denominators):
    """Loss, gradient and sums added over microbatches, and the mismatch metrics of all of them."""
    results = [loss_gradient_logprobs(toy_weights(), b, denominators) for b in batches]
    total = jax.tree.map(
        lambda *parts: sum(np.asarray(p, np.float64) for p in parts), *[r[:3] for r in results]
    )
    names = ("rollout_logprobs", "loss_mask", "sequence_index")
    mismatch = metrics.mismatch_metrics(
        [r[3] for r in results], *([getattr(b, name) for b in batches] for name in names)
    )
    return total, mismatch


def relayed(batches):
    """Every token of the batches, read back from the rows."""
    found = {}
    for b in batches:
        for r, t in zip(*np.nonzero(b.segment_ids), strict=True):
            token = tuple(
                int(array[r, t]) for array in (b.segment_ids, b.positions, b.token_ids, b.loss_mask)
            )
            found.setdefault(int(b.sequence_index[r, t]), []).append(token)
    return found


@pytest.mark.parametrize("row_tokens", [14, 32])
def test_pack_begins_segments_at_multiples_of_the_unit(row_tokens):
    """With the same tokens in them; rows that no unit divides end with a whole segment, too."""
    sequences, advantages = draw()
    dense, apart = (
        pack(sequences, advantages, np.ones(17, bool), row_tokens, 4 * row_tokens, segment_unit=unit)
        for unit in (1, 8)
    )
    first = [b.segment_ids * (b.positions == 0) for b in apart]
    starts = np.concatenate([np.nonzero(ids)[1] for ids in first])
    assert len(starts) == 17 and not (starts % 8).any()
    strip = [
        {index: [token[1:] for token in found] for index, found in relayed(b).items()} for b in (dense, apart)
    ]
    assert strip[0] == strip[1]


@pytest.mark.parametrize(("row_tokens", "microbatch_tokens"), [(14, 14), (20, 61), (32, 4096)])
def test_pack_places_every_token_once(row_tokens, microbatch_tokens):
    sequences, advantages = draw()
    batches = pack(sequences, advantages, np.ones(17, bool), row_tokens, microbatch_tokens)
    assert {b.token_ids.shape for b in batches} == {(microbatch_tokens // row_tokens, row_tokens)}
    found = relayed(batches)
    assert sorted(found) == list(range(17))
    for i, s in enumerate(sequences):
        p, n = len(s.prompt_ids), len(s.completion_ids)
        assert len({segment for segment, *_ in found[i]}) == 1
        assert [position for _, position, *_ in found[i]] == list(range(p + n))
        assert [token for *_, token, _ in found[i]] == [*s.prompt_ids, *s.completion_ids]
        assert [trained for *_, trained in found[i]] == [False] * p + [True] * n
    for b in batches:
        padding = b.segment_ids == 0
        assert (
            (b.sequence_index[padding] == -1).all()
            and not b.loss_mask[padding].any()
            and not b.loss_mask[b.positions == 0].any()
        )
        for name in ("rollout_logprobs", "advantages", "inverse_length"):
            assert not getattr(b, name)[~b.loss_mask].any() and getattr(b, name).dtype == np.float32
        for row in b.segment_ids:  # 1 1 1 2 2 … 0 0
            used = row[row > 0]
            assert (
                (row[: len(used)] > 0).all()
                and (np.diff(used, prepend=0) <= 1).all()
                and (np.diff(used) >= 0).all()
            )
        np.testing.assert_array_equal(b.advantages[b.loss_mask], advantages[b.sequence_index[b.loss_mask]])


def test_packed_equals_unpacked_for_every_split_and_aggregation():
    sequences, advantages = draw()
    unpacked = padded(sequences, advantages)
    reference, mismatch = everything([unpacked], count_denominators([unpacked], MAX_COMPLETION))
    assert reference[2]["clipped_high_positive"] > 0 and reference[2]["clipped_low_negative"] > 0
    for row_tokens, microbatch_tokens in ((14, 28), (20, 60), (40, 4 * 40)):
        batches = pack(sequences, advantages, np.ones(17, bool), row_tokens, microbatch_tokens)
        total, packed_mismatch = everything(batches, count_denominators(batches, MAX_COMPLETION))
        # FP32 sums of ~80 terms in another order
        chex.assert_trees_all_close(total, reference, rtol=1e-5, atol=1e-6)
        assert packed_mismatch == pytest.approx(mismatch, rel=1e-4, abs=1e-6)


def test_minibatches_with_global_denominators_add_up_to_the_batch():
    sequences, advantages = draw(16)
    mask = np.ones(16, bool)
    whole = pack(sequences, advantages, mask, 20, 60)
    denominators = count_denominators(whole, MAX_COMPLETION)
    reference, _ = everything(whole, denominators)
    parts = [
        b
        for indices in split_minibatches([4] * 4, 3, seed=5)
        for b in pack(sequences, advantages, mask, 20, 60, indices=indices)
    ]
    total, _ = everything(parts, denominators)
    chex.assert_trees_all_close(total, reference, rtol=1e-5, atol=1e-6)


def test_masked_trajectories_are_as_if_absent():
    sequences, advantages = draw()
    mask = np.arange(17) % 3 > 0
    impossible = sampled([], [1] * 99, [np.nan] * 99)
    spoiled = [s if kept else impossible for s, kept in zip(sequences, mask, strict=True)]
    batches = pack(spoiled, np.where(mask, advantages, np.nan), mask, 20, 60)
    absent = pack(
        [s for s, kept in zip(sequences, mask, strict=True) if kept],
        advantages[mask],
        np.ones(mask.sum(), bool),
        20,
        60,
    )
    assert len(batches) == len(absent)
    for b, a in zip(batches, absent, strict=True):
        renumbered = b.replace(
            sequence_index=np.where(b.sequence_index >= 0, np.cumsum(mask)[b.sequence_index] - 1, -1)
        )
        chex.assert_trees_all_equal(renumbered, a)
    assert count_denominators(batches, MAX_COMPLETION) == count_denominators(absent, MAX_COMPLETION)


def test_rejected_tokens_leave_loss_and_denominators():
    sequences, advantages = draw()
    rng = np.random.default_rng(3)
    keep = [rng.random(len(s.completion_ids)) < 0.6 for s in sequences]
    keep[4][:] = False
    weights = [rng.uniform(0, 2, len(s.completion_ids)).astype(np.float32) for s in sequences]
    batches = pack(sequences, advantages, np.ones(17, bool), 20, 60, correction=weights, keep=keep)
    by_hand = padded(sequences, advantages)
    counts = np.array([k.sum() for k in keep])
    for i, s in enumerate(sequences):
        for t, kept in enumerate(keep[i]):
            place = (i, len(s.prompt_ids) + t)
            by_hand.loss_mask[place] = kept
            by_hand.inverse_length[place] = 1 / counts[i] if kept else 0
    denominators = count_denominators(batches, MAX_COMPLETION)
    assert denominators == count_denominators([by_hand], MAX_COMPLETION)
    assert denominators.tokens == counts.sum() and denominators.sequences == (counts > 0).sum() < 17
    total, _ = everything(batches, denominators)
    reference, _ = everything([by_hand], denominators)
    chex.assert_trees_all_close(total, reference, rtol=1e-5, atol=1e-6)
    found = unpack(batches, [b.correction for b in batches], 17)
    for got, weight, kept in zip(found, weights, keep, strict=True):
        np.testing.assert_array_equal(got, weight[kept])


def test_pack_of_nothing_is_one_batch_of_padding():
    sequences, advantages = draw()
    (batch,) = pack(sequences, advantages, np.zeros(17, bool), 14, 28)
    assert batch.token_ids.shape == (2, 14) and not batch.segment_ids.any()
    denominators = count_denominators([batch], MAX_COMPLETION)
    assert (denominators.tokens, denominators.sequences, denominators.constant) == (0, 0, 0)
    total, mismatch = everything([batch], denominators)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(total)) and mismatch == {}


def test_pack_is_deterministic_and_tight():
    sequences, advantages = draw(200, seed=3)
    first, second = (pack(sequences, advantages, np.ones(200, bool), 32, 320) for _ in range(2))
    chex.assert_trees_all_equal(first, second)
    tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for s in sequences)
    rows = sum(int(b.segment_ids.any(axis=1).sum()) for b in first)
    assert rows <= 11 / 9 * -(-tokens // 32) + 1
    assert len(first) == -(-rows // 10)


def test_denominators_count_the_batch():
    sequences, advantages = draw()
    batches = pack(sequences, advantages, np.ones(17, bool), 14, 28)
    denominators = count_denominators(batches, MAX_COMPLETION)
    assert denominators.tokens == sum(len(s.completion_ids) for s in sequences)
    assert denominators.sequences == 17 and denominators.constant == 17 * MAX_COMPLETION
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(denominators))


def test_unpack_inverts_pack():
    sequences, advantages = draw()
    mask = np.arange(17) != 4
    logprobs = [s.sampled_logprobs for s in sequences]
    batches = pack(sequences, advantages, mask, 20, 60)
    recovered = unpack(batches, [b.rollout_logprobs for b in batches], 17)
    assert len(recovered) == 17 and len(recovered[4]) == 0
    for i in np.nonzero(mask)[0]:
        np.testing.assert_array_equal(recovered[i], logprobs[i])
    again = pack(
        sequences,
        advantages,
        mask,
        14,
        28,
        old_logprobs=[*recovered[:4], logprobs[4], *recovered[5:]],
        ref_logprobs=logprobs,
    )
    for b in again:
        np.testing.assert_array_equal(b.old_logprobs, b.rollout_logprobs)
        np.testing.assert_array_equal(b.ref_logprobs, b.rollout_logprobs)


def test_train_batch_is_a_pytree_that_compiles_once():
    sequences, advantages = draw()
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def count(batch, denominators):
        return batch.loss_mask.sum(dtype=jnp.float32) / denominators.tokens

    batches = pack(sequences, advantages, np.ones(17, bool), 20, 40) + pack(
        sequences[:3], advantages[:3], np.ones(3, bool), 20, 40
    )
    assert len(batches) > 3
    for b in batches:
        count(b, count_denominators([b], MAX_COMPLETION))


@pytest.mark.parametrize(("num_prompts", "minibatches"), [(8, 1), (8, 4), (7, 3), (5, 5)])
def test_split_minibatches_keeps_groups_whole(num_prompts, minibatches):
    parts = split_minibatches([3] * num_prompts, minibatches, seed=(1, 2, 3))
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(3 * num_prompts))
    prompts = [np.unique(part // 3) for part in parts]
    assert [3 * len(p) for p in prompts] == [len(part) for part in parts]
    assert max(map(len, prompts)) - min(map(len, prompts)) <= 1
    for part, again in zip(
        parts, split_minibatches([3] * num_prompts, minibatches, seed=(1, 2, 3)), strict=True
    ):
        np.testing.assert_array_equal(part, again)


def test_split_minibatches_of_groups_of_any_size():
    sizes = [2, 5, 1, 3]
    parts = split_minibatches(sizes, 2, seed=4)
    owner = np.repeat(np.arange(4), sizes)
    assert sorted(np.concatenate(parts).tolist()) == list(range(11))
    assert all(
        np.count_nonzero(owner[part] == group) in (0, size)
        for part in parts
        for group, size in enumerate(sizes)
    )


def test_split_minibatches_shuffles_by_seed():
    parts = [split_minibatches([2] * 32, 4, seed=seed)[0].tolist() for seed in range(3)]
    assert parts[0] != parts[1] != parts[2]
    assert (
        split_minibatches([2] * 4, 1, seed=0)[0].tolist() == split_minibatches([2] * 4, 1, seed=1)[0].tolist()
    )


def test_split_minibatches_of_few_prompts_has_one_part_each():
    assert sorted(part.tolist() for part in split_minibatches([2] * 2, 5, seed=0)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("num_prompts", "minibatches"), [(0, 1), (4, 0)])
def test_split_minibatches_raises_on_nothing(num_prompts, minibatches):
    with pytest.raises(ValueError, match=f"{num_prompts} groups, minibatches={minibatches}"):
        split_minibatches([2] * num_prompts, minibatches, seed=0)


def test_sample_masks_of_failed_and_truncated_samples():
    rewards, reasons = [1.0, np.nan, 0.0, np.nan], ["stop", "stop", "length", "length"]
    counted, trained = sample_masks(rewards, reasons, mask_truncated=False)
    assert counted.tolist() == trained.tolist() == [True, False, True, False]
    counted, trained = sample_masks(rewards, reasons, mask_truncated=True)
    assert counted.tolist() == [True, False, True, False] and trained.tolist() == [True, False, False, False]


def one(prompt=2, completion=3):
    return [
        sampled(np.ones(prompt, np.int32), np.ones(completion, np.int32), np.zeros(completion, np.float32))
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trajectories": one(prompt=0)}, "trajectory 0 with 0 prompt and 3 sampled tokens"),
        ({"trajectories": one(completion=0)}, "trajectory 0 with 2 prompt and 0 sampled tokens"),
        ({"trajectories": one(prompt=9)}, "12 tokens, expected at most row_tokens=8"),
        ({"advantages": [np.nan]}, r"advantages\[0\]=nan"),
        ({"advantages": [[1.0, np.inf, 0.0]]}, r"advantages\[0\]=.*inf"),
        ({"advantages": [[1.0, 2.0]]}, r"\(2,\) advantages of trajectory 0, expected \(3,\)"),
        ({"exposure": [np.inf]}, r"exposure\[0\]=inf"),
        ({"exposure": [np.nan]}, r"exposure\[0\]=nan"),
        ({"exposure": [0.5]}, r"exposure\[0\]=0.5, expected a whole number"),
        ({"exposure": [-1]}, r"exposure\[0\]=-1"),
        ({"indices": [0, 0]}, r"indices int64 \[0 0\], expected whole numbers from 0 to 0, each once"),
        ({"indices": [-1]}, r"indices int64 \[-1\]"),
        ({"indices": [True]}, "indices bool"),
        ({"keep": [[False, False]]}, r"\(2,\) keep of trajectory 0, expected \(3,\)"),
        ({"exposure": [1.0, 1.0]}, r"exposure.shape=\(2,\), expected \(1,\)"),
        ({"advantages": [1.0, 2.0]}, r"advantages.shape=\(2,\), expected \(1,\)"),
        ({"mask": [[True]]}, r"mask.shape=\(1, 1\)"),
        ({"microbatch_tokens": 7}, "row_tokens=8, expected 1 to microbatch_tokens=7"),
        ({"old_logprobs": []}, "0 arrays in old_logprobs, expected 1"),
        ({"ref_logprobs": [[0.0]]}, r"\(1,\) ref_logprobs of trajectory 0, expected \(3,\)"),
    ],
)
def test_pack_raises_on_what_does_not_fit(changes, message):
    arguments = {
        "trajectories": one(),
        "advantages": [1.0],
        "mask": [True],
        "row_tokens": 8,
        "microbatch_tokens": 8,
    }
    assert len(pack(**arguments)) == 1
    with pytest.raises(ValueError, match=message):
        pack(**(arguments | changes))


def test_pack_names_every_problem_at_once():
    with pytest.raises(ValueError, match=r"(?s)trajectory 0.*trajectory 1.*\(and 2 more\)"):
        pack(one(prompt=9) * 7, np.zeros(7), np.ones(7, bool), 8, 8)


def episode():
    """Two turns of the policy with an observation between: prompt 7, sampled 1 2, observed 8 9,
    sampled 3 4.
    """
    turns = (
        Turn(0, 1, "prompt"),
        Turn(1, 3, "policy", "stop"),
        Turn(3, 5, "environment"),
        Turn(5, 7, "policy", "length"),
    )
    logprobs = np.array([0, -0.1, -0.2, 0, 0, -0.3, -0.4], np.float32)
    mask = np.array([0, 1, 1, 0, 0, 1, 1], bool)
    return Trajectory(
        3, np.array([7, 1, 2, 8, 9, 3, 4], np.int32), mask, logprobs, turns, ((1, 3, 4), (5, 7, 6))
    )


def test_a_trajectory_of_turns_tells_its_parts():
    t = episode()
    assert t.prompt_ids.tolist() == [7] and t.completion_ids.tolist() == [1, 2, 8, 9, 3, 4]
    assert t.sampled_tokens == 4 and t.finish_reason == "length" and t.oldest_version == 4
    np.testing.assert_array_equal(t.sampled_logprobs, np.float32([-0.1, -0.2, -0.3, -0.4]))


def test_only_sampled_tokens_are_trained():
    """What the environment wrote is context: in no mask, no length and no denominator."""
    micro = pack([episode()], [2.0], [True], 9, 9, old_logprobs=[[-1.0, -2.0, -3.0, -4.0]])
    (batch,) = micro
    assert batch.token_ids[0, :7].tolist() == [7, 1, 2, 8, 9, 3, 4] and batch.loss_mask[0].tolist() == [
        False,
        True,
        True,
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert (
        batch.old_logprobs[0].tolist() == [0, -1, -2, 0, 0, -3, -4, 0, 0]
        and batch.inverse_length[0, 1] == 0.25
    )
    assert count_denominators(micro, 9).tokens == 4
    np.testing.assert_array_equal(unpack(micro, [batch.old_logprobs], 1)[0], [-1, -2, -3, -4])
    kept = pack([episode()], [2.0], [True], 9, 9, keep=[[True, False, True, True]])[0]
    assert np.flatnonzero(kept.loss_mask[0]).tolist() == [1, 5, 6]


def test_advantages_may_differ_within_a_trajectory():
    (batch,) = pack([episode()], [[0.5, -1.0, 2.0, 3.0]], [True], 9, 9, keep=[[True, True, False, True]])
    assert batch.advantages[0].tolist() == [0, 0.5, -1, 0, 0, 0, 3, 0, 0]


@pytest.mark.parametrize("microbatch_tokens", [4, 12])
def test_exposure_counts_a_trajectory_as_often_as_it_says(microbatch_tokens):
    """Losses 1 3, 2 and 5 1 0 seen twice, never and once: token mean (2*(1 + 3) + 6) / 7, sequence mean (2*2
    + 2) / 3.
    """
    values = [[1.0, 3.0], [2.0], [5.0, 1.0, 0.0]]
    drawn = [sampled([1], np.ones(len(v), np.int32), v) for v in values]
    micro = pack(drawn, np.ones(3), np.ones(3, bool), 4, microbatch_tokens, exposure=[2, 0, 1])
    assert 1 not in np.concatenate([b.sequence_index.ravel() for b in micro])
    counts = count_denominators(micro, 5)
    assert (counts.tokens, counts.sequences, counts.constant) == (7, 3, 15)
    for aggregation, expected in (("token_mean", 2.0), ("sequence_mean", 2.0), ("constant", 14 / 15)):
        share = sum(
            float(
                losses.aggregate(
                    b.rollout_logprobs,
                    b.loss_mask,
                    b.inverse_length,
                    aggregation=aggregation,
                    denominators=counts,
                    exposure=b.exposure,
                )
            )
            for b in micro
        )
        assert share == pytest.approx(expected, rel=1e-6), aggregation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampled": np.ones(3, bool)}, r"sampled bool \(3,\), expected bool \(7,\)"),
        ({"sampled": np.ones(7, np.int64)}, r"sampled int64 \(7,\), expected bool"),
        ({"logprobs": np.zeros(2, np.float32)}, r"logprobs float32 \(2,\), expected float32 \(7,\)"),
        ({"logprobs": np.full(7, -0.5, np.float32)}, "logprobs of tokens that were not sampled"),
        ({"token_ids": np.arange(7.0)}, "token_ids float64"),
        (
            {"turns": (Turn(0, 1, "prompt"), Turn(2, 7, "policy", "stop"))},
            r"turns .*, expected them to divide 0 to 7",
        ),
        (
            {"turns": (Turn(0, 6, "prompt"), Turn(6, 3, "policy", "stop"), Turn(3, 7, "policy", "stop"))},
            "expected them to divide",
        ),
        ({"turns": (Turn(0, 7, "policy", "stop"),)}, "turns of policy, expected a prompt first"),
        (
            {"turns": (Turn(0, 7, "prompt"),)},
            "turns of prompt, expected a prompt first and at least one of the policy",
        ),
        ({"turns": (Turn(0, 1, "prompt"), Turn(1, 7, "policy"))}, "finish reasons that are not those"),
        ({"versions": ((1, 3, 4),)}, "that leave out sampled tokens"),
        ({"versions": ((-6, 7, 1),)}, "expected stretches within 0 to 7"),
        ({"versions": ((5, 7, 1), (1, 3, 2))}, "expected stretches within 0 to 7, in order"),
        (
            {"sampled": np.ones(7, bool), "versions": ((0, 7, 0),)},
            "sampled tokens outside the policy's turns",
        ),
    ],
)
def test_a_trajectory_whose_parts_do_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(episode(), **changes)


def test_a_completion_with_other_token_ids_or_logprobs_is_refused():
    for ids in ([7.9], [2**33], [[1]]):
        with pytest.raises(ValueError, match="got token ids"):
            sampled([1], ids, [0.0])
    with pytest.raises(ValueError, match=r"got logprobs \(2,\), expected \(3,\)"):
        sampled([1, 2], [3, 4, 5], [0.0, 0.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": [np.nan, 1, 1]}, "pack: no mask: got mask float64"),
        ({"mask": [0.3, 1, 1]}, "no mask: got mask"),
        ({"mask": ["False", "", ""]}, "no mask: got mask <U5"),
        ({"keep": [[0.2, 0, 0], [1.0], [1, 1, 1]]}, "no mask: got keep float64"),
        ({"advantages": [1e39, 1, 1]}, r"advantages\[0\]=1e\+39, expected finite numbers of float32"),
    ],
)
def test_pack_raises_on_masks_and_advantages_that_would_become_others(change, message):
    given = {"advantages": np.ones(3), "mask": np.ones(3, bool)} | change
    with pytest.raises(ValueError, match=message):
        pack(of_lengths((2, 3), (1, 1), (2, 3)), given.pop("advantages"), given.pop("mask"), 8, 16, **given)


def test_pack_takes_a_mask_of_zeros_and_ones():
    (batch,) = pack(of_lengths((2, 3), (1, 1), (2, 3)), np.ones(3), [0, 1.0, True], 8, 16)
    assert set(batch.sequence_index[batch.loss_mask].tolist()) == {1, 2}


def test_counts_and_parts_raise_on_what_does_not_fit():
    (batch,) = pack(of_lengths((2, 3), (1, 1)), np.ones(2), np.ones(2, bool), 8, 16)
    values = batch.rollout_logprobs
    for given, count in (
        ([values[:, :5]], 2),
        ([values.T], 2),
        ([], 2),
        ([values], 1),
        ([np.ones((*values.shape, 3))], 2),
    ):
        with pytest.raises(ValueError, match="unpack: values do not fit"):
            unpack([batch], given, count)
    for batches, longest in ([], 3), ([batch], 0):
        with pytest.raises(ValueError, match="count_denominators: nothing to count"):
            count_denominators(batches, longest)
    for sizes in [2, -1, 3], [2, 0]:
        with pytest.raises(ValueError, match="split_minibatches: nothing to split"):
            split_minibatches(sizes, 2, seed=0)


def of_lengths(*lengths):
    """Trajectories of (prompt, completion) lengths."""
    return [
        Trajectory.of_completion(i, np.arange(p) + 1, np.arange(c), np.full(c, -1.0), "stop", 0)
        for i, (p, c) in enumerate(lengths)
    ]


def test_a_trajectory_raises_on_turns_that_are_none():
    none = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32)
    with pytest.raises(ValueError, match="turns of , expected a prompt first"):
        Trajectory(0, *none, (), ())
    one = of_lengths((1, 1))[0]
    for turn in Turn(1, 2, "policy", "cut"), Turn(1, 2, "user"):
        with pytest.raises(ValueError, match=r"turns of .* that ended by"):
            dataclasses.replace(one, turns=(one.turns[0], turn))
