"""The precision plan: the table of every preset, overrides, and that publishing, training and freezing agree
byte for byte.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, get_args

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from jetrl_jax.config.arithmetic import build_numerics, build_plan
from jetrl_jax.config.precision import NumericsSection, PrecisionOverride
from jetrl_jax.config.schema import look_up
from jetrl_jax.errors import UserError
from jetrl_jax.precision import formats as known_formats
from jetrl_jax.precision.formats import Blocks, Format
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.precision.parameters import jit, map_params, named_params
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.precision.trainable_weight import TrainableFp8Weight, TrainableMatrix
from jetrl_jax.training.programs import PolicyPrograms
from pallas_kernels import ScaledArray
from tests.oracles import fp8_oracle
from tests.parity.small_policy import CONFIG, SmallPolicy
from tests.sections import precision_section

pytestmark = pytest.mark.as_the_product

UNTIED = dataclasses.replace(CONFIG, num_layers=2, tie_word_embeddings=False, attention_bias=True)
FORMATS = {  # rollout, fprop, dgrad, wgrad of a linear layer; everything else
    "fp32": ("fp32 fp32 fp32 fp32", "fp32"),
    "bf16": ("bf16 bf16 bf16 bf16", "bf16"),
    "fp16": ("fp16 fp16 fp16 fp16", "fp16"),
    "fp8_unified": ("fp8 fp8 fp8 fp8", "bf16"),
    "fp8_forward": ("fp8 fp8 bf16 bf16", "bf16"),
    "fp8_rollout_only": ("fp8 bf16 bf16 bf16", "bf16"),
}
LINEAR = [
    f"layers.{layer}.{name}_proj.weight"
    for layer in (0, 1)
    for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
]
policy = functools.cache(lambda preset: SmallPolicy(preset, UNTIED))


def formats(plan: PrecisionPlan) -> dict[str, str]:
    """path -> the formats of its rows."""
    table: dict[str, list[str]] = {}
    for row in plan.rows:
        table.setdefault(row.path, []).append(row.format)
    return {path: " ".join(found) for path, found in table.items()}


def bits(value: jax.Array | np.ndarray) -> bytes:
    return np.asarray(value).tobytes()


def assert_same_bits(left: Any, right: Any) -> None:
    """Trees of one structure whose leaves differ in no bit, signs of zeros included; the message names the
    leaf.
    """
    chex.assert_trees_all_equal_comparator(
        lambda a, b: bits(a) == bits(b), lambda a, b: f"{a} is not {b}", left, right
    )


@pytest.mark.parametrize("preset", FORMATS)
def test_table_of_a_preset(preset: str) -> None:
    plan = policy(preset).plan
    linear, other = FORMATS[preset]
    found = formats(plan)
    assert set(found) == set(policy(preset).paths)
    assert [path for path in found if path.endswith("_proj.weight")] and set(LINEAR) <= set(found)
    assert found == {path: linear if path in LINEAR else other for path in found}
    never = [path for path in found if path not in LINEAR]
    kept_out = (
        "embed_tokens.weight",
        "lm_head.weight",
        "norm.weight",
        "layers.1.self_attn.q_proj.bias",
        "layers.0.self_attn.q_norm.weight",
    )
    assert set(kept_out) <= set(never)
    assert not any("fp8" in found[path] for path in never)


@pytest.mark.parametrize("preset", FORMATS)
def test_flow_of_a_path(preset: str) -> None:
    plan = policy(preset).plan
    linear, other = FORMATS[preset]
    flow, rest = plan.flow(LINEAR[0]), plan.flow("norm.weight")
    assert [fmt.name for fmt in (flow.rollout, flow.fprop, flow.dgrad, flow.wgrad, flow.value)] == [
        *linear.split(),
        other,
    ]
    assert (
        {fmt.name for fmt in rest} == {other} and not rest.quantized and flow.quantized == ("fp8" in linear)
    )
    assert [fmt.quantized for fmt in flow.products.values()] == [name == "fp8" for name in linear.split()]


def test_config_offers_every_preset() -> None:
    presets = look_up(("precision", "preset"))
    assert presets is not None and set(presets.choices) == set(known_formats.PRESETS) == set(FORMATS)
    assert set(get_args(PrecisionOverride.model_fields["format"].annotation)) <= set(known_formats.FORMATS)


def test_plan_publishes_another_format_in_its_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = Format("columns", "float8_e4m3fn", Blocks((1, 128), (128, 1), (128, 1)))
    monkeypatch.setitem(known_formats.FORMATS, "columns", columns)
    small, down = policy("fp8_unified"), "layers.1.mlp.down_proj.weight"
    plan = PrecisionPlan(small.paths, "fp8_unified", [(down, "columns")])
    assert (
        formats(plan)[down] == " ".join(["columns"] * 4)
        and formats(plan)[LINEAR[0]] == FORMATS["fp8_unified"][0]
    )
    assert {row.blocks for row in plan.rows if row.path == down and row.site == "fprop"} == {
        "X (1, 128) W (128, 1)"
    }
    published = dict(named_params(jax.eval_shape(plan.publish, small.params)))
    assert (published[down].block_shape, published[LINEAR[0]].block_shape) == ((128, 1), (128, 128))


@pytest.mark.parametrize(
    ("operand", "block"), [("requantize", (128, 1)), ("dual", (128, 1)), ("block", (128, 128))]
)
def test_table_says_the_blocks(operand: str, block: tuple[int, int]) -> None:
    plan = PrecisionPlan(policy("fp8_unified").paths, "fp8_unified", wgrad_operand=operand)
    blocks = {row.site: row.blocks for row in plan.rows if row.path == LINEAR[0]}
    assert blocks == {
        "rollout": "X (1, 128) W (128, 128)",
        "fprop": "X (1, 128) W (128, 128)",
        "dgrad": "dY (1, 128) W (128, 128)",
        "wgrad": f"dY (128, 1) X {block}",
    }
    text = plan.table()
    assert "fp8_unified" in text.splitlines()[0] and operand in text.splitlines()[0]
    assert len(text.splitlines()) == 2 + len(plan.rows)
    for row in plan.rows:
        assert any(
            {row.path, row.site, row.format} <= set(line.split()) and row.blocks in line
            for line in text.splitlines()
        )


def test_last_matching_override_wins() -> None:
    paths = policy("fp8_unified").paths
    down, up = "layers.1.mlp.down_proj.weight", "layers.1.mlp.up_proj.weight"
    plan = PrecisionPlan(paths, "fp8_forward", [("layers.1.*", "bf16"), ("*.down_proj.weight", "fp8")])
    found = formats(plan)
    assert found[down] == found[LINEAR[0]] == FORMATS["fp8_forward"][0] and found[up] == FORMATS["bf16"][0]
    swapped = formats(
        PrecisionPlan(paths, "fp8_forward", [("*.down_proj.weight", "fp8"), ("layers.1.*", "bf16")])
    )
    assert swapped[down] == swapped[up] == FORMATS["bf16"][0]
    into = formats(PrecisionPlan(paths, "bf16", [("layers.0.mlp.gate_proj.weight", "fp8")]))
    assert (
        into["layers.0.mlp.gate_proj.weight"] == FORMATS["fp8_unified"][0]
        and into[down] == FORMATS["bf16"][0]
    )


def test_override_of_a_layer_leaves_its_norms_alone() -> None:
    found = formats(PrecisionPlan(policy("bf16").paths, "bf16", [("*", "fp8")]))
    assert [path for path, fmt in found.items() if "fp8" in fmt] == [path for path in found if path in LINEAR]


@pytest.mark.parametrize(
    "pattern",
    [
        "layers.7.*",
        "mlp.gate_proj",
        "embed_tokens.weight",
        "lm_head.*",
        "*norm.weight",
        "*.q_proj.bias",
        "LAYERS.0.*",
        "",
    ],
)
def test_override_without_a_linear_layer_is_an_error(pattern: str) -> None:
    with pytest.raises(UserError, match=r"precision\.overrides") as error:
        PrecisionPlan(policy("bf16").paths, "bf16", [("layers.0.*", "fp8"), (pattern, "fp8")])
    assert repr(pattern) in str(error.value) and LINEAR[0] in str(error.value)


def test_config_sections_reach_plan_and_numerics() -> None:
    override = PrecisionOverride(pattern="layers.0.*", format="bf16")
    section = precision_section(
        preset="fp8_unified",
        overrides=(override,),
        wgrad_operand="dual",
        scale_format="power_of_two",
        promotion_order="triton",
    )
    plan = build_plan(policy("bf16").paths, section)
    assert (plan.preset, plan.wgrad_operand, plan.scale_format) == ("fp8_unified", "dual", "power_of_two")
    assert (
        formats(plan)[LINEAR[0]] == FORMATS["bf16"][0]
        and formats(plan)[LINEAR[-1]] == FORMATS["fp8_unified"][0]
    )
    fast = NumericsSection(engine_variant="cuda", exact=False, attention="xla")
    numerics = build_numerics(section, fast, vllm=True)
    assert numerics == Numerics("bfloat16", "cuda", False, "triton", "dual", "power_of_two", attention="xla")
    exact = NumericsSection(engine_variant="cuda")
    assert [build_numerics(section, exact, vllm=vllm).dense for vllm in (False, True)] == ["auto", "float64"]
    assert hash(numerics) == hash(dataclasses.replace(numerics)) and numerics.dtype == jnp.bfloat16


@pytest.mark.parametrize("scale_format", ["float32", "power_of_two"])
def test_published_bytes_are_the_oracles_of_the_bf16_master(scale_format: str) -> None:
    small = policy("fp8_unified")
    plan = PrecisionPlan(small.paths, "fp8_unified", [("layers.1.mlp.*", "bf16")], scale_format=scale_format)
    masters, differs_from_fp32 = dict(named_params(small.params)), False
    for path, value in named_params(jit(plan.publish)(small.params)):
        master = np.asarray(masters[path])
        rounded = master.astype(ml_dtypes.bfloat16)
        if path not in LINEAR or path.startswith("layers.1.mlp"):
            assert value.dtype == jnp.bfloat16 and bits(value) == rounded.tobytes(), path
            continue
        assert isinstance(value, ScaledArray) and value.block_shape == (128, 128)
        codes, scales = fp8_oracle.quantize(rounded, (128, 128), scale_format)
        assert bits(value.qvalue) == codes.tobytes() and bits(value.scale) == scales.tobytes(), path
        differs_from_fp32 |= (
            fp8_oracle.quantize(master, (128, 128), scale_format)[0].tobytes() != codes.tobytes()
        )
    assert differs_from_fp32, "the case cannot tell a BF16 source from an FP32 one"


@pytest.mark.parametrize("preset", FORMATS)
def test_training_frozen_and_published_weights_agree(preset: str) -> None:
    """FProp multiplies the published codes and values, in training and frozen, even if a master differs from
    them; only in fp8_rollout_only do linear layers round the master.
    """
    small = policy(preset)
    params = map_params(lambda _, value: value * jnp.float32(1.01), small.params)
    masters, published = dict(named_params(params)), dict(named_params(small.published))
    frozen = dict(named_params(jit(small.plan.frozen_weights)(params, small.published)))
    _, fprop, dgrad, _ = FORMATS[preset][0].split()
    for path, weight in named_params(small.plan.training_weights(params, small.published)):
        if path in LINEAR and fprop == "fp8":
            assert isinstance(weight, TrainableFp8Weight) and weight.fp8_backward == (dgrad == "fp8")
            assert weight.master is masters[path]
            for codes in (weight.quantized, frozen[path]):
                assert bits(codes.qvalue) == bits(published[path].qvalue) and bits(codes.scale) == bits(
                    published[path].scale
                )
        elif path in LINEAR and preset == "fp8_rollout_only":
            assert weight is masters[path] and weight.dtype == jnp.float32
            assert bits(frozen[path]) == np.asarray(masters[path]).astype(ml_dtypes.bfloat16).tobytes()
        else:
            weight = weight.whole() if isinstance(weight, TrainableMatrix) else weight
            assert weight.dtype == jnp.float32
            assert bits(weight) == np.asarray(published[path]).astype(np.float32).tobytes()
            assert bits(frozen[path]) == bits(published[path])
        assert isinstance(published[path], ScaledArray) == (path in LINEAR and preset.startswith("fp8"))


@pytest.mark.parametrize("preset", ["fp32", "fp8_unified"])
def test_update_leaves_the_models_own_parameters_usable(preset: str) -> None:
    """The state owns its buffers: those that were given to `init` are read after an update has consumed the
    state's.
    """
    small = SmallPolicy(preset)
    before = {path: bits(value) for path, value in named_params(small.params)}
    programs = PolicyPrograms(small.model, small.plan, optax.sgd(0.5), temperature=1.0, chunk_tokens=64)
    state = programs.init(small.params)
    frozen = programs.frozen(state)
    frozen_before = jax.tree.map(np.array, frozen)
    grads = map_params(lambda _, value: jnp.ones_like(value), small.params)
    new, report = programs.update(state, grads)
    assert report.nonfinite == ()
    assert {path: bits(value) for path, value in named_params(small.params)} == before
    assert_same_bits(frozen, frozen_before)  # a reference policy outlives updates
    for path, value in named_params(new.params):
        np.testing.assert_array_equal(
            np.asarray(value), np.frombuffer(before[path], np.float32).reshape(value.shape) - np.float32(0.5)
        )
    assert_same_bits(jit(small.plan.publish)(new.params), new.published)
    assert isinstance(nnx.merge(small.graphdef, new.published), type(small.model))
