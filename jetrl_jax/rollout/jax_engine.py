"""The embedded rollout engine: continuous batching over compiled JAX programs, driven from the host.

    queue -> prefill each distinct prompt once -> insert into free slots -> decode a chunk of all slots -> collect
                                  ^                                                                 |
                                  +-------------------- finished slots are free again --------------+

A slot is refilled when its sequence ends, so a long answer does not hold the others; between two looks of the host a
program decodes up to `decode_chunk_tokens` tokens.  Prompts are padded at the right to a bucket, never at the left;
caches have a few lengths and batches at most two sizes, each compiled once (`warmup`), and nothing compiles later.

What a request gets does not depend on the requests around it: its noise comes from its seed and the token's position
(`sampling`), and with `numerics.exact` its logits are the same bits in every slot, batch and bucket; they are also the
bits that the trainer's full forward gives (tests/parity/test_rollout_exact.py).  Without `exact` the bits of a sequence
depend on the compiled shape, though not on its slot or on the other sequences in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision import PrecisionPlan, named_params
from jetrl_jax.rollout.engine import MAX_SEED, Request, SamplingParams, Trajectory
from jetrl_jax.rollout.programs import EnginePrograms, Prefilled, SlotState
from jetrl_jax.rollout.sampling import Controls
from pallas_kernels import ScaledArray

SMALLEST_PROMPT_BUCKET = 8
SMALLEST_CACHE_BUCKET = 64
SMALLEST_SHRUNK_BATCH = 8


@dataclass
class EngineStatistics:
    """Calls of the last `generate`: prefills, inserts, decode programs and the tokens' steps inside them."""

    prefills: int = 0
    inserts: int = 0
    decodes: int = 0
    decode_steps: int = 0
    slot_steps: int = 0


def prompt_buckets(max_prompt_tokens: int) -> tuple[int, ...]:
    """Padded prompt lengths: powers of two from 8, and a last one that fits the longest prompt (a multiple of 8)."""
    buckets, size = [], SMALLEST_PROMPT_BUCKET
    while size < max_prompt_tokens:
        buckets.append(size)
        size *= 2
    return (*buckets, _multiple_of_8(max_prompt_tokens))


def cache_buckets(max_tokens: int) -> tuple[int, ...]:
    """Cache lengths: the whole sequence, its half, quarter, ... down to 64 tokens; ascending multiples of 8."""
    buckets = [_multiple_of_8(max_tokens)]
    while (half := _multiple_of_8(buckets[-1] // 2)) >= SMALLEST_CACHE_BUCKET:
        buckets.append(half)
    return tuple(reversed(buckets))


def batch_sizes(slots: int) -> tuple[int, ...]:
    """Batch sizes: all slots, and a quarter for few requests and for the last long answers; ascending."""
    return (slots // 4, slots) if slots // 4 >= SMALLEST_SHRUNK_BATCH else (slots,)


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
            problems.append(
                f"got max_prompt_tokens + max_completion_tokens = {total}, expected at most "
                f"max_position_embeddings={config.max_position_embeddings}"
            )
        if not 0 <= pad_id < config.vocab_size:
            problems.append(f"got pad_id={pad_id}, expected 0 .. vocab_size - 1 = {config.vocab_size - 1}")
        if problems:
            raise ValueError("JaxEngine: bad value: " + "; ".join(problems) + ".")
        self.slots, self.prefill_rows, self.pad_id = slots, prefill_rows, pad_id
        self.max_prompt_tokens, self.max_completion_tokens = max_prompt_tokens, max_completion_tokens
        self.vocab_size = config.vocab_size
        self.chunk = min(decode_chunk_tokens, max_completion_tokens)
        self.prompt_buckets, self.cache_buckets = prompt_buckets(max_prompt_tokens), cache_buckets(total)
        self.batch_sizes = batch_sizes(slots)
        self.programs = EnginePrograms(model, plan, prefill_rows=prefill_rows, chunk=self.chunk, prompt_length=self.prompt_buckets[-1])
        self.statistics = EngineStatistics()
        self.idle_state: SlotState | None = None  # of the last call, to be used again
        self._weights: list[Any] | None = None
        self._version = -1

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
        programs, weights = self.programs, list(self.programs.published_spec.values())
        lengths = np.ones(self.prefill_rows, np.int32)
        for bucket in self.prompt_buckets:
            programs.prefill(weights, np.zeros((self.prefill_rows, bucket), np.int32), lengths, run=False)
        controls = self._controls(SamplingParams(1.0, 1, (), 0))
        prompts = programs.empty_prefilled()
        for slots in self.batch_sizes:
            integers = np.zeros(slots, np.int32)
            for length in self.cache_buckets:
                state = programs.empty_state(slots, length)
                programs.insert(state, prompts, integers, integers.astype(np.uint32), integers, controls, run=False)
                programs.decode(weights, state, controls, np.int32(0), run=False)
                for longer in self.cache_buckets:
                    if longer > length:
                        programs.resize(state, integers, longer, run=False)
                for fewer in self.batch_sizes:
                    if fewer < slots:
                        programs.resize(state, np.zeros(fewer, np.int32), length, run=False)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Trajectory]:
        """Samples one completion per request; returns them in the order of the requests.

        Args:
          requests: any number, also none; more than slots wait in a queue.
          sampling: for all of them; `max_tokens` at most `max_completion_tokens`.

        Raises:
          RuntimeError: no weights were loaded.
          ValueError: a prompt that is empty or longer than `max_prompt_tokens`, an id outside the vocabulary, a seed
            outside 0 .. 2**32 - 1, or too large a `max_tokens`; all listed.
        """
        if self._weights is None:
            raise RuntimeError("generate: no weights: got policy_version=-1, expected load_weights(...) before.")
        self._check(requests, sampling)
        self.statistics = EngineStatistics()
        return _Call(self, self._weights, requests, sampling).run() if requests else []

    def _check(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        problems = []
        if sampling.max_tokens > self.max_completion_tokens:
            problems.append(f"got max_tokens={sampling.max_tokens}, expected at most max_completion_tokens={self.max_completion_tokens}")
        if any(token >= self.vocab_size for token in sampling.stop_token_ids):
            problems.append(f"got stop_token_ids={sampling.stop_token_ids}, expected ids below vocab_size={self.vocab_size}")
        for request in requests:
            count = len(request.prompt_ids)
            if not 0 < count <= self.max_prompt_tokens:
                limit = f"expected 1 to max_prompt_tokens={self.max_prompt_tokens}"
                problems.append(f"request {request.id}: got a prompt of {count} tokens, {limit}")
            elif not (min(request.prompt_ids) >= 0 and max(request.prompt_ids) < self.vocab_size):
                problems.append(f"request {request.id}: got a token id outside 0 .. vocab_size - 1 = {self.vocab_size - 1}")
            if not 0 <= request.seed <= MAX_SEED:
                problems.append(f"request {request.id}: got seed={request.seed}, expected 0 .. 2**32 - 1")
        if problems:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError("generate: bad request: " + "; ".join(problems[:5]) + more + ".")

    def _controls(self, sampling: SamplingParams) -> Controls:
        is_stop = np.zeros(self.vocab_size, bool)
        is_stop[list(sampling.stop_token_ids)] = True
        temperature = 1.0 if sampling.greedy else sampling.temperature
        return jax.device_put(Controls(np.float32(temperature), np.bool_(sampling.greedy), np.uint32(sampling.seed), is_stop))


class _Call:
    """One call of `generate`: the queue, who sits in which slot, and what was sampled so far."""

    def __init__(self, engine: JaxEngine, weights: list[Any], requests: Sequence[Request], sampling: SamplingParams) -> None:
        self.engine, self.programs, self.weights = engine, engine.programs, weights
        self.requests, self.sampling, self.controls = requests, sampling, engine._controls(sampling)
        self.is_stop = np.asarray(self.controls.is_stop)
        count = len(requests)
        self.seeds = np.array([request.seed for request in requests], np.uint32)
        self._plan_prefills()
        self.tokens = np.zeros((count, sampling.max_tokens), np.int32)
        self.logprobs = np.zeros((count, sampling.max_tokens), np.float32)
        self.sampled = np.zeros(count, np.int64)  # tokens so far
        self.next = 0  # in self.order
        self.prefilled: tuple[int, Prefilled | None] = (-1, None)
        slots = next(size for size in engine.batch_sizes if size >= min(count, engine.slots))
        self.occupant = np.full(slots, -1, np.int64)  # request in each slot
        self.state, engine.idle_state = engine.idle_state, None
        self.reports: list[jax.Array] = []

    def _plan_prefills(self) -> None:
        """Orders the distinct prompts by bucket and first appearance, cuts them into batches, and orders the requests so."""
        engine, index = self.engine, {}
        keys = [tuple(request.prompt_ids) for request in self.requests]
        for key in keys:
            index.setdefault(key, len(index))
        self.prompts = [np.array(key, np.int32) for key in index]
        self.prompt_of = np.array([index[key] for key in keys])
        lengths = np.array([len(key) for key in index])
        by_bucket = np.argsort(np.searchsorted(engine.prompt_buckets, lengths), kind="stable")
        rank = np.empty(len(lengths), np.int64)
        rank[by_bucket] = np.arange(len(lengths))
        self.batches = [by_bucket[start : start + engine.prefill_rows] for start in range(0, len(lengths), engine.prefill_rows)]
        self.prompt_tokens = lengths[self.prompt_of]
        self.batch_of, self.row_of = np.divmod(rank[self.prompt_of], engine.prefill_rows)
        self.order = np.argsort(rank[self.prompt_of], kind="stable")

    def run(self) -> list[Trajectory]:
        """Refills, decodes and collects until every request is done."""
        while True:
            self._refill()
            busy = self.occupant >= 0
            if not busy.any():
                if np.isfinite(self.logprobs).all():  # a NaN in an idle slot would reach its next occupant
                    self.engine.idle_state = self.state
                return [self._trajectory(index) for index in range(len(self.requests))]
            self._shrink(busy)
            self._decode()
            self._collect()

    def _refill(self) -> None:
        """Gives free slots to the next requests of the queue."""
        free = np.flatnonzero(self.occupant < 0)
        taken = self.order[self.next : self.next + len(free)]
        if len(taken) == 0:
            return
        self.next += len(taken)
        slots = free[: len(taken)]
        self.occupant[slots] = taken
        self._fit_cache()
        for batch in np.unique(self.batch_of[taken]):
            here = self.batch_of[taken] == batch
            source, budget = np.full(len(self.occupant), -1, np.int32), np.zeros(len(self.occupant), np.int32)
            seeds = np.zeros(len(self.occupant), np.uint32)
            source[slots[here]] = self.row_of[taken[here]]
            budget[slots[here]] = self.sampling.max_tokens
            seeds[slots[here]] = self.seeds[taken[here]]
            prompts = self._prefill(int(batch))
            self.state, report = self.programs.insert(self.state, prompts, source, seeds, budget, self.controls)
            self.reports.append(report)
            self.engine.statistics.inserts += 1

    def _prefill(self, batch: int) -> Prefilled:
        """The batch's prompts, prefilled when first needed and kept until the next batch is."""
        known, prefilled = self.prefilled
        if known != batch or prefilled is None:
            members = [self.prompts[index] for index in self.batches[batch]]
            width = next(size for size in self.engine.prompt_buckets if size >= max(map(len, members)))
            tokens = np.full((self.engine.prefill_rows, width), self.engine.pad_id, np.int32)
            lengths = np.ones(self.engine.prefill_rows, np.int32)
            for row, prompt in enumerate(members):
                tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
            prefilled = self.programs.prefill(self.weights, tokens, lengths)
            self.prefilled = (batch, prefilled)
            self.engine.statistics.prefills += 1
        return prefilled

    def _fit_cache(self) -> None:
        """Makes the cache long enough for what the next chunk may write."""
        occupants = self.occupant[self.occupant >= 0]
        end = np.minimum(self.sampled[occupants] + self.engine.chunk, self.sampling.max_tokens)
        needed = int((self.prompt_tokens[occupants] + end).max())
        length = next(size for size in self.engine.cache_buckets if size >= needed)
        if self.state is None or (self.state.shape != (len(self.occupant), length) and (self.sampled == 0).all()):
            self.state = None  # gives its memory back first
            self.state = self.programs.empty_state(len(self.occupant), length)
        elif length > self.state.shape[1]:
            self.state = self.programs.resize(self.state, np.arange(len(self.occupant), dtype=np.int32), length)

    def _shrink(self, busy: np.ndarray) -> None:
        """Moves the last sequences into a smaller batch when nobody waits."""
        fitting = [size for size in self.engine.batch_sizes if busy.sum() <= size < len(busy)]
        if self.next < len(self.order) or not fitting or self.reports:
            return
        kept = np.argsort(~busy, kind="stable")[: fitting[0]].astype(np.int32)
        self.state = self.programs.resize(self.state, kept, self.state.shape[1])
        self.occupant = self.occupant[kept]

    def _decode(self) -> None:
        """One chunk; while requests wait it is left as soon as an eighth of the slots is idle."""
        self._fit_cache()
        waiting, slots = self.next < len(self.order), len(self.occupant)
        idle_limit = max(1, slots // 8) if waiting else slots
        self.state, report = self.programs.decode(self.weights, self.state, self.controls, np.int32(idle_limit))
        self.reports.append(report)

    def _collect(self) -> None:
        """Reads the reports and frees the slots of finished requests."""
        tokens, bits = np.concatenate([np.asarray(report) for report in self.reports], axis=1)
        sampled = tokens >= 0
        statistics, steps = self.engine.statistics, int(sampled[len(self.reports) - 1 :].any(axis=1).sum())
        statistics.decodes, statistics.decode_steps = statistics.decodes + 1, statistics.decode_steps + steps
        statistics.slot_steps += steps * len(self.occupant)
        self.reports = []
        busy = np.flatnonzero(self.occupant >= 0)
        occupants = self.occupant[busy]
        step, column = np.nonzero(sampled[:, busy])
        offset = (np.cumsum(sampled[:, busy], axis=0) - 1 + self.sampled[occupants])[step, column]
        self.tokens[occupants[column], offset] = tokens[step, busy[column]]
        self.logprobs[occupants[column], offset] = bits.view(np.float32)[step, busy[column]]
        self.sampled[occupants] += sampled[:, busy].sum(axis=0)
        last = self.tokens[occupants, self.sampled[occupants] - 1]
        finished = self.is_stop[last] | (self.sampled[occupants] == self.sampling.max_tokens)
        self.occupant[busy[finished]] = -1

    def _trajectory(self, index: int) -> Trajectory:
        count = int(self.sampled[index])
        tokens = self.tokens[index, :count].copy()
        return Trajectory(
            request_id=self.requests[index].id,
            prompt_ids=self.prompts[self.prompt_of[index]],
            completion_ids=tokens,
            rollout_logprobs=self.logprobs[index, :count].copy(),
            finish_reason="stop" if self.is_stop[tokens[-1]] else "length",
            policy_version=self.engine.policy_version,
        )


def _multiple_of_8(count: int) -> int:
    return -(-count // 8) * 8


def _describe(weight: Any) -> str:
    """Kind, shape and type of a published weight, as an error shows it."""
    if isinstance(weight, ScaledArray):
        qvalue, scale = weight.qvalue, weight.scale
        return f"{qvalue.dtype} {tuple(qvalue.shape)} in blocks {weight.block_shape} with {scale.dtype} scales {tuple(scale.shape)}"
    return f"{np.dtype(weight.dtype).name} {tuple(weight.shape)}"
