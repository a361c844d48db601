"""The embedded rollout engine: continuous batching over compiled JAX programs, driven from the host.

A slot is refilled when its sequence ends, so that a long answer does not hold up the others.  A program
decodes up to `decode_chunk_tokens` tokens before the host checks again (`continuous_batching`).  Prompts are
padded on the right to a bucket, never on the left.  With a draft a step of the model may sample several
tokens, which are the same (`speculation`).  Each program is compiled once per shape (`shapes`,
`warmup`).

The result of a request does not depend on other requests.  Its noise comes from its seed and the token's
position (`sampling`).  With `numerics.exact` its logits are the same bits in every slot, batch and bucket,
and the bits of the trainer's full forward (tests/parity/test_rollout_exact.py).  Without `exact` the bits of
a sequence depend on the compiled shape, but not on its slot or the other sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jetrl_jax.config.rollout import JaxEngineSection, LookupSection, RolloutSection
from jetrl_jax.devices.layout import Layout
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.draft_head import DraftHead
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.rollout.embedded.continuous_batching import EngineStatistics, Generation
from jetrl_jax.rollout.embedded.draft_length import DraftLength
from jetrl_jax.rollout.embedded.head_draft import HeadDraft
from jetrl_jax.rollout.embedded.programs import EnginePrograms, SlotState
from jetrl_jax.rollout.embedded.sampling import Controls
from jetrl_jax.rollout.embedded.score import Scorer
from jetrl_jax.rollout.embedded.shapes import (
    EngineShapes,
    batch_sizes,
    cache_buckets,
    prompt_buckets,
    smallest_fit,
    turn_buckets,
)
from jetrl_jax.rollout.embedded.speculation import Completions, Draft, Lookup, described
from jetrl_jax.rollout.engine import (
    SHOWN,
    Replies,
    Results,
    RolloutEngine,
    check_sequences,
    too_long,
)
from jetrl_jax.rollout.types import Request, SamplingParams
from pallas_kernels import ScaledArray

SIBLINGS = 4  # longest completions that fit into the text of siblings


class JaxEngine(RolloutEngine):
    """A `RolloutEngine` on the trainer's own model and devices.

    Args:
      model: gives architecture and numerics; its parameters are not used and may be abstract
        (`nnx.eval_shape`).
      plan: the precision plan with which the weights for `load` are published.
      slots: number of sequences decoded at the same time.
      prefill_rows: number of prompts prefilled at the same time.
      decode_chunk_tokens: largest number of steps decoded between two checks of the host; a step samples a
        token or, with a draft, several.
      max_prompt_tokens, max_completion_tokens: longest prompt and longest completion.
      max_sequence_tokens: longest prompt with its completion; None is the sum of the two.
      pad_id: any valid token id; it fills places that are not read.
      layout: the devices over which the layers are split; None is JAX's default device.
      draft: guesses tokens for speculation; None is off.
      streams: whether it takes replies; a sequence that waits for one keeps its slot and its cache.

    Attributes:
      statistics: counts of the last submission's work so far.

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
        max_sequence_tokens: int | None = None,
        layout: Layout | None = None,
        draft: Draft | HeadDraft | None = None,
        streams: bool = False,
    ) -> None:
        sizes = {
            "slots": slots,
            "prefill_rows": prefill_rows,
            "decode_chunk_tokens": decode_chunk_tokens,
            "max_prompt_tokens": max_prompt_tokens,
            "max_completion_tokens": max_completion_tokens,
        }
        problems = [f"got {name}={size}, expected >= 1" for name, size in sizes.items() if size < 1]
        total, config = max_sequence_tokens or max_prompt_tokens + max_completion_tokens, model.config
        if total > config.max_position_embeddings:
            limit = f"expected at most max_position_embeddings={config.max_position_embeddings}"
            problems.append(f"got max_prompt_tokens + max_completion_tokens = {total}, {limit}")
        if (
            not max(max_prompt_tokens, max_completion_tokens)
            < total
            <= sum((max_prompt_tokens, max_completion_tokens))
        ):
            problems.append(
                f"got max_sequence_tokens={total}, expected more than the longest prompt and completion, and "
                "at most their sum"
            )
        if not 0 <= pad_id < config.vocab_size:
            problems.append(f"got pad_id={pad_id}, expected 0 .. vocab_size - 1 = {config.vocab_size - 1}")
        if problems:
            raise ValueError("JaxEngine: bad value: " + "; ".join(problems) + ".")
        super().__init__()
        self.streams = streams
        self.max_prompt_tokens = max_prompt_tokens
        self.max_completion_tokens = max_completion_tokens
        self.max_sequence_tokens = total
        self.vocab_size = config.vocab_size
        self.pad_id = pad_id
        lengths, context = ((0,), 0) if draft is None else (draft.lengths, draft.context)
        drafted = max(lengths)
        self.shapes = EngineShapes(
            batch_sizes=batch_sizes(slots),
            prompt_buckets=prompt_buckets(max_prompt_tokens),
            cache_buckets=cache_buckets(total + drafted),
            prefill_rows=prefill_rows,
            chunk=min(decode_chunk_tokens, max_completion_tokens),
            turn_buckets=turn_buckets(max_prompt_tokens) if streams else (),
            drafted=drafted,
            siblings=0 if draft is None else SIBLINGS * (context + max_completion_tokens + 1),
        )
        self.programs = EnginePrograms(model, plan, self.shapes, layout, draft, streams=streams)
        self.statistics = EngineStatistics()
        self._length = DraftLength(lengths)
        self._completions = Completions()
        self._scorer = Scorer(model, layout)
        self._idle_state: SlotState | None = None  # the slots of the last submission, for reuse
        self._published: nnx.State | None = None
        self._weights: list[Any] = []  # the published weights in the programs' order
        self._head: list[Any] = []  # then those of a draft head

    @classmethod
    def from_section(
        cls,
        model: Decoder,
        plan: PrecisionPlan,
        section: RolloutSection,
        pad_id: int,
        layout: Layout | None = None,
        draft: Draft | HeadDraft | None = None,
    ) -> JaxEngine:
        """The engine with the sizes of a config's `rollout` section; other arguments as the class.

        draft: None for the section's; without one a section of a draft head speculates nothing.
        """
        engine = section.engine
        if not isinstance(engine, JaxEngineSection):
            raise ValueError(
                "JaxEngine.from_section: another engine's section: got "
                f"rollout.engine.kind={engine.kind}, expected jax"
            )
        return cls(
            model,
            plan,
            slots=engine.slots,
            prefill_rows=engine.prefill_rows,
            decode_chunk_tokens=engine.decode_chunk_tokens,
            max_prompt_tokens=section.longest_history_tokens,
            max_completion_tokens=section.turn_tokens,
            max_sequence_tokens=section.longest_tokens,
            pad_id=pad_id,
            layout=layout,
            draft=draft or _draft(engine),
            streams=section.turns == "stream",
        )

    @property
    def published(self) -> nnx.State:
        """The loaded weights: parameter path -> array or `ScaledArray` (see `named_params`).

        Raises:
          RuntimeError: no weights were loaded.
        """
        if self._published is None:
            raise RuntimeError("published: no weights: got policy_version=-1, expected load(...) before.")
        return self._published

    @property
    def compilations(self) -> int:
        """The number of programs compiled so far."""
        return self.programs.compilations

    def warmup(self) -> None:
        """Compiles every program that sampling may need; takes seconds to minutes."""
        self.programs.compile_all(self._controls(SamplingParams(1.0, 1, (), 0)))

    def describe(self) -> Mapping[str, Any]:
        """Its sizes and, with a draft, the rule of acceptance and the promise that it keeps."""
        sizes = {
            "mode": "jax",
            "slots": self.shapes.batch_sizes[-1],
            "decode_chunk_tokens": self.shapes.chunk,
        }
        draft, numerics = self.programs.draft, self.programs.numerics
        return sizes if draft is None else sizes | {"speculation": described(draft, numerics)}

    def counts(self) -> Mapping[str, int]:
        """Of a draft: tokens that it guessed and was asked for, those kept, and the steps of a sequence."""
        if self.programs.draft is None:
            return {}
        done = self.statistics
        counts = {"drafted": done.drafted, "accepted": done.accepted, "asked": done.asked}
        return counts | {"verified": done.active_slot_steps} | done.places

    def _load(self, published: Any, version: int) -> None:
        """Takes published weights by reference; they must stay alive until the next `load`.

        Raises:
          ValueError: paths, shapes, dtypes or block shapes differ from the plan's; all are listed.
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
            raise ValueError(
                f"load: {len(problems)} weights do not fit the precision plan: " + "; ".join(problems) + "."
            )
        self._published = published
        self._weights = [given[path] for path in expected]

    def load_draft(self, head: DraftHead) -> None:
        """Takes the weights of the draft head by reference; its sizes are those of the engine's draft."""
        if not isinstance(self.programs.draft, HeadDraft):
            super().load_draft(head)
        self._head = jax.tree.leaves(nnx.state(head))

    def _sample(self, requests: list[Request], sampling: SamplingParams) -> Results:
        """Samples; if there are more requests than slots, a slot takes the next when it is free."""
        return self._converse(requests, sampling, None)

    def _converse(
        self, requests: list[Request], sampling: SamplingParams, replies: Replies | None
    ) -> Results:
        """As `_sample`; a slot stays with its conversation until that is over."""
        self.statistics = EngineStatistics()
        if not requests:
            return
        # if this ends early, slots are in flight and not reused
        state = self._idle_state
        self._idle_state = None
        prompts, controls = [tuple(request.prompt_ids) for request in requests], self._controls(sampling)
        generation = Generation(
            self.programs,
            self.shapes,
            [*self._weights, *self._head],
            requests,
            prompts,
            sampling,
            controls,
            state,
            self.pad_id,
            self._length,
            self._completions,
            replies,
        )
        self.statistics = generation.statistics
        yield from generation.run(self._version)
        self._idle_state = generation.state

    def _score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Scores by the trainer's own forward, padded to few lengths; with `exact` the bits of sampling."""
        longest = self.max_sequence_tokens
        check_sequences(sequences, longest, self.vocab_size)
        widths = [min(smallest_fit(self.shapes.cache_buckets, len(ids)), longest) for ids in sequences]
        return [
            self._scorer(self._published, ids, width) for ids, width in zip(sequences, widths, strict=True)
        ]

    def _close(self) -> None:
        """Drops the weights."""
        self._published = None
        self._weights = []
        self._idle_state = None

    def check(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Raises ValueError for empty or too long prompts, unknown token ids, or too large `max_tokens`."""
        problems, prompts = [], [tuple(request.prompt_ids) for request in requests]
        if sampling.max_tokens > self.max_completion_tokens:
            problems.append(
                f"got max_tokens={sampling.max_tokens}, expected at most "
                f"max_completion_tokens={self.max_completion_tokens}"
            )
        if any(token >= self.vocab_size for token in sampling.stop_token_ids):
            problems.append(
                f"got stop_token_ids={sampling.stop_token_ids}, expected ids below "
                f"vocab_size={self.vocab_size}"
            )
        for prompt, name in {
            prompt: f"request {request.id}" for prompt, request in zip(prompts, requests, strict=True)
        }.items():
            if not 0 < len(prompt) <= self.max_prompt_tokens:
                limit = f"expected 1 to max_prompt_tokens={self.max_prompt_tokens}"
                problems.append(f"{name}: got a prompt of {len(prompt)} tokens, {limit}")
            elif min(prompt) < 0 or max(prompt) >= self.vocab_size:
                problems.append(f"{name}: got a token id outside 0 .. vocab_size - 1 = {self.vocab_size - 1}")
        problems += too_long(requests, sampling, self.max_sequence_tokens)
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise ValueError("submit: bad request: " + "; ".join(problems[:SHOWN]) + more + ".")

    def _controls(self, sampling: SamplingParams) -> Controls:
        is_stop = np.zeros(self.vocab_size, bool)
        is_stop[list(sampling.stop_token_ids)] = True
        temperature = 1.0 if sampling.greedy else sampling.temperature
        values = (np.float32(temperature), np.bool_(sampling.greedy), np.uint32(sampling.seed), is_stop)
        return Controls(*jax.device_put(values))


def _draft(section: JaxEngineSection) -> Draft | None:
    """The draft of a config's section."""
    speculation = section.speculation
    if isinstance(speculation, LookupSection):
        return Lookup(speculation.lengths, speculation.longest_match)
    return None


def _describe(weight: Any) -> str:
    """Kind, shape and type of a published weight, for error messages."""
    if isinstance(weight, ScaledArray):
        qvalue, scale = weight.qvalue, weight.scale
        return (
            f"{qvalue.dtype} {tuple(qvalue.shape)} in blocks {weight.block_shape} with {scale.dtype} "
            f"scales {tuple(scale.shape)}"
        )
    return f"{np.dtype(weight.dtype).name} {tuple(weight.shape)}"
