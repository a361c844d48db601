"""Packing for a GPU machine without network: what is in the archives, and what CI's copy of such a machine
has; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import re
import struct
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.benchmarks import gpu, gpu_pack, gpu_vllm

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def constraints(name: str) -> dict[str, str]:
    text = (ROOT / ".ci" / f"constraints-{name}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^(\S+?)==(\S+)$", text, flags=re.MULTILINE))


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "Some_Thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("some_thing/__init__.py", "VALUE = 7\n")
        file.writestr(
            "some_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-thing\nVersion: 1.0\n"
        )
    return path


def test_the_packed_folder_has_the_packages_and_the_entry_point_of_the_project(
    tmp_path: Path, wheel: Path
) -> None:
    (tmp_path / "packed").mkdir()
    gpu_pack.pack([wheel], tmp_path / "packed" / "site.txz", PYPROJECT)
    with tarfile.open(tmp_path / "packed" / "site.txz") as archive:
        assert sorted(member.name for member in archive if member.isfile()) == [
            *(f"jetrl_jax-0.1.0.dist-info/{name}" for name in ("METADATA", "RECORD", "entry_points.txt")),
            *("some_thing-1.0.dist-info/METADATA", "some_thing/__init__.py"),
        ]
    site = gpu.unpack(tmp_path / "packed", tmp_path / "there") / "site"
    found = {one.name: one for one in metadata.distributions(path=[str(site)])}
    assert found["some-thing"].version == "1.0"
    (entry,) = found["jetrl-jax"].entry_points
    assert (entry.group, entry.name, entry.value) == (
        "vllm.general_plugins",
        "jetrl",
        "bridge.vllm.worker.plugin:register",
    )
    assert importlib.util.find_spec(entry.module) is not None


def test_the_same_wheels_give_the_same_archive_and_it_is_unpacked_once(tmp_path: Path, wheel: Path) -> None:
    packed, there = tmp_path / "packed", tmp_path / "there"
    packed.mkdir()
    for name in ("a", "b"):
        gpu_pack.pack([wheel], packed / f"{name}.txz")
    assert (packed / "a.txz").read_bytes() == (packed / "b.txz").read_bytes()
    assert gpu.unpack(packed, there) == there
    (there / "a" / "some_thing" / "__init__.py").write_text("changed")
    gpu.unpack(packed, there)
    assert (there / "a" / "some_thing" / "__init__.py").read_text() == "changed"
    gpu_pack.pack([wheel], packed / "a.txz", PYPROJECT)  # another archive under the same name
    gpu.unpack(packed, there)
    assert (there / "a" / "some_thing" / "__init__.py").read_text() == "VALUE = 7\n"
    assert gpu.unpack(tmp_path / "nothing", there) is None


def test_wheels_that_are_there_are_not_asked_for_again(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pack.subprocess, "run", lambda *words, **options: None)
    assert gpu_pack.download("some-thing==1.0", wheel.parent) == wheel
    with pytest.raises(RuntimeError, match=r"no wheel: got nothing like some_thing-1\.1-\*\.whl"):
        gpu_pack.download("some-thing==1.1", wheel.parent)


def test_more_than_can_be_copied_is_an_error_with_every_size() -> None:
    sizes = {"site.txz": 2 << 20, "vllm.txz": 40 << 20}
    assert gpu_pack.check_size(3 << 20, sizes, 64) == "checkout 3.0 + site.txz 2.0 + vllm.txz 40.0 = 45.0 MiB"
    with pytest.raises(
        ValueError, match=r"too much to copy: got checkout 30\.0 .* = 72\.0 MiB, expected at most 64 MiB"
    ):
        gpu_pack.check_size(30 << 20, sizes, 64)


def test_the_checkout_leaves_room_for_vllm() -> None:
    """Its bundle has 38 MiB, the other packages 2."""
    assert 1 << 20 < gpu_pack.checkout_bytes(ROOT) < 20 << 20


def test_commands_are_those_of_the_runner(capsys: pytest.CaptureFixture[str]) -> None:
    for line in re.findall(r"python3 tests/benchmarks/gpu\.py (.*?) +#", gpu_pack.commands()):
        assert gpu.main([*line.split(), "--list"]) == 0
    assert "layer-8192" in capsys.readouterr().out


def test_every_dependency_is_on_the_machine_or_packed() -> None:
    there, packed = (
        constraints("py312-gpu"),
        gpu_pack.pins(gpu_pack.LACKING, gpu_pack.CONSTRAINTS.read_text(encoding="utf-8")),
    )
    needed = {
        re.match(r"[A-Za-z0-9._-]+", one).group().lower()
        for one in tomllib.loads(PYPROJECT)["project"]["dependencies"]
    }
    # what only reports need
    assert needed - set(there) - {pin.partition("==")[0] for pin in packed} == {"plotly", "jinja2"}
    assert not set(gpu_pack.LACKING) & set(there)  # so that the dry run has them from the packed folder only
    with pytest.raises(ValueError, match="no version: got none for nonesuch"):
        gpu_pack.pins(["nonesuch"], "a==1\n")


def test_ci_has_the_oldest_jax_that_the_gpu_machine_has_and_a_newer_one() -> None:
    (bound,) = re.findall(r'"jax>=([\d.]+),', PYPROJECT)
    versions = {
        name: tuple(map(int, constraints(name)["jax"].split("."))) for name in ("py311", "py312-gpu", "py312")
    }
    assert (
        versions["py311"]
        == tuple(map(int, bound.split(".")))
        < versions["py312-gpu"]
        == (0, 11, 2)
        < versions["py312"]
    )
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(f"make {target}\n" in ci for target in ("test", "gpu-call-dry", "test-py312"))


# ---------------------------------------------------------------------------------------------------------------- vLLM


def image(architecture: int, payload: bytes) -> bytes:
    return struct.pack("<HHIQIIHHI", 2, 0x101, 32, len(payload), 0, 0, 0, 0, architecture) + payload


def test_images_for_other_gpus_are_zeroed_and_nothing_else() -> None:
    images = image(80, b"old" * 8), image(90, b"new" * 8), image(100, b"next" * 4)
    body = b"".join(images)
    binary = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    data = b"head" * 4 + binary + bytes(8) + binary + b"tail"
    out, zeroed = gpu_vllm.zeroed_images(data, (16, len(data) - 20), gpu_vllm.keep_sm90)
    assert len(out) == len(data) and zeroed == 2 * (24 + 16)
    assert out == data.replace(b"old" * 8, bytes(24)).replace(b"next" * 4, bytes(16))


@pytest.mark.parametrize(
    ("payload", "kept"),
    [
        (b"FlashAttnFwdSm90 bfloat16_t", True),
        (b"FlashAttnFwdSm90 bfloat16_t float_e4m3", False),
        (b"FlashAttnFwdSm90 half_t", False),
        (b"FlashAttnFwdCombine half_t", True),
        (b"prepare_varlen", True),
        (b"prepare_varlen FlashAttnFwdSm90 half_t", False),
    ],
)
def test_attention_keeps_its_bf16_kernels(payload: bytes, kept: bool) -> None:
    assert gpu_vllm.keep_bf16_attention(90, payload) is kept


def test_deepgemm_is_looked_for_in_vllm_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="the rivals import torch")
    from tests.benchmarks import kernel_rivals

    there = {"vllm.third_party.deep_gemm": SimpleNamespace(fp8_gemm_nt=len)}

    def load(name: str) -> SimpleNamespace:
        if name in there:
            return there[name]
        raise ImportError(f"no {name} here")

    monkeypatch.setattr(kernel_rivals.importlib, "import_module", load)
    assert kernel_rivals.deepgemm_product() is len
    there.clear()
    assert kernel_rivals.deepgemm_product() is None
    assert (
        "DeepGEMM is not measured: deep_gemm: no deep_gemm here; vllm.third_party.deep_gemm: no vllm"
        in capsys.readouterr().out
    )


# ---------------------------------------------------------------------------------------------------------------- make


def test_make_gpu_asks_for_every_dependency(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("has_everything", ROOT / ".ci" / "has_everything.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOR_TESTS", ("pytest", "nonesuch"))
    assert module.missing() == ["nonesuch"]
