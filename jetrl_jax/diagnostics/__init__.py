"""Runs a forward pass operator by operator, to find where two forward passes diverge."""
