"""The operators of a forward pass one by one, to find where two of them part."""
