"""Every command of this repository that needs a GPU, in the order of how much a first run learns from it.

``make gpu`` runs them all, one call on a machine without network a choice of them: docs/gpu_machine.md.  A
stage is one command in a process of its own with a limit of time.  Only the standard library is imported
here: such a machine lacks some packages until those packed for it are on the path.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

BENCHMARKS = "tests/benchmarks"
LAYERS = ("kv", "o", "gate", "down")
"""Those of `pallas_kernels.bench`, whose import takes JAX."""


THEN = "--then"
"""In a dry form: stands between the words of a command and those that make it small enough for a CPU."""


def placed(word: str, out: Path, scratch: Path) -> str:
    """`word` with its directories; other braces stay."""
    return word.replace("{out}", str(out)).replace("{scratch}", str(scratch))


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command: the words behind `python`, with {out} for the directory of results and {scratch} for that
    of large files.

    limit_s: at most so long, which is more than it should take.
    result: the JSON that it writes; changes: a JSON file of the repository that it rewrites, kept with the
      record;
    directory: what it fills, emptied before it starts; of it the metrics are kept.
    expects: what its output must match; refuses: what it must not.
    group: neighbours of one group run side by side: they wait for compilers, not for the GPU.
    packages: the packed folders that it wants on the path beside the project's own: "vllm", "triton".
    dry: words behind the command in its dry form, the last of an option counts.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    result: str | None = None
    changes: str | None = None
    directory: str | None = None
    expects: str = ""
    refuses: str | None = None
    group: str = ""
    packages: tuple[str, ...] = ()
    dry: tuple[str, ...] = ()

    def words(self, out: Path, scratch: Path) -> list[str]:
        """The words behind `python`, with their directories."""
        return [placed(word, out, scratch) for word in self.command]


@dataclasses.dataclass(frozen=True)
class Call:
    """What fits into one command of some minutes: its seconds, and {stage: limit of time in it}."""

    seconds: float
    limits_s: dict[str, float]


PROCESSES = max(1, min(6, (os.cpu_count() or 1) // 2))
"""Of each group of tests; two groups run side by side."""
GEMM_TESTS = tuple(f"tests/kernels/test_gemm{part}.py" for part in ("", "_mosaic", "_triton"))
SKIPPED = r"\b\d+ skipped"
MISMATCH = r"\| \S+-exact \|[^\n]*\| (?!0 \|)\S+ \|(?:\n|$)"
"""In `train_flows.table`: an exact flow whose last cell, the largest difference of a logprob, is not 0."""


def _sets(**values: str) -> tuple[str, ...]:
    """`--set` for each field, "__" for a dot."""
    return tuple(
        word for name, value in values.items() for word in ("--set", f"{name.replace('__', '.')}={value}")
    )


ONCE = ("--stretches", "1", "--steps", "5", "--left-out", "1", *_sets(warm_start__steps="1"))
# One size of every program, so that a minute of compiling is enough.
SMALL = (
    *("--stretches", "1", "--steps", "3", "--left-out", "1"),
    *_sets(
        warm_start__steps="2",
        warm_start__batch_size="32",
        task__options="{length: 13}",
        eval__prompts="8",
        eval__samples="1",
    ),
    *_sets(rollout__prompts_per_step="8", rollout__engine__slots="16", rollout__engine__prefill_rows="8"),
    *_sets(
        rollout__max_prompt_tokens="16", rollout__max_completion_tokens="48", batch__microbatch_tokens="4096"
    ),
)
# The config's own training shapes; short prompts, so that the engine compiles two sizes of prefill and not
# five.
FAST = (
    *("--stretches", "1", "--steps", "5", "--left-out", "2"),
    *_sets(warm_start__steps="2", task__options="{length: 13}", eval__prompts="8", eval__samples="1"),
    *_sets(rollout__max_prompt_tokens="16", rollout__max_completion_tokens="240"),
)
# The same run on a CPU in seconds: narrow layers, few rows.
NARROW = (
    *("--steps", "2", "--left-out", "1"),
    *_sets(
        model__num_layers="1",
        model__hidden_size="128",
        model__intermediate_size="128",
        model__num_heads="1",
        model__num_kv_heads="1",
    ),
    *_sets(
        warm_start__batch_size="4",
        rollout__prompts_per_step="2",
        rollout__group_size="2",
        rollout__engine__slots="4",
    ),
    *_sets(
        rollout__engine__prefill_rows="4",
        rollout__max_completion_tokens="16",
        eval__prompts="2",
        batch__microbatch_tokens="256",
    ),
)
VLLM_RUN = ("--config", "configs/tiny_vllm_cpu.yaml", "--set", "run.directory={scratch}/vllm")


def _tests(
    name: str,
    *paths: str,
    limit_s: float = 400,
    processes: int = PROCESSES,
    group: str = "",
    refuses: str | None = None,
) -> Stage:
    command = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-n", str(processes), *paths)
    return Stage(
        name,
        command,
        limit_s,
        expects=r"\b[1-9]\d* passed",
        refuses=refuses,
        group=group,
        packages=("triton", "vllm"),
    )


def _bench(name: str, what: str, limit_s: float, *words: str) -> Stage:
    rivals = {"gemm": "kernel_rivals.py", "decode": "kernel_rivals.py", "layer": "kernel_layer.py"}.get(what)
    command = ("-m", "pallas_kernels.bench", what, *words, "--out", f"{{out}}/{name}.json")
    command += ("--rivals", f"{BENCHMARKS}/{rivals}") if rivals else ()
    # Without jax_triton on the path: with it vLLM's Triton kernel would be timed in every table, half as long
    # again.
    return Stage(
        name,
        command,
        limit_s,
        f"{{out}}/{name}.json",
        packages=("vllm",) if what in ("gemm", "decode") else (),
    )


def _gemm(layer: str, rows: int) -> Stage:
    return _bench(f"gemm-{layer}-{rows}", "gemm", 240, "--layers", layer, "--rows", str(rows))


def _flows(name: str, limit_s: float, *words: str, group: str = "") -> Stage:
    command = (f"{BENCHMARKS}/train_flows.py", "--out", f"{{scratch}}/{name}", *words)
    result = f"{{scratch}}/{name}/train_flows.json"
    return Stage(name, command, limit_s, result, directory=name, refuses=MISMATCH, group=group, dry=NARROW)


def _gap(name: str, limit_s: float, *words: str, group: str = "") -> Stage:
    return Stage(name, (f"{BENCHMARKS}/vllm_gap.py", *words), limit_s, group=group, packages=("vllm",))


STAGES = (
    _tests("tests-gemm", *GEMM_TESTS, group="tests"),
    _tests("tests-quantize", "tests/kernels", *(f"--ignore={path}" for path in GEMM_TESTS), group="tests"),
    _tests(
        "tests-attention", "tests/parity/test_flash_attention.py", processes=0, group="tests", refuses=SKIPPED
    ),
    _bench("layer-8192", "layer", 300, "--rows", "8192"),
    _bench("attention-8192", "attention", 240, "--rows", "8192"),
    _gemm("gate", 8192),
    _bench("quantize-o-16384", "quantize", 240, "--layers", "o", "--rows", "16384"),
    _bench("decode-o", "decode", 300, "--layers", "o"),
    _bench("linear-gate", "linear", 240, "--layers", "gate", "--rows", "8192"),
    Stage(
        "contract", ("-m", "jetrl_jax", "check-engine", *VLLM_RUN), 300, group="engines", packages=("vllm",)
    ),
    _gap(
        "vllm-gap",
        300,
        "--architectures",
        "qwen3",
        "--seeds",
        "0",
        "--requests",
        "24",
        "--vllm-operations",
        group="engines",
    ),
    _flows("exact-fp8-small", 400, "--flows", "fp8_unified-exact", *SMALL, group="engines"),
    _flows("exact-bf16-small", 400, "--flows", "bf16-exact", *SMALL, group="engines"),
    _flows("train-short", 540, "--flows", "fp8_unified-fast", "bf16-fast", *FAST),
    _tests("vllm-tests", "tests/parity/test_vllm_gpu.py", processes=0, limit_s=540, refuses=SKIPPED),
    _flows("exact-fp8", 900, "--flows", "fp8_unified-exact", "fp8_forward-exact", "fp8_unified-fast", *ONCE),
    _flows("exact-bf16", 900, "--flows", "bf16-exact", "fp16-exact", "bf16-fast", *ONCE),
    _flows("train", 900, "--stretches", "2"),
    *(
        _gap(
            f"vllm-gap-{architecture}-{seed}",
            540,
            "--architectures",
            architecture,
            "--seeds",
            seed,
            "--vllm-operations",
            "--compiled",
        )
        for architecture in ("qwen3", "qwen2")
        for seed in "012"
    ),
    _gap("vllm-gap-context", 540, "--seeds", "0", "--context", "2000"),
    Stage("vllm-train", ("-m", "jetrl_jax.train", *VLLM_RUN), 900, directory="vllm", packages=("vllm",)),
    Stage(
        "vllm-parity",
        ("-m", "jetrl_jax", "parity", "--run", "{scratch}/vllm", "--json", "{out}/parity.json"),
        *(300, "{out}/parity.json"),
        packages=("vllm",),
    ),
    *(_gemm(layer, rows) for rows in (8192, 16384) for layer in LAYERS if (layer, rows) != ("gate", 8192)),
    *(_bench(f"decode-{layer}", "decode", 300, "--layers", layer) for layer in LAYERS if layer != "o"),
    _bench("quantize-o-8192", "quantize", 240, "--layers", "o", "--rows", "8192"),
    *(
        _bench(f"quantize-down-{rows}", "quantize", 240, "--layers", "down", "--rows", str(rows))
        for rows in (8192, 16384)
    ),
    *(_bench(f"linear-{rows}", "linear", 300, "--rows", str(rows)) for rows in (8192, 16384)),
    _bench("layer-16384", "layer", 300, "--rows", "16384"),
    *(
        Stage(
            f"tune-{layer}",
            ("-m", "pallas_kernels.tune", "--layers", layer),
            900,
            changes="pallas_kernels/gemm/tuned_h100.json",
        )
        for layer in LAYERS
    ),
)
"""All stages.  The benchmarks of kernels are one size each: what a table of all sizes takes is longer than
a call may be.
"""

CALLS = {
    # The kernels: their tests side by side, then figures with the GPU to themselves.
    "1": Call(
        385,
        {"tests-gemm": 150, "tests-quantize": 150, "tests-attention": 110}
        | {
            "layer-8192": 130,
            "gemm-gate-8192": 100,
            "quantize-o-16384": 60,
            "decode-o": 75,
            "attention-8192": 60,
            "linear-gate": 60,
        },
    ),
    # Exactness and the engine side by side, then training in FP8 and in BF16 with the GPU to itself.
    "2": Call(
        370,
        {
            "contract": 120,
            "vllm-gap": 205,
            "exact-fp8-small": 205,
            "exact-bf16-small": 205,
            "train-short": 400,
        },
    ),
}
"""Two calls of about seven minutes, for a machine that is lent for a quarter of an hour."""
