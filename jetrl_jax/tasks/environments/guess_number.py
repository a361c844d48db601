"""Guess a number: each turn is a guess, and the environment says on which side of it the number lies.

    numbers     16 by default, written as one character each (0 to 9, then a to z)
    reset       draws the number from the seed; the first observation is ``?``
    step        ``>`` if the number is larger than the guess, ``<`` if smaller
    reward      for the right guess 1 - penalty * (turns before it), penalty 0.05; 0 for any other turn, so
                that an episode that ends early is worth no more than one that fails

The best player halves the interval: with 16 numbers a mean of 54 / 16 = 3.375 turns, and five at most.
"""

from __future__ import annotations

import random
from typing import Any

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class GuessNumber:
    """The environment; `numbers` from 2 to 36."""

    def __init__(self, numbers: int = 16, penalty: float = 0.05) -> None:
        if not 2 <= numbers <= len(DIGITS):
            raise ValueError(f"GuessNumber: got task.options.numbers={numbers}, expected 2 to {len(DIGITS)}.")
        self._numbers = DIGITS[:numbers]
        self._penalty = penalty
        self._rng = random.Random()
        self._number = 0
        self._turns = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Draws the number."""
        self._rng = random.Random(seed)
        self._number = self._rng.randrange(len(self._numbers))
        self._turns = 0
        return "?", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compares the guess; a text that is no number of the game is answered by ``!``."""
        guess = self._numbers.find(text.strip()) if len(text.strip()) == 1 else -1
        if guess == self._number:
            return "", 1.0 - self._penalty * self._turns, True, False, {}
        self._turns += 1
        answer = "!" if guess < 0 else ">" if self._number > guess else "<"
        return answer, 0.0, False, False, {}

    def close(self) -> None:
        """Nothing to end."""

    def demonstration(self) -> list[str]:
        """Guesses that the answers allow, each as likely: a player who knows the rules and no strategy."""
        guesses: list[str] = []
        low, high = 0, len(self._numbers)
        while not guesses or guesses[-1] != self._numbers[self._number]:
            guess = self._rng.randrange(low, high)
            guesses.append(self._numbers[guess])
            low, high = (guess + 1, high) if self._number > guess else (low, guess)
        return guesses
