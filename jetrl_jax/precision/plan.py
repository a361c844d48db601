"""One table of which matrix multiplication runs in which format, read by model, engine and export.

A *preset* names the flow, *overrides* make exceptions by a glob over parameter paths, and
`PrecisionPlan` resolves both into explicit rows (parameter path, GEMM site) -> (format, block).
Formats are decided only here.

    site      operands                   who runs it
    rollout   X . W                      the rollout engine, with the published weights
    fprop     X . W                      the trainer's forward
    dgrad     dY . W                     the trainer's backward
    wgrad     dY^T . X                   the trainer's backward

`PrecisionPlan.publish` quantises the weights once per policy version.  It rounds the FP32 master to BF16
first, so that a BF16 export and the FP8 export agree.  Rollout, training forward, DGrad and export use the
same bytes.
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
from jetrl_jax.precision import kv_cache
from jetrl_jax.precision.formats import FORMATS, LINEAR, PRESETS, Flow, Format, is_adapter, is_kv_scale
from jetrl_jax.precision.parameters import map_params, merge, named_params, select
from jetrl_jax.precision.trainable_weight import (
    FrozenFp8Weight,
    TrainableFp8Weight,
    TrainableMatrix,
    published_value,
)
from pallas_kernels import quantize

EMBEDDINGS = ("lm_head.weight", "embed_tokens.weight")


@dataclass(frozen=True)
class PlanRow:
    """One entry of the table: the format and operand blocks of one GEMM of one parameter."""

    path: str
    site: str
    format: str
    blocks: str


def _blocks(site: str, fmt: Format, wgrad_operand: str) -> str:
    if fmt.blocks is None:
        return "-"
    activation, weight, token = fmt.blocks
    if site == "wgrad":
        return f"dY {token} X {weight if wgrad_operand == 'block' else token}"
    return f"{'dY' if site == 'dgrad' else 'X'} {activation} W {weight}"


class PrecisionPlan:
    """The resolved table of formats of a model.

    Args:
      paths: every parameter path of the model ('.'-joined, as `named_params` gives them).
      preset: a key of `PRESETS`.
      overrides: (glob, name of a format) pairs; the last match wins.  A layer whose override is the preset's
        rollout format follows the preset; otherwise all its products run in the named format.
      wgrad_operand, scale_format: see `Numerics`.
      kinds: what is rounded to FP8 before attention (`Numerics.kinds`); each has a scale in every layer.

    Attributes:
      value: the format of everything between the products, see `Flow`.
      scale_paths: the path of each of these scales, [L][n]; published weights have them too.
      adapted: whether the model has adapters, beside which everything else is a frozen base.

    Raises:
      UserError: an override that matches no linear layer.
    """

    def __init__(
        self,
        paths: Iterable[str],
        preset: str,
        overrides: Iterable[tuple[str, str]] = (),
        *,
        wgrad_operand: str = "requantize",
        scale_format: str = "float32",
        kinds: tuple[str, ...] = (),
    ) -> None:
        self.preset = preset
        self.scale_format = scale_format
        self.wgrad_operand = wgrad_operand
        self.paths = list(paths)
        self.adapted = any(map(is_adapter, self.paths))
        default = PRESETS[preset]
        self.value = default.value
        layers = [path for path in self.paths if path.endswith(LINEAR)]
        self._linear = dict.fromkeys(layers, default)
        for pattern, name in overrides:
            hit = [path for path in layers if fnmatch.fnmatchcase(path, pattern)]
            if not hit:
                raise UserError(
                    f"precision.overrides: pattern {pattern!r} matches no linear layer. Linear layers "
                    f"are: {', '.join(layers[:7])}, ..."
                )
            fmt = FORMATS[name]
            self._linear.update(
                dict.fromkeys(hit, default if default.rollout == fmt else default.uniform(fmt))
            )
        self._other = default.uniform(default.value)
        layers_with = {path.split(".")[1] for path in self.paths if path.startswith("layers.")}
        self.kinds = kinds
        self.scale_paths = kv_cache.scale_paths(len(layers_with) if kinds else 0, kinds)

    @property
    def linear(self) -> tuple[str, ...]:
        """The weights of linear layers, in the order of `paths`."""
        return tuple(self._linear)

    def flow(self, path: str) -> Flow:
        """The formats of a parameter's products; `value` throughout if no linear layer multiplies it."""
        return self._linear.get(path, self._other)

    @property
    def rows(self) -> list[PlanRow]:
        """The whole table; a parameter that no GEMM multiplies has the site 'value'."""
        rows = []
        for path in self.paths:
            if path in self._linear:
                products = self.flow(path).products.items()
                rows += [
                    PlanRow(path, site, fmt.name, _blocks(site, fmt, self.wgrad_operand))
                    for site, fmt in products
                    if site != "wgrad" or not self.adapted  # a frozen base has none
                ]
            else:
                head = path in EMBEDDINGS
                rows.append(PlanRow(path, "value", self.value.name, "logits in fp32" if head else "-"))
        for paths in self.scale_paths:
            rows += [PlanRow(path, "cache", "fp8", "one scale, a power of two") for path in paths]
        return rows

    def table(self) -> str:
        """The rows as aligned text, one line each, for the run's record."""
        lines = [("parameter", "site", "format", "blocks")]
        lines += [(row.path, row.site, row.format, row.blocks) for row in self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        head = f"preset {self.preset}; scales {self.scale_format}; wgrad operand {self.wgrad_operand}\n"
        return (
            head
            + "\n".join(
                "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
                for line in lines
            )
            + "\n"
        )

    def trained(self, path: str) -> bool:
        """Whether a parameter has a master: every one, or in a model with adapters only theirs."""
        return is_adapter(path) or not self.adapted

    def frozen_base(self, published: nnx.State) -> nnx.State:
        """The part of published weights that is never trained, without scales of keys and values."""
        return select(published, lambda path: not self.trained(path) and not is_kv_scale(path))

    def publish(self, params: nnx.State, scales: jax.Array | None = None) -> nnx.State:
        """The weights of a policy version as the engine multiplies them; traceable under `jax.jit`.

        Args:
          params: FP32 masters, as `nnx.state(model, nnx.Param)` gives them, or a part of them.
          scales: float32 [L, n], those of keys, values and queries; None if none is in FP8.

        Returns:
          A state of the same paths: `ScaledArray` (128x128 blocks) where the plan's rollout format is FP8,
          else BF16 (FP32 or FP16 for the presets of that name); and the scales at `scale_paths`.

        Raises:
          ValueError: scales are missing, or the plan has none.
        """
        if (scales is None) != (not self.kinds):
            raise ValueError(
                f"PrecisionPlan.publish: wrong scales: got {None if scales is None else scales.shape}, "
                f"expected {None if not self.kinds else 'one for each layer and'} {self.kinds} in FP8."
            )

        published = map_params(self.publish_one, params)
        return published if scales is None else kv_cache.with_scales(published, self.by_path(scales))

    def publish_one(self, path: str, value: jax.Array) -> Any:
        """One parameter as the engine multiplies it, of its FP32 master."""
        # a copy even in FP32, because an update donates the masters' buffers
        source = jnp.array(value, self.value.dtype)
        blocks = self.flow(path).rollout.blocks
        return source if blocks is None else quantize(source, blocks.weight, scale_format=self.scale_format)

    def by_path(self, scales: Any) -> dict[str, Any]:
        """Path -> scale, of scales [L, n]."""
        return {
            path: scales[layer, kind]
            for layer, paths in enumerate(self.scale_paths)
            for kind, path in enumerate(paths)
        }

    @property
    def unit_scales(self) -> jax.Array | None:
        """Scales of 1, [L, n], before anything is known about the policy; None if nothing is in FP8."""
        return jnp.ones((len(self.scale_paths), len(self.kinds)), jnp.float32) if self.kinds else None

    def _scaled(self, weights: nnx.State, codes: dict[str, Any]) -> nnx.State:
        scales = {path: codes[path] for paths in self.scale_paths for path in paths}
        return kv_cache.with_scales(weights, scales) if scales else weights

    def training_weights(
        self, params: nnx.State, published: nnx.State, totals: nnx.State | None = None
    ) -> nnx.State:
        """The weights of the trainer's forward: masters, bound to what is published of them.

        Only where the engine multiplies codes and FProp does not, FProp rounds the master itself.  Gradients
        reach the masters (straight-through); what is published is a constant within the step.  So is a
        frozen base, which has no masters.

        Args:
          params: masters of what is trained.
          published: of the whole model.
          totals: sums to which the gradients of `adds` are added as they are made.
        """
        codes = dict(named_params(published))
        sums = {} if totals is None else dict(named_params(totals))

        def bind(path: str, value: jax.Array) -> Any:
            if not self.flow(path).fprop.quantized:
                if not self.reads_published(path):
                    return value
                bound = TrainableMatrix if path in EMBEDDINGS else published_value
                return bound(value, codes[path])
            total = sums.get(path) if self.adds(path) else None
            return TrainableFp8Weight(value, codes[path], self.flow(path).dgrad.quantized, total)

        weights = map_params(bind, params)
        if self.adapted:
            weights = merge(weights, map_params(self._pass_through, self.frozen_base(published)))
        return self._scaled(weights, codes)

    def _pass_through(self, path: str, value: Any) -> Any:
        quantized = self.flow(path).fprop.quantized
        return FrozenFp8Weight(value, self.flow(path).dgrad.quantized) if quantized else value

    def adds(self, path: str) -> bool:
        """Whether the product that makes a parameter's gradient can add it to a sum."""
        return path in self._linear and self.flow(path).dgrad.quantized

    def reads_published(self, path: str) -> bool:
        """Whether FProp multiplies a parameter in the format in which it is published."""
        return self.flow(path).fprop == self.flow(path).rollout

    def frozen_weights(self, params: nnx.State, published: nnx.State) -> nnx.State:
        """`training_weights` without masters: the same forward, no gradient; used for a reference policy."""
        codes = dict(named_params(published))

        def freeze(path: str, value: jax.Array) -> Any:
            return codes[path] if self.reads_published(path) else jnp.array(value, self.value.dtype)

        return self._scaled(map_params(freeze, params), codes)
