"""The compiled programs of a training step, and the state that they update.

    gradient   published codes + masters + one microbatch  ->  loss share, gradient, statistics, logprobs
    check      gradient  ->  its norm, and whether gradient, next masters and next scales are finite
    update     gradient  ->  AdamW on the FP32 masters, then the new version's codes, quantised once

In a model with adapters only these have masters, moments and a gradient.  Everything else is a frozen base,
published once, which no program consumes or makes again.

If the check finds something that is not finite, no update runs, the state stays as it was, and the tensor is
reported.  So the update consumes the state's buffers and writes the new state in their place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jetrl_jax.config.precision import Fp16Section
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.devices.layout import ROWS, WHOLE, Layout, placed
from jetrl_jax.devices.processes import fetch, jit, place
from jetrl_jax.models import attention
from jetrl_jax.models.decoder import Decoder, without_adapters
from jetrl_jax.models.logprobs import completion_logprobs_with_use
from jetrl_jax.models.sharded import MESH_AXES, ROW_AXES
from jetrl_jax.precision.formats import is_adapter, is_kv_scale
from jetrl_jax.precision.kv_cache import KVCalibration, KVUse, split_model, with_scales
from jetrl_jax.precision.parameters import map_params, merge, named_params, select
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.rl.algorithm import ResolvedAlgorithm, policy_objective
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.rl.losses import Denominators
from jetrl_jax.training.loss_scale import SMALLEST, LossScale
from jetrl_jax.training.optimizer import build_optimizer
from pallas_kernels import ScaledArray, nonfinite_blocks

KV_USE = "kv_use"  # in the statistics of a gradient, if keys and values are in FP8: their `KVUse`
RANGE = "largest magnitude behind"  # an update's flag of keys and values
Loss = Callable[[Decoder, Any], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A policy version: FP32 masters, optimiser state, published weights, and FP16's loss scale.

    published: of the whole model; params and opt_state only of what is trained.
    kv: scales of keys and values with their history; None if they are not in FP8.
    """

    params: nnx.State
    opt_state: optax.OptState
    published: nnx.State
    loss_scale: LossScale | None = None
    kv: KVCalibration | None = None


@dataclass(frozen=True)
class UpdateReport:
    """Result of an update: global gradient norm, and the tensors that were not finite (then it was skipped).

    overflow: the gradient was not finite, but the loss scale can still be lowered; expected now and then.
    """

    grad_norm: float
    nonfinite: tuple[str, ...]
    overflow: bool = False


class PolicyPrograms:
    """The programs of one model, plan and optimiser; each compiles once per batch shape.

    Args:
      model: its structure and numerics are used; its parameters are not kept.
      plan: precision of each matrix product.
      optimizer: optax transformation of the masters.
      temperature: sampling temperature of the rollout.
      chunk_tokens: number of tokens whose logits are in memory at once.
      loss_scale: loss scale of the first update; None for training without.
      layout: the mesh over which state and batches are split; None for one device.

    Attributes:
      segment_unit: every segment of a packed row has to begin at a multiple of this.

    On a mesh, each device (or each group along the axis "tensor") computes forward and backward of its own
    rows and keeps its shards of the state.  The rows of a microbatch are a multiple of data * fsdp.  Logprobs
    are bit-identical to those of one device.  Gradients equal those of one device that takes each device's
    rows as a microbatch, except for the order of FP32 sums over devices.
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
        layout: Layout | None = None,
    ) -> None:
        self.graphdef, params = split_model(model)
        trained = select(params, plan.trained)
        self.paths = [path for path, _ in named_params(trained)]
        self.plan = plan
        # the policy's structure without adapters
        self.base_graphdef: Any = None if model.adapters is None else split_model(without_adapters(model))[0]
        self.optimizer = optimizer
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.loss_scale = loss_scale
        self.layout = layout
        self.segment_unit = attention.segment_unit(model.numerics)
        masters = weights = made = base = everything = None if layout is None else layout.specs(trained)
        if layout is not None and (plan.kinds or plan.adapted):
            whole, everything = layout.specs(nnx.state(model)), layout.specs(params)
            weights, base = whole, select(whole, lambda path: not is_adapter(path))
            made = select(whole, lambda path: plan.trained(path) or is_kv_scale(path))
        self.compute_dtype = model.numerics.compute_dtype
        # of the whole model, and of what is trained
        self._publish_all = self._mapped(plan.publish, (everything, WHOLE), weights)
        self._publish_shards = self._mapped(plan.publish, (masters, WHOLE), made)
        self._publish = jit(lambda params, scales=None: self._publish_shards(params, scales))
        self._start = jit(lambda params, scales=None: self._publish_all(params, scales))
        self._freeze = jit(self._mapped(plan.frozen_weights, (masters, weights), weights))
        self._recalibrate = jit(
            self._recalibrate_program, out_shardings=None if layout is None else layout.replicated
        )
        self._use = jit(self._mapped(self._use_program, (weights, ROWS, ROWS, ROWS), WHOLE))
        self._add = jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._check = jit(self._check_program, out_shardings=None if layout is None else layout.replicated)
        # the old published weights are not read, but their memory is the new ones'
        self._update = jit(self._update_program, donate_argnums=0, keep_unused=True)
        self._rescale = jit(LossScale.after)
        self._logprobs = jit(self._mapped(self._logprobs_program, (weights, ROWS, ROWS, ROWS), ROWS))
        self._base_logprobs = jit(self._mapped(self._logprobs_program, (base, ROWS, ROWS, ROWS), ROWS))
        inputs, outputs = (masters, weights, WHOLE, ROWS, WHOLE), (masters, WHOLE, ROWS)

        def policy_gradient(*arrays: Any, algorithm: ResolvedAlgorithm) -> Any:
            return self._mapped(functools.partial(self._policy_gradient_program, algorithm), inputs, outputs)(
                *arrays
            )

        def next_gradient(*arrays: Any, algorithm: ResolvedAlgorithm) -> Any:
            return self._policy_gradient_program(algorithm, *arrays)

        self._policy_gradient = jit(policy_gradient, static_argnames="algorithm")
        self._next_gradient = jit(next_gradient, static_argnames="algorithm", donate_argnums=5)
        # Only with the GPU kernels.  Sharded gradients come from collectives, which cannot add to a sum.
        self.adds_in_kernels = layout is None and model.numerics.choices.dense_backward.name == "xla_direct"
        self._supervised_gradient = jit(
            self._mapped(self._supervised_gradient_program, inputs, (masters, WHOLE, WHOLE))
        )

    def init(
        self, params: nnx.State, kv: KVCalibration | None = None, base: nnx.State | None = None
    ) -> TrainState:
        """The initial state of a policy with these FP32 masters.

        kv: scales of keys and values; None: 1, until `calibrate`, if the plan has any.
        base: the published base of adapters, whose parameters are then not read; None: they are published.
        """
        everything = params
        # copies: updates consume their buffers
        params = jax.tree.map(lambda value: jnp.array(value, jnp.float32), select(params, self.plan.trained))
        shardings, scale = None, self.loss_scale
        if self.layout is not None:
            params = place(params, self.layout.shardings(params))
            scale = place(scale, self.layout.replicated)
            shardings = self.layout.optimizer_shardings(self.optimizer, params)
        kv = kv or self._unscaled()
        if kv is not None and self.layout is not None:
            kv = place(kv, self.layout.replicated)
        scales = None if kv is None else kv.scales
        if self.plan.adapted and base is None:
            if self.layout is not None:
                everything = place(everything, self.layout.shardings(everything))
            published = self._start(everything, scales)
        else:
            published = self._publish(params, scales)
            published = published if base is None else merge(base, published)
        return TrainState(
            params, jit(self.optimizer.init, out_shardings=shardings)(params), published, scale, kv
        )

    def _unscaled(self) -> KVCalibration | None:
        scales = self.plan.unit_scales
        return None if scales is None else KVCalibration.start(scales)

    def abstract(self, params: nnx.State) -> TrainState:
        """`init` for abstract masters: shapes, dtypes and, on a mesh, shardings, to compile ahead of time."""

        def start(params: nnx.State) -> TrainState:
            kv = self._unscaled()
            published = self._publish_all(params, None if kv is None else kv.scales)
            params = select(params, self.plan.trained)
            return TrainState(params, self.optimizer.init(params), published, self.loss_scale, kv)

        state, layout = jax.eval_shape(start, params), self.layout
        if layout is None:
            return state
        scale, kv = (jax.tree.map(lambda _: layout.replicated, part) for part in (state.loss_scale, state.kv))
        weights, published = layout.shardings(state.params), layout.shardings(state.published)
        moments = layout.optimizer_shardings(self.optimizer, state.params)
        return placed(TrainState(weights, moments, published, scale, kv), state)

    def abstract_frozen(self, state: TrainState) -> nnx.State:
        """`frozen` for an abstract state."""
        if self.plan.adapted:
            return state.published
        weights = jax.eval_shape(self.plan.frozen_weights, state.params, state.published)
        shardings = None if self.layout is None else self.layout.shardings(weights)
        return weights if shardings is None else placed(shardings, weights)

    def trace_gradient(
        self, state: TrainState, batch: TrainBatch, denominators: Denominators, algorithm: ResolvedAlgorithm
    ) -> Any:
        """`policy_gradient` traced (`jax.stages.Traced`), not compiled; the arguments may be abstract."""
        return self._policy_gradient.trace(
            state.params, state.published, _factor(state), batch, denominators, algorithm=algorithm
        )

    def trace_next_gradient(
        self, state: TrainState, batch: TrainBatch, denominators: Denominators, algorithm: ResolvedAlgorithm
    ) -> Any:
        """`next_gradient` traced, if the kernels add the gradients; the arguments may be abstract."""
        arrays = state.params, state.published, _factor(state), batch, denominators, state.params
        return self._next_gradient.trace(*arrays, algorithm=algorithm)

    def trace_add(self, grads: nnx.State) -> Any:
        """`add` of two gradients traced; they may be abstract."""
        return self._add.trace(grads, grads)

    def trace_logprobs(self, weights: nnx.State, batch: TrainBatch) -> Any:
        """`logprobs` traced; the arguments may be abstract."""
        return self._logprobs.trace(weights, batch.token_ids, batch.positions, batch.segment_ids)

    def trace_update(self, state: TrainState) -> tuple[Any, Any]:
        """`update`'s two programs, the check and the step, traced; the state may be abstract."""
        state = self._apart(state)[0]
        largest = None if state.kv is None else state.kv.scales  # of its shape
        return self._check.trace(state, state.params), self._update.trace(state, state.params, largest)

    def frozen(self, state: TrainState) -> nnx.State:
        """The policy's weights for forward passes without gradient; valid until the next update."""
        return state.published if self.plan.adapted else self._freeze(state.params, state.published)

    def reference(self, state: TrainState) -> nnx.State:
        """The policy's weights to keep, or those of the base of adapters, which are held anyway."""
        if not self.plan.adapted:
            return self.frozen(state)
        scales = select(state.published, is_kv_scale)  # an update consumes them
        return merge(self.plan.frozen_base(state.published), jax.tree.map(jnp.copy, scales))

    def logprobs(self, weights: nnx.State, batch: TrainBatch) -> np.ndarray:
        """Log-probabilities float32 [R, T] of a microbatch, aligned with targets.

        weights: from `frozen` or `reference`.
        """
        program = self._base_logprobs if self._is_base(weights) else self._logprobs
        return fetch(program(weights, batch.token_ids, batch.positions, batch.segment_ids))

    def _is_base(self, weights: nnx.State) -> bool:
        """Whether the weights of a policy with adapters are those of its base only."""
        return self.plan.adapted and not any(is_adapter(path) for path, _ in named_params(weights))

    def _apart(self, state: TrainState) -> tuple[TrainState, nnx.State | None]:
        """(the state without its frozen base, which an update must not consume, and the base)."""
        if not self.plan.adapted:
            return state, None
        base = self.plan.frozen_base(state.published)
        own = select(state.published, lambda path: self.plan.trained(path) or is_kv_scale(path))
        return dataclasses.replace(state, published=own), base

    def policy_gradient(
        self, state: TrainState, batch: TrainBatch, denominators: Denominators, algorithm: ResolvedAlgorithm
    ) -> tuple[nnx.State, dict[str, jax.Array], jax.Array]:
        """One microbatch's share: (gradient, statistics with "loss", logprobs [R, T]); shares add up."""
        return self._policy_gradient(
            state.params, state.published, _factor(state), batch, denominators, algorithm=algorithm
        )

    def next_gradient(
        self,
        total: nnx.State | None,
        state: TrainState,
        batch: TrainBatch,
        denominators: Denominators,
        algorithm: ResolvedAlgorithm,
    ) -> tuple[nnx.State, dict[str, jax.Array], jax.Array]:
        """`policy_gradient` with the gradient added to `total` (None is zero), whose buffers are consumed.

        On one GPU, the WGrad products themselves add the gradients of FP8 matrices, with the bits of `add`.
        """
        if total is not None and self.adds_in_kernels:
            arrays = state.params, state.published, _factor(state), batch, denominators, total
            return self._next_gradient(*arrays, algorithm=algorithm)
        grads, stats, logprobs = self.policy_gradient(state, batch, denominators, algorithm)
        return self.add(total, grads), stats, logprobs

    def supervised_gradient(
        self, state: TrainState, batch: TrainBatch, tokens: float
    ) -> tuple[nnx.State, jax.Array, KVUse | None]:
        """Gradient; the batch's share of the mean cross-entropy over `tokens` loss tokens; its use of FP8."""
        return self._supervised_gradient(
            state.params, state.published, _factor(state), batch, jnp.float32(tokens)
        )

    def add(self, total: nnx.State | None, grads: nnx.State) -> nnx.State:
        """total + grads in FP32; None is zero."""
        return grads if total is None else self._add(total, grads)

    def update(
        self, state: TrainState, grads: nnx.State, largest: Any = None
    ) -> tuple[TrainState, UpdateReport]:
        """The next state, unchanged if something is not finite; else the state's buffers are consumed.

        largest: float32 [L, n], the largest magnitudes of keys and values in the batch, if they are in FP8;
          each must be positive and finite.  They count from the next `recalibrated` on.
        """
        scale = 0.0 if state.loss_scale is None else float(state.loss_scale.factor)
        own, base = self._apart(state)
        norm, finite = self._check(own, grads)
        names = dict.fromkeys(finite, self.paths)
        if largest is not None:
            names[RANGE] = [path for paths in self.plan.scale_paths for path in paths]
            finite |= {RANGE: np.isfinite(largest.ravel()) & (largest.ravel() > 0)}
        flags = {kind: np.asarray(flag) for kind, flag in finite.items()}
        bad = [
            f"{kind} {path}"
            for kind, flag in flags.items()
            for path, ok in zip(names[kind], flag, strict=True)
            if not ok
        ]
        if not bad:
            state = self._update(own, grads, largest)
            if base is not None:
                state = dataclasses.replace(state, published=merge(base, state.published))
        elif state.loss_scale is not None:
            lower = self._rescale(state.loss_scale, flags["gradient"].all())
            state = dataclasses.replace(state, loss_scale=lower)
        return state, UpdateReport(float(norm), tuple(bad), scale > SMALLEST and not flags["gradient"].all())

    def recalibrated(self, state: TrainState) -> TrainState:
        """The state with the scales of its last updates, for the next policy version."""
        if state.kv is None:
            return state
        kv, scales = self._recalibrate(state.kv)
        return dataclasses.replace(state, kv=kv, published=with_scales(state.published, scales))

    def calibrate(self, state: TrainState, batches: Sequence[tuple[np.ndarray, ...]]) -> TrainState:
        """The state with scales from forward passes over batches of (token ids, positions, segment ids).

        The first pass has scales of 1, the second those of the first.
        """
        if state.kv is None:
            return state
        for _ in range(2):
            use: KVUse | None = None
            weights = self.frozen(state)
            for batch in batches:
                use = fetch(self._use(weights, *batch)).and_also(use)
            assert use is not None
            kv = KVCalibration.start(state.kv.scales).after(jnp.asarray(use.largest))
            if self.layout is not None:
                kv = place(kv, self.layout.replicated)
            state = self.recalibrated(dataclasses.replace(state, kv=kv))
        return state

    def _recalibrate_program(self, kv: KVCalibration) -> tuple[KVCalibration, dict[str, jax.Array]]:
        kv = kv.recalibrated(self.compute_dtype)
        return kv, self.plan.by_path(kv.scales)

    def _use_program(self, weights: nnx.State, *arrays: jax.Array) -> KVUse | None:
        return self._everywhere(self._model(weights).with_use(*arrays)[1])

    def _everywhere(self, use: KVUse | None) -> KVUse | None:
        """The use of all devices, which have other rows and other heads."""
        return use if use is None or self.layout is None else use.over(MESH_AXES)

    def _mapped(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` mapped over the mesh: each device applies it to its part of the arguments."""
        return function if self.layout is None else self.layout.map(function, in_specs, out_specs)

    def _model(self, weights: nnx.State) -> Decoder:
        graphdef = self.base_graphdef if self._is_base(weights) else self.graphdef
        return nnx.merge(graphdef, weights if self.layout is None else self.layout.shards(weights))

    def _sum(self, tree: Any) -> Any:
        """The sum over the devices' shares."""
        return tree if self.layout is None else jax.lax.psum(tree, ROW_AXES)

    def _completion_logprobs(
        self, weights: nnx.State, *arrays: jax.Array
    ) -> tuple[jax.Array, jax.Array, KVUse | None]:
        return completion_logprobs_with_use(
            self._model(weights), *arrays, temperature=self.temperature, chunk_tokens=self.chunk_tokens
        )

    def _logprobs_program(self, weights: nnx.State, *arrays: jax.Array) -> jax.Array:
        return self._completion_logprobs(weights, *arrays)[0]

    def _policy_gradient_program(
        self,
        algorithm: ResolvedAlgorithm,
        params: nnx.State,
        published: nnx.State,
        factor: Any,
        batch: TrainBatch,
        denominators: Denominators,
        total: nnx.State | None = None,
    ) -> Any:
        def loss(params: nnx.State) -> Any:
            weights = self.plan.training_weights(params, published, total)
            logprobs, entropy, use = self._completion_logprobs(
                weights, batch.token_ids, batch.positions, batch.segment_ids
            )
            value, stats = policy_objective(logprobs, batch, denominators, algorithm, entropy=entropy)
            return _scaled(value, factor), (stats | {"loss": value}, logprobs, use)

        (_, (stats, logprobs, use)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        if total is not None:
            sums = dict(named_params(total))
            grads = map_params(lambda path, own: own if self.plan.adds(path) else sums[path] + own, grads)
        stats = self._sum(stats)
        return grads, stats if use is None else stats | {KV_USE: self._everywhere(use)}, logprobs

    def _supervised_gradient_program(
        self, params: nnx.State, published: nnx.State, factor: Any, batch: TrainBatch, tokens: jax.Array
    ) -> Any:
        def loss(params: nnx.State) -> tuple[jax.Array, Any]:
            weights = self.plan.training_weights(params, published)
            logprobs, _, use = self._completion_logprobs(
                weights, batch.token_ids, batch.positions, batch.segment_ids
            )
            value = -jnp.sum(jnp.where(batch.loss_mask, logprobs, 0.0)) / tokens
            return _scaled(value, factor), (value, use)

        (_, (value, use)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return grads, self._sum(value), self._everywhere(use)

    def _step(self, state: TrainState, grads: nnx.State) -> tuple[nnx.State, TrainState, jax.Array]:
        """(gradient without the loss scale, state after the step, norm of the gradient)."""
        if (factor := _factor(state)) is not None:
            grads = jax.tree.map(lambda value: value / factor, grads)
        norm = optax.tree.norm(grads)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a Python float to an int32 power
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        published = self._publish_shards(params, None if state.kv is None else state.kv.scales)
        return grads, TrainState(params, opt_state, published), norm

    def _check_program(self, state: TrainState, grads: nnx.State) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The gradient's norm, and whether each parameter's gradient, next master and next scales are finite.

        A separate program, since one that also made the next state would need memory for both.
        """
        grads, new, norm = self._step(state, grads)
        # gradient clipping divides by the root of their sum, so the sum must not overflow
        squares = jax.tree.map(lambda value: jnp.sum(value * value), grads)
        return norm, {
            "gradient": _finite(squares),
            "parameter": _finite(new.params),
            "scale": _finite(new.published, self.paths),
        }

    def _update_program(self, state: TrainState, grads: nnx.State, largest: jax.Array | None) -> TrainState:
        """The next state; everything in it is finite."""
        new, scale = self._step(state, grads)[1], state.loss_scale
        if state.kv is not None:
            assert largest is not None  # keys and values in FP8 come with their range
            new = dataclasses.replace(new, kv=state.kv.after(largest))
        return dataclasses.replace(new, loss_scale=scale and scale.after(jnp.bool_(True)))


def _factor(state: TrainState) -> Any:
    """FP16's loss scale, or None."""
    return None if state.loss_scale is None else state.loss_scale.factor


def _scaled(loss: jax.Array, factor: Any) -> jax.Array:
    """The loss times FP16's loss scale, as it is differentiated."""
    return loss if factor is None else loss * factor


def _finite(state: nnx.State, paths: Sequence[str] | None = None) -> jax.Array:
    """Whether each parameter is finite: bool [number of parameters], in the state's order.

    paths: the parameters to look at; None takes all.
    """

    def one(value: Any) -> jax.Array:
        return (
            nonfinite_blocks(value) == 0 if isinstance(value, ScaledArray) else jnp.all(jnp.isfinite(value))
        )

    return jnp.stack([one(value) for path, value in named_params(state) if paths is None or path in paths])


def build_programs(
    config: RunConfig,
    model: Decoder,
    plan: PrecisionPlan,
    layout: Layout | None,
    optimizer: optax.GradientTransformation | None = None,
) -> PolicyPrograms:
    """The training programs of a config; the model's parameters may be abstract.

    optimizer: None for that of the RL phase.
    """
    return PolicyPrograms(
        model,
        plan,
        optimizer or build_optimizer(config.optimizer, config.total_updates),
        temperature=config.rollout.temperature if optimizer is None else 1.0,
        chunk_tokens=config.batch.logprob_chunk_tokens,
        loss_scale=LossScale.start(config.precision.loss_scale)
        if isinstance(config.precision, Fp16Section)
        else None,
        layout=layout,
    )
