"""The embedded rollout engine: continuous batching over compiled JAX programs, driven from the host.

A slot is refilled when its sequence ends, so a long answer does not hold the others; between two looks of the host a
program decodes up to `decode_chunk_tokens` tokens (`continuous_batching`).  Prompts are padded at the right to a
bucket, never at the left; each program is compiled once per shape (`shapes`, `warmup`), and nothing compiles later.

What a request gets does not depend on the requests around it: its noise comes from its seed and the token's position
(`sampling`), and with `numerics.exact` its logits are the same bits in every slot, batch and bucket; they are also the
bits that the trainer's full forward gives (tests/parity/test_rollout_exact.py).  Without `exact` the bits of a sequence
depend on the compiled shape, though not on its slot or on the other sequences in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jetrl_jax.config.rollout import RolloutSection
from jetrl_jax.devices.layout import Layout
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.rollout.embedded.continuous_batching import EngineStatistics, Generation
from jetrl_jax.rollout.embedded.programs import EnginePrograms, SlotState
from jetrl_jax.rollout.embedded.sampling import Controls
from jetrl_jax.rollout.embedded.shapes import EngineShapes, batch_sizes, cache_buckets, prompt_buckets
from jetrl_jax.rollout.types import MAX_SEED, Request, SamplingParams, Trajectory
from pallas_kernels import ScaledArray

SHOWN_PROBLEMS = 5


class JaxEngine:
    """`RolloutEngine` on the trainer's own model and devices.

    Args:
      model: gives architecture and numerics; its parameters are not used and may be abstract (`nnx.eval_shape`).
      plan: the precision plan that `load_weights`' argument was published with.
      slots: sequences decoded at once.
      prefill_rows: prompts prefilled at once.
      decode_chunk_tokens: most tokens decoded between two looks of the host.
      max_prompt_tokens, max_completion_tokens: longest prompt and longest completion.
      pad_id: any valid token id; stands where nothing is read.
      layout: the devices that the layers are split over; None is JAX's default device.

    Attributes:
      statistics: what the last `generate` ran.

    Raises:
      ValueError: a size below 1, lengths beyond the model's positions, or a pad id outside the vocabulary.
    """

    def __init__(
        self,
        model: Decoder,
        plan: PrecisionPlan,
        *,
        slots: int,
        prefill_rows: int,
        decode_chunk_tokens: int,
        max_prompt_tokens: int,
        max_completion_tokens: int,
        pad_id: int,
        layout: Layout | None = None,
    ) -> None:
        sizes = {
            "slots": slots,
            "prefill_rows": prefill_rows,
            "decode_chunk_tokens": decode_chunk_tokens,
            "max_prompt_tokens": max_prompt_tokens,
            "max_completion_tokens": max_completion_tokens,
        }
        problems = [f"got {name}={size}, expected >= 1" for name, size in sizes.items() if size < 1]
        total, config = max_prompt_tokens + max_completion_tokens, model.config
        if total > config.max_position_embeddings:
            limit = f"expected at most max_position_embeddings={config.max_position_embeddings}"
            problems.append(f"got max_prompt_tokens + max_completion_tokens = {total}, {limit}")
        if not 0 <= pad_id < config.vocab_size:
            problems.append(f"got pad_id={pad_id}, expected 0 .. vocab_size - 1 = {config.vocab_size - 1}")
        if problems:
            raise ValueError("JaxEngine: bad value: " + "; ".join(problems) + ".")
        self.max_prompt_tokens, self.max_completion_tokens = max_prompt_tokens, max_completion_tokens
        self.vocab_size, self.pad_id = config.vocab_size, pad_id
        self.shapes = EngineShapes(
            batch_sizes=batch_sizes(slots),
            prompt_buckets=prompt_buckets(max_prompt_tokens),
            cache_buckets=cache_buckets(total),
            prefill_rows=prefill_rows,
            chunk=min(decode_chunk_tokens, max_completion_tokens),
        )
        self.programs = EnginePrograms(model, plan, self.shapes, layout)
        self.statistics = EngineStatistics()
        self._idle_state: SlotState | None = None  # of the last call, to be used again
        self._weights: list[Any] | None = None
        self._version = -1

    @classmethod
    def from_section(
        cls, model: Decoder, plan: PrecisionPlan, section: RolloutSection, pad_id: int, layout: Layout | None = None
    ) -> JaxEngine:
        """The engine with the sizes of a config's `rollout`; arguments and errors as the class."""
        return cls(
            model,
            plan,
            slots=section.slots,
            prefill_rows=section.prefill_rows,
            decode_chunk_tokens=section.decode_chunk_tokens,
            max_prompt_tokens=section.max_prompt_tokens,
            max_completion_tokens=section.max_completion_tokens,
            pad_id=pad_id,
            layout=layout,
        )

    @property
    def policy_version(self) -> int:
        """Version of the loaded weights; -1 before the first `load_weights`."""
        return self._version

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return self.programs.compilations

    def load_weights(self, published: Any, version: int) -> None:
        """Takes published weights by reference (nothing is copied); they must stay alive until the next call.

        Args:
          published: what `PrecisionPlan.publish` returned, under the plan of this engine.
          version: the policy version that trajectories will carry.

        Raises:
          ValueError: paths, shapes, dtypes or block shapes that are not the plan's, all listed.
        """
        given, expected = dict(named_params(published)), self.programs.published_spec
        problems = [f"{path}: missing" for path in expected if path not in given]
        problems += [f"{path}: not a parameter of this model" for path in given if path not in expected]
        problems += [
            f"{path}: got {_describe(given[path])}, expected {_describe(spec)}"
            for path, spec in expected.items()
            if path in given and _describe(given[path]) != _describe(spec)
        ]
        if problems:
            raise ValueError(f"load_weights: {len(problems)} weights do not fit the precision plan: " + "; ".join(problems) + ".")
        self._weights = [given[path] for path in expected]
        self._version = version

    def warmup(self) -> None:
        """Compiles every program that `generate` may need; takes seconds to minutes."""
        self.programs.compile_all(self._controls(SamplingParams(1.0, 1, (), 0)))

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Trajectory]:
        """Samples one completion per request; returns them in the order of the requests.

        Args:
          requests: any number, also none; more than slots wait in a queue.
          sampling: for all of them; `max_tokens` at most `max_completion_tokens`.

        Raises:
          RuntimeError: no weights were loaded.
          ValueError: a prompt that is empty or longer than `max_prompt_tokens`, an id outside the vocabulary, a seed
            outside 0 .. 2**32 - 1, or too large a `max_tokens`.
        """
        if self._weights is None:
            raise RuntimeError("generate: no weights: got policy_version=-1, expected load_weights(...) before.")
        prompts = [tuple(request.prompt_ids) for request in requests]
        self._check(requests, prompts, sampling)
        if not requests:
            self.statistics = EngineStatistics()
            return []
        state, self._idle_state = self._idle_state, None
        controls = self._controls(sampling)
        generation = Generation(self.programs, self.shapes, self._weights, requests, prompts, sampling, controls, state, self.pad_id)
        trajectories = generation.run(self._version)
        self.statistics = generation.statistics
        if np.isfinite(generation.logprobs).all():  # a NaN left in an idle slot's cache would reach its next occupant
            self._idle_state = generation.state
        return trajectories

    def sleep(self) -> None:
        """Nothing: its weights are the trainer's published ones, and its cache waits for the next rollout."""

    def _check(self, requests: Sequence[Request], prompts: list[tuple[int, ...]], sampling: SamplingParams) -> None:
        problems = []
        if sampling.max_tokens > self.max_completion_tokens:
            problems.append(f"got max_tokens={sampling.max_tokens}, expected at most max_completion_tokens={self.max_completion_tokens}")
        if any(token >= self.vocab_size for token in sampling.stop_token_ids):
            problems.append(f"got stop_token_ids={sampling.stop_token_ids}, expected ids below vocab_size={self.vocab_size}")
        for prompt, name in {prompt: f"request {request.id}" for prompt, request in zip(prompts, requests, strict=True)}.items():
            if not 0 < len(prompt) <= self.max_prompt_tokens:
                limit = f"expected 1 to max_prompt_tokens={self.max_prompt_tokens}"
                problems.append(f"{name}: got a prompt of {len(prompt)} tokens, {limit}")
            elif min(prompt) < 0 or max(prompt) >= self.vocab_size:
                problems.append(f"{name}: got a token id outside 0 .. vocab_size - 1 = {self.vocab_size - 1}")
        problems += [
            f"request {request.id}: got seed={request.seed}, expected 0 .. 2**32 - 1"
            for request in requests
            if not 0 <= request.seed <= MAX_SEED
        ]
        if problems:
            more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
            raise ValueError("generate: bad request: " + "; ".join(problems[:SHOWN_PROBLEMS]) + more + ".")

    def _controls(self, sampling: SamplingParams) -> Controls:
        is_stop = np.zeros(self.vocab_size, bool)
        is_stop[list(sampling.stop_token_ids)] = True
        temperature = 1.0 if sampling.greedy else sampling.temperature
        values = (np.float32(temperature), np.bool_(sampling.greedy), np.uint32(sampling.seed), is_stop)
        return Controls(*jax.device_put(values))


def _describe(weight: Any) -> str:
    """Kind, shape and type of a published weight, as an error shows it."""
    if isinstance(weight, ScaledArray):
        qvalue, scale = weight.qvalue, weight.scale
        return f"{qvalue.dtype} {tuple(qvalue.shape)} in blocks {weight.block_shape} with {scale.dtype} scales {tuple(scale.shape)}"
    return f"{np.dtype(weight.dtype).name} {tuple(weight.shape)}"
