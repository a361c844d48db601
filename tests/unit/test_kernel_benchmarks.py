"""What of the kernels' benchmarks and tuner needs no GPU: protocols on a pretended clock, tables, files and
refusals.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench, measure, tune
from pallas_kernels.attention import bench as attention_bench
from pallas_kernels.gemm.config import TRAINING, choose, load_table
from pallas_kernels.implementations import gpu_problem
from pallas_kernels.measure import Timing, copies_beyond_cache, markdown, steady_state
from pallas_kernels.quantize import bench as quantize_bench
from tests.benchmarks import kernel_layer

NAMED = {"layer": "decoder layer", "attention": "attention"}
"""Where a row is not named after a linear layer."""

needs_no_gpu = pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU, and the command would run")


def pretended(seconds: float, log: list[tuple[float, int]]) -> Callable[[int], float]:
    """A contender whose calls take exactly `seconds` and are written down."""

    def run(calls: int) -> float:
        log.append((seconds, calls))
        return seconds * calls

    return run


def test_steady_state_warms_up_then_times_bursts_of_every_contender() -> None:
    log: list[tuple[float, int]] = []
    timings = steady_state({"slow": pretended(0.3, log), "fast": pretended(1e-4, log)})
    assert timings["slow"].seconds == pytest.approx([0.3] * 6) and timings["fast"].seconds == pytest.approx(
        [1e-4] * 6
    )
    fast = [calls for seconds, calls in log if seconds == 1e-4]
    bursts = [index for index, calls in enumerate(fast) if calls == pytest.approx(600, abs=1)]
    assert len(bursts) == 6
    for first in (bursts[0], bursts[3]):  # of each cycle
        assert fast[first - 1] * 1e-4 >= measure.LOAD_S * 0.99


def test_timing_gives_median_and_spread() -> None:
    timing = Timing((3.0, 1.0, 2.0, 4.0, 2.5))
    assert timing.median == 2.5 and timing.spread == pytest.approx(1.5 / 2.5)


def test_copies_exceed_the_cache_twice() -> None:
    assert copies_beyond_cache(1 << 40) == 2
    assert (copies_beyond_cache(16 << 20) - 1) * (16 << 20) >= 2 * measure.L2_BYTES


def test_jax_contender_makes_every_call() -> None:
    calls: list[float] = []

    def function(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: calls.append(float(value)), x)
        return x + 1

    run = measure.jax_contender(function, jnp.float32(2))
    assert run(5) > 0
    jax.effects_barrier()
    assert calls == [2.0] * 6  # one before the clock starts


def test_markdown_has_a_line_for_each_key_and_dashes_for_gaps() -> None:
    rows = [
        {"layer": "o", "M": 1, "contender": "ours", "figure": "5"},
        {"layer": "o", "M": 1, "contender": "theirs", "figure": "6"},
        {"layer": "o", "M": 64, "contender": "ours", "figure": "7"},
    ]
    expected = [
        "| layer | M | ours | theirs |",
        "|---|---|---|---|",
        "| o | 1 | 5 | 6 |",
        "| o | 64 | 7 | - |",
    ]
    assert markdown(rows, ["layer", "M"], "contender", "figure").splitlines() == expected


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small layer, the reference instead of the kernel, short bursts, no CUPTI, and a GPU nobody asks
    for.
    """
    monkeypatch.setattr(bench, "LAYERS", {"tiny": (128, 256)})
    monkeypatch.setattr(bench, "IMPLEMENTATION", "xla")
    monkeypatch.setattr(quantize_bench, "KERNEL", "xla")
    monkeypatch.setattr(quantize_bench, "KERNEL_WIDTHS", (256,))
    sizes = {"HEADS": 2, "KV_HEADS": 1, "WIDTH": 64, "SEQUENCES": 2, "CACHE_TOKENS": (16,)}
    for name, value in ({"KERNEL": "xla"} | sizes).items():
        monkeypatch.setattr(attention_bench, name, value)
    call = jax.nn.dot_product_attention

    def on_cpu(*arrays: jax.Array, implementation: str, **options) -> jax.Array:
        assert implementation == "cudnn"
        return call(*(x.astype(jnp.float32) for x in arrays), **options).astype(arrays[0].dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_cpu)
    monkeypatch.setattr(measure, "LOAD_S", 1e-3)
    monkeypatch.setattr(measure, "BURST_S", 1e-4)
    monkeypatch.setattr(
        bench,
        "cold_kernels",
        lambda function, left, rights: Timing((float(function(left, rights[0]).size) * 1e-6,)),
    )
    monkeypatch.setattr(bench, "copies_beyond_cache", lambda nbytes: 2)
    monkeypatch.setattr(bench, "require_gpu", lambda command: None)


@pytest.mark.parametrize(
    ("what", "sites", "contenders"),
    [
        (
            "gemm",
            ["fprop", "dgrad", "wgrad 1x128 x 1x128", "wgrad 1x128 x 128x128"],
            ["mosaic deepgemm", "mosaic bf16", "jax bf16"],
        ),
        ("decode", ["fprop"], ["mosaic", "mosaic bf16", "jax bf16", "rival"]),
        ("linear", ["linear"], ["fp8 1x128 x 1x128", "fp8 1x128 x 128x128", "jax bf16"]),
        ("layer", ["layer"], ["rival", "other"]),
        (
            "attention",
            ["attention forward", "attention forward and backward", "attention decode"],
            ["mosaic", "cudnn"],
        ),
        (
            "quantize",
            ["row 1x128", "row + column", "weight 128x128 + transpose", "SiLU * up", "RMSNorm(x)"],
            ["mosaic", "xla"],
        ),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_benchmark_writes_every_site_and_contender(
    what: str, sites: list, contenders: list, tmp_path: Path, monkeypatch, capsys
) -> None:
    rivals = tmp_path / "rivals.py"
    rivals.write_text(
        "from pallas_kernels.measure import Timing\ndef gemm(m, n, k): return {}\ndef decode(m, n, k): "
        "return {'rival': Timing((1e-6,))}\n"
        "def layer(tokens): return {name: lambda calls: calls * 1e-4 for name in ('rival', 'other')}\n"
    )
    out = tmp_path / "out.json"
    monkeypatch.setattr(bench, "parse", lambda arguments, parse=bench.parse: _with_layers(parse(arguments)))
    bench.main(
        [
            what,
            "--rows",
            "16",
            "--out",
            str(out),
            *([] if (what, "rivals") in bench.NO_EFFECT else ["--rivals", str(rivals)]),
        ]
    )
    report = json.loads(out.read_text())
    assert (
        report["command"].startswith(f"python -m pallas_kernels.bench {what} --rows 16")
        and "jax" in report["environment"]
    )
    assert {(row["site"], row["contender"]) for row in report["rows"]} >= {
        (site, name) for site in sites for name in contenders
    }
    assert f"| {sites[0]} | {NAMED.get(what, 'tiny')} | 16 |" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny")
def test_figures_are_written_as_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: object):
        yield bench._row("fprop", "tiny", 16, "mosaic", Timing((1e-6,)), "1")
        raise RuntimeError("the power went")

    monkeypatch.setitem(bench.BENCHMARKS, "gemm", rows)
    with pytest.raises(RuntimeError, match="the power went"):
        bench.main(["gemm", "--out", str(tmp_path / "out.json")])
    assert [row["contender"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]] == ["mosaic"]


def _with_layers(options):
    options.layers = ["tiny"]
    return options


def test_gemm_benchmark_counts_two_operations_for_each_product(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench, "steady_state", lambda contenders: {name: Timing((1e-6,)) for name in contenders}
    )
    row = next(bench.bench_gemm(["tiny"], [16], None))
    assert row["tflops"] == pytest.approx(2 * 16 * 128 * 256 / 1e-6 / 1e12, abs=1e-4)


def test_fp8_layer_of_the_benchmark_computes_what_the_bf16_layer_does(tiny: None) -> None:
    """Relative to the whole: Gaussian operands in FP8 make an error of about 3.7 %."""
    arrays = (
        bench.random_matrix(256, 256, 0),
        bench.random_matrix(128, 256, 1),
        bench.random_matrix(256, 128, 2),
    )
    for block in (bench.COLUMNS, bench.SQUARE):
        for ours, theirs in zip(bench._fp8_layer(block)(*arrays), bench._bf16_layer(*arrays), strict=True):
            ours, theirs = (np.asarray(x.astype(jnp.float32)) for x in (ours, theirs))
            assert ours.shape == theirs.shape
            assert np.linalg.norm(ours - theirs) < 0.045 * np.linalg.norm(theirs)


@pytest.fixture
def small_layer() -> dict[str, tuple]:
    """{flow: (function, its arguments)} of a small Qwen3 layer."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_heads": 1, "num_kv_heads": 1}
    config = dataclasses.replace(kernel_layer.read_config(kernel_layer.MODEL), **sizes)
    return {name: kernel_layer.program(config, 64, *flow) for name, flow in kernel_layer.FLOWS.items()}


def test_layer_of_the_benchmark_traces_in_every_flow(small_layer: dict[str, tuple]) -> None:
    for function, *arguments in small_layer.values():
        out, masters, x, residual = jax.eval_shape(function, *arguments)
        assert [value.shape for value in (*out, x, residual)] == [(1, 64, 128)] * 4
        assert [value.shape for value in jax.tree.leaves(masters)] == [
            value.shape for value in jax.tree.leaves(arguments[0])
        ]
        assert {value.dtype.name for value in jax.tree.leaves(masters)} == {"float32"}


@pytest.mark.long
def test_layer_of_the_benchmark_in_fp8_computes_what_bf16_does(small_layer: dict[str, tuple]) -> None:
    """Relative to the whole of each output and gradient."""
    runs = (small_layer[name] for name in ("fp8, wgrad block", "jax bf16"))
    ours, theirs = (jax.tree.leaves(jax.jit(function)(*arguments)) for function, *arguments in runs)
    for one, other in zip(ours, theirs, strict=True):
        one, other = (np.asarray(value.astype(jnp.float32)) for value in (one, other))
        assert np.linalg.norm(one - other) < 0.15 * np.linalg.norm(other)


def test_layer_benchmark_takes_whole_sequences_and_a_file() -> None:
    with pytest.raises(
        ValueError, match="layer: not whole sequences: got 5000 tokens, expected a multiple of 4096"
    ):
        kernel_layer.program(kernel_layer.read_config(kernel_layer.MODEL), 5000, "bf16", "dual")
    with pytest.raises(SystemExit):
        bench.parse(["layer"])


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["layer", "--layers", "o", "--rivals", "f.py"], "layers"),
        (["linear", "--rivals", "f.py"], "rivals"),
        (["quantize", "--rivals", "f.py"], "rivals"),
        (["attention", "--layers", "o"], "layers"),
        (["attention", "--rivals", "f.py"], "rivals"),
    ],
)
def test_an_option_without_effect_is_refused(
    arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    assert (
        end.value.code == 2
        and f"{arguments[0]}: an option without effect: got --{option}" in capsys.readouterr().err
    )


@needs_no_gpu
@pytest.mark.parametrize("main", [lambda: bench.main(["gemm"]), lambda: tune.main([])], ids=["bench", "tune"])
def test_commands_refuse_without_a_gpu_in_one_line(
    main: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main()
    error = capsys.readouterr().err
    assert (
        end.value.code == 2
        and error.count("\n") == 1
        and "needs a GPU" in error
        and "platform is 'cpu'" in error
    )


def test_load_rivals_raises_on_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"load_rivals: no Python file: got .*nothing\.py"):
        bench.load_rivals(tmp_path / "nothing.py", "gemm")


def test_load_rivals_raises_on_a_file_without_rivals_in_this_benchmark(tmp_path: Path) -> None:
    (tmp_path / "rivals.py").write_text("def gemm(m, n, k): return {}\n")
    assert bench.load_rivals(tmp_path / "rivals.py", "gemm").gemm(1, 2, 3) == {}
    with pytest.raises(ValueError, match=r"no rivals in decode: got .*rivals\.py without a function decode"):
        bench.load_rivals(tmp_path / "rivals.py", "decode")


# --------------------------------------------------------------------------------------------------------------- tuner


def test_tuner_measures_distinct_sizes_and_candidates() -> None:
    sizes = list(tune.sizes())
    keys = [(limit, n, None if per_column else k, per_column) for _, limit, n, k, per_column in sizes]
    assert len(set(keys)) == len(keys)
    assert {size[2:4] for size in sizes} >= set(bench.LAYERS.values())
    assert set(sizes) == {size for layer in bench.LAYERS for size in tune.sizes([layer])}
    assert {size[2:4] for size in tune.sizes(["down"])} == {
        (4096, 12288),
        (12288, 4096),
        (12288, bench.TRAINING_ROWS[0]),
    }
    for m, _, _, _, per_column in sizes:
        candidates = tune.candidates(m, per_column)
        assert len(set(candidates)) == len(candidates) >= 5
        assert not any(candidate.swap and per_column for candidate in candidates)


def test_table_of_the_tuner_is_what_choose_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    fast = tune.candidates(8192, False)[-1]
    rows = [
        tune.entry(tune.EVERY_ROW, 640, 256, False, fast, 1e-3),
        tune.entry(640, 256, 8192, True, tune.candidates(1, True)[0], 1e-3),
    ]
    tune.write_table(path, rows, {"command": "a command"})
    table = load_table(path)
    assert table == {
        (tune.EVERY_ROW, 640, 256, False): fast,
        (640, 256, None, True): tune.candidates(1, True)[0],
    }
    tune.write_table(
        path, [tune.entry(tune.EVERY_ROW, 640, 256, False, TRAINING, 2e-3)], {"command": "a later one"}
    )
    kept, new = json.loads(path.read_text())["rows"]
    assert (
        kept["source"] == {"command": "a command"}
        and new["source"] == {"command": "a later one"}
        and new["us"] == 2000.0
    )
    load_table.cache_clear()
    assert load_table(path) == table | {(tune.EVERY_ROW, 640, 256, False): TRAINING}
    load_table.cache_clear()
    monkeypatch.setattr("pallas_kernels.gemm.config.load_table", lambda: table)
    assert choose(5, 640, 256, False) == fast
    assert choose(500, 256, 12345, True) == tune.candidates(1, True)[0]
    assert choose(500, 640, 384, False).tile_m == 192 == TRAINING.tile_m


def test_quantiser_benchmark_counts_the_bytes_that_must_move(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        quantize_bench, "steady_state", lambda contenders: {name: Timing((1e-6,)) for name in contenders}
    )
    rates = {
        row["site"]: row["gbs"]
        for row in quantize_bench.bench_quantize({"tiny": 256}, [16])
        if row["contender"] in ("copy", "mosaic")
    }
    per_value = {
        "copy": 4,
        "row 1x128": 3,
        "row + column": 4,
        "codes of rows -> column": 2,
        "SiLU * up": 5,
    } | {
        "RMSNorm(x + residual)": 7,
        "RMSNorm(x)": 3,
    }
    for site, nbytes in per_value.items():
        assert rates[site] == pytest.approx(nbytes * 16 * 256 / 1e-6 / 1e9, abs=0.1)
