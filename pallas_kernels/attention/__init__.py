"""Batch-invariant causal attention: functions in `api`, definition in `reference`, kernels in `mosaic`."""

from pallas_kernels.attention.api import cached_attention, causal_attention, operand_problem, segment_blocks

__all__ = ["cached_attention", "causal_attention", "operand_problem", "segment_blocks"]
