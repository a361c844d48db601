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
NaN; `Lookup` proposes no token that is not in the sequence or in a finite sibling.

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
    def tokens(self) -> int:
        """The number of guesses for each slot, k."""
        ...

    @property
    def context(self) -> int:
        """The number of tokens before a completion that it reads of a finished sibling."""
        ...

    def __call__(self, text: Int32[Array, "B W"], last: Int32[Array, " B"]) -> Int32[Array, "B k"]:
        """The guesses, `NOTHING` where there is none.

        Args:
          text: finished siblings, then the sequence; `NOTHING` between them and where nothing is known.
          last: the place in `text` of the token sampled last.
        """
        ...


@dataclass(frozen=True)
class Lookup:
    """The tokens that followed the last ones where these stood before.

    Of the places in `text` whose last tokens agree with those of the sequence, at most `longest` of them, it
    takes one with the longest agreement, and of these the newest.  The guess is the text after it.  At the
    end of the sequence the guess goes on from the place again, so that a repetition is continued.

    Raises:
      ValueError: tokens outside 1 .. 16, or longest below 1.
    """

    tokens: int
    longest: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MOST_DRAFTED:
            raise ValueError(f"Lookup: got tokens={self.tokens}, expected 1 .. {MOST_DRAFTED}.")
        if self.longest < 1:
            raise ValueError(f"Lookup: got longest={self.longest}, expected >= 1.")

    @property
    def context(self) -> int:
        """The longest agreement that it looks for."""
        return self.longest

    def __call__(self, text: Int32[Array, "B W"], last: Int32[Array, " B"]) -> Int32[Array, "B k"]:
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
        ahead = jnp.arange(self.tokens, dtype=jnp.int32)[None] % period
        guess = jnp.take_along_axis(text, jnp.minimum(place[:, None] + 1 + ahead, width - 1), axis=1)
        known = jnp.cumprod((guess >= 0).astype(jnp.int32), axis=1) > 0  # not beyond the end of a sibling
        return jnp.where(known & (rank >= 0)[:, None], guess, NOTHING)


def described(draft: Draft, numerics: Numerics) -> dict[str, str]:
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


class Texts:
    """The texts that drafts read, on the host: of every request its own, of every prompt its finished
    completions.

    Args:
      prompts: the distinct ones; prompt_of: of each request, the index of its prompt.
      max_tokens: longest completion of the submission.
      width: of the siblings' part, in tokens; the newest completions that fit are kept.
      context: how many of a prompt's last tokens stand before a sibling's completion.
    """

    def __init__(
        self, prompts: list[np.ndarray], prompt_of: np.ndarray, max_tokens: int, width: int, context: int
    ) -> None:
        self.prompt_of = prompt_of
        self.lengths = np.array([len(prompt) for prompt in prompts])[prompt_of]
        self.own = np.full((len(prompt_of), int(self.lengths.max()) + max_tokens), NOTHING, np.int32)
        for request, index in enumerate(prompt_of):
            self.own[request, : self.lengths[request]] = prompts[index]
        self.siblings = np.full((len(prompts), width), NOTHING, np.int32)
        self.context = context

    def add(self, request: np.ndarray, offset: np.ndarray, tokens: np.ndarray) -> None:
        """Takes sampled tokens, each of a request at an offset of its completion."""
        self.own[request, self.lengths[request] + offset] = tokens

    def finish(self, request: int, count: int) -> None:
        """Shows the completion of `count` tokens to the other requests of the prompt."""
        start, prompt = self.lengths[request], self.prompt_of[request]
        text = self.own[request, max(start - self.context, 0) : start + count]
        width = self.siblings.shape[1]
        self.siblings[prompt] = np.concatenate([self.siblings[prompt], text, [NOTHING]])[-width:]

    def of(self, occupant: np.ndarray, length: int) -> Int32[np.ndarray, "B W"]:
        """What the drafts of these slots' requests read (idle: -1): siblings, then `length` places of its
        own.
        """
        own = np.full((len(occupant), length), NOTHING, np.int32)
        known = min(length, self.own.shape[1])
        own[:, :known] = self.own[occupant, :known]
        text = np.concatenate([self.siblings[self.prompt_of[occupant]], own], axis=1)
        text[occupant < 0] = NOTHING
        return text
