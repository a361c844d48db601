"""One GPU for trainer and vLLM, without a GPU: which variables JAX gets, when, which of the user's are
refused, who sleeps.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from jetrl_jax.config.load import load_config
from jetrl_jax.config.rollout import InProcessVllmSection
from jetrl_jax.devices import gpu_memory
from jetrl_jax.devices.gpu_memory import check_shared_gpu, share_gpu, sleeps
from jetrl_jax.errors import UserError
from jetrl_jax.runs.engines import engine_settings

ASYNC = {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
FRACTION, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


def shared(
    monkeypatch: pytest.MonkeyPatch, started: bool, before: dict[str, str], *changes: str
) -> dict[str, str]:
    """The environment after `share_gpu` of a config."""
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: started)
    monkeypatch.setattr(os, "environ", dict(before))
    share_gpu(load_config(None, list(changes)))
    return dict(os.environ)


VLLM = ("rollout.engine=vllm", "precision.preset=bf16")


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ({}, VLLM, ASYNC),
        ({}, (*VLLM, "rollout.engine=vllm_server", "rollout.engine.sleep=true"), ASYNC),
        (
            {},
            (*VLLM, "rollout.engine.sleep=false", "rollout.engine.gpu_memory_utilization=0.3"),
            {FRACTION: "0.600"},
        ),
        ({OLD: "0.2"}, (*VLLM, "rollout.engine.sleep=false"), {OLD: "0.2"}),
        ({FRACTION: "0.2"}, (*VLLM, "rollout.engine.sleep=false"), {FRACTION: "0.2"}),
        (
            {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
            VLLM,
            ASYNC | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
        ),
        ({}, (), {}),
        ({}, (*VLLM, "rollout.engine={kind: vllm_external, url: 'http://a:1'}"), {}),
    ],
)
def test_share_gpu_sets_what_the_user_has_not(
    before: Any, changes: Any, after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared(monkeypatch, False, before, *changes) == after


@pytest.mark.parametrize(
    ("sleep", "options"),
    [("true", {"allocator": "cuda_async", "preallocate": False}), ("false", {"memory_fraction": 0.5})],
)
def test_jax_reads_what_share_gpu_sets(
    sleep: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By JAX's own function, which makes the GPU client's options of the environment."""
    from jaxlib import xla_client

    shared(
        monkeypatch,
        False,
        {},
        *VLLM,
        f"rollout.engine.sleep={sleep}",
        "rollout.engine.gpu_memory_utilization=0.4",
    )
    assert xla_client.generate_pjrt_gpu_plugin_options().items() >= options.items()


def test_share_gpu_promises_nothing_once_jax_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared(monkeypatch, True, {}, *VLLM) == {}


@pytest.mark.parametrize("sleep", [None, True, False])
def test_what_share_gpu_sets_is_what_the_check_accepts(sleep: bool | None) -> None:
    section = InProcessVllmSection(sleep=sleep, gpu_memory_utilization=0.35)
    check_shared_gpu(section, gpu_memory.variables(section))


@pytest.mark.parametrize(
    ("sleep", "environment", "got"),
    [
        (None, {}, "none of its variables"),
        (True, {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}, "ALLOCATOR=cuda_async"),
        (True, ASYNC | {"XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"}, "ALLOCATOR=bfc, .*PREALLOCATE=false"),
        (False, {}, "none of its variables"),
        (False, {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}, "ALLOCATOR=cuda_async"),
        (False, {FRACTION: "0.7"}, "FRACTION=0.7"),
        (False, {OLD: "0.75"}, "FRACTION=0.75"),
    ],
)
def test_environments_that_leave_vllm_no_room_are_one_message(
    sleep: bool | None, environment: dict[str, str], got: str
) -> None:
    section = InProcessVllmSection(sleep=sleep, gpu_memory_utilization=0.4)
    needed = (
        f"{FRACTION}=0.500"
        if sleep is False
        else " ".join(f"{name}={value}" for name, value in ASYNC.items())
    )
    with pytest.raises(UserError, match=f"got .*{got} in the environment, expected {needed}"):
        check_shared_gpu(section, environment)


@pytest.mark.parametrize(
    ("sleep", "environment"),
    [(None, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}), (False, {OLD: "0.6"}), (False, ASYNC)],
)
def test_other_environments_that_leave_room_are_taken(
    sleep: bool | None, environment: dict[str, str]
) -> None:
    check_shared_gpu(InProcessVllmSection(sleep=sleep, gpu_memory_utilization=0.4), environment)


def test_vllm_sleeps_on_gpus_alone() -> None:
    assert sleeps(InProcessVllmSection(), True) and not sleeps(InProcessVllmSection(), False)
    assert sleeps(InProcessVllmSection(sleep=True), True) and not sleeps(
        InProcessVllmSection(sleep=False), True
    )
    with pytest.raises(
        UserError, match=r"rollout\.engine\.sleep: got true on a CPU, .*, expected false, or null"
    ):
        sleeps(InProcessVllmSection(sleep=True), False)


@pytest.mark.parametrize(
    ("changes", "on_gpu", "expected"),
    [
        ((), True, True),
        ((), False, False),
        (("rollout.engine={kind: vllm_external, url: 'http://a:1'}",), True, False),
        (("rollout.engine.sleep=false",), True, False),
    ],
)
def test_the_engine_is_told_whether_it_will_sleep(
    changes: tuple[str, ...], on_gpu: bool, expected: bool
) -> None:
    assert engine_settings(load_config(None, [*VLLM, *changes]), on_gpu).sleep is expected


def test_power_of_two_scales_are_refused_where_vllm_makes_others() -> None:
    config = load_config(None, [*VLLM, "precision.preset=fp8_unified", "precision.scale_format=power_of_two"])
    assert engine_settings(config, on_gpu=False).fp8.scale_format == "power_of_two"
    with pytest.raises(UserError, match=r"precision\.scale_format: got 'power_of_two' with vLLM on a GPU"):
        engine_settings(config, on_gpu=True)
