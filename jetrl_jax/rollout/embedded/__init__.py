"""The rollout engine on the trainer's own model and devices."""
