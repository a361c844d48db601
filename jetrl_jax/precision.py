"""Which matrix multiplication runs in which format: one table, read by model, engine and export.

A *preset* names the flow, *overrides* make exceptions by a glob over parameter paths, and
`PrecisionPlan` resolves both into explicit rows (parameter path, GEMM site) -> (format, block).
Nothing else in the program decides a format.

    site      operands                   who runs it
    rollout   X . W                      the rollout engine, with the published weights
    fprop     X . W                      the trainer's forward
    dgrad     dY . W                     the trainer's backward
    wgrad     dY^T . X                   the trainer's backward

Weights are quantised once per policy version by `PrecisionPlan.publish`, from the FP32 master rounded to
BF16 first (so that a BF16 export and the FP8 export agree); the same bytes serve rollout, training
forward, DGrad and export.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jetrl_jax.errors import UserError
from pallas_kernels import ScaledArray, quantize

SITES = ("rollout", "fprop", "dgrad", "wgrad")
PRESETS: Mapping[str, tuple[str, str, str, str]] = {
    "fp32": ("fp32", "fp32", "fp32", "fp32"),
    "bf16": ("bf16", "bf16", "bf16", "bf16"),
    "fp16": ("fp16", "fp16", "fp16", "fp16"),
    "fp8_unified": ("fp8", "fp8", "fp8", "fp8"),
    "fp8_forward": ("fp8", "fp8", "bf16", "bf16"),
    "fp8_rollout_only": ("fp8", "bf16", "bf16", "bf16"),
}
COMPUTE_DTYPES = {"fp32": "float32", "fp16": "float16"}  # of the presets that are not BF16 between operations
FP8_LAYERS = ("*.self_attn.?_proj.weight", "*.mlp.*_proj.weight")
# XLA may otherwise keep FP32 where the contract rounds to BF16, differently in each program (on CPU and GPU).
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
ACTIVATION_BLOCK, WEIGHT_BLOCK, TOKEN_BLOCK = (1, 128), (128, 128), (128, 1)


@dataclass(frozen=True)
class Numerics:
    """Rounding points and reductions of a forward pass; hashable, so that `jax.jit` may close over it.

    compute_dtype: "bfloat16" and "float16" round between operations where the mirrored engine does; "float32" never does.
    engine_variant: "native" (vLLM's eager ops: two roundings in RMSNorm, variance of the unrounded residual
        sum) or "cuda" (vLLM's CUDA kernels: one rounding, variance of the rounded sum).
    exact: reductions in float64, so that a token's bits do not depend on the shape of the program around it.
    promotion_order, scale_format: see `pallas_kernels`.
    wgrad_operand: how the saved activation reaches WGrad; see `jetrl_jax.models.fp8_linear`.
    kernels: implementation of the FP8 products; see `jetrl_jax.models.fp8_linear.product_implementation`.
    attention: implementation of attention; see `jetrl_jax.models.flash_attention.attention_implementation`.
    dense: products that are not FP8 of an exact run: "auto", or "float64" as an exact vLLM forms them; see `jetrl_jax.models.dense`.
    stored_dtype: dtype of a key/value cache; None is what suits the backend (`models.ops.cache_dtype`).
    """

    compute_dtype: str = "bfloat16"
    engine_variant: str = "native"
    exact: bool = True
    promotion_order: str = "deepgemm"
    wgrad_operand: str = "requantize"
    scale_format: str = "float32"
    kernels: str = "auto"
    attention: str = "auto"
    dense: str = "auto"
    stored_dtype: str | None = None

    @property
    def dtype(self) -> Any:
        """The JAX dtype that activations have between operations."""
        return jnp.dtype(self.compute_dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainableFp8Weight:
    """A weight in training: the FP32 master that receives the gradient and the codes that are multiplied.

    master: float32 [N, K]; quantized: its published `ScaledArray` in 128x128 blocks.
    fp8_backward: whether DGrad and WGrad run in FP8 (else in BF16 on the dequantised operands).
    """

    master: jax.Array
    quantized: ScaledArray
    fp8_backward: bool = field(metadata={"static": True})


@dataclass(frozen=True)
class PlanRow:
    """One entry of the table: the format and operand blocks of one GEMM of one parameter."""

    path: str
    site: str
    format: str
    blocks: str


def _blocks(site: str, fmt: str, wgrad_operand: str) -> str:
    if fmt != "fp8":
        return "-"
    if site == "wgrad":
        second = WEIGHT_BLOCK if wgrad_operand == "block" else TOKEN_BLOCK
        return f"dY {TOKEN_BLOCK} X {second}"
    return f"{'dY' if site == 'dgrad' else 'X'} {ACTIVATION_BLOCK} W {WEIGHT_BLOCK}"


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


class PrecisionPlan:
    """The resolved table of a model.

    Args:
      paths: every parameter path of the model ('.'-joined, as `parameter_paths` gives them).
      preset: a key of `PRESETS`.
      overrides: (glob, "bf16" | "fp8") pairs, the last match wins.
      wgrad_operand, scale_format: see `Numerics`.

    Raises:
      UserError: an override that matches no linear layer, or puts into FP8 what the contract keeps out of it.
    """

    def __init__(
        self,
        paths: Iterable[str],
        preset: str,
        overrides: Iterable[tuple[str, str]] = (),
        *,
        wgrad_operand: str = "requantize",
        scale_format: str = "float32",
    ) -> None:
        self.preset, self.scale_format, self.wgrad_operand = preset, scale_format, wgrad_operand
        paths = list(paths)
        layers = [path for path in paths if _matches(path, FP8_LAYERS)]
        self.formats = dict.fromkeys(layers, PRESETS[preset])
        self.base_format = preset if preset in COMPUTE_DTYPES else "bf16"
        for pattern, fmt in overrides:
            hit = [path for path in layers if fnmatch.fnmatchcase(path, pattern)]
            outside = [
                path for path in paths if fnmatch.fnmatchcase(path, pattern) and path not in self.formats and path.endswith("_proj.weight")
            ]
            if not hit or outside:
                raise UserError(
                    f"precision.overrides: pattern {pattern!r} matches {'no' if not hit else 'more than the'} linear layer"
                    f"{'' if not hit else 's: ' + ', '.join(outside)}. Linear layers are: {', '.join(layers[:7])}, ..."
                )
            flow = PRESETS[preset] if PRESETS[preset][0] == "fp8" else PRESETS["fp8_unified"]
            self.formats.update(dict.fromkeys(hit, flow if fmt == "fp8" else PRESETS["bf16"]))
        self.paths = paths

    @property
    def compute_dtype(self) -> str:
        """Dtype of activations between operations: float32 for the preset fp32, float16 for fp16, else bfloat16."""
        return COMPUTE_DTYPES.get(self.preset, "bfloat16")

    @property
    def rows(self) -> list[PlanRow]:
        """The whole table; a parameter that no GEMM multiplies has the site 'value'."""
        rows = []
        for path in self.paths:
            if path in self.formats:
                rows += [
                    PlanRow(path, site, fmt, _blocks(site, fmt, self.wgrad_operand))
                    for site, fmt in zip(SITES, self.formats[path], strict=True)
                ]
            else:
                head = path in ("lm_head.weight", "embed_tokens.weight")
                rows.append(PlanRow(path, "value", self.base_format, "logits in fp32" if head else "-"))
        return rows

    def table(self) -> str:
        """The rows as aligned text, one line each, for the run's record."""
        lines = [("parameter", "site", "format", "blocks")]
        lines += [(row.path, row.site, row.format, row.blocks) for row in self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        head = f"preset {self.preset}; scales {self.scale_format}; wgrad operand {self.wgrad_operand}\n"
        return head + "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines) + "\n"

    def publish(self, params: nnx.State) -> nnx.State:
        """The weights of a policy version as the engine multiplies them; traceable under `jax.jit`.

        Args:
          params: FP32 masters, as `nnx.state(model, nnx.Param)` gives them.

        Returns:
          A state of the same paths: `ScaledArray` (128x128 blocks) where the plan says FP8, else BF16
          (FP32 or FP16 for the presets of that name).
        """

        def publish_one(path: str, value: jax.Array) -> Any:
            source = jnp.array(value, self.compute_dtype)  # a copy even in FP32: an update consumes the masters' buffers
            if self.formats.get(path, ("",))[0] == "fp8":
                return quantize(source, WEIGHT_BLOCK, scale_format=self.scale_format)
            return source

        return map_params(publish_one, params)

    def training_weights(self, params: nnx.State, published: nnx.State) -> nnx.State:
        """What the trainer's forward multiplies: masters bound to their published codes where FProp is FP8.

        Gradients reach the masters (straight-through); the codes are constants of the step.
        """
        codes = dict(named_params(published))

        def bind(path: str, value: jax.Array) -> Any:
            flow = self.formats.get(path)
            if flow is not None and flow[1] == "fp8":
                return TrainableFp8Weight(value, codes[path], flow[2] == "fp8")
            return value

        return map_params(bind, params)

    def frozen_weights(self, params: nnx.State, published: nnx.State) -> nnx.State:
        """As `training_weights` without masters: the same forward, no gradient; a reference policy is kept so."""
        codes = dict(named_params(published))

        def freeze(path: str, value: jax.Array) -> Any:
            flow = self.formats.get(path)
            return codes[path] if flow is not None and flow[1] == "fp8" else jnp.array(value, self.compute_dtype)

        return map_params(freeze, params)


def jit(function: Any, **options: Any) -> Any:
    """`jax.jit` under `COMPILER_OPTIONS`: how every program of a policy is compiled."""
    return jax.jit(function, compiler_options=COMPILER_OPTIONS, **options)


def named_params(params: nnx.State) -> list[tuple[str, Any]]:
    """('layers.0.mlp.up_proj.weight', value) pairs in the state's order; values may be `ScaledArray`s."""
    return [(".".join(map(str, path)), variable.get_value()) for path, variable in nnx.to_flat_state(params)]


def map_params(function: Any, params: nnx.State) -> nnx.State:
    """A state whose value at each path is `function(path, value)`."""
    flat = [
        (path, variable.replace(function(".".join(map(str, path)), variable.get_value()))) for path, variable in nnx.to_flat_state(params)
    ]
    return nnx.from_flat_state(flat)


def build_plan(paths: Iterable[str], section: Any) -> PrecisionPlan:
    """The plan of a `PrecisionSection` for a model with these parameter paths."""
    overrides = [(override.pattern, override.format) for override in section.overrides]
    return PrecisionPlan(paths, section.preset, overrides, wgrad_operand=section.wgrad_operand, scale_format=section.scale_format)


def build_numerics(precision: Any, numerics: Any, engine: str) -> Numerics:
    """The `Numerics` of the config sections `precision` and `numerics` and of `rollout.engine`."""
    return Numerics(
        compute_dtype=COMPUTE_DTYPES.get(precision.preset, "bfloat16"),
        engine_variant=numerics.engine_variant,
        exact=numerics.exact,
        promotion_order=precision.promotion_order,
        wgrad_operand=precision.wgrad_operand,
        scale_format=precision.scale_format,
        kernels=numerics.kernels,
        attention=numerics.attention,
        dense="float64" if numerics.exact and engine == "vllm" else "auto",
    )
