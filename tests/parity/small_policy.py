"""A small policy and ragged trajectories, shared by the tests of log-probabilities, gradients and updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetrl_jax.models.choices import resolve
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.lora import Adapters
from jetrl_jax.precision.formats import is_adapter
from jetrl_jax.precision.kv_cache import split_model
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import jit, map_params, named_params
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.rollout.types import Trajectory
from tests.small_model import small_model

VOCAB = 37
CONFIG = small_model(vocab_size=VOCAB)  # one layer; tests/parity/test_rollout_exact.py has two


def resolved(numerics: Numerics | None = None, **options: Any) -> Numerics:
    """Numerics with the implementations that the small model has, for operations that are called by
    themselves.
    """
    return resolve(Numerics(**options) if numerics is None else numerics, CONFIG)


class SmallPolicy:
    """Model, masters, plan and published weights of one preset; the masters are the same for every preset."""

    def __init__(
        self,
        preset: str,
        config: ModelConfig = CONFIG,
        *,
        seed: int = 0,
        overrides: Sequence[tuple[str, str]] = (),
        adapters: Adapters | None = None,
        **options: Any,
    ) -> None:
        dtype = {"fp32": "float32", "fp16": "float16"}.get(preset, "bfloat16")
        self.model = Decoder(
            config, Numerics(compute_dtype=dtype, **options), rngs=nnx.Rngs(seed), adapters=adapters
        )
        self.numerics = self.model.numerics
        self.graphdef, params = split_model(self.model)
        rng = np.random.default_rng(seed + 1)

        def spread(_: str, value: jax.Array) -> jax.Array:
            """Larger matrices (distributions neither flat nor certain), vectors that are not all alike."""
            return (
                value * 6
                if value.ndim == 2
                else value + np.asarray(rng.normal(size=value.shape) * 0.2, np.float32)
            )

        self.params = map_params(spread, params)
        if adapters is not None:
            self.params = with_adapters(self.params, seed)
        self.paths = [path for path, _ in named_params(self.params)]
        self.plan = PrecisionPlan(self.paths, preset, overrides, kinds=self.numerics.kinds)
        # distinct scales, in the range of the keys and values
        shape = len(self.plan.scale_paths), len(self.plan.kinds)
        self.scales = (
            2.0 ** -(2 + np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 5) if shape[1] else None
        )
        self.published = jit(self.plan.publish)(self.params, self.scales)

    def training_model(self) -> Decoder:
        return nnx.merge(self.graphdef, self.plan.training_weights(self.params, self.published))

    def rollout_model(self) -> Decoder:
        return nnx.merge(self.graphdef, self.published)


def with_adapters(params: nnx.State, seed: int) -> nnx.State:
    """Parameters whose adapters are random, B too, so that they add as much as a tenth of the base."""
    rng = np.random.default_rng((seed, 20))

    def draw(path: str, value: jax.Array) -> jax.Array:
        size = 0.1 if ".lora_A." in path else 0.05
        return jnp.asarray(rng.normal(size=value.shape) * size, jnp.float32) if is_adapter(path) else value

    return map_params(draw, params)


def surprise(policy: SmallPolicy, sampled: Sequence[Trajectory], rows: int = 50) -> tuple[float, float]:
    """By how many standard deviations sampled tokens differ from draws of the policy at temperature 1.

    (Of the sum of their surprisals, of the count of the token that differs most), from the trainer's whole
    distributions at their places.
    """
    model = policy.rollout_model()

    def distributions(ids: jax.Array) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
        return jax.nn.log_softmax(model.logits(model(ids, places, jnp.ones_like(ids))), axis=-1)

    compiled, width = jit(distributions), max(len(one.token_ids) for one in sampled)
    excess, spread = 0.0, 0.0
    count, variance = np.zeros(model.config.vocab_size), np.zeros(model.config.vocab_size)
    for first in range(0, len(sampled), rows):
        ids = np.zeros((rows, width), np.int32)
        for row, one in zip(ids, sampled[first : first + rows], strict=False):
            row[: len(one.token_ids)] = one.token_ids
        logp = np.asarray(compiled(ids), np.float64)
        for row, one in zip(logp, sampled[first : first + rows], strict=False):
            places = np.flatnonzero(one.sampled)
            here, tokens = row[places - 1], one.token_ids[places]
            p = np.exp(here)
            mean = (p * here).sum(axis=1)
            excess += (mean - here[np.arange(len(tokens)), tokens]).sum()
            spread += (p * here**2).sum() - (mean**2).sum()
            count += np.bincount(tokens, minlength=len(count)) - p.sum(axis=0)
            variance += (p * (1 - p)).sum(axis=0)
    return float(abs(excess) / np.sqrt(spread)), float((np.abs(count) / np.sqrt(variance + 1)).max())


def trajectories(lengths: list[tuple[int, int]], seed: int = 0) -> list[Trajectory]:
    """Random trajectories of (prompt, completion) lengths."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(2, VOCAB, count).astype(np.int32)

    return [
        Trajectory.of_completion(
            i, tokens(prompt), tokens(completion), np.full(completion, -3, np.float32), "stop", 0
        )
        for i, (prompt, completion) in enumerate(lengths)
    ]
