"""Predicts the times of a run's phases by counting the programs that XLA compiles for an H100, without one.

Every program of a step (gradient, adding gradients, update, prefill, one decoded token) is compiled ahead of
time for two small depths.  The launches of the optimised program are read (`hlo`), and each takes

    max(bytes / memory rate, FLOPs / rate of its product, SHORTEST_S)        seconds, at the rates of `rates`

The difference between the two depths is one layer; the shallower program without its layers is the rest
(embedding, head, loss, sampling).  Kernels are classified as follows: Pallas kernels by their function and
operands, XLA's own products by the dots in a fusion, and cuDNN's attention by its operands and results.
cuDNN and cuBLAS come only with a GPU, so a placeholder call stands for cuDNN's attention, and XLA compiles
every product with Triton.
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
DEPTHS = (2, 3)  # layers of the models that are compiled; not 1, since the first layer has no residual to add
PAPER = {
    "rollout": 1.33,
    "training": 1.41,
    "end to end": 1.16,
}  # the best speedups of FP8 over BF16 that Jet-RL reports
KERNELS = re.compile(
    r"jit\((rms_norm_quantize|silu_gradients_quantize|requantize|quantize|dense_matmul|matmul|causal_attention|causal_gradients|"
    r"cached_attention)\)"
)
ATTENTION = {  # (call, number of results) -> products over the causal half of the square
    (PLANNED, 2): 2,
    (PLANNED, 3): 5,
    ("causal_attention", 2): 2,
    ("causal_gradients", 1): 3,
    ("causal_gradients", 2): 4,
}
DOTS = {"bf16": "bf16", "f16": "bf16", "f32": "fp32", "f64": "fp64"}  # dtype of XLA's product -> its rate
KINDS = {  # rate of a product -> its row in the tables
    "fprop": "FP8 FProp, DGrad",
    "wgrad": "FP8 WGrad by rows",
    "wgrad_block": "FP8 WGrad, X in blocks",
    "bf16": "16-bit products",
    "fp32": "FP32 products",
    "fp64": "FP64 products",
}


@dataclass(frozen=True)
class Amount:
    """A number of launches, with the sums of their bytes, FLOPs and predicted seconds."""

    launches: float = 0
    bytes: float = 0
    flops: float = 0
    seconds: float = 0

    def __add__(self, other: Amount) -> Amount:
        """The sum, field by field."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Amount(*(a + b for a, b in pairs))

    def __mul__(self, times: float) -> Amount:
        """Every field multiplied by `times`."""
        return Amount(*(times * value for value in dataclasses.astuple(self)))


Count = dict[str, Amount]  # kind of launch -> amount


def total(count: Count) -> Amount:
    """The sum over all kinds."""
    return sum(count.values(), Amount())


def combined(a: Count, b: Count, times: float = 1) -> Count:
    """a + times * b, kind by kind."""
    return {kind: a.get(kind, Amount()) + b.get(kind, Amount()) * times for kind in a | b}


@dataclass(frozen=True)
class ProgramCount:
    """One program: the count of one layer, and of everything outside the layers."""

    layer: Count
    rest: Count
    layers: int

    @property
    def whole(self) -> Count:
        """The count of the program at the model's full depth."""
        return combined(self.rest, self.layer, self.layers)

    @property
    def seconds(self) -> float:
        """Predicted time of one run of the program."""
        return total(self.whole).seconds


class StepCount:
    """The counts of a config's programs, each compiled when it is first requested.

    Args:
      config: a config for one device.
      sizes: sizes of the model.

    Raises:
      UserError: the config has several devices or precision.overrides, or JAX's CUDA plugin is not installed.
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
        """The count of a program, by its name in `AbstractRun.trace`."""
        if name not in self._found:
            shallow, deep = (self._counted(run, name) for run in self.runs)
            layer = combined(deep, shallow, -1)
            self._found[name] = ProgramCount(
                layer, combined(shallow, layer, -DEPTHS[0]), self.sizes.num_layers
            )
        return self._found[name]

    @property
    def slots(self) -> int:
        """Number of sequences that the embedded engine decodes at once; 0 if vLLM samples."""
        engine = self.config.rollout.engine
        return engine.slots if isinstance(engine, JaxEngineSection) else 0

    @property
    def context_tokens(self) -> float:
        """Average number of keys that a decoded token attends to: a prompt and half a completion."""
        return self.config.rollout.max_prompt_tokens + self.config.rollout.max_completion_tokens / 2

    @property
    def training_step(self) -> Count:
        """The count of one microbatch: its gradient, and adding it to the sum over microbatches."""
        if self.runs[0].programs.adds_in_kernels:
            return self.program("next gradient").whole
        return combined(self.program("gradient").whole, self.program("add").whole)

    def phases(self) -> dict[str, float]:
        """Predicted seconds of a step's phases on one device, if every sequence has its maximum length.

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
    """(kind, amount of one run) of a launch; `seen`: share of the KV cache that attention reads."""
    instruction, moved = launch.instruction, float(launch.bytes)
    function = _function(launch)
    if function in (PLANNED, "causal_attention", "causal_gradients", "cached_attention"):
        rate, flops, moved = _attention(function, launch, seen)
        return "attention", _amount(moved, flops, rate)
    if function in ("matmul", "dense_matmul"):
        rate, flops = _product(function, launch)
        return KINDS[rate], _amount(moved, flops, rate)
    if function is not None:
        return "quantisers" if "quantize" in function else "other kernels", _amount(moved)
    if launch.dots:
        dtype = max(launch.dots, key=lambda dot: dot[1])[0]
        flops = sum(dot[1] for dot in launch.dots)
        return KINDS[DOTS[dtype]], _amount(moved, flops, DOTS[dtype])
    turned = any(shape.dtype == "f8e4m3fn" and len(shape.axes) == 2 for shape in instruction.results)
    return "turned codes" if turned else "others by XLA", _amount(moved)


def _function(launch: Launch) -> str | None:
    """The function of `pallas_kernels` that a kernel is, "" for another kernel, `PLANNED` for cuDNN's
    attention; None: a launch of XLA's own.
    """
    target = launch.instruction.target
    if target is None or not target.startswith("mosaic_gpu"):
        return PLANNED if target == PLANNED else None
    found = KERNELS.findall(launch.instruction.source)
    return str(found[-1]) if found else ""


def _amount(moved: float, flops: float = 0.0, rate: str = "bf16") -> Amount:
    seconds = max(moved / RATES["memory"][0], flops / RATES[rate][0], SHORTEST_S)
    return Amount(1, moved, flops, seconds)


def _product(function: str, launch: Launch) -> tuple[str, float]:
    """(name of the rate, FLOPs) of a product by one of `pallas_kernels`."""
    left, right = launch.operands[:2]
    flops = 2.0 * left.axes[0] * right.axes[0] * left.axes[1]
    if function == "dense_matmul":
        return "bf16", flops
    if launch.operands[3].size >= right.size // 128:  # one scale for each row of B and block of K
        return "wgrad", flops
    return "wgrad_block" if launch.instruction.results[0].dtype == "f32" else "fprop", flops


def _attention(function: str, launch: Launch, seen: float) -> tuple[str, float, float]:
    """(name of the rate, FLOPs, bytes) of attention: of whole rows, or of new tokens against a cache."""
    queries, keys = launch.operands[:2]
    if function == "cached_attention" or queries.axes[1] != keys.axes[1]:
        length = max(keys.axes[1:3])  # [B, K, S, H], or cuDNN's [B K, S, 1, H]
        return "attention", 4.0 * queries.size * length * seen, launch.bytes - 2 * keys.bytes * (1 - seen)
    results = len(launch.instruction.results)
    products = ATTENTION[function, results]
    rate = "attention" if products == 2 else "attention_backward"
    return rate, float(products * queries.size * queries.axes[1]), float(launch.bytes)


@functools.cache
def _register_attention() -> None:
    """Registers a handler for the placeholder of cuDNN's attention.

    XLA compiles a call only if its target is registered.  The call is never executed, so any handler will do.
    """
    try:
        from jax_cuda13_plugin import _prng
    except ImportError as error:
        raise UserError(
            f"--count: no CUDA plugin of JAX: {error}. Expected jax-cuda13-plugin and jax-cuda13-pjrt of jax "
            f"{jax.__version__} in this environment (the extra 'aot'); they need no GPU."
        ) from error
    jax.ffi.register_ffi_target(PLANNED, next(iter(_prng.registrations().values())), platform="CUDA")
