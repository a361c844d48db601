"""Coupled speculation: several tokens in one step of the model, the same tokens and the same bits.

    x_p                the token sampled last, at position p
    d_1 .. d_k         guesses of the tokens after it, the draft
    logits_0 .. _k     of x_p, d_1 .. d_k at positions p .. p + k, by one forward (`Decoder.extend`)
    y_j                sample(logits_j, key, p + 1 + j)
    kept               y_0 .. y_m,  m the first j with d_{j+1} != y_j, or with y_j a stop token, else k

The noise of a token depends on the call, the request and the position only (`sampling`).  So the policy's own
sample at every position is known as soon as its logits are, and y_0 is what the loop without speculation
draws after x_p.  If d_1 = y_0, then logits_1 are conditioned on the same tokens as in that loop, and so on.
With `numerics.exact` the logits of a token have the same bits in a forward of k + 1 tokens as in a forward of
one.  Therefore every draft, good or bad, gives the tokens and log-probabilities of the loop without
speculation, bit for bit; a draft decides only the number of steps.  Without `exact` every token is still
drawn from the policy, but from logits whose last bits are those of another program.

A rejected token leaves its keys and values above the sequence.  No query sees them: the step whose query
first sees a place writes it before.  They must be finite, since a hidden key has weight 0 and 0 times NaN is
NaN; `Lookup` proposes no token that is not in the sequence or in a sibling with finite log-probabilities.

Rejection sampling (Leviathan et al., arXiv 2211.17192) keeps the distribution but draws other tokens.
Accepting a sample under shared noise is Daliri et al., arXiv 2408.07978.

Axes: B slots, k drafted tokens, W width of the text that a draft reads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jetrl_jax.config.rollout import MOST_DRAFTED
from jetrl_jax.precision.numerics import Numerics

NOTHING = -1  # in place of a token that is not known, or not drafted
REFUSED = -2  # in a report: a token was drafted here and is not part of the sequence


class Draft(Protocol):
    """Guesses the next tokens of each slot, inside the decode program."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of guesses for each slot, k, among which the engine chooses; 0 is none."""
        ...

    @property
    def context(self) -> int:
        """The number of tokens before a completion that it reads of a finished sibling."""
        ...

    def __call__(
        self, text: Int32[Array, "B W"], last: Int32[Array, " B"], tokens: int
    ) -> Int32[Array, "B k"]:
        """The guesses, `NOTHING` where there is none.

        Args:
          text: siblings, then the sequence; `NOTHING` between them and where nothing is known.
          last: the place in `text` of the token sampled last.
          tokens: the number of guesses for each slot, k.
        """
        ...


@dataclass(frozen=True)
class Lookup:
    """The tokens that followed the last ones where these stood before.

    Of the places in `text` whose last tokens agree with those of the sequence, at most `longest` of them, it
    takes one with the longest agreement, and of these the newest.  The guess is the text after it.  At the
    end of the sequence the guess goes on from the place again, so that a repetition is continued.

    Raises:
      ValueError: no length, one outside 0 .. 16, or longest below 1.
    """

    lengths: tuple[int, ...]
    longest: int = 3

    def __post_init__(self) -> None:
        if not self.lengths or not all(0 <= k <= MOST_DRAFTED for k in self.lengths):
            raise ValueError(f"Lookup: got lengths={self.lengths}, expected some of 0 .. {MOST_DRAFTED}.")
        if self.longest < 1:
            raise ValueError(f"Lookup: got longest={self.longest}, expected >= 1.")

    @property
    def context(self) -> int:
        """The longest agreement that it looks for."""
        return self.longest

    def __call__(
        self, text: Int32[Array, "B W"], last: Int32[Array, " B"], tokens: int
    ) -> Int32[Array, "B k"]:
        width = text.shape[1]
        places = jnp.arange(width, dtype=jnp.int32)[None]
        agree, run = jnp.ones(text.shape, bool), jnp.zeros(text.shape, jnp.int32)
        for back in range(self.longest):
            wanted = jnp.take_along_axis(text, jnp.maximum(last - back, 0)[:, None], axis=1)
            shifted = jnp.pad(text, ((0, 0), (back, 0)), constant_values=NOTHING)[:, :width]
            agree &= (shifted == wanted) & (wanted >= 0)
            run += agree.astype(jnp.int32)
        follows = jnp.pad(text[:, 1:], ((0, 0), (0, 1)), constant_values=NOTHING)
        usable = (run > 0) & (places < last[:, None]) & (follows >= 0)
        rank = jnp.where(usable, run * width + places, NOTHING).max(axis=1)
        place = rank % width
        period = jnp.maximum(last - place, 1)[:, None]
        ahead = jnp.arange(tokens, dtype=jnp.int32)[None] % period
        guess = jnp.take_along_axis(text, jnp.minimum(place[:, None] + 1 + ahead, width - 1), axis=1)
        known = jnp.cumprod((guess >= 0).astype(jnp.int32), axis=1) > 0  # not beyond the end of a sibling
        return jnp.where(known & (rank >= 0)[:, None], guess, NOTHING)


def described(draft: object, numerics: Numerics) -> dict[str, str]:
    """For a run's record: the draft, the rule of acceptance, and the promise that these numerics keep."""
    exact = numerics.exact and numerics.compute_dtype != "float32"  # FP32 products depend on their rows
    return {
        "draft": repr(draft),
        "acceptance": "coupled: a drafted token is kept where the policy's own sample equals it",
        "promise": "tokens and log-probabilities are bit for bit those without speculation"
        if exact
        else "every token is drawn from the policy; logits, and so some tokens, differ in their last bits "
        "from those without speculation",
    }


def count_kept(
    drafted: Int32[Array, "B k"],
    sampled: Int32[Array, "B k_plus_1"],
    is_stop: Bool[Array, " V"],
    remaining: Int32[Array, " B"],
) -> Int32[Array, " B"]:
    """How many of the sampled tokens are the next ones of the sequence; 0 in an idle slot.

    Each is, up to the first after which the draft went on otherwise, or that ends the sequence.
    """
    before = sampled[:, :-1]
    goes_on = (drafted == before) & ~is_stop[before]
    return jnp.minimum(1 + jnp.cumprod(goes_on.astype(jnp.int32), axis=1).sum(axis=1), remaining)


def repeated(
    again: Int32[Array, "B S"], token: Int32[Array, " B"], position: Int32[Array, " B"], tokens: int
) -> Int32[Array, "B k"]:
    """The tokens that the same request sampled at the next positions when it was asked before.

    `NOTHING` where it did not then sample the `token` at `position`.  The noise is the same, so only the
    change of the weights makes a difference.
    """
    ahead = position[:, None] + jnp.arange(tokens + 1, dtype=jnp.int32)[None]
    found = jnp.take_along_axis(again, jnp.minimum(ahead, again.shape[1] - 1), axis=1)
    return jnp.where(found[:, :1] == token[:, None], found[:, 1:], NOTHING)


Noise = tuple[int, bool, float, int]  # seed of the call, greedy, temperature, seed of the request


class Completions:
    """Completions of earlier calls, of each prompt the newest; on the host, in no checkpoint.

    Args:
      most_tokens: in all, prompts too; the prompts that were asked longest ago are dropped.
      most_of_prompt: completions of one prompt.
    """

    def __init__(self, most_tokens: int = 1 << 24, most_of_prompt: int = 64) -> None:
        self.most_tokens = most_tokens
        self.most_of_prompt = most_of_prompt
        self.tokens = 0
        self._of_prompt: dict[bytes, dict[Noise, np.ndarray]] = {}  # oldest first, both

    def of(self, prompt: np.ndarray) -> dict[Noise, np.ndarray]:
        """Noise -> completion, the newest last."""
        return self._of_prompt.get(prompt.tobytes(), {})

    def add(self, prompt: np.ndarray, noise: Noise, completion: np.ndarray) -> None:
        """Takes a completion, in place of an earlier one with the same noise."""
        key = prompt.tobytes()
        known = self._of_prompt.pop(key, None)
        if known is None:
            known = {}
            self.tokens += len(prompt)
        self._of_prompt[key] = known
        self.tokens += len(completion) - len(known.pop(noise, ()))
        known[noise] = completion.copy()
        while len(known) > self.most_of_prompt:
            self.tokens -= len(known.pop(next(iter(known))))
        while self.tokens > self.most_tokens and len(self._of_prompt) > 1:
            oldest = next(iter(self._of_prompt))
            dropped = self._of_prompt.pop(oldest).values()
            self.tokens -= len(oldest) // prompt.itemsize + sum(map(len, dropped))


class Texts:
    """The texts that drafts read, on the host: of every request its own, of every prompt its completions.

    Args:
      prompts: the distinct ones; prompt_of: of each request, the index of its prompt.
      noises: of each request.
      max_tokens: longest completion of the submission.
      width: of the siblings' part, in tokens.
      context: how many of a prompt's last tokens stand before a sibling's completion.
      completions: of earlier calls; takes those of this one.

    The siblings' part has the newest that fit: completions of earlier calls, then those still sampled, then
    the finished ones, which are read first.
    """

    def __init__(
        self,
        prompts: list[np.ndarray],
        prompt_of: np.ndarray,
        noises: list[Noise],
        max_tokens: int,
        width: int,
        context: int,
        completions: Completions,
    ) -> None:
        self.prompt_of = prompt_of
        self.noises = noises
        self.width = width
        self.context = context
        self.completions = completions
        self.lengths = np.array([len(prompt) for prompt in prompts])[prompt_of]
        self.ends = self.lengths.copy()
        self.own = np.full((len(prompt_of), int(self.lengths.max()) + max_tokens), NOTHING, np.int32)
        self.again = self.own.copy()
        for request, index in enumerate(prompt_of):
            self._ask(request, prompts[index])
        ends = [prompt[max(len(prompt) - context, 0) :] for prompt in prompts]
        self.earlier = [
            [np.concatenate([end, one]) for one in completions.of(prompt).values()]
            for prompt, end in zip(prompts, ends, strict=True)
        ]
        self.finished: list[list[np.ndarray]] = [[] for _ in prompts]
        self.spoilt = np.zeros(len(prompt_of), bool)  # a log-probability was not finite

    def add(self, request: np.ndarray, offset: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Takes sampled tokens, each of a request at an offset of its completion.

        A request with a log-probability that is not finite is shown to no other one from then on.
        """
        self.own[request, self.lengths[request] + offset] = tokens
        self.spoilt[request[~np.isfinite(logprobs)]] = True
        np.maximum.at(self.ends, request, self.lengths[request] + offset + 1)

    def finish(self, request: int) -> None:
        """Shows a whole completion to the other requests of the prompt, and to later calls."""
        if self.spoilt[request]:
            return
        prompt = self.prompt_of[request]
        self.finished[prompt].append(self._sibling(request))
        asked, said = np.split(self.own[request, : self.ends[request]], [self.lengths[request]])
        self.completions.add(asked, self.noises[request], said)

    def go_on(self, request: int, history: np.ndarray, noise: Noise) -> None:
        """Takes the next turn of a conversation, whose prompt is all of it so far."""
        self.noises[request] = noise
        self._ask(request, history)

    def _ask(self, request: int, prompt: np.ndarray) -> None:
        """Begins a request's own text with a prompt, and finds what it was answered earlier."""
        start = self.lengths[request] = self.ends[request] = len(prompt)
        self.own[request, :start] = prompt
        before = self.completions.of(prompt).get(self.noises[request], prompt[:0])
        before = before[: self.again.shape[1] - start]
        self.again[request, start:] = NOTHING
        self.again[request, start : start + len(before)] = before

    def of(self, occupant: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the slots' requests (idle: -1): siblings and then `length` places of its own, int32 [B, W]; and
        the tokens of the same request when it was asked before, int32 [B, length].
        """
        rows, known = np.flatnonzero(occupant >= 0), min(length, self.own.shape[1])
        busy = occupant[rows]
        text = np.full((len(occupant), self.width + length), NOTHING, np.int32)
        again = np.full((len(occupant), length), NOTHING, np.int32)
        text[rows, self.width : self.width + known] = self.own[busy, :known]
        again[rows, :known] = self.again[busy, :known]
        prompt_of = self.prompt_of[busy]
        for prompt in np.unique(prompt_of):
            here = prompt_of == prompt
            running = [self._sibling(request) for request in busy[here & ~self.spoilt[busy]]]
            shown = self._joined([*self.earlier[prompt], *running, *self.finished[prompt]])
            text[rows[here], self.width - len(shown) : self.width] = shown
        return text, again

    def _sibling(self, request: int) -> np.ndarray:
        """The last tokens of the prompt, then the completion so far."""
        return self.own[request, max(self.lengths[request] - self.context, 0) : self.ends[request]]

    def _joined(self, parts: list[np.ndarray]) -> np.ndarray:
        """The last of the parts, with `NOTHING` behind each; of all the last `width` tokens."""
        pieces, count = [], 0
        for part in reversed(parts):
            if count >= self.width:
                break
            pieces += [[NOTHING], part]
            count += len(part) + 1
        return np.concatenate([np.zeros(0, np.int32), *reversed(pieces)])[-self.width :]
