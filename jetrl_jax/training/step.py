"""The compiled programs of a training step, and the state that they carry from policy version to version.

    gradient   published codes + masters + one microbatch  ->  loss share, gradient, statistics, logprobs
    update     gradient  ->  AdamW on the FP32 masters, then the new version's codes, quantised once

A step whose gradient, new masters or new scales are not finite leaves the state as it was and says which
tensor it was; the selection happens inside the program, so buffers can be donated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision import PrecisionPlan, jit, named_params
from jetrl_jax.rl.algorithm import ResolvedAlgorithm, policy_objective
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.rl.logprobs import completion_logprobs
from jetrl_jax.rl.losses import Denominators
from jetrl_jax.training.loss_scale import SMALLEST, LossScale
from pallas_kernels import ScaledArray, nonfinite_blocks

Loss = Callable[[Decoder, Any], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A policy version: FP32 masters, optimiser moments, the published weights made from the masters, FP16's loss scale."""

    params: nnx.State
    opt_state: optax.OptState
    published: nnx.State
    loss_scale: LossScale | None = None


@dataclass(frozen=True)
class UpdateReport:
    """What an update did: global gradient norm, and the tensors that were not finite (then nothing changed).

    overflow: the gradient was not finite under a loss scale that can still be lowered, as now and then it must be.
    """

    grad_norm: float
    nonfinite: tuple[str, ...]
    overflow: bool = False


class PolicyPrograms:
    """The programs of one model, plan and optimiser; each compiles once per batch shape.

    Args:
      model: gives structure and numerics; its parameters are not kept.
      plan: precision table.
      optimizer: optax transformation over the masters.
      temperature: the rollout's sampling temperature.
      chunk_tokens: tokens whose logits exist at once.
      loss_scale: that of the first update; None trains without.
    """

    def __init__(
        self,
        model: Decoder,
        plan: PrecisionPlan,
        optimizer: optax.GradientTransformation,
        *,
        temperature: float,
        chunk_tokens: int,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.graphdef, params = nnx.split(model)
        self.paths = [path for path, _ in named_params(params)]
        self.plan, self.optimizer = plan, optimizer
        self.temperature, self.chunk_tokens, self.loss_scale = temperature, chunk_tokens, loss_scale
        self._publish = jit(plan.publish)
        self._freeze = jit(plan.frozen_weights)
        self._add = jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._update = jit(self._update_program, donate_argnums=0)
        self._logprobs = jit(self._logprobs_program)
        self._policy_gradient = jit(self._policy_gradient_program, static_argnums=3)
        self._supervised_gradient = jit(self._supervised_gradient_program)

    def init(self, params: nnx.State) -> TrainState:
        """The first state of a policy with these FP32 masters."""
        params = jax.tree.map(lambda value: jnp.array(value, jnp.float32), params)  # copies: updates consume their buffers
        return TrainState(params, jit(self.optimizer.init)(params), self._publish(params), self.loss_scale)

    def frozen(self, state: TrainState) -> nnx.State:
        """The state's policy as weights of a forward without gradient (a reference policy)."""
        return self._freeze(state.params, state.published)

    def logprobs(self, weights: nnx.State, batch: TrainBatch) -> np.ndarray:
        """Log-probabilities float32 [R, T] of a microbatch under frozen weights, aligned with targets."""
        return np.asarray(self._logprobs(weights, batch.token_ids, batch.positions, batch.segment_ids))

    def policy_gradient(
        self, state: TrainState, batch: TrainBatch, denominators: Denominators, algorithm: ResolvedAlgorithm
    ) -> tuple[nnx.State, dict[str, jax.Array], jax.Array]:
        """One microbatch's share: (gradient, statistics with "loss", logprobs [R, T]); shares add up."""
        return self._policy_gradient(state, batch, denominators, algorithm)

    def supervised_gradient(self, state: TrainState, batch: TrainBatch, tokens: float) -> tuple[nnx.State, jax.Array]:
        """Gradient and share of the mean cross-entropy over `tokens` loss tokens."""
        return self._supervised_gradient(state, batch, jnp.float32(tokens))

    def add(self, total: nnx.State | None, grads: nnx.State) -> nnx.State:
        """total + grads in FP32; None is zero."""
        return grads if total is None else self._add(total, grads)

    def update(self, state: TrainState, grads: nnx.State) -> tuple[TrainState, UpdateReport]:
        """The next state (the arguments' buffers are consumed), unchanged where something is not finite."""
        scale = 0.0 if state.loss_scale is None else float(state.loss_scale.factor)
        state, norm, finite = self._update(state, grads)
        flags = {kind: np.asarray(flag) for kind, flag in finite.items()}
        bad = [f"{kind} {path}" for kind, flag in flags.items() for path, ok in zip(self.paths, flag, strict=True) if not ok]
        return state, UpdateReport(float(norm), tuple(bad), scale > SMALLEST and not flags["gradient"].all())

    def _bind(self, params: nnx.State, published: nnx.State) -> Decoder:
        return nnx.merge(self.graphdef, self.plan.training_weights(params, published))

    def _completion_logprobs(self, model: Decoder, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return completion_logprobs(model, *arrays, temperature=self.temperature, chunk_tokens=self.chunk_tokens)

    def _logprobs_program(self, weights: nnx.State, *arrays: jax.Array) -> jax.Array:
        return self._completion_logprobs(nnx.merge(self.graphdef, weights), *arrays)[0]

    def _policy_gradient_program(
        self, state: TrainState, batch: TrainBatch, denominators: Denominators, algorithm: ResolvedAlgorithm
    ) -> Any:
        def loss(params: nnx.State) -> Any:
            model = self._bind(params, state.published)
            logprobs, entropy = self._completion_logprobs(model, batch.token_ids, batch.positions, batch.segment_ids)
            value, stats = policy_objective(logprobs, batch, denominators, algorithm, entropy=entropy)
            return _scaled(value, state), (stats | {"loss": value}, logprobs)

        (_, (stats, logprobs)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return grads, stats, logprobs

    def _supervised_gradient_program(self, state: TrainState, batch: TrainBatch, tokens: jax.Array) -> Any:
        def loss(params: nnx.State) -> tuple[jax.Array, jax.Array]:
            model = self._bind(params, state.published)
            logprobs, _ = self._completion_logprobs(model, batch.token_ids, batch.positions, batch.segment_ids)
            value = -jnp.sum(jnp.where(batch.loss_mask, logprobs, 0.0)) / tokens
            return _scaled(value, state), value

        (_, value), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return grads, value

    def _update_program(self, state: TrainState, grads: nnx.State) -> Any:
        scale = state.loss_scale
        if scale is not None:
            grads = jax.tree.map(lambda value: value / scale.factor, grads)
        norm = optax.tree.norm(grads)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a Python float to an int32 power
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = TrainState(params, opt_state, self.plan.publish(params))
        squares = jax.tree.map(lambda value: jnp.sum(value * value), grads)  # the clip divides by their root: it must not overflow
        finite = {"gradient": _finite(squares), "parameter": _finite(params), "scale": _finite(new.published)}
        ok = jnp.all(jnp.stack([jnp.all(flag) for flag in finite.values()]))
        kept = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, dataclasses.replace(state, loss_scale=None))
        return dataclasses.replace(kept, loss_scale=scale and scale.after(jnp.all(finite["gradient"]))), norm, finite


def _scaled(loss: jax.Array, state: TrainState) -> jax.Array:
    """What is differentiated: the loss times FP16's loss scale."""
    return loss if state.loss_scale is None else loss * state.loss_scale.factor


def _finite(state: nnx.State) -> jax.Array:
    """bool [number of parameters], in the state's order."""

    def one(value: Any) -> jax.Array:
        return nonfinite_blocks(value) == 0 if isinstance(value, ScaledArray) else jnp.all(jnp.isfinite(value))

    return jnp.stack([one(value) for _, value in named_params(state)])
