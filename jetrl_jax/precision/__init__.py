"""Which format each product of each weight has, and where a forward pass rounds."""
