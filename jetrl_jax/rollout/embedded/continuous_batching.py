"""The state of one submission: its queue, the occupants of the slots, and the tokens so far.  Host, numpy.

    queue -> prefill each distinct prompt -> insert into free slots -> decode a chunk of all slots -> collect
                                                       ^                                                 |
                                                       +-------- finished slots are free again ----------+

With replies a sequence that ends keeps its slot, and waits there for the next turn of its conversation:

    collect -> yield its trajectory -> take replies -> go on in its slot, or free the slot

Requests are queued in the order of their prompts' buckets, so that a prefill has little padding and the
requests of a prompt follow each other.  This code does not loop over tokens: it reads the reports of a whole
chunk and distributes them by index arrays.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jetrl_jax.rollout.embedded.draft_length import DraftLength
from jetrl_jax.rollout.embedded.programs import EnginePrograms, Prefilled, SlotState
from jetrl_jax.rollout.embedded.sampling import Controls
from jetrl_jax.rollout.embedded.shapes import EngineShapes, smallest_fit
from jetrl_jax.rollout.embedded.speculation import NOTHING, Completions, Noise, Texts
from jetrl_jax.rollout.engine import Replies
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory


@dataclass
class EngineStatistics:
    """Counts of the last submission's work so far.

    prefills, inserts, continuations, decodes: number of program calls.
    decode_steps: number of steps (forwards of the model) within the decode calls.
    slot_steps: the slots that took part, summed over steps; its excess over sampled tokens is idle work.
    active_slot_steps: those that sampled.
    drafted, accepted: tokens that a draft guessed, and those of them that became part of a completion.
    asked: tokens that a draft was asked for, of which it may not have guessed all.
    places: drafted_j and accepted_j, those of the j-th guess of a step.
    """

    prefills: int = 0
    inserts: int = 0
    continuations: int = 0
    decodes: int = 0
    decode_steps: int = 0
    slot_steps: int = 0
    active_slot_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    asked: int = 0
    places: Counter[str] = field(default_factory=Counter)


class Generation:
    """The state of one submission.

    Args:
      programs, shapes: the compiled programs and their shapes.
      weights: published weights in the programs' order.
      requests: at least one, already checked; prompts: their token ids as tuples.
      sampling, controls: the sampling parameters, on the host and on the device.
      state: idle slots of an earlier call, or None; it is consumed.
      pad_id: the token id that pads prompts.
      length: chooses the number of tokens that a step drafts.
      completions: of earlier calls, for the draft; takes those of this one.
      replies: of conversations, of which a request is the first turn; None: there are none.
    """

    def __init__(
        self,
        programs: EnginePrograms,
        shapes: EngineShapes,
        weights: list[Any],
        requests: Sequence[Request],
        prompts: list[tuple[int, ...]],
        sampling: SamplingParams,
        controls: Controls,
        state: SlotState | None,
        pad_id: int,
        length: DraftLength,
        completions: Completions,
        replies: Replies | None = None,
    ) -> None:
        self.programs = programs
        self.shapes = shapes
        self.weights = weights
        self.pad_id = pad_id
        self.requests = requests
        self.limits = np.array([request.limit(sampling) for request in requests], np.int64)
        self.controls = controls
        self._state = state
        self.statistics = EngineStatistics()
        self.is_stop = np.asarray(controls.is_stop)
        self.seeds = np.array([request.seed for request in requests], np.uint32)
        longest = int(self.limits.max()) if replies is None else sampling.max_tokens
        self.tokens = np.zeros((len(requests), longest), np.int32)
        self.logprobs = np.zeros((len(requests), longest), np.float32)
        self.sampled = np.zeros(len(requests), np.int64)  # number of tokens so far
        # the request in each slot
        self.occupant = np.full(smallest_fit(shapes.batch_sizes, len(requests)), -1, np.int64)
        # the conversation that waits in each slot
        self.waiting = np.full(len(self.occupant), -1, np.int64)
        self.reports: list[jax.Array] = []
        self.replies = replies
        self.sampling = sampling
        self.index_of = {request.id: index for index, request in enumerate(requests)}
        self.histories: dict[int, np.ndarray] = {}  # the prompt of a turn after the first
        self.length = length
        self.drafted = 0  # tokens in each step of the last chunk
        self.started = 0.0  # the last chunk, by the clock
        self.timed = False
        self._plan_prefills(prompts)
        draft = programs.draft
        self.texts = None
        if draft is not None:
            noises = [self._noise(request) for request in requests]
            sizes = longest if replies is None else shapes.cache_buckets[-1], shapes.siblings, draft.context
            self.texts = Texts(self.prompts, self.prompt_of, noises, *sizes, completions)

    @property
    def state(self) -> SlotState:
        """The slots, which exist from the first refill on."""
        assert self._state is not None
        return self._state

    @state.setter
    def state(self, state: SlotState) -> None:
        self._state = state

    def _plan_prefills(self, prompts: list[tuple[int, ...]]) -> None:
        """Sorts the distinct prompts by bucket and first appearance into batches, and the requests alike."""
        index: dict[tuple[int, ...], int] = {}
        for prompt in prompts:
            index.setdefault(prompt, len(index))
        self.prompts = [np.array(prompt, np.int32) for prompt in index]
        self.prompt_of = np.array([index[prompt] for prompt in prompts])
        lengths, rows = np.array([len(prompt) for prompt in index]), self.shapes.prefill_rows
        by_bucket = np.argsort(np.searchsorted(self.shapes.prompt_buckets, lengths), kind="stable")
        rank = np.empty(len(lengths), np.int64)
        rank[by_bucket] = np.arange(len(lengths))
        self.batches = [by_bucket[start : start + rows] for start in range(0, len(lengths), rows)]
        self.prompt_tokens = lengths[self.prompt_of]
        self.batch_of, self.row_of = np.divmod(rank[self.prompt_of], rows)
        self.queue = np.argsort(rank[self.prompt_of], kind="stable")
        self.prefilled: tuple[int, Prefilled] | None = None

    def run(self, version: int) -> Iterator[Trajectory]:
        """Refills, decodes and collects until every request is done; yields trajectories with `version`.

        The trajectories of a chunk are yielded while the devices decode the next one.
        """
        finished = np.zeros(0, np.int64)
        while True:
            if self.replies is not None and (self.waiting >= 0).any():
                self._go_on(self.replies, wait=not len(finished) and not (self.occupant >= 0).any())
            self._refill()
            busy = self.occupant >= 0
            if busy.any():
                self._shrink(busy | (self.waiting >= 0))
                self._decode()
            for index in finished.tolist():
                yield self._trajectory(index, version)
            if busy.any():
                finished = self._collect()
            elif (self.waiting >= 0).any() or len(self.queue):
                finished = finished[:0]
            else:
                return

    def _go_on(self, replies: Replies, *, wait: bool) -> None:
        """Takes replies: the next turns go on in their slots, and conversations that are over free them."""
        turns: list[tuple[int, Request]] = []
        slot_of = {int(index): slot for slot, index in enumerate(self.waiting) if index >= 0}
        for reply in replies.take(wait=wait):
            slot = slot_of[self.index_of[reply.id]]
            if reply.request is None:
                self.waiting[slot] = -1
            else:
                turns.append((slot, reply.request))
        rows = self.shapes.prefill_rows
        turns.sort(key=lambda turn: len(turn[1].prompt_ids) - self._held(self.waiting[turn[0]]))
        for start in range(0, len(turns), rows):
            self._add_turns(turns[start : start + rows])

    def _noise(self, request: Request) -> Noise:
        return self.sampling.seed, self.sampling.greedy, self.sampling.temperature, request.seed

    def _held(self, index: int) -> int:
        """The number of tokens of a conversation so far."""
        return int(self.prompt_tokens[index] + self.sampled[index])

    def _add_turns(self, turns: Sequence[tuple[int, Request]]) -> None:
        """Extends the caches of slots by the tokens after the last sampled one, and samples the next."""
        rows = self.shapes.prefill_rows
        slots = np.full(rows, len(self.occupant), np.int32)
        counts, budgets = np.ones(rows, np.int32), np.ones(rows, np.int32)
        seeds, new = np.zeros(rows, np.uint32), []
        for row, (slot, request) in enumerate(turns):
            index = int(self.waiting[slot])
            new.append(request.prompt_ids[self._held(index) - 1 :])
            slots[row], counts[row], seeds[row] = slot, len(new[-1]), request.seed
            self.occupant[slot], self.waiting[slot] = index, -1
            self.histories[index] = np.array(request.prompt_ids, np.int32)
            self.prompt_tokens[index] = len(request.prompt_ids)
            self.sampled[index] = 0
            if self.texts is not None:
                self.texts.go_on(index, self.histories[index], self._noise(request))
            self.limits[index] = budgets[row] = request.limit(self.sampling)
        width = smallest_fit(self.shapes.turn_buckets, int(counts.max()))
        tokens = np.full((rows, width), self.pad_id, np.int32)
        for row, ids in enumerate(new):
            tokens[row, : len(ids)] = ids
        self._fit_cache()
        self.state, report = self.programs.go_on(
            self.weights, self.state, slots, tokens, counts, seeds, budgets, self.controls
        )
        self.reports.append(report)
        self.statistics.continuations += 1

    def _refill(self) -> None:
        """Gives free slots to the next requests of the queue."""
        free = np.flatnonzero((self.occupant < 0) & (self.waiting < 0))
        taken, self.queue = self.queue[: len(free)], self.queue[len(free) :]
        if len(taken) == 0:
            return
        slots = free[: len(taken)]
        self.occupant[slots] = taken
        self._fit_cache()
        # a call inserts the prompts of one prefill that have the same limit
        for batch, limit in np.unique(np.stack([self.batch_of[taken], self.limits[taken]]), axis=1).T:
            here = (self.batch_of[taken] == batch) & (self.limits[taken] == limit)
            source = np.full(len(self.occupant), -1, np.int32)
            source[slots[here]] = self.row_of[taken[here]]
            seeds = np.zeros(len(self.occupant), np.uint32)
            seeds[slots[here]] = self.seeds[taken[here]]
            prompts = self._prefill(int(batch))
            self.state, report = self.programs.insert(
                self.weights, self.state, prompts, source, seeds, np.int32(limit), self.controls
            )
            self.reports.append(report)
            self.statistics.inserts += 1

    def _prefill(self, batch: int) -> Prefilled:
        """The prefilled prompts of a batch, computed when first needed and kept until the next batch."""
        if self.prefilled is None or self.prefilled[0] != batch:
            members = [self.prompts[index] for index in self.batches[batch]]
            width = smallest_fit(self.shapes.prompt_buckets, max(map(len, members)))
            tokens = np.full((self.shapes.prefill_rows, width), self.pad_id, np.int32)
            lengths = np.ones(self.shapes.prefill_rows, np.int32)
            for row, prompt in enumerate(members):
                tokens[row, : len(prompt)] = prompt
                lengths[row] = len(prompt)
            self.prefilled = batch, self.programs.prefill(self.weights, tokens, lengths)
            self.statistics.prefills += 1
        return self.prefilled[1]

    def _fit_cache(self) -> None:
        """Makes the cache long enough for the tokens of the next chunk."""
        occupants, slots = self.occupant[self.occupant >= 0], len(self.occupant)
        step = self.shapes.drafted + 1  # a rejected draft is in the cache too
        end = np.minimum(
            self.sampled[occupants] + self.shapes.chunk * step, self.limits[occupants] + self.shapes.drafted
        )
        needed = self.prompt_tokens[occupants] + end
        if self.shapes.drafted:  # a sequence that waits writes as many places as the others
            waiting = self.waiting[self.waiting >= 0]
            held = self.prompt_tokens[waiting] + self.sampled[waiting]
            needed = np.concatenate([needed, held + self.shapes.drafted])
        length = smallest_fit(self.shapes.cache_buckets, int(needed.max()))
        if not self.statistics.inserts:  # no sequence is in flight: any idle state of the right shape will do
            if self._state is None or self._state.shape != (slots, length):
                self._state = None  # frees its memory first
                self.state = self.programs.empty_state(slots, length)
        elif length > self.state.shape[1]:
            self.state = self.programs.resize(self.state, np.arange(slots, dtype=np.int32), length)

    def _shrink(self, busy: np.ndarray) -> None:
        """Moves the last sequences into a smaller batch when the queue is empty."""
        size = smallest_fit(self.shapes.batch_sizes, int(busy.sum()))
        if len(self.queue) or size >= len(busy) or self.reports:
            return
        kept = np.argsort(~busy, kind="stable")[:size].astype(np.int32)
        self.state = self.programs.resize(self.state, kept, self.state.shape[1])
        self.occupant, self.waiting = self.occupant[kept], self.waiting[kept]

    def _decode(self) -> None:
        """Decodes one chunk; while requests wait, it stops as soon as an eighth of the slots is idle."""
        self._fit_cache()
        slots = len(self.occupant)
        idle_limit = np.int32(max(1, slots // 8) if len(self.queue) else slots)
        if self.replies is not None:  # sequences that wait are idle too
            idle_limit = np.int32(min(slots, (self.occupant < 0).sum() + max(1, slots // 8)))
        self.drafted = self.length.choose(self.state.shape)
        texts = self.texts.of(self.occupant, self.state.shape[1]) if self.texts and self.drafted else ()
        self.timed = self.length.measuring or not self.reports
        if self.timed:  # without what was inserted
            jax.block_until_ready(self.reports)
        self.started = time.perf_counter()
        self.state, report = self.programs.decode(
            self.weights, self.state, self.controls, idle_limit, self.drafted, *texts
        )
        self.reports.append(report)

    def _collect(self) -> np.ndarray:
        """Reads the reports, frees finished slots, returns their requests in order of their last tokens."""
        tokens, bits = np.concatenate([np.asarray(report) for report in self.reports], axis=1)
        busy = np.flatnonzero(self.occupant >= 0)
        occupants, valid = self.occupant[busy], tokens[:, busy] >= 0
        self._count(tokens[len(self.reports) - 1 :, busy])
        self.reports = []
        step, column = np.nonzero(valid)
        request, offset = (
            occupants[column],
            (np.cumsum(valid, axis=0) - 1 + self.sampled[occupants])[step, column],
        )
        self.tokens[request, offset] = tokens[step, busy[column]]
        logprobs = bits.view(np.float32)[step, busy[column]]
        self.logprobs[request, offset] = logprobs
        if self.texts is not None:
            self.texts.add(request, offset, tokens[step, busy[column]], logprobs)
        self.sampled[occupants] += valid.sum(axis=0)
        last = self.tokens[occupants, self.sampled[occupants] - 1]
        finished = self.is_stop[last] | (self.sampled[occupants] == self.limits[occupants])
        self.occupant[busy[finished]] = -1
        if self.replies is not None:
            self.waiting[busy[finished]] = occupants[finished]
        if self.texts is not None:
            for one in occupants[finished]:
                self.texts.finish(one)
        ended = np.cumsum(valid[:, finished], axis=0).argmax(axis=0)
        return occupants[finished][np.argsort(ended, kind="stable")]

    def _count(self, decoded: np.ndarray) -> None:
        """Adds the work of a decode call, of its report's tokens [C, slots that were busy]."""
        steps = decoded.reshape(-1, self.drafted + 1, decoded.shape[1])
        count, statistics = int((steps >= 0).any(axis=(1, 2)).sum()), self.statistics
        statistics.decodes += 1
        statistics.decode_steps += count
        statistics.slot_steps += count * len(self.occupant)
        statistics.active_slot_steps += int((steps[:, 0] >= 0).sum())
        active = steps.transpose(0, 2, 1)[steps[:, 0] >= 0]  # [steps of a sequence, k + 1]
        statistics.asked += len(active) * self.drafted
        for place in range(1, self.drafted + 1):
            guesses = steps[:, place]
            drafted, accepted = int((guesses != NOTHING).sum()), int((guesses >= 0).sum())
            statistics.drafted += drafted
            statistics.accepted += accepted
            statistics.places.update({f"drafted_{place}": drafted, f"accepted_{place}": accepted})
        if count:
            seconds = (time.perf_counter() - self.started) / count if self.timed else None
            self.length.add(self.state.shape, self.drafted, seconds, active[:, 1:] >= 0)

    def _trajectory(self, index: int, version: int) -> Trajectory:
        count = int(self.sampled[index])
        tokens = self.tokens[index, :count]
        return Trajectory.of_completion(
            self.requests[index].id,
            self.histories.get(index, self.prompts[self.prompt_of[index]]),
            tokens,
            self.logprobs[index, :count],
            "stop" if self.is_stop[tokens[-1]] else "length",
            version,
        )
