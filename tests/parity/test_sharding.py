"""A policy on meshes of (fake) devices against the same policy on one device: the same bits forward, FP32
roundoff backward.

Where layers are split, FP32 sums change their order before they are rounded to the dtype between operations,
so that gradients of the narrow flows differ: by a fraction of what that dtype costs them anyway.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jetrl_jax.config.devices import ShardingSection
from jetrl_jax.config.precision import LossScaleSection
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.devices.layout import Layout
from jetrl_jax.errors import UserError
from jetrl_jax.models.anatomy import fitting_degrees, fitting_tensor_degrees, shard_axis
from jetrl_jax.models.lora import Adapters
from jetrl_jax.precision.formats import FP8_BLOCKS
from jetrl_jax.precision.parameters import map_params, merge, named_params, select
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.rl import batching
from jetrl_jax.rl.algorithm import ResolvedAlgorithm, resolve_algorithm
from jetrl_jax.rollout.embedded.data_parallel import DataParallelEngine
from jetrl_jax.rollout.embedded.jax_engine import JaxEngine
from jetrl_jax.rollout.embedded.speculation import Lookup
from jetrl_jax.rollout.types import Request, SamplingParams, Trajectory
from jetrl_jax.training.loss_scale import LossScale
from jetrl_jax.training.programs import PolicyPrograms, TrainState
from pallas_kernels import ScaledArray
from pallas_kernels.formats import BLOCK
from tests.parity.small_episodes import episodes_of
from tests.parity.small_policy import CONFIG, VOCAB, SmallPolicy, trajectories
from tests.sections import algorithm_section

# Every degree up to 4 fits; "partial" has a partial block along the axis that is not split, "odd" a
# vocabulary that is not.
WIDE = dataclasses.replace(
    CONFIG, vocab_size=40, hidden_size=512, intermediate_size=512, num_heads=4, num_kv_heads=4, head_dim=128
)
ROW, ROWS_EACH = 24, 1
LENGTHS = [
    (3, 9),
    (5, 17),
    (2, 4),
    (8, 8),
    (4, 20),
    (1, 1),
    (6, 11),
    (7, 16),
    (2, 21),
    (3, 3),
    (9, 12),
    (5, 5),
]
LONG = pytest.mark.long
# The update computes a new master once to keep it and once to publish it.  Without most optimisations JAX 0.12
# makes these two of different instructions, so that a published value in 10^5 is not its master's.
pytestmark = [] if jax.__version_info__ >= (0, 11) else pytest.mark.compiled_quickly
NARROW = ["bf16", "fp16", "fp8_unified", "fp8_forward"]  # fp8_rollout_only trains as bf16
MESHES = [(1, 2, 2)]
QWEN2 = dataclasses.replace(
    WIDE, architecture="qwen2", attention_bias=True, qk_norm=False, tie_word_embeddings=False
)
CONFIGS = {
    "qwen3": WIDE,
    "qwen2": QWEN2,
    "partial": dataclasses.replace(WIDE, intermediate_size=672),
    "odd": dataclasses.replace(WIDE, vocab_size=VOCAB),
    "small": CONFIG,
    "lora": WIDE,
}
# a rank that "fsdp" splits on the first axis
ADAPTERS = Adapters(8, 2.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
# Measured with layers split: difference at most 0.31 of one device's own error against FP32, and no larger an
# error.
SHARE_OF_ROUNDING, ERROR_GROWTH = 0.4, 1.05


@functools.cache
def policy(flow: str, architecture: str = "qwen3") -> SmallPolicy:
    return SmallPolicy(flow, CONFIGS[architecture], adapters=ADAPTERS if architecture == "lora" else None)


def section(mesh: tuple[int, ...]) -> ShardingSection:
    return ShardingSection(**dict(zip(("data", "fsdp", "tensor"), mesh, strict=False)))


def programs(
    flow: str, mesh: tuple[int, ...] | None, remat: bool = False, architecture: str = "qwen3"
) -> PolicyPrograms:
    one = policy(flow, architecture)
    model = nnx.merge(one.graphdef, one.params)
    model.remat = remat
    layout = None if mesh is None else Layout(section(mesh), one.plan, one.model)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))
    return PolicyPrograms(model, one.plan, optimizer, temperature=0.7, chunk_tokens=16, layout=layout)


def microbatches(rows: int) -> tuple[list[batching.TrainBatch], ResolvedAlgorithm]:
    """Twelve ragged trajectories in microbatches of `rows` rows."""
    made = trajectories(LENGTHS, seed=3)
    values = np.random.default_rng(4).normal(size=len(made))
    config = RunConfig()
    return batching.pack(made, values, np.ones(len(made), bool), ROW, rows * ROW), resolve_algorithm(
        config.algorithm, ROW, config.correction
    )


def gradient(one: PolicyPrograms, state: TrainState, rows: int) -> tuple[nnx.State, float]:
    """Gradient and loss of the whole batch, accumulated over microbatches."""
    micro, algorithm = microbatches(rows)
    denominators = batching.count_denominators(micro, ROW)
    total, loss = None, 0.0
    for batch in micro:
        grads, stats, _ = one.policy_gradient(state, batch, denominators, algorithm)
        total, loss = one.add(total, grads), loss + float(stats["loss"])
    return total, loss


@functools.cache
def reference(
    flow: str, architecture: str = "qwen3"
) -> tuple[np.ndarray, dict[str, np.ndarray], float, dict[str, np.ndarray]]:
    """On one device, in microbatches of a device's rows: logprobs, gradient, loss, and the masters after an
    update.
    """
    one = programs(flow, None, architecture=architecture)
    state = one.init(policy(flow, architecture).params)
    batch = microbatches(8)[0][0]
    logprobs = one.logprobs(one.frozen(state), batch)
    grads, loss = gradient(one, state, ROWS_EACH)
    gradients = arrays(grads)  # before their buffers are consumed
    state, _ = one.update(state, grads)
    return logprobs, gradients, loss, arrays(state.params)


@pytest.fixture
def one_device(
    flow: str, architecture: str, mesh: tuple[int, ...]
) -> tuple[np.ndarray, dict[str, np.ndarray], float, dict[str, np.ndarray]]:
    """`reference`, made once for all meshes, and that in FP32 where the gradients are measured by it."""
    if mesh[2] > 1:
        reference("fp32", architecture)
    return reference(flow, architecture)


def arrays(state: nnx.State) -> dict[str, np.ndarray]:
    return {path: np.asarray(value) for path, value in named_params(state)}


def norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(np.float64(value)))


def check_gradients(ours: dict[str, np.ndarray], flow: str, architecture: str, tensor: int) -> None:
    one, exact = reference(flow, architecture)[1], reference("fp32", architecture)[1] if tensor > 1 else {}
    for path, value in ours.items():
        difference = norm(value - one[path])
        if tensor == 1 or flow == "fp32":
            assert difference <= (1e-6 if tensor == 1 else 5e-6) * norm(one[path]), path
            continue
        error = norm(one[path] - exact[path])
        assert (
            difference <= SHARE_OF_ROUNDING * error and norm(value - exact[path]) <= ERROR_GROWTH * error
        ), path


@pytest.mark.parametrize(
    ("flow", "mesh", "architecture"),
    [("fp8_unified", mesh, "qwen3") for mesh in MESHES]
    + [("fp32", (2, 2, 2), "qwen3")]
    + [pytest.param("fp32", (2, 2, 2), "odd", marks=LONG)]
    + [pytest.param(flow, (2, 2, 2), "qwen3", marks=LONG) for flow in NARROW]
    + [
        pytest.param("fp8_unified", (1, 4, 1), "qwen3", marks=LONG),
        pytest.param("fp8_unified", (1, 1, 4), "qwen2", marks=LONG),
        pytest.param("fp8_unified", (4, 2, 1), "partial", marks=LONG),
        pytest.param("fp32", (1, 2, 2), "qwen2", marks=LONG),
    ]
    + [
        pytest.param("fp32", (1, 2, 2), "lora", marks=LONG),
        pytest.param("fp8_unified", (2, 2, 2), "lora", marks=LONG),
    ],
)
def test_mesh_equals_one_device(flow, mesh, architecture, one_device):
    one = policy(flow, architecture)
    (logprobs, gradients, loss, masters) = one_device
    many = programs(flow, mesh, remat=mesh[1] > 1, architecture=architecture)
    state = many.init(one.params)
    found = many.logprobs(many.frozen(state), microbatches(8)[0][0])
    # XLA's dot on CPU sums in an order that depends on the number of outputs
    if flow in ("fp32", "fp16") and mesh[2] > 1:
        np.testing.assert_allclose(found, logprobs, rtol=0, atol=3e-5)
    else:
        np.testing.assert_array_equal(found, logprobs)
    grads, many_loss = gradient(many, state, ROWS_EACH * mesh[0] * mesh[1])
    assert abs(many_loss - loss) <= 1e-6
    check_gradients(arrays(grads), flow, architecture, mesh[2])
    trained = select(one.params, one.plan.trained)
    given = map_params(lambda path, _: gradients[path], trained)
    state, report = many.update(state, jax.device_put(given, many.layout.shardings(given)))
    assert not report.nonfinite
    whole = float(np.sqrt(sum(norm(value) ** 2 for value in gradients.values())))
    assert abs(report.grad_norm - whole) <= 1e-6 * whole
    after = arrays(state.params)
    moved = {path: np.abs(after[path] - np.asarray(value)).max() for path, value in named_params(trained)}
    # softmax does not see a bias of keys
    assert min(value for path, value in moved.items() if "k_proj.bias" not in path) > 1e-4
    for path, value in after.items():  # the norm's sum has another order, and it scales the gradient
        assert np.abs(value - masters[path]).max() <= 1e-6, path
    check_codes(one, state)


def check_codes(one: SmallPolicy, state: TrainState) -> None:
    """Each device's codes and scales are the slices of those that one device makes of the whole masters."""
    masters = jax.tree.map(lambda value: jax.numpy.asarray(np.asarray(value)), state.params)
    expected = merge(one.published, one.plan.publish(masters))  # a frozen base is that of the start
    held = dict(named_params(state.published))
    assert held.keys() == dict(named_params(expected)).keys()
    for path, value in named_params(expected):
        sharded = held[path]
        pairs = (
            [(value, sharded)]
            if not isinstance(value, ScaledArray)
            else [(value.qvalue, sharded.qvalue), (value.scale, sharded.scale)]
        )
        for whole, split in pairs:
            for shard in split.addressable_shards:
                slices = np.asarray(whole)[shard.index]
                np.testing.assert_array_equal(
                    np.asarray(shard.data).view(np.uint8), np.ascontiguousarray(slices).view(np.uint8), path
                )


def test_loss_scale_lies_on_every_device():
    one = policy("fp16", "small")
    layout = Layout(section((2, 1, 1)), one.plan, one.model)
    scale = LossScale.start(LossScaleSection())
    many = PolicyPrograms(
        one.model, one.plan, optax.sgd(1.0), temperature=1.0, chunk_tokens=32, loss_scale=scale, layout=layout
    )
    leaves = jax.tree.leaves(many.init(one.params).loss_scale)
    assert leaves and all(leaf.sharding.device_set == set(layout.mesh.devices.flat) for leaf in leaves)


def test_state_lies_where_the_layout_says():
    many = programs("fp8_unified", (2, 4))
    state = many.init(policy("fp8_unified").params)
    sizes = {
        path: (value.size, value.addressable_shards[0].data.size)
        for path, value in named_params(state.params)
    }
    assert all(
        whole == 4 * part for path, (whole, part) in sizes.items() if many.layout.axes[path] is not None
    )
    assert {path for path, axis in many.layout.axes.items() if axis is None} == {
        path for path in sizes if "norm" in path
    }
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim == 2]
    assert len(moments) == 2 * sum(axis is not None for axis in many.layout.axes.values())
    assert all(leaf.size == 4 * leaf.addressable_shards[0].data.size for leaf in moments)
    codes = dict(named_params(state.published))["layers.0.mlp.up_proj.weight"]
    assert codes.qvalue.addressable_shards[0].data.shape == (128, 512) and codes.scale.addressable_shards[
        0
    ].data.shape == (1, 4)


@functools.cache
def small_programs(mesh: tuple[int, ...]) -> PolicyPrograms:
    one = policy("fp32", "small")
    layout = Layout(section(mesh), one.plan, one.model)
    return PolicyPrograms(
        one.model, one.plan, optax.sgd(1.0), temperature=1.0, chunk_tokens=32, layout=layout
    )


@LONG  # in `make test`: tests/unit/test_rl_splits.py, and the meshes above
@pytest.mark.parametrize(
    ("name", "aggregation"),
    [("grpo", "token_mean"), ("gspo", "sequence_mean")],
)
def test_loss_is_the_same_under_every_split_into_microbatches_and_devices(name, aggregation):
    one = policy("fp32", "small")
    algorithm = resolve_algorithm(
        algorithm_section(name=name, loss_aggregation=aggregation), ROW, RunConfig().correction
    )
    found = {}
    for mesh, rows in (((1, 1, 1), 12), ((2, 1, 1), 2), ((2, 2, 2), 8)):
        many = small_programs(mesh)
        state, micro = many.init(one.params), microbatches(rows)[0]
        denominators, total, loss = batching.count_denominators(micro, ROW), None, 0.0
        for batch in micro:
            grads, stats, _ = many.policy_gradient(state, batch, denominators, algorithm)
            total, loss = many.add(total, grads), loss + float(stats["loss"])
        found[mesh, rows] = loss, arrays(total)
    loss, gradients = found.pop(((1, 1, 1), 12))
    assert abs(loss) > 1e-3
    for split, (value, grads) in found.items():
        assert abs(value - loss) <= 2e-6 * abs(loss), split
        for path, grad in grads.items():
            assert norm(grad - gradients[path]) <= 1e-5 * norm(gradients[path]), (split, path)


@pytest.mark.parametrize("tensor", [1, 2])
def test_collectives_are_those_that_are_written(tensor):
    """Codes and scales of seven matrices and the embedding (as input and as head): gathered once, reduced
    once.

    Of split layers besides: the input's codes and scales of o_proj and down_proj, forward and backward, their
    outputs, and the sums of their dX into shards.
    """
    many = programs("fp8_unified", (2, 2, tensor))
    state = many.init(policy("fp8_unified").params)
    micro, algorithm = microbatches(4)
    text = (
        many.trace_gradient(state, micro[0], batching.count_denominators(micro, ROW), algorithm)
        .lower()
        .as_text()
    )
    count = {
        name: len(re.findall(rf'"?stablehlo\.{name}"?', text))
        for name in ("all_gather", "reduce_scatter", "collective_permute")
    }
    split = 2 if tensor > 1 else 0
    assert count == {
        "all_gather": 7 * 2 + 2 + split * (2 * 2 + 1),
        "reduce_scatter": 7 + 2 + split,
        "collective_permute": 0,
    }
    assert text.count("f8E4M3FN") and "all_to_all" not in text


REQUESTS, SAMPLING = (
    [Request(i, [2 + i % 7, 3, 4 + i // 9], 17 * i) for i in range(23)],
    SamplingParams(1.0, 12, (1,), 7),
)
SIZES = {
    "slots": 4,
    "prefill_rows": 2,
    "decode_chunk_tokens": 4,
    "max_prompt_tokens": 8,
    "max_completion_tokens": 12,
    "pad_id": 0,
}


@pytest.fixture
def sampled_by_one(flow: str) -> list[Trajectory]:
    """What an engine on one device samples with the policy of a flow."""
    one = policy(flow)
    single = JaxEngine(one.model, one.plan, **SIZES)
    single.load(one.published, 5)
    return single.generate(REQUESTS, SAMPLING)


def engine_on(
    flow: str, mesh: tuple[int, ...], draft: Lookup | None = None, **changes: Any
) -> DataParallelEngine:
    """An engine on the devices of a mesh, which holds the policy of a flow as version 5."""
    one = policy(flow)
    many = Layout(section(mesh), one.plan, one.model)
    build = functools.partial(JaxEngine, one.model, one.plan, draft=draft, **{**SIZES, **changes})
    engines = DataParallelEngine(lambda copy: build(layout=copy), many.copies(), many.replicate)
    engines.load(jax.device_put(one.published, many.shardings(one.params)), 5)
    return engines


@pytest.mark.parametrize(
    ("flow", "mesh", "draft"),
    [
        pytest.param("bf16", (1, 1, 2), None, marks=LONG),
        pytest.param("fp8_unified", (2, 1, 2), Lookup((0, 3)), marks=LONG),
    ],
)
def test_engine_on_many_devices_samples_what_one_samples(flow, mesh, draft, sampled_by_one):
    engines = engine_on(flow, mesh, draft)
    ours = engines.generate(REQUESTS, SAMPLING)
    assert [t.request_id for t in ours] == list(range(23)) and engines.policy_version == 5
    for a, b in zip(ours, sampled_by_one, strict=True):
        np.testing.assert_array_equal(a.completion_ids, b.completion_ids)
        np.testing.assert_array_equal(a.sampled_logprobs, b.sampled_logprobs)
        assert (a.finish_reason, a.oldest_version) == (b.finish_reason, 5)
    if draft:
        counts, later = engines.counts(), sum(t.sampled_tokens - 1 for t in ours)
        assert 0 < counts["accepted"] < counts["drafted"]
        assert counts["accepted"] + counts["verified"] == later  # each first token is a prefill's
        for engine in engines.engines:  # also in chunks before which slots were refilled
            measured = engine._length._chunks
            assert {k: sum(n for (_, j), n in measured.items() if j == k) >= 2 for k in (0, 3)} == {
                0: True,
                3: True,
            }
    assert engines.generate([], SAMPLING) == []
    engines.close()


@pytest.mark.long
def test_episodes_stream_over_split_layers():
    """The tokens and bits of one device in lockstep; several copies of the policy take no replies."""
    flow = "fp8_unified"
    one, lengths = policy(flow), {"max_prompt_tokens": 15, "max_completion_tokens": 4}
    single = JaxEngine(one.model, one.plan, **{**SIZES, **lengths})
    single.load(one.published, 5)
    engines = engine_on(flow, (1, 1, 2), streams=True, **lengths)
    assert engines.streams and not engine_on(flow, (2, 1, 1), streams=True).streams
    expected = episodes_of(single, one.model.config.vocab_size, 1.0, 16)
    stream = episodes_of(engines, one.model.config.vocab_size, 1.0, 16, turns="stream")
    for a, b in zip(expected, stream, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids) and a.turns == b.turns
        assert np.array_equal(a.logprobs.view(np.int32), b.logprobs.view(np.int32))
    engines.close()


@pytest.mark.long
def test_engine_on_many_devices_scores_as_one():
    flow, mesh = "fp8_unified", (2, 1, 2)
    one, sequences = policy(flow), [[2, 3, 4, 5], [7, 2, 2, 9, 4, 3, 11, 12, 5]]
    single, engines = JaxEngine(one.model, one.plan, **SIZES), engine_on(flow, mesh)
    single.load(one.published, 5)
    for ours, theirs in zip(engines.score(sequences), single.score(sequences), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    engines.close()


def test_degrees_that_cut_a_block_are_refused():
    assert FP8_BLOCKS.weight == (BLOCK, BLOCK)
    assert [shard_axis(shape, 2, True) for shape in ((256, 100), (100, 256), (384, 320), (256,))] == [
        0,
        1,
        None,
        None,
    ]
    assert [shard_axis(shape, 2, False) for shape in ((384, 320), (3, 320), (3, 5))] == [0, 1, None]
    assert fitting_degrees((1024, 384), True) == [1, 2, 3, 4, 8]
    one = SmallPolicy("fp8_unified")
    with pytest.raises(
        UserError,
        match=r"got 2, expected a degree that fits\n  layers.0.mlp.down_proj.weight \(64, 160\): 1\n",
    ):
        Layout(ShardingSection(fsdp=2), one.plan, one.model)
    with pytest.raises(
        UserError,
        match=r"got 8 \(cpu\), expected sharding.data \* sharding.fsdp \* sharding.tensor = 3 \* 4 \* 1 = 12",
    ):
        Layout(ShardingSection(data=3, fsdp=4), one.plan, one.model)
    assert fitting_tensor_degrees(1024, 128, 9) == [1, 2, 4, 8]
    wide = policy("fp8_unified")
    mixed = PrecisionPlan(wide.paths, "fp8_unified", [("*gate_proj*", "bf16"), ("*up_proj*", "bf16")])
    # down_proj reads them in blocks
    with pytest.raises(UserError, match=r"mlp.gate_proj.weight \(512, 512\): 1, 2, 4\n"):
        Layout(ShardingSection(tensor=8), mixed, wide.model)
    with pytest.raises(
        UserError,
        match=r"tensor: shards would cut .*: got 8, .*\n  layers.0.mlp.down_proj.weight \(512, 512\): "
        r"1, 2, 4\n",
    ):
        Layout(ShardingSection(tensor=8), wide.plan, wide.model)
