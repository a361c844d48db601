"""Tasks, verifiers, rewards and tokenizers: everything between text and numbers, on the host, free of jax."""
