"""The mathematics of reinforcement learning as pure functions: advantages, losses, batches, metrics."""

LOG_RATIO_LIMIT = 20.0  # log ratios are clamped to this before any exp
