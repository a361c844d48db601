"""`python -m pallas_kernels.bench gemm|decode|linear|quantize|attention|layer`: times kernels and rivals.

    gemm      FProp and DGrad (block scales of W) and both forms of WGrad, thousands of rows: TFLOP/s, steady
    decode    1, 64 and 256 rows: microseconds on the device, weights cold
    linear    a linear layer forward and backward with all quantisation from BF16: milliseconds, steady state
    quantize  the quantisers and the operations fused with them, on inputs of the layers: GB/s, steady state
    attention batch-invariant attention against cuDNN's: TFLOP/s of training, microseconds of decode, steady
    layer     a whole decoder layer forward and backward, FP8 against BF16: milliseconds, steady state

Sizes are the four linear layers of Qwen3-8B; data are random. The rivals include JAX's BF16 products and, if
it can run, vLLM's Triton kernel. `gemm` and `decode` also time the batch-invariant BF16 product, "mosaic
bf16". Other rivals come from a Python file (`--rivals`, such as tests/benchmarks/kernel_rivals.py, which
needs torch), run in the same process. It defines

    gemm(m, n, k) -> {name: contender}        decode(m, n, k) -> {name: pallas_kernels.measure.Timing}

or, for `layer`, whose model is not part of this package (tests/benchmarks/kernel_layer.py),

    layer(tokens) -> {name: contender}

The figures go to a JSON file with card, clocks, versions and command as soon as they are measured, and to the
terminal as a table. Without a GPU for these kernels the command ends with status 2. Goals and protocols:
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import (
    ScaledArray,
    dense_matmul,
    fprop,
    matmul,
    quantize,
    quantize_dual,
    quantize_weight,
    wgrad,
)
from pallas_kernels.attention.bench import bench_attention
from pallas_kernels.implementations import cannot_run
from pallas_kernels.measure import (
    Contender,
    Timing,
    cold_kernels,
    copies_beyond_cache,
    environment,
    jax_contender,
    markdown,
    require_gpu,
    steady_state,
    write_json,
)
from pallas_kernels.quantize.bench import bench_quantize

LAYERS = {"kv": (1024, 4096), "o": (4096, 4096), "gate": (12288, 4096), "down": (4096, 12288)}
"""(N, K) = (outputs, inputs) of the products that a layer of Qwen3-8B launches: k and v, q and o, gate
and up, down.
"""
IN_A_LAYER = {"kv": 2, "o": 2, "gate": 2}
"""How often a decoder layer has them; else once."""
TRAINING_ROWS, DECODE_ROWS = (8192, 16384), (1, 64, 256)
ROWS, COLUMNS, SQUARE = (1, 128), (128, 1), (128, 128)
IMPLEMENTATION = "mosaic_gpu"
"""What is measured."""
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the rivals also need memory
    command = "python -m pallas_kernels.bench " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    require_gpu("python -m pallas_kernels.bench")
    benchmark = BENCHMARKS[options.what]
    rivals = load_rivals(options.rivals, options.what) if options.rivals else None
    out, machine = options.out or Path(f"runs/benchmarks/{options.what}.json"), environment()
    rows = []
    for row in benchmark(options.layers, options.rows, rivals):
        rows.append(row)
        print("  ".join(str(value) for value in row.values()), flush=True)
        # after every row, so that figures are kept if the time runs out
        write_json(out, command, machine, rows)
    # with the clocks and the temperature at the end of the measurement
    write_json(out, command, environment(), rows)
    print(markdown(rows, [key for key in ("site", "layer", "M") if key in rows[0]], "contender", "figure"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, with the benchmark's default rows if none are given."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench", description=__doc__.partition("\n")[0] if __doc__ else None
    )
    parser.add_argument("what", choices=list(BENCHMARKS))
    parser.add_argument(
        "--layers", nargs="+", choices=list(LAYERS), metavar="LAYER", help="default: all (not for layer)"
    )
    parser.add_argument(
        "--rows", nargs="+", type=int, help=f"M, default {TRAINING_ROWS}, decode {DECODE_ROWS}"
    )
    parser.add_argument("--rivals", type=Path, help="a Python file with rivals (gemm, decode, layer)")
    parser.add_argument("--out", type=Path, help="JSON file, default runs/benchmarks/WHAT.json")
    options = parser.parse_args(arguments)
    for (what, name), why in NO_EFFECT.items():
        if what == options.what and getattr(options, name) is not None:
            parser.error(f"{what}: an option without effect: got --{name}, expected none: {why}")
    if options.what == "layer" and options.rivals is None:
        parser.error(
            "layer: no model: got no --rivals, expected a file with layer(tokens), such as "
            "tests/benchmarks/kernel_layer.py"
        )
    options.layers = options.layers or list(LAYERS)
    options.rows = options.rows or list(DECODE_ROWS if options.what == "decode" else TRAINING_ROWS)
    return options


def load_rivals(path: Path, what: str) -> ModuleType:
    """The module at `path`.

    Raises FileNotFoundError if it does not exist, ValueError if it has no rivals for `what`, and any error of
    the module itself.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(
            f"load_rivals: no Python file: got {path}, expected one such as "
            "tests/benchmarks/kernel_rivals.py."
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, what):
        raise ValueError(
            f"load_rivals: no rivals in {what}: got {path} without a function {what}, expected one, as "
            "pallas_kernels/bench.py has it."
        )
    return module


# -----------------------------------------------------------------------------------------------------------
# benchmarks


def bench_gemm(layers: list[str], rows: list[int], rivals: ModuleType | None) -> Iterator[Row]:
    """TFLOP/s of the products of a layer, with operands quantised and transposed beforehand."""
    for layer in layers:
        outputs, inputs = LAYERS[layer]
        for m in rows:
            yield from _gemm_rows("fprop", layer, m, (m, outputs, inputs), SQUARE, jnp.bfloat16, rivals)
            if outputs != inputs:
                yield from _gemm_rows("dgrad", layer, m, (m, inputs, outputs), SQUARE, jnp.bfloat16, rivals)
            for site, block in (("wgrad 1x128 x 1x128", ROWS), ("wgrad 1x128 x 128x128", SQUARE)):
                yield from _gemm_rows(site, layer, m, (outputs, inputs, m), block, jnp.float32, None)


def _gemm_rows(
    site: str,
    layer: str,
    m: int,
    sizes: tuple[int, int, int],
    block: tuple[int, int],
    out: Any,
    rivals: ModuleType | None,
) -> Iterator[Row]:
    """All contenders on one product of [rows, k] and [columns, k]."""
    a, b = random_matrix(sizes[0], sizes[2], 0), random_matrix(sizes[1], sizes[2], 1)
    left, right = quantize(a, ROWS), quantize(b, block)
    contenders: dict[str, Contender] = {
        f"mosaic {order}": jax_contender(_product(out, order), left, right)
        for order in ("deepgemm", "triton")
    }
    if cannot_run("triton") is None:
        contenders["vLLM triton"] = jax_contender(_product(out, "triton", "triton"), left, right)
    contenders["mosaic bf16"] = jax_contender(_dense_product(out), a, b)
    contenders["jax bf16"] = jax_contender(
        lambda a, b: jnp.einsum("mk,nk->mn", a, b, preferred_element_type=out), a, b
    )
    if rivals:
        contenders |= rivals.gemm(*sizes)
    flops = 2 * sizes[0] * sizes[1] * sizes[2]
    for name, timing in steady_state(contenders).items():
        yield _row(
            site,
            layer,
            m,
            name,
            timing,
            f"{flops / timing.median / 1e12:.0f}",
            tflops=flops / timing.median / 1e12,
        )


def bench_decode(layers: list[str], rows: list[int], rivals: ModuleType | None) -> Iterator[Row]:
    """Microseconds of FProp with cold weights, kernels only."""
    for layer in layers:
        n, k = LAYERS[layer]
        copies = copies_beyond_cache(n * k)
        weights = [quantize(random_matrix(n, k, seed), SQUARE) for seed in range(copies)]
        half = [random_matrix(n, k, seed) for seed in range(copies_beyond_cache(2 * n * k))]
        for m in rows:
            x = random_matrix(m, k, 100)
            timings: dict[str, Timing] = {
                "mosaic": cold_kernels(_product(jnp.bfloat16, "deepgemm"), quantize(x, ROWS), weights)
            }
            if cannot_run("triton") is None:
                timings["vLLM triton"] = cold_kernels(
                    _product(jnp.bfloat16, "triton", "triton"), quantize(x, ROWS), weights
                )
            timings["mosaic bf16"] = cold_kernels(_dense_product(jnp.bfloat16), x, half)
            timings["jax bf16"] = cold_kernels(lambda x, w: jnp.einsum("mk,nk->mn", x, w), x, half)
            if rivals:
                timings |= rivals.decode(m, n, k)
            for name, timing in timings.items():
                yield _row(
                    "fprop", layer, m, name, timing, f"{timing.median * 1e6:.1f}", us=timing.median * 1e6
                )


def bench_linear(layers: list[str], rows: list[int], rivals: ModuleType | None) -> Iterator[Row]:
    """Milliseconds of y = x Wᵀ, dx = dy W, dW = dyᵀ x from BF16 arrays in one program; rival: JAX's BF16."""
    del rivals
    totals: dict[tuple[int, str], float] = {}
    for layer in layers:
        n, k = LAYERS[layer]
        for m in rows:
            arrays = random_matrix(m, k, 0), random_matrix(n, k, 1), random_matrix(m, n, 2)
            contenders = {"fp8 1x128 x 1x128": COLUMNS, "fp8 1x128 x 128x128": SQUARE}
            programs: dict[str, Callable[..., Any]] = {
                name: _fp8_layer(block) for name, block in contenders.items()
            }
            programs["jax bf16"] = _bf16_layer
            timings = steady_state(
                {name: jax_contender(program, *arrays) for name, program in programs.items()}
            )
            for name, timing in timings.items():
                seconds = IN_A_LAYER.get(layer, 1) * timing.median
                totals[m, name] = totals.get((m, name), 0.0) + seconds
                yield _row(
                    "linear", layer, m, name, timing, f"{timing.median * 1e3:.3f}", ms=timing.median * 1e3
                )
    for (m, name), seconds in totals.items():
        yield _row("linear", "sum", m, name, Timing((seconds,)), f"{seconds * 1e3:.3f}", ms=seconds * 1e3)


def bench_quantizers(layers: list[str], rows: list[int], rivals: ModuleType | None) -> Iterator[Row]:
    """GB/s of the quantisers on the inputs of the layers, each width once; the rival is XLA."""
    del rivals
    yield from bench_quantize(
        {layer: width for width, layer in {LAYERS[layer][1]: layer for layer in layers}.items()}, rows
    )


def bench_layer(layers: list[str], rows: list[int], rivals: ModuleType | None) -> Iterator[Row]:
    """Milliseconds of a whole decoder layer, forward and backward, by every contender of the file."""
    del layers
    assert rivals is not None, "`parse` demands the file"
    for m in rows:
        for name, timing in steady_state(rivals.layer(m)).items():
            yield _row(
                "layer",
                "decoder layer",
                m,
                name,
                timing,
                f"{timing.median * 1e3:.3f}",
                ms=timing.median * 1e3,
            )


def bench_attentions(layers: list[str], rows: list[int], rivals: ModuleType | None) -> Iterator[Row]:
    """Attention of whole sequences and of one token against a cache; the rival is cuDNN."""
    del layers, rivals
    yield from bench_attention(rows)


NO_EFFECT = {
    ("attention", "layers"): "it has the heads of Qwen3-8B",
    ("attention", "rivals"): "its rival is cuDNN's attention",
    ("linear", "rivals"): "its rival is JAX's BF16",
    ("quantize", "rivals"): "its rivals are XLA's own",
    ("layer", "layers"): "it measures a whole decoder layer",
}
"""{(benchmark, option that it does not read): reason}."""
BENCHMARKS = {
    "gemm": bench_gemm,
    "decode": bench_decode,
    "linear": bench_linear,
    "quantize": bench_quantizers,
    "attention": bench_attentions,
    "layer": bench_layer,
}
"""The benchmarks, by name on the command line."""


def _fp8_layer(x_block: tuple[int, int]) -> Callable[..., Any]:
    """The three products of a layer, which quantises its operands; X for WGrad in blocks of `x_block`."""

    def layer(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        w8, turned = quantize_weight(w, implementation=IMPLEMENTATION)
        x_rows, x_tokens = quantize_dual(x, x_block, implementation=IMPLEMENTATION)
        dy_rows, dy_tokens = quantize_dual(dy, COLUMNS, implementation=IMPLEMENTATION)
        y = fprop(x_rows, w8, implementation=IMPLEMENTATION)
        dx = matmul(dy_rows, turned, implementation=IMPLEMENTATION)
        return y, dx, wgrad(dy_tokens, x_tokens, implementation=IMPLEMENTATION)

    return layer


def _bf16_layer(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    """The same in BF16, dW in FP32."""
    dw = jnp.einsum("mn,mk->nk", dy, x, preferred_element_type=jnp.float32)
    return jnp.einsum("mk,nk->mn", x, w), jnp.einsum("mn,nk->mk", dy, w), dw


# ---------------------------------------------------------------------------------------------------- parts


def random_matrix(rows: int, columns: int, seed: int) -> jax.Array:
    """Normal values, bfloat16 [rows, columns]."""
    return jax.random.normal(jax.random.key(seed), (rows, columns), jnp.bfloat16)


def _product(
    out_dtype: Any, order: str, implementation: str | None = None
) -> Callable[[ScaledArray, ScaledArray], jax.Array]:
    return lambda a, b: matmul(
        a, b, out_dtype=out_dtype, promotion_order=order, implementation=implementation or IMPLEMENTATION
    )


def _dense_product(out_dtype: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda x, w: dense_matmul(x, w, out_dtype=out_dtype, implementation=IMPLEMENTATION)


def _row(site: str, layer: str, m: int, name: str, timing: Timing, figure: str, **figures: float) -> Row:
    """A row of the report; `figure` is the text in the table."""
    numbers: Mapping[str, float] = {key: round(value, 4) for key, value in figures.items()}
    spread = round(timing.spread, 4)
    return {
        "site": site,
        "layer": layer,
        "M": m,
        "contender": name,
        "figure": figure,
        **numbers,
        "spread": spread,
    }


if __name__ == "__main__":
    main()
