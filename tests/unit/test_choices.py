"""Implementations are decided where a decoder is built, for its settings and sizes, and stay with the
numerics.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jetrl_jax.config.precision import Fp8UnifiedSection, NumericsSection
from jetrl_jax.errors import UserError
from jetrl_jax.models import flash_attention
from jetrl_jax.models.anatomy import MATRICES
from jetrl_jax.models.cache import empty_cache
from jetrl_jax.models.choices import resolve, slow_exactness
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.dense import dense
from jetrl_jax.models.flash_attention import PLANNED
from jetrl_jax.precision.numerics import ALLOWED, Numerics
from jetrl_jax.precision.parameters import named_params
from jetrl_jax.precision.plan import PrecisionPlan
from pallas_kernels import implementations
from tests.kernels.test_implementations import pretend
from tests.parity.small_policy import CONFIG


def abstract(numerics: Numerics) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(CONFIG, numerics, rngs=nnx.Rngs(0)))


def test_a_decoder_resolves_its_numerics_and_every_part_has_them() -> None:
    model = abstract(Numerics())
    assert model.numerics.resolved is not None and model.numerics.settings == Numerics()
    layer = model.layers[0]
    parts = (
        layer.self_attn,
        layer.self_attn.q_proj,
        layer.mlp,
        layer.input_layernorm,
        model.norm,
        model.embed_tokens,
    )
    assert all(part.numerics is model.numerics for part in parts)
    assert abstract(model.numerics).numerics is model.numerics, "resolved again for nothing"
    assert {hash(model.numerics), hash(abstract(Numerics()).numerics)} == {hash(model.numerics)}


def test_a_forward_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is asked where the decoder is built and never again: with plain and with FP8 weights, and
    against a cache.
    """
    model = abstract(Numerics())
    graphdef, weights = nnx.split(model)
    published = jax.eval_shape(
        PrecisionPlan([path for path, _ in named_params(weights)], "fp8_unified").publish, weights
    )
    cache = empty_cache(CONFIG, model.numerics, 1, 8)
    ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)

    def asked(*_: object) -> None:
        raise AssertionError("the device was asked")

    for module, name in (
        (implementations, "gpu_problem"),
        (flash_attention, "_device_problem"),
        (jax, "default_backend"),
    ):
        monkeypatch.setattr(module, name, asked)
    for kind in (weights, published):
        whole = jax.eval_shape(
            lambda weights, *tokens: nnx.merge(graphdef, weights)(*tokens), kind, ids, ids, ids
        )
        extended, _ = jax.eval_shape(
            lambda weights, *tokens: nnx.merge(graphdef, weights).extend(*tokens, cache), kind, ids, ids
        )
        assert whole.shape == extended.shape == (1, 4, CONFIG.hidden_size)


def test_changed_settings_and_other_sizes_are_resolved_again() -> None:
    numerics = resolve(Numerics(), CONFIG)
    changed = dataclasses.replace(numerics, exact=False)
    assert changed.resolved is None and changed == Numerics(exact=False)
    assert resolve(changed, CONFIG).choices.forward.name == "xla_fast"
    wider = resolve(numerics, dataclasses.replace(CONFIG, head_dim=2 * CONFIG.head_dim))
    assert wider.choices.sizes != numerics.choices.sizes and wider.settings == numerics.settings


def test_operations_raise_on_numerics_that_are_not_resolved() -> None:
    x = jnp.ones((2, 8), jnp.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"Numerics: no implementations: got resolved=None, expected .*resolve\(numerics, config\)",
    ):
        dense(x, x, jnp.float32, Numerics())


def test_a_decoder_raises_on_an_implementation_that_cannot_run() -> None:
    with pytest.raises(
        UserError, match=r"numerics\.attention: cannot run: got 'cudnn', but numerics\.exact is true"
    ):
        abstract(Numerics(attention="cudnn"))


def test_choices_follow_the_device_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    here = resolve(Numerics(), CONFIG).choices
    assert (here.forward.name, here.backward.name, here.dense.name, here.cache.name) == (
        "xla",
        "xla_fast",
        "xla_fast",
        "float64",
    )
    assert resolve(Numerics(exact=False), CONFIG).choices.cache.name == "float32"
    sizes = dataclasses.replace(CONFIG, hidden_size=1024, intermediate_size=256)
    pretend(monkeypatch, "gpu")
    monkeypatch.setattr(flash_attention, "_device_problem", lambda dtype, head_dim: None)
    gpu = resolve(Numerics(exact=False), sizes).choices
    assert [gpu.forward.name, gpu.backward.name, gpu.quantize.name, gpu.norm.name, gpu.silu.name] == [
        "mosaic_gpu"
    ] * 5
    assert (gpu.attention.name, gpu.extension.name, gpu.cache.name) == ("cudnn", "xla", "bfloat16")
    assert gpu.extension.reason == "cuDNN's call has one number of visible keys for all tokens of a row"
    assert gpu.quantizer(256) == gpu.quantize and gpu.quantizer(200).name == "xla"
    narrow = resolve(Numerics(exact=False), dataclasses.replace(sizes, intermediate_size=200)).choices
    assert narrow.silu.name == "xla" and "multiple of 128" in narrow.silu.reason


def test_choices_for_a_gpu_that_is_not_here() -> None:
    there = resolve(Numerics(exact=False, compute_dtype="float16"), CONFIG, elsewhere=True).choices
    assert there.cache.name == "float16" and "not here" in there.cache.reason
    assert there.attention.name == ("xla" if jax.__version_info__ < flash_attention.FIRST_JAX else "cudnn")
    here = resolve(Numerics(), CONFIG)
    assert (
        here.choices.cache.name == "float64"
        and resolve(here, CONFIG, elsewhere=True).choices.cache.name == "bfloat16"
    )
    kept = resolve(here, CONFIG, elsewhere=True)
    assert abstract(kept).numerics is kept


def test_the_record_has_every_choice() -> None:
    choices = resolve(Numerics(), CONFIG).choices
    record = choices.record()
    flat = [
        *record["fp8_products"].values(),
        *record["fp8_inputs"].values(),
        *(v for v in record.values() if "name" in v),
    ]
    made = [
        dataclasses.asdict(value)
        for value in vars(choices).values()
        if isinstance(value, implementations.Choice)
    ]
    assert len(flat) == len(made) and all(value in flat for value in made)


def test_the_plans_linear_layers_are_those_of_the_anatomy() -> None:
    paths = [path for path, _ in named_params(nnx.state(abstract(Numerics()), nnx.Param))]
    assert sorted(PrecisionPlan(paths, "fp8_unified").linear) == sorted(
        f"layers.0.{matrix.path}.weight" for matrix in MATRICES
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("compute_dtype", "bf16"),
        ("compute_dtype", "float64"),
        ("engine_variant", "CUDA"),
        ("exact", "false"),
        ("promotion_order", "deep"),
        ("wgrad_operand", "two"),
        ("scale_format", "ue8m0"),
        ("kernels", "pallas"),
        ("attention", "flash"),
        ("dense", "float32"),
        ("stored_dtype", "float8_e4m3fn"),
        ("stored_dtype", "float16"),  # of values in BF16
    ],
)
def test_numerics_raise_on_a_setting_that_they_do_not_know(setting: str, value: object) -> None:
    """Most of these were taken for another setting in silence: `engine_variant="CUDA"` for "native",
    `exact="false"` for true.
    """
    with pytest.raises(ValueError, match=f"Numerics: bad value: got {setting}={value!r}, expected"):
        Numerics(**{setting: value})  # type: ignore[arg-type]


def test_numerics_know_what_the_config_knows() -> None:
    for name in set(NumericsSection.model_fields) & set(ALLOWED) - {"exact", "kernels", "attention"}:
        assert set(get_args(NumericsSection.model_fields[name].annotation)) == set(ALLOWED[name])
    for name in set(Fp8UnifiedSection.model_fields) & set(ALLOWED):
        assert set(get_args(Fp8UnifiedSection.model_fields[name].annotation)) == set(ALLOWED[name])
    assert set(get_args(NumericsSection.model_fields["kernels"].annotation)) <= set(ALLOWED["kernels"])
    assert {*get_args(NumericsSection.model_fields["attention"].annotation), PLANNED} == set(
        ALLOWED["attention"]
    )
    assert {field.name for field in dataclasses.fields(Numerics)} == {*ALLOWED, "resolved"}


def test_exactness_in_float64_on_a_gpu_is_warned_of_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = abstract(Numerics()).numerics
    assert exact.choices.attention.name == "xla" and slow_exactness(exact) is None  # a CPU
    monkeypatch.setattr("jetrl_jax.models.choices.on_gpu", lambda: True)
    assert exact.choices.attention.reason in str(slow_exactness(exact))
    assert slow_exactness(abstract(Numerics(exact=False)).numerics) is None
