"""The objective of every algorithm and aggregation, split over microbatches and devices, against the float64
oracle of the whole.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jetrl_jax.rl.algorithm import ResolvedAlgorithm, policy_objective, resolve_algorithm
from jetrl_jax.rl.batching import TrainBatch, count_denominators, pack
from jetrl_jax.rollout.types import Trajectory
from tests.oracles import rl_oracle
from tests.sections import algorithm_section

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
COUNT, LONGEST = 13, 9
SETTINGS = {
    "grpo": {"name": "grpo", "kl_coef": 0.2, "dual_clip": 3.0},
    "gspo": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    "cispo": {"name": "cispo", "clip_low": 0.4, "clip_high": 0.4},
}


def draw() -> tuple[list[Trajectory], np.ndarray, dict[str, np.ndarray]]:
    """Trajectories, advantages [N] (some zero, as of a group of equal rewards), and token values [N,
    LONGEST], one-token answers too.
    """
    rng = np.random.default_rng(4)
    lengths = [1, 1, LONGEST, *rng.integers(1, LONGEST + 1, COUNT - 3)]
    now = -rng.exponential(1.5, (COUNT, LONGEST))
    values = {
        "now": now,
        "old": now + 0.3 * rng.normal(size=now.shape),
        "ref": now + 0.3 * rng.normal(size=now.shape),
    }
    values["mask"] = np.arange(LONGEST) < np.array(lengths)[:, None]
    values["weight"] = rng.uniform(0.5, 1.5, now.shape)
    trajectories = [
        Trajectory.of_completion(
            i,
            np.ones(rng.integers(1, 6), np.int32),
            np.ones(n, np.int32),
            np.zeros(n, np.float32),
            "length",
            0,
        )
        for i, n in enumerate(lengths)
    ]
    advantages = rng.normal(size=COUNT)
    advantages[4:6] = 0.0
    return trajectories, advantages, values


def oracle(
    name: str,
    aggregation: str,
    advantages: np.ndarray,
    values: dict[str, np.ndarray],
    algorithm: ResolvedAlgorithm,
) -> float:
    """The whole loss in float64; CISPO's clipped ratio is that of `values["fixed"]`,
    as it has no gradient.
    """
    token = np.zeros((COUNT, LONGEST))
    clips = (algorithm.clip_low, algorithm.clip_high)
    for i in range(COUNT):
        trained = np.nonzero(values["mask"][i])[0]
        a, now, old = float(advantages[i]), values["now"][i], values["old"][i]
        for t in trained:
            if name == "gspo":
                token[i, t] = rl_oracle.token_loss(float(np.mean((now - old)[trained])), 0.0, a, *clips, None)
            elif name == "cispo":
                token[i, t] = rl_oracle.cispo_gradient(values["fixed"][i, t], old[t], a, *clips) * now[t]
            else:
                token[i, t] = rl_oracle.token_loss(now[t], old[t], a, *clips, algorithm.dual_clip)
            token[i, t] *= values["weight"][i, t] if name != "gspo" else 1.0
            if algorithm.kl_coef:
                token[i, t] += algorithm.kl_coef * rl_oracle.kl(now[t], values["ref"][i, t], "k3")
    index = np.repeat(np.arange(COUNT)[:, None], LONGEST, 1)
    return rl_oracle.aggregate(token, values["mask"], index, aggregation, LONGEST)


@functools.cache
def expected(name: str, aggregation: str) -> tuple[float, np.ndarray]:
    """(loss, gradient [N, LONGEST]) of the oracle, the gradient by central differences."""
    _, advantages, values = draw()
    values["fixed"] = values["now"]
    algorithm = resolve_algorithm(algorithm_section(**SETTINGS[name]), LONGEST)

    def loss(now: np.ndarray) -> float:
        return oracle(name, aggregation, advantages, values | {"now": now}, algorithm)

    return loss(values["now"]), rl_oracle.central_difference(loss, values["now"])


def rows(batch: TrainBatch, trajectories: list[Trajectory], values: np.ndarray, outside: float) -> np.ndarray:
    """Token values [N, LONGEST] at their places in packed rows; `outside` wherever nothing is trained."""
    found = np.full(batch.loss_mask.shape, outside, np.float32)
    for place in zip(*np.nonzero(batch.loss_mask), strict=True):
        i = batch.sequence_index[place]
        found[place] = values[i, batch.positions[place] - len(trajectories[i].prompt_ids)]
    return found


def program(settings: dict[str, object], devices: int):
    """(logprobs, batch, denominators) -> (losses [3], gradients [3, R, T]) as `devices` devices compute them,
    each from its rows.
    """
    algorithms = [
        resolve_algorithm(algorithm_section(**settings, loss_aggregation=name), LONGEST)
        for name in AGGREGATIONS
    ]

    def shares(now: jax.Array, batch: TrainBatch, denominators: object) -> tuple[jax.Array, jax.Array]:
        def losses(now: jax.Array) -> tuple[jax.Array, jax.Array]:
            values = jnp.stack(
                [policy_objective(now, batch, denominators, algorithm)[0] for algorithm in algorithms]
            )
            return values, values

        gradient, value = jax.jacrev(losses, has_aux=True)(now)
        return jax.lax.psum(value, "rows"), gradient

    mesh, split, whole = (
        Mesh(np.array(jax.devices()[:devices]), ("rows",)),
        PartitionSpec("rows"),
        PartitionSpec(),
    )
    mapped = jax.shard_map(
        shares,
        mesh=mesh,
        in_specs=(split, split, whole),
        out_specs=(whole, PartitionSpec(None, "rows")),
        check_vma=False,
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("microbatch_rows", [4, 8, 16])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_aggregation_adds_up_over_microbatches_and_devices(
    name: str, microbatch_rows: int, devices: int
) -> None:
    trajectories, advantages, values = draw()
    correction = (
        None
        if name == "gspo"
        else [
            row[mask].astype(np.float32) for row, mask in zip(values["weight"], values["mask"], strict=True)
        ]
    )
    row_tokens = LONGEST + 6
    batches = pack(
        trajectories,
        advantages.astype(np.float32),
        np.ones(COUNT, bool),
        row_tokens,
        microbatch_rows * row_tokens,
        correction=correction,
    )
    denominators, run = count_denominators(batches, LONGEST), program(SETTINGS[name], devices)
    total, gradient = np.zeros(3), np.zeros((3, COUNT, LONGEST))
    for batch in batches:
        # what is not trained is not finite: a mask left out anywhere would be seen
        old, ref = (rows(batch, trajectories, values[key], np.nan) for key in ("old", "ref"))
        batch = replace(batch, old_logprobs=old, ref_logprobs=ref if name == "grpo" else None)
        loss, slope = run(rows(batch, trajectories, values["now"], -np.inf), batch, denominators)
        total += np.asarray(loss, np.float64)
        for r, t in zip(*np.nonzero(batch.loss_mask), strict=True):
            i = batch.sequence_index[r, t]
            gradient[:, i, batch.positions[r, t] - len(trajectories[i].prompt_ids)] += np.asarray(slope)[
                :, r, t
            ]
        assert not np.asarray(slope)[:, ~batch.loss_mask].any()
    for k, aggregation in enumerate(AGGREGATIONS):
        value, slope = expected(name, aggregation)
        np.testing.assert_allclose(total[k], value, rtol=2e-6, atol=1e-7)
        np.testing.assert_allclose(gradient[k], slope, rtol=2e-5, atol=1e-7)
