"""The embedded rollout engine, which uses the trainer's own model and devices."""
