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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jetrl_jax.errors import UserError
from jetrl_jax.precision.formats import ACTIVATION_BLOCK, COMPUTE_DTYPES, FP8_LAYERS, PRESETS, SITES, TOKEN_BLOCK, WEIGHT_BLOCK
from jetrl_jax.precision.parameters import map_params, named_params
from jetrl_jax.precision.weights import TrainableFp8Weight
from pallas_kernels import quantize


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
      paths: every parameter path of the model ('.'-joined, as `named_params` gives them).
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


def build_plan(paths: Iterable[str], section: Any) -> PrecisionPlan:
    """The plan of a `PrecisionSection` for a model with these parameter paths."""
    overrides = [(override.pattern, override.format) for override in section.overrides]
    return PrecisionPlan(paths, section.preset, overrides, wgrad_operand=section.wgrad_operand, scale_format=section.scale_format)
