"""Memory of one device in each phase of a run: the bytes held, and the bytes that a program adds.

    rollout    weights and cache of the embedded engine, prompts being inserted, the larger of prefill and
               decode
    scoring    weights without gradient, temporaries of the program of the log-probabilities (if the algorithm
               needs them)
    draft      temporaries of the update of a draft head (if there is one)
    gradient   the gradient and, with several microbatches, their sum; activations, gathered weights, a chunk
               of logits
    update     gradient, old and new state in one place, the largest master once more
    sync       the engine's next weights beside its present ones (if they are a copy)

Masters, moments, published codes, the engine's weights and its idle cache are held in every phase.  Only a
vLLM that sleeps (`rollout.engine.sleep`) frees memory in between; it holds its share only during the rollout.
Arrays are counted exactly, from the shardings that the run uses (`AbstractRun`).  Temporaries are those of
`planning.liveness`, traced at two small depths and extrapolated, since beyond the first layers each layer
adds the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from jetrl_jax.config.load import override_config
from jetrl_jax.config.precision import fp8_choices
from jetrl_jax.config.rollout import RolloutSection
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.devices.gpu_memory import sleeps
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.sharded import TENSOR
from jetrl_jax.planning.abstract_run import AbstractRun, on_one_device
from jetrl_jax.planning.liveness import Value, peak
from jetrl_jax.precision.parameters import named_params

DEPTHS = (2, 4)  # numbers of layers at which programs are traced
CODES, WEIGHTS, LOGITS, VOCABULARY, ACTIVATIONS = (
    "FP8 codes gathered",
    "other weights gathered",
    "logits of a chunk",
    "head and embedding, whole",
    "activations",
)
LENGTH_STEP = 128  # in tokens, between the completion lengths tried


@dataclass(frozen=True)
class Phase:
    """A phase of a run; bytes: item -> bytes on one device, in the order of the table."""

    name: str
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes on one device."""
        return sum(self.bytes.values())


class MemoryPlan:
    """The memory plan of a config: the phases of a step, and the largest sizes that fit.

    Args:
      config, sizes: the run and its model.
      device_bytes: memory of a device, of which vLLM takes a share.

    Attributes:
      run: the whole model's abstract run.
      phases: in the order of a step.
    """

    def __init__(self, config: RunConfig, sizes: ModelConfig, device_bytes: int) -> None:
        self.config = config
        self.sizes = sizes
        self.device_bytes = device_bytes
        self.run = AbstractRun(config, sizes)
        self.shallow = shallow_runs(config, sizes)
        self._rollout: dict[RolloutSection, dict[str, int]] = {}  # a cache, as a batch does not change them
        self.phases = self._phases(self.run, self.shallow)

    @property
    def fullest(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.total)

    def gradient_temporaries(self, remat: str) -> int:
        """Bytes of the gradient's temporaries with another `batch.remat`."""
        runs = shallow_runs(override_config(self.config, [f"batch.remat={remat}"]), self.sizes)
        return sum(temporaries(runs, self.sizes.num_layers, "gradient").values())

    def largest_microbatch(self, budget: int) -> int:
        """The largest `batch.microbatch_tokens` that fits into `budget` bytes; 0 if not even one row fits."""
        rows = _largest(
            lambda rows: self._fits([f"batch.microbatch_tokens={rows * self.config.row_tokens}"], budget), 1
        )
        return rows * self.config.row_tokens

    def longest_completion(self, budget: int) -> int:
        """The longest `rollout.max_completion_tokens` that fits; 0 if none does.

        Each device has one row in a microbatch, and the engine keeps its slots.
        """
        prompt = self.config.rollout.max_prompt_tokens
        most = self.sizes.max_position_embeddings - prompt

        def fits(steps: int) -> bool:
            length = steps * LENGTH_STEP
            row = [
                "batch.row_tokens=null",
                "algorithm.overlong_buffer_tokens=0",
                f"batch.microbatch_tokens={prompt + length}",
            ]
            return length <= most and self._fits([f"rollout.max_completion_tokens={length}", *row], budget)

        return LENGTH_STEP * _largest(fits, max(self.config.rollout.max_completion_tokens // LENGTH_STEP, 1))

    def most_slots(self, budget: int) -> int:
        """The largest `rollout.engine.slots` that fits, in the embedded engine; 0 if not even one does."""
        most = self.config.rollout.prompts_per_step * self.config.rollout.group_size
        return min(
            most,
            _largest(
                lambda slots: slots <= most and self._fits([f"rollout.engine.slots={slots}"], budget), 1
            ),
        )

    def _fits(self, changes: list[str], budget: int) -> bool:
        config = override_config(self.config, changes)
        run = (
            AbstractRun(config, self.sizes)
            if config.rollout != self.config.rollout
            else self.run.with_config(config)
        )
        return all(phase.total <= budget for phase in self._phases(run, shallow_runs(config, self.sizes)))

    def _phases(self, run: AbstractRun, shallow: tuple[AbstractRun, ...]) -> list[Phase]:
        section = run.config.rollout
        if section not in self._rollout:
            self._rollout[section] = _rollout(run, shallow)
        return phases(run, shallow, self.device_bytes, self._rollout[section])


def shallow_runs(config: RunConfig, sizes: ModelConfig) -> tuple[AbstractRun, ...]:
    """Runs of the model at `DEPTHS`; only the run itself if it is shallow or names single layers."""
    if sizes.num_layers <= DEPTHS[-1] or fp8_choices(config.precision).overrides:
        return (AbstractRun(config, sizes),)
    return tuple(AbstractRun(config, dataclasses.replace(sizes, num_layers=depth)) for depth in DEPTHS)


def temporaries(runs: tuple[AbstractRun, ...], layers: int, program: str) -> dict[str, int]:
    """Bytes of each kind at a program's fullest point, extrapolated from `runs` to `layers` layers."""
    found = [
        _kinds(
            peak(run.trace(program).jaxpr).live,
            {run.sizes.vocab_size, run.sizes.vocab_size // run.config.sharding.tensor},
        )
        for run in runs
    ]
    if len(found) == 1:
        return found[0]
    (shallow, deep) = found
    (first, second) = (run.sizes.num_layers for run in runs)
    drawn = {
        kind: deep[kind] + (deep[kind] - shallow[kind]) * (layers - second) // (second - first)
        for kind in deep
    }
    return {kind: max(size, 0) for kind, size in drawn.items()}


def phases(
    run: AbstractRun, shallow: tuple[AbstractRun, ...], device_bytes: int, rollout: Mapping[str, int]
) -> list[Phase]:
    """The phases of a step, in order; `rollout`: the bytes that the rollout adds."""
    state, layers = run.state, run.sizes.num_layers
    held = {"FP32 masters": on_one_device(state.params), "moments": on_one_device(state.opt_state)}
    held |= {"published codes": on_one_device(state.published)}
    copied = not run.plan.adapted  # else the published weights themselves, and their base, are scored
    if run.drafter is not None:
        held["draft head"] = on_one_device((run.drafter.state, run.drafter.moments))
    if run.algorithm.needs_reference and copied:
        held["reference"] = on_one_device(run.frozen)
    engine = _engine(run, device_bytes)
    awake = held | engine
    vllm = run.config.shared_vllm
    held |= {} if vllm is not None and sleeps(vllm, on_gpu=True) else engine
    copy = held.get("engine's weights", 0)

    def used(program: str) -> dict[str, int]:
        return temporaries(shallow, layers, program)

    found = [Phase("rollout", awake | dict(rollout))]
    if run.algorithm.needs_old or run.algorithm.needs_reference:
        own = (
            {"weights without gradient": on_one_device(run.frozen)}
            if run.algorithm.needs_old and copied
            else {}
        )
        found.append(Phase("scoring", held | own | used("logprobs")))
    if run.drafter is not None:
        found.append(Phase("draft", held | used("draft")))
    gradient = {"gradient": held["FP32 masters"]}
    several = {"gradients' sum": gradients_apart(run)} if run.microbatches > 1 else {}
    found.append(Phase("gradient", held | gradient | several | used("gradient")))
    found.append(Phase("update", held | gradient | {"temporaries": largest_master(run)}))
    if copy:
        found.append(Phase("sync", held | {"engine's next weights": copy}))
    return found


def _engine(run: AbstractRun, device_bytes: int) -> dict[str, int]:
    """The bytes that a rollout engine holds while it is awake."""
    if run.engine is None:
        vllm = run.config.shared_vllm
        return {} if vllm is None else {"vLLM": int(vllm.gpu_memory_utilization * device_bytes)}
    split = run.layout is not None and any(axis is not None for axis in run.layout.axes.values())
    # without a split, the engine uses the published weights themselves
    weights = {"engine's weights": on_one_device(run.engine_weights())} if split else {}
    return weights | {"KV cache": on_one_device(run.slots())}


def _rollout(run: AbstractRun, shallow: tuple[AbstractRun, ...]) -> dict[str, int]:
    """The bytes that a rollout adds: prefilled prompts, a half-length cache while it grows, temporaries."""
    if run.engine is None:
        return {}
    shapes, empty = run.engine.shapes, run.engine.programs.abstract_state
    prompts = (
        on_one_device(empty(shapes.prefill_rows, shapes.prompt_buckets[-1]))
        + 4 * shapes.prefill_rows * run.sizes.vocab_size
    )
    before = shapes.cache_buckets[-2:-1]
    smaller = on_one_device(empty(shapes.batch_sizes[-1], before[0])) if before else 0
    temporary = max(
        sum(temporaries(shallow, run.sizes.num_layers, program).values()) for program in ("prefill", "decode")
    )
    return {"prefilled prompts": prompts, "cache that grows": smaller, "temporaries": temporary}


def gradients_apart(run: AbstractRun) -> int:
    """Bytes of the gradients that stand beside the sum that they are added to."""
    masters = named_params(run.state.params)
    within = run.plan.adds if run.programs.adds_in_kernels else lambda path: False
    return sum(on_one_device(value) for path, value in masters if not within(path))


def largest_master(run: AbstractRun) -> int:
    """Bytes of the largest shard of a master on a device."""
    return max(on_one_device(leaf) for leaf in jax.tree.leaves(run.state.params))


def _kinds(live: tuple[Value, ...], vocabulary: set[int]) -> dict[str, int]:
    """Bytes of live values, by kind; `vocabulary`: its size, and the size of a device's part of it."""
    sizes = dict.fromkeys((ACTIVATIONS, CODES, WEIGHTS, VOCABULARY, LOGITS), 0)
    for value in live:
        gathered = (
            value.maker is not None and value.maker.name == "all_gather" and TENSOR not in value.maker.axes
        )
        if value.shape[-1:] and value.shape[-1] in vocabulary:
            kind = LOGITS
        elif vocabulary & set(value.shape):
            kind = VOCABULARY
        elif gathered:
            kind = CODES if value.dtype.startswith("float8") else WEIGHTS
        else:
            kind = ACTIVATIONS
        sizes[kind] += value.size
    return sizes


def _largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest number that fits, found by doubling from `start`; 0 if 1 does not fit.

    Every number smaller than a fitting one must fit.
    """
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
