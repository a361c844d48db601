"""The compiled programs of the embedded engine, one per shape, and the state of the slots.

    prefill[T]      prompts [R, T]  ->  keys and values, logits of the last tokens
    insert[B, S]    prefilled prompts -> the slots that need them, and each slot's first token
    decode[B, S, k] up to `chunk` steps in every active slot, stopping early when enough slots are idle
                    (a step samples one token or, with k tokens of a draft, one to k + 1: `speculation`)
    go_on[B, S, T]  the next tokens of waiting sequences [R, T], into their slots; samples the first of a turn
    resize[B, S -> B', S']   the same sequences in a longer cache or in fewer slots

B slots, S cache length, R prompts, T padded prompt length, V vocabulary, C rows of tokens in a report.
Everything that a program needs is an argument, so that nothing is compiled twice; the state is donated.  With
`run=False` a method only compiles.  A report is one int32 array [2, C, B]: token ids (negative where nothing
was sampled) and the bits of the float32 log-probabilities.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32, UInt32

from jetrl_jax.devices.layout import WHOLE, Layout, placed
from jetrl_jax.models import tensor_parallel
from jetrl_jax.models.cache import KVCache, empty_cache
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.sharded import TENSOR
from jetrl_jax.precision.kv_cache import split_model
from jetrl_jax.precision.parameters import jit, map_params, named_params
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.rollout.embedded.head_draft import HeadDraft, HeadState, HeadSteps
from jetrl_jax.rollout.embedded.sampling import Controls, request_keys, sample
from jetrl_jax.rollout.embedded.shapes import EngineShapes
from jetrl_jax.rollout.embedded.speculation import NOTHING, REFUSED, Draft, count_kept, repeated


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """Sequences in flight, one per slot.

    cache: the cache of each layer.
    keys: the requests' random keys.
    token: the last sampled token, not yet in the cache.
    position: its position.  In an idle slot 0, so that it writes inside its own row; where sequences wait for
      their next turn it stays, and an idle slot writes its last token over and over.
    remaining: number of tokens still to sample; 0 in an idle slot.
    """

    cache: list[KVCache]
    keys: UInt32[Array, "B 2"]
    token: Int32[Array, " B"]
    position: Int32[Array, " B"]
    remaining: Int32[Array, " B"]
    draft: Any = ()  # of a draft head: `head_draft.HeadState`

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)."""
        return self.token.shape[0], self.cache[0].length


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefilled:
    """Prefilled prompts to insert, with cache rows [R, K, T, H] of each layer."""

    cache: list[KVCache]
    logits: Float32[Array, "R V"]
    lengths: Int32[Array, " R"]
    draft: Any = ()  # of a draft head: `head_draft.HeadPrompts`


CACHE_SPEC = PartitionSpec(None, TENSOR)
STATE_SPEC = SlotState(CACHE_SPEC, WHOLE, WHOLE, WHOLE, WHOLE)  # type: ignore[arg-type]  # of each leaf below
PREFILLED_SPEC = Prefilled(CACHE_SPEC, WHOLE, WHOLE)  # type: ignore[arg-type]


class EnginePrograms:
    """Builds, compiles and keeps the programs of one model.

    Args:
      model: gives structure and numerics; its parameters are not read and may be abstract.
      plan: gives the formats of the published weights.
      shapes: the shapes of `compile_all`; prefilled prompts are padded to its longest bucket.
      layout: the devices over which the layers are split ("tensor"; caches by heads); None is one device.
      draft: guesses tokens in each step, by one program for each of its lengths; None samples one token.
      streams: whether a finished sequence keeps its slot for `go_on`.

    Attributes:
      compilations: number of programs compiled so far.
    """

    def __init__(
        self,
        model: Decoder,
        plan: PrecisionPlan,
        shapes: EngineShapes,
        layout: Layout | None = None,
        draft: Draft | HeadDraft | None = None,
        *,
        streams: bool = False,
    ) -> None:
        self.streams = streams
        self.config = model.config
        self.numerics = model.numerics
        self.shapes = shapes
        self.layout = layout
        self.draft = draft
        self.lengths = (0,) if draft is None else draft.lengths
        self.head_draft = draft if isinstance(draft, HeadDraft) else None
        if self.head_draft is not None and layout is not None:
            raise NotImplementedError("EnginePrograms: a draft head runs on one device: got a layout.")
        self.prompt_length = shapes.prompt_buckets[-1]
        self.graphdef, params = split_model(model)
        masters = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
        self.published = jax.eval_shape(plan.publish, masters, plan.unit_scales)
        self.compilations = 0
        self._compiled: dict[tuple[Any, ...], Any] = {}

    @property
    def published_spec(self) -> dict[str, Any]:
        """Path -> abstract published weight (`jax.ShapeDtypeStruct` or a `ScaledArray` of two)."""
        return dict(named_params(self.published))

    def empty_state(self, slots: int, length: int) -> SlotState:
        """Idle slots."""
        return self._program(
            ("empty", slots, length), functools.partial(self._empty_program, slots, length), ()
        )()

    def abstract_state(self, slots: int, length: int) -> SlotState:
        """As `empty_state`, without arrays: shapes, dtypes and, if layers are split, shardings."""
        empty = self._mapped("empty", functools.partial(self._empty_program, slots, length))
        state = jax.eval_shape(empty)
        return state if self.layout is None else placed(self._shardings(STATE_SPEC), state)

    def abstract_weights(self) -> nnx.State:
        """The weights that an engine holds, as shapes, dtypes and, if layers are split, shardings."""
        return (
            self.published
            if self.layout is None
            else placed(self.layout.shardings(self.published), self.published)
        )

    def compile_all(self, controls: Controls) -> None:
        """Compiles every program for every shape."""
        shapes, weights = self.shapes, [*self.published_spec.values()]
        if self.head_draft is not None:
            weights += jax.tree.leaves(self.head_draft.abstract)
        rows = shapes.prefill_rows
        for bucket in shapes.prompt_buckets:
            self.prefill(weights, np.zeros((rows, bucket), np.int32), np.ones(rows, np.int32), run=False)
        prompt = np.zeros((rows, self.prompt_length), np.int32)
        made = jax.eval_shape(self._prefill_program, weights, prompt, np.ones(rows, np.int32))
        cache = empty_cache(self.config, self.numerics, rows, self.prompt_length)
        prompts = Prefilled(
            cache,
            jnp.zeros((rows, self.config.vocab_size), jnp.float32),
            jnp.ones(rows, jnp.int32),
            made.draft,
        )
        for slots in shapes.batch_sizes:
            source, seeds = np.zeros(slots, np.int32), np.zeros(slots, np.uint32)
            for length in shapes.cache_buckets:
                # a real state, since an abstract float64 array would become float32
                state = self.empty_state(slots, length)
                self.insert(weights, state, prompts, source, seeds, np.int32(1), controls, run=False)
                texts = [np.zeros(shape, np.int32) for shape in self._text_shapes(state)]
                for drafted in self.lengths:
                    self.decode(weights, state, controls, np.int32(0), drafted, *texts, run=False)
                for longer in (size for size in shapes.cache_buckets if size > length):
                    self.resize(state, source, longer, run=False)
                for fewer in (size for size in shapes.batch_sizes if size < slots):
                    self.resize(state, source[:fewer], length, run=False)
                for width in shapes.turn_buckets if self.streams else ():
                    row = np.zeros(rows, np.int32)
                    new = row, np.zeros((rows, width), np.int32), row, row.astype(np.uint32), row
                    self.go_on(weights, state, *new, controls, run=False)

    def prefill(self, weights: list[Any], tokens: Any, lengths: Any, *, run: bool = True) -> Any:
        """`Prefilled` of int32 prompts [R, T], padded on the right; lengths int32 [R], at least 1."""
        args = (weights, tokens, lengths)
        program = self._program(("prefill", tokens.shape[1]), self._prefill_program, args)
        return program(*args) if run else None

    def insert(
        self,
        weights: list[Any],
        state: SlotState,
        prompts: Prefilled,
        source: Any,
        seeds: Any,
        budget: Any,
        controls: Controls,
        *,
        run: bool = True,
    ) -> Any:
        """Puts prompt source[b] into slot b where source[b] >= 0 and samples its first token.

        source int32 [B], seeds uint32 [B]; budget: int32, the number of tokens that may be sampled, at least
        1.  Consumes the state; returns the next one and a report with C = 1.
        """
        used = () if self.head_draft is None else (weights,)  # only a draft head reads them
        args = (state, prompts, source, seeds, budget, controls, *used)
        program = self._program(("insert", *state.shape), self._insert_program, args, donate=0)
        return program(*args) if run else None

    def go_on(
        self,
        weights: list[Any],
        state: SlotState,
        slots: Any,
        tokens: Any,
        counts: Any,
        seeds: Any,
        budgets: Any,
        controls: Controls,
        *,
        run: bool = True,
    ) -> Any:
        """Puts the next tokens of waiting sequences into their slots and samples one token after them.

        slots int32 [R], distinct, or B in unused rows; tokens int32 [R, T], the last sampled token and those
        after it, counts of them int32 [R], at least 1; seeds uint32 [R] and budgets int32 [R] as `insert`'s.
        Consumes the state; returns the next one and a report with C = 1.
        """
        args = (weights, state, slots, tokens, counts, seeds, budgets, controls)
        program = self._program(("go_on", *state.shape, tokens.shape[1]), self._go_on_program, args, donate=1)
        return program(*args) if run else None

    def decode(
        self,
        weights: list[Any],
        state: SlotState,
        controls: Controls,
        idle_limit: Any,
        drafted: int = 0,
        *texts: Any,
        run: bool = True,
    ) -> Any:
        """Decodes for `chunk` steps or until `idle_limit` (int32) slots are idle.

        drafted: the number of tokens that a draft guesses in each step, k.
        texts: those of `speculation.Texts.of`, int32 [B, siblings + S] and [B, S]; read only to draft.

        Consumes the state; returns the next one and a report, with k + 1 rows of tokens for each step.
        """
        args = (weights, state, controls, idle_limit, *(texts if drafted else ()))
        kind, function = self._decoding(drafted)
        program = self._program((kind, *state.shape, drafted), function, args, donate=1)
        return program(*args) if run else None

    def resize(self, state: SlotState, index: Any, length: int, *, run: bool = True) -> Any:
        """The slots `index` (int32 [B']) of a state, with cache length `length`."""
        args = (state, index)
        resized = functools.partial(self._resize_program, length=length)
        program = self._program(("resize", *state.shape, len(index), length), resized, args)
        return program(*args) if run else None

    def trace_prefill(self, weights: list[Any], tokens: Any, lengths: Any) -> Any:
        """`prefill` traced (`jax.stages.Traced`), not compiled; the arguments may be abstract."""
        return jit(self._mapped("prefill", self._prefill_program)).trace(weights, tokens, lengths)

    def trace_decode(self, weights: list[Any], state: SlotState, controls: Controls, idle_limit: Any) -> Any:
        """`decode` with the most drafted tokens, traced; the arguments may be abstract."""
        drafted = self.shapes.drafted
        texts = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in self._text_shapes(state) if drafted]
        return jit(self._mapped(*self._decoding(drafted)), donate_argnums=1).trace(
            weights, state, controls, idle_limit, *texts
        )

    def _decoding(self, drafted: int) -> tuple[str, Callable[..., Any]]:
        """The kind of program that decodes with this number of drafted tokens in a step, and the program."""
        if drafted:
            return "speculate", functools.partial(self._speculate_program, drafted)
        return "decode", self._decode_program

    def _text_shapes(self, state: SlotState) -> tuple[tuple[int, int], tuple[int, int]]:
        slots, length = state.shape
        return (slots, self.shapes.siblings + length), (slots, length)

    def _program(
        self,
        key: tuple[Any, ...],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        donate: int | None = None,
    ) -> Any:
        """The compiled program `key`, compiled now if new, for the shapes of the arguments."""
        if key not in self._compiled:
            options: dict[str, Any] = {"donate_argnums": () if donate is None else (donate,)}
            if self.layout is not None:
                options["in_shardings"] = self._shardings(self._specs(key[0])[0])
            self._compiled[key] = jit(self._mapped(key[0], function), **options).lower(*args).compile()
            self.compilations += 1
        return self._compiled[key]

    def _mapped(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, mapped over the devices that hold parts of the layers."""
        return function if self.layout is None else self.layout.map(function, *self._specs(kind))

    def _shardings(self, specs: Any) -> Any:
        """Partition specs with the mesh."""
        assert self.layout is not None
        mesh = self.layout.mesh
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def _specs(self, kind: str) -> tuple[Any, Any]:
        """The partition specs of a kind of program's arguments and results."""
        assert self.layout is not None
        weights = [spec for _, spec in named_params(self.layout.specs(self.published))]
        return {
            "empty": ((), STATE_SPEC),
            "prefill": ((weights, WHOLE, WHOLE), PREFILLED_SPEC),
            "insert": ((STATE_SPEC, PREFILLED_SPEC, WHOLE, WHOLE, WHOLE, WHOLE), (STATE_SPEC, WHOLE)),
            "go_on": ((weights, STATE_SPEC, *[WHOLE] * 6), (STATE_SPEC, WHOLE)),
            "decode": ((weights, STATE_SPEC, WHOLE, WHOLE), (STATE_SPEC, WHOLE)),
            "speculate": ((weights, STATE_SPEC, WHOLE, WHOLE, WHOLE, WHOLE), (STATE_SPEC, WHOLE)),
            "resize": ((STATE_SPEC, WHOLE), STATE_SPEC),
        }[kind]

    def _bind(self, weights: list[Any]) -> Decoder:
        by_path = dict(zip(self.published_spec, weights[: len(self.published_spec)], strict=True))
        state = map_params(lambda path, _: by_path[path], self.published)
        return nnx.merge(self.graphdef, state if self.layout is None else self.layout.shards(state))

    def _head(self, weights: list[Any], model: Decoder) -> HeadSteps | None:
        """The draft head, whose weights stand behind the policy's."""
        if self.head_draft is None:
            return None
        structure = jax.tree.structure(self.head_draft.abstract)
        state = jax.tree.unflatten(structure, weights[len(self.published_spec) :])
        return HeadSteps(nnx.merge(self.head_draft.graphdef, state), model, self.numerics)

    def _logits(self, model: Decoder, hidden: jax.Array) -> jax.Array:
        """The logits over the whole vocabulary, on every device."""
        head = model.head()
        logits = model.logits(hidden, head)
        return tensor_parallel.gather(logits) if model.splits(head) else logits

    def _empty_program(self, slots: int, length: int) -> SlotState:
        token, position, remaining = (jnp.zeros(slots, jnp.int32) for _ in range(3))
        kv_heads = self.config.num_kv_heads // tensor_parallel.degree()
        return SlotState(
            empty_cache(self.config, self.numerics, slots, length, kv_heads),
            jnp.zeros((slots, 2), jnp.uint32),
            token,
            position,
            remaining,
            self._empty_draft(slots, length),
        )

    def _empty_draft(self, slots: int, length: int) -> Any:
        if self.head_draft is None:
            return ()
        shape = (slots, length, self.config.num_heads, self.config.head_dim)
        keys, values = (jnp.zeros(shape, self.numerics.dtype) for _ in range(2))
        nothing = jnp.full((slots, self.shapes.drafted), NOTHING, jnp.int32)
        return HeadState(keys, values, jnp.zeros(slots, jnp.int32), nothing)

    def _prefill_program(self, weights: list[Any], tokens: jax.Array, lengths: jax.Array) -> Prefilled:
        model = self._bind(weights)
        rows, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
        head = self._head(weights, model)
        draft: Any = ()
        if head is None:
            hidden, cache = model.prefill(tokens, positions)
        else:
            hidden, cache, features = model.featured(tokens, positions, None, head.layers)
            draft = head.prompts(tokens, positions, lengths, features, self.prompt_length)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        stored = [KVCache.of(layer, self.prompt_length, self.numerics) for layer in cache]
        return Prefilled(stored, self._logits(model, last), lengths, draft)

    def _insert_program(
        self,
        state: SlotState,
        prompts: Prefilled,
        source: jax.Array,
        seeds: jax.Array,
        budget: jax.Array,
        controls: Controls,
        weights: list[Any] | None = None,
    ) -> tuple[SlotState, jax.Array]:
        new, row = source >= 0, jnp.maximum(source, 0)
        first = jnp.argsort(~new, stable=True).astype(jnp.int32)  # the slots to fill, then the others
        length = min(self.prompt_length, state.shape[1])

        def fill(index: jax.Array, cache: list[KVCache]) -> list[KVCache]:
            slot, zero = first[index], jnp.int32(0)

            def put(old: jax.Array, prefilled: jax.Array) -> jax.Array:
                one = jax.lax.dynamic_index_in_dim(prefilled[:, :, :length], row[slot], 0)
                # zeros after it, or a NaN of the slot's last sequence would reach this one
                with jax.enable_x64(self.numerics.exact):
                    one = jnp.pad(one, ((0, 0), (0, 0), (0, old.shape[2] - length), (0, 0)))
                return jax.lax.dynamic_update_slice(old, one, (slot, zero, zero, zero))

            return jax.tree.map(put, cache, prompts.cache)

        cache = jax.lax.fori_loop(jnp.int32(0), jnp.sum(new, dtype=jnp.int32), fill, state.cache)
        keys = jnp.where(new[:, None], request_keys(controls.seed, seeds), state.keys)
        lengths = prompts.lengths[row]
        token, logprob = sample(prompts.logits[row], keys, lengths, controls, self.numerics)
        remaining = jnp.where(controls.is_stop[token], 0, budget - 1)
        token, position, remaining = (
            jnp.where(new, added, old)
            for added, old in ((token, state.token), (lengths, state.position), (remaining, state.remaining))
        )
        report = _report(token[None], logprob[None], new[None])
        position, draft = position if self.streams else jnp.where(remaining > 0, position, 0), state.draft
        if weights is not None:
            draft = self._inserted_draft(weights, state, prompts, row, new, token, lengths, keys, controls)
        return SlotState(cache, keys, token, position, remaining, draft), report

    def _inserted_draft(
        self,
        weights: list[Any],
        state: SlotState,
        prompts: Prefilled,
        row: jax.Array,
        new: jax.Array,
        token: jax.Array,
        lengths: jax.Array,
        keys: jax.Array,
        controls: Controls,
    ) -> HeadState:
        """The head's state with the new prompts, and its guesses of what follows their first tokens."""
        head, old, given = self._head(weights, self._bind(weights)), state.draft, prompts.draft
        assert head is not None
        length = min(given.keys.shape[1], old.keys.shape[1])

        def put(before: jax.Array, added: jax.Array) -> jax.Array:
            # zeros after it, as in the cache: a NaN of the slot's last sequence would make all guesses NaN
            whole = jnp.pad(added[row, :length], ((0, 0), (0, before.shape[1] - length), (0, 0), (0, 0)))
            return jnp.where(new[:, None, None, None], whole, before)

        since = jnp.where(new, 0, old.since)
        filled = HeadState(put(old.keys, given.keys), put(old.values, given.values), since, old.guesses)
        first, one = lengths - 1, jnp.ones_like(lengths)
        made = head.guess(filled, given.last[row][:, None], token[:, None], first, one, keys, controls)

        def chosen(added: jax.Array, before: jax.Array) -> jax.Array:
            return jnp.where(new.reshape(-1, *[1] * (before.ndim - 1)), added, before)

        return jax.tree.map(chosen, made, filled)

    def _go_on_program(
        self,
        weights: list[Any],
        state: SlotState,
        slots: jax.Array,
        tokens: jax.Array,
        counts: jax.Array,
        seeds: jax.Array,
        budgets: jax.Array,
        controls: Controls,
    ) -> tuple[SlotState, jax.Array]:
        model, count = self._bind(weights), state.shape[0]
        used, slot = slots < count, jnp.minimum(slots, count - 1)
        # past its end a row repeats its last token, which writes the same values into the same place
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        column = jnp.minimum(column, counts[:, None] - 1)
        first = jnp.where(used, state.position[slot], 0)
        hidden, rows = model.extend(
            jnp.take_along_axis(tokens, column, axis=1),
            first[:, None] + column,
            jax.tree.map(lambda x: x[slot], state.cache),
        )
        keys = request_keys(controls.seed, seeds)
        token, logprob = sample(
            self._logits(model, hidden[:, -1]), keys, first + counts, controls, self.numerics
        )

        def put(index: jax.Array, cache: list[KVCache]) -> list[KVCache]:
            zero = jnp.int32(0)

            def one(old: jax.Array, new: jax.Array) -> jax.Array:
                row = jax.lax.dynamic_index_in_dim(new, index, 0)
                return jax.lax.dynamic_update_slice(old, row, (slot[index], zero, zero, zero))

            return jax.tree.map(one, cache, rows)

        cache = jax.lax.fori_loop(jnp.int32(0), jnp.sum(used, dtype=jnp.int32), put, state.cache)

        def scattered(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[slots].set(new, mode="drop")

        remaining = jnp.where(controls.is_stop[token], 0, budgets - 1)
        report = jnp.full((2, 1, count), -1, jnp.int32)
        report = report.at[:, :, slots].set(_report(token[None], logprob[None], used[None]), mode="drop")
        draft = state.draft
        if self.head_draft is not None:  # it has not read these tokens
            nothing = jnp.full((len(slots), draft.guesses.shape[1]), NOTHING, jnp.int32)
            guesses = scattered(draft.guesses, nothing)
            draft = dataclasses.replace(draft, since=scattered(draft.since, first + counts), guesses=guesses)
        state = SlotState(
            cache,
            scattered(state.keys, keys),
            scattered(state.token, token),
            scattered(state.position, first + counts),
            scattered(state.remaining, remaining),
            draft,
        )
        return state, report

    def _decode_program(
        self, weights: list[Any], state: SlotState, controls: Controls, idle_limit: jax.Array
    ) -> tuple[SlotState, jax.Array]:
        model = self._bind(weights)
        slots = state.shape[0]

        def more(carry: tuple[jax.Array, SlotState, jax.Array]) -> jax.Array:
            step, state, _ = carry
            idle = jnp.sum(state.remaining == 0, dtype=jnp.int32)
            return (step < self.shapes.chunk) & (idle < idle_limit)

        def one_token(
            carry: tuple[jax.Array, SlotState, jax.Array],
        ) -> tuple[jax.Array, SlotState, jax.Array]:
            step, state, report = carry
            active = state.remaining > 0
            hidden, cache = model.extend(state.token[:, None], state.position[:, None], state.cache)
            token, logprob = sample(
                self._logits(model, hidden[:, 0]), state.keys, state.position + 1, controls, self.numerics
            )
            remaining = jnp.where(active & ~controls.is_stop[token], state.remaining - 1, 0)
            if self.streams:  # a sequence that waits stays as it is
                token = jnp.where(active, token, state.token)
                position = jnp.where(active, state.position + 1, state.position)
            else:
                position = jnp.where(remaining > 0, state.position + 1, 0)
            report = jax.lax.dynamic_update_slice(
                report, _report(token[None], logprob[None], active[None]), (0, step, 0)
            )
            return step + 1, SlotState(cache, state.keys, token, position, remaining, state.draft), report

        report = jnp.full((2, self.shapes.chunk, slots), -1, jnp.int32)
        _, state, report = jax.lax.while_loop(more, one_token, (jnp.int32(0), state, report))
        if self.head_draft is not None:  # it has not read these tokens
            missed = dataclasses.replace(
                state.draft, since=state.position, guesses=jnp.full_like(state.draft.guesses, NOTHING)
            )
            state = dataclasses.replace(state, draft=missed)
        return state, report

    def _speculate_program(
        self,
        drafted_tokens: int,
        weights: list[Any],
        state: SlotState,
        controls: Controls,
        idle_limit: jax.Array,
        text: jax.Array,
        again: jax.Array,
    ) -> tuple[SlotState, jax.Array]:
        """`_decode_program` with several tokens a step; its report has REFUSED where a draft was not kept."""
        assert self.draft is not None
        model, draft = self._bind(weights), self.draft
        head = self._head(weights, model)
        slots, first, wide = state.shape[0], self.shapes.siblings, drafted_tokens + 1
        rows, ahead = jnp.arange(slots, dtype=jnp.int32)[:, None], jnp.arange(wide, dtype=jnp.int32)[None]

        def more(carry: tuple[jax.Array, SlotState, jax.Array, jax.Array]) -> jax.Array:
            step, state, _, _ = carry
            idle = jnp.sum(state.remaining == 0, dtype=jnp.int32)
            return (step < self.shapes.chunk) & (idle < idle_limit)

        def several_tokens(
            carry: tuple[jax.Array, SlotState, jax.Array, jax.Array],
        ) -> tuple[jax.Array, SlotState, jax.Array, jax.Array]:
            step, state, text, report = carry
            if head is None:
                assert not isinstance(draft, HeadDraft)
                guessed = draft(text, first + state.position, drafted_tokens)
            else:
                guessed = state.draft.guesses[:, :drafted_tokens]
            before = repeated(again, state.token, state.position, drafted_tokens)
            drafted = jnp.where(before >= 0, before, guessed)
            drafted = jnp.where(ahead[:, 1:] < state.remaining[:, None], drafted, NOTHING)
            # where nothing is drafted, the last token once more: no token that the sequence does not have
            guesses = jnp.where(drafted >= 0, drafted, state.token[:, None])
            tokens = jnp.concatenate([state.token[:, None], guesses], axis=1)
            positions = _first_places(state, wide)[:, None] + ahead
            if head is None:
                hidden, cache = model.extend(tokens, positions, state.cache)
            else:
                hidden, cache, features = model.featured(tokens, positions, state.cache, head.layers)
            sampled, logprob = sample(
                self._logits(model, hidden.reshape(slots * wide, -1)),
                jnp.repeat(state.keys, wide, axis=0, total_repeat_length=slots * wide),
                (positions + 1).reshape(-1),
                controls,
                self.numerics,
            )
            sampled = sampled.reshape(slots, wide)
            count = count_kept(drafted, sampled, controls.is_stop, state.remaining)
            kept = ahead < count[:, None]
            token = jnp.take_along_axis(sampled, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
            remaining = jnp.where(controls.is_stop[token], 0, state.remaining - count)
            new = jnp.where(kept, sampled, NOTHING)
            text = text.at[rows, first + positions + 1].set(new, mode="drop")
            refused = jnp.pad(
                jnp.where(drafted >= 0, REFUSED, NOTHING), ((0, 0), (1, 0)), constant_values=NOTHING
            )
            bits = jax.lax.bitcast_convert_type(logprob, jnp.int32).reshape(slots, wide)
            rows_of_step = jnp.stack([jnp.where(kept, sampled, refused).T, bits.T])
            report = jax.lax.dynamic_update_slice(report, rows_of_step, (0, step * wide, 0))
            position, kept_draft = state.position + count, state.draft
            if self.streams:  # a sequence that waits stays as it is
                token = jnp.where(count > 0, token, state.token)
            else:
                position = jnp.where(remaining > 0, position, 0)
            if head is not None:
                states = head.head.combine(features)
                known = state.draft, states, sampled, state.position, count
                kept_draft = head.guess(*known, state.keys, controls)
            state = SlotState(cache, state.keys, token, position, remaining, kept_draft)
            return step + 1, state, text, report

        # a slot that was refilled has a token that the host has not read
        text = text.at[rows[:, 0], first + state.position].set(state.token)
        report = jnp.full((2, self.shapes.chunk * wide, slots), NOTHING, jnp.int32)
        _, state, _, report = jax.lax.while_loop(more, several_tokens, (jnp.int32(0), state, text, report))
        return state, report

    def _resize_program(self, state: SlotState, index: jax.Array, *, length: int) -> SlotState:
        old_slots, old_length = state.shape
        same = index.shape[0] == old_slots

        def take(x: jax.Array) -> jax.Array:
            return x if same else x[index]

        def fit(x: jax.Array) -> jax.Array:
            with jax.enable_x64(self.numerics.exact):
                return jnp.pad(take(x), ((0, 0), (0, 0), (0, length - old_length), (0, 0)))

        return SlotState(
            jax.tree.map(fit, state.cache),
            take(state.keys),
            take(state.token),
            take(state.position),
            take(state.remaining),
            self._resized_draft(state.draft, take, length),
        )

    def _resized_draft(self, draft: Any, take: Callable[[jax.Array], jax.Array], length: int) -> Any:
        if self.head_draft is None:
            return ()
        keys, values = (
            jnp.pad(take(x), ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
            for x in (draft.keys, draft.values)
        )
        return HeadState(keys, values, take(draft.since), take(draft.guesses))


def _report(token: jax.Array, logprob: jax.Array, sampled: jax.Array) -> jax.Array:
    """int32 [2, C, B] of tokens, log-probabilities and whether they were sampled, each [C, B]."""
    bits = jax.lax.bitcast_convert_type(logprob, jnp.int32)
    return jnp.stack([jnp.where(sampled, token, -1), bits])


def _first_places(state: SlotState, wide: int) -> jax.Array:
    """The first of `wide` places that each slot writes, int32 [B].

    A sequence that is over may lie at the end of its row of the cache, which the next row follows.
    """
    return jnp.where(state.remaining > 0, state.position, jnp.minimum(state.position, state.shape[1] - wide))
