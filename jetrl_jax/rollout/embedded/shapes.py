"""The few shapes for which the embedded engine compiles its programs."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST_PROMPT_BUCKET = 8
SMALLEST_CACHE_BUCKET = 64
SMALLEST_SHRUNK_BATCH = 8


@dataclass(frozen=True)
class EngineShapes:
    """Sizes of the programs' arguments; all tuples ascend.

    batch_sizes: numbers of slots of the decode programs; the last is all slots.
    prompt_buckets: padded prompt lengths.
    cache_buckets: cache lengths.
    prefill_rows: number of prompts of one prefill.
    chunk: largest number of steps of one decode call; a step samples a token or, with speculation, 1 to
      `drafted` + 1.
    turn_buckets: padded numbers of the tokens that follow a waiting sequence; none without a stream.
    drafted: largest number of tokens drafted in a step.
    siblings: width of the siblings' text that a draft reads.
    """

    batch_sizes: tuple[int, ...]
    prompt_buckets: tuple[int, ...]
    cache_buckets: tuple[int, ...]
    prefill_rows: int
    chunk: int
    turn_buckets: tuple[int, ...] = ()
    drafted: int = 0
    siblings: int = 0


def prompt_buckets(max_prompt_tokens: int) -> tuple[int, ...]:
    """Padded prompt lengths: powers of two from 8, then the longest prompt rounded up to a multiple of 8."""
    buckets, size = [], SMALLEST_PROMPT_BUCKET
    while size < max_prompt_tokens:
        buckets.append(size)
        size *= 2
    return (*buckets, _multiple_of_8(max_prompt_tokens))


def turn_buckets(max_prompt_tokens: int) -> tuple[int, ...]:
    """Padded numbers of new tokens of a waiting sequence: 4, then as `prompt_buckets`."""
    return (4, *prompt_buckets(max_prompt_tokens))


def cache_buckets(max_tokens: int) -> tuple[int, ...]:
    """Cache lengths: the whole sequence, half of it, a quarter, ... down to 64 tokens; multiples of 8."""
    buckets = [_multiple_of_8(max_tokens)]
    while (half := _multiple_of_8(-(-buckets[-1] // 2))) >= SMALLEST_CACHE_BUCKET:
        buckets.append(half)
    return tuple(reversed(buckets))


def batch_sizes(slots: int) -> tuple[int, ...]:
    """Numbers of slots: all, and a quarter of them for few requests and for the last long answers."""
    return (slots // 4, slots) if slots // 4 >= SMALLEST_SHRUNK_BATCH else (slots,)


def smallest_fit(sizes: tuple[int, ...], needed: int) -> int:
    """The first of ascending `sizes` that is at least `needed`, else the last."""
    return next((size for size in sizes if size >= needed), sizes[-1])


def _multiple_of_8(count: int) -> int:
    return -(-count // 8) * 8
