"""Batch-invariant causal attention: `api` for use, `reference` for the definition, `mosaic` for Hopper."""

from pallas_kernels.attention.api import cached_attention, causal_attention, operand_problem, segment_blocks

__all__ = ["cached_attention", "causal_attention", "operand_problem", "segment_blocks"]
