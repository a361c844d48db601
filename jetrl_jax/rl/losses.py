"""Per-token policy losses and their aggregation, as pure functions in JAX.

    ratio_t = exp(clip(logprobs_t − old_logprobs_t, ±20))
    PPO     L_t = max(−A·ratio, −A·clip(ratio, 1 − clip_low, 1 + clip_high))
            dual clip, A < 0: min(L_t, −A·c)
    GSPO    the same with ratio_t = exp(mean of the log ratios of the sequence), differentiated only at t
    CISPO   L_t = −sg(clip(ratio, 1 − clip_low, 1 + clip_high))·A·logprobs
    KL      d = logprobs − ref_logprobs;  k1 = d,  k2 = d²/2,  k3 = e^(−d) − 1 + d

Token arrays are packed rows [R, T] (only GSPO depends on the axes), aligned with targets: ``logprobs[r, t]``
is the log-probability of ``token_ids[r, t]`` given the tokens before it.  ``loss_mask`` is true at trained
tokens.  Values outside it enter no exponential and no sum, so that −inf, inf or NaN there changes neither the
value nor the gradient.  A non-finite value at a trained token reaches the loss.

Statistics are sums over the trained tokens of a call, so that those of microbatches add up;
`jetrl_jax.rl.metrics` turns them into fractions and means.

Sources: PPO (clip); dual clip: "Mastering Complex Control in MOBA Games"; clip-higher and token mean: DAPO;
GSPO, arXiv 2507.18071; CISPO, arXiv 2506.13585; constant denominator: Dr.GRPO; KL estimators: Schulman,
"Approximating KL Divergence".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32, Shaped

from jetrl_jax.config.learning import Aggregation
from jetrl_jax.rl import LOG_RATIO_LIMIT

KLEstimator = Literal["k1", "k2", "k3"]

K3_LIMIT = 10.0  # the value of k3 is clamped to this


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Denominators:
    """The denominators of sums over the global batch of one optimiser step, across microbatches and devices.

    A pytree of scalars, so that other counts need no new compilation.  A microbatch's loss divided by the
    global counts is its share of the loss; shares add up, and so do their gradients.

    Attributes:
        tokens: trained tokens of the batch (``token_mean``).
        sequences: trajectories with at least one trained token (``sequence_mean``).
        constant: sequences · longest completion in tokens (``constant``).
    """

    tokens: ArrayLike
    sequences: ArrayLike
    constant: ArrayLike


@dataclass(frozen=True)
class Sequences:
    """The sequences of the tokens of packed rows.

    Attributes:
        segment_ids: 0 to T, unique within a row.
        inverse_length: 1 / number of trained tokens of the token's sequence.
    """

    segment_ids: Int32[Array, "R T"]
    inverse_length: Float[Array, "R T"]


def policy_loss(
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"] | None,
    advantages: Float[Array, "R T"],
    loss_mask: Shaped[Array, "R T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    sequences: Sequences | None = None,
) -> tuple[Float[Array, "R T"], dict[str, Float[Array, ""]]]:
    """The clipped importance-ratio loss of each token.

    A token whose ratio is exactly on a bound is not clipped and keeps its gradient.

    Args:
        logprobs: of the present policy; only this argument receives a gradient.
        old_logprobs: of the policy with which the ratio compares; None takes ``logprobs`` itself without
            gradient (on-policy: every ratio is 1 and the gradient is −A·∇logprobs).
        loss_mask: bool or 0/1.
        clip_low: the ratio is clipped below at 1 − clip_low; acts only where A < 0.
        clip_high: the ratio is clipped above at 1 + clip_high; acts only where A > 0.
        dual_clip: c > 1 bounds the loss of tokens with A < 0 by −A·c; None is off.
        sequences: for GSPO, where a token's ratio is that of its sequence, s = exp(mean over its trained
            tokens of the log ratio), with the gradient of s·π/sg(π) (the paper's GSPO-token).  None: each
            token has its own ratio.

    Returns:
        The loss, 0 where masked, in float32 (float64 of float64), and a dict of scalar sums over the
        masked tokens:

        tokens                  count of trained tokens
        positive_tokens         those with A > 0
        negative_tokens         those with A < 0
        clipped_high_positive   A > 0 and ratio > 1 + clip_high: the gradient is zero
        clipped_low_negative    A < 0 and ratio < 1 − clip_low: the gradient is zero
        clipped_dual_negative   A < 0 and ratio > dual_clip: the gradient is zero (0 where dual clip is off)
        outside_low_positive    A > 0 and ratio < 1 − clip_low: keeps its gradient
        outside_high_negative   A < 0 and ratio > 1 + clip_high: keeps its gradient unless dual-clipped
        ratio_sum               Σ ratio
        old_kl_sum              Σ (ratio − 1 − log ratio), an estimate of KL(old ‖ now)
    """
    mask = jnp.asarray(loss_mask).astype(bool)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    if sequences is not None:
        mean = jax.lax.stop_gradient(sequence_mean(log_ratio, mask, sequences))
        log_ratio = mean + log_ratio - jax.lax.stop_gradient(log_ratio)
    log_ratio = jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = jnp.exp(log_ratio)
    advantages = jax.lax.stop_gradient(masked(advantages, mask))

    positive, negative = mask & (advantages > 0), mask & (advantages < 0)
    below, above = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    # The maximum selects the clipped term exactly in these two cases, which also define the statistics.
    loss = jnp.where(positive & above, -advantages * (1.0 + clip_high), -advantages * ratio)
    loss = jnp.where(negative & below, -advantages * (1.0 - clip_low), loss)
    dual = jnp.zeros_like(mask)
    if dual_clip is not None:
        dual = negative & (ratio > dual_clip)
        loss = jnp.where(dual, -advantages * dual_clip, loss)

    stats = _statistics(mask, positive, negative, below, above, log_ratio) | {
        "clipped_dual_negative": jnp.sum(dual, dtype=ratio.dtype)
    }
    return masked(loss, mask), jax.lax.stop_gradient(stats)


def cispo_loss(
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"] | None,
    advantages: Float[Array, "R T"],
    loss_mask: Shaped[Array, "R T"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "R T"], dict[str, Float[Array, ""]]]:
    """CISPO (MiniMax-M1): −sg(clip(ratio, 1 − clip_low, 1 + clip_high))·A·logprobs.

    Every token keeps a gradient.  Arguments and results as in `policy_loss`; the four ``clipped`` and
    ``outside`` sums count tokens whose weight is cut.  A clip_low of 1 or more never cuts.
    """
    mask = jnp.asarray(loss_mask).astype(bool)
    log_ratio = jax.lax.stop_gradient(_log_ratio(logprobs, old_logprobs, mask))
    log_ratio = jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = jnp.exp(log_ratio)
    advantages = jax.lax.stop_gradient(masked(advantages, mask))
    loss = -jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages * masked(logprobs, mask)
    positive, negative = mask & (advantages > 0), mask & (advantages < 0)
    stats = _statistics(mask, positive, negative, ratio < 1.0 - clip_low, ratio > 1.0 + clip_high, log_ratio)
    return masked(loss, mask), jax.lax.stop_gradient(
        stats | {"clipped_dual_negative": jnp.zeros((), ratio.dtype)}
    )


def _log_ratio(logprobs: jax.Array, old_logprobs: jax.Array | None, mask: jax.Array) -> jax.Array:
    """logprobs − old_logprobs, 0 where masked, not yet clamped; the gradient is that of logprobs."""
    now = masked(logprobs, mask)
    return now - jax.lax.stop_gradient(now if old_logprobs is None else masked(old_logprobs, mask))


def _statistics(
    mask: jax.Array,
    positive: jax.Array,
    negative: jax.Array,
    below: jax.Array,
    above: jax.Array,
    log_ratio: jax.Array,
) -> dict[str, jax.Array]:
    counts = {
        "tokens": mask,
        "positive_tokens": positive,
        "negative_tokens": negative,
        "clipped_high_positive": positive & above,
        "clipped_low_negative": negative & below,
        "outside_low_positive": positive & below,
        "outside_high_negative": negative & above,
    }
    stats = {name: jnp.sum(where, dtype=log_ratio.dtype) for name, where in counts.items()}
    stats["ratio_sum"] = masked_sum(jnp.exp(log_ratio), mask)
    stats["old_kl_sum"] = masked_sum(jnp.expm1(log_ratio) - log_ratio, mask)
    return stats


def sequence_mean(
    values: Float[Array, "R T"], loss_mask: Shaped[Array, "R T"], sequences: Sequences
) -> Float[Array, "R T"]:
    """The mean over the trained tokens of each token's sequence; 0 in a sequence without any."""
    rows, tokens = values.shape
    segment = (sequences.segment_ids + (tokens + 1) * jnp.arange(rows, dtype=jnp.int32)[:, None]).reshape(-1)
    weighted = masked(values, loss_mask) * masked(sequences.inverse_length, loss_mask)
    sums = jax.ops.segment_sum(weighted.reshape(-1), segment, num_segments=rows * (tokens + 1))
    return sums[segment].reshape(rows, tokens)


def kl_penalty(
    logprobs: Float[Array, "*S"],
    ref_logprobs: Float[Array, "*S"],
    loss_mask: Shaped[Array, "*S"],
    *,
    estimator: KLEstimator,
) -> Float[Array, "*S"]:
    """An estimate of KL(policy ‖ reference) at each token, from tokens that the policy sampled.

    Value and gradient differ.  All three estimators have the KL as their mean (k2 approximately, k3 with less
    variance than k1).  As a term of the loss, their mean gradients over tokens of the present policy are:

        k1   E[∇logprobs] = 0: the term only adds noise
        k2   E[d·∇logprobs] = ∇ KL(policy ‖ reference): the reverse KL's own gradient
        k3   E[(1 − e^(−d))·∇logprobs] = ∇ KL(reference ‖ policy): the forward KL's gradient, close to k2's
             for small d

    In k3, d is clamped to ±20 before exp and the value to ±10; beyond either the gradient is zero.

    Args:
        logprobs: receives the gradient.
        ref_logprobs: of the frozen reference.
        loss_mask: bool or 0/1.
        estimator: "k1", "k2" or "k3".

    Returns:
        0 where masked.

    Raises:
        ValueError: another estimator.
    """
    mask = jnp.asarray(loss_mask).astype(bool)
    difference = masked(logprobs, mask) - jax.lax.stop_gradient(masked(ref_logprobs, mask))
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    if estimator == "k3":
        difference = jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return jnp.clip(jnp.expm1(-difference) + difference, -K3_LIMIT, K3_LIMIT)
    raise ValueError(
        f"kl_penalty: unknown estimator: got estimator={estimator!r}, expected one of {get_args(KLEstimator)}"
    )


def aggregate(
    token_values: Float[Array, "R T"],
    loss_mask: Shaped[Array, "R T"],
    inverse_length: Float[Array, "R T"],
    *,
    aggregation: Aggregation,
    denominators: Denominators,
    exposure: Float[Array, "R T"] | None = None,
) -> Float[Array, ""]:
    """The share of these tokens in the loss of the global batch; shares of microbatches add up to the loss.

        token_mean      Σ_t v_t / N_tokens                 every token weighs the same
        sequence_mean   Σ_t v_t / len(sequence of t) / B   every sequence weighs the same
        constant        Σ_t v_t / (B · max_tokens)         independent of lengths

    Args:
        loss_mask: bool or 0/1.
        inverse_length: 1 / number of trained tokens of the token's sequence; read by
          ``sequence_mean`` only.
        aggregation: one of the names above.
        exposure: how often the token's sequence counts; None is once.
        denominators: counts of the global batch, including exposures.  A count of zero (nothing to train)
            counts as one, so that the loss is 0, not NaN.

    Returns:
        In float32 (float64 of float64).

    Raises:
        ValueError: another aggregation.
    """
    mask = jnp.asarray(loss_mask).astype(bool)
    if aggregation == "token_mean":
        weight, denominator = None, denominators.tokens
    elif aggregation == "sequence_mean":
        weight, denominator = inverse_length, denominators.sequences
    elif aggregation == "constant":
        weight, denominator = None, denominators.constant
    else:
        raise ValueError(
            f"aggregate: unknown aggregation: got aggregation={aggregation!r}, expected one of "
            f"{get_args(Aggregation)}"
        )
    values = masked(token_values, mask)
    if weight is not None:
        values = values * masked(weight, mask)
    if exposure is not None:
        values = values * masked(exposure, mask)
    return jnp.sum(values) / jnp.maximum(jnp.asarray(denominator, values.dtype), 1.0)


def masked_sum(values: Float[Array, "*S"], loss_mask: Shaped[Array, "*S"]) -> Float[Array, ""]:
    """Σ of ``values`` over the tokens where ``loss_mask`` is true; masked values may be non-finite."""
    return jnp.sum(masked(values, jnp.asarray(loss_mask).astype(bool)))


def masked(values: Shaped[Array, "*S"], mask: Shaped[Array, "*S"]) -> Float[Array, "*S"]:
    """``values`` in float32 (float64 stays); 0, with gradient 0, where ``mask`` (bool or 0/1) is false."""
    values, mask = jnp.asarray(values), jnp.asarray(mask).astype(bool)
    dtype = values.dtype if values.dtype == jnp.float64 else jnp.float32
    return jnp.where(mask, values.astype(dtype), jnp.zeros((), dtype))
