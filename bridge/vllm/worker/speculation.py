"""Mends vLLM's speculation on a CPU, up to 0.32: a stand-in for a kernel, and a second engine.

Before a rejection sampler accepts drafted tokens, `expand_kernel` writes the temperature of each request
once for each of its drafted tokens.  vLLM's stand-in for the CPU converts its output to int64 and fills the
copy, so the temperatures are whatever the memory held.  Tokens are then drawn from other distributions, and
their log-probabilities are those, or NaN (vllm#55005).  This one fills the output itself.

To put its stand-ins in place, each engine looks through the objects of every module for kernels, and stops at
one of numba's, which `ngram` has imported: it answers every name, `__dict__` too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
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
    with contextlib.suppress(ImportError):  # a release that looks nowhere
        from vllm.triton_utils import dispatcher

        setattr(dispatcher, "vars", attributes)  # noqa: B010 - it has none of its own, for mypy


def attributes(value: Any) -> Mapping[str, Any]:
    """As `vars`, without asking the object itself; empty for one that has none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


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
