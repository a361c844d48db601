"""Mends vLLM's speculation on a CPU, up to 0.32 (vllm#55005).

Before a rejection sampler accepts drafted tokens, `expand_kernel` writes the temperature of each request
once for each of its drafted tokens.  vLLM's stand-in for the CPU converts its output to int64 and fills the
copy, so the temperatures are whatever the memory held.  Tokens are then drawn from other distributions, and
their log-probabilities are those, or NaN.  This one fills the output itself.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform


def mend() -> None:
    """Replaces the stand-in, if this is vLLM's CPU platform and it has one; later calls do nothing."""
    if not current_platform.is_cpu():
        return
    try:
        from vllm.utils import cpu_triton_utils
    except ImportError:  # a release before the stand-ins
        return
    cpu_triton_utils._expand_kernel_impl = expand


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: Any,
    replace_to: Any,
    MAX_NUM_TOKENS: Any = None,  # vLLM's name
) -> None:
    """Writes the value [R] of each request into its places of output [cu_num_tokens[-1]].

    cu_num_tokens: the end of each request's places; a value `replace_from` is written as `replace_to`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
    whole = torch.repeat_interleave(values, counts)
    output[: len(whole)] = whole
