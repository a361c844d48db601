"""The implementations of operations: their names, where they run, and why one cannot run.

    name              what it is                                           runs on
    xla               THE definition, plain XLA, row-invariant             every platform
    xla_fast          plain XLA, quicker on a CPU, last bits may differ    every platform
    mosaic_gpu        the Pallas kernel                                    Hopper GPU (compute capability 9.0)
    mosaic_interpret  the same kernel, interpreted: slow, finds races      CPU
    triton            vLLM's own kernel (GEMMs only), for comparison       Hopper, with vllm and jax_triton
    auto              mosaic_gpu where it can run, else xla                every platform

The Pallas kernels need JAX 0.11, and their interpreter 0.11.2. "triton" runs only if it is named. An
operation offers some of these names. `resolve` turns the caller's name into the implementation that runs,
with the reason, and never falls back silently. `auto` depends only on the platform and on shapes, never on a
measurement, so that a program makes the same choice on every start.
"""

from __future__ import annotations

import contextvars
import dataclasses
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from pallas_kernels.vllm_source import kernel_problem

IMPLEMENTATIONS = ("xla", "xla_fast", "mosaic_gpu", "mosaic_interpret", "triton", "auto")
"""All names of implementations."""
HOPPER = "9.0"
"""The compute capability of the Pallas kernels, which use wgmma; 8.x lacks it and 10.x dropped it."""
KERNEL_JAX, INTERPRETER_JAX = (0, 11), (0, 11, 2)
"""The first JAX that compiles these kernels, and that interprets them (seen: 0.10.2 and 0.11.1 do not)."""
_elsewhere = contextvars.ContextVar("elsewhere", default=False)


@contextmanager
def hopper_elsewhere() -> Iterator[None]:
    """Within the block programs are traced for an absent Hopper GPU, to compile them ahead of time."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def is_elsewhere() -> bool:
    """Whether this is within `hopper_elsewhere`."""
    return _elsewhere.get()


def on_gpu() -> bool:
    """Whether programs traced now are for a GPU; starts the backend, except within `hopper_elsewhere`."""
    return _elsewhere.get() or jax.default_backend() in ("gpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A chosen implementation and the reason.

    name: an implementation, never "auto".
    reason: one sentence, for logs.
    """

    name: str
    reason: str


def resolve(
    function: str, implementation: str, offered: tuple[str, ...], shape_problem: str | None = None
) -> Choice:
    """The implementation that a call of `function` runs on the default JAX backend.

    Args:
      function: name of the operation, for messages.
      implementation: the name that the caller gave.
      offered: the names that this operation has; they include "xla" and may include "auto".
      shape_problem: why the kernel cannot take these operands; None if it can.
    Returns:
      The choice. Starts the JAX backend unless `implementation` is an XLA one.
    Raises:
      ValueError: the name is not offered.
      NotImplementedError: the named kernel cannot run: platform, compute capability, JAX version or shape.
    """
    if implementation not in offered:
        raise ValueError(f"{function}: " + unknown_name(implementation, offered) + ".")
    if implementation == "auto":
        problem = shape_problem or gpu_problem()
        if problem is None:
            return Choice(
                "mosaic_gpu", f"auto: a GPU of compute capability {HOPPER} and operands that the kernel takes"
            )
        return Choice("xla", f"auto: mosaic_gpu cannot run: {problem}")
    if not implementation.startswith("xla"):
        problem = shape_problem or cannot_run(implementation)
        if problem is not None:
            raise NotImplementedError(
                f"{function}: cannot run: got implementation={implementation!r}, but {problem}. "
                "'auto' takes what can run and 'xla' runs everywhere."
            )
    return Choice(implementation, "asked for by name")


def cannot_run(implementation: str) -> str | None:
    """Why an implementation cannot run on the default backend, None if it can; may start the backend."""
    problems = {"mosaic_gpu": gpu_problem, "mosaic_interpret": interpreter_problem, "triton": triton_problem}
    return problems[implementation]() if implementation in problems else None


def unknown_name(implementation: str, offered: tuple[str, ...]) -> str:
    """The message for a name that an operation does not have, without the operation's name."""
    return f"unknown name: got implementation={implementation!r}, expected one of {offered}"


def gpu_problem() -> str | None:
    """Why the Pallas kernels cannot run on the default backend, None if they can; starts the backend."""
    return _hopper_problem() or kernel_jax_problem()


def kernel_jax_problem() -> str | None:
    """Why this JAX cannot compile the Pallas kernels; None if it can."""
    return _version_problem(KERNEL_JAX)


def triton_problem() -> str | None:
    """Why vLLM's Triton kernel cannot run on the default backend, None if it can; starts the backend."""
    return _hopper_problem() or packages_problem("triton", "jax_triton", "vllm") or kernel_problem()


def packages_problem(*packages: str) -> str | None:
    """A message naming those packages that are not installed, None if all are; imports none of them."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def _hopper_problem() -> str | None:
    if _elsewhere.get():
        return None
    platform = jax.default_backend()
    if platform not in ("gpu", "cuda"):
        return f"the platform is {platform!r}, expected 'gpu'"
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != HOPPER:
        return f"the compute capability of {device.device_kind} is {capability}, expected {HOPPER}"
    return None


def interpreter_problem() -> str | None:
    """Why the Pallas kernels cannot be interpreted here, None if they can; starts the backend."""
    if jax.default_backend() != "cpu":
        return (
            f"the platform is {jax.default_backend()!r}, expected 'cpu' (the interpreter needs it: "
            "JAX_PLATFORMS=cpu)"
        )
    return _version_problem(INTERPRETER_JAX)


def _version_problem(first: tuple[int, ...]) -> str | None:
    if jax.__version_info__ < first:
        return f"JAX is {jax.__version__}, expected {'.'.join(map(str, first))} or newer"
    return None
