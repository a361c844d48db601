"""The record of a run: its directory, checkpoints, metrics and console, and the rules for resuming it."""
