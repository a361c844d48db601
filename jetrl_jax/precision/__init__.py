"""Which format each matrix product of each weight uses, and where a forward pass rounds."""
