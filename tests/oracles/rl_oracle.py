"""The RL formulas once more, in float64 with plain loops, straight from the papers; imports none of the code
under test.
"""

from __future__ import annotations

import math

import numpy as np


def advantages(name, rewards, mask):
    """GRPO, Dr.GRPO, RLOO or REINFORCE++ of rewards [P][G]; masked samples are out, groups of fewer than two
    left are zero.
    """
    result = [[0.0] * len(group) for group in rewards]
    for p, group in enumerate(rewards):
        kept = [g for g in range(len(group)) if mask[p][g]]
        values = [float(group[g]) for g in kept]
        if name == "reinforce_pp":
            continue
        if len(kept) < 2 or all(value == values[0] for value in values):
            continue
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
        for g in kept:
            if name == "grpo":
                result[p][g] = (group[g] - mean) / (std + 1e-6)
            elif name == "dr_grpo":
                result[p][g] = group[g] - mean
            else:
                others = [float(group[o]) for o in kept if o != g]
                result[p][g] = group[g] - math.fsum(others) / len(others)
    if name == "reinforce_pp":  # the batch is the group
        places = [(p, g) for p, group in enumerate(rewards) for g in range(len(group)) if mask[p][g]]
        values = [float(rewards[p][g]) for p, g in places]
        if len(values) > 1 and len(set(values)) > 1:
            mean = math.fsum(values) / len(values)
            std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
            for (p, g), value in zip(places, values, strict=True):
                result[p][g] = (value - mean) / (std + 1e-6)
    return np.array(result)


def turn_credit(name, rewards, mask):
    """Process supervision (DeepSeekMath 4.1.3) of rewards [P][G][turns]: the rewards of all turns of a group are
    normalised, and a turn's advantage is the sum over itself and the later ones.
    """
    result = []
    for group, kept in zip(rewards, mask, strict=True):
        enough = sum(kept) >= 2
        flat = [reward for sample in group for reward in sample]
        counts = [keep and enough for sample, keep in zip(group, kept, strict=True) for _ in sample]
        normalised = iter(advantages(name, [flat], [counts])[0])
        for sample in group:
            values = [next(normalised) for _ in sample]
            result.append([math.fsum(values[k:]) for k in range(len(values))])
    return result


def overlong(length, max_tokens, buffer):
    """DAPO's soft overlong punishment, in its three cases."""
    if length <= max_tokens - buffer:
        return 0.0
    if length <= max_tokens:
        return ((max_tokens - buffer) - length) / buffer
    return -1.0


def token_loss(logprob, old_logprob, advantage, clip_low, clip_high, dual_clip):
    """PPO's clipped loss of one token, with the dual clip where A < 0."""
    ratio = math.exp(min(max(logprob - old_logprob, -20.0), 20.0))
    clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
    loss = max(-advantage * ratio, -advantage * clipped)
    if dual_clip is not None and advantage < 0:
        loss = min(loss, -advantage * dual_clip)
    return loss


def token_gradient(logprob, old_logprob, advantage, clip_low, clip_high, dual_clip):
    """d token_loss / d logprob, by cases."""
    difference = logprob - old_logprob
    if abs(difference) > 20:
        return 0.0
    ratio = math.exp(difference)
    if advantage > 0 and ratio > 1 + clip_high:
        return 0.0
    if advantage < 0 and ratio < 1 - clip_low:
        return 0.0
    if advantage < 0 and dual_clip is not None and ratio > dual_clip:
        return 0.0
    return -advantage * ratio


def kl(logprob, ref_logprob, estimator):
    """k1, k2 or k3 of one token; k3's value lies within ±10."""
    difference = logprob - ref_logprob
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference * difference / 2
    difference = min(max(difference, -20.0), 20.0)
    return min(max(math.exp(-difference) - 1 + difference, -10.0), 10.0)


def aggregate(values, mask, sequence_index, aggregation, max_tokens):
    """One number from token values [R, T]: sequences are gathered first, then averaged as the name says."""
    sequences: dict[int, list[float]] = {}
    for value, trained, index in zip(np.ravel(values), np.ravel(mask), np.ravel(sequence_index), strict=True):
        if trained:
            sequences.setdefault(int(index), []).append(float(value))
    if not sequences:
        return 0.0
    if aggregation == "token_mean":
        return math.fsum(v for s in sequences.values() for v in s) / sum(len(s) for s in sequences.values())
    if aggregation == "sequence_mean":
        return math.fsum(math.fsum(s) / len(s) for s in sequences.values()) / len(sequences)
    return math.fsum(v for s in sequences.values() for v in s) / (len(sequences) * max_tokens)


def objective(
    logprobs,
    old,
    advantage,
    mask,
    sequence_index,
    *,
    clip_low,
    clip_high,
    dual_clip,
    kl_coef,
    ref,
    estimator,
    aggregation,
    max_tokens,
):
    """The whole loss of a batch [R, T]."""
    # a float32 scalar of numpy would turn a product with a Python float into float32
    logprobs, old, advantage, ref = (np.asarray(a, np.float64) for a in (logprobs, old, advantage, ref))
    values = np.zeros(np.shape(logprobs))
    for place in np.ndindex(*values.shape):
        if mask[place]:
            values[place] = token_loss(
                logprobs[place], old[place], advantage[place], clip_low, clip_high, dual_clip
            )
            values[place] += kl_coef * kl(logprobs[place], ref[place], estimator)
    return aggregate(values, mask, sequence_index, aggregation, max_tokens)


def gspo(logprobs, old, advantage, mask, sequence_index, *, clip_low, clip_high):
    """GSPO's objective: one ratio, the geometric mean, and one clipped loss for each sequence; mean over
    sequences.
    """
    sequences: dict[int, list[tuple[float, float, float]]] = {}
    for place in np.ndindex(*np.shape(logprobs)):
        if mask[place]:
            values = (float(logprobs[place]), float(old[place]), float(advantage[place]))
            sequences.setdefault(int(sequence_index[place]), []).append(values)
    losses = []
    for tokens in sequences.values():
        mean = math.fsum(now - before for now, before, _ in tokens) / len(tokens)
        losses.append(token_loss(mean, 0.0, tokens[0][2], clip_low, clip_high, None))
    return math.fsum(losses) / len(losses)


def cispo_gradient(logprob, old_logprob, advantage, clip_low, clip_high):
    """d/d logprob of CISPO's loss of one token: minus the clipped ratio times the advantage."""
    ratio = math.exp(min(max(logprob - old_logprob, -20.0), 20.0))
    return -min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage


def correction(old, rollout, *, weight, low, high, normalize, reject, level, reject_low, reject_high, veto):
    """(weights, keeps) of sequences given as lists of log-probabilities, token by token."""

    def clamp(value):
        return min(max(value, -20.0), 20.0)

    weights, keeps = [], []
    for before, sampled in zip(old, rollout, strict=True):
        ratios = [clamp(float(o) - float(r)) for o, r in zip(before, sampled, strict=True)]
        whole = clamp(math.fsum(float(o) - float(r) for o, r in zip(before, sampled, strict=True)))
        row = []
        for ratio in ratios:
            value = math.exp(whole if weight.startswith("sequence") else ratio)
            if weight == "none":
                value = 1.0
            elif weight.endswith("truncate"):
                value = min(value, high)
            elif not low <= value <= high:
                value = 0.0
            row.append(value)
        weights.append(row)
        statistic = {
            "k1": lambda x: -x,
            "k2": lambda x: x * x / 2,
            "k3": lambda x: math.exp(x) - 1 - x,
            "none": lambda x: 0.0,
        }[reject]
        values = [statistic(ratio) for ratio in ratios]
        reduced = {"token": values, "sequence_sum": [math.fsum(values)], "sequence_mean": [math.fsum(values) / len(values)],
                   "sequence_max": [max(values)]}[level]  # fmt: skip
        bounds = (math.log(reject_low), math.log(reject_high)) if reject == "k1" else (-math.inf, reject_high)
        inside = [reject == "none" or bounds[0] <= value <= bounds[1] for value in reduced]
        keep = inside if level == "token" else inside * len(ratios)
        if veto is not None and any(math.exp(ratio) < veto for ratio in ratios):
            keep = [False] * len(ratios)
        keeps.append(keep)
    if normalize and weight != "none":
        if weight.startswith("sequence"):
            kept = [row[0] for row, keep in zip(weights, keeps, strict=True) if any(keep)]
        else:
            kept = [
                value
                for row, keep in zip(weights, keeps, strict=True)
                for value, k in zip(row, keep, strict=True)
                if k
            ]
        mean = math.fsum(kept) / len(kept) if kept else 1.0
        weights = [[value / mean if mean > 0 else value for value in row] for row in weights]
    return weights, keeps


def central_difference(function, point, step=1e-6):
    """Gradient of a scalar function of an array."""
    gradient = np.zeros(point.shape)
    for place in np.ndindex(*point.shape):
        up, down = point.copy(), point.copy()
        up[place] += step
        down[place] -= step
        gradient[place] = (function(up) - function(down)) / (2 * step)
    return gradient


def mismatch(old, rollout):
    """The mismatch metrics from lists of sequences of log-probabilities."""
    tokens = [
        (float(o), float(r)) for so, sr in zip(old, rollout, strict=True) for o, r in zip(so, sr, strict=True)
    ]
    n = len(tokens)
    weights = [math.exp(min(max(o - r, -20.0), 20.0)) for o, r in tokens]
    mean_weight = math.fsum(weights) / n
    perplexity_ratios, squares = [], []
    for so, sr in zip(old, rollout, strict=True):
        perplexity_ratios.append(math.exp(sum(map(float, sr)) / len(sr) - sum(map(float, so)) / len(so)))
        product = math.exp(
            min(max(sum(float(o) - float(r) for o, r in zip(so, sr, strict=True)), -20.0), 20.0)
        )
        squares.append(product**2)
    return {
        "mismatch/k1": sum(r - o for o, r in tokens) / n,
        "mismatch/k3": sum(w - 1 - math.log(w) for w in weights) / n,
        "mismatch/logprob_abs_mean": sum(abs(o - r) for o, r in tokens) / n,
        "mismatch/logprob_abs_max": max(abs(o - r) for o, r in tokens),
        "mismatch/ppl_ratio": sum(perplexity_ratios) / len(perplexity_ratios),
        "mismatch/chi2_token": sum(w**2 for w in weights) / n - 1,
        "mismatch/chi2_sequence": sum(squares) / len(squares) - 1,
        "mismatch/ess": 1 / (sum((w / mean_weight) ** 2 for w in weights) / n),
        "mismatch/token_mult_prob_error": sum(math.exp(abs(math.log(w))) for w in weights) / n,
    }
