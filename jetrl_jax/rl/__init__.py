"""The mathematics of reinforcement learning: advantages, losses, batches, metrics.
Pure functions without state.
"""

LOG_RATIO_LIMIT = 20.0  # of a log ratio, before any exp
