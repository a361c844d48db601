"""From prompts to a scored batch of trajectories."""
