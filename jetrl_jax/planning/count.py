"""A run counted in the programs that XLA compiles for an H100 that is not here: predictions, no times.

Every program of a step (gradient, adding gradients, update, prefill, one decoded token) is compiled ahead of
time for two small depths.  The launches of the optimised program are read (`hlo`), and each takes

    max(bytes / memory rate, FLOPs / rate of its product, SHORTEST_S)        seconds, at the rates of `rates`

What the deeper program has more is a layer; the rest (embedding, head, loss, sampling) is what is left of the
shallower one.  Kernels are told apart by what they are given: Pallas kernels by their function and operands,
XLA's own products by the FLOPs of the dots in a fusion, cuDNN's attention by a call with its operands and
results, since cuDNN comes with a GPU.  XLA takes its Triton form of every product, since cuBLAS does too.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import jax

from jetrl_jax.config.precision import fp8_choices
from jetrl_jax.config.rollout import JaxEngineSection
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.errors import UserError
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.flash_attention import PLANNED
from jetrl_jax.planning.abstract_run import AbstractRun
from jetrl_jax.planning.check import target_devices
from jetrl_jax.planning.hlo import Launch, Program
from jetrl_jax.planning.rates import RATES, SHORTEST_S
from pallas_kernels.implementations import hopper_elsewhere

H100 = Path(__file__).with_name("h100.txtpb")
DEPTHS = (2, 3)  # layers of the models that are compiled; the first one has no residual to add
PAPER = {
    "rollout": 1.33,
    "training": 1.41,
    "end to end": 1.16,
}  # Jet-RL's speedups of FP8 over BF16, its best
KERNELS = re.compile(r"jit\((rms_norm_quantize|requantize|quantize|dense_matmul|matmul)\)")
DOTS = {"bf16": "bf16", "f16": "bf16", "f32": "fp32", "f64": "fp64"}  # dtype of XLA's product -> its rate
KINDS = {  # of products, by their rate
    "fprop": "FP8 FProp, DGrad",
    "wgrad": "FP8 WGrad by rows",
    "wgrad_block": "FP8 WGrad, X in blocks",
    "bf16": "16-bit products",
    "fp32": "FP32 products",
    "fp64": "FP64 products",
}


@dataclass(frozen=True)
class Amount:
    """Launches, and the bytes, FLOPs and predicted seconds of all of them."""

    launches: float = 0
    bytes: float = 0
    flops: float = 0
    seconds: float = 0

    def __add__(self, other: Amount) -> Amount:
        """Both."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Amount(*(a + b for a, b in pairs))

    def __mul__(self, times: float) -> Amount:
        """So often."""
        return Amount(*(times * value for value in dataclasses.astuple(self)))


Count = dict[str, Amount]  # of each kind of launch


def total(count: Count) -> Amount:
    """Of all kinds."""
    return sum(count.values(), Amount())


def combined(a: Count, b: Count, times: float = 1) -> Count:
    """a + times * b."""
    return {kind: a.get(kind, Amount()) + b.get(kind, Amount()) * times for kind in a | b}


@dataclass(frozen=True)
class ProgramCount:
    """One program: what one layer has of it, and what is there but once."""

    layer: Count
    rest: Count
    layers: int

    @property
    def whole(self) -> Count:
        """Of the model's depth."""
        return combined(self.rest, self.layer, self.layers)

    @property
    def seconds(self) -> float:
        """Predicted."""
        return total(self.whole).seconds


class StepCount:
    """The programs of a config, counted as they are asked for.

    Args:
      config: of one device.
      sizes: the model's.

    Raises:
      UserError: several devices, layers that are told apart by name, or no CUDA plugin of JAX here.
    """

    def __init__(self, config: RunConfig, sizes: ModelConfig) -> None:
        if config.sharding.devices > 1:
            raise UserError(
                f"--count: several devices: got sharding = {config.sharding.model_dump()}, expected degrees "
                "of 1, since kernels are counted on one device. Try --set sharding.fsdp=1."
            )
        if fp8_choices(config.precision).overrides:
            raise UserError(
                "--count: layers differ: got precision.overrides, expected none, since one stands for all."
            )
        self.config = config
        self.sizes = sizes
        devices = target_devices(H100, 1)
        _register_attention()
        with hopper_elsewhere():
            self.runs = tuple(
                AbstractRun(config, dataclasses.replace(sizes, num_layers=depth), devices=devices)
                for depth in DEPTHS
            )
        self._found: dict[str, ProgramCount] = {}

    def program(self, name: str) -> ProgramCount:
        """A program that `AbstractRun.trace` knows."""
        if name not in self._found:
            shallow, deep = (self._counted(run, name) for run in self.runs)
            layer = combined(deep, shallow, -1)
            self._found[name] = ProgramCount(
                layer, combined(shallow, layer, -DEPTHS[0]), self.sizes.num_layers
            )
        return self._found[name]

    @property
    def slots(self) -> int:
        """Sequences that the embedded engine decodes at once; 0 where vLLM samples."""
        engine = self.config.rollout.engine
        return engine.slots if isinstance(engine, JaxEngineSection) else 0

    @property
    def context_tokens(self) -> float:
        """Keys that a decoded token sees, on average: a prompt, and half a completion."""
        return self.config.rollout.max_prompt_tokens + self.config.rollout.max_completion_tokens / 2

    @property
    def training_step(self) -> Count:
        """Of a microbatch whose gradient is added to that of others."""
        if self.runs[0].programs.adds_in_kernels:
            return self.program("next gradient").whole
        return combined(self.program("gradient").whole, self.program("add").whole)

    def phases(self) -> dict[str, float]:
        """Predicted seconds of a step's phases on one device, every sequence as long as it may be.

        No draft is counted as accepted.
        """
        run, rollout = self.runs[0], self.config.rollout
        training = self.program("gradient").seconds
        training += (run.microbatches - 1) * total(self.training_step).seconds
        training += self.program("check").seconds + self.program("step").seconds
        forwards = int(run.algorithm.needs_old) + int(run.algorithm.needs_reference)
        scoring = self.program("logprobs").seconds * forwards * run.microbatches if forwards else 0
        found = {"training": training + scoring}
        if isinstance(rollout.engine, JaxEngineSection):
            sequences = rollout.prompts_per_step * rollout.group_size
            turns = max(sequences / rollout.engine.slots, 1.0)
            prefills = sequences / rollout.engine.prefill_rows
            decode = turns * rollout.max_completion_tokens * self.program("decode").seconds
            found = {"rollout": decode + prefills * self.program("prefill").seconds} | found
            found["end to end"] = sum(found.values())
        return found

    def _counted(self, run: AbstractRun, name: str) -> Count:
        with hopper_elsewhere():
            text = run.trace(name).lower().compile().as_text()
        seen = 1.0
        if name == "decode":
            seen = self.context_tokens / run.slots().cache[0].length
        found: Count = {}
        for launch in Program(text).launches():
            kind, amount = counted(launch, seen)
            found[kind] = found.get(kind, Amount()) + amount * launch.times
        return found


def counted(launch: Launch, seen: float = 1.0) -> tuple[str, Amount]:
    """(kind, one run) of a launch; `seen`: the part of a cache that attention by cuDNN reads."""
    instruction, moved = launch.instruction, float(launch.bytes)
    if instruction.target == PLANNED:
        rate, flops, moved = _attention(launch, seen)
        return "attention", _amount(moved, flops, rate)
    if instruction.target is not None and instruction.target.startswith("mosaic_gpu"):
        named = KERNELS.findall(instruction.source)
        function = named[-1] if named else ""
        if function in ("matmul", "dense_matmul"):
            rate, flops = _product(function, launch)
            return KINDS[rate], _amount(moved, flops, rate)
        return "quantisers" if function else "other kernels", _amount(moved)
    if launch.dots:
        dtype = max(launch.dots, key=lambda dot: dot[1])[0]
        flops = sum(dot[1] for dot in launch.dots)
        return KINDS[DOTS[dtype]], _amount(moved, flops, DOTS[dtype])
    turned = any(shape.dtype == "f8e4m3fn" and len(shape.axes) == 2 for shape in instruction.results)
    return "turned codes" if turned else "others by XLA", _amount(moved)


def _amount(moved: float, flops: float = 0.0, rate: str = "bf16") -> Amount:
    seconds = max(moved / RATES["memory"][0], flops / RATES[rate][0], SHORTEST_S)
    return Amount(1, moved, flops, seconds)


def _product(function: str, launch: Launch) -> tuple[str, float]:
    """(rate, FLOPs) of a product of this repository's kernels."""
    left, right = launch.operands[:2]
    flops = 2.0 * left.axes[0] * right.axes[0] * left.axes[1]
    if function == "dense_matmul":
        return "bf16", flops
    if launch.operands[3].size >= right.size // 128:  # a scale a row of B and block of K
        return "wgrad", flops
    return "wgrad_block" if launch.instruction.results[0].dtype == "f32" else "fprop", flops


def _attention(launch: Launch, seen: float) -> tuple[str, float, float]:
    """(rate, FLOPs, bytes) of cuDNN's attention: forward (two results), backward (three), or of one token."""
    queries, keys = launch.operands[:2]
    batch, tokens, heads, width = queries.axes
    product = 2.0 * batch * tokens * keys.axes[1] * heads * width
    if tokens == keys.axes[1]:
        backward = len(launch.instruction.results) == 3
        rate, products = ("attention_backward", 5) if backward else ("attention", 2)
        return rate, products * product / 2, float(launch.bytes)
    return "attention", 2 * product * seen, launch.bytes - 2 * keys.bytes * (1 - seen)


@functools.cache
def _register_attention() -> None:
    """XLA compiles a call only where its target is known; this one is never made, so any handler will do."""
    try:
        from jax_cuda13_plugin import _prng
    except ImportError as error:
        raise UserError(
            f"--count: no CUDA plugin of JAX: {error}. Expected jax-cuda13-plugin and jax-cuda13-pjrt of jax "
            f"{jax.__version__} in this environment (the extra 'aot'); they need no GPU."
        ) from error
    jax.ffi.register_ffi_target(PLANNED, next(iter(_prng.registrations().values())), platform="CUDA")
