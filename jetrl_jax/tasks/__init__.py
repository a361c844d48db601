"""Tasks (training and held-out examples) and their verifiers, on the host, without jax."""
