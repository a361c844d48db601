"""Attention of given tokens to given tokens in float64 numpy, value and gradient, one query at a time;
imports none of our code.

    s = K q / sqrt(H),   p = exp(s - max s) / sum,   o = p V
    dV += p do^T,   ds = p * (V do - o . do),   dq = ds K / sqrt(H),   dK += ds q^T / sqrt(H)

Beside each result stands its magnitude: the same sums over absolute values, which errors of roundings are
proportional to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Attended:
    """values, magnitudes: (out [B, T, N, H], dq, dk, dv); spread: the largest |q| . |k| / sqrt(H) of a
    visible pair.
    """

    values: tuple[np.ndarray, ...]
    magnitudes: tuple[np.ndarray, ...]
    spread: float


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, cotangent: np.ndarray
) -> Attended:
    """q, cotangent [B, T, N, H]; k, v [B, S, K, H]; visible bool [B, T, S],
    at least one key of each query.
    """
    q, k, v, cotangent = (np.asarray(x, np.float64) for x in (q, k, v, cotangent))
    B, T, N, H = q.shape
    group, scale, spread = N // k.shape[2], 1 / math.sqrt(H), 0.0
    values, magnitudes = ([np.zeros_like(x) for x in (q, q, k, v)] for _ in range(2))
    for b in range(B):
        for t in range(T):
            seen = np.flatnonzero(visible[b, t])
            for n in range(N):
                head, here = n // group, (b, t, n)
                keys, inputs = k[b, seen, head], v[b, seen, head]
                scores = keys @ q[here] * scale
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out = weights @ inputs
                back = weights * (inputs @ cotangent[here] - out @ cotangent[here])
                towards = np.abs(inputs) @ np.abs(cotangent[here])
                size = weights * (towards + weights @ towards)
                values[0][here] = out
                magnitudes[0][here] = weights @ np.abs(inputs)
                values[1][here] = back @ keys * scale
                magnitudes[1][here] = size @ np.abs(keys) * scale
                values[2][b, seen, head] += np.outer(back, q[here]) * scale
                magnitudes[2][b, seen, head] += np.outer(size, np.abs(q[here])) * scale
                values[3][b, seen, head] += np.outer(weights, cotangent[here])
                magnitudes[3][b, seen, head] += np.outer(weights, np.abs(cotangent[here]))
                spread = max(spread, float((np.abs(keys) @ np.abs(q[here])).max() * scale))
    return Attended(tuple(values), tuple(magnitudes), spread)
