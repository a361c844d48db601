"""The mathematics of reinforcement learning: advantages, losses, batches, metrics.  Pure functions without state."""
