"""The programs and arrays of a run as shapes only, which the planner counts and compiles.

Nothing is allocated; of a checkpoint only `config.json` is read.  Engine and trainer are those of
`jetrl_jax.rollout` and `jetrl_jax.training`, called with abstract arguments.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jetrl_jax.config.arithmetic import build_adapters, build_numerics, build_plan
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.devices.layout import Layout, placed
from jetrl_jax.models.choices import resolve
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.draft_head import DraftHead
from jetrl_jax.models.flash_attention import KERNELS, PLANNED
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.rl.algorithm import resolve_algorithm
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.rl.losses import Denominators
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.embedded.sampling import Controls
from jetrl_jax.training.draft import DraftTrainer
from jetrl_jax.training.programs import build_programs
from pallas_kernels.implementations import is_elsewhere


class AbstractRun:
    """The parts of a run with abstract arrays.

    Args:
      config: the run's config.
      sizes: the model's sizes.
      on_gpu: whether the key/value cache and attention are those of a GPU; else those of this machine.
      devices: the devices to lay arrays out on; None takes this process's.

    Attributes:
      layout: the mesh; None for one device.
      attention: the implementation of attention, with the reason.
      programs, state: the trainer's; frozen: the weights of a forward without gradient.
      drafter: the trainer of a draft head, or None.
      engine: the embedded engine of one copy of the policy, or None.
    """

    def __init__(
        self,
        config: RunConfig,
        sizes: ModelConfig,
        *,
        on_gpu: bool = True,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        self.config = config
        self.sizes = sizes
        numerics = resolve(
            build_numerics(config.precision, config.numerics, config.samples_by_vllm), sizes, elsewhere=on_gpu
        )
        self.attention = numerics.choices.attention
        # the kernels are compiled themselves where a program is
        counted = ("cudnn",) if is_elsewhere() else ("cudnn", *KERNELS)
        if on_gpu and self.attention.name in counted:
            numerics = resolve(dataclasses.replace(numerics, attention=PLANNED), sizes, elsewhere=True)
        remat = config.batch.remat == "layer"
        adapters = build_adapters(config.lora)
        self.model = nnx.eval_shape(
            lambda: Decoder(sizes, numerics, rngs=nnx.Rngs(0), remat=remat, adapters=adapters)
        )
        params = nnx.state(self.model, nnx.Param)
        self.plan = build_plan([path for path, _ in named_params(params)], config.precision)
        sharded = config.sharding.devices > 1
        self.layout = Layout(config.sharding, self.plan, self.model, devices) if sharded else None
        self._device = None if sharded or devices is None else SingleDeviceSharding(devices[0])
        self.programs = build_programs(config, self.model, self.plan, self.layout)
        self.state = self._placed(self.programs.abstract(params))
        self.frozen = self._placed(self.programs.abstract_frozen(self.state))
        self.algorithm = resolve_algorithm(
            config.algorithm, config.rollout.max_completion_tokens, config.correction
        )
        self.drafter = self._drafter(numerics)
        self.engine = None if config.samples_by_vllm else self._engine()

    @property
    def rows(self) -> int:
        """Rows of a microbatch on one device."""
        return self.config.microbatch_tokens // self.config.row_tokens // self.config.sharding.row_shards

    @property
    def microbatches(self) -> int:
        """Microbatches of one optimiser step if every sequence is so long that it fills a row."""
        rollout = self.config.rollout
        sequences = -(-rollout.prompts_per_step // self.config.algorithm.minibatches) * rollout.group_size
        return -(-sequences // (self.rows * self.config.sharding.row_shards))

    def batch(self) -> TrainBatch:
        """One microbatch over all devices."""
        shape = (self.rows * self.config.sharding.row_shards, self.config.row_tokens)
        ids, number, mask = (
            jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32, jnp.bool_)
        )
        optional = {
            "old_logprobs": number if self.algorithm.needs_old or self.algorithm.bypass else None,
            "ref_logprobs": number if self.algorithm.needs_reference else None,
            "correction": number if self.algorithm.recompute else None,
        }
        return TrainBatch(ids, ids, ids, mask, number, number, ids, number, **optional)

    def trace(self, program: str) -> Any:
        """A traced program (`jax.stages.Traced`).

        program: gradient, next gradient (whose kernels add it to a sum), add, logprobs, check, step, draft,
          prefill or decode.
        """
        if program in ("gradient", "next gradient"):
            count: Any = jax.ShapeDtypeStruct((), jnp.float32)
            arguments = self.state, self.batch(), Denominators(count, count, count), self.algorithm
            trace = (
                self.programs.trace_gradient if program == "gradient" else self.programs.trace_next_gradient
            )
            return trace(*arguments)
        if program == "add":
            return self.programs.trace_add(self.state.params)
        if program == "logprobs":
            return self.programs.trace_logprobs(self.frozen, self.batch())
        if program in ("check", "step"):
            return self.programs.trace_update(self.state)[program == "step"]
        if program == "draft":
            assert self.drafter is not None
            return self.drafter.trace(self.frozen, self.batch())
        engine = self.engine
        assert engine is not None and program in ("prefill", "decode")
        head = [] if self.drafter is None else jax.tree.leaves(self.drafter.draft.abstract)
        weights = self._placed([*engine.programs.published_spec.values(), *head])
        if program == "prefill":
            rows = engine.shapes.prefill_rows
            tokens = jax.ShapeDtypeStruct((rows, engine.shapes.prompt_buckets[-1]), jnp.int32)
            return engine.programs.trace_prefill(weights, tokens, jax.ShapeDtypeStruct((rows,), jnp.int32))
        scalars: list[Any] = [
            jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.bool_, jnp.uint32)
        ]
        stops: Any = jax.ShapeDtypeStruct((self.sizes.vocab_size,), jnp.bool_)
        controls = Controls(scalars[0], scalars[1], scalars[2], stops)
        return engine.programs.trace_decode(
            weights, self.slots(), controls, jax.ShapeDtypeStruct((), jnp.int32)
        )

    def with_config(self, config: RunConfig) -> AbstractRun:
        """The same arrays with a config that differs only in its batch section."""
        changed = copy.copy(self)
        changed.config = config
        return changed

    def engine_weights(self) -> Any:
        """The weights that the engine multiplies."""
        assert self.engine is not None
        return self.engine.programs.abstract_weights()

    def slots(self) -> Any:
        """The engine's slots for the longest sequences."""
        assert self.engine is not None
        shapes = self.engine.shapes
        return self.engine.programs.abstract_state(shapes.batch_sizes[-1], shapes.cache_buckets[-1])

    @property
    def cache_token_bytes(self) -> int:
        """Bytes of the keys and values of one token in the embedded engine's cache, on a device."""
        state = self.slots()
        slots, length = state.shape
        return on_one_device(state.cache) // (slots * length)

    def _placed(self, tree: Any) -> Any:
        """On the one device that was given, if one was: programs of these arrays are compiled for it."""
        return tree if self._device is None else placed(self._device, tree)

    def _engine(self) -> JaxEngine:
        layout = (
            self.layout.copies()[0] if self.layout is not None and self.config.sharding.tensor > 1 else None
        )
        draft = None if self.drafter is None else self.drafter.draft
        return JaxEngine.from_section(self.model, self.plan, self.config.rollout, 0, layout, draft)

    def _drafter(self, numerics: Numerics) -> DraftTrainer | None:
        section = self.config.draft_head
        if section is None:
            return None
        ids = np.arange(self.sizes.vocab_size)
        head = nnx.eval_shape(lambda: DraftHead(self.sizes, numerics, ids, rngs=nnx.Rngs(0)))
        head.d2t = nnx.Variable(jnp.asarray(ids, jnp.int32))
        return DraftTrainer(head, self.programs, section.learning_rate, section.lengths)


def on_one_device(tree: Any) -> int:
    """Bytes of a tree of abstract arrays on one device; an array without a sharding counts whole."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        size = leaf.dtype.itemsize
        for length in shape:
            size *= length
        total += size
    return total
