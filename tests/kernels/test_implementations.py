"""Which implementation runs: every platform and capability, pretended, and the words of every refusal."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fprop, implementations, quantize, resolve
from pallas_kernels.implementations import IMPLEMENTATIONS
from pallas_kernels.vllm_source import PARAMETERS, SOURCE

OFFERED = ("xla", "mosaic_gpu", "mosaic_interpret", "auto")


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    capability: str = "9.0",
    version: tuple[int, ...] = (0, 12, 0),
) -> None:
    """Makes JAX report one device of this kind."""
    device = types.SimpleNamespace(compute_capability=capability, device_kind="Pretended GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "__version_info__", version)


def test_auto_takes_the_kernel_on_hopper_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "gpu")
    choice = resolve("fprop", "auto", OFFERED)
    assert choice.name == "mosaic_gpu" and "9.0" in choice.reason
    assert resolve("fprop", "mosaic_gpu", OFFERED).name == "mosaic_gpu"


@pytest.mark.parametrize(
    ("platform", "capability", "problem"),
    [
        ("cpu", "", "the platform is 'cpu', expected 'gpu'"),
        ("tpu", "", "the platform is 'tpu', expected 'gpu'"),
        ("gpu", "8.0", "the compute capability of Pretended GPU is 8.0, expected 9.0"),
        ("gpu", "10.0", "the compute capability of Pretended GPU is 10.0, expected 9.0"),
    ],
)
def test_auto_falls_to_xla_with_the_reason_and_the_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, platform: str, capability: str, problem: str
) -> None:
    pretend(monkeypatch, platform, capability)
    choice = resolve("fprop", "auto", OFFERED)
    assert choice.name == "xla" and problem in choice.reason
    with pytest.raises(
        NotImplementedError, match=f"fprop: cannot run: got implementation='mosaic_gpu', but {problem}"
    ):
        resolve("fprop", "mosaic_gpu", OFFERED)


@pytest.mark.parametrize(
    ("platform", "name", "version"),
    [("cpu", "mosaic_interpret", (0, 11, 1)), ("gpu", "mosaic_gpu", (0, 10, 2))],
    ids=["interpreter", "gpu"],
)
def test_kernels_are_refused_on_an_old_jax(
    monkeypatch: pytest.MonkeyPatch, platform: str, name: str, version: tuple[int, ...]
) -> None:
    pretend(monkeypatch, platform, version=version)
    with pytest.raises(
        NotImplementedError, match=rf"quantize: .*'{name}', but JAX is .*expected 0.11.* or newer"
    ):
        resolve("quantize", name, OFFERED)
    assert resolve("quantize", "auto", OFFERED).name == "xla"


def test_interpreter_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "gpu")
    with pytest.raises(NotImplementedError, match="the platform is 'gpu', expected 'cpu'"):
        resolve("quantize", "mosaic_interpret", OFFERED)


def test_shape_problem_refuses_kernels_and_only_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "gpu")
    assert resolve("f", "auto", OFFERED, "it is empty").name == "xla"
    assert resolve("f", "xla", OFFERED, "it is empty").name == "xla"
    with pytest.raises(
        NotImplementedError, match="f: cannot run: got implementation='mosaic_gpu', but it is empty"
    ):
        resolve("f", "mosaic_gpu", OFFERED, "it is empty")


def test_triton_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NotImplementedError, match="f: cannot run: got implementation='triton', but the platform is 'cpu'"
    ):
        pretend(monkeypatch, "cpu")
        resolve("f", "triton", (*OFFERED, "triton"))
    pretend(monkeypatch, "gpu")
    monkeypatch.setattr(
        implementations.importlib.util, "find_spec", lambda name: None if name == "vllm" else name
    )
    with pytest.raises(NotImplementedError, match="'triton', but not installed: vllm"):
        resolve("f", "triton", (*OFFERED, "triton"))


@pytest.mark.parametrize(
    "text", ["", "def other_kernel(A, B):\n    pass\n", "def _w8a8_triton_block_scaled_mm(A, B):\n    pass\n"]
)
def test_triton_is_refused_where_vllm_has_another_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    pretend(monkeypatch, "gpu")
    for package in ("triton", "jax_triton", "vllm"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise AssertionError('imported')\n")
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "vllm" / SOURCE
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(
        NotImplementedError, match=rf"'triton', but find_kernel: not vLLM's kernel: got .* in {path}"
    ):
        resolve("f", "triton", (*OFFERED, "triton"))
    (tmp_path / "vllm" / "new.py").write_text(
        f"def _w8a8_triton_block_scaled_mm({', '.join(PARAMETERS)}):\n    pass\n"
    )
    monkeypatch.setattr("pallas_kernels.vllm_source.SOURCE", "new.py")
    assert resolve("f", "triton", (*OFFERED, "triton")).name == "triton"


def test_name_that_is_not_offered_is_an_error() -> None:
    with pytest.raises(ValueError, match="f: unknown name: got implementation='xla_fast', expected one of"):
        resolve("f", "xla_fast", OFFERED)
    assert set(OFFERED) < set(IMPLEMENTATIONS)


def test_gemm_on_auto_gives_the_bits_of_what_was_chosen() -> None:
    x, w = quantize(jnp.ones((4, 256)), (1, 128)), quantize(jnp.ones((128, 256)), (128, 128))
    chosen = resolve("fprop", "auto", OFFERED).name
    out = [np.asarray(fprop(x, w, implementation=name)) for name in ("auto", chosen)]
    np.testing.assert_array_equal(*out)
