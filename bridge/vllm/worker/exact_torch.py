"""The trainer's `numerics.exact` operations for torch tensors on any device.

Reductions are in float64 and rounded where `jetrl_jax.models.ops` rounds.  float64 has some 29 bits more than
FP32, so the rounded result does not depend on the order of a sum, the device or the batch, except for sums
within 1e-16 of a tie.  This module does not import vLLM; the classes in `bridge.vllm.worker.exact` call it.
It is slow, and meant for checks and for CPUs.

Shapes: T tokens of all requests, R requests, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pallas_kernels.formats import E4M3_MAX

ELEMENTS_AT_ONCE = 1 << 23  # largest size of a float64 temporary


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    engine_variant: str,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """RMSNorm of x (+ residual) [..., D]; returns (normed, rounded sum) in x's dtype.

    As `ops.rms_norm` and `ops.add_rms_norm`.  engine_variant: "native" norms the unrounded sum, and rounds
    once more before the weight; "cuda" norms the rounded sum, without that rounding.
    """
    add = () if residual is None else (residual,)
    return _in_parts(
        lambda *part: _rms_norm(*part, weight=weight, eps=eps, engine_variant=engine_variant), x, *add
    )


def _rms_norm(
    x: torch.Tensor, *residual: torch.Tensor, weight: torch.Tensor, eps: float, engine_variant: str
) -> tuple[torch.Tensor, ...]:
    h = sum((part.float() for part in residual), x.float())
    total = h.to(x.dtype)
    wide = (total if engine_variant == "cuda" else h).double()
    normed = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).float()
    if engine_variant == "native":
        normed = normed.to(x.dtype).float()
    return (normed * weight.float()).to(x.dtype), total


def rope_table(frequencies: torch.Tensor, positions: int, factor: float = 1.0) -> torch.Tensor:
    """cos and sin side by side, float32 [positions, 2 F], of FP32 angles with frequencies float32 [F].

    The table is computed on the CPU.  factor: YaRN's factor, which multiplies it in FP32.
    """
    place = torch.arange(positions, dtype=torch.float32, device="cpu")
    angles = (place[:, None] * frequencies.cpu()[None]).double()
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float() * torch.tensor(factor, dtype=torch.float32)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of x [T, N, H] with halves as pairs, cos and sin [T, H / 2] in x's dtype, as `ops.rope`.

    Computed in FP32 with one rounding.  Products of two BF16 numbers are exact in FP32, so a fused
    multiply-add changes nothing.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up of [..., 2 F] (gate, then up), each rounded, as `ops.silu_multiply`."""
    return _in_parts(_silu_multiply, gate_up)[0]


def _silu_multiply(gate_up: torch.Tensor) -> tuple[torch.Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.double()
    decay = torch.exp(-wide.abs())
    silu = (wide * torch.where(wide >= 0, 1.0, decay) / (1 + decay)).float().to(gate_up.dtype)
    return ((silu.float() * up.float()).to(gate_up.dtype),)


def _in_parts(
    function: Callable[..., tuple[torch.Tensor, ...]], *arrays: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Applies `function` to arrays of equal shape [T, ...] in parts, to keep float64 temporaries small."""
    rows = max(1, ELEMENTS_AT_ONCE // arrays[0].shape[1:].numel())
    parts = [function(*part) for part in zip(*(array.split(rows) for array in arrays), strict=True)]
    return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] . weight[N, K]^T + bias [N] in FP32, as `models.dense.dense` with `dense` "float64".

    Products and sums are in float64 and rounded to FP32; then the bias is added.
    """
    wide = x.double()
    rows = weight.split(max(1, ELEMENTS_AT_ONCE // weight.shape[1]))
    out = torch.cat([(wide @ part.double().t()).float() for part in rows], dim=-1)
    return out if bias is None else out + bias.float()


def adapted(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """y + x A^T B^T in y's dtype, rounded as `models.lora` rounds; A [r, K], and B [N, r] times its scale."""
    added = linear(linear(x, a).to(y.dtype), b).to(y.dtype)
    return (y.float() + added.float()).to(y.dtype)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of FP32 logits [R, V] with a float64 normaliser, as `vocabulary.token_logprobs`."""
    return _in_parts(_log_softmax, logits.float())[0]


def _log_softmax(logits: torch.Tensor) -> tuple[torch.Tensor]:
    wide = logits.double()
    top = wide.amax(-1, keepdim=True)
    normalizer = torch.log(torch.exp(wide - top).sum(-1, keepdim=True)) + top
    return (logits - normalizer.float(),)


def key_value_cache(cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values) [blocks, block size, K, H], views of one layer's paged cache in plain order.

    vLLM 0.24 and 0.25 store [blocks, 2, block size, K, H]; later versions and the CPU backend store
    [blocks, K, block size, 2 H].

    Raises:
      NotImplementedError: the cache has another layout.
    """
    if cache.dim() == 5 and cache.shape[1] == 2 and cache.shape[-1] == head_size:
        keys, values = cache.unbind(1)
    elif cache.dim() == 4 and cache.shape[-1] == 2 * head_size:
        keys, values = cache.transpose(1, 2).split(head_size, dim=-1)
    else:
        expected = f"[blocks, 2, size, K, {head_size}] or [blocks, K, size, {2 * head_size}]"
        raise NotImplementedError(
            f"exact attention: unknown layout of the KV cache: got {list(cache.shape)}, expected {expected}."
        )
    return keys, values


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Causal attention of the last tokens of each request to all its tokens in a paged cache; fills `output`.

    Args:
      query: [T, N, H], the new tokens of all requests, one request after the other.
      keys, values: [blocks, block size, K, H].
      table: [R, ...], the blocks of a request in order; entries past its length may hold anything.
      starts: [R + 1], first row in `query` of each request; a request without new tokens is skipped.
      lengths: [R], tokens of each request in the cache, including the new ones.
      scale: multiplies the queries in FP32.
      output: [T, N * H] or [T, N, H]; rows that belong to no request are not changed.
      scales: of keys and of values, if the cache has E4M3 codes; float32 scalars.
    """
    new = starts[1:] - starts[:-1]
    table, starts, new, lengths = (part[new > 0].long() for part in (table, starts[:-1], new, lengths))
    if len(new) == 0:
        return
    longest, most = int(lengths.max()), int(new.max())
    width = max(2 * keys.shape[2] * keys.shape[3], query.shape[1])
    requests = max(1, ELEMENTS_AT_ONCE // (longest * width))
    queries = max(1, ELEMENTS_AT_ONCE // (longest * query.shape[1] * min(requests, len(new))))
    flat = output.view(output.shape[0], -1)
    for first in range(0, len(new), requests):
        part = slice(first, first + requests)
        k, v = (
            _gathered(side, table[part], lengths[part], of_side)
            for side, of_side in zip((keys, values), scales or (None, None), strict=True)
        )
        for begin in range(0, most, queries):
            offset = torch.arange(begin, min(begin + queries, most), device=query.device)
            _attend(query, k, v, starts[part], new[part], lengths[part], offset, scale, flat)


def to_codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The bytes of E4M3 codes of x / scale, clipped, as `jetrl_jax.precision.kv_cache.to_codes`."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _gathered(
    side: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """Keys or values of some requests, float64 [R, K, S, H]; zeros past a request's length."""
    blocks, size, heads, width = side.shape
    used = -(-int(lengths.max()) // size)
    gathered = (
        side[table[:, :used].clamp(0, blocks - 1)]
        .reshape(len(table), used * size, heads, width)
        .permute(0, 2, 1, 3)
    )
    if scale is not None:
        gathered = gathered.contiguous().view(torch.float8_e4m3fn).float() * scale
    gathered = gathered.double()
    stale = torch.arange(used * size, device=side.device) >= lengths[:, None]
    return gathered.masked_fill(stale[:, None, :, None], 0.0)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,  # float64 [R, K, S, H]
    values: torch.Tensor,
    starts: torch.Tensor,  # [R], first token in `query`
    new: torch.Tensor,  # [R], tokens in `query`
    lengths: torch.Tensor,  # [R], tokens in the cache
    offset: torch.Tensor,  # [Q], indices of new tokens
    scale: float,
    output: torch.Tensor,  # [T, N * H], filled
) -> None:
    kept = offset < new[:, None]
    token = torch.where(kept, starts[:, None] + offset, 0)  # [R, Q]
    queries = (query[token].float() * torch.tensor(scale, dtype=torch.float32, device=query.device)).double()
    (R, K, S, H) = keys.shape
    Q = len(offset)
    queries = queries.view(R, Q, K, -1, H).permute(0, 2, 3, 1, 4).reshape(R, K, -1, H)  # [R, K, G * Q, H]
    last = (lengths - new)[:, None] + offset
    hidden = torch.arange(S, device=query.device) > last[..., None]  # [R, Q, S]
    scores = (queries @ keys.transpose(-1, -2)).view(R, K, -1, Q, S).masked_fill(hidden[:, None, None], -1e30)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)).view(R, K, -1, S)
    attended = ((weights @ values) / weights.sum(-1, keepdim=True)).view(R, K, -1, Q, H)
    attended = attended.permute(0, 3, 1, 2, 4).reshape(R, Q, -1).float().to(output.dtype)
    output[token[kept]] = attended[kept]
