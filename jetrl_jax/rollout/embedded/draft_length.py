"""The number of tokens that a step drafts, chosen by counts and a clock; no token depends on it.

    speed(k) = (1 + sum_{j <= k} kept_j) / seconds(k)

kept_j is the share of a sequence's steps in which the j-th guess became part of it, counted over the last few
thousand steps.  seconds(k) is the shortest time of a step with k drafted tokens, for each shape of the slots.
With full slots a forward of k + 1 tokens often costs more than it gains; with few it is nearly free.
"""

from __future__ import annotations

import numpy as np

MEASURED = 2  # times that each length is measured first; the first call of a program may be slow
TRIED_AGAIN = 32  # chunks of a shape after which another length is measured again
REMEMBERED = 10_000  # steps of a sequence, after which older counts weigh half

Shape = tuple[int, int]


class DraftLength:
    """Chooses among `lengths` for each shape of the slots (number, cache length).

    Attributes:
      measuring: whether the length that was chosen last is to be measured; else a chunk is timed only where
        that costs nothing.
    """

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.measuring = False
        self.kept = np.zeros(max(lengths))  # of the j-th guesses, those kept
        self.steps = np.zeros(max(lengths))  # of a sequence, that had a j-th guess
        self._seconds: dict[tuple[Shape, int], float] = {}
        self._chunks: dict[tuple[Shape, int], int] = {}

    def choose(self, shape: Shape) -> int:
        """The length of the next chunk."""
        if len(self.lengths) == 1:
            return self.lengths[0]
        chunks = {k: self._chunks.get((shape, k), 0) for k in self.lengths}
        rarest = min(self.lengths, key=lambda k: chunks[k])
        self.measuring = chunks[rarest] < MEASURED or sum(chunks.values()) % TRIED_AGAIN == 0
        return rarest if self.measuring else max(self.lengths, key=lambda k: self.speed(shape, k))

    def speed(self, shape: Shape, k: int) -> float:
        """Tokens of a sequence in a second."""
        return float(1 + (self.kept / np.maximum(self.steps, 1))[:k].sum()) / self._seconds[shape, k]

    def add(self, shape: Shape, k: int, seconds: float | None, kept: np.ndarray) -> None:
        """Takes a chunk: seconds of a step, None where it was not timed, and whether each guess was kept,
        bool [steps, k].
        """
        self._chunks[shape, k] = self._chunks.get((shape, k), 0) + 1
        if seconds is not None:
            self._seconds[shape, k] = min(seconds, self._seconds.get((shape, k), seconds))
        self.kept[:k] += kept.sum(axis=0)
        self.steps[:k] += len(kept)
        older = np.where(self.steps > REMEMBERED, 0.5, 1.0)
        self.kept *= older
        self.steps *= older
