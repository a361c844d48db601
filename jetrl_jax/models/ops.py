"""The operations between the linear layers, with the rounding points of the mirrored engine.

Every operation takes and returns arrays of `numerics.dtype` and computes in FP32.  Where the engine rounds
to BF16, `round_to` rounds, pinned so that no fusion keeps more bits.  With `numerics.exact` the reduction
runs in float64, so that the rounded result does not depend on tiling, batch size or padding; the gradient is
that of the FP32 form.

    native: y = bf16(bf16(h * rsqrt(mean(h^2) + eps)) * w),   h = x + residual, unrounded
    cuda:   y = bf16(h * rsqrt(mean(h^2) + eps) * w),         h = bf16(x + residual)

Shapes: B rows, T tokens, D width, N query heads, K key/value heads, H head width, S keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.models.config import ModelConfig, RopeScaling
from jetrl_jax.precision.numerics import Numerics
from pallas_kernels.implementations import Choice, on_gpu

TABLE = "table"


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """x rounded to `dtype`, whatever is fused around it; the gradient is that of a cast.

    FP16 and FP32 are plain casts (`compiler_options` keeps them); BF16 is also pinned.
    """
    return _round_to_bfloat16(x.astype(jnp.float32)) if dtype == jnp.bfloat16 else x.astype(dtype)


@jax.custom_jvp
def _round_to_bfloat16(x: jax.Array) -> jax.Array:
    """x rounded to BF16: `reduce_precision` pins the rounding, and the upper half of the bits is the value.

    A cast would round a second time, and on a CPU two roundings in a row make LLVM compute their operand
    several times.
    """
    bits = jax.lax.bitcast_convert_type(jax.lax.reduce_precision(x, 8, 7), jnp.uint32)
    return jax.lax.bitcast_convert_type((bits >> jnp.uint32(16)).astype(jnp.uint16), jnp.bfloat16)


@_round_to_bfloat16.defjvp
def _round_to_bfloat16_jvp(primals: Any, tangents: Any) -> Any:
    return _round_to_bfloat16(*primals), tangents[0].astype(jnp.bfloat16)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_parameter(x: jax.Array, dtype: Any) -> jax.Array:
    """A bias or norm weight rounded to `dtype`, as float32; its gradient is FP32 and not rounded."""
    return round_to(x, dtype).astype(jnp.float32)


@round_parameter.defjvp
def _round_parameter_jvp(dtype: Any, primals: Any, tangents: Any) -> Any:
    return round_parameter(*primals, dtype), tangents[0]


def along_last(vector: jax.Array, rank: int) -> jax.Array:
    """A vector [D] as [1, ..., 1, D] with `rank` axes, as strict rank promotion requires."""
    return vector.reshape((1,) * (rank - 1) + vector.shape)


def shape_independent(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Turns `function(static, dtype, *arrays)` into `f(static, exact, *arrays)`.

    With exact the forward is `function` at float64; its gradient is always that of `function` at float32.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def exact_forward(static: Any, *arrays: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            return function(static, jnp.float64, *arrays)

    def forward(static: Any, *arrays: jax.Array) -> Any:
        return exact_forward(static, *arrays), arrays

    def backward(static: Any, arrays: Any, cotangent: jax.Array) -> Any:
        return jax.vjp(lambda *a: function(static, jnp.float32, *a), *arrays)[1](cotangent)

    exact_forward.defvjp(forward, backward)

    @functools.wraps(function)
    def call(static: Any, exact: bool, *arrays: jax.Array) -> jax.Array:
        return exact_forward(static, *arrays) if exact else function(static, jnp.float32, *arrays)

    return call


@shape_independent
def _normalize(eps: float, dtype: Any, h: jax.Array) -> jax.Array:
    """h * rsqrt(mean(h^2) + eps) over the last axis, float32 in and out."""
    wide = h.astype(dtype)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + jnp.asarray(eps, dtype))).astype(jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
    """RMSNorm of x [..., D] with weight [D]."""
    return _scale(_normalize(eps, numerics.exact, x.astype(jnp.float32)), weight, numerics)


def add_rms_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, eps: float, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """RMSNorm of x + residual, both [..., D]; returns (normed, new residual)."""
    h = x.astype(jnp.float32) + residual.astype(jnp.float32)
    total = round_to(h, numerics.dtype)
    if numerics.engine_variant == "cuda":
        h = total.astype(jnp.float32)
    return _scale(_normalize(eps, numerics.exact, h), weight, numerics), total


def _scale(normed: jax.Array, weight: jax.Array, numerics: Numerics) -> jax.Array:
    if numerics.engine_variant == "native":
        normed = round_to(normed, numerics.dtype).astype(jnp.float32)
    weight = round_parameter(weight, numerics.dtype)
    return round_to(normed * along_last(weight, normed.ndim), numerics.dtype)


@shape_independent
def _silu(_: None, dtype: Any, gate: jax.Array) -> jax.Array:
    # Not jax.nn.sigmoid: XLA's float64 logistic is a scalar tanh on CPU, eight times slower.
    wide = gate.astype(dtype)
    decay = jnp.exp(-jnp.abs(wide))
    return (wide * jnp.where(wide >= 0, jnp.ones_like(decay), decay) / (1 + decay)).astype(jnp.float32)


def silu_implementation(numerics: Numerics, *, elsewhere: bool = False) -> Choice:
    """How SiLU of a gate is found: computed, or looked up among the values of a 16-bit dtype."""
    if not numerics.exact or numerics.compute_dtype == "float32":
        return Choice("xla", "in float32, or of an FP32 gate")
    if elsewhere or on_gpu():
        return Choice("xla", "a GPU computes it while it waits for memory")
    return Choice(TABLE, "a CPU takes eight times as long to compute it in float64")


@functools.cache
def _silu_table(dtype: Any) -> np.ndarray:
    """`_silu` at float64 of every value of a 16-bit dtype by its bits, float32 [65536]."""
    with np.errstate(invalid="ignore"):  # -inf and signalling NaN
        x = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float64)
        decay = np.exp(-np.abs(x))
        silu = (x * np.where(x >= 0, 1.0, decay) / (1 + decay)).astype(np.float32)
    # XLA's CPU programs turn subnormal numbers into zeros
    return np.where(np.abs(silu) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), silu), silu)


@jax.custom_vjp
def _silu_by_table(gate: jax.Array) -> jax.Array:
    """`_silu` of a 16-bit gate at float64, looked up; a CPU takes eight times as long to compute it.

    The same bits for every gate (tests/unit/test_silu_table.py), and the same gradient.
    """
    place = jax.lax.bitcast_convert_type(gate, jnp.uint16).astype(jnp.int32)
    return jnp.asarray(_silu_table(gate.dtype)).at[place].get(mode="promise_in_bounds")


_silu_by_table.defvjp(
    lambda gate: (_silu_by_table(gate), gate),
    lambda gate, cotangent: jax.vjp(lambda g: _silu(None, False, g.astype(jnp.float32)), gate)[1](cotangent),
)


def silu_multiply(gate: jax.Array, up: jax.Array, numerics: Numerics) -> jax.Array:
    """SiLU(gate) * up, rounded after each of the two (the engine's `silu_and_mul`)."""
    if numerics.resolved is not None and numerics.resolved.silu_value.name == TABLE:  # the same bits
        silu = _silu_by_table(gate.astype(numerics.dtype))
    else:
        silu = _silu(None, numerics.exact, gate.astype(jnp.float32))
    silu = round_to(silu, numerics.dtype)
    return round_to(silu.astype(jnp.float32) * up.astype(jnp.float32), numerics.dtype)


def rope_frequencies(head_dim: int, rope_theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """The angular frequencies, float32 [H / 2], with the scaling of `RopeScaling`.

    Computed in float64 and rounded once, since FP32 powers of numpy and other libraries differ between CPUs
    by a unit in the last place.
    """
    frequencies = rope_theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None and scaling.rope_type == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None:
        stretch = _llama3_frequencies if scaling.rope_type == "llama3" else _yarn_frequencies
        frequencies = stretch(frequencies, rope_theta, scaling)
    return frequencies.astype(np.float32)


def _llama3_frequencies(frequencies: np.ndarray, rope_theta: float, scaling: RopeScaling) -> np.ndarray:
    """Llama 3's scaling, by wavelength (Dubey et al. 2024)."""
    original, low_factor, high_factor = (
        scaling.original_max_position_embeddings,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    # `RopeScaling` requires them for llama3
    assert original is not None and low_factor is not None and high_factor is not None
    wavelength = 2 * np.pi / frequencies
    low, high = original / low_factor, original / high_factor
    smooth = (original / wavelength - low_factor) / (high_factor - low_factor)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return np.where(
        wavelength > low, frequencies / scaling.factor, np.where(wavelength < high, frequencies, blended)
    )


def _yarn_frequencies(frequencies: np.ndarray, rope_theta: float, scaling: RopeScaling) -> np.ndarray:
    """YaRN's scaling, by pair of channels (Peng et al. 2023).

    The pair that turns n times within the original length L has the index  H ln(L / 2 pi n) / (2 ln theta).
    """
    original, head_dim = scaling.original_max_position_embeddings, 2 * len(frequencies)
    assert original is not None  # `RopeScaling` requires it for yarn
    first, last = (
        head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope_theta))
        for turns in scaling.betas
    )
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    divided = np.clip((np.arange(len(frequencies)) - first) / (last - first), 0, 1)
    return divided * (frequencies / scaling.factor) + (1 - divided) * frequencies


def rope_table(positions: jax.Array, config: ModelConfig, numerics: Numerics) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) [B, T, H / 2] of int32 positions, in `numerics.dtype`, in which the engine stores them.

    YaRN's factor multiplies them in FP32, before they are rounded.
    """
    frequencies = along_last(
        jnp.asarray(rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)),
        positions.ndim + 1,
    )
    angle = positions[..., None].astype(jnp.float32) * frequencies
    if numerics.exact:
        with jax.enable_x64(True):
            wide = angle.astype(jnp.float64)
            cos, sin = jnp.cos(wide).astype(jnp.float32), jnp.sin(wide).astype(jnp.float32)
    else:
        cos, sin = jnp.cos(angle), jnp.sin(angle)
    if config.rope_scaling is not None and config.rope_scaling.attention_scaling != 1:
        factor = np.float32(config.rope_scaling.attention_scaling)
        cos, sin = cos * factor, sin * factor
    return round_to(cos, numerics.dtype), round_to(sin, numerics.dtype)


def rope(x: jax.Array, table: tuple[jax.Array, jax.Array], numerics: Numerics) -> jax.Array:
    """Rotary embedding of x [B, T, heads, H] in FP32, halves as pairs (the Hugging Face convention)."""
    cos, sin = (part.astype(jnp.float32)[:, :, None, :] for part in table)
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    wide = x.astype(jnp.float32)
    # BF16 products are exact in FP32, so a fused multiply-add changes nothing.
    return round_to(wide * cos + jnp.roll(wide, x.shape[-1] // 2, axis=-1) * sin, numerics.dtype)
