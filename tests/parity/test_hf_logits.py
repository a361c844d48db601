"""The decoder in FP32 against transformers, module by module and whole, on random Qwen3, Qwen2 and Llama 3
models.

Criterion everywhere: the decoder's error against transformers in float64 is at most twice that of
transformers in FP32, in maximum and in mean, over the same elements. Weights reach the decoder through the
checkpoint reader.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge import read_into
from bridge.hf.read import parameters_by_path, read_config
from jetrl_jax.models import ops
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.precision.numerics import Numerics
from tests.parity.hf_reference import (
    CASES,
    errors,
    float64_twin,
    hf_logits,
    ragged_batch,
    random_model,
    save,
    torch,
    true_float64,
)

pytestmark = pytest.mark.compiled_quickly

LENGTHS = [24, 11, 1]
ALLOWED_RATIO = 2.0


@functools.cache
def models(case: str) -> tuple[Any, Any]:
    """(FP32 model, its float64 twin)."""
    model = random_model(case)
    return model, float64_twin(model)


def decoder_of(case: str, *, exact: bool = True, variant: str = "native") -> Decoder:
    """A fresh decoder with the model's weights."""
    with tempfile.TemporaryDirectory() as directory:
        save(models(case)[0], Path(directory))
        numerics = Numerics(compute_dtype="float32", engine_variant=variant, exact=exact)
        decoder = Decoder(read_config(directory), numerics, rngs=nnx.Rngs(0))
        read_into(decoder, directory)
    return decoder


@nnx.jit
def our_logits(decoder: Decoder, tokens: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
    return decoder.logits(decoder(tokens, positions, mask))


def twin_logits(case: str, batch: tuple[np.ndarray, ...]) -> np.ndarray:
    with true_float64():
        return hf_logits(models(case)[1], *batch)


def ratio(got: Any, theirs: Any, reference: Any, valid: np.ndarray | None = None) -> np.ndarray:
    """(max, mean) of our error over transformers' FP32 error."""
    return errors(got, np.asarray(reference), valid) / errors(
        np.asarray(theirs), np.asarray(reference), valid
    )


# ------------------------------------------------------------------------------------------------------------------ whole


WHOLE = [
    (case, exact, side)
    for case in CASES
    if case != "qwen3_yarn"
    for exact in (True, False)
    for side in ("left", "right")
]


@pytest.mark.parametrize(("case", "exact", "side"), [*WHOLE, ("qwen3_yarn", True, "left")])
def test_logits_match_transformers(case, exact, side):
    batch = ragged_batch(LENGTHS, side, 61)
    got = our_logits(decoder_of(case, exact=exact), *batch)
    assert (
        ratio(got, hf_logits(models(case)[0], *batch), twin_logits(case, batch), batch[2]) <= ALLOWED_RATIO
    ).all()


def test_logits_of_the_cuda_variant_match_transformers():
    batch = ragged_batch(LENGTHS, "left", 61)
    got = our_logits(decoder_of("qwen3", variant="cuda"), *batch)
    assert (
        ratio(got, hf_logits(models("qwen3")[0], *batch), twin_logits("qwen3", batch), batch[2])
        <= ALLOWED_RATIO
    ).all()


@pytest.mark.parametrize("case", ["qwen3", "llama3"])
def test_exact_logits_have_the_same_bits_on_either_padding_side(case):
    decoder, bits = decoder_of(case), []
    for side in ("left", "right"):
        batch = ragged_batch(LENGTHS, side, 61)
        bits.append(np.asarray(our_logits(decoder, *batch))[batch[2].astype(bool)])
    np.testing.assert_array_equal(*bits)


# -------------------------------------------------------------------------------------------------------------- mutations


def _swap(a: str, b: str) -> Callable[[dict[str, Any]], None]:
    def mutate(parameters: dict[str, Any]) -> None:
        first, second = parameters[a].get_value(), parameters[b].get_value()
        parameters[a].set_value(second)
        parameters[b].set_value(first)

    return mutate


def _change(path: str, change: Callable[[jax.Array], jax.Array]) -> Callable[[dict[str, Any]], None]:
    return lambda parameters: parameters[path].set_value(change(parameters[path].get_value()))


LAYER = "layers.1."
MUTATIONS = {
    "swap q_norm and k_norm": (
        "qwen3",
        _swap(f"{LAYER}self_attn.q_norm.weight", f"{LAYER}self_attn.k_norm.weight"),
    ),
    "swap k and v": ("qwen3", _swap(f"{LAYER}self_attn.k_proj.weight", f"{LAYER}self_attn.v_proj.weight")),
    "swap gate and up": ("llama3", _swap(f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight")),
    "swap the layer's norms": (
        "qwen2",
        _swap(f"{LAYER}input_layernorm.weight", f"{LAYER}post_attention_layernorm.weight"),
    ),
    "transpose q": ("qwen2", _change(f"{LAYER}self_attn.q_proj.weight", jnp.transpose)),
    "transpose o": ("llama3", _change(f"{LAYER}self_attn.o_proj.weight", jnp.transpose)),
    "drop the final norm": ("llama3", _change("norm.weight", jnp.ones_like)),
    "drop q_norm": ("qwen3", _change(f"{LAYER}self_attn.q_norm.weight", jnp.ones_like)),
    "drop v's bias": ("qwen2", _change(f"{LAYER}self_attn.v_proj.bias", jnp.zeros_like)),
    "drop o's bias": ("llama_bias", _change(f"{LAYER}self_attn.o_proj.bias", jnp.zeros_like)),
    "one weight wrong": ("qwen3", _change(f"{LAYER}mlp.down_proj.weight", lambda w: w.at[0, 0].add(0.01))),
}


# the others in `make test-long`
SEEN_FIRST = ("swap gate and up", "transpose q", "drop q_norm", "one weight wrong")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SEEN_FIRST else pytest.mark.long) for name in MUTATIONS]
)
def test_a_broken_weight_is_seen(name):
    case, mutate = MUTATIONS[name]
    decoder = decoder_of(case)
    mutate(parameters_by_path(decoder))
    batch = ragged_batch(LENGTHS, "left", 61)
    found = ratio(
        our_logits(decoder, *batch), hf_logits(models(case)[0], *batch), twin_logits(case, batch), batch[2]
    )
    assert (found > 10 * ALLOWED_RATIO).all()


@pytest.mark.parametrize("what", ["positions", "segments"])
def test_a_broken_batch_is_seen(what):
    tokens, positions, mask = batch = ragged_batch(LENGTHS, "left", 61)
    reference, theirs = twin_logits("llama3", batch), hf_logits(models("llama3")[0], *batch)
    if what == "positions":
        positions = np.stack([np.random.default_rng(0).permutation(row) for row in positions]).astype(
            np.int32
        )
    segments = np.ones_like(mask) if what == "segments" else mask
    got = our_logits(decoder_of("llama3"), tokens, positions, segments)
    assert (ratio(got, theirs, reference, mask) > 10 * ALLOWED_RATIO).all()


# ---------------------------------------------------------------------------------------------------------------- modules


def _inputs(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _both(case: str, run: Callable[[Any, torch.dtype], torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """run(model, dtype) on the FP32 model and on its twin, as numpy."""
    model, twin = models(case)
    with torch.no_grad():
        single = run(model, torch.float32).numpy()
        with true_float64():
            return single, run(twin, torch.float64).numpy()


def _visible(mask: np.ndarray) -> np.ndarray:
    """bool [B, T, T]: same row, both real tokens, causal."""
    length = mask.shape[1]
    return np.tril(np.ones((length, length), bool)) & (mask[:, :, None] > 0) & (mask[:, None, :] > 0)


def _additive(visible: np.ndarray, dtype: Any) -> Any:
    zero, lowest = torch.zeros((), dtype=dtype), torch.tensor(torch.finfo(dtype).min, dtype=dtype)
    return torch.where(torch.from_numpy(visible)[:, None], zero, lowest)


def _check(got: jax.Array, pair: tuple[np.ndarray, np.ndarray], valid: np.ndarray | None = None) -> None:
    assert (ratio(np.asarray(got), *pair, valid) <= ALLOWED_RATIO).all()


modules = pytest.mark.parametrize("case", ["qwen3", "qwen2", "llama3"])
modules_twice = pytest.mark.parametrize(
    ("case", "exact"),
    [("qwen3", True), ("qwen3", False), ("qwen2", False), ("llama3", True)],
    ids=["qwen3-exact", "qwen3-fast", "qwen2-fast", "llama3-exact"],
)


@modules
def test_embedding_equals_transformers(case):
    tokens = ragged_batch(LENGTHS, "left", 61)[0]
    single, double = _both(case, lambda m, _: m.model.embed_tokens(torch.from_numpy(tokens.astype(np.int64))))
    got = np.asarray(decoder_of(case).embed_tokens.weight.get_value())[tokens]
    np.testing.assert_array_equal(got, single)
    np.testing.assert_array_equal(got, double)


@modules_twice
def test_rms_norm_matches_transformers(case, exact):
    decoder, x = decoder_of(case, exact=exact), 3 * _inputs(2, 40, 64)
    x[0, 0] = 1e-4 * x[0, 0]  # epsilon matters here
    got = jax.jit(ops.rms_norm, static_argnums=(2, 3))(
        x, decoder.norm.weight.get_value(), decoder.config.rms_norm_eps, decoder.numerics
    )
    _check(got, _both(case, lambda m, dtype: m.model.norm(torch.from_numpy(x).to(dtype))))


@pytest.mark.parametrize(
    ("case", "exact"),
    [
        ("qwen3", True),
        ("qwen3", False),
        ("qwen3_yarn", True),
        ("qwen3_yarn", False),
        ("llama3", True),
        ("llama_bias", True),
    ],
)
def test_rope_matches_transformers(case, exact):
    decoder, x = (
        decoder_of(case, exact=exact),
        _inputs(2, 50, 4, models(case)[0].model.layers[0].self_attn.head_dim),
    )
    positions = np.random.default_rng(2).integers(0, 256, (2, 50)).astype(np.int32)
    table = jax.jit(ops.rope_table, static_argnums=(1, 2))(positions, decoder.config, decoder.numerics)
    got = jax.jit(ops.rope, static_argnums=2)(x, table, decoder.numerics)

    def run(model: Any, dtype: Any) -> Any:
        heads = torch.from_numpy(x).to(dtype).transpose(1, 2)
        cos, sin = model.model.rotary_emb(heads, torch.from_numpy(positions.astype(np.int64)))
        return (
            sys.modules[type(model).__module__]
            .apply_rotary_pos_emb(heads, heads, cos, sin)[0]
            .transpose(1, 2)
        )

    _check(got, _both(case, run))


@pytest.mark.parametrize("module", ["attention", "layer"])
@modules_twice
def test_attention_and_layer_match_transformers(case, exact, module):
    decoder, x = decoder_of(case, exact=exact), _inputs(3, 24, 64)
    _, positions, mask = ragged_batch(LENGTHS, "left", 61)
    visible = _visible(mask)

    @nnx.jit
    def ours(decoder: Decoder, x: jax.Array, positions: jax.Array, visible: jax.Array) -> jax.Array:
        table, layer = ops.rope_table(positions, decoder.config, decoder.numerics), decoder.layers[1]
        if module == "attention":
            return layer.self_attn(x, table, visible)[0]
        branch, residual, _ = layer(x, None, table, visible)
        return branch + residual

    def run(model: Any, dtype: Any) -> Any:
        hidden = torch.from_numpy(x).to(dtype)
        places = model.model.rotary_emb(hidden, torch.from_numpy(positions.astype(np.int64)))
        arguments = {
            "hidden_states": hidden,
            "position_embeddings": places,
            "attention_mask": _additive(visible, dtype),
        }
        part = model.model.layers[1].self_attn if module == "attention" else model.model.layers[1]
        out = part(**arguments)
        return out[0] if isinstance(out, tuple) else out

    _check(ours(decoder, x, positions, visible), _both(case, run), mask)


@modules_twice
def test_mlp_matches_transformers(case, exact):
    x = _inputs(2, 40, 64)
    got = nnx.jit(lambda decoder, x: decoder.layers[0].mlp(x))(decoder_of(case, exact=exact), x)
    _check(got, _both(case, lambda m, dtype: m.model.layers[0].mlp(torch.from_numpy(x).to(dtype))))


@modules
def test_head_matches_transformers(case):
    x = _inputs(2, 40, 64)
    got = nnx.jit(lambda decoder, x: decoder.logits(x))(decoder_of(case), x)
    _check(got, _both(case, lambda m, dtype: m.lm_head(torch.from_numpy(x).to(dtype))))
