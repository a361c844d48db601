"""Attention by cuDNN: its formulation against float64 on a CPU, its lowering for CUDA without one, and what
is chosen where.

cuDNN itself runs in the tests marked `gpu` alone.  On a CPU the same calls of `jax.nn.dot_product_attention`
run as XLA, which shows that mask, scale, grouped heads, layouts and padding are the right ones, and says
nothing of cuDNN.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetrl_jax.commands.plan import planned_model
from jetrl_jax.config.devices import ShardingSection
from jetrl_jax.config.load import load_config
from jetrl_jax.devices.layout import ROWS, Layout
from jetrl_jax.errors import UserError
from jetrl_jax.models import attention
from jetrl_jax.models import flash_attention as flash
from jetrl_jax.models.cache import empty_cache
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.logprobs import completion_logprobs
from jetrl_jax.planning import abstract_run
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.precision.plan import PrecisionPlan
from pallas_kernels.quantize.fused import KERNEL_WIDTHS
from tests.kernels.test_implementations import pretend
from tests.oracles import attention_oracle, tolerances
from tests.parity.small_policy import CONFIG, resolved

B, N, K, H = 2, 6, 2, 16
FAST = Numerics(exact=False)
CUDNN = dataclasses.replace(FAST, attention="cudnn", stored_dtype="bfloat16")
NO_GPU = flash._device_problem(jnp.dtype("bfloat16"), H)


@pytest.fixture
def as_xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The calls of `flash_attention` as XLA: cuDNN's own arguments, another implementation."""
    call = jax.nn.dot_product_attention

    def on_cpu(*arrays: Any, implementation: str, **options: Any) -> jax.Array:
        assert implementation == "cudnn"
        return call(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_cpu)
    with jax.numpy_dtype_promotion("standard"):  # which JAX's XLA form relies on in BF16
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering for CUDA where there is neither GPU nor cuDNN: the version is all that JAX asks cuDNN for."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(flash, "_device_problem", lambda dtype, head_dim: None)
    monkeypatch.setattr(flash, "_version_problem", lambda: None)


def packed(length: int) -> np.ndarray:
    """Segments of two rows: two segments and padding; padding, one segment, padding."""
    segments = np.zeros((B, length), np.int32)
    segments[0, :5] = 1
    segments[0, 5 : length - 2] = 2
    segments[1, 1 : length - 1] = 1
    return segments


def packed_mask(segments: np.ndarray) -> jax.Array:
    """As the decoder makes it for cuDNN."""
    return attention.packed_mask(
        jnp.asarray(segments), resolved(dataclasses.replace(FAST, attention="planned"))
    )


def operands(length: int, dtype: Any, segments: np.ndarray) -> tuple[jax.Array, ...]:
    """q, k, v and a cotangent that is zero at padding, as the loss makes it."""
    rng = np.random.default_rng(length)
    q, k, v, dy = (rng.normal(size=(B, length, heads, H)) * 1.5 for heads in (N, K, K, N))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, dy * (segments > 0)[..., None, None]))


def value_and_gradient(
    function: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array
) -> list[np.ndarray]:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> Any:
        out, pullback = jax.vjp(function, q, k, v)
        return out, *pullback(dy)

    return [np.asarray(x, np.float64) for x in jax.jit(both)(q, k, v, dy)]


def check(
    found: list[np.ndarray], expected: attention_oracle.Attended, used: np.ndarray, length: int, u: float
) -> None:
    relative = tolerances.attention(length, H, expected.spread, u)
    for name, got, value, size in zip(
        ("out", "dq", "dk", "dv"), found, expected.values, expected.magnitudes, strict=False
    ):
        bound = tolerances.output_rounding(value, relative * size, u) + 1e-30
        assert np.isfinite(got).all(), name
        worst = np.max((np.abs(got - value) / bound)[used])
        assert worst <= 1, f"{name}: {worst} times the bound"


@pytest.mark.usefixtures("as_xla")
@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_match_float64_in_value_and_gradient(length: int, dtype: str) -> None:
    """BF16: the value alone, since XLA's gradient rounds where a flash kernel does not."""
    segments = packed(length)
    q, k, v, dy = operands(length, dtype, segments)
    mask = packed_mask(segments)
    index = np.arange(length)
    visible = (segments[:, :, None] == segments[:, None, :]) & (index[None, :, None] >= index[None, None, :])
    expected = attention_oracle.attention(
        *(np.asarray(x, np.float64) for x in (q, k, v)), visible, np.asarray(dy, np.float64)
    )
    found = value_and_gradient(functools.partial(flash.flash_attention, mask=mask), q, k, v, dy)
    check(
        found if dtype == "float32" else found[:1],
        expected,
        segments > 0,
        length,
        0.0 if dtype == "float32" else tolerances.U_BF16,
    )
    for gradient in found[1:]:
        np.testing.assert_array_equal(gradient[segments == 0], 0)
    if dtype == "bfloat16":
        ours = attention.attend(q, k, v, mask, resolved(dataclasses.replace(FAST, attention="xla"))).reshape(
            q.shape
        )
        assert ours.dtype == jnp.bfloat16
        check([np.asarray(ours, np.float64)], expected, segments > 0, length, tolerances.U_BF16)


@pytest.mark.usefixtures("as_xla")
def test_a_prompt_in_its_own_row_needs_no_mask() -> None:
    length = 12
    q, k, v, dy = operands(length, "float32", np.ones((B, length)))
    visible = np.broadcast_to(np.tril(np.ones((length, length), bool)), (B, length, length))
    expected = attention_oracle.attention(*map(np.asarray, (q, k, v)), visible, np.asarray(dy))
    found = value_and_gradient(functools.partial(flash.flash_attention, mask=None), q, k, v, dy)
    check(found, expected, np.ones((B, length), bool), length, 0.0)
    xla = resolved(dataclasses.replace(FAST, compute_dtype="float32", attention="xla"))
    check(
        [np.asarray(attention.attend(q, k, v, None, xla)).reshape(q.shape)],
        expected,
        np.ones((B, length), bool),
        length,
        0.0,
    )


@pytest.mark.usefixtures("as_xla")
def test_a_decoded_token_sees_its_cache_up_to_itself() -> None:
    """Rows of different lengths; what earlier requests left behind is large and must not be seen."""
    size, positions = 9, np.array([0, 6], np.int32)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, N, H)).astype(np.float32)
    k, v = (rng.normal(size=(B, K, size, H)).astype(np.float32) for _ in range(2))
    visible = np.arange(size)[None] <= positions[:, None]
    k, v = (np.where(visible[:, None, :, None], x, 1e4).astype(np.float32) for x in (k, v))
    expected = attention_oracle.attention(
        q[:, None], np.moveaxis(k, 1, 2), np.moveaxis(v, 1, 2), visible[:, None], np.zeros((B, 1, N, H))
    )
    found = flash.flash_cached_attention(*map(jnp.asarray, (q, k, v)), jnp.asarray(positions))
    check([np.asarray(found)[:, None]], expected, np.ones((B, 1), bool), size, 0.0)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("length", [64, 65])
def test_the_planned_call_has_cudnns_shapes(cuda: None, masked: bool, length: int) -> None:
    """What the planner counts: operands, results and what the backward keeps, against the equations that JAX
    traces.
    """
    shape = jax.ShapeDtypeStruct
    q, k, mask = (
        shape((B, length, N, H), jnp.bfloat16),
        shape((B, length, K, H), jnp.bfloat16),
        shape((B, length, length), bool),
    )

    def traced(planned: bool) -> list[Any]:
        def total(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
            return (
                flash.flash_attention(q, k, v, mask if masked else None, planned=planned)
                .astype(jnp.float32)
                .sum()
            )

        equations = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, k, k, mask).jaxpr.eqns
        calls = [
            e
            for e in equations
            if "dot_product_attention" in e.primitive.name or e.primitive.name == "ffi_call"
        ]
        assert len(calls) == 2
        unused = (0,)  # JAX passes empty arrays for what it was not given
        inputs = [
            sorted((v.aval.shape, str(v.aval.dtype)) for v in e.invars if v.aval.shape != unused)
            for e in calls
        ]
        results = [[(v.aval.shape, str(v.aval.dtype)) for v in e.outvars] for e in calls]
        if jax.__version_info__ < flash.FIRST_JAX and masked and not planned:
            results[1].pop()  # the gradient of the mask
        return [inputs, results]

    assert traced(True) == traced(False)


def lowered(function: Callable[..., Any], *arguments: Any) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str) -> list[str]:
    return re.findall(r"custom_call @__cudnn\$(\w+)", text)


@pytest.mark.parametrize("degree", [1, 2])
def test_the_gradient_of_a_policy_lowers_to_cudnn(cuda: None, degree: int) -> None:
    """Also with heads split over two devices; no array of the program has scores' shape."""
    rows, length = 2, 48
    sizes = dataclasses.replace(CONFIG, num_layers=2, max_position_embeddings=length)
    model = nnx.eval_shape(lambda: Decoder(sizes, CUDNN, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    plan = PrecisionPlan([path for path, _ in named_params(params)], "bf16")
    layout = Layout(ShardingSection(tensor=degree), plan, model) if degree > 1 else None

    def gradient(params: nnx.State, *arrays: jax.Array) -> Any:
        def loss(params: nnx.State) -> jax.Array:
            bound = nnx.merge(graphdef, params if layout is None else layout.shards(params))
            return completion_logprobs(bound, *arrays, temperature=1.0, chunk_tokens=32)[0].sum()

        return jax.grad(loss)(params)

    if layout is not None:
        weights = layout.specs(params)
        gradient = layout.map(gradient, (weights, ROWS, ROWS, ROWS), weights)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    text = lowered(gradient, params, ids, ids, ids)
    assert sorted(calls(text)) == ["fmhaScaleBiasSoftmax"] * 2 + ["fmhaScaleBiasSoftmaxBackward"] * 2
    heads, kv_heads = sizes.num_heads // degree, sizes.num_kv_heads // degree
    assert (
        f"tensor<{rows}x{length}x{heads}x16xbf16>" in text
        and f"tensor<{rows}x{length}x{kv_heads}x16xbf16>" in text
    )
    scores = set(re.findall(rf"tensor<([\dx]+)x{length}x{length}x(?:bf16|f32)>", text))
    assert scores == {f"{rows}x1"}, "nothing but the mask that all heads share"


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
def test_prefill_and_decode_lower_to_cudnn(cuda: None, compute_dtype: str) -> None:
    rows, length = 3, 24
    numerics = dataclasses.replace(CUDNN, compute_dtype=compute_dtype, stored_dtype=compute_dtype)
    model = nnx.eval_shape(lambda: Decoder(CONFIG, numerics, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    row = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    prompts = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    text = lowered(
        lambda params, *arrays: nnx.merge(graphdef, params).prefill(*arrays), params, prompts, prompts
    )
    assert calls(text) == ["fmhaSoftmax"] and "CAUSAL" in text and f"{length}x{length}x" not in text
    cache = jax.eval_shape(lambda: empty_cache(CONFIG, model.numerics, rows, length))
    text = lowered(
        lambda params, *arrays: nnx.merge(graphdef, params).extend(*arrays), params, row, row, cache
    )
    assert calls(text) == ["fmhaSoftmax"] and "PADDING" in text
    name = {"bfloat16": "bf16", "float16": "f16"}[compute_dtype]
    keys = f"tensor<{rows * CONFIG.num_kv_heads}x{length}x1x{CONFIG.head_dim}x{name}>"
    assert keys in text and f"transpose %arg{len(named_params(params))}" not in text  # the cache as it lies


@pytest.mark.parametrize("program", ["gradient", "prefill", "decode"])
def test_programs_of_the_gpu_config_lower_to_cudnn(
    cuda: None, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one layer; the config's sizes are what the FP8 kernels take whole."""
    monkeypatch.setattr(abstract_run, "PLANNED", "cudnn")  # to be lowered, not counted
    config = load_config(Path(__file__).resolve().parents[2] / "configs" / "qwen3_100m_gpu.yaml")
    sizes = planned_model(config)
    run = abstract_run.AbstractRun(config, dataclasses.replace(sizes, num_layers=1))
    assert all(
        size % 128 == 0
        for path, value in named_params(run.state.params)
        if path.endswith("_proj.weight")
        for size in value.shape
    )
    assert sizes.hidden_size in KERNEL_WIDTHS and config.row_tokens % 128 == 0
    found = calls(run.trace(program).lower(lowering_platforms=("cuda",)).as_text())
    training = ["fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"]
    assert found == (training if program == "gradient" else ["fmhaSoftmax"])


def test_the_choice_says_why() -> None:
    for numerics, head_dim, why in (
        (Numerics(), H, "numerics.exact is true"),
        (dataclasses.replace(FAST, compute_dtype="float32"), H, "activations are float32"),
        (FAST, 12, "head_dim is 12, expected a multiple of 8"),
        (FAST, 264, "head_dim is 264"),
    ):
        choice = flash.attention_implementation(numerics, head_dim, elsewhere=True)
        asked = "mosaic_gpu" if numerics.exact else "cudnn"
        assert choice.name == "xla" and choice.reason.startswith(f"auto: {asked} cannot run: ")
        assert numerics.exact or why in choice.reason
        with pytest.raises(UserError, match=f"numerics.attention: cannot run: got 'cudnn', but {why}"):
            flash.attention_implementation(dataclasses.replace(numerics, attention="cudnn"), head_dim)
    assert flash.attention_implementation(FAST, H, elsewhere=True).name == (
        "xla" if jax.__version_info__ < flash.FIRST_JAX else "cudnn"
    )
    here = flash.attention_implementation(FAST, H)
    assert here.name == ("cudnn" if NO_GPU is None else "xla")
    by_name = dataclasses.replace(FAST, attention="xla")
    assert flash.attention_implementation(by_name, H).reason == "asked for by name"


def test_an_exact_run_takes_the_kernels_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Numerics()
    for numerics, head_dim, group, why in (
        (exact, 32, 1, r"head_dim is 32, expected one of \(64, 128\)"),
        (exact, 64, 65, "65 query heads share a key/value head, expected at most 64"),
        (dataclasses.replace(exact, compute_dtype="float32"), 64, 1, "activations are float32"),
        (dataclasses.replace(exact, stored_dtype="float64"), 64, 1, "keys and values are stored in float64"),
    ):
        choice = flash.attention_implementation(numerics, head_dim, group)
        assert choice.name == "xla" and re.match(f"auto: mosaic_gpu cannot run: {why}", choice.reason)
        by_name = dataclasses.replace(numerics, attention="mosaic_gpu")
        with pytest.raises(UserError, match=f"cannot run: got 'mosaic_gpu', but {why}"):
            flash.attention_implementation(by_name, head_dim, group)
    pretend(monkeypatch, "cpu")
    assert "the platform is 'cpu'" in flash.attention_implementation(exact, 64).reason
    pretend(monkeypatch, "gpu")
    choice = flash.attention_implementation(exact, 128, 4)
    assert choice.name == "mosaic_gpu" and flash.extension_implementation(choice) == choice
    fast = dataclasses.replace(FAST, attention="mosaic_gpu")
    assert flash.attention_implementation(fast, 128).name == "mosaic_gpu"
    pretend(monkeypatch, "gpu", capability="8.0")
    assert "expected 9.0" in flash.attention_implementation(exact, 128).reason


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a GPU")
def test_a_cpu_is_refused_and_a_gpu_without_cudnn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="the platform is 'cpu', expected 'gpu'"):
        flash.attention_implementation(CUDNN, H)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    why = (
        r"JAX is .*, expected 0\.11\.2"
        if jax.__version_info__ < flash.FIRST_JAX
        else "its calls do not compile: cuDNN"
    )
    with pytest.raises(UserError, match=why):
        flash.attention_implementation(CUDNN, H)


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU is not None, reason=f"cudnn: {NO_GPU}")
@pytest.mark.parametrize("length", [12, 13, 256])
def test_cudnn_matches_float64(length: int) -> None:
    """The real kernels in BF16; P and dS are rounded to BF16 before their products."""
    segments = packed(length)
    q, k, v, dy = operands(length, "bfloat16", segments)
    index = np.arange(length)
    visible = (segments[:, :, None] == segments[:, None, :]) & (index[None, :, None] >= index[None, None, :])
    expected = attention_oracle.attention(
        *(np.asarray(x, np.float64) for x in (q, k, v)), visible, np.asarray(dy, np.float64)
    )
    found = value_and_gradient(
        functools.partial(flash.flash_attention, mask=packed_mask(segments)), q, k, v, dy
    )
    check(found, expected, segments > 0, length, tolerances.U_BF16)
    last = np.array([4, length - 2], np.int32)
    decoded = flash.flash_cached_attention(
        q[np.arange(B), last], jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2), jnp.asarray(last)
    )
    seen = (index[None] <= last[:, None])[:, None]
    query = np.asarray(q, np.float64)[np.arange(B), last][:, None]
    expected = attention_oracle.attention(
        query, np.asarray(k, np.float64), np.asarray(v, np.float64), seen, np.zeros((B, 1, N, H))
    )
    check(
        [np.asarray(decoded, np.float64)[:, None]], expected, np.ones((B, 1), bool), length, tolerances.U_BF16
    )
