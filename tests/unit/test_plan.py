"""The planner: its arithmetic against formulas written out by hand,
its bytes against XLA's memory analysis.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jetrl_jax.commands.plan import main, planned_model
from jetrl_jax.config.load import load_config
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.models import flash_attention
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.planning.abstract_run import AbstractRun, on_one_device
from jetrl_jax.planning.check import check
from jetrl_jax.planning.devices import parse_devices
from jetrl_jax.planning.liveness import peak
from jetrl_jax.planning.memory import MemoryPlan, _engine, gradients_apart, shallow_runs, temporaries
from jetrl_jax.planning.traffic import traffic, verify_cost, work
from pallas_kernels.implementations import kernel_jax_problem

ROOT = Path(__file__).resolve().parents[2]
M, K, N = 256, 512, 1024
D, F, HEADS, KV_HEADS, H, V, LAYERS = 512, 1024, 4, 2, 128, 640, 3
SIZES = ModelConfig(
    "qwen3",
    V,
    D,
    F,
    LAYERS,
    HEADS,
    KV_HEADS,
    H,
    4096,
    1e6,
    None,
    1e-6,
    False,
    False,
    True,
    eos_token_ids=(1,),
)
MATRICES = [(HEADS * H, D), (KV_HEADS * H, D), (KV_HEADS * H, D), (D, HEADS * H), (F, D), (F, D), (D, F)]
VECTORS = 2 * D + 2 * H  # of a layer: two norms, those of query and key heads
SMALL = [
    "model.path=nowhere", "numerics.exact=false", "sharding.fsdp=2",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_prompt_tokens=128",
    "rollout.max_completion_tokens=128", "rollout.engine.slots=8", "rollout.engine.prefill_rows=4", "batch.microbatch_tokens=512",
    "batch.logprob_chunk_tokens=128",
]  # fmt: skip


@pytest.fixture(autouse=True)
def new_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are those of a JAX whose cuDNN attention a run takes, whichever is here."""
    monkeypatch.setattr(flash_attention, "FIRST_JAX", (0, 0))


def small(*changes: str) -> RunConfig:
    return load_config(None, [*SMALL, *changes])


def bytes_at_peak(function, *arguments) -> int:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in arguments]
    return peak(jax.make_jaxpr(function)(*shapes)).temporaries


def test_fp8_keys_and_values_take_one_byte_each_and_leave_more_room() -> None:
    """A key and a value of each head and layer; the scales are part of the weights."""
    one_device = ("sharding.fsdp=1", "precision.preset=bf16")
    codes, values = (
        AbstractRun(small(*one_device, f"precision.kv_cache={kind}"), SIZES) for kind in ("fp8", "bf16")
    )
    assert (
        codes.cache_token_bytes == 2 * LAYERS * KV_HEADS * H
        and values.cache_token_bytes == 4 * LAYERS * KV_HEADS * H
    )
    assert on_one_device(codes.state.published) - on_one_device(values.state.published) == 4 * 2 * LAYERS
    assert codes.trace("decode").jaxpr is not None and codes.trace("step").jaxpr is not None


def test_peak_counts_what_lives_between_two_products() -> None:
    def function(x, a, b):
        return jnp.maximum(x @ a, 0.0) @ b

    assert bytes_at_peak(function, (M, K), (K, N), (N, K)) == 4 * M * N


def test_peak_fuses_element_wise_operations_and_drops_dead_code() -> None:
    def function(x):
        jnp.dot(x, x.T)  # read by nobody
        return jnp.sin(x) * 2.0 + x

    assert bytes_at_peak(function, (M, K)) == 0


def test_peak_holds_a_value_until_its_last_reader() -> None:
    def function(x, a, b, c):
        first = x @ a
        return (first @ b) @ c + first

    # `first`, and the product after it
    assert bytes_at_peak(function, (M, K), (K, N), (N, N), (N, N)) == 2 * 4 * M * N


def test_peak_of_a_loop_is_its_state_and_its_body() -> None:
    def function(x, a):
        return jnp.sum(jax.lax.fori_loop(0, 4, lambda _, y: (y @ a) @ a, x))

    # The loop's state, which turns in place, the product between the two of a turn, and the next value of the
    # counter.
    assert bytes_at_peak(function, (M, K), (K, K)) == 2 * 4 * M * K + 4


@pytest.mark.parametrize("layers", [4, 8])
def test_peak_holds_the_layers_inputs_alone_under_checkpoint(layers: int) -> None:
    def layer(x, a):
        return jnp.sin(jnp.sin(x @ a) @ a)

    def total(remat, x, *weights):
        for a in weights:
            x = (jax.checkpoint(layer) if remat else layer)(x, a)
        return jnp.sum(x)

    def held(remat, layers):
        gradient = jax.grad(
            lambda x, *weights: total(remat, x, *weights), argnums=tuple(range(1, layers + 1))
        )
        return bytes_at_peak(gradient, (M, K), *[(K, K)] * layers)

    one = 4 * M * K
    assert held(True, layers + 1) - held(True, layers) == one  # a layer's input
    assert held(False, layers + 1) - held(False, layers) == 4 * one  # both products and both sines


def test_phases_match_formulas_by_hand() -> None:
    config = small()
    plan = MemoryPlan(config, SIZES, 0)
    matrices = sum(rows * columns for rows, columns in MATRICES)
    masters = 4 * (LAYERS * (matrices // 2 + VECTORS) + 2 * V * D // 2 + D)
    codes = matrices // 2 + 4 * sum(rows // 128 * columns // 128 for rows, columns in MATRICES) // 2
    published = LAYERS * (codes + 2 * VECTORS) + 2 * (2 * V * D // 2 + D)
    whole = LAYERS * (2 * codes + 2 * VECTORS) + 2 * (2 * V * D + D)
    # keys and values in BF16; keys, token, position, remaining
    slots = 8 * LAYERS * 2 * 256 * KV_HEADS * H * 2 + 8 * (2 + 1 + 1 + 1) * 4
    phases = {phase.name: phase.bytes for phase in plan.phases}
    assert list(phases) == ["rollout", "gradient", "update", "sync"]
    for bytes_of in phases.values():
        assert bytes_of["FP32 masters"] == masters
        assert bytes_of["moments"] == 2 * masters + 2 * 4  # and the steps that Adam and the schedule count
        assert bytes_of["published codes"] == published
        assert bytes_of["engine's weights"] == whole
        assert bytes_of["KV cache"] == slots
    assert phases["gradient"]["gradient"] == phases["gradient"]["gradients' sum"] == masters
    assert phases["sync"]["engine's next weights"] == whole
    assert phases["update"]["temporaries"] == 4 * max(F * D, V * D) // 2


def test_adapters_alone_are_held_in_fp32_and_their_base_is_the_reference() -> None:
    """The base is held once, as it is published; no program multiplies a gradient of it."""
    changes = ["sharding.fsdp=1", "lora={rank: 8, alpha: 8}", "algorithm.kl_coef=0.1"]
    plan = MemoryPlan(small(*changes), SIZES, 0)
    adapters = LAYERS * sum(8 * (rows + columns) for rows, columns in MATRICES)
    codes = sum(rows * columns + 4 * (rows // 128) * (columns // 128) for rows, columns in MATRICES)
    base = LAYERS * (codes + 2 * VECTORS) + 2 * (2 * V * D + D)
    for phase in plan.phases:
        assert phase.bytes["FP32 masters"] == 4 * adapters and phase.bytes["moments"] == 8 * adapters + 2 * 4
        assert phase.bytes["published codes"] == base + 2 * adapters and "reference" not in phase.bytes
    (gradient,) = (phase for phase in plan.phases if phase.name == "gradient")
    assert gradient.bytes["gradient"] == 4 * adapters
    names = {row.name for row in work(plan.run)}
    assert "FP8 FProp and DGrad" in names and "FP8 WGrad" not in names


def test_one_microbatch_needs_no_sum_and_one_device_no_copy() -> None:
    one = MemoryPlan(small("sharding.fsdp=1", "batch.microbatch_tokens=4096"), SIZES, 0)
    assert {"gradients' sum", "engine's weights"}.isdisjoint(
        {item for phase in one.phases for item in phase.bytes}
    )
    assert "sync" not in [phase.name for phase in one.phases]


def test_gradients_that_kernels_add_have_no_place_of_their_own() -> None:
    """On one device the sum has those of FP8 matrices from the start: embedding, head and norms are apart."""
    one, two = (AbstractRun(small(f"sharding.fsdp={degree}"), SIZES) for degree in (1, 2))
    assert gradients_apart(one) == 4 * (2 * V * D + D + LAYERS * VECTORS)
    assert gradients_apart(two) == on_one_device(two.state.params)


@pytest.mark.parametrize("changes", [["algorithm.minibatches=2"], ["algorithm.kl_coef=0.1"]])
def test_scoring_is_there_where_the_loss_reads_it(changes: list[str]) -> None:
    assert "scoring" in [phase.name for phase in MemoryPlan(small(*changes), SIZES, 0).phases]


@pytest.mark.parametrize(
    ("program", "rows", "length"), [("gradient", 2, 1536), ("logprobs", 2, 1536), ("prefill", 16, 768)]
)
def test_no_scores_are_counted_where_cudnn_computes_attention(program: str, rows: int, length: int) -> None:
    """Rows so long that scores are the largest arrays: what is left of [T, T] is a mask of one head, in
    prefill nothing.
    """
    long = [
        "rollout.max_prompt_tokens=768",
        "rollout.max_completion_tokens=768",
        "rollout.engine.prefill_rows=16",
    ]
    long += ["batch.microbatch_tokens=3072", "sharding.fsdp=1"]
    found, squares = {}, {}
    for attention in ("auto", "xla"):
        run = AbstractRun(
            small(*long, f"numerics.attention={attention}"), dataclasses.replace(SIZES, num_layers=2)
        )
        found[attention] = peak(run.trace(program).jaxpr)
        squares[attention] = sum(
            value.size for value in found[attention].live if value.shape[-2:] == (length, length)
        )
    assert squares["xla"] >= 4 * HEADS * rows * length * length
    # as BF16 and as bits
    assert squares["auto"] <= (0 if program == "prefill" else (2 + 1) * rows * length * length)
    assert found["xla"].temporaries - found["auto"].temporaries >= 0.5 * squares["xla"]


@pytest.mark.parametrize("program", ["gradient", "prefill", "decode"])
def test_no_scores_are_counted_where_the_kernels_compute_attention(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exact run on a Hopper GPU; packed rows have no mask either."""
    monkeypatch.setattr(flash_attention, "kernel_jax_problem", lambda: None)
    run = AbstractRun(
        small("numerics.exact=true", "sharding.fsdp=1"), dataclasses.replace(SIZES, num_layers=1, head_dim=64)
    )
    assert (run.attention.name, run.model.numerics.choices.attention.name) == ("mosaic_gpu", "planned")
    jaxpr = run.trace(program).jaxpr
    assert flash_attention.PLANNED in str(jaxpr)
    length = 128 if program == "prefill" else 256
    assert not [value for value in peak(jaxpr).live if value.shape[-2:] == (length, length)]


def test_exact_runs_of_other_sizes_and_xla_by_name_are_planned_with_scores() -> None:
    assert [
        AbstractRun(small(*changes), SIZES).model.numerics.choices.attention.name
        for changes in (
            [],
            ["numerics.attention=xla"],
            ["numerics.exact=true"],
            ["precision.preset=fp32"],
            ["precision.preset=fp16"],
        )
    ] == ["planned", "xla", "xla", "xla", "planned"]


def test_a_jax_that_is_too_old_for_cudnn_is_planned_with_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its run would take."""
    monkeypatch.setattr(flash_attention, "FIRST_JAX", (99, 1))
    run = AbstractRun(small(), SIZES)
    assert (
        run.model.numerics.choices.attention.name == "xla"
        and "expected 99.1 or newer" in run.attention.reason
    )
    with pytest.raises(
        UserError,
        match=r"numerics\.attention: cannot run: got 'cudnn', but JAX is .*, expected 99\.1 or newer",
    ):
        AbstractRun(small("numerics.attention=cudnn"), SIZES)


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_temporaries_of_a_deep_model_are_drawn_from_shallow_ones(remat: str) -> None:
    config, deep = small(f"batch.remat={remat}"), dataclasses.replace(SIZES, num_layers=6)
    drawn = sum(temporaries(shallow_runs(config, deep), 6, "gradient").values())
    traced = sum(temporaries((AbstractRun(config, deep),), 6, "gradient").values())
    assert drawn == pytest.approx(traced, rel=0.01)


@pytest.mark.long
def test_what_fits_is_the_largest_that_fits() -> None:
    sizes = dataclasses.replace(SIZES, num_layers=1)
    plan = MemoryPlan(small(), sizes, 0)
    budget = plan.fullest.total
    tokens, length = plan.largest_microbatch(budget), plan.longest_completion(budget)
    assert tokens >= 512 and length >= 128
    for change, size in (
        (f"batch.microbatch_tokens={tokens + 256}", "microbatch"),
        (f"batch.microbatch_tokens={tokens}", "fits"),
    ):
        total = MemoryPlan(small(change), sizes, 0).fullest.total
        assert (total > budget) == (size == "microbatch"), size
    assert plan.largest_microbatch(1) == plan.longest_completion(1) == 0


def test_work_and_traffic_match_formulas_by_hand() -> None:
    config = small("batch.remat=layer")
    run = AbstractRun(config, SIZES)
    tokens = 4 * 4 * 256 / 2  # of one device: every sequence takes a row
    linear = 2 * LAYERS * sum(rows * columns for rows, columns in MATRICES) * tokens
    amounts = {row.name: row.amount for row in work(run)}
    assert amounts["FP8 FProp and DGrad"] == 3 * linear  # forward, forward again, backward
    assert amounts["FP8 WGrad"] == linear
    assert amounts["head, backward"] == 3 * 2 * 2 * V * D * tokens  # in three parts
    product = 2 * 256 * HEADS * H * LAYERS * tokens
    # the backward has the scores once more
    assert amounts["attention, the causal half"] == (2 + 2 + 5) * product / 2
    xla = {
        row.name: row.amount
        for row in work(AbstractRun(small("batch.remat=layer", "numerics.attention=xla"), SIZES))
    }
    assert xla["attention, the whole square"] == (2 + 2 + 4) * product
    codes = LAYERS * sum(rows * columns + 4 * (rows // 128) * (columns // 128) for rows, columns in MATRICES)
    microbatches = 4
    sent = {row.name: row.amount for row in traffic(run, (run,))}
    # codes twice, the half that others hold
    assert sent["gradient: all_gather"] == microbatches * (2 * codes + 2 * 2 * V * D) / 2
    matrices = LAYERS * sum(rows * columns for rows, columns in MATRICES) + 2 * V * D
    assert sent["gradient: reduce_scatter"] == microbatches * 4 * matrices / 2


def test_a_draft_head_and_the_cost_of_several_positions_match_formulas_by_hand() -> None:
    lengths = ["rollout.max_prompt_tokens=8", "rollout.max_completion_tokens=8", "rollout.engine.slots=4096"]
    changes = [*lengths, "sharding.fsdp=1", "rollout.engine.speculation={kind: head, lengths: [0, 3]}"]
    run = AbstractRun(small(*changes), dataclasses.replace(SIZES, num_layers=4))
    assert run.drafter is not None
    layer = 2 * D * (HEADS + 2 * KV_HEADS) * H + HEADS * H * D + 3 * F * D
    parameters = layer + 3 * D * D + V * D + 4 * D
    held = on_one_device((run.drafter.params, run.drafter.moments))
    assert held == 3 * 4 * parameters + 4  # master, two moments, Adam's count of steps
    matrices = 4 * sum(rows * columns for rows, columns in MATRICES)
    position = 2 * 4096 * (matrices / 1164e12 + V * D / 688e12)
    reads = (on_one_device(run.engine_weights()) + on_one_device(run.slots()) / 2) / 2.5e12
    assert verify_cost(run) == pytest.approx(4 * position / max(reads, position)) and 4 * position > reads
    held, cache = on_one_device(run.slots().draft), _engine(run, 0)["KV cache"]
    assert held == 4096 * (2 * 24 * HEADS * H * 2 + (1 + 3) * 4)  # keys, values; where they begin, guesses
    assert cache > held + 4096 * 4 * 2 * 24 * KV_HEADS * H * 2


def test_devices_are_read_and_others_refused() -> None:
    assert parse_devices("8xH100").memory_bytes == 84_942_979_072
    assert parse_devices("2x0.5GiB").memory_bytes == 2**29
    for text in ("H100", "0xH100", "8xV100", "8x0GiB", "8x80GB"):
        with pytest.raises(UserError, match="--devices: not understood"):
            parse_devices(text)


def test_command_refuses_another_mesh_and_a_missing_config_json(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the product of the degrees in sharding, 1"):
        main(["--devices", "8xH100"])
    with pytest.raises(UserError, match=r"no config\.json"):
        main(["--devices", "1xH100", "--model", str(tmp_path)])


def test_command_prints_a_plan_and_stops_where_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 256, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "intermediate_size": 512}
    words = ["--no-search", "--set", "sharding.fsdp=2"]
    words += [word for name, size in sizes.items() for word in ("--set", f"model.{name}={size}")]
    assert main([*words, "--set", "precision.preset=bf16", "--devices", "2x80GiB"]) == 0
    printed = capsys.readouterr().out
    chosen = "xla (auto: mosaic_gpu cannot run: JAX" if kernel_jax_problem() else "mosaic_gpu (auto: a GPU"
    assert "gradient" in printed and f"attention: {chosen}" in printed
    with pytest.raises(RunStopped, match="does not fit"):
        main([*words, "--set", "precision.preset=bf16", "--devices", "2x0.01GiB"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["8b", "32b"])
def test_programs_of_the_large_configs_compile_ahead_of_time(name: str) -> None:
    """The real widths, vocabulary and mesh at one layer: arguments and outputs are XLA's, the fields of a
    batch apart that the algorithm does not read and XLA does not take.
    """
    config = load_config(ROOT / f"configs/qwen3_{name}_8xh100.yaml", [])
    sizes = dataclasses.replace(planned_model(config, ROOT / f"configs/models/qwen3_{name}"), num_layers=1)
    fields = 12 * 4 * config.batch.microbatch_tokens
    for program, plan, xla in check(config, sizes, None):
        for what in ("arguments", "outputs", "alias"):
            assert getattr(plan, what) == pytest.approx(getattr(xla, what), abs=fields), (program, what)


def test_a_vllm_that_sleeps_holds_its_share_in_the_rollout_alone() -> None:
    config = [change for change in SMALL if not change.startswith(("sharding", "rollout.engine"))]
    config += ["rollout.engine=vllm", "precision.preset=bf16", "rollout.engine.gpu_memory_utilization=0.25"]
    sizes = dataclasses.replace(SIZES, num_layers=1)
    asleep, awake = (
        MemoryPlan(load_config(None, [*config, f"rollout.engine.sleep={now}"]), sizes, 1 << 30).phases
        for now in ("null", "false")
    )
    assert (
        [phase.name for phase in asleep]
        == [phase.name for phase in awake]
        == ["rollout", "gradient", "update"]
    )
    assert [phase.bytes.get("vLLM") for phase in asleep] == [1 << 28, None, None]
    assert [phase.bytes.get("vLLM") for phase in awake] == [1 << 28] * 3
