"""Reward functions and the scoring of trajectories."""
