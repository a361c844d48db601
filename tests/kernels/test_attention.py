"""Batch-invariant attention: one body for every implementation, against float64 and, bit for bit, against itself."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import cached_attention, causal_attention, segment_blocks
from tests.kernels.runnable import runnable
from tests.oracles import attention_oracle, tolerances

pytestmark = pytest.mark.usefixtures("operations_one_by_one")

EVERY = runnable("xla", "mosaic_interpret", "mosaic_gpu")
LENGTHS = ((270, 20), (1, 128, 140))  # of the segments of two rows; one has three blocks
TOKENS = 408
LONG = [pytest.mark.long, pytest.mark.newest]
RUBBISH = 100.0
ROUNDOFF = {"bfloat16": tolerances.U_BF16, "float16": tolerances.U_FP16}


@dataclasses.dataclass(frozen=True)
class Packed:
    """Packed rows: q, k, v, the segments' (row, first token, length), and the ids [B, T]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    segments: tuple[tuple[int, int, int], ...]
    ids: np.ndarray

    def tokens(self) -> list[tuple[int, int, int]]:
        """(row, first token of the segment, position) of every token."""
        return [(row, start, place) for row, start, size in self.segments for place in range(size)]


@functools.cache
def packed(width: int = 64, heads: int = 2, kv_heads: int = 1, dtype: str = "bfloat16") -> Packed:
    """Segments that begin at multiples of 128, with rubbish for padding."""
    rng = np.random.default_rng(width + heads)
    segments, ids = [], np.zeros((len(LENGTHS), TOKENS), np.int32)
    for row, sizes in enumerate(LENGTHS):
        start = 0
        for number, size in enumerate(sizes):
            segments.append((row, start, size))
            ids[row, start : start + size] = number + 1
            start += -(-size // 128) * 128
    q, k, v = (rng.normal(size=(*ids.shape, h, width)) * 1.5 for h in (heads, kv_heads, kv_heads))
    for x in (q, k, v):
        x[ids == 0] = RUBBISH
    return Packed(*(jnp.asarray(x, dtype) for x in (q, k, v)), tuple(segments), ids)


def whole(given: Packed, implementation: str) -> np.ndarray:
    """Attention of the packed rows as float64."""
    first = segment_blocks(jnp.asarray(given.ids))
    out = causal_attention(given.q, given.k, given.v, first, implementation=implementation)
    return np.asarray(out, np.float64)


@functools.cache
def trained(implementation: str) -> np.ndarray:
    """Of `packed()`."""
    return whole(packed(), implementation)


def decoded(
    given: Packed, tokens: list[tuple[int, int, int]], length: int, implementation: str
) -> np.ndarray:
    """Attention [tokens, N, H] of tokens of `Packed.tokens`, each against a cache with rubbish behind it."""
    q, k, v = (np.asarray(x, np.float64) for x in (given.q, given.k, given.v))
    keys, values = (np.full((len(tokens), k.shape[2], length, k.shape[3]), RUBBISH) for _ in range(2))
    for index, (row, start, place) in enumerate(tokens):
        for cache, x in ((keys, k), (values, v)):
            cache[index, :, : place + 1] = np.moveaxis(x[row, start : start + place + 1], 0, 1)
    queries = np.stack([q[row, start + place] for row, start, place in tokens])[:, None]
    positions = jnp.asarray([place for _, _, place in tokens], jnp.int32)[:, None]
    arrays = (jnp.asarray(x, given.q.dtype) for x in (queries, keys, values))
    return np.asarray(cached_attention(*arrays, positions, implementation=implementation), np.float64)[:, 0]


def assert_same_bits(tokens: list[tuple[int, int, int]], length: int, implementation: str) -> None:
    """In a cache of this length as in `trained`."""
    places = tuple(np.array([(row, start + place) for row, start, place in tokens]).T)
    wrong = decoded(packed(), tokens, length, implementation) != trained(implementation)[places]
    assert not wrong.any(), [token for token, one in zip(tokens, wrong, strict=True) if one.any()]


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "dtype"),
    [(64, 4, 2, "bfloat16"), pytest.param(128, 3, 3, "float16", marks=LONG)],
)
def test_packed_rows_match_float64(
    width: int, heads: int, kv_heads: int, dtype: str, implementation: str
) -> None:
    """In value and gradient; padding is finite and has no part in any gradient."""
    given = packed(width, heads, kv_heads, dtype)
    used, place = given.ids > 0, np.arange(TOKENS)
    visible = (given.ids[:, :, None] == given.ids[:, None, :]) & (place <= place[:, None])
    cotangent = np.random.default_rng(1).normal(size=given.q.shape) * used[..., None, None]
    arrays = [
        np.where(used[..., None, None], np.asarray(x, np.float64), 0) for x in (given.q, given.k, given.v)
    ]
    arrays.append(np.asarray(jnp.asarray(cotangent, dtype), np.float64))
    exact = attention_oracle.attention(*arrays[:3], visible, arrays[3])
    relative = tolerances.attention(270, width, exact.spread, ROUNDOFF[dtype])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return causal_attention(
            q, k, v, segment_blocks(jnp.asarray(given.ids)), implementation=implementation
        )

    out, pullback = jax.vjp(attend, given.q, given.k, given.v)
    found = out, *pullback(jnp.asarray(cotangent, dtype))
    for name, value, magnitude, got in zip(
        "out dq dk dv".split(), exact.values, exact.magnitudes, found, strict=True
    ):
        bound = tolerances.output_rounding(value, relative * magnitude, ROUNDOFF[dtype]) + 2.0**-25
        error = np.abs(np.asarray(got, np.float64) - value)
        assert np.isfinite(np.asarray(got, np.float64)).all()
        assert (error <= bound)[used].all(), f"{name}: {(error / bound)[used].max()} times the bound"
        assert np.linalg.norm(error[used]) <= 2 * ROUNDOFF[dtype] * np.linalg.norm(value[used]), name
        if name != "out":
            np.testing.assert_array_equal(np.asarray(got, np.float64)[~used], 0)


@pytest.mark.parametrize("implementation", EVERY)
def test_decode_has_the_bits_of_training(implementation: str) -> None:
    """Ragged segments, rubbish behind the cache, a query head of its own place in the tile."""
    edges = [token for token in packed().tokens() if token[2] in (0, 63, 64, 127, 128, 256, 269)]
    assert_same_bits(edges, 272, implementation)


@pytest.mark.newest
@pytest.mark.long
@pytest.mark.parametrize("implementation", EVERY)
def test_decode_has_the_bits_of_training_at_every_position(implementation: str) -> None:
    """Of the segment of three blocks; ends of the others: above."""
    row, start, size = packed().segments[0]
    assert_same_bits([(row, start, place) for place in range(size)], 280, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_a_row_depends_on_its_own_keys_only(implementation: str) -> None:
    """Other tokens behind it and beside it, another batch, another length of the row and of the cache: the same bits."""
    given, out = packed(), trained(implementation)
    arrays = given.q, given.k, given.v
    alone = causal_attention(*(x[1:, 128:256] for x in arrays), implementation=implementation)
    np.testing.assert_array_equal(np.asarray(alone, np.float64)[0], out[1, 128:256])
    later = [jnp.where(np.arange(130)[None, :, None, None] >= 100, -x[:1, :130], x[:1, :130]) for x in arrays]
    changed = np.asarray(causal_attention(*later, implementation=implementation), np.float64)[0]
    np.testing.assert_array_equal(changed[:100], out[0, :100])
    assert (changed[100:] != out[0, 100:130]).any()
    token = (0, 0, 129)
    longer = decoded(given, [(1, 0, 0), token], 264, implementation)
    np.testing.assert_array_equal(decoded(given, [token], 136, implementation)[0], longer[1])


@pytest.mark.parametrize(("width", "dtype"), [(64, "bfloat16"), pytest.param(128, "float16", marks=LONG)])
@pytest.mark.parametrize("implementation", EVERY)
def test_a_cache_of_codes_gives_the_bits_of_their_values(implementation: str, width: int, dtype: str) -> None:
    """Scales of keys and values differ, and each changes the result."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 1, 4, width)), dtype)
    codes = [jnp.asarray(rng.normal(size=(2, 2, 136, width)) * 60, jnp.float8_e4m3fn) for _ in range(2)]
    scales, positions = jnp.asarray([2.0**-6, 2.0**-4], jnp.float32), jnp.asarray([[130], [37]], jnp.int32)

    def attended(scales: jax.Array | None, *cache: jax.Array) -> np.ndarray:
        out = cached_attention(q, *cache, positions, scales, implementation=implementation)
        return np.asarray(out, np.float64)

    values = [(x.astype(jnp.float32) * scale).astype(dtype) for x, scale in zip(codes, scales, strict=True)]
    expected = attended(None, *values)
    assert np.isfinite(expected).all() and expected.std() > 0.1
    np.testing.assert_array_equal(attended(scales, *codes), expected)
    for other in ([2.0**-5, 2.0**-4], [2.0**-6, 2.0**-5]):
        assert (attended(jnp.asarray(other, jnp.float32), *codes) != expected).any()
    with pytest.raises(
        ValueError, match="expected bfloat16 or float16, and float8_e4m3fn of keys and values"
    ):
        attended(scales, *values)
    with pytest.raises(ValueError, match=r"wrong scales: got scales float32\[1\], expected float32 \[2\]"):
        attended(scales[:1], *codes)


@pytest.mark.parametrize("implementation", EVERY)
def test_several_new_tokens_of_a_row_are_those_tokens_one_by_one(implementation: str) -> None:
    given = packed()
    keys, values = (jnp.moveaxis(x[:1, :136], 1, 2) for x in (given.k, given.v))
    positions = jnp.asarray([[126, 127, 128]], jnp.int32)
    out = cached_attention(given.q[:1, 126:129], keys, values, positions, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(out, np.float64)[0], trained(implementation)[0, 126:129])


@pytest.mark.parametrize("implementation", EVERY)
def test_a_segment_that_begins_within_a_block_is_nan_and_the_others_are_not(implementation: str) -> None:
    given = packed()
    ids = given.ids.copy()
    ids[0, 404:] = 7  # behind the second segment, within its block
    out = whole(dataclasses.replace(given, ids=ids), implementation)
    wrong = np.zeros(out.shape[:2], bool)
    wrong[0, 384:] = True
    assert np.isnan(out[wrong]).all()
    np.testing.assert_array_equal(out[~wrong], trained(implementation)[~wrong])


def test_segment_blocks_of_aligned_and_other_segments() -> None:
    def blocks(*runs: tuple[int, int]) -> list[int]:
        ids = np.concatenate([np.full(count, segment, np.int32) for segment, count in runs])
        return np.asarray(segment_blocks(jnp.asarray(ids)[None]))[0].tolist()

    assert blocks((1, 300), (0, 84), (2, 128), (3, 1), (0, 200)) == [0, 0, 0, 3, 4, 5]
    assert blocks((0, 256), (4, 100)) == [0, 1, 2]
    wrong = 3
    assert blocks((1, 100), (2, 200)) == [wrong, wrong, wrong]
    assert blocks((0, 5), (1, 251), (2, 128)) == [wrong, wrong, 2]
    assert blocks((1, 100), (0, 28), (1, 128), (0, 1)) == [0, wrong, 2]  # a gap
    assert blocks((1, 10), (0, 1), (1, 200), (0, 100)) == [wrong, 0, 2]


def test_wrong_operands_are_refused_with_everything_that_is_wrong() -> None:
    q, k = jnp.zeros((2, 8, 4, 64), jnp.bfloat16), jnp.zeros((2, 8, 2, 64), jnp.bfloat16)
    message = (
        "causal_attention: shapes do not fit: got v.shape=(2, 9, 2, 64), expected [2, 8, 2, 64]; wrong dtypes: "
        "got {'q': 'bfloat16', 'k': 'bfloat16', 'v': 'float32'}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_attention(q, k, jnp.zeros((2, 9, 2, 64), jnp.float32))
    with pytest.raises(ValueError, match=r"heads do not fit: got N=4, expected a multiple of K=3"):
        causal_attention(q, k[:, :, [0, 0, 1]], k[:, :, [0, 0, 1]])
    with pytest.raises(
        ValueError, match=r"wrong blocks: got first_blocks int32\[2, 2\], expected int32 \[2, 1\]"
    ):
        causal_attention(q, k, k, jnp.zeros((2, 2), jnp.int32))
    with pytest.raises(
        ValueError,
        match=r"unknown name: .*; wrong positions: got positions int32\[2, 1\], expected int32 \[2, 8\]",
    ):
        cached_attention(
            q, *[jnp.moveaxis(k, 1, 2)] * 2, jnp.zeros((2, 1), jnp.int32), implementation="triton"
        )
    with pytest.raises(
        NotImplementedError, match=r"causal_attention: cannot run: .*head_dim is 32, expected one of"
    ):
        causal_attention(q[..., :32], k[..., :32], k[..., :32], implementation="mosaic_gpu")
