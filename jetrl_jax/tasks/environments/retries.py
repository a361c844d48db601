"""An item of reasoning-gym with several attempts: after a wrong answer the policy hears its score.

    options   dataset, the name of a reasoning-gym dataset; all others are the dataset's own
    reward    what an attempt adds to the best score so far; the episode ends with a score of 1

reasoning-gym asks once.  The number of attempts is the config's ``task.max_turns``.
"""

from __future__ import annotations

from typing import Any

from jetrl_jax.text.answers import answer_part


class Retries:
    """The environment."""

    def __init__(self, dataset: str, **options: Any) -> None:
        self._name = dataset
        self._options = options
        self._dataset: Any = None
        self._best = 0.0

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Makes the item of the seed."""
        import reasoning_gym

        self._dataset = reasoning_gym.create_dataset(self._name, size=1, seed=seed, **self._options)
        self._best = 0.0
        return str(self._dataset[0]["question"]), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Scores an attempt."""
        answer = answer_part(text)
        score = 0.0
        if answer is not None:
            score = float(self._dataset.score_answer(answer.strip(), self._dataset[0]))
        gained, self._best = max(score - self._best, 0.0), max(score, self._best)
        return f"Not right yet (score {score:g}). Try again.", gained, score >= 1.0, False, {}

    def close(self) -> None:
        """Nothing to end."""
