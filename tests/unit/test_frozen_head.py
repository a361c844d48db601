"""How sure a policy can be beside a frozen head: the bound holds for every hidden state, and one reaches it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from frozen_head import largest_logprobs


def test_bound_of_two_tokens_is_the_logistic_function() -> None:
    head, norm = np.array([[0.3, 0.0, 0.4, 0.0], [-0.3, 0.0, -0.4, 0.0]]), np.ones(4)
    expected = -np.log1p(np.exp(-2 * 0.5 * 2.0))  # |head| = 0.5, |x| <= 2
    np.testing.assert_allclose(largest_logprobs(head, norm), expected, rtol=1e-6)


def test_hidden_states_stay_below_the_bound_and_come_near_it() -> None:
    rng = np.random.default_rng(0)
    head, norm = rng.normal(size=(7, 12)) * 0.3, rng.uniform(0.5, 1.5, 12)
    bounds = largest_logprobs(head, norm)
    x = rng.normal(size=(20000, 12)) + 2 * (head * norm)[rng.integers(0, 7, 20000)]
    x *= np.sqrt(12) / np.linalg.norm(x, axis=1, keepdims=True)
    logits = x @ (head * norm).T
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert np.all(logprobs.max(0) <= bounds) and np.all(logprobs.max(0) >= bounds - 0.2)
