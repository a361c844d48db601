"""Tasks and their verifiers, on the host, free of jax."""
