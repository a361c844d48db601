"""A policy on meshes of (fake) devices against the same policy on one device: the same bits forward, FP32 roundoff backward."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jetrl_jax.config_sharding import FP8_BLOCK, ShardingSection, fitting_degrees, shard_axis
from jetrl_jax.errors import UserError
from jetrl_jax.precision import named_params
from jetrl_jax.rl import batching
from jetrl_jax.rl.algorithm import ResolvedAlgorithm, resolve_algorithm
from jetrl_jax.rollout.data_parallel import DataParallelEngine
from jetrl_jax.rollout.engine import Request, SamplingParams
from jetrl_jax.rollout.jax_engine import JaxEngine
from jetrl_jax.sharding import Layout
from jetrl_jax.training.step import PolicyPrograms, TrainState
from pallas_kernels import ScaledArray
from pallas_kernels.formats import BLOCK
from tests.parity.small_policy import CONFIG, SmallPolicy, trajectories

# Every degree up to 4 fits; blocks of 64 rows of `embed_tokens`, and a partial block along the axis that is not split.
WIDE = dataclasses.replace(CONFIG, hidden_size=512, intermediate_size=672, num_heads=4, num_kv_heads=4, head_dim=128)
ROW, ROWS_EACH = 24, 1
LENGTHS = [(3, 9), (5, 17), (2, 4), (8, 8), (4, 20), (1, 1), (6, 11), (7, 16), (2, 21), (3, 3), (9, 12), (5, 5)]
FLOWS = ["fp32", "bf16", "fp16", "fp8_unified", "fp8_forward", "fp8_rollout_only"]
MESHES = [(2, 1), (1, 2), (1, 4), (4, 2)]


@functools.cache
def policy(flow: str) -> SmallPolicy:
    return SmallPolicy(flow, WIDE)


def programs(flow: str, mesh: tuple[int, int] | None, remat: bool = False) -> PolicyPrograms:
    one = policy(flow)
    model = nnx.merge(one.graphdef, one.params)
    model.remat = remat
    layout = None if mesh is None else Layout(ShardingSection(data=mesh[0], fsdp=mesh[1]), one.plan, one.params)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))
    return PolicyPrograms(model, one.plan, optimizer, temperature=0.7, chunk_tokens=16, layout=layout)


def microbatches(rows: int) -> tuple[list[batching.TrainBatch], ResolvedAlgorithm]:
    """Twelve ragged trajectories in microbatches of `rows` rows."""
    from jetrl_jax.config import RunConfig

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
def reference(flow: str) -> tuple[np.ndarray, dict[str, np.ndarray], float, dict[str, np.ndarray]]:
    """On one device, in microbatches of a device's rows: logprobs, gradient, loss, and the masters after an update."""
    one = programs(flow, None)
    state = one.init(policy(flow).params)
    batch = microbatches(8)[0][0]
    logprobs = one.logprobs(one.frozen(state), batch)
    grads, loss = gradient(one, state, ROWS_EACH)
    gradients = arrays(grads)  # before their buffers are consumed
    state, _ = one.update(state, grads)
    return logprobs, gradients, loss, arrays(state.params)


def arrays(state: nnx.State) -> dict[str, np.ndarray]:
    return {path: np.asarray(value) for path, value in named_params(state)}


@pytest.mark.parametrize(
    ("flow", "mesh", "remat"), [(flow, (2, 2), flow == "bf16") for flow in FLOWS] + [("fp8_unified", mesh, mesh[1] > 1) for mesh in MESHES]
)
def test_mesh_equals_one_device(flow, mesh, remat):
    logprobs, gradients, loss, masters = reference(flow)
    many = programs(flow, mesh, remat)
    state = many.init(policy(flow).params)
    np.testing.assert_array_equal(many.logprobs(many.frozen(state), microbatches(8)[0][0]), logprobs)
    grads, many_loss = gradient(many, state, ROWS_EACH * mesh[0] * mesh[1])
    assert abs(many_loss - loss) <= 1e-6
    for path, value in arrays(grads).items():
        assert np.linalg.norm(value - gradients[path]) <= 1e-6 * np.linalg.norm(gradients[path]), path
    state, report = many.update(state, grads)
    assert not report.nonfinite
    whole = math_norm(gradients)
    assert abs(report.grad_norm - whole) <= 1e-6 * whole
    after = arrays(state.params)
    moved = {path: np.abs(after[path] - np.asarray(value)).max() for path, value in named_params(policy(flow).params)}
    assert min(moved.values()) > 1e-4  # a step of AdamW moves by about the learning rate
    for path, value in after.items():  # a tiny gradient may have another sign: then by twice the learning rate at most
        difference = np.abs(value - masters[path])
        assert difference.max() <= 2.2e-3 and np.mean(difference > 1e-6) < 1e-3, path
    check_codes(policy(flow), state)


def math_norm(gradients: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.float64(value) ** 2) for value in gradients.values())))


def check_codes(one: SmallPolicy, state: TrainState) -> None:
    """Each device's codes and scales are the slices of those that one device makes of the whole masters."""
    masters = jax.tree.map(lambda value: jax.numpy.asarray(np.asarray(value)), state.params)
    for (path, value), (_, sharded) in zip(named_params(one.plan.publish(masters)), named_params(state.published), strict=True):
        pairs = [(value, sharded)] if not isinstance(value, ScaledArray) else [(value.qvalue, sharded.qvalue), (value.scale, sharded.scale)]
        for whole, split in pairs:
            for shard in split.addressable_shards:
                slices = np.asarray(whole)[shard.index]
                np.testing.assert_array_equal(np.asarray(shard.data).view(np.uint8), np.ascontiguousarray(slices).view(np.uint8), path)


def test_state_lies_where_the_layout_says():
    many = programs("fp8_unified", (2, 4))
    state = many.init(policy("fp8_unified").params)
    sizes = {path: (value.size, value.addressable_shards[0].data.size) for path, value in named_params(state.params)}
    assert all(whole == 4 * part for path, (whole, part) in sizes.items() if many.layout.axes[path] is not None)
    assert {path for path, axis in many.layout.axes.items() if axis is None} == {path for path in sizes if "norm" in path}
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim == 2]
    assert len(moments) == 2 * sum(axis is not None for axis in many.layout.axes.values())
    assert all(leaf.size == 4 * leaf.addressable_shards[0].data.size for leaf in moments)
    codes = dict(named_params(state.published))["layers.0.mlp.up_proj.weight"]
    assert codes.qvalue.addressable_shards[0].data.shape == (672, 128) and codes.scale.addressable_shards[0].data.shape == (6, 1)


def test_collectives_are_those_that_are_written():
    """Codes and scales of seven matrices and the embedding (as input and as head): gathered once, reduced once."""
    many = programs("fp8_unified", (2, 2))
    state = many.init(policy("fp8_unified").params)
    micro, algorithm = microbatches(4)
    text = many.lower_gradient(state, micro[0], batching.count_denominators(micro, ROW), algorithm).as_text()
    count = {name: len(re.findall(rf'"?stablehlo\.{name}"?', text)) for name in ("all_gather", "reduce_scatter", "collective_permute")}
    assert count == {"all_gather": 7 * 2 + 2, "reduce_scatter": 7 + 2, "collective_permute": 0}
    assert text.count("f8E4M3FN") and "all_to_all" not in text


@pytest.mark.parametrize("flow", ["bf16", "fp8_unified"])
def test_engine_on_many_devices_samples_what_one_samples(flow):
    one = policy(flow)
    sizes = {"slots": 4, "prefill_rows": 2, "decode_chunk_tokens": 4, "max_prompt_tokens": 8, "max_completion_tokens": 12, "pad_id": 0}
    build = functools.partial(JaxEngine, one.model, one.plan, **sizes)
    many = programs(flow, (1, 4))
    state = many.init(one.params)
    assert many.layout is not None
    engines = DataParallelEngine(build, list(many.layout.mesh.devices.flat)[:3], lambda tree: many.layout.replicate(tree)[:3])
    single = build()
    engines.load_weights(state.published, 5)
    single.load_weights(one.published, 5)
    requests = [Request(i, [2 + i % 7, 3, 4 + i // 9], 17 * i) for i in range(23)]
    sampling = SamplingParams(1.0, 12, (1,), 7)
    ours, theirs = engines.generate(requests, sampling), single.generate(requests, sampling)
    assert [t.request_id for t in ours] == list(range(23)) and engines.policy_version == 5
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.completion_ids, b.completion_ids)
        np.testing.assert_array_equal(a.rollout_logprobs, b.rollout_logprobs)
        assert (a.finish_reason, a.policy_version) == (b.finish_reason, 5)
    assert engines.generate([], sampling) == []
    engines.close()


def test_degrees_that_cut_a_block_are_refused():
    assert FP8_BLOCK == BLOCK
    assert [shard_axis(shape, 2, True) for shape in ((256, 100), (100, 256), (384, 320), (256,))] == [0, 1, None, None]
    assert [shard_axis(shape, 2, False) for shape in ((384, 320), (3, 320), (3, 5))] == [0, 1, None]
    assert fitting_degrees((1024, 384), True) == [1, 2, 3, 4, 8]
    one = SmallPolicy("fp8_unified")
    with pytest.raises(UserError, match=r"got 2, expected a degree that fits\n  layers.0.mlp.down_proj.weight \(64, 160\): 1\n"):
        Layout(ShardingSection(fsdp=2), one.plan, one.params)
    with pytest.raises(UserError, match=r"got 8 \(cpu\), expected sharding.data \* sharding.fsdp = 3 \* 4 = 12"):
        Layout(ShardingSection(data=3, fsdp=4), one.plan, one.params)
